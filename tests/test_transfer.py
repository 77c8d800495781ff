"""transfer.py: from the smallest scale to exactly the size asked for, and never less than the best so far."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import picture, random_weights
from stylize.errors import InputError, RunError
from stylize.events import Evaluated, Event, Notice, ScaleFinished, ScaleStarted, Snapshot
from stylize.nst import transfer as module
from stylize.nst.hooks import count_hooks
from stylize.nst.objective import Objective, measure_style
from stylize.nst.optimize import StopRule
from stylize.nst.transfer import (
    Painting,
    Style,
    fit,
    hand_over,
    plan_stops,
    resize,
    scale_sizes,
    target_size,
    transfer,
)
from stylize.nst.vgg import Vgg19, Weights
from stylize.settings import Settings

few = hypothesis_settings(max_examples=50, deadline=None)
sides = st.integers(1, 3000)

# Small enough for a network of two blocks and pictures of a few pixels.
SHALLOW = Settings(
    content_layers=("relu2_2",),
    style_layers=("relu1_1", "relu2_1"),
    style_layer_weights=None,
    tv_weight=0.1,
    scales=1,
    iterations=3,
    precision="fp32",
    device="cpu",
)
TWO_SCALES = SHALLOW.replace(scales=2, iterations=8)


def tiny_network() -> Vgg19:
    return Vgg19(random_weights(), SHALLOW.content_layers + SHALLOW.style_layers)


class Job:
    """A network, two pictures, and what was heard while one was painted in the manner of the other."""

    def __init__(self, settings: Settings = SHALLOW, *, height: int = 24, width: int = 32) -> None:
        self.settings = settings
        self.network = tiny_network()
        self.content = picture(height, width)
        self.style = Style(self.network, [picture(20, 28, seed=1)], settings)
        self.heard: list[Event] = []
        self.react: Callable[[Event], None] = lambda event: None

    def listen(self, event: Event) -> None:
        self.heard.append(event)
        self.react(event)

    def paint(self, **options: Any) -> Painting:
        return transfer(self.network, self.content, self.style, self.settings, listen=self.listen, **options)

    def heard_of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(event.width, event.height) for event in self.heard_of(ScaleStarted)]


# Sizes


@pytest.mark.parametrize(
    ("height", "width", "size", "expected"),
    [
        (24, 32, 32, (24, 32)),
        (33, 47, 40, (28, 40)),  # odd: 33/47 of 40 is 28.09
        (47, 33, 40, (40, 28)),
        (31, 31, 17, (17, 17)),
        (24, 32, 512, (24, 32)),  # case 12: never enlarged
        (24, 32, "full", (24, 32)),
        (20, 120, 60, (10, 60)),  # a panorama
    ],
)
def test_result_has_exactly_the_size_asked_for(
    height: int, width: int, size: Any, expected: tuple[int, int]
) -> None:
    """Cases 12, 15 and 16; with the style picture of yet another shape."""
    job = Job(SHALLOW.replace(size=size), height=height, width=width)
    painting = job.paint()
    assert tuple(painting.image.shape) == (1, 3, *expected)
    assert painting.image.dtype == torch.float32
    assert painting.image.device.type == "cpu"
    assert 0 <= painting.image.min() <= painting.image.max() <= 1


def test_enlarging_must_be_asked_for() -> None:
    job = Job(SHALLOW.replace(size=48, upscale=True))
    assert tuple(job.paint().image.shape) == (1, 3, 36, 48)


@few
@given(width=sides, height=sides, long_side=sides)
def test_fitting_keeps_the_proportions(width: int, height: int, long_side: int) -> None:
    found = fit(width, height, long_side)
    assert max(found) == long_side
    exact = min(width, height) * long_side / max(width, height)
    assert abs(min(found) - exact) <= 0.5 or (min(found) == 1 and exact < 1)
    assert (found[0] >= found[1]) == (width >= height) or found[0] == found[1]


@few
@given(width=sides, height=sides, size=st.integers(16, 3000))
def test_target_is_never_larger_than_the_content_unless_asked(width: int, height: int, size: int) -> None:
    plain = target_size(width, height, Settings(size=size))
    assert max(plain) == min(size, max(width, height))
    assert max(target_size(width, height, Settings(size=size, upscale=True))) == size
    assert target_size(width, height, Settings(size="full")) == (width, height)


@few
@given(
    height=st.integers(16, 400),
    width=st.integers(16, 400),
    scales=st.none() | st.integers(1, 6),
    minimum=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_scales_double_and_end_at_the_target(height: int, width: int, scales: int | None, minimum: int) -> None:
    settings = Settings(scales=scales, size="full")
    sizes = scale_sizes(torch.empty(1, 3, height, width), settings, minimum)
    assert sizes[-1] == (width, height)
    assert all(min(size) >= minimum for size in sizes)
    if scales is not None:
        assert len(sizes) <= scales
        smaller = min(width, height) / 2 ** len(sizes)
        assert len(sizes) == scales or smaller < minimum + 0.5  # one more would have been too small
    for coarse, fine in pairwise(sizes):
        for a, b in zip(coarse, fine, strict=True):
            assert abs(2 * a - b) <= 2  # as whole pixels allow


def test_automatic_scales_begin_small_enough_for_large_forms() -> None:
    content = torch.empty(1, 3, 768, 1024)
    sizes = scale_sizes(content, Settings(size=1024), 16)
    assert sizes[-1] == (1024, 768)
    assert module.SMALLEST_SCALE / math.sqrt(2) <= max(sizes[0]) <= module.SMALLEST_SCALE * math.sqrt(2)


@pytest.mark.parametrize(("width", "height", "numbers"), [(5000, 2, "512×1 px"), (3, 400, "3×400 px")])
def test_too_small_a_result_is_refused_by_its_numbers(width: int, height: int, numbers: str) -> None:
    """Case 14."""
    with pytest.raises(InputError, match=rf"{numbers}.*at least 16 px.*--size"):
        scale_sizes(torch.empty(1, 3, height, width), Settings(), 16)


def test_too_small_a_result_is_refused_before_anything_is_heard() -> None:
    job = Job(height=1, width=64)
    with pytest.raises(InputError, match="64×1 px"):
        job.paint()
    assert not job.heard


# Plans


@few
@given(total=st.integers(1, 2000), scales=st.integers(1, 7), quality=st.sampled_from(["draft", "good", "best"]))
def test_evaluations_asked_for_are_shared_out_exactly(total: int, scales: int, quality: Any) -> None:
    stops = plan_stops(scales, Settings(iterations=total, quality=quality), 0.0)
    counts = [stop.evaluations for stop in stops]
    assert len(counts) == scales
    assert min(counts) >= 1
    assert sum(counts) == max(total, scales)  # a scale without an evaluation would be none


@pytest.mark.parametrize("total", [1, 2, 3, 7, 40])
def test_as_many_evaluations_are_made_as_were_asked_for(total: int) -> None:
    job = Job(SHALLOW.replace(iterations=total))
    painting = job.paint()
    assert painting.evaluations == len(painting.history) == len(job.heard_of(Evaluated)) == total


@pytest.mark.parametrize("quality", ["draft", "good", "best"])
def test_quality_plans_fewer_evaluations_for_finer_scales(quality: Any) -> None:
    counts = [stop.evaluations for stop in plan_stops(4, Settings(quality=quality), 0.0)]
    assert counts == sorted(counts, reverse=True)
    assert min(counts) >= 1
    assert all(stop.deadline is None for stop in plan_stops(4, Settings(quality=quality), 0.0))


def test_better_quality_plans_more() -> None:
    def planned(quality: Any) -> list[StopRule]:
        return plan_stops(3, Settings(quality=quality), 0.0)

    for worse, better in (("draft", "good"), ("good", "best")):
        for one, other in zip(planned(worse), planned(better), strict=True):
            assert one.evaluations < other.evaluations
            assert one.min_decrease > other.min_decrease


@few
@given(scales=st.integers(1, 6), budget=st.floats(0.1, 1e5), started=st.floats(0, 1e6))
def test_time_is_shared_out_with_most_for_the_finest(scales: int, budget: float, started: float) -> None:
    stops = plan_stops(scales, Settings(time_budget_s=budget), started)
    ends = [started, *(stop.deadline for stop in stops if stop.deadline is not None)]
    assert ends[-1] == pytest.approx(started + budget, rel=1e-9)
    shares = [after - before for before, after in pairwise(ends)]
    assert shares == sorted(shares)


def test_time_budget_is_kept() -> None:
    job = Job(TWO_SCALES.replace(iterations=None, time_budget_s=0.4))
    before = time.perf_counter()
    painting = job.paint()
    assert 0.2 < time.perf_counter() - before < 5
    assert painting.evaluations > 2
    assert len(job.sizes) == 2


# From scale to scale


def smooth(height: int, width: int) -> Tensor:
    return picture(height, width).double()


def enlarged(image: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(image, (height, width), mode="bicubic", align_corners=False)


def test_full_detail_of_an_unchanged_picture_is_the_fine_content() -> None:
    coarse, fine = smooth(9, 12), picture(18, 24, seed=3).double()
    torch.testing.assert_close(hand_over(coarse, coarse, fine, 1.0), fine, rtol=0, atol=1e-12)


def test_without_detail_the_picture_is_only_enlarged() -> None:
    coarse, content, fine = smooth(9, 12), picture(9, 12, seed=2).double(), picture(18, 24, seed=3).double()
    assert torch.equal(hand_over(coarse, content, fine, 0.0), enlarged(coarse, 18, 24))


@few
@given(detail=st.floats(0, 1))
def test_detail_mixes_between_the_two(detail: float) -> None:
    coarse, content, fine = smooth(9, 12), picture(9, 12, seed=2).double(), picture(18, 24, seed=3).double()
    none, full = hand_over(coarse, content, fine, 0.0), hand_over(coarse, content, fine, 1.0)
    found = hand_over(coarse, content, fine, detail)
    torch.testing.assert_close(found, (1 - detail) * none + detail * full, rtol=0, atol=1e-12)


def test_what_was_painted_is_kept_by_the_hand_over() -> None:
    """Result − content is enlarged, and added to the fine content."""
    coarse, content, fine = smooth(9, 12), picture(9, 12, seed=2).double(), picture(18, 24, seed=3).double()
    expected = fine + enlarged(coarse - content, 18, 24)
    torch.testing.assert_close(hand_over(coarse, content, fine, 1.0), expected, rtol=0, atol=1e-12)


@few
@given(level=st.floats(0, 1), height=st.integers(1, 40), width=st.integers(1, 40))
def test_resizing_keeps_a_flat_colour(level: float, height: int, width: int) -> None:
    image = torch.full((1, 3, 13, 17), level, dtype=torch.float64)
    expected = torch.full((1, 3, height, width), level, dtype=torch.float64)
    torch.testing.assert_close(resize(image, (width, height)), expected, rtol=0, atol=1e-12)


def test_resizing_stays_in_range_and_is_exact_at_the_same_size() -> None:
    image = (torch.rand(1, 3, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    larger = resize(image, (40, 40))
    assert 0 <= larger.min() <= larger.max() <= 1  # bicubic overshoots at edges
    assert torch.equal(resize(image, (9, 9)), image)


def test_second_scale_starts_from_the_first_ones_result() -> None:
    """Its first loss is far below that of the content picture at that size."""
    alone = Job(TWO_SCALES.replace(scales=1)).paint().history[0].loss
    history = Job(TWO_SCALES.replace(iterations=60)).paint().history
    first_of_second = next(event for event in history if event.scale == 1)
    assert first_of_second.loss < 0.7 * alone


# Where it starts


def first_pictures(settings: Settings, **options: Any) -> Tensor:
    """The picture of the first evaluation: with a single one it is the result."""
    return Job(settings.replace(iterations=1)).paint(**options).image


def test_content_init_starts_from_the_content() -> None:
    assert torch.equal(first_pictures(SHALLOW), picture(24, 32))


def test_noise_depends_on_the_seed_alone() -> None:
    noise = SHALLOW.replace(init="noise", seed=5)
    first = first_pictures(noise)
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    assert torch.equal(first_pictures(noise), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first_pictures(noise.replace(content_weight=3.0)), first)
    assert not torch.equal(first_pictures(noise.replace(seed=6)), first)
    assert float(first.mean()) == pytest.approx(0.5, abs=0.05)


def test_style_init_starts_from_the_style_at_the_contents_size() -> None:
    expected = resize(picture(20, 28, seed=1), (32, 24))
    assert torch.equal(first_pictures(SHALLOW.replace(init="style")), expected)


def test_file_init_starts_from_the_picture_handed_over() -> None:
    other = picture(50, 60, seed=9)
    found = first_pictures(SHALLOW.replace(init="other.png"), init=other)
    assert torch.equal(found, resize(other, (32, 24)))


def test_file_init_without_a_picture_is_refused() -> None:
    with pytest.raises(InputError, match=r"init is 'other\.png'"):
        first_pictures(SHALLOW.replace(init="other.png"))


def test_same_seed_gives_the_same_bytes() -> None:
    settings = TWO_SCALES.replace(init="noise")
    assert torch.equal(Job(settings).paint().image, Job(settings).paint().image)


def test_inputs_are_left_alone() -> None:
    job = Job(TWO_SCALES)
    before = job.content.clone()
    job.paint()
    assert torch.equal(job.content, before)
    assert count_hooks(job.network) == 0


# The style


def test_style_is_measured_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []

    def counted(most_pixels: int, network: Vgg19, style: Tensor, settings: Settings) -> Any:
        sizes.append((style.shape[3], style.shape[2]))
        return measure_style(network, style, settings)

    monkeypatch.setattr(module, "measure_style_within", counted)
    job = Job(TWO_SCALES.replace(size=24))
    job.paint()
    assert sizes == [(12, 9), (24, 17)]  # 20/28 of 12 is 8.57, of 24 is 17.14
    job.paint()
    assert len(sizes) == 2


def test_style_is_never_enlarged() -> None:
    network = tiny_network()
    image = picture(20, 28, seed=1)
    found = Style(network, [image], SHALLOW).at(500, torch.device("cpu"))
    expected = measure_style(network, image, SHALLOW)
    for layer, parts in expected.items():
        for a, b in zip(found[layer], parts, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("scale", "size"), [(0.5, (14, 10)), (1.0, (28, 20)), (3.0, (28, 20))])
def test_style_scale_is_the_styles_size_over_the_results(
    monkeypatch: pytest.MonkeyPatch, scale: float, size: tuple[int, int]
) -> None:
    seen: list[tuple[int, int]] = []

    def noted(most_pixels: int, network: Vgg19, style: Tensor, settings: Settings) -> dict[str, Any]:
        seen.append((style.shape[3], style.shape[2]))
        return {}

    monkeypatch.setattr(module, "measure_style_within", noted)
    Style(tiny_network(), [picture(20, 28)], SHALLOW.replace(style_scale=scale)).at(28, torch.device("cpu"))
    assert seen == [size]


def test_narrow_style_is_kept_large_enough_for_the_network() -> None:
    """Case 14: 2 px of a narrow style would fall below the network's minimum."""
    style = Style(tiny_network(), [picture(4, 200)], SHALLOW)
    assert set(style.at(32, torch.device("cpu"))) == set(SHALLOW.style_layers)


