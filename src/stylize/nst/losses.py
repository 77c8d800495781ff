"""The losses, as pure functions of features and pictures.

Notation: F is a layer's features as [C, N] (its spatial axes flattened), G = F·Fᵀ/N its Gram matrix, μ the
mean over N, Σ = G − μ·μᵀ its centred Gram matrix (the covariance). A hat marks the style's. Every result is
float32 whatever the features' dtype, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from stylize.settings import Normalization

Statistics: TypeAlias = tuple[Tensor, ...]  # what one layer knows of a style

# Rows of features that a 16-bit matrix product sums before its result is rounded to 16 bits.
_ROWS_PER_PRODUCT = 1024


def moments(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean and the Gram matrix of features, and the features again for the layers that follow.

    Using the returned features in place of the given ones lets the backward pass add the statistics' gradient
    to the following layers' in the matrix product itself, instead of in one more pass over memory.

    Args:
        features: [B, C, H, W], any floating dtype, contiguous or channels_last.

    Returns:
        the features; their mean [B, C]; their Gram matrix F·Fᵀ/N [B, C, C]; the two in float32 or float64.
    """
    passed, mean, gram = _Moments.apply(features)
    return passed, mean, gram


def gram_matrix(features: Tensor) -> Tensor:
    """G = F·Fᵀ/N of features [B, C, H, W] as [B, C, C] (Gatys et al. 2016, equation 3, over N)."""
    return moments(features)[2]


def content_loss(features: Tensor, target: Tensor, normalization: Normalization = "relative") -> Tensor:
    """How far features are from the content's, both [B, C, H, W].

    relative: mean((F − P)²) / mean(P²); johnson: mean((F − P)²); gatys: ½ Σ (F − P)² (equation 1).
    """
    wide = torch.promote_types(features.dtype, torch.float32)
    squares = (features.to(wide) - target.to(wide)).square()
    if normalization == "gatys":
        return 0.5 * squares.sum()
    if normalization == "johnson":
        return squares.mean()
    return squares.mean() / _floor(target.to(wide).square().mean())


def gram_statistics(mean: Tensor, gram: Tensor) -> Statistics:
    """The plain Gram matrix: what Gatys et al. call a style."""
    return (gram,)


