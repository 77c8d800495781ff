"""The hook toolkit: it sees what PyTorch itself computes, leaves nothing behind, and keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import re
import resource
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
from torch import Tensor, nn

import stylize
from conftest import hooks_unchanged
from stylize.errors import HookError, InputError, SettingsError
from stylize.nst.hooks import (
    GradientHook,
    Magnitudes,
    capture,
    check_hook,
    clip_gradients,
    count_hooks,
    observe,
    unwrap,
    watch_gradients,
)


def small(*, inplace: bool = False, seed: int = 0) -> nn.Sequential:
    """Two convolutions with ReLUs and a linear end, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=inplace), nn.Conv2d(4, 5, 3), nn.ReLU(inplace=inplace), nn.Flatten(),
        nn.Linear(5 * 4 * 4, 2),
    ).double()  # fmt: skip


def pictures(count: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 8, 8, generator=generator, dtype=torch.float64)


def tensor_hooks(tensor: Tensor) -> int:
    return len(tensor._backward_hooks or ())


# Magnitudes


def test_magnitudes_are_those_of_the_absolute_values() -> None:
    numbers = Magnitudes.of(torch.tensor([-3.0, 0.0, 4.0])).as_floats()
    assert numbers == pytest.approx({"mean": 7 / 3, "largest": 4, "norm": 5, "zeros": 1 / 3, "finite": 1})


def test_magnitudes_tell_what_is_not_finite() -> None:
    assert Magnitudes.of(torch.tensor([1.0, float("nan"), float("inf"), 2.0])).as_floats()["finite"] == 0.5


def test_magnitudes_of_16_bits_are_summed_wider() -> None:
    values = torch.full((100_000,), 0.5, dtype=torch.bfloat16)  # whose sum bfloat16 cannot hold
    numbers = Magnitudes.of(values).as_floats()
    assert numbers["mean"] == pytest.approx(0.5)
    assert numbers["norm"] == pytest.approx(0.5 * 100_000**0.5)


# Watching gradients


def test_watched_gradients_are_those_that_torch_retains() -> None:
    network, image = small(), pictures()
    outputs = [image]
    for layer in network:
        outputs.append(layer(outputs[-1]))
        outputs[-1].retain_grad()
    outputs[-1].square().sum().backward()
    with watch_gradients(network, keep=True) as flows:
        network(image).square().sum().backward()
    assert list(flows) == [str(i) for i in range(len(network))]
    for flow, output in zip(flows.values(), outputs[1:], strict=True):
        torch.testing.assert_close(flow.activations, output.detach())
        torch.testing.assert_close(flow.gradients, output.grad)
        assert flow.gradient is not None
        assert output.grad is not None
        torch.testing.assert_close(flow.gradient.norm, output.grad.norm())


def test_in_place_operations_change_nothing_that_is_watched() -> None:
    plain, inplace, image = small(), small(inplace=True), pictures()
    seen = []
    for network in (plain, inplace):
        with watch_gradients(network, keep=True) as flows:
            network(image).square().sum().backward()
        seen.append(flows)
    for layer, expected in seen[0].items():
        torch.testing.assert_close(seen[1][layer].activations, expected.activations, rtol=0, atol=0)
        torch.testing.assert_close(seen[1][layer].gradients, expected.gradients)


def test_watching_changes_no_gradient() -> None:
    network, image = small(inplace=True), pictures().requires_grad_()
    (expected,) = torch.autograd.grad(network(image).square().sum(), image)
    with watch_gradients(network):
        (found,) = torch.autograd.grad(network(image).square().sum(), image)
    assert torch.equal(found, expected)


def test_watched_layers_stand_in_the_order_in_which_they_ran() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x))
            return y

    with watch_gradients(network := Backwards()) as flows:
        network(torch.ones(1, 3))
    assert list(flows) == ["first", "last"]


