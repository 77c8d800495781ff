"""What is asked of a picture: targets measured once, then picture -> named losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stylize.nst.hooks import guard_input, observe
from stylize.nst.losses import (
    STYLE_LOSSES,
    Statistics,
    content_scale,
    moments,
    range_penalty,
    squared_error,
    total_variation,
)
from stylize.nst.vgg import Vgg19
from stylize.settings import Settings

Styles = Mapping[str, Statistics]  # a style's statistics by layer


@dataclass(frozen=True)
class Losses:
    """What one picture costs."""

    total: Tensor  # the weighted sum that is minimised
    terms: Mapping[str, Tensor]  # unweighted: content, style, tv, range, and style.LAYER for each layer


@dataclass(frozen=True)
class Region:
    """A part of the picture, and the style that it is to have."""

    style: Styles
    guide: Mapping[str, Tensor] | None = None  # by layer: [H, W], what each place counts, of sum 1; None = alike
    share: float = 1.0  # what the region counts; those of all regions have a sum of 1


@dataclass(frozen=True)
class Measured:
    """What the losses need to know of a picture's features, by layer."""

    errors: Mapping[str, Tensor]  # Σ (F − P)² against the content's
    moments: Mapping[str, tuple[Tensor, Tensor]]  # mean [R, C] and Gram matrix [R, C, C] of R regions


class Objective:
    """The weighted losses of a picture at one size.

    Args:
        network: with every layer that the settings name.
        content: [1, 3, H, W] in [0, 1], the content picture at this size; None when it does not matter.
        style: target statistics from `measure_style`, or regions that have each their own.
        settings: which losses, and how much each counts.
    """

    def __init__(
        self,
        network: Vgg19,
        content: Tensor | None,
        style: Styles | Sequence[Region],
        settings: Settings,
    ) -> None:
        self.network = network
        self.settings = settings
        self.regions = [Region(style)] if isinstance(style, Mapping) else list(style)
        self.guides = stack_guides(self.regions)
        self.content = {} if content is None else self._measure_content(content)
        normalization = settings.normalization
        self._scales = {layer: content_scale(target, normalization) for layer, target in self.content.items()}
        self._weights = layer_weights(settings)

    def __call__(self, image: Tensor) -> Losses:
        """The losses of a picture [1, 3, H, W] in [0, 1]; differentiable."""
        return self._judge(self._measure(image), image)

    def _measure_content(self, content: Tensor) -> dict[str, Tensor]:
        return measure_content(self.network, content, self.settings.content_layers)

    def _measure(self, image: Tensor) -> Measured:
        """One pass through the network; differentiable."""
        errors: dict[str, Tensor] = {}
        found: dict[str, tuple[Tensor, Tensor]] = {}

        def watch(layer: str, output: Tensor) -> Tensor | None:
            if layer in self.content:
                errors[layer] = squared_error(output, self.content[layer])
            if layer not in self.settings.style_layers:
                return None
            passed, mean, gram = moments(output, self.guides.get(layer))
            found[layer] = mean, gram
            return passed

        run(self.network, image, (*self.content, *self.settings.style_layers), watch)
        return Measured(errors, found)

    def _judge(self, measured: Measured, image: Tensor) -> Losses:
        """The losses of what was measured of a picture, and of the picture itself."""
        settings = self.settings
        terms: dict[str, Tensor] = {}
        weighted = []
        if measured.errors:
            errors = [self._scales[layer] * error for layer, error in measured.errors.items()]
            terms["content"] = torch.stack(errors).sum()
            if settings.normalization == "relative":
                terms["content"] = terms["content"] / len(errors)
            weighted.append(settings.content_weight * terms["content"])
        styles = {f"style.{layer}": self._style_loss(layer, *found) for layer, found in measured.moments.items()}
        if styles:
            terms["style"] = torch.stack([self._weights[name] * loss for name, loss in styles.items()]).sum()
            weighted.append(settings.style_weight * terms["style"])
        if settings.tv_weight:
            terms["tv"] = total_variation(image)
            weighted.append(settings.tv_weight * terms["tv"])
        if settings.range_weight:
            terms["range"] = range_penalty(image)
            weighted.append(settings.range_weight * terms["range"])
        return Losses(torch.stack(weighted).sum(), terms | styles)

    def _style_loss(self, layer: str, means: Tensor, grams: Tensor) -> Tensor:
        """One layer's distance from the style, over all regions."""
        loss = STYLE_LOSSES[self.settings.style_loss]
        distances = []
        for region, mean, gram in zip(self.regions, means.split(1), grams.split(1), strict=True):
            found = loss.statistics(mean, gram)
            distance = loss.distance(found, region.style[layer], self.settings.normalization)
            distances.append(region.share * distance)
        return torch.stack(distances).sum()


def run(
    network: Vgg19, image: Tensor, layers: Sequence[str], watch: Callable[[str, Tensor], Tensor | None]
) -> None:
    """Send a picture [1, 3, H, W] through the network; `watch(layer, output)` may put another in its place."""
    watchers = {layer: (lambda output, layer=layer: watch(layer, output)) for layer in layers}
    with observe(network, watchers):
        network(image)


def stack_guides(regions: Sequence[Region]) -> dict[str, Tensor]:
    """The regions' guides by layer, [R, H, W]; none for a single region that is the whole picture."""
    guides = [region.guide for region in regions]
    if guides == [None]:
        return {}
    if any(guide is None for guide in guides):
        raise ValueError("Each of several regions needs a guide.")
    layers = guides[0] or {}
    return {layer: torch.stack([guide[layer] for guide in guides if guide is not None]) for layer in layers}


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
    features: dict[str, Tensor] = {}

    def keep(layer: str, output: Tensor) -> None:
        features[layer] = output

    with guard_input(network, network.minimum_size, network.deepest):
        run(network, content, layers, keep)
    return features


@torch.no_grad()
def measure_style(
    network: Vgg19, style: Tensor, settings: Settings, guide: Mapping[str, Tensor] | None = None
) -> dict[str, Statistics]:
    """The target statistics of a style picture [1, 3, H, W] at each of the settings' style layers.

    With a guide, [H, W] of sum 1 by layer, those of a part of it.
    """
    targets: dict[str, Statistics] = {}
    statistics = STYLE_LOSSES[settings.style_loss].statistics

    def keep(layer: str, output: Tensor) -> None:
        _, mean, gram = moments(output, None if guide is None else guide[layer].unsqueeze(0))
        targets[layer] = statistics(mean, gram)

    with guard_input(network, network.minimum_size, network.deepest):
        run(network, style, settings.style_layers, keep)
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
