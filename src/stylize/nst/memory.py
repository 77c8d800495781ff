"""What a picture of a size takes in memory, and how to make do with less: a plan, made before anything is computed.

Everything is counted by pixels, never by a long side. The figures per pixel are measured (docs/memory.md says how,
and benchmarks/memory.py measures them again); they are upper bounds, since a plan is a promise.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stylize.errors import InputError
from stylize.nst.device import choose_device, choose_dtype, free_memory
from stylize.nst.losses import Statistics
from stylize.nst.objective import Objective, Region, Styles, measure_style
from stylize.nst.ranks import ALONE, Ranks, pixels_of
from stylize.nst.tiles import Geometry, TiledObjective, Tiles, measure_style_by_tiles
from stylize.nst.vgg import CHANNELS_PER_BLOCK, Vgg19, skeleton
from stylize.process import LARGEST_KEPT
from stylize.settings import CONVOLUTIONS_PER_BLOCK, LAYERS, Settings, gigabytes

SHARE_OF_FREE = 0.85  # of the memory that is free when no limit is named

PROGRAM_BYTES = {"cpu": 800e6, "cuda": 400e6, "mps": 800e6}  # torch, the network and a style's statistics
PICTURE_BYTES = 120.0  # a pixel: the picture, its gradients on their way, the best one, the optimiser's own vectors
KEEPING = 1.6  # while the system's allocator keeps a picture's copies (process.py), there are so many times more
GUIDE_BYTES = 24.0  # a pixel and region: its mask, as each layer sees it, and on the way there
VARIABLES = 4.0  # a pixel: three colours, all levels of the pyramid
# Of the features that are kept for the way back: with the gradients on the way and the convolutions' own buffers.
COPIES = {2: 2.2, 4: 1.5, 8: 1.5}  # by the bytes of a feature
# In tiles there are fewer, since large blocks go back at once (process.py); but the system's allocator is left with
# free pieces between those in use: bytes at most, and for each byte of the features.
TILED_COPIES = {2: 1.85, 4: 1.5, 8: 1.5}
PIECES_BYTES, PIECES_SHARE = 600e6, 2.0

# What is tried: pixels of the largest window, and pairs of the optimiser.
_WINDOWS = (4_000_000, 2_000_000, 1_400_000, 1_000_000, 700_000, 500_000, 300_000, 150_000)
_PAIRS = (6, 4, 3, 2)
_TILED = 1.5  # an evaluation goes forward twice and back once, instead of once and once
_FORGETFUL = 0.4  # evaluations that h pairs need go by 1 + 0.4 / h, about (docs/benchmarks.md has the ablation)
_ROUNDED = 1.01  # and pairs in 16 bits need a few more


@dataclass(frozen=True)
class Plan:
    """How a picture is painted within a limit of memory, and what it takes; sizes in bytes."""

    width: int  # px
    height: int
    rows: int  # of tiles; one row and one column are the whole picture in one piece
    columns: int
    window_pixels: int  # of the largest tile with its halo
    history: int  # curvature pairs
    history_precision: Literal["fp32", "bf16"]
    parts: Mapping[str, float]  # bytes by what they are for
    rank: int = 0  # among all plans for the picture, of which the first costs the least time

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def most_pixels(self) -> int:
        """That may go through the network at once without a gradient, which takes a quarter of the memory."""
        return 3 * self.window_pixels

    @property
    def is_tiled(self) -> bool:
        """Is it looked at in more than one piece?"""
        return self.rows * self.columns > 1

    def __str__(self) -> str:
        """One line for people."""
        pieces = f"{self.rows}×{self.columns} tiles" if self.is_tiled else "one piece"
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in self.parts.items() if size >= 5e7)
        return (
            f"{self.width}×{self.height} px take about {gigabytes(self.total)} of memory, in {pieces}, "
            f"with {self.history} pairs in {self.history_precision} ({parts})."
        )


def plan_memory(
    size: tuple[int, int],
    settings: Settings,
    *,
    limit: float | None = None,
    source_bytes: float = 0.0,
    regions: int = 0,
    device: torch.device | None = None,
    width: int | None = None,
    skip: int = 0,
    ranks: Ranks = ALONE,
) -> Plan:
    """The plan that costs least time among those that keep the limit.

    Args:
        size: width and height of the result in pixels.
        settings: with `memory_limit`, unless `limit` is given.
        limit: in bytes; without any, a share of what is free on the device.
        source_bytes: of the content picture as it was read, where it stays in memory beside the result.
        regions: parts of the picture that have a style of their own.
        device: that paints; None = the one that the settings mean.
        width: bytes of a feature; None = the device's own.
        skip: how many of the better plans to leave out.
        ranks: the processes that share the tiles; all of them get the first one's plan.

    Raises:
        InputError: when no plan keeps it; it names the size that would.
    """
    device = device or choose_device(settings.device)
    limit = limit or settings.memory_limit or SHARE_OF_FREE * free_memory(device) / ranks.on_this_machine
    costs = _Costs.of(settings, device, width, source_bytes, regions)
    plans = [replace(plan, rank=rank) for rank, plan in enumerate(_plans(size, settings, costs, ranks))]
    first = next((plan.rank for plan in plans[skip:] if plan.total <= limit), -1)
    first = ranks.follow_number(first)
    if first < 0:
        raise InputError(_refusal(size, settings, costs, limit, device))
    return plans[first]


def features_per_pixel(settings: Settings) -> tuple[float, float]:
    """(floats kept, multiply-adds of one forward pass) for each pixel, down to the deepest layer."""
    deepest = max(LAYERS.index(layer) for layer in (*settings.content_layers, *settings.style_layers))
    kept, operations, inputs = 0.0, 0.0, 3
    for block, (channels, count) in enumerate(zip(CHANNELS_PER_BLOCK, CONVOLUTIONS_PER_BLOCK, strict=True)):
        area = 4.0**-block  # pixels of this block for each pixel of the picture
        for convolution in range(count):
            if LAYERS.index(f"conv{block + 1}_{convolution + 1}") > deepest:
                return kept, operations
            kept += channels * area
            operations += 9 * inputs * channels * area
            inputs = channels
    return kept, operations


@dataclass(frozen=True)
class _Costs:
    """What things take, in bytes."""

    program: float
    content: float
    picture: float  # a pixel, as the next four
    targets: float
    guides: float
    vector: float  # of as many numbers as there are variables, in float32
    features: float  # a pixel of a window, kept once
    width: int  # bytes of a feature
    vectors: Callable[[int], int]  # that an optimiser remembers with so many pairs

    @classmethod
    def of(
        cls, settings: Settings, device: torch.device, width: int | None, source_bytes: float, regions: int
    ) -> _Costs:
        width = width or choose_dtype(settings.precision, device).itemsize
        kept, _ = features_per_pixel(settings)
        blocks = [int(layer.split("_")[0][-1]) - 1 for layer in settings.content_layers]
        count = {"lbfgs": lambda pairs: 2 * pairs, "torch-lbfgs": lambda pairs: 2 * pairs + 4, "adam": lambda _: 2}
        return cls(
            program=PROGRAM_BYTES[device.type],
            content=source_bytes if device.type == "cpu" else 0.0,
            picture=PICTURE_BYTES,
            targets=sum(CHANNELS_PER_BLOCK[block] * 4.0**-block * width for block in blocks),
            guides=GUIDE_BYTES * regions,
            vector=VARIABLES * 4,
            features=kept * width,
            width=width,
            vectors=count[settings.optimizer],
        )


def _plans(
    size: tuple[int, int], settings: Settings, costs: _Costs, ranks: Ranks = ALONE
) -> list[Plan]:
    """All plans, the fastest first."""
    width, height = size
    looks = [(1, 1, width * height, 1.0)]  # rows, columns, pixels of the largest window, time
    if not settings.whole_picture_only:
        looks += _cuttings(width, height, _geometry(settings.content_layers, settings.style_layers), ranks)
    plans = []
    for (rows, columns, window, look), (pairs, precision, search) in itertools.product(looks, _memories(settings)):
        plan = Plan(width, height, rows, columns, window, pairs, precision, {})
        plans.append((look * search, _account(plan, costs)))
    return [plan for _, plan in sorted(plans, key=lambda each: each[0])]


def _cuttings(
    width: int, height: int, geometry: Geometry, ranks: Ranks
) -> Iterator[tuple[int, int, int, float]]:
    """Rows and columns of tiles, pixels of the largest window, and the time against the picture in one piece."""
    found = [geometry.tiles(height, width, 1, ranks.count), geometry.tiles(height, width, ranks.count, 1)]
    for most in _WINDOWS:
        if most < width * height:
            with contextlib.suppress(InputError):  # a halo wider than the tile
                found.append(geometry.fitting(height, width, most))
    for tiles in found:
        if len(tiles) > 1:
            rows = len({tile.rows.start for tile in tiles})
            slowest = max(map(pixels_of, ranks.dealt(tiles))) / (width * height)
            yield rows, len(tiles) // rows, max(tile.pixels for tile in tiles), _TILED * slowest


def _memories(settings: Settings) -> Iterator[tuple[int, Literal["fp32", "bf16"], float]]:
    """Pairs of the optimiser, their precision, and about how many evaluations they need, relatively."""
    if settings.optimizer != "lbfgs":
        yield settings.history, "fp32", 1.0
        return
    for pairs in (settings.history, *(fewer for fewer in _PAIRS if fewer < settings.history)):
        if settings.history_precision != "bf16":
            yield pairs, "fp32", 1 + _FORGETFUL / pairs
        if settings.history_precision != "fp32":
            yield pairs, "bf16", _ROUNDED * (1 + _FORGETFUL / pairs)


def _account(plan: Plan, costs: _Costs) -> Plan:
    """The plan with its parts filled in."""
    pixels = plan.width * plan.height
    narrower = 0.5 if plan.history_precision == "bf16" else 1.0
    parts = {
        "program": costs.program,
        "content": costs.content,
        "picture": costs.picture * pixels * (KEEPING if 12 * pixels < LARGEST_KEPT else 1.0),
        "targets": costs.targets * pixels,
        "guides": costs.guides * pixels,
        "history": costs.vectors(plan.history) * costs.vector * narrower * pixels,
        "features": _features(plan, costs),
    }
    return replace(plan, parts=parts)


def _features(plan: Plan, costs: _Costs) -> float:
    """What one evaluation takes in bytes, beside the picture's own size."""
    kept = costs.features * plan.window_pixels
    if not plan.is_tiled:
        return COPIES[costs.width] * kept
    return TILED_COPIES[costs.width] * kept + min(PIECES_BYTES, PIECES_SHARE * kept)


