"""hooks.py: hooks see what a layer itself computed, keep their contract, and never stay behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import hooks_unchanged, picture
from stylize.errors import HookError, InputError, SettingsError
from stylize.nst.hooks import (
    GradientHook,
    GradientReport,
    capture,
    check_image,
    count_hooks,
    guard_gradient,
    guard_input,
    observe,
)
from stylize.nst.vgg import Vgg19, Weights

few = settings(max_examples=25, deadline=None)


def someone_elses() -> nn.Sequential:
    """A network with in-place ReLUs, as most are, one of them in a block."""
    block = nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), block)


class Overwriting(nn.Module):
    """Its layers are no `nn.Sequential`, so that what comes after one cannot be seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.rest = nn.Conv2d(4, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.rest(self.convolution(image).relu_())
        return features


# Capturing


def test_capture_before_an_in_place_relu_is_the_convolutions_own(tiny_weights: Weights) -> None:
    network = Vgg19(tiny_weights, ["conv1_2", "relu2_1"], dtype=torch.float64)
    image = picture(8, 9).double()
    with capture(network, ["conv1_2", "relu1_2", "conv1_1"]) as features:  # the network was not built for conv1_1
        network(image)
    first, second = tiny_weights.convolutions["conv1_1"], tiny_weights.convolutions["conv1_2"]
    one = F.conv2d(network.get_submodule("normalize")(image), first[0].double(), first[1].double(), padding=1)
    two = F.conv2d(one.relu(), second[0].double(), second[1].double(), padding=1)
    assert two.min() < 0
    torch.testing.assert_close(features["conv1_1"], one)
    torch.testing.assert_close(features["conv1_2"], two)
    torch.testing.assert_close(features["relu1_2"], two.relu())


def test_capture_works_on_any_network() -> None:
    network, image = someone_elses(), picture(12, 12)
    with capture(network, ["0", "3.0", "3.1"]) as features:
        output = network(image)
    first, last = network.get_submodule("0"), network.get_submodule("3.0")
    assert isinstance(first, nn.Conv2d)
    assert isinstance(last, nn.Conv2d)
    one = F.conv2d(image, first.weight, first.bias)
    two = F.conv2d(F.max_pool2d(one.relu(), 2), last.weight, last.bias)
    torch.testing.assert_close(features["0"], one)
    torch.testing.assert_close(features["3.0"], two)
    torch.testing.assert_close(output, two.relu())


def test_captured_features_are_part_of_the_graph() -> None:
    network, image = someone_elses(), picture(12, 12).requires_grad_()
    with capture(network, ["0"]) as features:
        network(image)
    features["0"].sum().backward()
    first = network.get_submodule("0")
    assert isinstance(first, nn.Conv2d)
    expected = F.conv_transpose2d(torch.ones_like(features["0"]), first.weight)
    assert image.grad is not None
    torch.testing.assert_close(image.grad, expected)


def test_capture_is_made_anew_at_every_pass() -> None:
    network = someone_elses()
    with capture(network, ["2"]) as features:
        network(picture(12, 12))
        first = features["2"]
        network(picture(12, 12, seed=1))
        assert not torch.equal(features["2"], first)


def test_overwritten_capture_is_an_error_not_a_wrong_number() -> None:
    network = Overwriting()
    with (
        hooks_unchanged(network),
        pytest.raises(HookError, match=r"convolution was overwritten.*inplace=False"),
        capture(network, ["convolution"]),
    ):
        network(picture(8, 8))


def test_observers_replacement_flows_on() -> None:
    network, image = someone_elses(), picture(12, 12)
    seen: list[Tensor] = []
    with observe(network, {"2": lambda output: output * 2, "3.0": seen.append}):
        network(image)
    first, last = network.get_submodule("0"), network.get_submodule("3.0")
    doubled = F.max_pool2d(first(image).relu(), 2) * 2
    torch.testing.assert_close(seen[0], last(doubled))


def test_observer_that_returns_nothing_changes_nothing() -> None:
    network, image = someone_elses(), picture(12, 12)
    before = network(image)
    with observe(network, dict.fromkeys(("0", "1", "2", "3", "3.1"), lambda output: None)):
        assert torch.equal(network(image), before)


def test_unknown_layer_is_refused_with_a_suggestion(tiny_weights: Weights) -> None:
    """Case 10."""
    network = Vgg19(tiny_weights, ["relu2_1"])
    with (
        hooks_unchanged(network),
        pytest.raises(SettingsError, match=r"'relu2_11'.*Did you mean relu2_1\?"),
        capture(network, ["relu1_1", "relu2_11", "relu1_2"]),
    ):
        pass


# No hook stays behind (case 38)


def nothing(output: Tensor) -> None:
    return None


def fail(output: object) -> NoReturn:
    raise ZeroDivisionError


def interrupt(output: object) -> NoReturn:
    raise KeyboardInterrupt


def run_and_raise(network: nn.Module, error: type[BaseException]) -> NoReturn:
    network(picture(8, 8))
    raise error


Context: TypeAlias = Callable[[nn.Module], AbstractContextManager[Any]]
CONTEXTS: dict[str, Context] = {
    "capture": lambda network: capture(network, ["relu1_1", "conv1_2"]),
    "observe": lambda network: observe(network, {"relu1_1": nothing, "relu2_1": nothing}),
    "guard_input": lambda network: guard_input(network, 2, "relu2_1"),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_no_hooks_remain(tiny_weights: Weights, context: Context) -> None:
    network = Vgg19(tiny_weights, ["relu2_1"])
    for _ in range(3):
        with context(network):
            assert count_hooks(network) > 0
            network(picture(8, 8))
        assert count_hooks(network) == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, HookError])
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_no_hooks_remain_after_an_error_in_the_block(
    tiny_weights: Weights, context: Context, error: type[BaseException]
) -> None:
    network = Vgg19(tiny_weights, ["relu2_1"])
    with hooks_unchanged(network), pytest.raises(error), context(network):
        run_and_raise(network, error)


