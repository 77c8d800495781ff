"""The objective of a picture that the network cannot look at in one piece: exact, tile by tile.

All that the losses want of the features are sums over places: squared errors, means and Gram matrices. A first
pass adds them up over tiles. The gradient of the losses with respect to those sums then tells each feature's own,
which a second pass sends back through the network, tile by tile (Galerne et al. 2024, arXiv 2212.13459). Each tile
owns the features of its core, and looks at a halo around it that is wide enough for these to be what they are
in the whole picture. The gradients of neighbouring tiles overlap in their halos and are added; therefore the halo
is one receptive field wide, not two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stylize.errors import InputError
from stylize.nst.losses import (
    Statistics,
    additive_loss,
    inject_moments_gradient,
    moment_sums,
    squared_error,
)
from stylize.nst.objective import Measured, Objective, Region, Styles, run
from stylize.nst.ranks import ALONE, Ranks
from stylize.nst.vgg import Vgg19
from stylize.settings import Settings

Box: TypeAlias = tuple[Any, slice, slice]  # `...`, rows, columns: an index into [B, C, H, W] or [R, H, W]
MOST_TILES = 64  # a side: beyond it the halos are all that is computed


@dataclass(frozen=True)
class Reach:
    """What one feature of a layer sees of the picture: from `before` px ahead of its own place to `after` behind.

    Feature i of a row stands at pixel `i * stride`; it sees pixels `i * stride - before` to `i * stride + after`.
    """

    stride: int = 1
    before: int = 0
    after: int = 0


def reaches(network: nn.Module) -> dict[str, Reach]:
    """The reach of each of the network's modules by name, from their kernels, paddings and strides.

    Source: Araujo, Norris and Sim 2019, "Computing receptive fields of convolutional neural networks".
    """
    found = {}
    reach = Reach()
    for name, module in network.named_children():
        kernel, stride, padding = (_single(module, which) for which in ("kernel_size", "stride", "padding"))
        reach = Reach(
            reach.stride * stride,
            reach.before + padding * reach.stride,
            reach.after + (kernel - 1 - padding) * reach.stride,
        )
        found[name] = reach
    return found


def _single(module: nn.Module, which: str) -> int:
    """A module's kernel size, stride or padding, alike in both directions; of a pointwise module 1, 1 and 0."""
    value = getattr(module, which, 0 if which == "padding" else 1)
    return int(value[0] if isinstance(value, tuple) else value)