def test_style_weights_choose_between_styles() -> None:
    network, cpu = tiny_network(), torch.device("cpu")
    images = [picture(20, 28, seed=1), picture(24, 24, seed=2)]
    one = Style(network, images[1:], SHALLOW).at(24, cpu)
    chosen = Style(network, images, SHALLOW.replace(style_weights=(0.0, 5.0))).at(24, cpu)
    for layer in one:
        for a, b in zip(chosen[layer], one[layer], strict=True):
            torch.testing.assert_close(a, b)


# The real network


@pytest.mark.parametrize("preset", [None, "gatys2016"])
def test_real_network_paints(embedded: Weights, preset: str | None) -> None:
    """From odd sizes, in the defaults and in the published form: the loss falls far, and it is the picture's."""
    settings = Settings.from_sources(preset, size=72, scales=2, iterations=40)
    network = Vgg19(embedded, settings.content_layers + settings.style_layers)
    content = picture(51, 73)
    heard: list[Event] = []
    style = Style(network, [picture(60, 45, seed=1)], settings)
    painting = transfer(network, content, style, settings, listen=heard.append)
    assert tuple(painting.image.shape) == (1, 3, 50, 72)
    assert painting.outcome == "done"
    assert painting.losses["total"] < 0.5 * painting.history[0].loss
    assert not [event for event in heard if isinstance(event, Notice)]
    objective = Objective(network, resize(content, (72, 50)), style.at(72, torch.device("cpu")), settings)
    again = objective(painting.image)
    assert float(again.total) == pytest.approx(painting.losses["total"], rel=1e-4)