def test_without_a_graph_there_are_activations_only() -> None:
    with torch.no_grad(), watch_gradients(network := small()) as flows:
        network(pictures())
    assert all(flow.gradient is None for flow in flows.values())
    assert flows["1"].activation.zeros > 0


def test_modules_that_return_no_tensor_are_passed_over() -> None:
    network = nn.Sequential(nn.LSTM(3, 4, batch_first=True))  # returns a tuple
    with watch_gradients(network) as flows:
        network(torch.ones(1, 5, 3))
    assert flows == {}
    with pytest.raises(HookError, match="0 returns a tuple"), capture(network, ["0"]):
        network(torch.ones(1, 5, 3))


def test_gradients_of_several_passes_arrive_whenever_they_are_sent() -> None:
    network = nn.Sequential(nn.Linear(1, 1, bias=False))
    with watch_gradients(network, keep=True) as flows:
        first = network(torch.ones(1, 1))
        flow = flows["0"]
        second = network(torch.ones(1, 1))
        (3 * first + 5 * second).backward()
    assert flow.gradients == 3
    assert flows["0"].gradients == 5


def test_gradcheck_through_captured_layers() -> None:
    network = small(inplace=True)

    def features_of(image: Tensor) -> tuple[Tensor, ...]:
        with capture(network, ["0", "1", "3"]) as features:
            network(image)
        return tuple(features.values())

    assert torch.autograd.gradcheck(features_of, pictures().requires_grad_())


# Clipping


@pytest.mark.parametrize(("bounds", "expected"), [
    ({"norm": 1.0}, [0.6, 0.8]), ({"value": 3.5}, [3.0, 3.5]), ({"value": 3.0, "norm": 30.0}, [3.0, 3.0]),
    ({"norm": 10.0}, [3.0, 4.0]),
])  # fmt: skip
def test_tensors_gradient_is_clipped_by_value_then_norm(bounds: dict[str, float], expected: list[float]) -> None:
    x = torch.zeros(2, requires_grad=True)
    with clip_gradients(x, **bounds) as reports:
        (x * torch.tensor([3.0, 4.0])).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor(expected))
    assert reports["tensor"].norm == 5  # before
    assert bool(reports["tensor"].fired) == (expected != [3.0, 4.0])


def test_each_parameter_is_clipped_on_its_own() -> None:
    network = nn.Linear(2, 1)
    with clip_gradients(network, norm=1.0) as reports:
        (network(torch.tensor([[3.0, 4.0]])) * 0.5).sum().backward()
    assert network.weight.grad is not None
    assert network.bias.grad is not None
    torch.testing.assert_close(network.weight.grad, torch.tensor([[0.6, 0.8]]))
    assert network.bias.grad == 0.5
    assert {name: int(report.firings) for name, report in reports.items()} == {"weight": 1, "bias": 0}


def test_clippings_are_counted() -> None:
    x = torch.zeros(1, requires_grad=True)
    with clip_gradients({"x": x}, value=2.0) as reports:
        for factor in (1.0, 3.0, 5.0):
            (factor * x).sum().backward()
    assert (reports["x"].backwards, int(reports["x"].firings)) == (3, 2)


def test_frozen_parameters_are_left_out() -> None:
    network = nn.Linear(2, 1)
    network.bias.requires_grad_(False)
    with clip_gradients(network, norm=1.0) as reports:
        assert list(reports) == ["weight"]


@pytest.mark.parametrize("bounds", [{}, {"norm": 0.0}, {"value": -1.0}, {"norm": float("nan")}])
def test_clipping_without_a_bound_is_refused(bounds: dict[str, float]) -> None:
    with (
        pytest.raises(SettingsError, match="above 0"),
        clip_gradients(torch.zeros(1, requires_grad=True), **bounds),
    ):
        pass


def test_clipping_what_has_no_gradient_is_refused_by_name() -> None:
    good = torch.zeros(1, requires_grad=True)
    with pytest.raises(InputError, match="bad requires no gradient"):
        clip_gradients({"good": good, "bad": torch.zeros(1)}, norm=1.0).__enter__()
    assert tensor_hooks(good) == 0


