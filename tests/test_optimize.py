"""optimize.py: whatever happens, the best finite picture comes back, and what is said of it is true."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from conftest import picture
from stylize.errors import HookError, RunError
from stylize.events import Evaluated, Event, Snapshot
from stylize.nst import optimize as module
from stylize.nst.hooks import GradientHook
from stylize.nst.objective import Losses, Objective, measure_style
from stylize.nst.optimize import Optimized, Progress, StopRule, is_out_of_memory, optimize
from stylize.nst.vgg import Vgg19, Weights
from stylize.settings import Settings

OPTIMIZERS = ("lbfgs", "adam", "torch-lbfgs")
LBFGS = Settings(optimizer="lbfgs")
SHALLOW = Settings(
    content_layers=("relu2_2",), style_layers=("relu1_1", "relu2_1"), style_layer_weights=None, tv_weight=0.1
)


class Task:
    """The distance to a picture, as an objective that remembers what it was asked and can misbehave.

    Args:
        unit: of the loss.
        spoil: what becomes of the loss at some evaluations, counted from 1.
    """

    def __init__(self, unit: float = 1.0, spoil: Callable[[int, Tensor], Tensor] | None = None) -> None:
        self.target = picture(12, 14, seed=7)
        self.unit = unit
        self.spoil = spoil
        self.images: list[Tensor] = []
        self.losses: list[float] = []

    def __call__(self, image: Tensor) -> Losses:
        """Weighted, so that it takes more than one step."""
        self.images.append(image.detach().clone())
        weight = torch.linspace(1, 30, image.shape[-1])
        loss = self.unit * (weight * (image - self.target) ** 2).mean()
        if self.spoil is not None:
            loss = self.spoil(len(self.images), loss)
        self.losses.append(float(loss.detach()))
        return Losses(loss, {"content": loss.detach() / 2})

    @property
    def start(self) -> Tensor:
        return picture(12, 14, seed=8)

    def best(self, evaluations: int) -> Tensor:
        """The picture of the lowest finite loss among the first evaluations, as it can be saved."""
        finite = [(loss, i) for i, loss in enumerate(self.losses[:evaluations]) if math.isfinite(loss)]
        return self.images[min(finite)[1]].clamp(0, 1)

    def run(self, settings: Settings = LBFGS, evaluations: int = 30, **options: Any) -> Optimized:
        return optimize(self, self.start, settings, StopRule(evaluations), **options)


def spoilt_at(*evaluations: int, factor: float = math.nan) -> Callable[[int, Tensor], Tensor]:
    return lambda evaluation, loss: loss * factor if evaluation in evaluations else loss


def spoilt_from(first: int, factor: float = math.nan) -> Callable[[int, Tensor], Tensor]:
    return lambda evaluation, loss: loss * factor if evaluation >= first else loss


def raising_at(at: int, error: BaseException) -> Callable[[int, Tensor], Tensor]:
    def spoil(evaluation: int, loss: Tensor) -> Tensor:
        if evaluation == at:
            raise error
        return loss

    return spoil


def losses_of(result: Optimized) -> list[float]:
    return [event.loss for event in result.history]


# What comes back


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss(optimizer: Any) -> None:
    result = Task().run(Settings(optimizer=optimizer), 60)
    assert result.losses["total"] < 0.5 * result.history[0].loss
    assert result.outcome == "done"


def test_lbfgs_finds_the_picture() -> None:
    task = Task()
    result = task.run(evaluations=60)
    torch.testing.assert_close(result.image, task.target, rtol=0, atol=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_are_those_of_exactly_the_picture_returned(optimizer: Any) -> None:
    """Not of the picture before it was clamped."""
    task = Task()
    task.target = task.target * 2 - 0.5  # half of it out of reach
    result = task.run(Settings(optimizer=optimizer), 20)
    losses = task(result.image)
    assert result.losses == {
        "total": float(losses.total),
        **{name: float(value) for name, value in losses.terms.items()},
    }
    assert result.image.shape == task.start.shape
    assert result.image.dtype == torch.float32
    assert result.image.min() >= 0
    assert result.image.max() <= 1
    assert not result.image.requires_grad


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_best_picture_is_returned_not_the_last(optimizer: Any) -> None:
    task = Task(spoil=spoilt_from(20, factor=3.0))
    result = task.run(Settings(optimizer=optimizer), 25)
    assert torch.equal(result.image, task.best(25))


def test_start_is_left_alone() -> None:
    task = Task()
    start = task.start
    optimize(task, start, LBFGS, StopRule(5))
    assert torch.equal(start, task.start)
    assert torch.equal(task.images[0], start)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_run_gives_the_same_bytes(optimizer: Any) -> None:
    settings = Settings(optimizer=optimizer)
    assert torch.equal(Task().run(settings, 15).image, Task().run(settings, 15).image)


# Values that are not finite


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_best_finite_picture_is_returned_when_the_loss_is_lost_for_good(optimizer: Any, factor: float) -> None:
    """Case 1."""
    task = Task(spoil=spoilt_from(10, factor))
    result = task.run(Settings(optimizer=optimizer), 1000)
    assert result.outcome == "failed"
    assert "not finite" in result.reason
    assert torch.equal(result.image, task.best(9))
    assert all(math.isfinite(value) for value in result.losses.values())
    assert len(result.history) < 1000


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [1, 2, 7])
def test_run_survives_a_loss_that_is_not_finite(optimizer: Any, at: int) -> None:
    """Case 1."""
    task = Task(spoil=spoilt_at(at))
    result = task.run(Settings(optimizer=optimizer), 60)
    assert result.outcome == "done"
    assert result.history[-1].restarts == 1
    assert all(image.isfinite().all() for image in task.images)
    others = [loss for loss in losses_of(result) if math.isfinite(loss)]
    assert len(others) == 59
    assert result.losses["total"] < 0.7 * others[0]


def test_run_survives_a_gradient_that_is_not_finite() -> None:
    def hook(gradient: Tensor) -> None:
        calls.append(1)
        if len(calls) == 5:
            gradient.fill_(math.nan)

    calls: list[int] = []
    task = Task()
    result = task.run(evaluations=30, gradient_hooks=[hook])
    assert result.history[-1].restarts == 1
    assert all(image.isfinite().all() for image in task.images)
    assert result.losses["total"] < 0.1 * result.history[0].loss


def test_run_that_never_was_finite_is_an_error() -> None:
    with pytest.raises(RunError, match=r"finite loss.*--precision fp32"):
        Task(spoil=spoilt_from(1)).run(evaluations=20)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_jump_of_the_loss_costs_nothing(optimizer: Any) -> None:
    """Case 3."""
    task = Task(spoil=spoilt_from(15, factor=100.0))
    result = task.run(Settings(optimizer=optimizer), 16)
    assert torch.equal(result.image, task.best(14))
    assert result.outcome == "done"


def test_step_that_raised_the_loss_a_hundredfold_is_taken_back() -> None:
    """Case 3: a wall in the loss, beyond which no gradient tells of it."""

    class Wall(Task):
        def __call__(self, image: Tensor) -> Losses:
            plain = super().__call__(image)
            beyond = float((image.detach() - self.start).square().mean()) > 0.01**2
            return Losses(plain.total * (100 if beyond else 1), plain.terms)

    result = Wall().run(evaluations=40)
    assert result.losses["total"] < result.history[0].loss
    assert max(losses_of(result)[-10:]) < 200 * result.history[0].loss


@pytest.mark.parametrize(("optimizer", "unit"), [("lbfgs", 1e12), ("lbfgs", 1e-9), ("adam", 1e12)])
def test_unit_of_the_loss_does_not_matter(optimizer: Any, unit: float) -> None:
    """Case 5: a peer stops after an evaluation or two."""
    plain = Task().run(Settings(optimizer=optimizer), 30)
    scaled = Task(unit=unit).run(Settings(optimizer=optimizer), 30)
    assert len(scaled.history) == 30
    assert scaled.losses["total"] < 0.8 * scaled.history[0].loss
    if optimizer == "lbfgs":
        assert scaled.losses["total"] / unit == pytest.approx(plain.losses["total"], rel=0.05, abs=1e-6)


# Interruptions


def interrupt_at(evaluation: int) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, Evaluated) and event.evaluation == evaluation:
            raise KeyboardInterrupt

    return listen


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_interrupting_listener_keeps_the_best_picture(optimizer: Any) -> None:
    """Case 27."""
    task = Task()
    result = task.run(Settings(optimizer=optimizer), 30, listen=interrupt_at(6))
    assert result.outcome == "interrupted"
    assert len(result.history) == 6
    assert torch.equal(result.image, task.best(6))


def test_first_evaluation_is_enough_to_keep() -> None:
    task = Task()
    result = task.run(listen=interrupt_at(1))
    assert result.outcome == "interrupted"
    assert torch.equal(result.image, task.start)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_interruption_inside_the_objective_keeps_the_best_picture(optimizer: Any) -> None:
    task = Task(spoil=raising_at(8, KeyboardInterrupt()))
    result = task.run(Settings(optimizer=optimizer), 30)
    assert result.outcome == "interrupted"
    assert len(result.history) == 7
    assert torch.equal(result.image, task.best(7))
    assert result.losses["total"] == pytest.approx(min(losses_of(result)), rel=0.5)


def test_interruption_before_there_is_anything_to_keep_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        Task(spoil=raising_at(1, KeyboardInterrupt())).run()


# Memory


def real_lack_of_memory() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


LACKS_OF_MEMORY = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried …"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"),
]


@pytest.mark.parametrize("error", LACKS_OF_MEMORY)
def test_lack_of_memory_is_recognised(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


def test_lack_of_memory_of_this_machine_is_recognised() -> None:
    assert is_out_of_memory(real_lack_of_memory())


@pytest.mark.parametrize("error", [RuntimeError("shape '[2]' is invalid for input of size 3"), ValueError("no")])
def test_other_errors_are_not_lack_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", LACKS_OF_MEMORY)
def test_lack_of_memory_keeps_the_best_picture(error: RuntimeError) -> None:
    """Case 11."""
    task = Task(spoil=raising_at(8, error))
    result = task.run()
    assert result.outcome == "failed"
    assert "memory" in result.reason
    assert torch.equal(result.image, task.best(7))


@pytest.mark.parametrize("error", LACKS_OF_MEMORY)
def test_lack_of_memory_at_once_is_an_error_that_names_the_size(error: RuntimeError) -> None:
    """Case 11."""
    with pytest.raises(RunError, match=r"cpu at 14×12 px.*--size") as caught:
        Task(spoil=raising_at(1, error)).run()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), ValueError("another")])
def test_other_errors_pass_through(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        Task(spoil=raising_at(5, error)).run()


# Bounds and guards


def tiny_objective(weights: Weights, settings: Settings, height: int = 16, width: int = 20) -> Objective:
    network = Vgg19(weights, settings.content_layers + settings.style_layers)
    style = measure_style(network, picture(24, 24, seed=1), settings)
    return Objective(network, picture(height, width), style, settings)


def test_penalty_keeps_the_picture_in_range(tiny_weights: Weights) -> None:
    """Against the same run without it, whose loss knows nothing of what a file can hold."""

    def excess(range_weight: float) -> float:
        settings = SHALLOW.replace(content_weight=0.01, tv_weight=0.0, range_weight=range_weight)
        objective = tiny_objective(tiny_weights, settings)
        images: list[Tensor] = []

        def recorded(image: Tensor) -> Losses:
            images.append(image.detach().clone())
            return objective(image)

        optimize(recorded, picture(16, 20), settings, StopRule(60))
        last = images[-2]  # the last one is the result, which is clamped
        return float((last - last.clamp(0, 1)).square().mean())

    assert excess(100.0) < 0.1 * excess(0.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_that_always_fires_leaves_a_finite_run_that_says_so(optimizer: Any) -> None:
    result = Task().run(Settings(optimizer=optimizer, clip_norm=1e-9), 20)
    assert [event.clipped for event in result.history] == list(range(1, 21))
    assert all(math.isfinite(loss) for loss in losses_of(result))
    assert result.losses["total"] <= result.history[0].loss
    if optimizer == "lbfgs":
        assert result.history[-1].dropped_pairs == 19
        assert result.losses["total"] < 0.9 * result.history[0].loss


@pytest.mark.parametrize("clip", [{"clip_norm": 1e9}, {"clip_value": 1e9}])
def test_clipping_far_above_the_gradient_changes_nothing(clip: dict[str, float]) -> None:
    plain, guarded = Task().run(), Task().run(LBFGS.replace(**clip))
    assert torch.equal(plain.image, guarded.image)
    assert guarded.history[-1].clipped == 0


def test_gradient_norm_is_that_before_clipping() -> None:
    plain, clipped = Task().run(evaluations=1), Task().run(LBFGS.replace(clip_norm=1e-6), 1)
    assert clipped.history[0].gradient_norm == plain.history[0].gradient_norm > 1e-6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradient_hooks_are_called_once_an_evaluation_in_order(optimizer: Any) -> None:
    calls: list[str] = []

    def first(gradient: Tensor) -> None:
        assert gradient.shape == (1, 3, 12, 14)
        calls.append("first")

    def second(gradient: Tensor) -> Tensor:
        calls.append("second")
        return gradient * 1.0

    hooks: Sequence[GradientHook] = [first, second]
    Task().run(Settings(optimizer=optimizer), 5, gradient_hooks=hooks)
    assert calls == ["first", "second"] * 5


def test_gradient_hook_steers_the_picture() -> None:
    """With the gradient of a part held at zero, that part stays as it was."""

    def upper_half(gradient: Tensor) -> Tensor:
        held = gradient.clone()
        held[:, :, 6:] = 0
        return held

    task = Task()
    # One level, so that a coefficient is a pixel.
    result = task.run(Settings(optimizer="adam"), 10, gradient_hooks=[upper_half])
    assert torch.equal(result.image[:, :, 6:], task.start[:, :, 6:])
    assert not torch.equal(result.image[:, :, :6], task.start[:, :, :6])


def test_gradient_hook_that_breaks_its_contract_ends_the_run() -> None:
    def careless(gradient: Tensor) -> Tensor:
        return gradient[0]

    with pytest.raises(HookError, match="careless"):
        Task().run(gradient_hooks=[careless])


# When to stop


def test_planned_evaluations_are_the_most_that_are_made() -> None:
    rule = StopRule(5)
    assert rule.reason([1.0] * 4) is None
    assert "5 planned evaluations" in str(rule.reason([1.0] * 5))
    assert len(Task().run(evaluations=7).history) == 7


def test_time_ends_a_size() -> None:
    assert "time" in str(StopRule(1000, deadline=time.perf_counter() - 1).reason([1.0]))
    assert StopRule(1000, deadline=time.perf_counter() + 1000).reason([1.0]) is None
    stop = StopRule(1000, deadline=time.perf_counter())
    assert len(optimize(Task(), Task().start, LBFGS, stop).history) == 1


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_too_small_a_gain_ends_a_size_whatever_the_unit(unit: float) -> None:
    """Case 5."""
    steady = [unit * 0.9**k for k in range(100)]
    stalled = steady[:50] + [steady[49]] * 50
    rule = StopRule(1000, min_decrease=0.01)
    assert all(rule.reason(steady[:k]) is None for k in range(1, 100))
    first = next(k for k in range(1, 100) if rule.reason(stalled[:k]))
    assert 50 < first < 50 + 2 * module.WINDOW
    assert "gained less than 1.00%" in str(rule.reason(stalled[:first]))


def test_losses_that_are_not_finite_do_not_end_a_size_by_themselves() -> None:
    rule = StopRule(1000, min_decrease=0.01)
    assert rule.reason([math.inf] * 100) is None
    falling = [0.9**k for k in range(50)]
    assert rule.reason([*falling, math.inf]) is None


def test_without_a_least_gain_only_the_plan_counts() -> None:
    assert StopRule(1000).reason([1.0] * 999) is None


# Long runs with a network


def test_long_run_stays_finite_and_falls(tiny_weights: Weights) -> None:
    """Case 2: a tutorial's loss explodes after some hundreds of evaluations."""
    objective = tiny_objective(tiny_weights, SHALLOW)
    result = optimize(objective, picture(16, 20), SHALLOW, StopRule(300))
    losses = losses_of(result)
    assert len(losses) == 300
    assert all(math.isfinite(loss) for loss in losses)
    parts = [min(losses[k : k + 100]) for k in (0, 100, 200)]
    assert parts[0] > parts[1] > parts[2]
    assert losses[-1] < 1.1 * parts[2]
    assert result.losses["total"] < 0.5 * losses[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_lowers_the_networks_loss(tiny_weights: Weights, optimizer: Any) -> None:
    settings = SHALLOW.replace(optimizer=optimizer)
    result = optimize(tiny_objective(tiny_weights, settings), picture(16, 20), settings, StopRule(40))
    assert result.losses["total"] < 0.95 * result.history[0].loss


# What is told


def test_events_count_on_from_where_the_run_stands() -> None:
    heard: list[Event] = []
    progress = Progress(scale=1, scales=3, made=100, planned=500, started=time.perf_counter() - 10)
    result = Task().run(evaluations=4, listen=heard.append, progress=progress)
    assert heard == list(result.history)
    assert [event.evaluation for event in result.history] == [101, 102, 103, 104]
    for event in result.history:
        assert (event.scale, event.scales, event.evaluations) == (1, 3, 500)
        assert set(event.terms) == {"content"}
        assert event.terms["content"] == pytest.approx(event.loss / 2, rel=1e-6)
    seconds = [event.seconds for event in result.history]
    assert seconds[0] > 10
    assert seconds == sorted(seconds)


def test_told_losses_and_norms_are_those_of_the_evaluations() -> None:
    task = Task()
    result = task.run(evaluations=10)
    assert losses_of(result) == pytest.approx(task.losses[:10], rel=1e-6)
    image = task.images[3].requires_grad_()
    (gradient,) = torch.autograd.grad(Task()(image).total, image)
    assert result.history[3].gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_snapshots_come_when_asked_for_and_are_pictures() -> None:
    heard: list[Event] = []
    task = Task()
    task.run(evaluations=10, listen=heard.append, snapshot_every=4)
    snapshots = [event for event in heard if isinstance(event, Snapshot)]
    assert [snapshot.evaluation for snapshot in snapshots] == [4, 8]
    for snapshot in snapshots:
        assert snapshot.picture.shape == (3, 12, 14)
        assert snapshot.picture.dtype == torch.uint8
        shown = snapshot.picture.float() / 255
        assert float((shown - task.best(snapshot.evaluation)[0]).abs().max()) <= 0.5 / 255 + 1e-6


def test_listeners_other_errors_pass_through() -> None:
    def listen(event: Event) -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Task().run(listen=listen)
