"""pyramid.py: a linear map with its exact adjoint, that any picture can go through and back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stylize.nst.pyramid import Pyramid, enlarge

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Odd, tiny and narrow pictures among them.
pyramids = st.builds(
    Pyramid,
    st.integers(1, 37),
    st.integers(1, 37),
    levels=st.integers(1, 7),
    gain=st.floats(0.25, 1.0),
    channels=st.integers(1, 3),
)


@few
@given(pyramid=pyramids, seed=seeds)
def test_synthesis_undoes_analysis(pyramid: Pyramid, seed: int) -> None:
    image = randn(*pyramid.shapes[0], seed=seed)
    torch.testing.assert_close(pyramid.synthesize(pyramid.analyze(image)), image, rtol=0, atol=1e-12)


@few
@given(pyramid=pyramids, seed=seeds, factor=st.floats(-3, 3))
def test_synthesis_is_linear(pyramid: Pyramid, seed: int, factor: float) -> None:
    one, other = randn(2, pyramid.length, seed=seed)
    together = pyramid.synthesize(one + factor * other)
    apart = pyramid.synthesize(one) + factor * pyramid.synthesize(other)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)


@few
@given(pyramid=pyramids, seed=seeds)
def test_gradient_is_the_adjoint(pyramid: Pyramid, seed: int) -> None:
    """⟨w, S·z⟩ = ⟨Sᵀ·w, z⟩, where Sᵀ·w is the gradient of ⟨w, S·v⟩ at any v."""
    z, somewhere = randn(2, pyramid.length, seed=seed)
    weight = randn(*pyramid.shapes[0], seed=seed + 1)
    variable = somewhere.clone().requires_grad_()
    (adjoint,) = torch.autograd.grad((weight * pyramid.synthesize(variable)).sum(), variable)
    left, right = float((weight * pyramid.synthesize(z)).sum()), float(adjoint @ z)
    assert left == pytest.approx(right, rel=1e-10, abs=1e-10)


@few
@given(pyramid=pyramids)
def test_length_is_that_of_all_levels(pyramid: Pyramid) -> None:
    levels = pyramid.levels(randn(pyramid.length))
    assert [tuple(level.shape) for level in levels] == pyramid.shapes
    assert sum(level.numel() for level in levels) == pyramid.length


@few
@given(height=st.integers(1, 300), width=st.integers(1, 300), levels=st.integers(1, 12))
def test_each_level_halves_the_one_before_while_there_is_something_to_halve(
    height: int, width: int, levels: int
) -> None:
    sizes = [shape[2:] for shape in Pyramid(height, width, levels=levels, gain=0.5).shapes]
    assert sizes[0] == (height, width)
    assert len(sizes) <= levels
    for fine, coarse in pairwise(sizes):
        assert coarse == ((fine[0] + 1) // 2, (fine[1] + 1) // 2)
        assert min(coarse) >= 2
    # It stops for one of two reasons.
    assert len(sizes) == levels or min(sizes[-1]) < 4


def test_levels_are_views_of_the_coefficients() -> None:
    pyramid = Pyramid(8, 6, levels=3, gain=0.5)
    coefficients = torch.zeros(pyramid.length)
    pyramid.levels(coefficients)[1].fill_(1.0)
    assert int(coefficients.sum()) == 3 * 4 * 3


def test_one_level_is_the_picture_itself() -> None:
    pyramid = Pyramid(5, 7, levels=1, gain=0.3)
    coefficients = randn(pyramid.length)
    assert torch.equal(pyramid.synthesize(coefficients), coefficients.view(1, 3, 5, 7))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_flat_level_is_a_flat_picture_of_its_gain(level: int) -> None:
    """Image = Σ gain^l · enlarge^l(z_l), and what is flat stays flat when it is enlarged."""
    pyramid = Pyramid(16, 12, levels=3, gain=0.5)
    coefficients = torch.zeros(pyramid.length, dtype=torch.float64)
    pyramid.levels(coefficients)[level].fill_(1.0)
    expected = torch.full((1, 3, 16, 12), 0.5**level, dtype=torch.float64)
    torch.testing.assert_close(pyramid.synthesize(coefficients), expected)


def test_flat_picture_lives_in_the_coarsest_level_alone() -> None:
    pyramid = Pyramid(16, 12, levels=3, gain=0.5)
    *finer, coarsest = pyramid.levels(pyramid.analyze(torch.full((1, 3, 16, 12), 0.25, dtype=torch.float64)))
    assert all(float(level.abs().max()) < 1e-12 for level in finer)
    torch.testing.assert_close(coarsest, torch.full_like(coarsest, 0.25 / 0.5**2))


def test_enlarging_is_bilinear() -> None:
    """Twice as large, a row (0, 1) becomes (0, ¼, ¾, 1): pixel centres at −¼, ¼, ¾ and 1¼ of the old grid."""
    row = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2)
    assert enlarge(row, (1, 1, 1, 4)).flatten().tolist() == [0.0, 0.25, 0.75, 1.0]
    assert enlarge(row, torch.Size([2, 4])).shape == (1, 1, 2, 4)
