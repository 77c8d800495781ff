"""The hooks of the method: on modules to see features, on the picture to guard its gradient.

Every registration of a hook in this project is in this file, and each sits in a context manager that removes
it on the way out, whatever happened inside. Hooks are state of the module they sit on: two threads must not
use one hooked network at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from stylize.errors import HookError, InputError, SettingsError
from stylize.settings import did_you_mean

Watcher: TypeAlias = Callable[[Tensor], "Tensor | None"]  # sees a layer's output, may return another in its place
GradientHook: TypeAlias = Callable[[Tensor], "Tensor | None"]  # sees a gradient, may return another


@contextmanager
def observe(network: nn.Module, watchers: Mapping[str, Watcher]) -> Iterator[None]:
    """Call each watcher with the output of the layer it is named for, at every forward pass.

    What a watcher returns, if anything, goes on through the network in the output's place. A convolution
    whose output the next module would overwrite (an in-place ReLU in the same `nn.Sequential`) hands over
    a copy, and nothing goes in its place.

    Raises:
        SettingsError: when the network has no such layer.
    """
    with ExitStack() as handles:
        for layer, watcher in watchers.items():
            module = _find(network, layer)
            hook = _forward_hook(watcher, copy=_is_overwritten(network, layer))
            handles.callback(module.register_forward_hook(hook).remove)
        yield


@contextmanager
def capture(network: nn.Module, layers: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Gather the outputs of `layers`, by name, anew at every forward pass.

        with capture(network, ["relu1_1", "conv4_2"]) as features:
            network(image)
            features["conv4_2"]                        # [B, 512, H / 8, W / 8], part of the graph

    Works on any `nn.Module`; a layer is named as in `named_modules()`.

    Raises:
        SettingsError: when the network has no such layer.
        HookError: at the end of a forward pass, when a later module overwrote a captured tensor.
    """
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


@dataclass
class GradientReport:
    """What the guard saw at the last backward pass; tensors, so that no device is waited for."""

    norm: Tensor = field(default_factory=lambda: torch.zeros(()))  # L2, before clipping; infinite or NaN tells
    fired: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))  # was it changed by clipping?


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
        report.fired = torch.zeros((), dtype=torch.bool, device=gradient.device)
        for hook in hooks:
            gradient = _call(hook, gradient)
        if clip_value is not None:
            report.fired = report.fired | (gradient.abs().amax() > clip_value)
            gradient = gradient.clamp(-clip_value, clip_value)
        if clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            report.fired = report.fired | (norm > clip_norm)
            gradient = gradient * (clip_norm / norm.clamp(min=clip_norm))
        return gradient

    handle = image.register_hook(guard)
    try:
        yield report
    finally:
        handle.remove()


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


def _forward_hook(watcher: Watcher, *, copy: bool) -> Callable[[nn.Module, object, Tensor], Tensor | None]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        if copy:
            watcher(output.clone())
            return None
        return watcher(output)

    return hook


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
    name = getattr(hook, "__name__", type(hook).__name__)
    result = hook(gradient)
    if result is None:
        return gradient
    if not isinstance(result, Tensor):
        raise HookError(f"The gradient hook {name} returned a {type(result).__name__}, not a tensor or None.")
    if result.shape != gradient.shape or result.dtype != gradient.dtype or result.device != gradient.device:
        raise HookError(
            f"The gradient hook {name} returned {list(result.shape)} {result.dtype} on {result.device}; "
            f"it was given {list(gradient.shape)} {gradient.dtype} on {gradient.device}."
        )
    if not result.isfinite().all() and gradient.isfinite().all():
        raise HookError(f"The gradient hook {name} returned values that are not finite.")
    return result.contiguous()