# What is told


def test_events_come_in_order_and_their_counts_agree() -> None:
    job = Job(TWO_SCALES.replace(scales=3, size=32))
    painting = job.paint(snapshot_every=2)
    kinds = [type(event) for event in job.heard if not isinstance(event, (Snapshot, Notice))]
    assert job.sizes == [(8, 6), (16, 12), (32, 24)]
    position = 0
    evaluation = 0
    for scale in range(3):
        started, finished = job.heard_of(ScaleStarted)[scale], job.heard_of(ScaleFinished)[scale]
        count = finished.evaluations
        assert kinds[position : position + count + 2] == [ScaleStarted, *[Evaluated] * count, ScaleFinished]
        position += count + 2
        assert (started.scale, started.scales) == (finished.scale, finished.scales) == (scale, 3)
        assert count <= started.evaluations
        for event in painting.history[evaluation : evaluation + count]:
            evaluation += 1
            assert (event.scale, event.scales, event.evaluation) == (scale, 3, evaluation)
            assert event.evaluations == 8
    assert position == len(kinds)
    assert evaluation == painting.evaluations == 8
    seconds = [event.seconds for event in painting.history]
    assert seconds == sorted(seconds)
    assert sum(event.seconds for event in job.heard_of(ScaleFinished)) <= painting.seconds
    assert [event.evaluation for event in job.heard_of(Snapshot)] == [2, 4, 6, 8]


