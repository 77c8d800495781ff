"""Regions that have each their own style, and places where the content stays: from masks to guides.

A mask is [1, 1, H, W] in [0, 1], of any size; it is resized to each scale of a run. It is carried to a layer
through the network's own windows, each of which takes the mean: a feature belongs to a region by how much of what
it sees lies there. A region's statistics are means over all places, weighted by T/ΣT, where T is the carried mask.
Gatys et al. 2017 (arXiv 1611.07865) weigh by T². With T itself the Gram matrices of all regions, each times its
part of the picture, add up to the picture's own, and a mask of a half counts a half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stylize.nst.objective import Region, Styles
from stylize.nst.vgg import L2Pool

NO_REST = 2 / 255  # what two masks that meet may leave of every place, by rounding or as JPEG


class MeasuredStyle(Protocol):
    """What a region needs of a style; `transfer.Style` has it."""

    def at(self, long_side: int, device: torch.device, most_pixels: int) -> Styles:
        """The target statistics for a result whose long side has so many pixels."""


@dataclass(frozen=True)
class Division:
    """How a picture is divided between styles, and what of it stays as it is."""

    masks: Sequence[Tensor] = ()  # of the regions, [1, 1, H, W] in [0, 1] each
    protect: Tensor | None = None  # [1, 1, H, W] in [0, 1]: 1 where the content stays
    keep_rest: bool = False  # does what no region covers stay, too? Otherwise it is a region of its own, the last

    def cover(self, size: tuple[int, int]) -> Tensor:
        """[R, H, W] in [0, 1] for (width, height): how far each place belongs to each region.

        Masks that exceed 1 together share the place in proportion. A rest that is negligible is no region.
        """
        width, height = size
        masks = torch.cat([torch.zeros(0, height, width), *(resize_mask(mask, size)[0] for mask in self.masks)])
        total = masks.sum(dim=0, keepdim=True)
        cover = masks / total.clamp(min=1)
        rest = (1 - total).clamp(min=0)
        if not self.keep_rest and rest.max() > NO_REST:
            cover = torch.cat([cover, rest])
        return cover if self.protect is None else cover * (1 - resize_mask(self.protect, size)[0])

    def free(self, size: tuple[int, int]) -> Tensor | None:
        """[1, 1, H, W] in [0, 1] for (width, height): how far each place may leave the content; None = wholly."""
        if self.keep_rest:
            return self.cover(size).sum(dim=0)[None, None].clamp(max=1)
        return None if self.protect is None else 1 - resize_mask(self.protect, size)


@dataclass(frozen=True)
class Regions:
    """A divided picture and the regions' styles."""

    division: Division
    styles: Sequence[MeasuredStyle]  # of the masks, and last of the rest

    def at(
        self, network: nn.Module, layers: Sequence[str], size: tuple[int, int], most_pixels: int = 1 << 62
    ) -> list[Region]:
        """Each region of a picture of (width, height): its style, its guides at `layers`, and its share.

        A share is a region's part of the whole picture, so that each place counts as it does without regions.
        """
        device = next(network.parameters()).device
        cover = self.division.cover(size).to(device)
        guides = guides_at(network, layers, cover)
        shares = cover.mean(dim=(1, 2)).tolist()
        return [
            Region(style.at(max(size), device, most_pixels), {layer: guides[layer][k] for layer in layers}, share)
            for k, (style, share) in enumerate(zip(self.styles, shares, strict=False))  # there may be no rest
            if share > 0 or not any(shares)
        ]


def resize_mask(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """[1, 1, H, W] at (width, height): filtered when it shrinks, so that even a dot leaves something."""
    width, height = size
    if mask.shape[2:] == (height, width):
        return mask
    return F.interpolate(mask, (height, width), mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)


def guides_at(network: nn.Module, layers: Sequence[str], masks: Tensor) -> Mapping[str, Tensor]:
    """What each place counts in the statistics of each region: [R, H, W] -> [R, H_l, W_l] of sum 1, by layer."""
    carried = carry(network, layers, masks)
    tiny = torch.finfo(masks.dtype).tiny  # what is nowhere has no guide: zeros, and no share either
    return {layer: mask / mask.sum(dim=(1, 2), keepdim=True).clamp(min=tiny) for layer, mask in carried.items()}


@torch.no_grad()
def carry(network: nn.Module, layers: Sequence[str], masks: Tensor) -> dict[str, Tensor]:
    """Masks [R, H, W] as features see them, [R, H_l, W_l] by layer.

    Each window of the network takes the mean of what it covers inside the picture.
    """
    carried: dict[str, Tensor] = {}
    seen = masks.unsqueeze(1)
    for name, window in windows(network):
        if window is not None:
            side, stride, padding = window
            seen = F.avg_pool2d(seen, side, stride, padding, count_include_pad=False)
        if name in layers:
            carried[name] = seen.squeeze(1)
    return carried


def windows(network: nn.Module) -> Iterator[tuple[str, tuple[Any, Any, Any] | None]]:
    """Each module with the side, stride and padding of its windows; None where a place sees itself alone."""
    for name, module in network.named_children():
        if isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)):
            yield name, (module.kernel_size, module.stride, module.padding)
        else:
            yield name, (2, 2, 0) if isinstance(module, L2Pool) else None


def compose(content: Tensor, painted: Tensor, free: Tensor | None) -> Tensor:
    """The content where `free` [1, 1, H, W] is 0, the painted picture where it is 1, their mixture between."""
    return painted if free is None else torch.lerp(content, painted, free.to(content).expand_as(content))
