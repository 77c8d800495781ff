"""What each choice of the engine is worth: one changed at a time, everything else as it ships.

    python benchmarks/ablations.py [--size 256] [--out docs/benchmarks/ablations.md]

For the default objective and that of the preset gatys2016, on one pair, from the content picture at one scale:
the loss of the best picture, clamped as it is saved, after 10, 20, 40, 80 and 120 evaluations, and the seconds
of an evaluation. The last rows go from one scale to the next: detail hand-over, and the memory of L-BFGS carried
along. Projection and carrying are not in the product; they are written here, to be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluator import read
from stylize.nst import optimize
from stylize.nst.device import choose_device, choose_dtype
from stylize.nst.lbfgs import Lbfgs
from stylize.nst.objective import Objective
from stylize.nst.optimize import Search
from stylize.nst.transfer import Style, fit, hand_over, resize
from stylize.nst.vgg import Vgg19, load_weights
from stylize.settings import Settings

ASSETS = Path(__file__).parents[1] / "assets"
CONTENT, STYLE = ASSETS / "content" / "cincinnati-bridge.jpg", ASSETS / "style" / "night_cafe.webp"
NOTED = (10, 20, 40, 80, 120)

# name: (constants of optimize.py, settings)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it ships": ({}, {}),
    "pixels, no pyramid": ({"PYRAMID_LEVELS": 1}, {}),
    "pyramid of 4 levels": ({"PYRAMID_LEVELS": 4}, {}),
    "pyramid of 6 levels": ({"PYRAMID_LEVELS": 6}, {}),
    "gain 0.35": ({"PYRAMID_GAIN": 0.35}, {}),
    "gain 0.5": ({"PYRAMID_GAIN": 0.5}, {}),
    "gain 1": ({"PYRAMID_GAIN": 1.0}, {}),
    "first step 1 grey level": ({}, {"step_levels": 1.0}),
    "first step 16 grey levels": ({}, {"step_levels": 16.0}),
    "history 2": ({}, {"history": 2}),
    "history 3": ({}, {"history": 3}),
    "history 5": ({}, {"history": 5}),
    "history 10": ({}, {"history": 10}),
    "history 20": ({}, {"history": 20}),
    "history 40": ({}, {"history": 40}),
    "history in bfloat16": ({}, {"history_precision": "bf16"}),
    "no range penalty": ({}, {"range_weight": 0.0}),
    "projection for the penalty": ({}, {"range_weight": 0.0}),
    "float32": ({}, {"precision": "fp32"}),
    "torch.optim.LBFGS": ({}, {"optimizer": "torch-lbfgs"}),
    "Adam": ({}, {"optimizer": "adam"}),
}


class Bench:
    """One pair of pictures, and networks that are built once."""

    def __init__(self) -> None:
        self.weights = load_weights()
        self.device = choose_device()
        self.content, self.style = (read(path).float() for path in (CONTENT, STYLE))
        self.networks: dict[torch.dtype, Vgg19] = {}

    def objective(self, settings: Settings, size: int) -> tuple[Objective, Tensor]:
        """The objective at a long side, and the content picture there."""
        dtype = choose_dtype(settings.precision, self.device)
        layers = settings.content_layers + settings.style_layers
        network = self.networks.setdefault(dtype, Vgg19(self.weights, layers, dtype=dtype).to(self.device))
        height, width = self.content.shape[2:]
        content = resize(self.content, fit(width, height, size)).to(self.device)
        targets = Style(network, [self.style], settings).at(size, self.device)
        return Objective(network, content, targets, settings), content


def saved_losses(search: Search, noted: tuple[int, ...], *, project: bool = False) -> tuple[list[float], float]:
    """The total loss of the best picture as it would be saved, after each noted evaluation; seconds of one."""
    losses, taken = [], 0.0
    for evaluation in range(1, noted[-1] + 1):
        begun = time.perf_counter()
        search.step()
        if project:
            _project(search)
        taken += time.perf_counter() - begun
        if evaluation in noted:
            losses.append(search.result()[1]["total"])
    return losses, taken / noted[-1]


@torch.no_grad()
def _project(search: Search) -> None:
    """Clamp the picture to [0, 1] by changing its finest coefficients."""
    image = search.start + search.pyramid.synthesize(search.coefficients)
    search.pyramid.levels(search.coefficients)[0].add_(image.clamp(0, 1) - image)


@contextlib.contextmanager
def constants(values: dict[str, Any]) -> Iterator[None]:
    """Other constants in optimize.py, for a while."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(optimize, name, value))
        yield


