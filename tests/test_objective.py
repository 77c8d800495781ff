"""objective.py: what is minimised is what the settings ask for, and its gradient is the picture's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import hooks_unchanged, picture
from stylize.errors import InputError, SettingsError
from stylize.nst.hooks import capture, count_hooks, normalize_gradient
from stylize.nst.losses import STYLE_LOSSES, Statistics, content_loss, gram_loss, gram_matrix
from stylize.nst.objective import (
    Objective,
    Region,
    blend,
    layer_weights,
    measure_content,
    measure_style,
)
from stylize.nst.optimize import StopRule, optimize
from stylize.nst.vgg import Vgg19, Weights
from stylize.settings import Settings

few = hypothesis_settings(max_examples=20, deadline=None)
shares = st.lists(st.floats(0.01, 100), min_size=3, max_size=3)

# A penalty as large as the other terms, so that an error in any of them shows in the sum.
DEEP = Settings.from_sources("gatys2016", range_weight=1e4)
PAPER = DEEP.replace(normalization="gatys", content_weight=1e-3, style_weight=1.0, style_layer_weights=None)
SHALLOW = Settings(
    content_layers=("relu2_2",), style_layers=("relu1_1", "relu2_1"), style_layer_weights=(3.0, 1.0)
)


# The whole of it, written down once more with torch's plain functions

BLOCKS = (2, 2, 4, 4, 4)


def plain_features(weights: Weights, image: Tensor) -> dict[str, Tensor]:
    """Every convolution's and ReLU's output, before and after, of the Caffe network (BGR, 0 … 255)."""
    means = torch.tensor([103.939, 116.779, 123.68], dtype=image.dtype).view(1, 3, 1, 1)
    x = image[:, [2, 1, 0]] * 255 - means
    features = {}
    for block, convolutions in enumerate(BLOCKS, start=1):
        for i in range(1, convolutions + 1):
            weight, bias = (part.to(image.dtype) for part in weights.convolutions[f"conv{block}_{i}"])
            x = F.conv2d(x, weight, bias, padding=1)
            features[f"conv{block}_{i}"] = x
            x = F.relu(x)
            features[f"relu{block}_{i}"] = x
            if (block, i) == (5, 1):
                return features
        x = F.max_pool2d(x, 2)
    raise AssertionError


def plain_gram(features: Tensor) -> Tensor:
    F_ = features[0].flatten(1)  # [C, N]
    return F_ @ F_.t() / F_.shape[1]


def plain_losses(
    weights: Weights, image: Tensor, content: Tensor, style: Tensor, settings: Settings
) -> dict[str, Tensor]:
    """Gatys et al. 2016 in two of its published forms, with nothing shared with the code under test."""
    found, wanted, styles = (plain_features(weights, x) for x in (image, content, style))
    johnson = settings.normalization == "johnson"
    content_terms = []
    for layer in settings.content_layers:
        squares = (found[layer] - wanted[layer]) ** 2
        content_terms.append(squares.mean() if johnson else squares.sum() / 2)
    terms = {"content": sum(content_terms, start=torch.zeros(()))}
    for layer in settings.style_layers:
        squares = (plain_gram(found[layer]) - plain_gram(styles[layer])) ** 2
        C = found[layer].shape[1]
        terms[f"style.{layer}"] = squares.sum() / C**2 / (C**2 if johnson else 4)
    each = settings.style_layer_weights or (1.0,) * len(settings.style_layers)
    parts = [w * terms[f"style.{layer}"] for layer, w in zip(settings.style_layers, each, strict=True)]
    terms["style"] = sum(parts, start=torch.zeros(()))
    terms["range"] = ((image - image.clamp(0, 1)) ** 2).mean()
    terms["total"] = settings.content_weight * terms["content"] + settings.style_weight * terms["style"]
    terms["total"] = terms["total"] + settings.range_weight * terms["range"]
    return terms


@pytest.mark.parametrize(
    "settings",
    [
        DEEP,
        PAPER,
        PAPER.replace(content_layers=("conv4_2", "relu3_1")),
        DEEP.replace(
            style_layers=("conv1_1", "relu1_1", "conv3_1", "conv5_1"), style_layer_weights=(1.0, 2.0, 0.5, 4.0)
        ),
    ],
    ids=["preset", "equations 1 and 4", "two content layers", "convolutions as style layers"],
)
def test_gatys_form_equals_plain_calls(embedded: Weights, settings: Settings) -> None:
    """Loss, terms and the picture's gradient, with the real network in float64."""
    assert settings.range_weight > 0
    assert settings.tv_weight == 0
    content, style = picture(48, 64).double(), picture(40, 56, seed=1).double()
    image = (picture(48, 64, seed=2).double() * 1.2 - 0.1).requires_grad_()  # a part of it out of range
    network = Vgg19(embedded, settings.content_layers + settings.style_layers, dtype=torch.float64)
    objective = Objective(network, content, measure_style(network, style, settings), settings)
    losses = objective(image)
    (gradient,) = torch.autograd.grad(losses.total, image)
    expected = plain_losses(embedded, image, content, style, settings)
    (expected_gradient,) = torch.autograd.grad(expected["total"], image)
    found = {"total": losses.total, **losses.terms}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert float(found[name].detach()) == pytest.approx(float(value.detach()), rel=1e-9), name
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 1e-9


