"""What is asked of a picture: targets measured once, then picture -> named losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stylize.nst.hooks import guard_input, normalize_gradient, observe
from stylize.nst.losses import (
    STYLE_LOSSES,
    FeatureLoss,
    Statistics,
    StyleLoss,
    additive_loss,
    content_scale,
    moments,
    range_penalty,
    squared_error,
    total_variation,
)
from stylize.nst.transport import alike
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
    share: float = 1.0  # what the region counts: its part of the whole picture


@dataclass(frozen=True)
class Measured:
    """What the losses need to know of a picture's features, by layer."""

    errors: Mapping[str, Tensor]  # Σ (F − P)² against the content's
    moments: Mapping[str, tuple[Tensor, Tensor]]  # mean [R, C] and Gram matrix [R, C, C] of R regions
    losses: Mapping[str, Tensor] = field(default_factory=dict)  # style losses that look at the features themselves


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
        self._loss = additive_loss(settings.style_loss) if self.guides else STYLE_LOSSES[settings.style_loss]
        self._targets = [style_targets(self._loss, region.style) for region in self.regions]
        self.content = {} if content is None else self._measure_content(content)
        normalization = settings.normalization
        self._scales = {layer: content_scale(target, normalization) for layer, target in self.content.items()}
        self._weights = layer_weights(settings)
        self._content_weights = content_layer_weights(settings)

    def __call__(self, image: Tensor) -> Losses:
        """The losses of a picture [1, 3, H, W] in [0, 1]; differentiable."""
        return self._judge(self._measure(image), image)

    def _measure_content(self, content: Tensor) -> dict[str, Tensor]:
        return measure_content(self.network, content, self.settings.content_layers)

    def _measure(self, image: Tensor) -> Measured:
        """One pass through the network; differentiable."""
        errors: dict[str, Tensor] = {}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        losses: dict[str, Tensor] = {}
        normalize = self.settings.normalize_gradients

        def watch(layer: str, output: Tensor) -> Tensor | None:
            if layer in self.content:
                seen = normalize_gradient(output, self._content_weight(layer)) if normalize else output
                errors[layer] = squared_error(seen, self.content[layer])
            if layer not in self.settings.style_layers:
                return None
            seen = normalize_gradient(output, self._style_weight(layer)) if normalize else output
            if isinstance(self._loss, FeatureLoss):
                losses[layer] = self._loss.distance(seen, self._targets[0][layer], self.settings.normalization)
                return None
            passed, mean, gram = moments(seen, self.guides.get(layer))
            found[layer] = mean, gram
            return None if normalize else passed

        run(self.network, image, (*self.content, *self.settings.style_layers), watch)
        return Measured(errors, found, losses)

    def _content_weight(self, layer: str) -> float:
        """How much a content layer counts in all."""
        return self.settings.content_weight * self._content_weights[layer]

    def _style_weight(self, layer: str) -> float:
        """How much a style layer counts in all."""
        return self.settings.style_weight * self._weights[f"style.{layer}"]

    def _judge(self, measured: Measured, image: Tensor) -> Losses:
        """The losses of what was measured of a picture, and of the picture itself."""
        settings = self.settings
        terms: dict[str, Tensor] = {}
        weighted = []
        if measured.errors:
            shares = self._content_weights
            errors = [shares[layer] * self._scales[layer] * error for layer, error in measured.errors.items()]
            terms["content"] = torch.stack(errors).sum()
            weighted.append(settings.content_weight * terms["content"])
        styles = self._style_losses(measured)
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

    def _style_losses(self, measured: Measured) -> dict[str, Tensor]:
        """Each layer's distance from the style, over all regions, as `style.LAYER`."""
        losses = dict(measured.losses)
        if isinstance(self._loss, StyleLoss):
            for layer, (means, grams) in measured.moments.items():
                losses[layer] = self._distance(self._loss, layer, means, grams)
        return {f"style.{layer}": loss for layer, loss in losses.items()}

    def _distance(self, loss: StyleLoss, layer: str, means: Tensor, grams: Tensor) -> Tensor:
        distances = []
        each = zip(self.regions, self._targets, means.split(1), grams.split(1), strict=True)
        for region, targets, mean, gram in each:
            found = loss.statistics(mean, gram)
            distances.append(region.share * loss.distance(found, targets[layer], self.settings.normalization))
        return torch.stack(distances).sum()


def run(
    network: Vgg19, image: Tensor, layers: Sequence[str], watch: Callable[[str, Tensor], Tensor | None]
) -> Tensor:
    """The network's last output; `watch(layer, output)` sees each layer's, and may put another in its place."""
    watchers = {layer: (lambda output, layer=layer: watch(layer, output)) for layer in layers}
    with observe(network, watchers):
        output: Tensor = network(image)
    return output


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
    weights = _shares(settings.style_layers, settings.style_layer_weights, settings)
    return {f"style.{layer}": weight for layer, weight in weights.items()}


def content_layer_weights(settings: Settings) -> dict[str, float]:
    """How much each content layer counts in the content loss, by the same rule."""
    return _shares(settings.content_layers, settings.content_layer_weights, settings)


def _shares(
    layers: Sequence[str], weights: Sequence[float] | None, settings: Settings
) -> dict[str, float]:
    weights = weights or ()  # never None: settings have filled it in
    total = sum(weights) if settings.normalization == "relative" else 1.0
    return {layer: weight / total for layer, weight in zip(layers, weights, strict=True)}


@torch.no_grad()
def style_targets(loss: StyleLoss | FeatureLoss, style: Styles) -> Styles:
    """What a style loss compares with, from a style's statistics."""
    if isinstance(loss, FeatureLoss):
        return style
    return {layer: loss.target(statistics) for layer, statistics in style.items()}


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

    Raises:
        SettingsError: for a guide with a style loss that cannot be measured in parts.
    """
    targets: dict[str, Statistics] = {}
    loss = STYLE_LOSSES[settings.style_loss] if guide is None else additive_loss(settings.style_loss)

    def keep(layer: str, output: Tensor) -> None:
        if isinstance(loss, FeatureLoss):
            targets[layer] = loss.statistics(output)
            return
        _, mean, gram = moments(output, None if guide is None else guide[layer].unsqueeze(0))
        targets[layer] = loss.statistics(mean, gram)

    with guard_input(network, network.minimum_size, network.deepest):
        run(network, style, settings.style_layers, keep)
    return targets


def blend(styles: Sequence[Mapping[str, Statistics]], weights: Sequence[float]) -> dict[str, Statistics]:
    """The weighted mean of several styles' statistics, layer by layer; the sum of the weights is free.

    Quantiles are averaged rank by rank, which is the Wasserstein barycentre along each line (Rabin et al. 2011).
    """
    total = sum(weights)
    return {
        layer: tuple(
            torch.stack([w / total * part for w, part in zip(weights, alike(parts), strict=True)]).sum(0)
            for parts in zip(*(style[layer] for style in styles), strict=True)
        )
        for layer in styles[0]
    }