@dataclass(frozen=True)
class Span:
    """One tile along one direction, in pixels: the core that it owns, and the window that it looks at."""

    start: int
    stop: int
    window_start: int
    window_stop: int
    length: int  # of the whole picture

    def core(self, stride: int) -> slice:
        """The features that it owns, counted in the whole picture's; a picture's last few pixels may have none."""
        last = self.length // stride
        return slice(self.start // stride, last if self.stop == self.length else self.stop // stride)

    def inside(self, stride: int) -> slice:
        """The same features, counted in its window's."""
        core, offset = self.core(stride), self.window_start // stride
        return slice(core.start - offset, core.stop - offset)


@dataclass(frozen=True)
class Tile:
    """A part of the picture that goes through the network at once."""

    rows: Span
    columns: Span

    @property
    def window(self) -> Box:
        """What it looks at, in pixels."""
        return (
            ...,
            slice(self.rows.window_start, self.rows.window_stop),
            slice(self.columns.window_start, self.columns.window_stop),
        )

    @property
    def pixels(self) -> int:
        """Of the window."""
        _, rows, columns = self.window
        return int((rows.stop - rows.start) * (columns.stop - columns.start))

    def core(self, stride: int) -> Box:
        """The features that it owns at a layer of this stride, counted in the whole picture's."""
        return ..., self.rows.core(stride), self.columns.core(stride)

    def inside(self, stride: int) -> Box:
        """The same features, counted in its own."""
        return ..., self.rows.inside(stride), self.columns.inside(stride)


@dataclass(frozen=True)
class Geometry:
    """What the layers that are looked at demand of tiles."""

    strides: Mapping[str, int]  # of each of these layers
    alignment: int  # px: cores and windows begin at multiples of it, so that pooling pairs the same pixels
    halo: int  # px, a multiple of the alignment

    @classmethod
    def of(cls, network: nn.Module, layers: Sequence[str]) -> Geometry:
        """From the network's own modules."""
        found = reaches(network)
        alignment = max(reach.stride for reach in found.values())
        # The last feature of a core stands one stride before its end.
        widest = max(max(each.before, each.after - each.stride + 1) for each in map(found.__getitem__, layers))
        return cls({layer: found[layer].stride for layer in layers}, alignment, _up(widest, alignment))

    def spans(self, length: int, count: int) -> list[Span]:
        """A side of `length` px cut into at most `count` tiles, whose windows are all of one length.

        What is alike in size takes the place of what was freed before; of several sizes, memory is left in crumbs.
        The last window is longer by the pixels that the length has beyond whole strides of the deepest layer.
        """
        whole = length - length % self.alignment
        window = _up(math.ceil((whole + 2 * self.halo * (count - 1)) / count), self.alignment)
        step = max(window - 2 * self.halo, self.alignment)
        window = step + 2 * self.halo
        starts = [0, *range(step, whole - 2 * self.halo, step)]  # of windows
        return [
            Span(
                start=start + self.halo if start else 0,
                stop=length if start == starts[-1] else start + step + self.halo,
                window_start=max(0, min(start, whole - window)),
                window_stop=length if start == starts[-1] else start + window,
                length=length,
            )
            for start in starts
        ]

    def tiles(self, height: int, width: int, rows: int, columns: int) -> list[Tile]:
        """The picture cut into at most so many rows and columns of tiles."""
        return [
            Tile(row, column) for row in self.spans(height, rows) for column in self.spans(width, columns)
        ]

    def fitting(self, height: int, width: int, most_pixels: int) -> list[Tile]:
        """The tiles that look at the fewest pixels in all, none of them at more than `most_pixels`.

        Raises:
            InputError: when not even the smallest tiles are small enough.
        """
        counts = range(1, MOST_TILES + 1)
        cuts = {side: [self.spans(side, count) for count in counts] for side in (height, width)}
        best, fewest = None, math.inf
        for rows in cuts[height]:
            for columns in cuts[width]:
                looked_at = _looked_at(rows) * _looked_at(columns)
                if looked_at < fewest and _widest(rows) * _widest(columns) <= most_pixels:
                    best, fewest = (rows, columns), looked_at
        if best is None:
            raise InputError(
                f"A picture of {width}×{height} px cannot be cut into tiles of {most_pixels} px with a halo of "
                f"{self.halo} px. Allow more memory, use a smaller --size, or shallower layers."
            )
        return [Tile(row, column) for row in best[0] for column in best[1]]


def _looked_at(spans: Sequence[Span]) -> int:
    return sum(span.window_stop - span.window_start for span in spans)


def _widest(spans: Sequence[Span]) -> int:
    return max(span.window_stop - span.window_start for span in spans)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


Visit: TypeAlias = Callable[[str, Tensor, Box, Box], "Tensor | None"]  # layer, features, own places, in the picture


@dataclass(frozen=True)
class Sought:
    """What is to be measured of a picture, by layer."""

    content: Mapping[str, Tensor]  # the features [1, C, h, w] that errors are measured against
    styles: Sequence[str]  # layers whose moments are wanted
    guides: Mapping[str, Tensor]  # [R, h, w], what each place counts in each of R regions; none = alike

    @property
    def layers(self) -> tuple[str, ...]:
        """All of them."""
        return *self.content, *self.styles

    def regions(self, layer: str) -> int:
        """That a layer's moments are measured in."""
        return self.guides[layer].shape[0] if layer in self.guides else 1

    def guide(self, layer: str, place: Box) -> Tensor | None:
        """What the features at a place count."""
        return self.guides[layer][place] if layer in self.guides else None


class Tiles:
    """A picture's tiles, and the way of each of them through the network.

    Args:
        network: that looks at them.
        geometry: of the network and the layers that are looked at.
        tiles: those of one picture.
        ranks: the processes that share them.
    """

    def __init__(
        self, network: Vgg19, geometry: Geometry, tiles: Sequence[Tile], ranks: Ranks = ALONE
    ) -> None:
        self.network = network
        self.geometry = geometry
        self.ranks = ranks
        self.tiles = ranks.deal(tiles)  # this process's own

    def __iter__(self) -> Iterator[Tile]:
        return iter(self.tiles)

    def look(self, piece: Tensor, tile: Tile, layers: Sequence[str], visit: Visit) -> Tensor:
        """Send a tile's window [1, 3, h, w] through the network, which returns its last output.

        `visit` is told which of a layer's features the tile owns and where they stand in the whole picture's. It
        is not called where the tile owns none.
        """

        def watch(layer: str, output: Tensor) -> Tensor | None:
            stride = self.geometry.strides[layer]
            own, place = tile.inside(stride), tile.core(stride)
            if any(each.start >= each.stop for each in own[1:]):
                return None
            return visit(layer, output, own, place)

        return run(self.network, piece, layers, watch)

    @torch.no_grad()
    def sums(self, image: Tensor, sought: Sought) -> Measured:
        """What `Measured` holds of a picture [1, 3, H, W], added up over all ranks' tiles; without a gradient."""
        wide = torch.promote_types(_dtype(self.network), torch.float32)
        errors = {layer: image.new_zeros((), dtype=wide) for layer in sought.content}
        found = {}
        for layer in sought.styles:
            regions, channels = sought.regions(layer), _channels(self.network, layer)
            sizes = (regions, channels), (regions, channels, channels)
            found[layer] = image.new_zeros(sizes[0], dtype=wide), image.new_zeros(sizes[1], dtype=wide)

        def visit(layer: str, output: Tensor, own: Box, place: Box) -> None:
            inside = output[own]
            if layer in sought.content:
                errors[layer] += squared_error(inside, sought.content[layer][place])
            if layer in sought.styles:
                sums = moment_sums(inside, sought.guide(layer, place))
                for total, part in zip(found[layer], sums, strict=True):
                    total += part

        for tile in self:
            self.look(image[tile.window], tile, sought.layers, visit)
        for total in (*errors.values(), *(part for pair in found.values() for part in pair)):
            self.ranks.add(total)
        return Measured(errors, self._averaged(found, sought, image))

    def _averaged(
        self, sums: Mapping[str, tuple[Tensor, Tensor]], sought: Sought, image: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums, or the gradients that belong to averages, over each layer's places; a guide has done it already."""
        averaged = dict(sums)
        for layer in sums.keys() - sought.guides.keys():
            stride = self.geometry.strides[layer]
            places = (image.shape[2] // stride) * (image.shape[3] // stride)
            averaged[layer] = sums[layer][0] / places, sums[layer][1] / places
        return averaged

    def gradient(self, image: Tensor, sought: Sought, outer: Measured) -> Tensor:
        """The picture's gradient [1, 3, H, W] of a loss whose gradient with respect to the sums is `outer`."""
        outer = Measured(outer.errors, self._averaged(outer.moments, sought, image))
        total = torch.zeros_like(image)
        for tile in self:
            piece = image[tile.window].detach().requires_grad_()
            with torch.enable_grad():
                self._send_back(piece, tile, sought, outer)
            if piece.grad is not None:
                total[tile.window] += piece.grad
        return self.ranks.add(total)

    def _send_back(self, piece: Tensor, tile: Tile, sought: Sought, outer: Measured) -> None:
        """Leave in `piece.grad` what this tile's own features say."""
        roots: list[Tensor] = []
        slopes: list[Tensor] = []

        def visit(layer: str, output: Tensor, own: Box, place: Box) -> Tensor | None:
            if layer in sought.content:
                roots.append(squared_error(output[own], sought.content[layer][place]))
                slopes.append(outer.errors[layer])
            if layer not in outer.moments:
                return None
            return inject_moments_gradient(output, *outer.moments[layer], own, sought.guide(layer, place))

        last = self.look(piece, tile, sought.layers, visit)
        torch.autograd.backward([last, *roots], [torch.zeros_like(last), *slopes])


class TiledObjective(Objective):
    """The same losses and gradients as `Objective`, of a picture that is looked at tile by tile.

    Args:
        tiles: those of the picture, with the network.
    """

    def __init__(
        self, content: Tensor | None, style: Styles | Sequence[Region], settings: Settings, tiles: Tiles
    ) -> None:
        self.tiles = tiles
        super().__init__(tiles.network, content, style, settings)
        self.sought = Sought(self.content, settings.style_layers, self.guides)

    def _measure_content(self, content: Tensor) -> dict[str, Tensor]:
        return measure_content_by_tiles(content, self.settings.content_layers, self.tiles)

    def _measure(self, image: Tensor) -> Measured:
        return self.as_measured(_TiledSums.apply(image, self))

    def as_measured(self, sums: Sequence[Tensor]) -> Measured:
        """Sums, or their gradients, in the order in which autograd carries them: errors, then means and Grams."""
        each = iter(sums)
        errors = {layer: next(each) for layer in self.sought.content}
        return Measured(errors, {layer: (next(each), next(each)) for layer in self.sought.styles})


class _TiledSums(torch.autograd.Function):
    """The first pass forward, the second pass back."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, objective: TiledObjective) -> tuple[Tensor, ...]:
        ctx.save_for_backward(image)
        ctx.objective = objective
        measured = objective.tiles.sums(image, objective.sought)
        return *measured.errors.values(), *(part for pair in measured.moments.values() for part in pair)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (image,) = ctx.saved_tensors
        objective: TiledObjective = ctx.objective
        return objective.tiles.gradient(image, objective.sought, objective.as_measured(outer)), None


@torch.no_grad()
def measure_content_by_tiles(content: Tensor, layers: Sequence[str], tiles: Tiles) -> dict[str, Tensor]:
    """`measure_content` of a picture that is looked at tile by tile."""
    network = tiles.network
    features: dict[str, Tensor] = {}
    for layer in layers:
        height, width = (side // tiles.geometry.strides[layer] for side in content.shape[2:])
        size = 1, height, width, _channels(network, layer)
        features[layer] = torch.zeros(size, dtype=_dtype(network), device=content.device).permute(0, 3, 1, 2)

    def visit(layer: str, output: Tensor, own: Box, place: Box) -> None:
        features[layer][place] = output[own]

    for tile in tiles:
        tiles.look(content[tile.window], tile, layers, visit)
    return {layer: tiles.ranks.add(found) for layer, found in features.items()}


def _channels(network: nn.Module, layer: str) -> int:
    """Of a layer's features: those of the last convolution before it, or of its own."""
    channels = 0
    for name, module in network.named_children():
        channels = int(getattr(module, "out_channels", channels))
        if name == layer:
            break
    return channels


def _dtype(network: nn.Module) -> torch.dtype:
    return next(network.parameters()).dtype


def measure_style_by_tiles(
    style: Tensor, settings: Settings, tiles: Tiles, guide: Mapping[str, Tensor] | None = None
) -> dict[str, Statistics]:
    """`measure_style` of a picture that is looked at tile by tile.

    Raises:
        SettingsError: for a style loss that cannot be measured in parts.
    """
    statistics = additive_loss(settings.style_loss).statistics
    guides = {layer: weights.unsqueeze(0) for layer, weights in (guide or {}).items()}
    measured = tiles.sums(style, Sought({}, settings.style_layers, guides))
    return {layer: statistics(*found) for layer, found in measured.moments.items()}