@pytest.mark.parametrize(("watcher", "error"), [(fail, ZeroDivisionError), (interrupt, KeyboardInterrupt)])
def test_no_hooks_remain_after_an_error_in_a_watcher(
    tiny_weights: Weights, watcher: Callable[[Tensor], None], error: type[BaseException]
) -> None:
    network = Vgg19(tiny_weights, ["relu2_1"])
    with (
        hooks_unchanged(network),
        pytest.raises(error),
        observe(network, {"relu1_1": nothing, "conv1_2": watcher, "relu2_1": nothing}),
    ):
        network(picture(8, 8))


def test_hooks_of_others_stay_where_they_are() -> None:
    network = someone_elses()
    handle = network.get_submodule("0").register_forward_hook(lambda module, inputs, output: None)
    with hooks_unchanged(network), capture(network, ["0", "1"]):
        network(picture(12, 12))
    assert count_hooks(network) == 1
    handle.remove()


def test_hooks_are_counted_wherever_they_sit() -> None:
    network = someone_elses()
    handles = [
        network.register_forward_hook(lambda module, inputs, output: None),
        network.get_submodule("3.0").register_forward_pre_hook(lambda module, inputs: None),
        network.get_submodule("0").register_full_backward_hook(lambda module, incoming, outgoing: None),
        network.get_submodule("3").register_full_backward_pre_hook(lambda module, outgoing: None),
    ]
    for left in (4, 3, 2, 1):
        assert count_hooks(network) == left
        handles.pop().remove()
    assert count_hooks(network) == 0


# What may enter the network


@pytest.mark.parametrize(
    ("image", "numbers"),
    [
        (torch.zeros(3, 8, 8), r"\[3, 8, 8\]"),
        (torch.zeros(1, 4, 8, 8), r"\[1, 4, 8, 8\]"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), r"uint8"),
        (torch.zeros(1, 3, 8, 3), r"3×8 px.*relu2_1.*at least 4 px"),
        (torch.zeros(1, 3, 3, 8), r"8×3 px.*relu2_1.*at least 4 px"),
        (torch.tensor([0.0, math.nan, math.inf, -math.inf]).repeat(48).view(1, 3, 8, 8), r"144 of .* 192 values"),
    ],
)
def test_input_is_refused_by_its_numbers(tiny_weights: Weights, image: Tensor, numbers: str) -> None:
    network = Vgg19(tiny_weights, ["relu2_1"])
    ran: list[Tensor] = []
    with (
        hooks_unchanged(network),
        guard_input(network, 4, network.deepest),
        observe(network, {"normalize": ran.append}),
        pytest.raises(InputError, match=numbers),
    ):
        network(image)
    assert not ran


def test_good_input_passes_the_guard() -> None:
    for image in (picture(4, 4), picture(4, 9).double(), picture(5, 4).bfloat16(), torch.zeros(2, 3, 4, 4)):
        check_image(image, 4, "relu2_1")


# The gradient's guard


def guarded(image: Tensor, gradient: Tensor, **options: Any) -> tuple[Tensor, GradientReport]:
    """What arrives at `image` when `gradient` flows back into it through the guard."""
    leaf = image.detach().requires_grad_()
    picture = leaf * 1.0
    with guard_gradient(picture, **options) as report:
        picture.backward(gradient)
    assert not picture._backward_hooks
    assert leaf.grad is not None
    return leaf.grad, report