@pytest.mark.parametrize(
    ("dtype", "loss_error", "least_cosine"), [(torch.float32, 1e-5, 1 - 1e-6), (torch.bfloat16, 0.01, 0.98)]
)
def test_narrower_features_give_the_same_loss_and_direction(
    embedded: Weights, dtype: torch.dtype, loss_error: float, least_cosine: float
) -> None:
    """Case 8: in bfloat16, which keeps 8 bits, the picture is still pushed the same way."""
    settings = Settings()

    def evaluated(dtype: torch.dtype) -> tuple[float, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        content, style, image = (picture(64, 80, seed).to(wide) for seed in range(3))
        network = Vgg19(embedded, settings.content_layers + settings.style_layers, dtype=dtype)
        losses = Objective(network, content, measure_style(network, style, settings), settings)(
            image.requires_grad_()
        )
        assert losses.total.dtype == wide
        losses.total.backward()
        assert image.grad is not None
        return float(losses.total.detach()), image.grad.double().flatten()

    (loss, gradient), (exact_loss, exact) = evaluated(dtype), evaluated(torch.float64)
    assert loss == pytest.approx(exact_loss, rel=loss_error)
    assert float(torch.cosine_similarity(gradient, exact, dim=0)) > least_cosine


# The parts


def shallow(weights: Weights, settings: Settings, dtype: torch.dtype = torch.float64) -> Vgg19:
    return Vgg19(weights, settings.content_layers + settings.style_layers, dtype=dtype)


def objective_of(weights: Weights, settings: Settings) -> Objective:
    network = shallow(weights, settings)
    style = measure_style(network, picture(20, 18, seed=1).double(), settings)
    return Objective(network, picture(16, 24).double(), style, settings)


def test_total_is_the_weighted_sum_of_the_terms(tiny_weights: Weights) -> None:
    settings = SHALLOW.replace(content_weight=0.3, style_weight=0.7, tv_weight=2.0, range_weight=5.0)
    losses = objective_of(tiny_weights, settings)(picture(16, 24, seed=2).double() * 1.5 - 0.2)
    terms = {name: float(value) for name, value in losses.terms.items()}
    style = (3 * terms["style.relu1_1"] + 1 * terms["style.relu2_1"]) / 4
    assert terms["style"] == pytest.approx(style, rel=1e-12)
    total = 0.3 * terms["content"] + 0.7 * terms["style"] + 2.0 * terms["tv"] + 5.0 * terms["range"]
    assert float(losses.total) == pytest.approx(total, rel=1e-12)
    assert set(terms) == {"content", "style", "tv", "range", "style.relu1_1", "style.relu2_1"}
    assert min(terms.values()) > 0


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"content_layers": ()}, {"content"}),
        ({"style_layers": (), "style_layer_weights": None}, {"style", "style.relu1_1", "style.relu2_1"}),
        ({"tv_weight": 0.0}, {"tv"}),
        ({"range_weight": 0.0}, {"range"}),
    ],
)
def test_what_is_not_asked_for_is_not_a_term(
    tiny_weights: Weights, changes: dict[str, Any], missing: set[str]
) -> None:
    image = picture(16, 24, seed=2).double()
    settings = SHALLOW.replace(tv_weight=1.0)
    every = objective_of(tiny_weights, settings)(image).terms
    losses = objective_of(tiny_weights, settings.replace(**changes))(image)
    assert set(every) - set(losses.terms) == missing
    assert losses.total.isfinite()
    for name, value in losses.terms.items():
        torch.testing.assert_close(value, every[name], rtol=1e-12, atol=0)