def test_painting_says_what_the_last_scale_says() -> None:
    job = Job(TWO_SCALES)
    painting = job.paint()
    assert list(painting.history) == job.heard_of(Evaluated)
    last = job.heard_of(ScaleFinished)[-1]
    assert (last.loss, last.reason) == (painting.losses["total"], painting.reason)
    assert painting.outcome == "done"


def test_every_event_can_be_sent_to_another_process() -> None:
    job = Job(TWO_SCALES)
    job.paint(snapshot_every=1, gradient_hooks=[torch.zeros_like])  # so that there is something to notice
    assert {type(event) for event in job.heard} == {ScaleStarted, Evaluated, Snapshot, ScaleFinished, Notice}
    for event in job.heard:
        again = pickle.loads(pickle.dumps(event))
        if isinstance(event, Snapshot):
            assert torch.equal(again.picture, event.picture)
        else:
            assert again == event


def test_gradient_hooks_see_every_scale() -> None:
    shapes: list[tuple[int, ...]] = []
    job = Job(TWO_SCALES)
    painting = job.paint(gradient_hooks=[lambda gradient: shapes.append(tuple(gradient.shape[2:]))])
    assert len(shapes) == painting.evaluations
    assert set(shapes) == {(12, 16), (24, 32)}


# Runs that end early


