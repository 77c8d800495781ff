"""The benchmarks run, and their judge agrees with the product that it shares nothing with."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from conftest import picture
from stylize.nst.objective import Objective, measure_style
from stylize.nst.vgg import Vgg19, Weights
from stylize.settings import Settings

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def evaluator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluator", BENCHMARKS / "evaluator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evaluator"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def test_evaluator_and_objective_agree(evaluator: ModuleType, embedded: Weights) -> None:
    """Two implementations of content + 1000 · style, one value; float64, so that nothing else can differ."""
    content, style, image = (picture(48, 64, seed=seed).double() for seed in range(3))
    settings = Settings.from_sources("gatys2016", range_weight=0.0)
    network = Vgg19(embedded, settings.content_layers + settings.style_layers, dtype=torch.float64)
    objective = Objective(network, content, measure_style(network, style, settings), settings)
    with torch.no_grad():
        ours = float(objective(image).total)
    assert evaluator.Evaluator(content, style).judge(image).gatys == pytest.approx(ours, rel=1e-9)


def test_speckle_sees_coloured_noise_and_not_grey(evaluator: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    grey = torch.rand(1, 1, 40, 40, generator=generator).expand(1, 3, 40, 40)
    coloured = torch.rand(1, 3, 40, 40, generator=generator)
    assert evaluator.speckle(grey) == pytest.approx(0, abs=1e-9)
    assert evaluator.speckle(torch.full((1, 3, 9, 9), 0.3)) == pytest.approx(0, abs=1e-9)
    assert evaluator.speckle(coloured) > 10


@pytest.mark.slow
def test_default_result_is_near_the_painting(evaluator: ModuleType, tmp_path: Path) -> None:
    """At 256 px, by the independent judge: the style error is a small part of the photograph's own."""
    from stylize import stylize

    assets = BENCHMARKS.parent / "assets"
    content, style = assets / "content" / "red_panda.webp", assets / "style" / "starry_night.png"
    out = tmp_path / "result.png"
    stylize(content, style, size=256, out=out)
    with Image.open(out) as image:
        width, height = image.size
    shown = evaluator.read(content, (width, height))
    judge = evaluator.Evaluator(shown, evaluator.read(style, (256, round(256 * 562 / 706))))
    # The photograph itself is 100 %. At 512 px the demo leaves under 6 %; at half the size a little more.
    assert judge.judge(evaluator.read(out)).style < 0.08 * judge.judge(shown).style
    assert judge.judge(evaluator.read(out)).speckle < evaluator.speckle(evaluator.read(style))


def test_device_check_runs_on_a_processor() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "device_check.py"), "--device", "cpu", "--tiny"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "float32 against the CPU's float32 | ok" in done.stdout
    assert "FAILED" not in done.stdout
    assert "a whole run at 64 px" in done.stdout