def test_losses_of_the_content_itself(tiny_weights: Weights) -> None:
    settings = SHALLOW
    losses = objective_of(tiny_weights, settings)(picture(16, 24).double())
    assert float(losses.terms["content"]) == 0
    assert float(losses.terms["range"]) == 0
    assert float(losses.terms["style"]) > 0


@pytest.mark.parametrize("style_loss", STYLE_LOSSES)
def test_losses_of_the_style_itself(tiny_weights: Weights, style_loss: Any) -> None:
    style = picture(16, 24, seed=1).double()
    settings = SHALLOW.replace(style_loss=style_loss)
    network = shallow(tiny_weights, settings)
    losses = Objective(network, picture(16, 24).double(), measure_style(network, style, settings), settings)(style)
    assert abs(float(losses.terms["style"])) < 1e-12
    assert float(losses.terms["content"]) > 0


@pytest.mark.parametrize("style_loss", STYLE_LOSSES)
def test_every_style_loss_is_lowered_by_a_run(tiny_weights: Weights, style_loss: Any) -> None:
    settings = SHALLOW.replace(style_loss=style_loss, content_weight=0.0)
    network = shallow(tiny_weights, settings, torch.float32)
    style = measure_style(network, picture(20, 18, seed=1), settings)
    run = optimize(Objective(network, picture(16, 24), style, settings), picture(16, 24), settings, StopRule(25))
    assert run.outcome == "done"
    assert run.losses["style"] < run.history[0].terms["style"] / 2


def test_relative_content_layers_are_averaged(tiny_weights: Weights) -> None:
    image = picture(16, 24, seed=2).double()

    def content(*layers: str) -> float:
        settings = SHALLOW.replace(content_layers=layers)
        return float(objective_of(tiny_weights, settings)(image).terms["content"])

    assert content("relu2_2", "conv1_2") == pytest.approx((content("relu2_2") + content("conv1_2")) / 2, rel=1e-12)


