"""A texture: style without content, by its size, its Gram matrices, and what is told and refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from click.testing import Result as Told
from torch import Tensor

from conftest import picture
from stylize import stylize
from stylize.api import Stylizer
from stylize.cli import program
from stylize.errors import InputError, SettingsError
from stylize.events import Event, Snapshot
from stylize.images import read_picture, read_record, save_picture
from stylize.settings import Settings

TINY = Settings(size=(48, 32), iterations=3, precision="fp32", device="cpu")


@pytest.fixture(scope="module")
def evaluator() -> ModuleType:
    """The independent judge: VGG19 in float64 by other code."""
    path = Path(__file__).parents[1] / "benchmarks" / "evaluator.py"
    spec = importlib.util.spec_from_file_location("evaluator", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evaluator"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two pictures."""
    monkeypatch.chdir(tmp_path)
    save_picture(picture(40, 40, seed=1), tmp_path / "a.png")
    save_picture(picture(30, 50, seed=2), tmp_path / "b.png")
    return tmp_path


def run(*arguments: str) -> Told:
    tiny = ("--iterations", "3", "--precision", "fp32", "--device", "cpu")
    return CliRunner().invoke(program, [*arguments, *tiny])


# ---- what is painted -----------------------------------------------------------------------------------


def test_gram_error_is_below_one_per_cent_of_the_noises(evaluator: ModuleType) -> None:
    style = picture(48, 64, seed=1)
    result = stylize(None, style, size=(64, 48), precision="fp32", device="cpu", iterations=50)
    generator = torch.Generator().manual_seed(5)
    noise = (torch.randn(1, 3, 48, 64, generator=generator) * 0.15 + 0.5).clamp(0, 1)
    judge = evaluator.Evaluator(style, style)
    assert judge.judge(result.tensor).style < 0.01 * judge.judge(noise).style


@pytest.mark.parametrize(
    ("size", "expected"), [((48, 32), (48, 32)), ((33, 57), (33, 57)), (40, (40, 40)), ([48, 32], (48, 32))]
)
def test_size_is_exactly_what_was_asked_for(size: Any, expected: tuple[int, int]) -> None:
    result = stylize(None, picture(20, 24, seed=1), settings=TINY, size=size)
    assert result.image.size == expected
    assert result.alpha is None


def test_content_weight_and_detail_play_no_part() -> None:
    style, settings = picture(40, 40, seed=1), TINY.replace(scales=2, iterations=6)
    one = stylize(None, style, settings=settings)
    other = stylize(None, style, settings=settings, content_weight=50.0, detail=1.0)
    assert torch.equal(one.tensor, other.tensor)
    assert "content" not in one.losses


def test_seed_decides_and_repeats() -> None:
    painter = Stylizer(TINY)
    style = picture(40, 40, seed=1)
    first, again = painter(None, style), painter(None, style)
    other = stylize(None, style, settings=TINY, seed=1)
    assert torch.equal(first.tensor, again.tensor)
    assert not torch.equal(first.tensor, other.tensor)


@pytest.mark.parametrize("init", ["noise", "style", "picture"])
def test_start_is_the_one_asked_for(init: str) -> None:
    """The first evaluation is of the start itself."""
    style, start = picture(32, 48, seed=1), picture(32, 48, seed=9)
    frames: list[Tensor] = []

    def listen(event: Event) -> None:
        if isinstance(event, Snapshot):
            frames.append(event.picture[None] / 255)

    given: Any = start if init == "picture" else init
    stylize(None, style, settings=TINY, init=given, on_event=listen, snapshot_every=1)
    if init == "noise":  # of mean ½ and deviation 0.15, and independent from pixel to pixel
        assert float(frames[0].mean()) == pytest.approx(0.5, abs=0.02)
        assert float(frames[0].std()) == pytest.approx(0.15, abs=0.02)
    else:
        expected = start if init == "picture" else style
        torch.testing.assert_close(frames[0], expected, rtol=0, atol=0.51 / 255)


