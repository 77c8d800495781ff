"""Several styles: by weights, and by layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from conftest import picture, random_weights
from stylize import api, stylize
from stylize.cli import Layers, _style_layers, program
from stylize.errors import SettingsError
from stylize.images import read_record, save_picture
from stylize.nst.losses import Statistics
from stylize.nst.transfer import Style
from stylize.nst.vgg import Vgg19
from stylize.settings import Settings

LAYERS = ("relu1_1", "relu2_1", "relu3_1")
SETTINGS = Settings(style_layers=LAYERS, style_layer_weights=None, content_layers=("relu2_2",))
TINY = Settings(size=32, iterations=3, precision="fp32", device="cpu")
PICTURES = [picture(20, 28, seed=1), picture(24, 24, seed=2), picture(32, 20, seed=3)]


def targets(*numbers: int, **changes: Any) -> dict[str, Statistics]:
    """What a blend of some of the pictures asks for."""
    network = Vgg19(random_weights(), SETTINGS.content_layers + SETTINGS.style_layers)
    images = [PICTURES[number - 1] for number in numbers]
    return dict(Style(network, images, SETTINGS.replace(**changes)).at(24, torch.device("cpu")))


def assert_same(one: dict[str, Statistics], other: dict[str, Statistics]) -> None:
    assert one.keys() == other.keys()
    for layer in one:
        for a, b in zip(one[layer], other[layer], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_blend_of_all_and_nothing_is_the_one_style() -> None:
    assert_same(targets(1, 2, style_weights=(0.0, 1.0)), targets(2))
    assert_same(targets(1, 2, style_weights=(1.0, 0.0)), targets(1))


def test_scale_of_the_weights_is_free() -> None:
    assert_same(targets(1, 2, style_weights=(0.7, 0.3)), targets(1, 2, style_weights=(70.0, 30.0)))
    assert_same(targets(1, 2), targets(1, 2, style_weights=(5.0, 5.0)))


def test_order_of_the_styles_does_not_matter() -> None:
    forth = targets(1, 2, 3, style_weights=(0.5, 0.3, 0.2))
    assert_same(forth, targets(3, 1, 2, style_weights=(0.2, 0.5, 0.3)))


def test_each_layer_follows_its_own_style() -> None:
    found = targets(1, 2, style_layer_sources=(2, 2, 1))
    first, second = targets(1), targets(2)
    assert_same(found, {"relu1_1": second["relu1_1"], "relu2_1": second["relu2_1"], "relu3_1": first["relu3_1"]})


def test_layer_without_a_source_follows_the_blend() -> None:
    weights = {"style_weights": (0.2, 0.8)}
    blend, second = targets(1, 2, **weights), targets(2)
    found = targets(1, 2, style_layer_sources=(0, 2, 0), **weights)
    assert_same(found, {"relu1_1": blend["relu1_1"], "relu2_1": second["relu2_1"], "relu3_1": blend["relu3_1"]})


def test_one_source_everywhere_paints_as_that_style_alone() -> None:
    """Through the whole program; the blend, which one layer follows, is all of the second picture."""
    content = picture(24, 32)
    alone = stylize(content, PICTURES[1], settings=TINY)
    sources, weights = (2, 2, 0, 2, 2), (0, 1)
    both = stylize(content, PICTURES[:2], settings=TINY, style_layer_sources=sources, style_weights=weights)
    torch.testing.assert_close(both.tensor, alone.tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("relu1_1", Layers(("relu1_1",), None, None)),
        ("relu1_1=2,relu2_1=1", Layers(("relu1_1", "relu2_1"), (2.0, 1.0), None)),
        ("relu3_1, relu4_1 / relu1_1", Layers(("relu3_1", "relu4_1", "relu1_1"), None, (1, 1, 2))),
        ("relu3_1=3/relu1_1=1,relu2_1=2", Layers(("relu3_1", "relu1_1", "relu2_1"), (3.0, 1.0, 2.0), (1, 2, 2))),
    ],
)
def test_groups_are_read_in_the_order_of_the_styles(text: str, layers: Layers) -> None:
    assert _style_layers(text) == layers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, image in enumerate([picture(24, 32), *PICTURES]):
        save_picture(image, tmp_path / f"{number}.png")
    return tmp_path


def test_groups_reach_the_record_and_come_back(folder: Path) -> None:
    arguments = ["0.png", "1.png", "2.png", "--iterations", "2", "--size", "32", "--out", "r.png"]
    result = CliRunner().invoke(program, [*arguments, "--style-layers", "relu3_1/relu1_1,relu2_1"])
    assert result.exit_code == 0, result.output
    settings = read_record("r.png")["settings"]
    assert settings["style_layers"] == ["relu3_1", "relu1_1", "relu2_1"]
    assert settings["style_layer_sources"] == [1, 2, 2]
    again = api.load_settings("r.png")
    assert again.style_layer_sources == (1, 2, 2)
    assert again.replace(style_layers=("relu1_1",)).style_layer_sources is None


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--style-layers", "relu3_1/relu2_1/relu1_1"], "names style picture 3, and there are 2"),
        (["--style-layer-sources", "1,1,1,1,1"], "No style layer follows style picture 2"),
        (["--style-layer-sources", "1,2"], "2 values for 5 style layers"),
        (["--style-layer-sources", "1,2,1,2,-1"], "from 1"),
        (["--style-layers", "relu3_1/relu2_1", "--style-layer-sources", "1,2"], "not both"),
        (["--style-layers", "relu3_1//relu2_1"], "no layer ''"),
        (["--style-layers", "relu3_1=1/relu2_1"], "every layer a weight"),
    ],
)
def test_groups_that_do_not_fit_are_refused(folder: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(program, ["0.png", "1.png", "2.png", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize("sources", [(1.0,) * 5, ("1",) * 5, (True,) * 5, (-1,) * 5, (), (1, 1)])
def test_sources_are_numbers_of_pictures(sources: tuple[Any, ...]) -> None:
    with pytest.raises(SettingsError, match="style_layer_sources"):
        Settings(style_layer_sources=sources)