def test_a_layer_may_be_content_and_style_at_once(tiny_weights: Weights) -> None:
    image = picture(16, 24, seed=2).double()
    apart = objective_of(tiny_weights, SHALLOW)(image).terms
    both = SHALLOW.replace(content_layers=("relu2_2", "relu2_1"))
    together = objective_of(tiny_weights, both)(image).terms
    for name in ("style", "style.relu1_1", "style.relu2_1"):
        torch.testing.assert_close(together[name], apart[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("style_loss", STYLE_LOSSES)
def test_gradient_is_that_of_the_loss(tiny_weights: Weights, style_loss: Any) -> None:
    """Along a direction, against a central difference; TV and the penalty included."""
    settings = SHALLOW.replace(style_loss=style_loss, tv_weight=1.0)
    objective = objective_of(tiny_weights, settings)
    image = (picture(16, 24, seed=2).double() * 1.4 - 0.2).requires_grad_()
    direction = torch.randn(image.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(objective(image).total, image)
    with torch.no_grad():
        h = 1e-7
        difference = (objective(image + h * direction).total - objective(image - h * direction).total) / (2 * h)
    assert float((gradient * direction).sum()) == pytest.approx(float(difference), rel=1e-5)


def test_no_hooks_remain(tiny_weights: Weights) -> None:
    objective = objective_of(tiny_weights, SHALLOW)
    objective(picture(16, 24).double())
    assert count_hooks(objective.network) == 0


def test_no_hooks_remain_after_an_error_in_the_network(tiny_weights: Weights) -> None:
    def interrupt(*args: object) -> NoReturn:
        raise KeyboardInterrupt

    objective = objective_of(tiny_weights, SHALLOW)
    objective.network.get_submodule("pool1").register_forward_hook(interrupt)
    with hooks_unchanged(objective.network), pytest.raises(KeyboardInterrupt):
        objective(picture(16, 24).double())


def test_too_small_a_picture_is_refused_by_its_numbers(tiny_weights: Weights) -> None:
    network = Vgg19(tiny_weights, ["relu3_1"])
    settings = SHALLOW.replace(style_layers=("relu3_1",), style_layer_weights=None)
    reason = r"9×3 px.*relu3_1.*4 px"
    with hooks_unchanged(network), pytest.raises(InputError, match=reason):
        measure_content(network, picture(3, 9), ["relu3_1"])
    with hooks_unchanged(network), pytest.raises(InputError, match=reason):
        measure_style(network, picture(3, 9), settings)


def test_targets_are_not_part_of_any_graph(tiny_weights: Weights) -> None:
    network = shallow(tiny_weights, SHALLOW)
    image = picture(16, 24).double().requires_grad_()
    targets = measure_style(network, image, SHALLOW)
    features = measure_content(network, image, ["relu2_2"])
    assert not any(part.requires_grad for parts in targets.values() for part in parts)
    assert not features["relu2_2"].requires_grad


@few
@given(weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=2), factor=st.floats(0.01, 100))
def test_relative_layer_weights_have_a_free_sum(weights: list[float], factor: float) -> None:
    plain = layer_weights(SHALLOW.replace(style_layer_weights=weights))
    scaled = layer_weights(SHALLOW.replace(style_layer_weights=[factor * w for w in weights]))
    assert plain == pytest.approx(scaled, rel=1e-9)
    assert sum(plain.values()) == pytest.approx(1, rel=1e-9)
    first, second = plain["style.relu1_1"], plain["style.relu2_1"]
    assert first * weights[1] == pytest.approx(second * weights[0], rel=1e-9)


def test_layer_weights_default_to_equal() -> None:
    assert layer_weights(SHALLOW.replace(style_layer_weights=None)) == {
        "style.relu1_1": 0.5,
        "style.relu2_1": 0.5,
    }


@pytest.mark.parametrize("normalization", ["johnson", "gatys"])
def test_published_layer_weights_are_taken_as_they_stand(normalization: Any) -> None:
    settings = SHALLOW.replace(style_loss="gram", normalization=normalization)
    assert layer_weights(settings) == {"style.relu1_1": 3.0, "style.relu2_1": 1.0}
    equal = settings.replace(style_layer_weights=None)
    assert layer_weights(equal) == {"style.relu1_1": 1.0, "style.relu2_1": 1.0}


# Blends


def styles_of(weights: Weights, count: int) -> list[Mapping[str, Statistics]]:
    network = shallow(weights, SHALLOW)
    return [measure_style(network, picture(16, 16, seed=seed).double(), SHALLOW) for seed in range(count)]


def assert_same(one: Mapping[str, Statistics], other: Mapping[str, Statistics]) -> None:
    assert set(one) == set(other)
    for layer in one:
        for a, b in zip(one[layer], other[layer], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@few
@given(weights=shares, factor=st.floats(0.01, 100), order=st.permutations(range(3)))
def test_blend_knows_neither_order_nor_unit(
    tiny_weights: Weights, weights: list[float], factor: float, order: Sequence[int]
) -> None:
    styles = styles_of(tiny_weights, 3)
    expected = blend(styles, weights)
    assert_same(blend(styles, [factor * w for w in weights]), expected)
    assert_same(blend([styles[i] for i in order], [weights[i] for i in order]), expected)


def test_blend_of_all_and_nothing_is_the_one(tiny_weights: Weights) -> None:
    first, second = styles_of(tiny_weights, 2)
    assert_same(blend([first, second], [0.0, 1.0]), second)
    assert_same(blend([first, second], [2.0, 0.0]), first)
    assert_same(blend([second], [0.3]), second)


def test_blend_by_hand() -> None:
    """A quarter of 1 and three quarters of 5."""
    one, other = torch.tensor([[1.0]]), torch.tensor([[5.0]])
    mixed = blend([{"relu1_1": (one, one)}, {"relu1_1": (other, one)}], [1.0, 3.0])
    assert [float(part) for part in mixed["relu1_1"]] == [4.0, 1.0]


def test_blend_of_equals_is_the_same(tiny_weights: Weights) -> None:
    (style,) = styles_of(tiny_weights, 1)
    assert_same(blend([style, style, style], [1.0, 1.0, 1.0]), style)


def test_blend_of_quantiles_is_that_of_their_ranks(tiny_weights: Weights) -> None:
    """Also of styles of other sizes: the fewer values are read off at as many ranks."""
    one, other = torch.tensor([[[0.0, 2.0, 8.0, 10.0]]]), torch.tensor([[[4.0, 6.0]]])
    mixed = blend([{"relu1_1": (one,)}, {"relu1_1": (other,)}], [1.0, 1.0])
    assert mixed["relu1_1"][0].tolist() == [[[2.0, 3.25, 6.75, 8.0]]]


@pytest.mark.parametrize("style_loss", ["histogram", "swd"])
def test_blends_of_sorting_losses_can_be_painted(tiny_weights: Weights, style_loss: Any) -> None:
    settings = SHALLOW.replace(style_loss=style_loss)
    network = shallow(tiny_weights, settings)
    styles = [measure_style(network, picture(20, side, seed=side).double(), settings) for side in (18, 25)]
    losses = Objective(network, None, blend(styles, [1.0, 2.0]), settings)(picture(16, 24).double())
    assert losses.total.isfinite()
    assert float(losses.terms["style"]) > 0


@pytest.mark.parametrize("style_loss", ["histogram", "swd"])
def test_sorting_losses_are_refused_in_regions(tiny_weights: Weights, style_loss: Any) -> None:
    settings = SHALLOW.replace(style_loss=style_loss)
    network = shallow(tiny_weights, settings)
    style = picture(16, 24, seed=1).double()
    with torch.no_grad(), capture(network, settings.style_layers) as outputs:
        network(style)
    guide = {layer: torch.full(output.shape[2:], 1 / output[0, 0].numel()) for layer, output in outputs.items()}
    with hooks_unchanged(network), pytest.raises(SettingsError, match="neither in tiles nor in regions"):
        measure_style(network, style, settings, guide)
    region = Region(measure_style(network, style, settings), guide)
    with pytest.raises(SettingsError, match="neither in tiles nor in regions"):
        Objective(network, style, [region], settings)


# Normalised gradients

NORMALIZED = SHALLOW.replace(
    style_loss="gram",
    content_weight=0.3,
    style_weight=0.7,
    range_weight=0.0,
    tv_weight=0.0,
    normalize_gradients=True,
)


@pytest.mark.parametrize("content_layer", ["relu2_2", "relu2_1"])  # one is a style layer too
def test_normalized_gradients_are_those_of_each_loss_at_its_layer(
    tiny_weights: Weights, content_layer: str
) -> None:
    """Each loss's gradient at its own layer, of length 1 in L1, times its weight, sent on to the picture."""
    settings = NORMALIZED.replace(content_layers=(content_layer,))
    image = picture(16, 24, seed=2).double().requires_grad_()
    (found,) = torch.autograd.grad(objective_of(tiny_weights, settings)(image).total, image)

    network = shallow(tiny_weights, settings)
    layers = {content_layer, *settings.style_layers}
    with capture(network, layers) as outputs:
        network(picture(16, 24).double())
        content = dict(outputs)
        network(picture(20, 18, seed=1).double())
        style = dict(outputs)
        network(image)
        features = dict(outputs)
    weighted = [(0.3, content_layer, content_loss(features[content_layer], content[content_layer]))]
    for layer, share in (("relu1_1", 0.75), ("relu2_1", 0.25)):  # of the layers' weights 3 and 1
        distance = gram_loss((gram_matrix(features[layer]),), (gram_matrix(style[layer]),))
        weighted.append((0.7 * share, layer, distance))
    expected = torch.zeros_like(image)
    for weight, layer, loss in weighted:
        (own,) = torch.autograd.grad(loss, features[layer], retain_graph=True)
        scaled = weight * own / own.abs().sum()
        expected += torch.autograd.grad(features[layer], image, scaled, retain_graph=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("style_loss", STYLE_LOSSES)
def test_normalizing_gradients_leaves_the_losses_alone(tiny_weights: Weights, style_loss: Any) -> None:
    settings = SHALLOW.replace(style_loss=style_loss)
    image = picture(16, 24, seed=2).double().requires_grad_()
    plain = objective_of(tiny_weights, settings)(image)
    objective = objective_of(tiny_weights, settings.replace(normalize_gradients=True))
    losses = objective(image)
    for name, value in plain.terms.items():
        torch.testing.assert_close(losses.terms[name], value)
    (gradient,) = torch.autograd.grad(losses.total, image)
    (other,) = torch.autograd.grad(plain.total, image)
    assert gradient.isfinite().all()
    assert not torch.allclose(gradient, other)
    assert count_hooks(objective.network) == 0


def test_normalized_gradient_has_the_norm_asked_for_at_every_backward() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = (normalize_gradient(x, 2.5) ** 3).sum()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert float(gradient.abs().sum()) == pytest.approx(2.5, rel=1e-6)
        torch.testing.assert_close(gradient / gradient.abs().max(), x**2 / (x**2).max())


def test_normalized_gradient_of_nothing_stays_nothing() -> None:
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((normalize_gradient(x, 1e6) * 0).sum(), x)
    assert torch.equal(gradient, torch.zeros(3))
    assert not normalize_gradient(torch.ones(3), 1.0).requires_grad


def test_hooks_of_normalized_gradients_end_with_their_graph() -> None:
    """Nothing but the graph holds the tensor that has the hook, and the tensor that came in has none."""
    x = torch.ones(3, requires_grad=True)
    alone = normalize_gradient(x, 1.0)
    loss = alone.sum()
    hooks = alone._backward_hooks
    assert hooks is not None
    assert len(hooks) == 1
    assert not x._backward_hooks
    gone = weakref.ref(next(iter(hooks.values())))
    loss.backward()
    del alone, loss, hooks
    gc.collect()
    assert gone() is None


def test_content_layers_count_by_their_weights(tiny_weights: Weights) -> None:
    """Relative losses: the weighted mean; the published forms: the weighted sum."""
    layers, weights = ("relu1_2", "relu2_2"), (3.0, 1.0)
    image = picture(16, 24, seed=2).double()

    def content(**changes: Any) -> float:
        return float(objective_of(tiny_weights, SHALLOW.replace(**changes))(image).terms["content"])

    first, second = (content(content_layers=(layer,)) for layer in layers)
    both = content(content_layers=layers, content_layer_weights=weights)
    assert both == pytest.approx((3 * first + second) / 4, rel=1e-12)
    published = {"normalization": "johnson", "style_loss": "gram"}
    first, second = (content(content_layers=(layer,), **published) for layer in layers)
    both = content(content_layers=layers, content_layer_weights=weights, **published)
    assert both == pytest.approx(3 * first + second, rel=1e-12)
