"""The hooks of the method, and a small library of them for any `nn.Module`; docs/hooks.md shows how they work.

    observe, capture        see what layers put out; `observe` may change it
    watch_gradients         see what flows forward and back through layers
    clip_gradients          bound the gradients of parameters or tensors
    guard_gradient          what the method itself has on its picture
    normalize_gradient      what it may have on what a single loss sees of a layer
    check_hook              find out whether a hook of one's own behaves

Every registration of a hook in this project is in this file, and each sits in a context manager that removes
it on the way out, whatever happened inside; that of `normalize_gradient` sits on a tensor which it makes itself,
and is gone with it. Hooks are state of the module they sit on: two threads must not
use one hooked network at the same time. Networks inside `DataParallel` and `DistributedDataParallel` are
unwrapped; compiled ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stylize.errors import HookError, InputError, SettingsError
from stylize.settings import did_you_mean

Watcher: TypeAlias = Callable[[Tensor], "Tensor | None"]  # sees a layer's output, may return another in its place
GradientHook: TypeAlias = Callable[[Tensor], "Tensor | None"]  # sees a gradient, may return another
ForwardHook: TypeAlias = Callable[[nn.Module, object, object], "Tensor | None"]


@contextmanager
def observe(network: nn.Module, watchers: Mapping[str, Watcher]) -> Iterator[None]:
    """Call each watcher with the output of the layer it is named for, at every forward pass.

    What a watcher returns, if anything, goes on through the network in the output's place. A convolution
    whose output the next module would overwrite (an in-place ReLU in the same `nn.Sequential`) hands over
    a copy, and nothing goes in its place.

    Raises:
        SettingsError: when the network has no such layer.
        HookError: when the network is compiled; in the forward pass, when a layer returns no tensor.
    """
    network = unwrap(network)
    with ExitStack() as handles:
        for layer, watcher in watchers.items():
            module = _find(network, layer)
            hook = _forward_hook(layer, watcher, copy=_is_overwritten(network, layer))
            handles.callback(module.register_forward_hook(hook).remove)
        yield


@contextmanager
def capture(network: nn.Module, layers: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Gather the outputs of `layers`, by name, anew at every forward pass.

        with capture(network, ["relu1_1", "conv4_2"]) as features:
            network(image)
            features["conv4_2"]                        # [B, 512, H / 8, W / 8], part of the graph

    Works on any `nn.Module`; a layer is named as in `named_modules()`. The dictionary stays as it is when the
    block ends: it is what keeps the features, and through them the graph, in memory.

    Raises:
        SettingsError: when the network has no such layer.
        HookError: when the network is compiled; in the forward pass, when a layer returns no tensor; at its
            end, when a later module overwrote a captured tensor.
    """
    network = unwrap(network)
    features: dict[str, Tensor] = {}
    versions: dict[str, int] = {}

    def keep(layer: str) -> Watcher:
        def watcher(output: Tensor) -> None:
            features[layer] = output
            versions[layer] = output._version

        return watcher

    def check(module: nn.Module, inputs: object, output: object) -> None:
        for layer, feature in features.items():
            if feature._version != versions[layer]:
                raise HookError(
                    f"The output of {layer} was overwritten by a later in-place operation: "
                    "build the network with inplace=False there, or capture the layer after it."
                )

    with observe(network, {layer: keep(layer) for layer in layers}):
        handle = network.register_forward_hook(check)
        try:
            yield features
        finally:
            handle.remove()


