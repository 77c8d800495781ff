"""losses.py: each loss is the formula that it says, and autograd's gradient is the formula's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from stylize.errors import SettingsError
from stylize.nst.losses import (
    STYLE_LOSSES,
    FeatureLoss,
    Statistics,
    StyleLoss,
    additive_loss,
    centred_loss,
    centred_statistics,
    content_loss,
    gram_loss,
    gram_matrix,
    gram_statistics,
    is_additive,
    moments,
    range_penalty,
    total_variation,
)
from stylize.settings import CHOICES, Settings

Normalization: TypeAlias = Literal["relative", "johnson", "gatys"]

NORMALIZATIONS: tuple[Normalization, ...] = ("relative", "johnson", "gatys")
FORMATS = (torch.contiguous_format, torch.channels_last)
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)
scales = st.floats(1e-3, 1e3)


def features(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random features with a mean that is not zero, as those after a ReLU have."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def matrix(*rows: list[float]) -> Tensor:
    """[1, C, N] or, for features, [1, C, N, 1]."""
    return torch.tensor(rows, dtype=torch.float64).unsqueeze(0)


def style_error(found: Tensor, style: Tensor, name: str, normalization: Normalization = "relative") -> Tensor:
    """A style loss from features to features."""
    loss = STYLE_LOSSES[name]
    if isinstance(loss, FeatureLoss):
        return loss.distance(found, loss.statistics(style), normalization)
    target = loss.target(loss.statistics(*moments(style)[1:]))
    return loss.distance(loss.statistics(*moments(found)[1:]), target, normalization)


# Gradients


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradient_of_moments_is_that_of_the_formula(memory_format: torch.memory_format) -> None:
    given_features = features(2, 3, 4, 5).contiguous(memory_format=memory_format).requires_grad_()
    assert gradcheck(moments, given_features)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradients_through_and_past_moments_add_up(memory_format: torch.memory_format) -> None:
    """The features that moments returns carry the gradient of the layers behind, whatever its memory format."""

    def plain(x: Tensor) -> Tensor:
        rows = x.flatten(2)
        gram = rows @ rows.transpose(1, 2) / rows.shape[2]
        return (gram**2).sum() + (rows.mean(2) ** 3).sum() + (x.sin() * weight).sum()

    def fused(x: Tensor) -> Tensor:
        passed, mean, gram = moments(x)
        return (gram**2).sum() + (mean**3).sum() + (passed.sin() * weight).sum()

    weight = features(2, 3, 4, 5, seed=1).contiguous(memory_format=memory_format)
    x = features(2, 3, 4, 5).contiguous(memory_format=memory_format).requires_grad_()
    (expected,) = torch.autograd.grad(plain(x), x)
    (found,) = torch.autograd.grad(fused(x), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_gradient_of_content_loss(normalization: Normalization, memory_format: torch.memory_format) -> None:
    x = features(1, 3, 4, 5).contiguous(memory_format=memory_format).requires_grad_()
    target = features(1, 3, 4, 5, seed=1)
    assert gradcheck(lambda image: content_loss(image, target, normalization), x)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_gradient_of_gram_loss(normalization: Normalization, memory_format: torch.memory_format) -> None:
    x = features(1, 3, 4, 5).contiguous(memory_format=memory_format).requires_grad_()
    style = features(1, 3, 6, 2, seed=1)
    assert gradcheck(lambda image: style_error(image, style, "gram", normalization), x)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", STYLE_LOSSES)
def test_gradient_of_style_losses(name: str, memory_format: torch.memory_format) -> None:
    x = features(1, 3, 4, 5).contiguous(memory_format=memory_format).requires_grad_()
    style = features(1, 3, 6, 2, seed=1)
    assert gradcheck(lambda image: style_error(image, style, name), x)


@pytest.mark.parametrize("loss", [total_variation, range_penalty])
def test_gradient_of_losses_of_the_picture(loss: Callable[[Tensor], Tensor]) -> None:
    assert gradcheck(loss, features(1, 3, 4, 5).requires_grad_())


# The Gram matrix


@few
@given(seed=seeds, shape=st.tuples(*[st.integers(1, 5)] * 4))
def test_gram_is_symmetric_and_positive_semidefinite(seed: int, shape: tuple[int, int, int, int]) -> None:
    gram = gram_matrix(features(*shape, seed=seed))
    torch.testing.assert_close(gram, gram.transpose(1, 2), rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(gram).min() > -1e-12


@few
@given(seed=seeds, height=st.integers(1, 6), width=st.integers(1, 6))
def test_style_statistics_do_not_see_where_things_are(seed: int, height: int, width: int) -> None:
    image = features(1, 4, height, width, seed=seed)
    order = torch.randperm(height * width, generator=torch.Generator().manual_seed(seed))
    shuffled = image.flatten(2)[:, :, order].view_as(image)
    for before, after in zip(moments(image)[1:], moments(shuffled)[1:], strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_gram_of_a_batch_is_the_grams_of_its_pictures() -> None:
    batch = features(3, 4, 5, 6)
    for part, whole in ((1, moments(batch)[1]), (2, moments(batch)[2])):
        singles = [moments(image)[part] for image in batch.split(1)]
        torch.testing.assert_close(whole, torch.cat(singles), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_moments_are_alike_in_both_memory_formats(dtype: torch.dtype) -> None:
    image = features(2, 4, 30, 40, dtype=dtype)
    plain, permuted = moments(image), moments(image.contiguous(memory_format=torch.channels_last))
    for one, other in zip(plain, permuted, strict=True):
        torch.testing.assert_close(one, other)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {plain[1].dtype, plain[2].dtype} == {wide}


def test_moments_by_hand() -> None:
    image = matrix([1, 2], [3, 4]).unsqueeze(-1)
    passed, mean, gram = moments(image)
    assert torch.equal(passed, image)
    torch.testing.assert_close(mean, torch.tensor([[1.5, 3.5]], dtype=torch.float64))
    torch.testing.assert_close(gram, matrix([2.5, 5.5], [5.5, 12.5]))
    torch.testing.assert_close(centred_statistics(mean, gram)[1], matrix([0.25, 0.25], [0.25, 0.25]))


def test_moments_of_many_16_bit_rows_are_better_than_16_bits() -> None:
    """One product in bfloat16 would be rounded at its end: by up to half its epsilon, 3.9e-3."""
    rounding = torch.finfo(torch.bfloat16).eps / 2
    image = features(1, 16, 250, 240, dtype=torch.bfloat16).relu()
    rows = image[0].double().flatten(1)
    _, mean, gram = moments(image)
    errors = torch.cat(
        [
            (gram[0] / (rows @ rows.t() / rows.shape[1]) - 1).abs().flatten(),
            (mean[0] / rows.mean(1) - 1).abs(),
        ]
    )
    assert errors.max() < 2e-3
    # Rounded once, the worst of 272 numbers is off by nearly that much; over 15 runs of rows it averages out, to a
    # share of 1/√15 about.
    assert errors.max() < rounding / 3


# Distances


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_losses_are_zero_at_equality(normalization: Normalization) -> None:
    image = features(1, 3, 4, 5)
    assert content_loss(image, image, normalization) == 0
    assert style_error(image, image, "gram", normalization) == 0


@pytest.mark.parametrize("name", STYLE_LOSSES)
def test_style_losses_are_zero_at_equality(name: str) -> None:
    """Also where the style is the same in another order, or stands in every place twice."""
    image = features(1, 3, 4, 5)
    twice = image.repeat_interleave(2, dim=3)
    for style in (image, image.flip(2), image.transpose(2, 3)):
        assert abs(float(style_error(image, style, name))) < 1e-12
    assert abs(float(style_error(twice, image, name))) < (1e-12 if is_additive(name) else 0.1)
    assert float(style_error(image, features(1, 3, 4, 5, seed=1), name)) > 1e-3


@pytest.mark.parametrize("name", STYLE_LOSSES)
def test_style_losses_are_small_at_equality_in_32_bits(name: str) -> None:
    image = features(1, 64, 30, 40, dtype=torch.float32).relu()
    assert abs(float(style_error(image, image, name))) < 1e-5


@pytest.mark.parametrize("name", STYLE_LOSSES)
def test_style_losses_fall_to_nothing_under_their_own_optimisation(name: str) -> None:
    """From features to those of a style of another size, of which there are fewer than there are values."""
    style = features(1, 3, 5, 4, seed=1)
    x = features(1, 3, 6, 6).requires_grad_()
    optimizer = torch.optim.LBFGS([x], max_iter=100, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = style_error(x, style, name)
        loss.backward()
        return loss

    start = float(style_error(x, style, name).detach())
    optimizer.step(evaluate)  # type: ignore[arg-type, no-untyped-call, unused-ignore]
    assert float(style_error(x, style, name).detach()) < 1e-6 * start


@pytest.mark.parametrize(("normalization", "expected"), [("relative", 5.0), ("johnson", 2.5), ("gatys", 2.5)])
def test_content_loss_by_hand(normalization: Normalization, expected: float) -> None:
    """F − P = (1, 2): the squares sum to 5 and average 2.5; P² averages 1/2."""
    found, target = matrix([1.0], [3.0]).unsqueeze(-1), matrix([0.0], [1.0]).unsqueeze(-1)
    assert float(content_loss(found, target, normalization)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("normalization", "expected"), [("relative", 35 / 2), ("johnson", 35 / 16), ("gatys", 35 / 16)]
)
def test_gram_loss_by_hand(normalization: Normalization, expected: float) -> None:
    """The squares of G − Ĝ sum to 1 + 9 + 9 + 16 = 35, over C² = 4 values; those of Ĝ to 2."""
    found, target = matrix([2, 3], [3, 5]), matrix([1, 0], [0, 1])
    assert float(gram_loss((found,), (target,), normalization)) == pytest.approx(expected, rel=1e-12)


def test_centred_loss_by_hand() -> None:
    """μ − μ̂ = (½, 3½) over tr Σ̂ = 1; Σ − Σ̂ = (−¾, ¼, ¼, ¼) over ‖Σ̂‖² = 1."""
    found, style = matrix([1, 2], [3, 4]).unsqueeze(-1), matrix([0, 2], [0, 0]).unsqueeze(-1)
    assert float(style_error(found, style, "centred")) == pytest.approx(12.5 + 0.75, rel=1e-12)


@pytest.mark.parametrize("name", STYLE_LOSSES)
def test_a_small_change_of_contrast_costs_alike(name: str) -> None:
    """‖(1 + δ)²Σ − Σ‖²/‖Σ‖² = 4·δ² + …: one content weight suits all; w2 counts every direction, and a quarter."""
    style = features(1, 4, 10, 12)
    style -= style.mean(dim=(2, 3), keepdim=True)
    expected = 1e-6 if name == "w2" else 4e-6
    assert float(style_error(style * 1.001, style, name)) == pytest.approx(expected, rel=0.01)


def test_meanstd_loss_by_hand() -> None:
    """μ − μ̂ = (½, 3½), σ − σ̂ = (½ − 1, ½ − 0): 4·(12½ + ½) over ‖σ̂‖² = 1."""
    found, style = matrix([1, 2], [3, 4]).unsqueeze(-1), matrix([0, 2], [0, 0]).unsqueeze(-1)
    # The thousandth of a deviation in the channel that has none is what the tolerance is for.
    assert float(style_error(found, style, "meanstd")) == pytest.approx(4 * 13, rel=1e-3)


def test_w2_loss_by_hand() -> None:
    """Between Gaussians of uncorrelated channels: ‖μ − μ̂‖² + ‖σ − σ̂‖² = 3² + 1² + (2 − 1)² + (3 − 1)² = 15."""
    found = matrix([1, 5, 1, 5], [-2, -2, 4, 4]).unsqueeze(-1)  # μ = (3, 1), σ = (2, 3)
    style = matrix([-1, 1, -1, 1], [-1, -1, 1, 1]).unsqueeze(-1)  # μ = (0, 0), σ = (1, 1)
    # A ten-thousandth of the variance is added to both covariances.
    assert float(style_error(found, style, "w2")) == pytest.approx(15 / 2, rel=1e-4)


def test_w2_loss_sees_correlation_by_hand() -> None:
    """Σ = I and Σ̂ = [[1, 1], [1, 1]] commute: tr(Σ + Σ̂) − 2·tr(Σ̂^½) = 4 − 2·√2, over tr Σ̂ = 2."""
    found = matrix([-1, 1, -1, 1], [-1, -1, 1, 1]).unsqueeze(-1)
    style = matrix([-1, 1, -1, 1], [-1, 1, -1, 1]).unsqueeze(-1)
    assert float(style_error(found, style, "w2")) == pytest.approx((4 - 2 * 2**0.5) / 2, abs=0.01)
    assert float(style_error(found, style, "meanstd")) == pytest.approx(0, abs=1e-12)
    assert float(style_error(found, style, "histogram")) == pytest.approx(0, abs=1e-12)


def test_histogram_loss_by_hand() -> None:
    """(1 − 0)² + (2 − 2)² and (3 − 0)² + (4 − 0)², averaged over two places: 13, over a variance of 1."""
    found, style = matrix([2, 1], [3, 4]).unsqueeze(-1), matrix([2, 0], [0, 0]).unsqueeze(-1)
    assert float(style_error(found, style, "histogram")) == pytest.approx(4 * 13, rel=1e-12)


def test_swd_loss_by_hand() -> None:
    """One channel has but one direction: the histogram. A shift by a costs |a|² in all directions together."""
    found, style = matrix([2, 1]).unsqueeze(-1), matrix([2, 0]).unsqueeze(-1)
    assert float(style_error(found, style, "swd")) == pytest.approx(4 * 0.5, rel=1e-12)
    image = features(1, 8, 6, 5)
    loss = STYLE_LOSSES["swd"]
    assert isinstance(loss, FeatureLoss)
    along, _ = loss.statistics(image)
    shift = features(1, 8, 1, 1, seed=1)
    seen, lines = along @ shift.view(8), along @ image.view(8, -1)
    expected = 4 * seen.square().sum() / lines.var(dim=1, correction=0).sum()
    assert float(style_error(image + shift, image, "swd")) == pytest.approx(float(expected), rel=1e-9)


@few
@given(seed=seeds)
def test_w2_is_not_below_what_single_channels_cost(seed: int) -> None:
    """Gaussians with the same channels but other correlations are further apart (Gelbrich 1990)."""
    found, style = features(1, 4, 6, 5, seed=seed), features(1, 4, 6, 5, seed=seed + 1)
    assert float(style_error(found, style, "w2")) >= float(style_error(found, style, "meanstd")) / 4 - 1e-3


@pytest.mark.parametrize("name", ["histogram", "swd"])
def test_a_style_of_many_places_is_read_off_finely_enough(name: str) -> None:
    """4096 ranks stand for 40,000 values: what is lost is in the tails."""
    image = features(1, 8, 200, 200, dtype=torch.float32)
    assert 0 <= float(style_error(image, image, name)) < 1e-3


def test_gatys_normalization_is_the_paper() -> None:
    """Equations 1 and 4 of Gatys, Ecker and Bethge 2016, with their sums."""
    C, H, W = 5, 4, 6
    M = H * W
    found, target = features(1, C, H, W), features(1, C, H, W, seed=1)
    F, P = found.view(C, M), target.view(C, M)
    content = sum(0.5 * float(F[i, j] - P[i, j]) ** 2 for i in range(C) for j in range(M))
    G = [[sum(float(F[i, k] * F[j, k]) for k in range(M)) for j in range(C)] for i in range(C)]
    A = [[sum(float(P[i, k] * P[j, k]) for k in range(M)) for j in range(C)] for i in range(C)]
    style = sum((G[i][j] - A[i][j]) ** 2 for i in range(C) for j in range(C)) / (4 * C**2 * M**2)
    assert float(content_loss(found, target, "gatys")) == pytest.approx(content, rel=1e-12)
    assert float(style_error(found, target, "gram", "gatys")) == pytest.approx(style, rel=1e-12)


@few
@given(seed=seeds, scale=scales)
def test_relative_losses_have_no_unit(seed: int, scale: float) -> None:
    def losses(found: Tensor, target: Tensor) -> list[float]:
        styles = [float(style_error(found, target, name)) for name in STYLE_LOSSES]
        return [float(content_loss(found, target)), *styles]

    found, target = features(1, 3, 4, 5, seed=seed), features(1, 3, 4, 5, seed=seed + 1)
    assert losses(found * scale, target * scale) == pytest.approx(losses(found, target), rel=1e-8)


@few
@given(seed=seeds)
def test_centred_loss_tells_the_mean_from_the_spread(seed: int) -> None:
    """Shifting all features changes the error of the mean alone."""
    style = features(1, 3, 6, 5, seed=seed)
    _, mean, gram = moments(style + 0.25)
    target = centred_statistics(*moments(style)[1:])
    _, covariance = centred_statistics(mean, gram)
    torch.testing.assert_close(covariance, target[1], rtol=0, atol=1e-12)
    spread = float(target[1].diagonal(dim1=1, dim2=2).sum())
    assert float(style_error(style + 0.25, style, "centred")) == pytest.approx(3 * 0.25**2 / spread, rel=1e-9)


@pytest.mark.parametrize("name", list(STYLE_LOSSES))
@pytest.mark.parametrize("level", [0.0, 1e-3, 1.0, 300.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0])
def test_flat_features_give_finite_losses_and_gradients(name: str, level: float, spread: float) -> None:
    image = (0.5 + spread * features(1, 4, 6, 6, dtype=torch.float32)).requires_grad_()
    style = torch.full((1, 4, 6, 6), level)
    loss = style_error(image, style, name) + content_loss(image, style)
    loss.backward()
    assert image.grad is not None
    assert loss.isfinite()
    assert image.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_16_bit_features_are_summed_wider(dtype: torch.dtype) -> None:
    """Case 8: the squares of activations of a thousand are beyond float16."""
    image = features(1, 4, 30, 40, dtype=torch.float32).mul(1000).to(dtype)
    style = features(1, 4, 30, 40, seed=1, dtype=torch.float32).mul(1000).to(dtype)
    content = content_loss(image, style, "johnson")
    exact = (image.double() - style.double()).square().mean()
    assert content.dtype == torch.float32
    assert float(content) == pytest.approx(float(exact), rel=1e-5)


# The picture's own losses


def test_total_variation_of_a_flat_picture_is_zero() -> None:
    assert total_variation(torch.full((1, 3, 5, 7), 0.3)) == 0


@few
@given(height=st.integers(3, 9), width=st.integers(3, 9))
def test_total_variation_of_a_point_by_hand(height: int, width: int) -> None:
    """A point differs by 1 from two neighbours in each direction, of all the differences in that direction."""
    image = torch.zeros(1, 1, height, width, dtype=torch.float64)
    image[..., height // 2, width // 2] = 1
    straight = 2 / (height * (width - 1)) + 2 / ((height - 1) * width)
    diagonal = 2 * 2 / ((height - 1) * (width - 1))
    expected = straight * 2 / 3 + diagonal / 6
    assert float(total_variation(image)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("down", "right", "expected"),
    [
        (0.0, 1.0, 1.0),  # dx = 1 and both diagonals: ⅔ + 2·⅙
        (1.0, 0.0, 1.0),
        (1.0, 1.0, 2.0),  # dx = dy = 1, one diagonal 2, the other 0: 2·⅔ + 4·⅙
        (1.0, -1.0, 2.0),
        (0.6, 0.8, 1.0),  # a slope of length 1, whichever way it points
    ],
)
def test_total_variation_of_a_slope_is_its_square(down: float, right: float, expected: float) -> None:
    y, x = torch.meshgrid(torch.arange(5.0), torch.arange(7.0), indexing="ij")
    image = (down * y + right * x).expand(1, 3, 5, 7).double()
    assert float(total_variation(image)) == pytest.approx(expected, rel=1e-6)


def test_range_penalty_by_hand() -> None:
    """The excess is ½ below and ¼ above: (¼ + 1/16) over six values."""
    image = torch.tensor([-0.5, 0.0, 0.3, 1.0, 1.25, 0.99], dtype=torch.float64).view(1, 1, 2, 3)
    assert float(range_penalty(image)) == pytest.approx((1 / 4 + 1 / 16) / 6, rel=1e-12)


def test_statistics_are_what_their_names_say() -> None:
    mean, gram = torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0], [4.0, 9.0]]])
    plain: Statistics = gram_statistics(mean, gram)
    centred: Statistics = centred_statistics(mean, gram)
    assert [part.tolist() for part in plain] == [gram.tolist()]
    assert [part.tolist() for part in centred] == [mean.tolist(), [[[2.0, 2.0], [2.0, 5.0]]]]
    assert float(centred_loss(centred, centred)) == 0


# The table


def test_every_choice_of_the_settings_is_in_the_table() -> None:
    assert set(CHOICES["style_loss"]) == set(STYLE_LOSSES)


@pytest.mark.parametrize("name", STYLE_LOSSES)
def test_settings_know_which_losses_want_the_whole_picture(name: str) -> None:
    reason = Settings(style_loss=name).whole_picture_only  # type: ignore[arg-type]
    assert (reason is None) == is_additive(name)
    assert reason is None or name in reason


def test_settings_know_that_normalized_gradients_want_the_whole_picture() -> None:
    reason = Settings(normalize_gradients=True).whole_picture_only
    assert reason is not None
    assert "whole layer" in reason


def test_losses_that_sort_are_refused_where_sums_are_needed() -> None:
    assert additive_loss("w2") is STYLE_LOSSES["w2"]
    with pytest.raises(SettingsError, match=r"'swd' sorts .* neither in tiles nor in regions; use one of centred,"):
        additive_loss("swd")


@pytest.mark.parametrize("level", [0.0, 1.0, 300.0])
def test_w2_of_flat_features_is_never_negative(level: float) -> None:
    """Where both covariances are almost only what was added to them, the traces cancel."""
    features = torch.full((1, 64, 8, 8), level) + 1e-3 * torch.randn(1, 64, 8, 8)
    loss = STYLE_LOSSES["w2"]
    assert isinstance(loss, StyleLoss)
    style = loss.target(loss.statistics(*moments(features)[1:]))
    assert float(loss.distance(loss.statistics(*moments(features)[1:]), style, "relative")) >= -1e-7
