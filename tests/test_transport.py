"""transport.py: what is carried keeps its order, and costs what independent formulas say."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch import Tensor
from torch.autograd import gradcheck

from stylize.nst.transport import (
    alike,
    directions,
    line_cost,
    read_off,
    sort_lines,
    square_root,
    trace_of_root,
)

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(C: int, N: int, seed: int = 0) -> Tensor:
    """[1, C, C], of rank N at most."""
    rows = random(N, C, seed=seed)
    return (rows.t() @ rows / N).unsqueeze(0)


# Lines


@few
@given(lines=st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4), min_size=1))
def test_sorting_is_numpys(lines: list[list[float]]) -> None:
    values = torch.tensor(lines, dtype=torch.float32)
    ordered, order = sort_lines(values)
    np.testing.assert_array_equal(ordered.numpy(), np.sort(values.numpy(), axis=-1))
    assert torch.equal(values.gather(-1, order), ordered)
    assert torch.equal(order.sort(dim=-1).values, torch.arange(4).expand_as(order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sorting_keeps_the_order_of_equals(dtype: torch.dtype) -> None:
    values = torch.tensor([[2.0, 0.0, 2.0, -1.0, 0.0, 2.0]], dtype=dtype)
    assert sort_lines(values)[1].tolist() == [[3, 1, 4, 0, 2, 5]]


def test_sorting_leaves_its_argument_alone() -> None:
    values = random(3, 50).float()
    before = values.clone()
    sort_lines(values)
    line_cost(values, values.sort().values)
    assert torch.equal(values, before)


@few
@given(seed=seeds, count=st.integers(1, 6))
def test_line_cost_is_that_of_the_cheapest_assignment(seed: int, count: int) -> None:
    values, others = random(2, count, seed=seed), random(2, count, seed=seed + 1)
    expected = sum(
        min(float((line - other[list(order)]).square().sum()) for order in permutations(range(count)))
        for line, other in zip(values, others, strict=True)
    )
    assert float(line_cost(values, others.sort().values)) == pytest.approx(expected, rel=1e-12)


def test_line_cost_by_hand() -> None:
    """1 goes to 0 and 3 to 5: 1 + 4; with the one quantile 2 for both, 1 + 1."""
    values = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    assert float(line_cost(values, torch.tensor([[0.0, 5.0]], dtype=torch.float64))) == 5
    assert float(line_cost(values, torch.tensor([[2.0]], dtype=torch.float64))) == 2


def test_line_cost_is_the_same_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    values, quantiles = random(7, 5).requires_grad_(), random(7, 3, seed=1).sort().values
    whole = line_cost(values, quantiles)
    monkeypatch.setattr("stylize.nst.transport._VALUES_PER_BAND", 12)  # two lines of five
    banded = line_cost(values, quantiles)
    torch.testing.assert_close(banded, whole)
    torch.testing.assert_close(*(torch.autograd.grad(cost, values)[0] for cost in (banded, whole)))


def test_gradient_of_line_cost() -> None:
    values = random(3, 7).requires_grad_()
    quantiles = random(3, 4, seed=1).sort().values
    assert gradcheck(lambda values: line_cost(values, quantiles), values)


def test_quantiles_are_read_off_in_the_middle_of_their_ranks() -> None:
    """Four values stand at the ranks ⅛, ⅜, ⅝ and ⅞; two are wanted at ¼ and ¾."""
    quantiles = torch.tensor([[[0.0, 1.0, 2.0, 7.0]]], dtype=torch.float64)
    assert read_off(quantiles, 2).tolist() == [[[0.5, 4.5]]]
    assert read_off(quantiles, 1).tolist() == [[[1.5]]]
    assert torch.equal(read_off(quantiles, 4), quantiles)
    assert read_off(quantiles[..., :2], 4).tolist() == [[[0.0, 0.25, 0.75, 1.0]]]


def test_parts_of_one_length_stay_as_they_are() -> None:
    one, other = random(1, 2, 6), random(1, 2, 6, seed=1)
    assert [torch.equal(a, b) for a, b in zip(alike([one, other]), [one, other], strict=True)] == [True, True]
    assert [part.shape[-1] for part in alike([one, other[..., :3]])] == [6, 6]


@pytest.mark.parametrize(("channels", "count"), [(1, 1), (5, 3), (64, 16), (8, 8)])
def test_directions_are_orthonormal_and_always_the_same(channels: int, count: int) -> None:
    state = torch.get_rng_state()
    found = directions(channels, count, torch.zeros(0, dtype=torch.float64))
    torch.testing.assert_close(found @ found.t(), torch.eye(count, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(directions(channels, count, torch.zeros(0, dtype=torch.float64)), found)
    assert torch.equal(torch.get_rng_state(), state)


# Roots


@pytest.mark.parametrize("rank", [3, 8, 40])
def test_square_root_is_scipys(rank: int) -> None:
    matrix = covariance(8, rank)
    root = square_root(matrix)
    torch.testing.assert_close(root @ root, matrix, rtol=0, atol=1e-12)
    if rank > 8:  # of a singular matrix SciPy's is less exact
        torch.testing.assert_close(root[0], torch.from_numpy(sqrtm(matrix[0].numpy()).real), rtol=0, atol=1e-9)


def test_trace_of_root_is_the_sum_of_the_roots_of_the_eigenvalues() -> None:
    matrix = torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)).unsqueeze(0)
    assert float(trace_of_root(matrix)) == pytest.approx(6, rel=1e-14)
    turn = directions(3, 3, matrix)
    assert float(trace_of_root(turn.t() @ matrix @ turn)) == pytest.approx(6, rel=1e-12)


def test_gradient_of_trace_of_root() -> None:
    rows = random(6, 4).requires_grad_()
    assert gradcheck(lambda rows: trace_of_root((rows.t() @ rows).unsqueeze(0)), rows)


def test_gradient_of_trace_of_root_where_eigenvalues_meet() -> None:
    """½·(4·I)^−½ = ¼·I, although the eigenvectors of I are anything."""
    matrix = 4 * torch.eye(5, dtype=torch.float64).unsqueeze(0)
    matrix.requires_grad_()
    trace_of_root(matrix).sum().backward()
    assert matrix.grad is not None
    torch.testing.assert_close(matrix.grad, torch.eye(5, dtype=torch.float64).unsqueeze(0) / 4)


@pytest.mark.parametrize("matrix", [torch.zeros(1, 6, 6), covariance(6, 2).float(), -torch.eye(6).unsqueeze(0)])
def test_trace_of_root_is_finite_where_the_spectrum_is_not_positive(matrix: Tensor) -> None:
    matrix = matrix.clone().requires_grad_()
    trace = trace_of_root(matrix).sum()
    trace.backward()
    assert trace.isfinite()
    assert matrix.grad is not None
    assert matrix.grad.isfinite().all()


def test_trace_of_root_of_what_is_not_finite_is_not_a_number() -> None:
    """The run then goes back to its best picture; LAPACK alone would end it."""
    assert trace_of_root(torch.full((1, 3, 3), torch.inf)).isnan().all()