@contextmanager
def guard_input(network: nn.Module, minimum_size: int, deepest: str) -> Iterator[None]:
    """Check what enters the network: [B, 3, H, W], floating point, finite, large enough for its deepest layer.

    Raises:
        InputError: naming the numbers, before the network computes anything.
    """

    def check(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        (image,) = inputs
        check_image(image, minimum_size, deepest)

    handle = network.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def check_image(image: Tensor, minimum_size: int = 1, deepest: str = "the network") -> None:
    """Raise `InputError` unless `image` is a finite floating point [B, 3, H, W] of at least the minimum size."""
    if image.ndim != 4 or image.shape[1] != 3:
        raise InputError(f"The network takes [B, 3, H, W]; this is {list(image.shape)}.")
    if not image.is_floating_point():
        raise InputError(f"The network takes floating point values in [0, 1]; this is {image.dtype}.")
    height, width = image.shape[2:]
    if min(height, width) < minimum_size:
        raise InputError(
            f"A picture of {width}×{height} px is too small for {deepest}, "
            f"which needs at least {minimum_size} px a side."
        )
    if not image.isfinite().all():
        bad = int((~image.isfinite()).sum())
        raise InputError(f"{bad} of the picture's {image.numel()} values are not finite.")


@dataclass(frozen=True)
class Magnitudes:
    """How large a tensor's values are: tensors without dimensions, so that no device is waited for."""

    mean: Tensor  # of the absolute values
    largest: Tensor  # absolute value
    norm: Tensor  # L2
    zeros: Tensor  # share of the values that are exactly 0
    finite: Tensor  # share of the values that are finite

    @classmethod
    def of(cls, tensor: Tensor) -> Magnitudes:
        """Measure a tensor of any shape and real dtype with at least one value, in float32 or wider."""
        absolute = tensor.detach().abs()
        absolute = absolute.to(torch.promote_types(absolute.dtype, torch.float32))
        return cls(
            mean=absolute.mean(),
            largest=absolute.amax(),
            norm=torch.linalg.vector_norm(absolute),
            zeros=(absolute == 0).to(absolute.dtype).mean(),
            finite=absolute.isfinite().to(absolute.dtype).mean(),
        )

    def as_floats(self) -> dict[str, float]:
        """The numbers by name; waits for the device."""
        names = [each.name for each in fields(self)]
        return dict(zip(names, torch.stack([getattr(self, name) for name in names]).tolist(), strict=True))


@dataclass
class LayerFlow:
    """What flowed through one layer: forward in the latest pass, back in the latest backward pass through it."""

    activation: Magnitudes
    gradient: Magnitudes | None = None  # None until a backward pass came through
    activations: Tensor | None = None  # the values themselves, with `keep`
    gradients: Tensor | None = None


@contextmanager
def watch_gradients(
    network: nn.Module, layers: Iterable[str] | None = None, *, keep: bool = False
) -> Iterator[dict[str, LayerFlow]]:
    """Measure what flows forward and back through layers, by name and in the order in which they ran.

        with watch_gradients(network) as flows:
            network(image).sum().backward()
            flows["relu1_1"].gradient.norm              # of the loss with respect to that layer's output

    Tensor hooks on the outputs do it, not backward hooks on modules: those fail before an in-place operation,
    these see the gradient of what the layer itself put out. A layer that runs several times in one pass shows
    its last run.

    Args:
        network: any `nn.Module`.
        layers: named as in `named_modules()`; None = every module that has no modules inside.
        keep: hold copies of the activations and the gradients too, without their graph.

    Raises:
        SettingsError: when the network has no such layer.
        HookError: when the network is compiled.
    """
    network = unwrap(network)
    chosen = _leaves(network) if layers is None else {layer: _find(network, layer) for layer in layers}
    flows: dict[str, LayerFlow] = {}
    tensor_hooks = _TensorHooks()

    def watch(layer: str, output: object) -> None:
        if not isinstance(output, Tensor) or not (output.is_floating_point() and output.numel()):
            return  # there is nothing to measure in a tuple, or in whole numbers
        flow = LayerFlow(Magnitudes.of(output), activations=output.detach().clone() if keep else None)
        flows.pop(layer, None)  # the order of the dictionary is that of the last pass
        flows[layer] = flow
        if output.requires_grad:
            tensor_hooks.add(output, partial(_note_gradient, flow, keep))

    with ExitStack() as handles:
        handles.callback(tensor_hooks.remove)
        for layer, module in chosen.items():
            hook = _plain_forward_hook(partial(watch, layer))
            handles.callback(module.register_forward_hook(hook).remove)
        yield flows


@dataclass
class GradientReport:
    """What a clipping hook saw; tensors, so that no device is waited for."""

    norm: Tensor = field(default_factory=lambda: torch.zeros(()))  # L2, before clipping; infinite or NaN tells
    fired: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))  # was it changed by clipping?
    backwards: int = 0  # gradients that came by so far
    firings: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.long))  # of them, those changed