# Nothing stays behind


Tool = Callable[[nn.Module], AbstractContextManager[Any]]
TOOLS: dict[str, Tool] = {
    "capture": lambda network: capture(network, ["0", "2"]),
    "observe": lambda network: observe(network, {"0": lambda output: None}),
    "watch_gradients": watch_gradients,
    "clip_gradients": lambda network: clip_gradients(network, norm=1e-3),
}


@contextmanager
def nothing_left(network: nn.Module) -> Iterator[None]:
    with hooks_unchanged(network):
        try:
            yield
        finally:
            assert all(tensor_hooks(parameter) == 0 for parameter in network.parameters())


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_no_hook_remains_after_success(tool: Tool) -> None:
    network = small()
    with nothing_left(network), tool(network):
        assert count_hooks(network) or any(tensor_hooks(each) for each in network.parameters())
        network(pictures()).sum().backward()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_no_hook_remains_after_an_error(tool: Tool, error: type[BaseException]) -> None:
    network = small()

    def fail(output: Tensor) -> NoReturn:
        output.sum().backward()
        raise error

    with nothing_left(network), pytest.raises(error), tool(network):
        fail(network(pictures()))


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_no_hook_remains_after_a_failed_pass(tool: Tool) -> None:
    network = small()
    with nothing_left(network), pytest.raises(RuntimeError), tool(network):
        network(torch.ones(1, 7, 8, 8, dtype=torch.float64))


def test_a_graph_that_outlives_the_block_carries_no_hook_any_more() -> None:
    network, image = small(), pictures()
    with watch_gradients(network) as flows:
        loss = network(image).sum()
    loss.backward()
    assert all(flow.gradient is None for flow in flows.values())


def test_watching_keeps_no_output_alive() -> None:
    network, outputs = small(), []

    def remember(output: Tensor) -> None:
        outputs.append(weakref.ref(output))

    with watch_gradients(network, ["0"]), observe(network, {"0": remember}):
        for _ in range(3):
            network(pictures()).sum().backward()
        gc.collect()
        assert [output() for output in outputs] == [None, None, None]


STATM = Path("/proc/self/statm")