def centred_statistics(mean: Tensor, gram: Tensor) -> Statistics:
    """The mean and the centred Gram matrix, which the plain one mixes."""
    return mean, gram - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def gram_loss(found: Statistics, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """How far a Gram matrix [B, C, C] is from the style's.

    relative: ‖G − Ĝ‖² / ‖Ĝ‖²; johnson: mean((G − Ĝ)²) / C² (Johnson et al. 2016, as in neural-style);
    gatys: ¼ mean((G − Ĝ)²), which is equation 4 for Gram matrices that are each divided by their own N.
    """
    (gram,), (gram_target,) = found, target
    squares = (gram - gram_target).square()
    if normalization == "gatys":
        return squares.mean() / 4
    if normalization == "johnson":
        return squares.mean() / gram.shape[-1] ** 2
    return squares.sum() / _floor(gram_target.square().sum())


def centred_loss(found: Statistics, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """‖μ − μ̂‖² / tr Σ̂ + ‖Σ − Σ̂‖² / ‖Σ̂‖²: palette and texture, each relative to the style's own spread.

    In an uncentred Gram matrix the mean outweighs the rest, so that wrong colours cost almost nothing.
    """
    (mean, covariance), (mean_target, covariance_target) = found, target
    spread = covariance_target.diagonal(dim1=-2, dim2=-1).sum()
    # A flat style has no spread; its mean then sets the measure.
    mean_error = (mean - mean_target).square().sum() / _floor(spread, 1e-4 * mean_target.square().sum())
    error = (covariance - covariance_target).square().sum()
    return mean_error + error / _floor(covariance_target.square().sum(), 1e-8 * mean_target.square().sum() ** 2)


@dataclass(frozen=True)
class StyleLoss:
    """A way to say what a style is: a layer's statistics, and the distance between two of them."""

    statistics: Callable[[Tensor, Tensor], Statistics]  # of a layer's mean [B, C] and Gram matrix [B, C, C]
    distance: Callable[[Statistics, Statistics, Normalization], Tensor]


STYLE_LOSSES: Mapping[str, StyleLoss] = {
    "centred": StyleLoss(centred_statistics, centred_loss),
    "gram": StyleLoss(gram_statistics, gram_loss),
}


def total_variation(image: Tensor) -> Tensor:
    """Mean square difference to the eight neighbours of each value of [B, C, H, W]: a nine-point stencil.

    ⅔ (dx² + dy²) + ⅙ (both diagonals), each averaged over its own differences; nearly blind to direction.
    """
    dx = image[..., :, 1:] - image[..., :, :-1]
    dy = image[..., 1:, :] - image[..., :-1, :]
    falling = image[..., 1:, 1:] - image[..., :-1, :-1]
    rising = image[..., 1:, :-1] - image[..., :-1, 1:]
    straight = dx.square().mean() + dy.square().mean()
    diagonal = falling.square().mean() + rising.square().mean()
    return straight * (2 / 3) + diagonal * (1 / 6)


def range_penalty(image: Tensor) -> Tensor:
    """Mean square excess of [B, C, H, W] over [0, 1]: what a file cannot hold."""
    return (image - image.clamp(0, 1)).square().mean()


def _floor(value: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """A denominator that is not zero."""
    tiny = torch.finfo(value.dtype).tiny ** 0.5
    return torch.maximum(value, torch.as_tensor(least, dtype=value.dtype, device=value.device)).clamp(min=tiny)


class _Moments(torch.autograd.Function):
    """Mean and Gram matrix with their gradient, ∂L/∂F = ∂L/∂F' + (∂L/∂G + ∂L/∂Gᵀ)·F/N + ∂L/∂μ/N."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = _rows(features)  # [B, N, C]
        mean, gram = _sums(rows)
        ctx.save_for_backward(features)
        return features.view_as(features), mean / rows.shape[1], gram / rows.shape[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, passed: Tensor, mean: Tensor, gram: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors  # type: ignore[attr-defined]
        rows = _rows(features)
        n = rows.shape[1]
        mixed = ((gram + gram.transpose(1, 2)) / n).to(rows.dtype)  # [B, C, C]
        gradient = torch.baddbmm(_rows(passed), rows, mixed)  # [B, N, C], of its own memory: it may be changed
        gradient += (mean / n).unsqueeze(1).to(rows.dtype)
        return gradient.transpose(1, 2).view(features.shape)


def _rows(features: Tensor) -> Tensor:
    """[B, C, H, W] as [B, N, C], without a copy for either memory format."""
    return features.flatten(2).transpose(1, 2)


def _sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Σ F as [B, C] and F·Fᵀ as [B, C, C] of rows [B, N, C], summed wider than 16 bits.

    A 16-bit matrix product returns 16 bits. It is made for short runs of rows, whose results are summed in
    float32: the rounding errors average out, and no float32 copy of the features is needed.
    """
    B, N, C = rows.shape
    wide = torch.promote_types(rows.dtype, torch.float32)
    run = N if rows.dtype == wide else min(N, _ROWS_PER_PRODUCT)
    whole = N - N % run
    total = torch.zeros(B, C, dtype=wide, device=rows.device)
    gram = torch.zeros(B, C, C, dtype=wide, device=rows.device)
    for part, length in ((rows[:, :whole], run), (rows[:, whole:], N - whole)):
        if length == 0:
            continue
        runs = part.reshape(-1, length, C)  # [B·N/run, run, C]
        ones = rows.new_ones(1, 1, length).expand(runs.shape[0], 1, length)
        total += torch.bmm(ones, runs).to(wide).view(B, -1, C).sum(1)
        gram += torch.bmm(runs.transpose(1, 2), runs).to(wide).view(B, -1, C, C).sum(1)
    return total, gram