def raise_at(kind: type[Event], count: int, error: BaseException) -> Callable[[Event], None]:
    """A listener that raises at the so-many-th event of a kind."""
    seen: list[Event] = []

    def react(event: Event) -> None:
        if isinstance(event, kind):
            seen.append(event)
            if len(seen) == count:
                raise error

    return react


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (Evaluated, 1),
        (Evaluated, 3),
        (ScaleFinished, 1),
        (ScaleStarted, 2),
        (Evaluated, 7),
        (ScaleFinished, 2),
    ],
)
def test_interruption_anywhere_gives_a_picture_of_the_final_size(kind: type[Any], count: int) -> None:
    """Case 27."""
    job = Job(TWO_SCALES)
    job.react = raise_at(kind, count, KeyboardInterrupt())
    painting = job.paint()
    assert painting.outcome == "interrupted"
    assert tuple(painting.image.shape) == (1, 3, 24, 32)
    assert painting.image.isfinite().all()
    assert 0 <= painting.image.min() <= painting.image.max() <= 1
    assert painting.losses["total"] > 0
    assert count_hooks(job.network) == 0


def test_interruption_before_there_is_a_picture_passes_through() -> None:
    job = Job(TWO_SCALES)
    job.react = raise_at(ScaleStarted, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        job.paint()


def test_listeners_other_errors_pass_through() -> None:
    job = Job()
    job.react = raise_at(Evaluated, 2, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        job.paint()
    assert count_hooks(job.network) == 0


def out_of_memory_above(pixels: int) -> Callable[..., None]:
    """A forward hook that fails as torch does when a picture is too large."""

    def hook(network: object, inputs: tuple[Tensor, ...]) -> None:
        (image,) = inputs
        if image.shape[2] * image.shape[3] > pixels:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    return hook


def test_finer_scale_without_memory_leaves_the_coarser_ones_picture() -> None:
    """Case 11."""
    job = Job(TWO_SCALES)
    job.network.register_forward_pre_hook(out_of_memory_above(16 * 12))
    painting = job.paint()
    assert painting.outcome == "failed"
    assert "memory" in painting.reason
    assert tuple(painting.image.shape) == (1, 3, 24, 32)


def test_no_memory_at_all_is_an_error_of_the_run() -> None:
    """Case 11: also where the targets are measured, before the first evaluation."""
    job = Job(SHALLOW)
    job.network.register_forward_pre_hook(out_of_memory_above(16))
    with pytest.raises(RunError, match=r"32×24 px.*memory"):
        job.paint()


def test_nothing_finite_at_a_finer_scale_leaves_the_coarser_ones_picture() -> None:
    """Case 1."""

    def hook(network: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        grown = inputs[0].shape[2:] == (24, 32) and inputs[0].requires_grad
        return output * math.nan if grown else None

    job = Job(TWO_SCALES.replace(iterations=40))
    job.network.get_submodule("normalize").register_forward_hook(hook)
    painting = job.paint()
    assert painting.outcome == "failed"
    assert painting.image.isfinite().all()
    assert tuple(painting.image.shape) == (1, 3, 24, 32)


# What the user should know


def notices(job: Job) -> str:
    return " ".join(event.text for event in job.heard_of(Notice))


def test_no_progress_is_said() -> None:
    """Case 4: where the gradient is lost on its way, the picture is the content's and nothing else."""
    job = Job(SHALLOW.replace(iterations=10))
    painting = job.paint(gradient_hooks=[torch.zeros_like])
    assert "no progress" in notices(job)
    assert torch.equal(painting.image, picture(24, 32))


def test_flat_result_is_said() -> None:
    """Case 9."""
    job = Job(SHALLOW.replace(iterations=200, tv_weight=1e6))
    painting = job.paint()
    assert float(painting.image.std(dim=(2, 3)).max()) < 0.01
    assert "flat colour" in notices(job)
    assert "--tv-weight" in notices(job)


def test_good_run_is_told_nothing() -> None:
    job = Job(TWO_SCALES.replace(iterations=40))
    job.paint()
    assert not job.heard_of(Notice)


@pytest.mark.parametrize("lasting", [False, True])
def test_jump_of_the_loss_is_said_when_it_did_not_recover(lasting: bool) -> None:
    """Case 3."""
    calls: list[bool] = []

    def hook(network: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not inputs[0].requires_grad:
            return None
        calls.append(True)
        jumped = len(calls) >= 12 if lasting else len(calls) == 12
        return output * 1e3 if jumped else None

    job = Job(SHALLOW.replace(iterations=40))
    job.network.get_submodule("normalize").register_forward_hook(hook)
    painting = job.paint()
    assert max(event.loss for event in painting.history) > 100 * painting.history[0].loss
    assert painting.losses["total"] < painting.history[0].loss
    assert ("jumped" in notices(job)) == lasting


def test_first_loss_that_is_not_finite_is_no_lack_of_progress() -> None:
    calls: list[bool] = []

    def hook(network: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        calls.append(inputs[0].requires_grad)
        return output * math.nan if inputs[0].requires_grad and sum(calls) == 1 else None

    job = Job(SHALLOW.replace(iterations=20))
    job.network.get_submodule("normalize").register_forward_hook(hook)
    assert job.paint().history[-1].restarts == 1
    assert not job.heard_of(Notice)


@pytest.mark.parametrize("iterations", [1, 2])
def test_short_run_says_nothing_false(iterations: int) -> None:
    job = Job(SHALLOW.replace(iterations=iterations))
    job.paint()
    if iterations == 1:
        assert "no progress" not in notices(job)


def test_unhandled_error_in_the_network_passes_through() -> None:
    def fail(*args: object) -> NoReturn:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    job = Job(TWO_SCALES)
    job.network.get_submodule("pool1").register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="mat1"):
        job.paint()


def test_a_style_remembers_a_bounded_number_of_sizes(tiny_weights: Weights) -> None:
    """A folder of pictures of a thousand sizes must not fill the memory (case 32)."""
    settings = SHALLOW
    network = Vgg19(tiny_weights, settings.content_layers + settings.style_layers)
    style = Style(network, [picture(96, 96)], settings)
    for side in range(16, 16 + 2 * module.MOST_SIZES):
        style.at(side, torch.device("cpu"))
    assert len(style._measured) == module.MOST_SIZES


def test_scales_end_where_the_network_does() -> None:
    """However many are asked for."""
    sizes = scale_sizes(torch.zeros(1, 3, 96, 64), Settings(scales=1_000_000, size=96), 16)
    assert sizes == [(16, 24), (32, 48), (64, 96)]


def test_an_interrupt_at_the_last_word_keeps_the_picture(tiny_weights: Weights) -> None:
    """A listener that stops the run when it hears the closing notice."""

    def stop(event: Event) -> None:
        if isinstance(event, Notice):
            raise KeyboardInterrupt

    network = Vgg19(tiny_weights, SHALLOW.content_layers + SHALLOW.style_layers)
    settings = SHALLOW.replace(style_weight=0.0, iterations=4, scales=1, tv_weight=0.0)
    content = picture(32, 32)
    style = Style(network, [picture(32, 32, seed=1)], settings)
    painting = transfer(network, content, style, settings, listen=stop)
    assert painting.outcome == "interrupted"
    assert painting.image.shape == content.shape