@contextmanager
def clip_gradients(
    target: nn.Module | Mapping[str, Tensor] | Tensor, *, norm: float | None = None, value: float | None = None
) -> Iterator[dict[str, GradientReport]]:
    """Clip each gradient that flows into `target`: to ±`value`, then to an L2 norm of `norm`, each on its own.

        with clip_gradients(network, norm=1.0) as reports:
            loss.backward()
            reports["fc.weight"].norm                   # before clipping

    A norm over all parameters together is no matter for hooks, which see one gradient at a time:
    `torch.nn.utils.clip_grad_norm_` does that after the backward pass.

    Args:
        target: a module (its parameters that require a gradient, by name), named tensors, or one tensor,
            whose name is then "tensor".

    Raises:
        SettingsError: when neither bound is given, or one is not above 0.
        InputError: when a tensor requires no gradient.
    """
    bounds = [bound for bound in (norm, value) if bound is not None]
    if not bounds or not all(bound > 0 for bound in bounds):
        raise SettingsError(f"clip_gradients needs a norm or a value above 0; it got {norm!r} and {value!r}.")
    tensors = _targets(target)
    reports = {name: GradientReport() for name in tensors}

    def clip(report: GradientReport, gradient: Tensor) -> Tensor:
        report.norm = torch.linalg.vector_norm(gradient.detach())
        clipped, report.fired = clip_gradient(gradient, norm=norm, value=value)
        report.backwards += 1
        report.firings = report.firings.to(gradient.device) + report.fired
        return clipped

    tensor_hooks = _TensorHooks()
    with ExitStack() as handles:
        handles.callback(tensor_hooks.remove)
        for name, tensor in tensors.items():
            tensor_hooks.add(tensor, partial(clip, reports[name]))
        yield reports


def clip_gradient(
    gradient: Tensor, *, norm: float | None = None, value: float | None = None
) -> tuple[Tensor, Tensor]:
    """A gradient clipped to ±`value`, then scaled down to an L2 norm of `norm`; and whether that changed it."""
    fired = torch.zeros((), dtype=torch.bool, device=gradient.device)
    if value is not None:
        fired = fired | (gradient.abs().amax() > value)
        gradient = gradient.clamp(-value, value)
    if norm is not None:
        found = torch.linalg.vector_norm(gradient)
        fired = fired | (found > norm)
        gradient = gradient * (norm / found.clamp(min=norm))
    return gradient, fired