def variants(bench: Bench, config: str | None, size: int) -> Iterator[tuple[str, list[float], float]]:
    """A row for each variant: its name, its losses, the seconds of an evaluation."""
    for name, (changed, overrides) in VARIANTS.items():
        settings = Settings.from_sources(config, **overrides)
        objective, content = bench.objective(settings, size)
        with constants(changed):
            search = Search(objective, content, settings)
        yield name, *saved_losses(search, NOTED, project=name.startswith("projection"))


def scale_changes(bench: Bench, size: int) -> Iterator[tuple[str, list[float], float]]:
    """The same for the second of two scales, started in several ways."""
    settings = Settings()
    coarse_objective, coarse_content = bench.objective(settings, size // 2)
    coarse = Search(coarse_objective, coarse_content, settings)
    saved_losses(coarse, NOTED[:4])
    assert coarse.best is not None
    objective, content = bench.objective(settings, size)
    for detail in (0.0, 0.5, 1.0):
        start = hand_over(coarse.best, coarse_content, content, detail)
        yield f"detail {detail:g} handed over", *saved_losses(Search(objective, start, settings), NOTED)
    search = Search(objective, hand_over(coarse.best, coarse_content, content, 0.5), settings)
    _carry(coarse, search)
    yield "detail 0.5, and L-BFGS's memory carried along", *saved_losses(search, NOTED)


def _carry(coarse: Search, fine: Search) -> None:
    """Enter the coarse scale's pairs into the fine one's memory: its levels are the fine one's from the second."""
    source, target = coarse.optimizer, fine.optimizer
    assert isinstance(source, Lbfgs)
    assert isinstance(target, Lbfgs)
    gain = coarse.pyramid.gain

    def moved(vector: Tensor, factor: float) -> Tensor:
        result = torch.zeros(fine.pyramid.length, device=vector.device)
        for level, part in zip(fine.pyramid.levels(result)[1:], coarse.pyramid.levels(vector), strict=False):
            level.copy_(F.interpolate(part, level.shape[2:], mode="bilinear") * factor)
        return result

    target._order = list(range(len(source._order)))
    for slot, old in enumerate(source._order):
        target._rows[2 * slot] = moved(source._rows[2 * old], 1 / gain)
        target._rows[2 * slot + 1] = moved(source._rows[2 * old + 1], gain)
    rows = target._rows.double()
    target._products[:-1, :-1] = (rows @ rows.t()).cpu()


def table(title: str, rows: Iterator[tuple[str, list[float], float]], unit: float) -> str:
    """Rows as Markdown, printed as they come."""
    head = f"| {title} | " + " | ".join(f"{n} evaluations" for n in NOTED) + " | s an evaluation |"
    lines = [head, "| --- |" + " ---: |" * (len(NOTED) + 1)]
    for name, losses, taken in rows:
        lines.append(f"| {name} | " + " | ".join(f"{loss / unit:.4g}" for loss in losses) + f" | {taken:.3f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bench = Bench()
    tables = [
        table("gatys2016, loss in thousands", variants(bench, "gatys2016", arguments.size), 1000.0),
        table("default objective", variants(bench, None, arguments.size), 1.0),
        table("second of two scales, default objective", scale_changes(bench, arguments.size), 1.0),
    ]
    if arguments.out:
        arguments.out.write_text("\n".join(tables))


if __name__ == "__main__":
    main()
