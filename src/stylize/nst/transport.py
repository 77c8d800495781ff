"""Optimal transport between distributions of features: on a line by sorting, of Gaussians in closed form.

On a line, the cheapest way to carry one set of values over to another of as many keeps their order: the lowest
goes to the lowest. Between Gaussians it costs ‖μ − μ̂‖² + tr(Σ + Σ̂ − 2·(Σ̂^½·Σ·Σ̂^½)^½) (Dowson and Landau 1982).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_VALUES_PER_BAND = 1 << 20  # that are sorted together: sorting takes ten times their memory
_DIRECTIONS_SEED = 0  # the same directions at every scale, for every style and for what is compared with it


def line_cost(values: Tensor, quantiles: Tensor) -> Tensor:
    """Σ (F − R(F))² of values [K, N], where R puts the quantile [K, M] of the same rank in each value's place.

    Its gradient 2·(F − R(F)) holds R constant (Risser et al. 2017, section 4), which is also the exact one,
    because the order of the values does not change with small steps.
    """
    cost: Tensor = _LineCost.apply(values, quantiles)
    return cost


def sort_lines(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values [K, N] in ascending order along N, and where each came from; equals keep their order."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return _sort_packed(values)
    return torch.sort(values, dim=-1, stable=True)


def read_off(quantiles: Tensor, count: int) -> Tensor:
    """Sorted values [..., K, M] read off at `count` evenly spaced ranks, with straight lines between them."""
    if quantiles.shape[-1] == count:
        return quantiles
    lines = quantiles.reshape(1, -1, quantiles.shape[-1])
    read: Tensor = F.interpolate(lines, count, mode="linear")
    return read.view(*quantiles.shape[:-1], count)


def alike(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same, where one has more quantiles than another, read off at as many ranks as the longest."""
    longest = max(part.shape[-1] for part in parts)
    return [read_off(part, longest) for part in parts]


def directions(channels: int, count: int, like: Tensor) -> Tensor:
    """`count` random directions at right angles to each other [count, channels], the same at every call."""
    generator = torch.Generator().manual_seed(_DIRECTIONS_SEED)
    random = torch.randn(channels, count, generator=generator, dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(random).Q
    return basis.t().to(like)


def square_root(matrix: Tensor) -> Tensor:
    """The symmetric root of a symmetric matrix [B, C, C]; what rounding made negative of its spectrum counts 0."""
    values, vectors = _spectrum(matrix)
    root: Tensor = vectors * values.sqrt().unsqueeze(-2) @ vectors.transpose(-2, -1)
    return root.to(matrix)


def trace_of_root(matrix: Tensor) -> Tensor:
    """tr M^½ of a symmetric, positive semi-definite matrix [B, C, C], as [B]; differentiable.

    Its gradient is ½·M^−½: no gradient passes through the eigenvectors, which have none where eigenvalues meet.
    """
    trace: Tensor = _TraceOfRoot.apply(matrix)
    return trace


def _sort_packed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sort float32 as whole numbers of 64 bits that hold a value and its place.

    NumPy sorts whole numbers many times faster than anything here sorts values and tells where they were.
    """
    bits = values.contiguous().view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats descend as whole numbers do; now they ascend
    keys = bits.long() << 32
    keys |= torch.arange(values.shape[-1])
    keys.numpy().sort(axis=-1)
    order = keys & 0xFFFFFFFF
    return values.gather(-1, order), order


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [B, C], none below 0, and eigenvectors [B, C, C]: in float64, as small ones have large slopes."""
    where = "cpu" if matrix.device.type == "mps" else matrix.device  # MPS has no float64
    matrix = matrix.detach().to(where, torch.float64)
    if not matrix.isfinite().all():  # LAPACK would raise; a run goes back to its best point when the loss is NaN
        return torch.full_like(matrix[..., 0], torch.nan), torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0), vectors


class _LineCost(torch.autograd.Function):
    """The difference to the matched quantiles is the gradient: it is found once, for both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, quantiles: Tensor) -> Tensor:
        N = values.shape[-1]
        lines = max(1, _VALUES_PER_BAND // N)
        differences = torch.empty_like(values)
        total = torch.zeros((), dtype=values.dtype, device=values.device)
        bands = zip(values.split(lines), quantiles.split(lines), differences.split(lines), strict=True)
        for some, wanted, difference in bands:
            ordered, order = sort_lines(some)
            ordered -= read_off(wanted, N)
            difference.scatter_(-1, order, ordered)
            total += torch.dot(ordered.flatten(), ordered.flatten())
        ctx.save_for_backward(differences)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * (2 * outer), None


class _TraceOfRoot(torch.autograd.Function):
    """tr M^½ with its own gradient."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = _spectrum(matrix)
        ctx.save_for_backward(values, vectors)
        return values.sqrt().sum(-1).to(matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        values, vectors = ctx.saved_tensors
        least = values.shape[-1] * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True)
        # Where there is nothing but rounding the slope would be without bound.
        slopes = torch.where(values > least, 0.5 / values.clamp(min=least).sqrt(), 0.0)
        inverse = (vectors * slopes.unsqueeze(-2)) @ vectors.transpose(-2, -1)
        gradient: Tensor = inverse.to(outer) * outer.view(-1, 1, 1)
        return gradient