def _refusal(
    size: tuple[int, int], settings: Settings, costs: _Costs, limit: float, device: torch.device
) -> str:
    width, height = size
    text = f"A result of {width}×{height} px does not fit into {gigabytes(limit)} of memory on {device.type}."
    fits = _largest(size, settings, costs, limit)
    if fits:
        text += f" Use --size {fits} or less"
    elif limit < costs.program:
        text += f" The program alone takes {gigabytes(costs.program)}: free some memory"
    else:
        text += " Use a smaller --size or free some memory"
    text += ", or raise --memory-limit." if settings.memory_limit else "."
    if settings.whole_picture_only:
        text += f" Tiles, which take less, cannot be had: {settings.whole_picture_only}"
    return text


def _largest(size: tuple[int, int], settings: Settings, costs: _Costs, limit: float) -> int | None:
    """The long side in pixels at which a picture of these proportions keeps the limit, about."""
    low, high = 0, max(size)
    while high - low > 8:
        middle = (low + high) // 2
        scaled = (max(1, size[0] * middle // max(size)), max(1, size[1] * middle // max(size)))
        fits = any(plan.total <= limit for plan in _plans(scaled, settings, costs))
        low, high = (middle, high) if fits else (low, middle)
    return low if low >= 16 else None


@functools.lru_cache(maxsize=8)
def _geometry(content_layers: tuple[str, ...], style_layers: tuple[str, ...]) -> Geometry:
    """Of tiles, which the kind of pooling does not change."""
    layers = (*content_layers, *style_layers)
    return Geometry.of(skeleton(layers), layers)


def objective_for(
    plan: Plan,
    network: Vgg19,
    content: Tensor,
    style: Styles | Sequence[Region],
    settings: Settings,
    ranks: Ranks = ALONE,
) -> Objective:
    """The objective that looks at a picture as the plan says; arguments are those of `Objective`."""
    if not plan.is_tiled:
        return Objective(network, content, style, settings)
    geometry = Geometry.of(network, (*settings.content_layers, *settings.style_layers))
    tiles = geometry.tiles(plan.height, plan.width, plan.rows, plan.columns)
    return TiledObjective(content, style, settings, Tiles(network, geometry, tiles, ranks))


def measure_style_within(
    most_pixels: int,
    network: Vgg19,
    style: Tensor,
    settings: Settings,
    guide: Mapping[str, Tensor] | None = None,
) -> dict[str, Statistics]:
    """`measure_style` of a picture of which not more than so many pixels go through the network at once."""
    height, width = style.shape[2:]
    if height * width <= most_pixels or settings.whole_picture_only:
        return measure_style(network, style, settings, guide)
    geometry = Geometry.of(network, settings.style_layers)
    tiles = Tiles(network, geometry, geometry.fitting(height, width, most_pixels))
    return measure_style_by_tiles(style, settings, tiles, guide)
