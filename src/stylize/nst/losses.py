"""The losses, as pure functions of features and pictures.

Notation: F is a layer's features as [C, N] (its spatial axes flattened), G = F·Fᵀ/N its Gram matrix, μ the
mean over N, Σ = G − μ·μᵀ its centred Gram matrix (the covariance). A hat marks the style's. Every result is
float32 whatever the features' dtype, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stylize.errors import SettingsError
from stylize.nst.transport import directions, line_cost, read_off, sort_lines, square_root, trace_of_root
from stylize.settings import Normalization

Statistics: TypeAlias = tuple[Tensor, ...]  # what one layer knows of a style

Index: TypeAlias = tuple[Any, ...]  # what stands between the brackets of a tensor

# Values that are kept of a style, for each line along which values are sorted; a larger style is read off at so
# many ranks.
_MOST_QUANTILES = 4096
_LEAST_VARIANCE = 1e-4  # of the Gaussians of w2 in any direction, as a share of the style's mean variance
_ROUNDING = 1e-5  # of the mean's squares, in which 64 to 512 channels' float32 roundings come together
# Where every channel's deviation is off by a small share δ, a distance between values is δ² and ‖Σ − Σ̂‖²/‖Σ̂‖² is
# 4·δ². With this factor one content weight suits both. w2 goes without: it holds the faint directions between the
# channels as firmly as the strong ones, and with the factor puts the painting in the photograph's place.
_AS_VARIANCES = 4.0
_CHANNELS_PER_DIRECTION = 4  # directions of the sliced Wasserstein distance: one for so many channels

_VALUES_PER_BAND = 1 << 22  # of a picture, that are looked at together: a bound on the memory, 16 MB

# Rows of features that a 16-bit matrix product sums, about, before its result is rounded to 16 bits. With a quarter
# of it as many results are rounded, and more of them averaged; no loss of a picture tells the difference.
_ROWS_PER_PRODUCT = 4096


def moments(features: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The mean and the Gram matrix of features, and the features again for the layers that follow.

    Using the returned features in place of the given ones lets the backward pass add the following layers'
    gradient to the statistics' own while it is in the cache, instead of in one more pass over memory.

    Args:
        features: [B, C, H, W], any floating dtype, contiguous or channels_last.
        weights: [R, H, W], how much each place counts in each of R regions, its sum 1 a region; for B = 1.
            None = every place counts alike, and R is B. Σ w·F and Σ w·F·Fᵀ are then the mean and the guided
            Gram matrix of Gatys et al. 2017, whose guide is T = √(N·w).

    Returns:
        the features; their mean [R, C]; their Gram matrix F·Fᵀ/N [R, C, C]; the two in float32 or float64.
    """
    passed, mean, gram = _Moments.apply(features, weights)
    return passed, mean, gram


