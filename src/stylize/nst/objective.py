"""What is asked of a picture: targets measured once, then picture -> named losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from stylize.nst.hooks import capture, guard_input, observe
from stylize.nst.losses import (
    STYLE_LOSSES,
    Statistics,
    content_loss,
    moments,
    range_penalty,
    total_variation,
)
from stylize.nst.vgg import Vgg19
from stylize.settings import Settings


@dataclass(frozen=True)
class Losses:
    """What one picture costs."""

    total: Tensor  # the weighted sum that is minimised
    terms: Mapping[str, Tensor]  # unweighted: content, style, tv, range, and style.LAYER for each layer


class Objective:
    """The weighted losses of a picture at one size.

    Args:
        network: with every layer that the settings name.
        content: [1, 3, H, W] in [0, 1], the content picture at this size.
        style: a layer's target statistics by name, from `measure_style`.
        settings: which losses, and how much each counts.
    """

    def __init__(
        self, network: Vgg19, content: Tensor, style: Mapping[str, Statistics], settings: Settings
    ) -> None:
        self.network = network
        self.settings = settings
        self._style = style
        self._content = measure_content(network, content, settings.content_layers)

    def __call__(self, image: Tensor) -> Losses:
        """The losses of a picture [1, 3, H, W] in [0, 1]; differentiable."""
        settings = self.settings
        contents: list[Tensor] = []
        styles: dict[str, Tensor] = {}

        def watch(layer: str, output: Tensor) -> Tensor | None:
            if layer in self._content:
                contents.append(content_loss(output, self._content[layer], settings.normalization))
            if layer not in self._style:
                return None
            passed, mean, gram = moments(output)
            loss = STYLE_LOSSES[settings.style_loss]
            found = loss.statistics(mean, gram)
            styles[f"style.{layer}"] = loss.distance(found, self._style[layer], settings.normalization)
            return passed

        layers = dict.fromkeys((*self._content, *self._style))
        watchers = {layer: (lambda output, layer=layer: watch(layer, output)) for layer in layers}
        with observe(self.network, watchers):
            self.network(image)
        return self._weigh(image, contents, styles)

    def _weigh(self, image: Tensor, contents: Sequence[Tensor], styles: Mapping[str, Tensor]) -> Losses:
        settings = self.settings
        terms: dict[str, Tensor] = {}
        weighted = []
        if contents:
            terms["content"] = torch.stack(list(contents)).sum()
            if settings.normalization == "relative":
                terms["content"] = terms["content"] / len(contents)
            weighted.append(settings.content_weight * terms["content"])
        if styles:
            weights = layer_weights(settings)
            terms["style"] = torch.stack([weights[name] * loss for name, loss in styles.items()]).sum()
            weighted.append(settings.style_weight * terms["style"])
        if settings.tv_weight:
            terms["tv"] = total_variation(image)
            weighted.append(settings.tv_weight * terms["tv"])
        if settings.range_weight:
            terms["range"] = range_penalty(image)
            weighted.append(settings.range_weight * terms["range"])
        return Losses(torch.stack(weighted).sum(), terms | dict(styles))


def layer_weights(settings: Settings) -> dict[str, float]:
    """How much each `style.LAYER` counts in the style loss.

    Relative losses are averaged, so their weights are scaled to a sum of 1; the published forms are sums, and
    theirs are taken as they stand.
    """
    weights = settings.style_layer_weights or ()  # never None: settings have filled it in
    total = sum(weights) if settings.normalization == "relative" else 1.0
    return {f"style.{layer}": w / total for layer, w in zip(settings.style_layers, weights, strict=True)}


@torch.no_grad()
def measure_content(network: Vgg19, content: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """The features of a picture [1, 3, H, W] at each of `layers`."""
    if not layers:
        return {}
    with ExitStack() as stack:
        stack.enter_context(guard_input(network, network.minimum_size, network.deepest))
        features = stack.enter_context(capture(network, layers))
        network(content)
        return dict(features)


@torch.no_grad()
def measure_style(network: Vgg19, style: Tensor, settings: Settings) -> dict[str, Statistics]:
    """The target statistics of a style picture [1, 3, H, W] at each of the settings' style layers."""
    targets: dict[str, Statistics] = {}
    statistics = STYLE_LOSSES[settings.style_loss].statistics

    def keep(layer: str, output: Tensor) -> None:
        _, mean, gram = moments(output)
        targets[layer] = statistics(mean, gram)

    watchers = {layer: (lambda output, layer=layer: keep(layer, output)) for layer in settings.style_layers}
    with guard_input(network, network.minimum_size, network.deepest), observe(network, watchers):
        network(style)
    return targets


def blend(styles: Sequence[Mapping[str, Statistics]], weights: Sequence[float]) -> dict[str, Statistics]:
    """The weighted mean of several styles' statistics, layer by layer; the sum of the weights is free."""
    total = sum(weights)
    return {
        layer: tuple(
            torch.stack([w / total * part for w, part in zip(weights, parts, strict=True)]).sum(0)
            for parts in zip(*(style[layer] for style in styles), strict=True)
        )
        for layer in styles[0]
    }