@contextmanager
def guard_gradient(
    image: Tensor,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    hooks: Sequence[GradientHook] = (),
) -> Iterator[GradientReport]:
    """Guard the gradient that flows back into `image`, a tensor that requires one.

    In this order: make it contiguous (features in channels_last send it back permuted), note its norm, call
    `hooks` in the order given, clip to ±`clip_value`, scale down to an L2 norm of `clip_norm`.

    A clipped gradient is no longer the gradient of the loss: an optimiser that builds on differences of
    gradients must be told (`GradientReport.fired`).

    Raises:
        HookError: in the backward pass, when a hook returns a gradient of another shape, dtype or device, or
            one that is not finite.
    """
    report = GradientReport()

    def guard(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        report.norm = torch.linalg.vector_norm(gradient)
        for hook in hooks:
            gradient = _call(hook, gradient)
        gradient, report.fired = clip_gradient(gradient, norm=clip_norm, value=clip_value)
        return gradient

    handle = image.register_hook(guard)
    try:
        yield report
    finally:
        handle.remove()


def normalize_gradient(tensor: Tensor, norm: float) -> Tensor:
    """The same values again, whose gradient flows back with an L1 norm of `norm`; one that is 0 stays 0.

    What a single loss is computed from is given this way, the rest of the network the tensor itself: the loss's
    own gradient is then changed before the others join it. The hook belongs to the result and ends with its
    graph: nothing else holds it.

    Source: neural-style's `-normalize_gradients` (Johnson 2015).
    """
    alone = tensor.view_as(tensor)
    if alone.requires_grad:
        alone.register_hook(partial(_with_norm, norm))
    return alone


class CheckedHook:
    """A hook that is watched: use it in the place of the hook it was made from, then ask it.

    It never spoils a run: where the hook broke its contract, the tensor goes on as it came. What the hook raises
    is noted and passes through.
    """

    def __init__(self, hook: GradientHook) -> None:
        self.__name__ = _name(hook)
        self.calls = 0
        self.problems: list[str] = []  # what it did wrong, a sentence for each kind, in the order first seen
        self._hook = hook

    @property
    def ran(self) -> bool:
        """Was it called at all?"""
        return self.calls > 0

    @property
    def ok(self) -> bool:
        """Was it called, and did it keep to its contract each time?"""
        return self.ran and not self.problems

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Call the hook with a tensor, and look at what it does."""
        self.calls += 1
        before = tensor.clone()
        try:
            result = self._hook(tensor)
        except Exception as error:
            self._note(f"raised {type(error).__name__}")
            raise
        found = [*_changes_in_place(before, tensor), *_broken_promises(result, before)]
        for problem in found:
            self._note(problem)
        return before if found else result

    def _note(self, problem: str) -> None:
        sentence = f"{self.__name__} {problem}."
        if sentence not in self.problems:
            self.problems.append(sentence)

    def __str__(self) -> str:
        """What can be said of the hook, in one line."""
        if not self.ran:
            return f"{self.__name__} never ran: no backward pass reached its tensor, or it was removed before."
        times = "once" if self.calls == 1 else f"{self.calls} times"
        return f"{self.__name__} ran {times}. {' '.join(self.problems) or 'It kept to its contract.'}"


def check_hook(hook: GradientHook) -> CheckedHook:
    """Watch a hook on a tensor or a layer: does it run, and does it leave shape, dtype, device and argument alone?

        checked = check_hook(my_hook)
        image.register_hook(checked)                    # or gradient_hooks=[checked]
        loss.backward()
        print(checked)                                  # my_hook ran once. It kept to its contract.

    Also noted: results that are not tensors, and values that are not finite where the given ones were.
    Changing the argument in place is wrong even where it works: other hooks and the graph may share it.
    """
    return CheckedHook(hook)


def unwrap(network: nn.Module) -> nn.Module:
    """The network inside `DataParallel` or `DistributedDataParallel`; other networks as they are.

    Raises:
        HookError: when the network or a part of it is compiled or scripted, with the reason.
    """
    while isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        network = network.module
    for name, module in network.named_modules():
        # torch.compile(module) wraps it; module.compile() changes it from within. Asked for by name and
        # attribute, because importing torch's compiler takes seconds.
        wrapped = type(module).__name__ == "OptimizedModule"
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            raise HookError(
                f"{name or 'The network'} is compiled: what torch.compile has compiled does not call hooks that "
                "come later. Hook the network before compiling it, or use the uncompiled one (`_orig_mod`)."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise HookError(
                f"{name or 'The network'} is a script module, whose inner modules call no hooks. "
                "Use the network that it was made from."
            )
    return network


def count_hooks(network: nn.Module) -> int:
    """How many forward and backward hooks sit on a network and its modules."""
    return sum(
        len(hooks)
        for module in network.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def _find(network: nn.Module, layer: str) -> nn.Module:
    known: dict[str, nn.Module] = dict(network.named_modules())
    if layer not in known or not layer:
        raise SettingsError(f"The network has no layer {layer!r}.{did_you_mean(layer, known)}")
    return known[layer]


def _leaves(network: nn.Module) -> dict[str, nn.Module]:
    """The modules that have no modules inside, by name."""
    return {name: module for name, module in network.named_modules() if name and not any(module.children())}


def _forward_hook(layer: str, watcher: Watcher, *, copy: bool) -> ForwardHook:
    def see(output: object) -> Tensor | None:
        if not isinstance(output, Tensor):
            raise HookError(f"{layer} returns a {type(output).__name__}, not a tensor: name a layer inside it.")
        if copy:
            watcher(output.clone())
            return None
        return watcher(output)

    return _plain_forward_hook(see)


def _plain_forward_hook(see: Callable[[object], Tensor | None]) -> ForwardHook:
    def hook(module: nn.Module, inputs: object, output: object) -> Tensor | None:
        if getattr(module, "_is_replica", False):
            raise HookError(
                "DataParallel runs this network as several replicas in threads, and each would overwrite what the "
                "others' hooks gather. Call `network.module`, or use DistributedDataParallel."
            )
        return see(output)

    return hook


class _TensorHooks:
    """Hooks on tensors that come and go with each graph; the tensors are not kept alive by it."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, tensor: Tensor, hook: GradientHook) -> None:
        """Register a hook, and forget those whose tensors are gone: handles refer to their hooks weakly."""
        self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
        self._handles.append(tensor.register_hook(hook))

    def remove(self) -> None:
        """Remove all that are left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _with_norm(norm: float, gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    found = torch.linalg.vector_norm(gradient, ord=1, dtype=wide)
    factor = torch.where(found > 0, norm / found, 0.0).to(gradient.dtype)
    return gradient * factor


def _note_gradient(flow: LayerFlow, keep: bool, gradient: Tensor) -> None:
    flow.gradient = Magnitudes.of(gradient)
    flow.gradients = gradient.detach().clone() if keep else None


def _targets(target: nn.Module | Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """Name and tensor of everything whose gradient is to be clipped."""
    if isinstance(target, nn.Module):
        return {name: each for name, each in unwrap(target).named_parameters() if each.requires_grad}
    tensors = {"tensor": target} if isinstance(target, Tensor) else dict(target)
    for name, tensor in tensors.items():
        if not tensor.requires_grad:
            raise InputError(f"{name} requires no gradient, so none can be clipped: set requires_grad first.")
    return tensors


def _is_overwritten(network: nn.Module, layer: str) -> bool:
    """Does the module after `layer` in its `nn.Sequential` work in place?"""
    path, _, name = layer.rpartition(".")
    parent = network.get_submodule(path)
    if not isinstance(parent, nn.Sequential):
        return False
    siblings = dict(parent.named_children())
    names = list(siblings)
    following = names[names.index(name) + 1 :][:1]
    return bool(following) and getattr(siblings[following[0]], "inplace", False) is True


def _call(hook: GradientHook, gradient: Tensor) -> Tensor:
    """Call a user's hook and hold it to its contract."""
    result = hook(gradient)
    for problem in _broken_promises(result, gradient):
        raise HookError(f"The gradient hook {_name(hook)} {problem}.")
    return gradient if result is None else result.contiguous()


def _broken_promises(result: object, given: Tensor) -> Iterator[str]:
    """What is wrong with a hook's result; at most one thing, the first found."""
    if result is None:
        return
    if not isinstance(result, Tensor):
        yield f"returned a {type(result).__name__}, not a tensor or None"
    elif result.shape != given.shape or result.dtype != given.dtype or result.device != given.device:
        yield (
            f"returned {list(result.shape)} {result.dtype} on {result.device}; "
            f"it was given {list(given.shape)} {given.dtype} on {given.device}"
        )
    elif not result.isfinite().all() and given.isfinite().all():
        yield "returned values that are not finite"


def _changes_in_place(before: Tensor, after: Tensor) -> Iterator[str]:
    """Values are compared, because a change through `.data` or NumPy leaves the version counter alone."""
    same_form = before.shape == after.shape and before.dtype == after.dtype
    if not same_form or not torch.equal(before.nan_to_num(), after.detach().nan_to_num()):
        yield "modified its argument in place"


def _name(hook: GradientHook) -> str:
    return getattr(hook, "__name__", type(hook).__name__)
