"""The Python interface, with the real network at its smallest."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import stylize as package
from conftest import image_of as picture
from stylize import api, images
from stylize.api import Result, Stylizer, UnsavedError, load_settings, stylize
from stylize.errors import InputError, OutputError, PictureError, RefusedError, SettingsError, WeightsError
from stylize.events import Evaluated, Event, Notice, ScaleFinished, ScaleStarted, Snapshot, ignore
from stylize.nst.hooks import count_hooks
from stylize.nst.vgg import Weights, load_weights
from stylize.settings import Settings

TINY = Settings(size=32, iterations=3, precision="fp32", device="cpu")
TWO_SCALES = TINY.replace(size=64, scales=2, iterations=6)


@pytest.fixture
def content(tmp_path: Path) -> Path:
    path = tmp_path / "content.png"
    picture(48, 32).save(path)
    return path


@pytest.fixture
def style(tmp_path: Path) -> Path:
    path = tmp_path / "style.png"
    picture(40, 40, seed=1).save(path)
    return path


@pytest.fixture(scope="module")
def stylizer() -> Stylizer:
    return Stylizer(TINY)


def interrupt_at(kind: type, count: int = 1) -> Callable[[Event], None]:
    """A listener that presses Ctrl-C at the count-th event of a kind."""
    seen: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, kind):
            seen.append(event)
            if len(seen) == count:
                raise KeyboardInterrupt

    return listen


# ---- what goes in ------------------------------------------------------------------------------------


def test_paths_images_tensors_and_arrays_give_the_same_picture(
    stylizer: Stylizer, content: Path, style: Path
) -> None:
    image = picture(48, 32)  # what the file holds
    array = np.asarray(image)
    tensor = torch.from_numpy(array.astype(np.float32) / 255).permute(2, 0, 1)
    expected = stylizer(content, style).tensor
    for source in (str(content), image, array, tensor, tensor[None]):
        torch.testing.assert_close(stylizer(source, style).tensor, expected, rtol=0, atol=0)


def test_a_blend_with_all_weight_on_one_style_is_that_style_alone(content: Path, style: Path) -> None:
    other = picture(30, 50, seed=2)
    alone = stylize(content, style, settings=TINY)
    blend = stylize(content, [other, style], settings=TINY, style_weights=(0.0, 3.0))
    torch.testing.assert_close(blend.tensor, alone.tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("given", "styles"), [((1.0,), 2), ((1.0, 2.0, 3.0), 2)])
@pytest.mark.usefixtures("no_weights")
def test_style_weights_must_be_as_many_as_styles(
    content: Path, style: Path, given: tuple[float, ...], styles: int
) -> None:
    with pytest.raises(SettingsError, match=f"{len(given)} values for {styles} style pictures"):
        stylize(content, [style] * styles, style_weights=given)


@pytest.mark.usefixtures("no_weights")
def test_no_style_is_refused(content: Path) -> None:
    with pytest.raises(SettingsError, match="no style"):
        stylize(content, [])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "1", "CMYK"])
def test_every_mode_of_picture_can_be_content_and_style(stylizer: Stylizer, mode: str) -> None:
    image = picture(32, 32).convert("L").convert(mode) if mode == "LA" else picture(32, 32).convert(mode)
    result = stylizer(image, image)
    assert result.tensor.shape == (1, 3, 32, 32)


def test_the_contents_transparency_is_kept_at_the_results_size(stylizer: Stylizer, style: Path) -> None:
    image = picture(64, 64).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize((64, 64)))  # 0 at the top, 255 at the bottom
    result = stylizer(image, style)
    assert result.image.mode == "RGBA"
    assert result.image.size == (32, 32)
    column = np.asarray(result.image.getchannel("A"))[:, 16].astype(int)
    assert (np.diff(column) > 0).all()
    # Row k of 32 is the mean of a ramp from 0 to 255 over [k/32, (k + 1)/32].
    np.testing.assert_allclose(column, 255 * (np.arange(32) + 0.5) / 32, atol=4)


def test_an_opaque_content_gives_an_opaque_result(stylizer: Stylizer, content: Path, style: Path) -> None:
    result = stylizer(content, style)
    assert result.alpha is None
    assert result.image.mode == "RGB"


def test_a_picture_lying_on_its_side_is_painted_upright(
    stylizer: Stylizer, tmp_path: Path, style: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the first row is the right side
    picture(48, 32).save(tmp_path / "turned.jpg", exif=exif)
    result = stylizer(tmp_path / "turned.jpg", style, out=tmp_path / "out.jpg")
    assert result.image.size == (21, 32)  # 32 · 32/48
    with Image.open(tmp_path / "out.jpg") as saved:
        assert 0x0112 not in saved.getexif()


@pytest.mark.parametrize(
    ("width", "height", "changes", "expected"),
    [
        (97, 61, {"size": 64}, (64, 40)),  # 61 · 64/97 = 40.2
        (61, 97, {"size": 64}, (40, 64)),
        (64, 64, {"size": 33}, (33, 33)),
        (40, 30, {"size": 512}, (40, 30)),  # never enlarged silently
        (40, 30, {"size": 64, "upscale": True}, (64, 48)),
        (45, 35, {"size": "full"}, (45, 35)),
    ],
)
def test_the_result_has_exactly_the_size_asked_for(
    style: Path, width: int, height: int, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    result = stylize(picture(width, height), style, settings=TINY, **changes)
    assert result.image.size == expected
    assert result.tensor.shape == (1, 3, expected[1], expected[0])


@pytest.mark.parametrize(("width", "height"), [(20, 300), (300, 20), (17, 17)])
def test_a_style_of_any_size_and_aspect_works(
    stylizer: Stylizer, content: Path, width: int, height: int
) -> None:
    assert stylizer(content, picture(width, height)).outcome == "done"


@pytest.mark.parametrize("init", ["noise", "style", "path", "image"])
def test_the_start_can_be_named_or_a_picture(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path, init: str
) -> None:
    start = picture(32, 21, seed=9)  # as large as the result
    start.save(tmp_path / "start.png")
    given: Any = {"path": tmp_path / "start.png", "image": start}.get(init, init)
    firsts: list[Tensor] = []

    def listen(event: Event) -> None:
        if isinstance(event, Snapshot) and event.evaluation == 1:
            firsts.append(event.picture)

    result = stylizer(content, style, init=given, on_event=listen, snapshot_every=1)
    names = {"path": str(tmp_path / "start.png"), "image": "a PIL image"}
    assert result.settings.init == names.get(init, init)
    if init in ("path", "image"):  # the first evaluation is of the start itself
        assert np.array_equal(firsts[0].permute(1, 2, 0), np.asarray(start))
        assert result.record["init"]["name"] == Path(names[init]).name


# ---- what is refused, before the weights are loaded --------------------------------------------------


@pytest.mark.usefixtures("no_weights")
def test_what_can_be_refused_is_refused_before_the_weights_are_loaded(
    content: Path, style: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.jpg"
    text.write_text("not a picture")
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (PictureError, "missing.png", {"content": tmp_path / "missing.png"}),
        (PictureError, "text.jpg", {"style": text}),
        (PictureError, "text.jpg", {"init": text}),
        (PictureError, "--max-pixels", {"max_pixels": 100}),
        (OutputError, "x.jgp", {"out": tmp_path / "x.jgp"}),
        (OutputError, "exists already", {"out": content}),
        (SettingsError, "quda", {"device": "quda"}),
        (SettingsError, "relu4_2|relu5_4", {"style_layers": ("relu9_9",)}),
        (SettingsError, "sizzle", {"sizzle": 3}),
        (SettingsError, "not both", {"settings": Settings(), "config": "gatys2016"}),
        (InputError, "512×1 px", {"content": Image.new("RGB", (5000, 2))}),
    ]
    for error, words, arguments in cases:
        with pytest.raises(error, match=words):
            stylize(**({"content": content, "style": style} | arguments))


def test_missing_weights_are_refused_with_their_path(content: Path, style: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere\.pth"):
        stylize(content, style, weights=str(tmp_path / "nowhere.pth"))
    assert issubclass(WeightsError, RefusedError)


# ---- settings ----------------------------------------------------------------------------------------


def test_overrides_beat_the_config_which_beats_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("tv_weight = 7.0\ndetail = 0.25\n")
    settings = load_settings(file, detail=0.75)
    assert (settings.tv_weight, settings.detail) == (7.0, 0.75)
    assert settings.replace(tv_weight=Settings().tv_weight, detail=Settings().detail) == Settings()
    assert load_settings({"size": 99}).size == 99
    assert load_settings("gatys2016").style_loss == "gram"


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tiff"])
def test_a_former_result_is_a_config(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / f"result{suffix}"
    result = stylizer(content, style, out=out)
    assert load_settings(out) == result.settings
    assert load_settings(out, seed=5) == result.settings.replace(seed=5)


def test_a_picture_without_settings_is_no_config(content: Path) -> None:
    with pytest.raises(PictureError, match=r"content\.png"):
        load_settings(content)


def test_all_settings_survive_the_way_through_a_picture(tmp_path: Path) -> None:
    settings = Settings(size="full", style_weights=(0.25, 0.75), clip_norm=2.5, init="Übermalt.png")
    images.save_picture(
        torch.zeros(1, 3, 16, 16), tmp_path / "r.png", record={"settings": settings.as_dict()}
    )
    assert load_settings(tmp_path / "r.png") == settings


# ---- what comes out ----------------------------------------------------------------------------------


def test_the_same_choices_give_the_same_bytes(content: Path, style: Path, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        stylize(content, style, settings=TINY, init="noise", seed=4, out=tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_record_names_inputs_versions_and_weights_and_no_time(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path
) -> None:
    result = stylizer(content, style, out=tmp_path / "r.png")
    record = images.read_record(tmp_path / "r.png")
    assert record == json.loads(json.dumps(result.record))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (content, style)}
    assert record["content"] == {"name": "content.png", "sha256": hashes["content.png"]}
    assert record["styles"] == [{"name": "style.png", "sha256": hashes["style.png"]}]
    assert record["weights"]["name"] == "embedded"
    weights = Path(api.__file__).parent / "weights" / "vgg19.safetensors"
    assert record["weights"]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["version"] == package.__version__
    assert set(record["versions"]) == {"python", "torch", "torchvision", "pillow"}
    assert (record["outcome"], record["evaluations"]) == ("done", 3)
    assert not {"seconds", "date", "time", "history"} & set(record)
    assert str(tmp_path) not in json.dumps(record)


def test_the_result_tells_how_it_came_to_be(stylizer: Stylizer, content: Path, style: Path) -> None:
    result = stylizer(content, style)
    assert result.evaluations == len(result.history) == 3
    assert {"total", "content", "style", "tv", "range", "style.relu1_1"} <= set(result.losses)
    assert result.seconds > 0
    assert result.settings == TINY
    assert result.path is None
    assert 0 <= result.tensor.min() <= result.tensor.max() <= 1
    assert result.tensor.dtype == torch.float32


def test_an_animation_is_said_to_be_used_in_part(stylizer: Stylizer, style: Path, tmp_path: Path) -> None:
    frames = [picture(32, 32, seed) for seed in (1, 2)]
    frames[0].save(tmp_path / "cats.gif", save_all=True, append_images=frames[1:])
    events: list[Event] = []
    result = stylizer(tmp_path / "cats.gif", style, on_event=events.append)
    assert any("cats.gif" in notice for notice in result.notices)
    assert tuple(event.text for event in events if isinstance(event, Notice)) == result.notices


def test_events_snapshots_and_gradient_hooks_are_passed_on(
    stylizer: Stylizer, content: Path, style: Path
) -> None:
    events: list[Event] = []
    shapes: list[torch.Size] = []

    def hook(gradient: Tensor) -> None:
        shapes.append(gradient.shape)

    stylizer(content, style, on_event=events.append, snapshot_every=2, gradient_hooks=[hook])
    assert shapes == [(1, 3, 21, 32)] * 3
    kinds = [type(event) for event in events]
    assert [kind for kind in kinds if kind is not Notice] == [
        *(ScaleStarted, Evaluated, Evaluated, Snapshot, Evaluated, ScaleFinished),
    ]


def test_a_saved_result_can_be_saved_again(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path
) -> None:
    result = stylizer(content, style, out=tmp_path / "a.png")
    assert result.path == tmp_path / "a.png"
    with pytest.raises(OutputError, match="exists already"):
        result.save(tmp_path / "a.png")
    assert result.save(tmp_path / "b.png").read_bytes() == (tmp_path / "a.png").read_bytes()
    assert result.save(tmp_path / "a.png", overwrite=True) == tmp_path / "a.png"


# ---- when it does not go well ------------------------------------------------------------------------


def test_a_file_that_appears_meanwhile_is_left_alone_and_the_picture_is_kept(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.png"

    def appear(event: Event) -> None:
        out.write_bytes(b"mine")

    with pytest.raises(UnsavedError, match="exists already") as caught:
        stylizer(content, style, out=out, on_event=appear)
    assert out.read_bytes() == b"mine"
    assert caught.value.result.save(tmp_path / "else.png").exists()


def test_a_full_disk_does_not_lose_the_picture(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UnsavedError, match=r"out\.png.*No space left") as caught:
            stylizer(content, style, out=tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()
    result = caught.value.result
    assert result.save(tmp_path / "out.png").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_run_keeps_its_best_picture(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path, count: int
) -> None:
    result = stylizer(content, style, out=tmp_path / "r.png", on_event=interrupt_at(Evaluated, count))
    assert (result.outcome, result.evaluations) == ("interrupted", count)
    assert images.read_record(tmp_path / "r.png")["outcome"] == "interrupted"


@pytest.mark.parametrize(("kind", "count"), [(ScaleFinished, 1), (ScaleStarted, 2), (ScaleFinished, 2)])
def test_an_interrupt_between_scales_keeps_the_picture_at_full_size(
    content: Path, style: Path, kind: type, count: int
) -> None:
    try:
        result = stylize(content, style, settings=TWO_SCALES, on_event=interrupt_at(kind, count))
    except KeyboardInterrupt:
        pytest.fail("The picture of the first scale is lost.")
    assert result.outcome == "interrupted"
    assert result.image.size == (48, 32)


def test_an_interrupt_before_anything_is_painted_is_passed_on(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        stylizer(content, style, out=tmp_path / "r.png", on_event=interrupt_at(ScaleStarted))
    assert not (tmp_path / "r.png").exists()


def test_one_interrupt_during_saving_is_obeyed_afterwards(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = images.save_picture
    attempts: list[Path] = []

    def interrupted_once(tensor: Tensor, path: Path, **options: Any) -> Path:
        saved: Path = save(tensor, path, **options)
        attempts.append(saved)
        if len(attempts) == 1:
            raise KeyboardInterrupt  # at the worst moment: the file is there already
        return saved

    monkeypatch.setattr(images, "save_picture", interrupted_once)
    result = stylizer(content, style, out=tmp_path / "r.png")
    assert (result.outcome, result.path, len(attempts)) == ("interrupted", tmp_path / "r.png", 2)


def test_a_second_interrupt_during_saving_is_passed_on(
    stylizer: Stylizer, content: Path, style: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(images, "save_picture", interrupted)
    for listen in (ignore, interrupt_at(Evaluated)):  # both at the saving; or the first before
        with pytest.raises(KeyboardInterrupt):
            stylizer(content, style, out=tmp_path / "r.png", on_event=listen)


def test_an_error_of_the_listener_is_passed_on_and_leaves_no_hooks(content: Path, style: Path) -> None:
    def broken(event: Event) -> None:
        if isinstance(event, Evaluated):
            raise LookupError("broken listener")

    stylizer = Stylizer(TINY)
    with pytest.raises(LookupError, match="broken listener"):
        stylizer(content, style, on_event=broken)
    assert stylizer._network is not None
    assert count_hooks(stylizer._network) == 0
    assert stylizer(content, style).outcome == "done"
    assert count_hooks(stylizer._network) == 0


# ---- one Stylizer, many pictures ---------------------------------------------------------------------


def test_a_stylizer_loads_its_weights_once_and_paints_the_same(
    content: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []

    def load(*args: Any, **options: Any) -> Weights:
        loads.append(args)
        return load_weights(*args, **options)

    monkeypatch.setattr(api, "load_weights", load)
    stylizer = Stylizer(TINY)
    first, again = stylizer(content, style), stylizer(content, style)
    other = stylizer(content, picture(20, 30, seed=3))
    back = stylizer(content, style)
    assert len(loads) == 1
    assert torch.equal(first.tensor, again.tensor)
    assert not torch.equal(first.tensor, other.tensor)
    assert torch.equal(first.tensor, back.tensor)


def test_threads_take_turns_at_the_network(stylizer: Stylizer, style: Path) -> None:
    contents = [picture(32, 32, seed) for seed in range(3)]
    alone = [stylizer(each, style).tensor for each in contents]
    together: dict[int, Result] = {}

    def paint(number: int) -> None:
        together[number] = stylizer(contents[number], style)

    threads = [threading.Thread(target=paint, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate(alone):
        assert torch.equal(together[number].tensor, expected)


def test_nothing_global_changes_and_nothing_is_printed(
    content: Path, style: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def state() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.flags,
            Image.MAX_IMAGE_PIXELS,
            repr(np.random.get_state()),
        ]

    before = state()
    stylize(content, style, settings=TINY, init="noise", out=tmp_path / "r.png")
    assert state() == before
    assert capfd.readouterr() == ("", "")


def test_results_are_frozen(stylizer: Stylizer, content: Path, style: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        stylizer(content, style).outcome = "failed"  # type: ignore[misc]


def test_every_name_the_package_promises_is_there() -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018