@few
@given(
    seed=st.integers(0, 1000),
    clip_norm=st.none() | st.floats(0.01, 20),
    clip_value=st.none() | st.floats(0.01, 5),
)
def test_gradient_is_clipped_by_value_then_by_norm(
    seed: int, clip_norm: float | None, clip_value: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(1, 3, 4, 5, generator=generator, dtype=torch.float64)
    found, report = guarded(torch.zeros_like(gradient), gradient, clip_norm=clip_norm, clip_value=clip_value)
    expected = gradient if clip_value is None else gradient.clamp(-clip_value, clip_value)
    length = float(expected.square().sum().sqrt())
    if clip_norm is not None and length > clip_norm:
        expected = expected * (clip_norm / length)
    torch.testing.assert_close(found, expected)
    assert float(report.norm) == pytest.approx(float(gradient.square().sum().sqrt()), rel=1e-12)
    assert bool(report.fired) == (not torch.equal(expected, gradient))


def test_guard_that_does_not_fire_changes_no_bit() -> None:
    gradient = torch.randn(1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    found, report = guarded(torch.zeros_like(gradient), gradient, clip_norm=1e6, clip_value=1e6)
    assert torch.equal(found, gradient)
    assert not report.fired


def test_guarded_gradient_is_contiguous() -> None:
    """Features in channels_last send a permuted gradient back, which torch.optim.LBFGS cannot flatten."""
    strides = []
    image = torch.zeros(1, 3, 4, 5, requires_grad=True)
    picture = image * 1.0
    with guard_gradient(picture):
        picture.register_hook(lambda gradient: strides.append(gradient.is_contiguous()))
        permuted = torch.ones(1, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        assert not permuted.is_contiguous()
        picture.backward(permuted)
    assert strides == [True]


def test_gradient_hooks_run_in_order_and_see_what_the_one_before_returned() -> None:
    seen: list[tuple[str, float]] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(("double", float(gradient.max())))
        return gradient * 2

    def look(gradient: Tensor) -> None:
        seen.append(("look", float(gradient.max())))

    def add(gradient: Tensor) -> Tensor:
        seen.append(("add", float(gradient.max())))
        return gradient + 1

    image = torch.zeros(1, 3, 2, 2)
    found, report = guarded(image, torch.ones_like(image), hooks=[double, look, add], clip_value=2.5)
    assert seen == [("double", 1.0), ("look", 2.0), ("add", 2.0)]
    assert found.unique().tolist() == [2.5]  # clipped after the hooks
    assert float(report.norm) == pytest.approx(math.sqrt(12), rel=1e-6)  # measured before them


def test_gradient_hooks_alone_are_no_clipping() -> None:
    image = torch.zeros(1, 3, 2, 2)
    found, report = guarded(image, torch.ones_like(image), hooks=[lambda gradient: gradient * 3], clip_value=5.0)
    assert found.unique().tolist() == [3.0]
    assert not report.fired


class Careless:
    """A hook without a `__name__`."""

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient[0]


def wrong_dtype(gradient: Tensor) -> Tensor:
    return gradient.double()


def not_finite(gradient: Tensor) -> Tensor:
    return gradient / 0


def not_a_tensor(gradient: Tensor) -> Tensor:
    return 1.0  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (Careless(), r"Careless returned \[3, 2, 2\] .*given \[1, 3, 2, 2\]"),
        (wrong_dtype, r"wrong_dtype returned .*float64.*given .*float32"),
        (not_finite, r"not_finite returned values that are not finite"),
        (not_a_tensor, r"not_a_tensor returned a float"),
    ],
)
def test_gradient_hook_that_breaks_its_contract_is_named(hook: GradientHook, reason: str) -> None:
    image = torch.zeros(1, 3, 2, 2, requires_grad=True)
    with pytest.raises(HookError, match=reason), guard_gradient(image, hooks=[lambda gradient: None, hook]):
        image.sum().backward()
    assert not image._backward_hooks


def test_gradient_that_is_not_finite_is_no_fault_of_the_hook() -> None:
    image = torch.zeros(1, 3, 2, 2)
    found, report = guarded(image, torch.full_like(image, math.nan), hooks=[lambda gradient: gradient * 1])
    assert found.isnan().all()
    assert report.norm.isnan()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_no_tensor_hook_remains_after_an_error(error: type[BaseException]) -> None:
    image = torch.zeros(1, 3, 2, 2, requires_grad=True)
    with pytest.raises(error), guard_gradient(image):
        raise error
    assert not image._backward_hooks


def test_guard_fires_at_every_backward_pass() -> None:
    image = torch.zeros(1, 3, 2, 2, requires_grad=True)
    with guard_gradient(image, clip_norm=2.0) as report:
        for scale, fired in ((1.0, True), (0.1, False), (10.0, True)):
            image.grad = None
            (image * scale).sum().backward()
            assert float(report.norm) == pytest.approx(scale * math.sqrt(12), rel=1e-6)
            assert bool(report.fired) == fired


# What this rests on in torch itself


def test_torch_calls_tensor_hooks_in_registration_order() -> None:
    order: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 1.0):
        for name in ("first", "second", "third"):
            tensor.register_hook(lambda gradient, name=name: order.append(name))
        tensor.sum().backward()
        assert order[:3] == ["first", "second", "third"]
        order.clear()


def test_torch_hands_an_in_place_relus_values_to_a_hook_on_the_convolution() -> None:
    """Why capture hands over a copy."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
    kept: list[Tensor] = []
    network[0].register_forward_hook(lambda module, inputs, output: kept.append(output))
    network(torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert kept[0].min() == 0
