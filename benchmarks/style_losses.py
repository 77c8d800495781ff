"""What each style loss costs, where it starts from, and what it paints.

    python benchmarks/style_losses.py [--size 256] [--evaluations 150] [--sheet sheet.png]

First, at that long side, of the first pair: milliseconds of processor time of one evaluation (picture to gradient)
for each style loss and their ratio to plain Gram matrices, all in turns within one run, the fastest of each; and
the style loss of the photograph, which is where a run starts. Then, with --sheet, the pictures of two pairs: the
photograph, the painting, and what each style loss makes of them with the same number of evaluations and every
other setting as it ships. Below each stands its style error as an independent judge measures it, `evaluator.py`:
plain Gram matrices, as a share of the photograph's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from evaluator import Evaluator, read, speckle
from stylize.images import to_pil
from stylize.nst.device import choose_device, choose_dtype
from stylize.nst.objective import Objective, measure_style
from stylize.nst.transfer import Style, fit, resize, transfer
from stylize.nst.vgg import Vgg19, load_weights
from stylize.settings import CHOICES, Settings

ASSETS = Path(__file__).parents[1] / "assets"
PAIRS = (("red_panda.webp", "starry_night.png"), ("cincinnati-bridge.jpg", "night_cafe.webp"))
ROUNDS = 5
CAPTION = 30  # px below each picture


def of_each(names: tuple[str, ...]) -> Iterator[tuple[str, Settings]]:
    for name in names:
        yield name, Settings(style_loss=name)  # type: ignore[arg-type]


def make_network() -> Vgg19:
    settings, device = Settings(), choose_device()
    layers = settings.content_layers + settings.style_layers
    return Vgg19(load_weights(), layers, dtype=choose_dtype(settings.precision, device)).to(device)


def pair(number: int, size: int) -> tuple[Tensor, Tensor]:
    """The photograph at a long side, and the painting as it is."""
    content, style = (
        read(ASSETS / kind / name).float() for kind, name in zip(("content", "style"), PAIRS[number], strict=True)
    )
    return resize(content, fit(content.shape[3], content.shape[2], size)), style


def evaluate(objective: Objective, content: Tensor) -> float:
    """Milliseconds of one evaluation: of processor time, where that is what computes."""
    clock = time.perf_counter if content.is_cuda else time.process_time
    begun = clock()
    image = content.clone().requires_grad_()
    objective(image).total.backward()
    if image.is_cuda:
        torch.cuda.synchronize()
    return 1000 * (clock() - begun)


def costs(network: Vgg19, size: int, names: tuple[str, ...]) -> Iterator[str]:
    """The first table."""
    content, style = pair(0, size)
    device = next(network.parameters()).device
    content = content.to(device)
    style = resize(style, fit(style.shape[3], style.shape[2], size)).to(device)
    objectives = {
        name: Objective(network, content, measure_style(network, style, settings), settings)
        for name, settings in of_each(names)
    }
    fastest = dict.fromkeys(names, float("inf"))
    for _ in range(ROUNDS):
        for name, objective in objectives.items():
            fastest[name] = min(fastest[name], evaluate(objective, content))
    yield f"| style loss | ms an evaluation at {size} px | times gram's | style loss of the photograph |"
    yield "| --- | ---: | ---: | ---: |"
    for name, objective in objectives.items():
        with torch.no_grad():
            start = float(objective(content).terms["style"])
        yield f"| `{name}` | {fastest[name]:.0f} | {fastest[name] / fastest['gram']:.2f} | {start:.2f} |"


def row(
    network: Vgg19, number: int, size: int, evaluations: int, names: tuple[str, ...]
) -> list[tuple[str, Tensor]]:
    """The pictures of one pair, with their captions."""
    content, style = pair(number, size)
    painted_style = resize(style, fit(style.shape[3], style.shape[2], size))
    judge = Evaluator(content, painted_style)
    start = judge.judge(content).style
    pictures = [("photograph", content), ("painting", painted_style)]
    for name, settings in of_each(names):
        settings = settings.replace(size=size, iterations=evaluations)
        begun = time.perf_counter()
        image = transfer(network, content, Style(network, [style], settings), settings).image
        seconds = time.perf_counter() - begun
        error = judge.judge(image).style / start
        pictures.append((f"{name}: {error:.1%}", image))
        told = f"style error {error:.1%}, speckle {speckle(image):.2f}, {seconds:.0f} s"
        print(f"{PAIRS[number][0]}, {name}: {told}", flush=True)
    return pictures


def draw(rows: list[list[tuple[str, Tensor]]], cell: int) -> Image.Image:
    """Each pair's pictures in lines of four, each in a cell of `cell` px in width, with its caption below."""
    lines = [pictures[first : first + 4] for pictures in rows for first in range(0, len(pictures), 4)]
    heights = [max(image.shape[2] for _, image in line) + CAPTION for line in lines]
    sheet = Image.new("RGB", (4 * cell, sum(heights)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    bottom = 0
    for line, height in zip(lines, heights, strict=True):
        bottom += height
        for x, (caption, image) in enumerate(line):
            shown = to_pil(image)
            sheet.paste(shown, (x * cell + (cell - shown.width) // 2, bottom - CAPTION - shown.height))
            pen.text((x * cell + cell // 2, bottom - CAPTION + 4), caption, "black", font, "ma")
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--evaluations", type=int, default=150)
    parser.add_argument("--losses", default=",".join(CHOICES["style_loss"]), help="which, with commas between")
    parser.add_argument("--sheet", type=Path, help="where to write the pictures")
    arguments = parser.parse_args()
    names = tuple(arguments.losses.split(","))
    network = make_network()
    for line in costs(network, arguments.size, names):
        print(line, flush=True)
    if arguments.sheet:
        rows = [row(network, number, arguments.size, arguments.evaluations, names) for number in range(len(PAIRS))]
        draw(rows, arguments.size).save(arguments.sheet)


if __name__ == "__main__":
    main()