def moment_sums(features: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `moments` measures in a part of a picture, to be added up: Σ F [R, C] and Σ F·Fᵀ [R, C, C], weighted.

    Without weights the sums are plain, and the whole picture's are to be divided by its N. No gradient.
    """
    return _weighted_sums(_rows(features.detach()), weights)


def inject_moments_gradient(
    features: Tensor, mean: Tensor, gram: Tensor, box: Index, weights: Tensor | None = None
) -> Tensor:
    """The features again, so made that the backward pass adds a gradient of `moment_sums` to theirs.

    Args:
        features: [1, C, H, W].
        mean, gram: the loss's gradient with respect to the two sums, [R, C] and [R, C, C].
        box: the places of the features over which the sums were taken.
        weights: [R, h, w] of the box, as in `moment_sums`.
    """
    injected: Tensor = _Injection.apply(features, mean, gram, box, weights)
    return injected


def gram_matrix(features: Tensor) -> Tensor:
    """G = F·Fᵀ/N of features [B, C, H, W] as [B, C, C] (Gatys et al. 2016, equation 3, over N)."""
    return moments(features)[2]


def content_loss(features: Tensor, target: Tensor, normalization: Normalization = "relative") -> Tensor:
    """How far features are from the content's, both [B, C, H, W].

    relative: mean((F − P)²) / mean(P²); johnson: mean((F − P)²); gatys: ½ Σ (F − P)² (equation 1).
    """
    return squared_error(features, target) * content_scale(target, normalization)


def squared_error(features: Tensor, target: Tensor) -> Tensor:
    """Σ (F − P)² of [B, C, H, W]."""
    error: Tensor = _SquaredError.apply(features, target)
    return error


def content_scale(target: Tensor, normalization: Normalization = "relative") -> Tensor:
    """What Σ (F − P)² is multiplied by to be the content loss."""
    squares = _sum_of_squares(target)
    if normalization == "gatys":
        return torch.full_like(squares, 0.5)
    if normalization == "johnson":
        return torch.full_like(squares, 1 / target.numel())
    return 1 / (_floor(squares / target.numel()) * target.numel())


def gram_statistics(mean: Tensor, gram: Tensor) -> Statistics:
    """The plain Gram matrix: what Gatys et al. call a style."""
    return (gram,)


def centred_statistics(mean: Tensor, gram: Tensor) -> Statistics:
    """The mean and the centred Gram matrix, which the plain one mixes."""
    return mean, torch.baddbmm(gram, mean.unsqueeze(-1), mean.unsqueeze(-2), alpha=-1)


def gram_loss(found: Statistics, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """How far a Gram matrix [B, C, C] is from the style's.

    relative: ‖G − Ĝ‖² / ‖Ĝ‖²; johnson: mean((G − Ĝ)²) / C² (Johnson et al. 2016, as in neural-style);
    gatys: ¼ mean((G − Ĝ)²), which is equation 4 for Gram matrices that are each divided by their own N.
    """
    (gram,), (gram_target,) = found, target
    if normalization == "gatys":
        return F.mse_loss(gram, gram_target) / 4
    if normalization == "johnson":
        return F.mse_loss(gram, gram_target) / gram.shape[-1] ** 2
    return _square_distance(gram, gram_target) / _floor(gram_target.square().sum())


def centred_loss(found: Statistics, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """‖μ − μ̂‖² / tr Σ̂ + ‖Σ − Σ̂‖² / ‖Σ̂‖²: palette and texture, each relative to the style's own spread.

    In an uncentred Gram matrix the mean outweighs the rest, so that wrong colours cost almost nothing.
    """
    (mean, covariance), (mean_target, covariance_target) = found, target
    mean_error = _square_distance(mean, mean_target) / _spread(mean_target, _trace(covariance_target))
    error = _square_distance(covariance, covariance_target)
    return mean_error + error / _floor(covariance_target.square().sum(), 1e-8 * mean_target.square().sum() ** 2)


def meanstd_statistics(mean: Tensor, gram: Tensor) -> Statistics:
    """The mean and the deviation of each channel, whatever the channels have to do with each other."""
    variance = (gram.diagonal(dim1=-2, dim2=-1) - mean.square()).clamp(min=0)
    # A channel that is the same everywhere has a deviation without a slope: a thousandth of the others' mends it.
    return mean, (variance + _floor(1e-6 * variance.mean())).sqrt()


def meanstd_loss(found: Statistics, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """4·(‖μ − μ̂‖² + ‖σ − σ̂‖²) / ‖σ̂‖² (Galerne et al. 2024, who average over the channels instead)."""
    (mean, deviation), (mean_target, deviation_target) = found, target
    error = _square_distance(mean, mean_target) + _square_distance(deviation, deviation_target)
    return _AS_VARIANCES * error / _spread(mean_target, deviation_target.square().sum())


def w2_target(style: Statistics) -> Statistics:
    """Mean, tr Σ̂ and Σ̂^½, where Σ̂ is the covariance and a little of the identity."""
    mean, covariance = style
    spread = _spread(mean, _trace(covariance))
    return mean, spread, square_root(_widened(covariance, spread, mean))


def w2_loss(found: Statistics, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """(‖μ − μ̂‖² + tr(Σ + Σ̂ − 2·(Σ̂^½·Σ·Σ̂^½)^½)) / tr Σ̂: what it costs to carry one Gaussian to the other.

    Source: Crowson's style-transfer-pytorch, who averages over the channels instead; `target` is of `w2_target`.
    Both covariances have a ten-thousandth of the style's mean variance added in every direction: she adds 1e-4.
    """
    (mean, covariance), (mean_target, spread, root) = found, target
    # In float64: of two alike the traces cancel, and what is left of float32 can be less than nothing.
    exact = torch.float32 if mean.device.type == "mps" else torch.float64  # which MPS does not have
    wide, root = _widened(covariance, spread, mean_target).to(exact), root.to(exact)
    shared = trace_of_root(root @ wide @ root).sum()
    bures = _trace(wide) + root.square().sum() - 2 * shared
    return (_square_distance(mean, mean_target) + bures.to(mean.dtype)) / spread


def histogram_statistics(features: Tensor) -> Statistics:
    """Each channel's values in order: its histogram, as fine as it can be."""
    return (_quantiles(_lines(features)),)


def histogram_loss(features: Tensor, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """4·Σ (F − R(F))² / N, relative to the style's spread: each channel's values against those of the same rank.

    Risser et al. 2017 (arXiv 1701.08893, section 4), with ranks in place of their 256 bins: no two values that
    differ are taken for one.
    """
    (quantiles,) = target
    return _line_loss(_lines(features), quantiles)


def swd_statistics(features: Tensor) -> Statistics:
    """Directions between the channels, and along each of them the values in order."""
    C = features.shape[1]
    lines = _lines(features)
    along = directions(C, max(1, C // _CHANNELS_PER_DIRECTION), lines)
    return along, _quantiles(along @ lines)


def swd_loss(features: Tensor, target: Statistics, normalization: Normalization = "relative") -> Tensor:
    """4 times the squared sliced Wasserstein distance over fixed directions, relative to the spread in them.

    Heitz et al. 2021 (arXiv 2006.07229), who draw as many directions as there are channels anew for each step;
    L-BFGS wants the same function at every step.
    """
    along, quantiles = target
    return _line_loss(along @ _lines(features), quantiles)


def as_it_is(style: Statistics) -> Statistics:
    """Most distances take a style's statistics as they were measured."""
    return style


@dataclass(frozen=True)
class StyleLoss:
    """A way to say what a style is by sums over a layer's places, which any part of a picture adds to."""

    statistics: Callable[[Tensor, Tensor], Statistics]  # of a layer's mean [B, C] and Gram matrix [B, C, C]
    distance: Callable[[Statistics, Statistics, Normalization], Tensor]  # of a picture's statistics from a target
    target: Callable[[Statistics], Statistics] = as_it_is  # what `distance` wants of a style, found once


@dataclass(frozen=True)
class FeatureLoss:
    """A way to say what a style is that looks at all of a layer's features [1, C, H, W] at once."""

    statistics: Callable[[Tensor], Statistics]
    distance: Callable[[Tensor, Statistics, Normalization], Tensor]  # of a picture's features from a style


STYLE_LOSSES: Mapping[str, StyleLoss | FeatureLoss] = {
    "centred": StyleLoss(centred_statistics, centred_loss),
    "gram": StyleLoss(gram_statistics, gram_loss),
    "meanstd": StyleLoss(meanstd_statistics, meanstd_loss),
    "w2": StyleLoss(centred_statistics, w2_loss, w2_target),
    "histogram": FeatureLoss(histogram_statistics, histogram_loss),
    "swd": FeatureLoss(swd_statistics, swd_loss),
}


def is_additive(name: str) -> bool:
    """Is a style loss one of sums over places, which can be measured in tiles and in regions?"""
    return isinstance(STYLE_LOSSES[name], StyleLoss)


def additive_loss(name: str) -> StyleLoss:
    """The style loss of this name.

    Raises:
        SettingsError: when it is not one of sums over places.
    """
    loss = STYLE_LOSSES[name]
    if isinstance(loss, FeatureLoss):
        others = ", ".join(other for other in STYLE_LOSSES if is_additive(other))
        raise SettingsError(
            f"style_loss {name!r} sorts the values of a whole layer, so it can be measured neither in tiles nor "
            f"in regions; use one of {others}."
        )
    return loss


def total_variation(image: Tensor) -> Tensor:
    """Mean square difference to the eight neighbours of each value of [B, C, H, W]: a nine-point stencil.

    ⅔ (dx² + dy²) + ⅙ (both diagonals), each averaged over its own differences; nearly blind to direction.
    """
    variation: Tensor = _TotalVariation.apply(image)
    return variation


def range_penalty(image: Tensor) -> Tensor:
    """Mean square excess of [B, C, H, W] over [0, 1]: what a file cannot hold."""
    penalty: Tensor = _RangePenalty.apply(image)
    return penalty


def _square_distance(found: Tensor, target: Tensor) -> Tensor:
    """‖F − P‖² of two tensors of one shape; torch's own takes one pass each way."""
    return F.mse_loss(found, target, reduction="sum")


def _trace(matrix: Tensor) -> Tensor:
    """The sum of the diagonals of [B, C, C]."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum()


def _widened(covariance: Tensor, spread: Tensor, mean: Tensor) -> Tensor:
    """A covariance [B, C, C] with a little more variance in every direction; the style has `spread` in all."""
    C = covariance.shape[-1]
    identity = torch.eye(C, dtype=covariance.dtype, device=covariance.device)
    rounding = _ROUNDING * mean.square().sum()  # of G − μ·μᵀ, which may leave less than no variance
    return covariance + (_LEAST_VARIANCE * spread + rounding) / C * identity


def _spread(mean: Tensor, variance: Tensor) -> Tensor:
    """A style's variance over all channels, as a measure; of a flat style, which has none, the mean sets it."""
    return _floor(variance, 1e-4 * mean.square().sum())


def _lines(features: Tensor) -> Tensor:
    """[1, C, H, W] as [C, N], contiguous, float32 or float64."""
    return features[0].flatten(1).to(torch.promote_types(features.dtype, torch.float32)).contiguous()


def _quantiles(lines: Tensor) -> Tensor:
    """Values [K, N] in order, [1, K, N], or read off at the ranks that are kept."""
    return read_off(sort_lines(lines)[0], min(lines.shape[-1], _MOST_QUANTILES)).unsqueeze(0)


def _line_loss(lines: Tensor, quantiles: Tensor) -> Tensor:
    """4 times what it costs a place to carry values [K, N] to quantiles [1, K, M], relative to their spread."""
    variance = quantiles.var(dim=-1, correction=0).sum()
    cost = line_cost(lines, quantiles[0]) / lines.shape[-1]
    return _AS_VARIANCES * cost / _spread(quantiles.mean(dim=-1), variance)


def _floor(value: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """A denominator that is not zero."""
    tiny = torch.finfo(value.dtype).tiny ** 0.5
    return torch.maximum(value, torch.as_tensor(least, dtype=value.dtype, device=value.device)).clamp(min=tiny)


class _SquaredError(torch.autograd.Function):
    """Without a wide copy of the features, which would come when all of the network's are in memory."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(features, target)
        return _sum_of_squares(features, target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        features, target = ctx.saved_tensors
        return (features - target).mul_(2 * outer), None


def _sum_of_squares(features: Tensor, target: Tensor | None = None) -> Tensor:
    """Σ F² or Σ (F − P)² of [B, C, H, W], band by band."""
    wide = torch.promote_types(features.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=features.device)
    rows = max(1, _VALUES_PER_BAND // features[:, :, :1].numel())
    for top in range(0, features.shape[2], rows):
        band = features[:, :, top : top + rows].to(wide, copy=target is not None)
        if target is not None:
            band -= target[:, :, top : top + rows]
        values = _rows(band).flatten()
        total += torch.dot(values, values)
    return total


class _Moments(torch.autograd.Function):
    """Mean and Gram matrix, with their gradient."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = _rows(features)  # [B, N, C]
        mean, gram = _weighted_sums(rows, weights)
        ctx.save_for_backward(features, weights)
        n = 1 if weights is not None else rows.shape[1]
        return features.view_as(features), mean / n, gram / n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, passed: Tensor, mean: Tensor, gram: Tensor) -> tuple[Tensor, None]:
        features, weights = ctx.saved_tensors
        rows = _rows(features)
        n = 1 if weights is not None else rows.shape[1]
        gradient = _moments_gradient(rows, mean / n, gram / n, weights)
        gradient += _rows(passed)
        return gradient.transpose(1, 2).view(features.shape), None


class _Injection(torch.autograd.Function):
    """The features unchanged; back goes their gradient and that of sums over a part of them."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, mean: Tensor, gram: Tensor, box: Index, weights: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(features, mean, gram, weights)
        ctx.box = box
        return features.view_as(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, passed: Tensor) -> tuple[Tensor | None, ...]:
        features, mean, gram, weights = ctx.saved_tensors
        inside = features[ctx.box]
        own = _moments_gradient(_rows(inside), mean, gram, weights)
        gradient = passed.clone(memory_format=torch.preserve_format)
        gradient[ctx.box] += own.transpose(1, 2).reshape(inside.shape)
        return gradient, None, None, None, None


def _moments_gradient(rows: Tensor, mean: Tensor, gram: Tensor, weights: Tensor | None) -> Tensor:
    """∂L/∂F = w·((∂L/∂G + ∂L/∂Gᵀ)·F + ∂L/∂μ), summed over the regions, as [B, N, C] of its own memory."""
    mixed = (gram + gram.transpose(1, 2)).to(rows.dtype)  # [R, C, C], symmetric
    mean = mean.to(rows.dtype)
    if weights is None and len(rows) == 1:
        return F.linear(rows, mixed[0], mean[0])  # the mean goes in while the product is written
    if weights is None:
        return torch.baddbmm(mean.unsqueeze(1), rows, mixed)
    total = torch.zeros_like(rows)
    for weight, matrix, vector in zip(weights.flatten(1), mixed, mean, strict=True):
        total.addcmul_(F.linear(rows, matrix, vector), weight.to(rows.dtype).view(1, -1, 1))
    return total


def _rows(features: Tensor) -> Tensor:
    """[B, C, H, W] as [B, N, C], without a copy of a whole tensor in either memory format."""
    return features.flatten(2).transpose(1, 2)


def _weighted_sums(rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ w·F as [R, C] and Σ w·F·Fᵀ as [R, C, C] of rows [B, N, C]; without weights R is B."""
    if weights is None:
        return _sums(rows, rows)
    parts = [_sums(rows * weight.to(rows.dtype).view(1, -1, 1), rows) for weight in weights.flatten(1)]
    return torch.cat([total for total, _ in parts]), torch.cat([gram for _, gram in parts])


def _sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Σ L as [B, C] and Lᵀ·R as [B, C, C] of rows [B, N, C], summed wider than 16 bits.

    A 16-bit matrix product returns 16 bits. It is made for short runs of rows, whose results are summed in
    float32: the rounding errors average out, and no float32 copy of the features is needed.
    """
    B, N, C = left.shape
    wide = torch.promote_types(left.dtype, torch.float32)
    run = N if left.dtype == wide else N // -(-N // _ROWS_PER_PRODUCT)  # so that few are left over
    whole = N - N % run
    total = torch.zeros(B, C, dtype=wide, device=left.device)
    gram = torch.zeros(B, C, C, dtype=wide, device=left.device)
    for part, length in ((slice(0, whole), run), (slice(whole, N), N - whole)):
        if length == 0:
            continue
        # Runs: [B·N/run, run, C].
        left_runs, right_runs = (rows[:, part].reshape(-1, length, C) for rows in (left, right))
        ones = left.new_ones(1, 1, length).expand(left_runs.shape[0], 1, length)
        total += torch.bmm(ones, left_runs).to(wide).view(B, -1, C).sum(1)
        gram += torch.bmm(left_runs.transpose(1, 2), right_runs).to(wide).view(B, -1, C, C).sum(1)
    return total, gram


class _TotalVariation(torch.autograd.Function):
    """The nine-point stencil; its differences make the gradient, too, while they are at hand.

    It goes band by band, so that they are small beside a large picture.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        total = torch.zeros((), dtype=image.dtype, device=image.device)
        gradient = torch.zeros_like(image) if ctx.needs_input_grad[0] else None
        for here, there, weight in _neighbours(image):
            difference = image[there] - image[here]
            values = difference.flatten()
            total += weight * torch.dot(values, values)
            if gradient is not None:
                gradient[there].add_(difference, alpha=2 * weight)
                gradient[here].sub_(difference, alpha=2 * weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        return torch.mul(gradient, outer)


def _neighbours(image: Tensor) -> Iterator[tuple[Index, Index, float]]:
    """Pairs of places in [B, C, H, W] that are neighbours, by bands of rows, and what their square counts."""
    B, C, H, W = image.shape
    rows = max(1, _VALUES_PER_BAND // (B * C * W))
    for top in range(0, H, rows):
        for down, right, weight in ((0, 1, 2 / 3), (1, 0, 2 / 3), (1, 1, 1 / 6), (1, -1, 1 / 6)):
            bottom = min(top + rows, H - down)
            here = (..., slice(top, bottom), slice(max(0, -right), W - max(0, right)))
            there = (..., slice(top + down, bottom + down), slice(max(0, right), W - max(0, -right)))
            if bottom > top:
                yield here, there, weight / (B * C * (H - down) * (W - abs(right)))


class _RangePenalty(torch.autograd.Function):
    """The excess is found anew for the gradient: it is cheaper to find than to keep."""

    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        ctx.save_for_backward(image)
        excess = (image.clamp(0, 1).sub_(image)).flatten()
        return torch.dot(excess, excess) / image.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        (image,) = ctx.saved_tensors
        gradient = image.clamp(0, 1)
        return torch.sub(image, gradient, out=gradient).mul_(outer * (2 / image.numel()))