def megabytes() -> float:
    """The memory that this process has now."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell a process's memory in /proc")
@pytest.mark.parametrize("name", ["capture", "watch_gradients"])
def test_memory_is_flat_over_200_passes(name: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(inplace=True), nn.Conv2d(16, 3, 1))
    image = torch.rand(1, 3, 128, 128, requires_grad=True)  # 1 MB of features in each layer

    def pass_through(times: int) -> None:
        for _ in range(times):
            with TOOLS[name](network) as seen:
                network(image).sum().backward()
            del seen
            image.grad = None

    pass_through(20)
    before = megabytes()
    pass_through(200)
    assert megabytes() - before < 20  # one leaked layer a pass would be 200


# Checking a hook


def returns_text(gradient: Tensor) -> Any:
    return "gradient"


def scales_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


def scales_behind_torchs_back(gradient: Tensor) -> None:
    gradient.data.mul_(2)


@pytest.mark.parametrize(("hook", "words"), [
    (returns_text, "returned a str"),
    (lambda gradient: gradient[:1], r"returned \[1\]"),
    (lambda gradient: gradient.float(), "torch.float32"),
    (lambda gradient: gradient.to("meta"), "on meta"),
    (lambda gradient: gradient / 0, "not finite"),
    (scales_in_place, "modified its argument in place"),
    (scales_behind_torchs_back, "modified its argument in place"),
])  # fmt: skip
def test_broken_contract_is_told_and_the_gradient_goes_on_as_it_came(hook: GradientHook, words: str) -> None:
    checked = check_hook(hook)
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    x.register_hook(checked)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(x.square().sum(), x)
        assert gradient.tolist() == [2, 2]
    assert checked.calls == 2
    assert not checked.ok
    (problem,) = checked.problems  # told once
    assert re.search(words, problem)
    assert problem in str(checked)


def test_hook_that_keeps_its_contract_is_told_so() -> None:
    checked = check_hook(torch.neg)
    assert "never ran" in str(checked)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(checked)
    x.sum().backward()
    assert checked.ok
    assert str(checked) == "neg ran once. It kept to its contract."
    assert x.grad is not None
    assert x.grad.tolist() == [-1, -1]


def test_what_a_hook_raises_is_noted_and_passes_through() -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError

    checked = check_hook(fail)
    x = torch.ones(1, requires_grad=True)
    x.register_hook(checked)
    with pytest.raises(ValueError):
        x.sum().backward()
    assert checked.problems == ["fail raised ValueError."]


def test_values_that_were_not_finite_before_are_no_fault_of_the_hook() -> None:
    checked = check_hook(lambda gradient: gradient * 2)
    checked(torch.tensor([float("nan"), 1.0]))
    assert checked.ok


def test_watchers_of_layers_can_be_checked_too() -> None:
    network, image = small(), pictures().requires_grad_()
    checked = check_hook(scales_in_place)
    (expected,) = torch.autograd.grad(network(image).sum(), image)
    with observe(network, {"0": checked}):
        (found,) = torch.autograd.grad(network(image).sum(), image)
    assert checked.problems == ["scales_in_place modified its argument in place."]
    torch.testing.assert_close(found, expected)


# Wrapped, replicated, compiled


def test_layers_inside_data_parallel_have_their_own_names() -> None:
    network = small()
    wrapped = nn.DataParallel(network)
    with hooks_unchanged(network):
        with capture(wrapped, ["0"]) as features, watch_gradients(wrapped) as flows:
            wrapped(pictures()).sum().backward()
        assert features["0"].shape == (1, 4, 6, 6)
        assert flows["5"].gradient is not None
        with clip_gradients(wrapped, norm=1e-3) as reports:
            assert "0.weight" in reports


def test_layers_inside_distributed_data_parallel_have_their_own_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    try:
        network = small()
        wrapped = nn.parallel.DistributedDataParallel(network)
        with hooks_unchanged(network):
            with capture(wrapped, ["1"]) as features, watch_gradients(wrapped) as flows:
                wrapped(pictures()).sum().backward()
            assert features["1"].shape == (1, 4, 6, 6)
            assert flows["0"].gradient is not None
    finally:
        torch.distributed.destroy_process_group()


def test_replicas_are_refused_instead_of_mixed_up() -> None:
    network = small()
    with capture(network, ["0"]):
        replica = network[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = network[0].weight, network[0].bias
        with pytest.raises(HookError, match="DistributedDataParallel"):
            replica(pictures())


@pytest.mark.parametrize("where", ["wrapped", "from within", "a part"])
def test_compiled_network_is_refused_with_the_reason(where: str) -> None:
    network: nn.Module = small()
    if where == "wrapped":
        network = cast(nn.Module, torch.compile(network))
    elif where == "from within":
        network.compile()
    else:
        network = nn.Sequential(cast(nn.Module, torch.compile(small())))
    for tool in TOOLS.values():
        with pytest.raises(HookError, match="compiled"), tool(network):
            pass


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_scripted_network_is_refused() -> None:
    scripted = torch.jit.trace(small(), pictures())
    with pytest.raises(HookError, match="script module"):
        unwrap(scripted)


def test_copies_of_a_network_are_hooked_apart() -> None:
    network = small()
    other = copy.deepcopy(network)
    with capture(network, ["0"]) as features:
        other(pictures())
    assert features == {}


def test_the_toolkit_is_the_packages() -> None:
    assert (stylize.capture, stylize.watch_gradients) == (capture, watch_gradients)
    assert (stylize.clip_gradients, stylize.check_hook) == (clip_gradients, check_hook)
