"""The picture as a pyramid of coefficients: the variables that the optimiser sees.

`image = Σ_l gain^l · enlarge^l(z_l)`, with z_0 as large as the picture and each z_l half the size of the one
before. The map is linear and takes many z to one picture. Seen through it a gradient step moves large
forms as easily as fine texture, which L-BFGS on bare pixels must learn first: a preconditioner for the
price of a few small resizings.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


class Pyramid:
    """The linear map between a flat vector of coefficients and a picture [1, C, H, W].

    Args:
        height, width: of the picture, in pixels.
        levels: how many sizes at most; there are fewer where a side would fall below 2 px.
        gain: what a coefficient of one level counts over one of the next finer level.
        channels: of the picture.
    """

    def __init__(self, height: int, width: int, *, levels: int, gain: float, channels: int = 3) -> None:
        self.gain = gain
        sizes = [(height, width)]
        while len(sizes) < levels and min(sizes[-1]) >= 4:
            sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
        self.shapes = [(1, channels, h, w) for h, w in sizes]
        self._lengths = [channels * h * w for h, w in sizes]
        self.length = sum(self._lengths)

    def levels(self, coefficients: Tensor) -> list[Tensor]:
        """The coefficients [length] by level, finest first, as views [1, C, H_l, W_l]."""
        parts = coefficients.split(self._lengths)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def synthesize(self, coefficients: Tensor) -> Tensor:
        """The picture [1, C, H, W] of coefficients [length]; linear and differentiable."""
        *finer, image = self.levels(coefficients)
        image = image * self.gain ** len(finer)
        for level, part in reversed(list(enumerate(finer))):
            image = enlarge(image, part.shape).add_(part, alpha=self.gain**level)
        return image

    def analyze(self, image: Tensor) -> Tensor:
        """Coefficients [length] of a picture [1, C, H, W]: each level holds what the coarser ones cannot say.

        `synthesize(analyze(image))` is the picture again, up to rounding.
        """
        images = [image, *self._reduced(image)]
        parts = [fine - enlarge(coarse, fine.shape) for fine, coarse in pairwise(images)]
        parts.append(images[-1])
        return torch.cat([(part / self.gain**level).flatten() for level, part in enumerate(parts)])

    def _reduced(self, image: Tensor) -> Iterator[Tensor]:
        for shape in self.shapes[1:]:
            image = F.interpolate(image, shape[2:], mode="bilinear", antialias=True, align_corners=False)
            yield image


def enlarge(image: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """[B, C, h, w] resized bilinearly to the last two of `shape`."""
    return F.interpolate(image, shape[-2:], mode="bilinear", align_corners=False)