def test_one_stylizer_paints_pictures_and_textures() -> None:
    painter = Stylizer(TINY.replace(size=32))
    content, style = picture(24, 32), picture(40, 40, seed=1)
    before = painter(content, style)
    texture = painter(None, style)
    assert texture.image.size == (32, 32)
    assert torch.equal(painter(content, style).tensor, before.tensor)


# ---- what is told --------------------------------------------------------------------------------------


def test_command_paints_a_texture_and_tells_of_it(folder: Path) -> None:
    result = run("a.png", "--content", "none", "--size", "48x32")
    assert (result.exit_code, result.stdout) == (0, "texture_a.png\n")
    assert read_picture("texture_a.png").size == (48, 32)
    record = read_record("texture_a.png")
    assert record["content"] is None
    assert record["settings"]["size"] == [48, 32]
    assert (record["settings"]["init"], record["settings"]["content_layers"]) == ("noise", [])
    told = run_info("texture_a.png")
    assert "a texture of a.png" in told
    assert "size = [48, 32]" in told


def run_info(path: str) -> str:
    return CliRunner().invoke(program, ["info", path]).stdout


def test_all_arguments_are_styles(folder: Path) -> None:
    result = run("a.png", "b.png", "--content", "none", "--size", "32", "--style-weights", "1,3")
    assert result.stdout == "texture_a_b.png\n"
    assert [style["name"] for style in read_record("texture_a_b.png")["styles"]] == ["a.png", "b.png"]
    assert "a texture of a.png + b.png" in run_info("texture_a_b.png")


def test_texture_is_repeated_by_its_own_record(folder: Path) -> None:
    run("a.png", "--content", "none", "--size", "48x32", "--seed", "3")
    run("a.png", "--content", "none", "--config", "texture_a.png", "--out", "again.png")
    assert Path("again.png").read_bytes() == Path("texture_a.png").read_bytes()


def test_json_tells_the_size(folder: Path) -> None:
    report = json.loads(run("a.png", "--content", "none", "--size", "48x32", "--json").stdout)
    assert (report["size"], report["settings"]["size"]) == ([48, 32], [48, 32])


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "full"}, r"size 'full' is a content picture's.*512x384"),
        ({"preserve_color": "luminance"}, r"preserve_color.*a texture has none"),
        ({"preserve_color": "match"}, r"preserve_color.*a texture has none"),
        ({"style_weight": 0.0}, r"style alone"),
        ({"style_layers": ()}, r"style alone"),
    ],
)
def test_what_needs_a_content_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        stylize(None, picture(40, 40), settings=TINY, **changes)


@pytest.mark.usefixtures("no_weights")
def test_two_sides_are_refused_for_a_content_picture(folder: Path) -> None:
    """It keeps its proportions; a size that it will not have is no size to promise."""
    with pytest.raises(InputError, match=r"size 48x32 is for a texture.*--size 48"):
        stylize("a.png", "b.png", settings=TINY)
    for arguments in (["a.png", "b.png"], [".", "b.png", "--out", "out"]):
        result = run(*arguments, "--size", "48x32")
        assert result.exit_code == 2
        assert "--size 48" in result.stderr
    assert not Path("out").exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--content", "none"], "CONTENT"),
        (["a.png"], "STYLE"),
        ([".", "--content", "none", "--size", "32"], "--content"),
        (["a.png", "--content", "b.png"], "--content"),
        (["a.png", "--content", "none", "--size", "8x64"], "16"),
        (["a.png", "--content", "none", "--size", "64x64x64"], "size"),
        (["a.png", "--content", "none", "--size", "64x"], "512x384"),
        (["missing.png", "--content", "none"], "missing.png"),
        (["a.png", "--content", "none", "--out", "a.png", "--overwrite"], "paint from"),
    ],
)
def test_command_refuses_in_one_line(folder: Path, arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("size", [[16], [16, 16, 16], [16, 15], [16.0, 16], ["16", 16], [True, 16], [0, 10**6], []])
def test_size_that_cannot_be_is_refused(size: list[Any]) -> None:
    with pytest.raises(SettingsError, match=r"size is .*width and height"):
        Settings.from_sources(size=size)


def test_size_of_two_sides_survives_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TINY.to_toml())
    assert Settings.from_sources(path) == TINY
