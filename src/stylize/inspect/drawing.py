"""Numbers as PNG, by matplotlib's objects alone: no pyplot, whose state is the whole program's."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from stylize.inspect.measure import FeatureMaps, Flow

INK, MUTED, RULE = "#24292f", "#6e7781", "#d8dee4"
COLOURS = (
    *("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989"),
    *("#bf8700", "#0b9aa5", "#57606a", "#f0883e", "#7ec699"),
)
DOTS_PER_INCH = 160
WIDTH = 10.0  # inches
COLUMNS = 8  # feature maps in a row
GRAM_CHANNELS = 64  # rows of a drawn Gram matrix

Floats = npt.NDArray[np.floating[Any]]


def as_png(figure: Figure, dots_per_inch: int = DOTS_PER_INCH) -> bytes:
    """A figure's PNG, without the date or the version of anything in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def draw_features(features: FeatureMaps) -> bytes:
    """A layer's strongest channels, each from 0 (black) to its own 99.5th percentile (white).

    A layer with negative values, before its ReLU, is drawn about a middle grey instead.
    """
    maps = features.maps.numpy()  # [K, h, w]
    K, h, w = maps.shape
    rows = -(-K // COLUMNS)
    gap, label = 0.06, 0.2  # inches
    cell = (WIDTH - gap * (COLUMNS - 1)) / COLUMNS
    height = rows * (cell * h / w + label)
    figure = Figure(figsize=(WIDTH, height))
    for k in range(K):
        row, column = divmod(k, COLUMNS)
        top = height - row * (cell * h / w + label) - label
        box = (column * (cell + gap), top - cell * h / w, cell, cell * h / w)
        axes = place_axes(figure, box)
        low, high = _grey_range(maps[k])
        axes.imshow(maps[k], cmap="gray", vmin=low, vmax=high, aspect="auto")
        axes.set_axis_off()
        text = f"#{features.channels[k]}"
        axes.text(0, 1.03, text, transform=axes.transAxes, fontsize=7.5, color=INK, va="bottom")
        share = f"{100 * features.shares[k]:.1f} %"
        axes.text(1, 1.03, share, transform=axes.transAxes, fontsize=7.5, color=MUTED, va="bottom", ha="right")
    return as_png(figure, 120)  # there are many of them, and finely grained


def draw_grams(matrices: Mapping[str, Tensor], order: Sequence[int], difference: Tensor | None) -> bytes:
    """Gram matrices [C, C] side by side with one scale and one order of channels, and a difference of two.

    The scale is the square root's, so that small entries are seen; blue is negative, red is positive.
    """
    chosen = list(order)[:GRAM_CHANNELS]
    drawn = {name: _roots(matrix, chosen) for name, matrix in matrices.items()}
    largest = max(float(np.abs(each).max()) for each in drawn.values()) or 1.0
    panels = [(name, each, largest) for name, each in drawn.items()]
    if difference is not None:
        panels.append(("difference", _roots(difference, chosen), largest))
    side, gap, label = 2.12, 0.14, 0.24  # inches
    figure = Figure(figsize=(WIDTH, side + label + 0.02))
    for i, (name, values, most) in enumerate(panels):
        axes = place_axes(figure, (0.01 + i * (side + gap), 0.01, side, side))
        image = axes.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        _quiet(axes)
        axes.set_title(name, fontsize=9, color=INK, loc="left", pad=4)
    bar = place_axes(figure, (0.01 + len(panels) * (side + gap), 0.06, 0.1, side - 0.1))
    scale = figure.colorbar(image, cax=bar, ticks=[-largest, 0, largest])
    scale.ax.set_yticklabels([f"{float(f'{sign * largest**2:.2g}'):,g}" for sign in (-1, 0, 1)])
    scale.ax.tick_params(labelsize=7, colors=MUTED, length=0)
    scale.outline.set_visible(False)
    return as_png(figure)


def draw_flow(flow: Flow) -> bytes:
    """The L2 norm of each loss's gradient at every layer that it reaches."""
    layers = list(flow.activations)
    place = {layer: i for i, layer in enumerate(layers)}
    figure = Figure(figsize=(WIDTH, 3.6))
    axes = place_axes(figure, (0.75, 0.85, WIDTH - 2.4, 2.6))
    for i, loss in enumerate(each for each in flow.losses if each.gradients and each.picture["norm"] > 0):
        norms = {place[layer]: numbers["norm"] for layer, numbers in loss.gradients.items() if numbers["norm"] > 0}
        points = list(norms), list(norms.values())
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(*points, color=colour, linewidth=1.4, marker="o", markersize=3, label=loss.name)
    scale_by_powers(axes)
    axes.set_xticks(range(len(layers)), layers, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.4, len(layers) - 0.6)
    style_axes(axes, "norm of the gradient")
    if axes.lines:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8, frameon=False, labelcolor=INK)
    return as_png(figure)


def draw_heat(image: Tensor, warmth: Tensor, *, cool: bool = False) -> Tensor:
    """A heat map [H, W] in [0, 1] over a picture [1, 3, H, W] in grey, as such a picture."""
    grey = image.cpu().mean(dim=1, keepdim=True).expand(-1, 3, -1, -1) * 0.75
    colours = mpl.colormaps["viridis" if cool else "inferno"](warmth.numpy())[..., :3]  # [H, W, 3]
    heat = torch.from_numpy(colours.astype(np.float32)).movedim(-1, 0)[None]
    cover = 0.85 * warmth.sqrt()[None, None]
    mixed: Tensor = grey * (1 - cover) + heat * cover
    return mixed


def _grey_range(values: Floats) -> tuple[float, float]:
    high = float(np.percentile(np.abs(values), 99.5)) or float(np.abs(values).max()) or 1.0
    return (-high if values.min() < 0 else 0.0), high


def _roots(matrix: Tensor, chosen: Sequence[int]) -> Floats:
    values = matrix[chosen][:, chosen].double().cpu().numpy()
    roots: Floats = np.sign(values) * np.sqrt(np.abs(values))
    return roots


def place_axes(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes at a place given in inches: left, bottom, width, height."""
    width, height = figure.get_size_inches()
    left, bottom, wide, high = box
    return figure.add_axes((left / width, bottom / height, wide / width, high / height))


def _quiet(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_color(RULE)
        spine.set_linewidth(0.6)


def scale_by_powers(axes: Axes) -> None:
    """A logarithmic scale whose ticks are plain numbers; those between powers of ten only where it is short."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}") if high < 100 * low else NullFormatter())
    axes.tick_params(which="minor", labelsize=8, colors=MUTED)


def style_axes(axes: Axes, what: str) -> None:
    """What every chart has in common: a calm frame, small grey ticks, a label on its side."""
    _quiet(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=MUTED, length=3, width=0.6)
    axes.tick_params(which="minor", length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_ylabel(what, fontsize=8.5, color=INK)
