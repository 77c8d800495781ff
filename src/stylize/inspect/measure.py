"""What there is to see of a picture, measured: features, statistics, errors, and where gradients go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stylize.nst.hooks import Magnitudes, capture, watch_gradients
from stylize.nst.losses import (
    STYLE_LOSSES,
    FeatureLoss,
    Statistics,
    centred_statistics,
    content_loss,
    gram_statistics,
    moments,
)
from stylize.nst.objective import Losses, Objective, layer_weights
from stylize.nst.vgg import Vgg19
from stylize.settings import Settings

Numbers = Mapping[str, float]  # of `hooks.Magnitudes`: mean, largest, norm, zeros, finite


@dataclass(frozen=True)
class FeatureMaps:
    """One layer's features of one picture: its strongest channels, and what there is to say of the others."""

    maps: Tensor  # [K, H, W] float32 on the CPU, the strongest first
    channels: tuple[int, ...]  # which channels they are
    shares: tuple[float, ...]  # of the layer's energy (its mean square)
    count: int  # channels of the layer
    silent: int  # of them, those that are 0 everywhere in this picture


@dataclass(frozen=True)
class Sight:
    """What the network makes of one picture, by layer."""

    features: Mapping[str, FeatureMaps]
    statistics: Mapping[str, tuple[Tensor, Tensor]]  # the mean [1, C] and the Gram matrix [1, C, C]
    outputs: Mapping[str, Tensor]  # [1, C, H, W] on the device


@dataclass(frozen=True)
class Subject:
    """What is looked at: pictures [1, 3, H, W] in [0, 1] on the device, and the network that looks."""

    settings: Settings
    layers: tuple[str, ...]  # the shallowest first
    network: Vgg19
    names: Mapping[str, str]  # of the pictures' files
    pictures: Mapping[str, Tensor]  # content; style and result where there are such
    sights: Mapping[str, Sight]  # of the same pictures

    @property
    def last(self) -> str:
        """The picture whose losses are explained: the result, or the content that a run would start from."""
        return "result" if "result" in self.pictures else "content"


@dataclass(frozen=True)
class LossFlow:
    """One weighted term of the loss, and the gradient that it sends back."""

    name: str  # content, style.LAYER, tv, range
    value: float  # weighted
    share: float  # of the weighted sum
    gradients: Mapping[str, Numbers]  # at each layer that it reaches, the shallowest first
    picture: Numbers  # at the picture


@dataclass(frozen=True)
class Flow:
    """What flows through the network at one picture."""

    losses: tuple[LossFlow, ...]
    activations: Mapping[str, Numbers]  # of each layer, the shallowest first
    total: LossFlow


@torch.no_grad()
def look(network: Vgg19, image: Tensor, layers: Sequence[str], *, maps: int = 16) -> Sight:
    """Measure what `layers` make of a picture [1, 3, H, W] in [0, 1], with up to `maps` feature maps of each."""
    with capture(network, layers) as captured:
        network(image)
    outputs = dict(captured)
    found = {layer: moments(output)[1:] for layer, output in outputs.items()}
    return Sight(
        features={layer: strongest(output, maps) for layer, output in outputs.items()},
        statistics={layer: (mean, gram) for layer, (mean, gram) in found.items()},
        outputs=outputs,
    )


def strongest(features: Tensor, count: int) -> FeatureMaps:
    """The `count` channels of [1, C, H, W] with the largest mean square."""
    energy = features[0].float().square().mean(dim=(1, 2))  # [C]
    chosen = energy.argsort(descending=True, stable=True)[:count]
    whole = energy.sum().clamp(min=torch.finfo(energy.dtype).tiny)
    return FeatureMaps(
        maps=features[0, chosen].float().cpu(),
        channels=tuple(chosen.tolist()),
        shares=tuple((energy[chosen] / whole).tolist()),
        count=len(energy),
        silent=int((energy == 0).sum()),
    )


def style_targets(style: Sight, layers: Sequence[str], settings: Settings) -> dict[str, Statistics]:
    """The statistics of a style that the style loss of the settings asks for, at each of `layers`."""
    loss = STYLE_LOSSES[settings.style_loss]
    if isinstance(loss, FeatureLoss):
        return {layer: loss.statistics(style.outputs[layer]) for layer in layers}
    return {layer: loss.statistics(*style.statistics[layer]) for layer in layers}


def gram_of(sight: Sight, layer: str, settings: Settings) -> Tensor:
    """A layer's Gram matrix [C, C]: the plain one where that is the style loss, else the centred one."""
    statistics = gram_statistics if settings.style_loss == "gram" else centred_statistics
    return statistics(*sight.statistics[layer])[-1][0]


@torch.no_grad()
def style_errors(sight: Sight, style: Sight, settings: Settings) -> dict[str, float]:
    """How far each layer is from the style's by the style loss, relative to the style's own size or spread."""
    loss = STYLE_LOSSES[settings.style_loss]
    errors = {}
    for layer, wanted in style_targets(style, list(sight.outputs), settings).items():
        if isinstance(loss, FeatureLoss):
            errors[layer] = float(loss.distance(sight.outputs[layer], wanted, "relative"))
        else:
            found = loss.statistics(*sight.statistics[layer])
            errors[layer] = float(loss.distance(found, loss.target(wanted), "relative"))
    return errors


def content_errors(sight: Sight, content: Sight) -> dict[str, float]:
    """How far each layer's features are from the content's, relative to them: mean((F − P)²) / mean(P²)."""
    return {
        layer: float(content_loss(output, content.outputs[layer], "relative"))
        for layer, output in sight.outputs.items()
    }


def measure_flow(objective: Objective, image: Tensor) -> Flow:
    """Send each weighted term of the loss back from its layer to the picture [1, 3, H, W] in [0, 1]."""
    image = image.detach().clone().requires_grad_()
    layers = [name for name, _ in objective.network.named_children() if name.startswith(("relu", "pool"))]
    with watch_gradients(objective.network, layers) as watched:
        losses = objective(image)
        terms = weighted_terms(losses, objective.settings)
        flows = []
        for name, term in (*terms.items(), ("total", losses.total)):
            for flow in watched.values():
                flow.gradient = None
            (gradient,) = torch.autograd.grad(term, image, retain_graph=True)
            reached = {layer: flow.gradient for layer, flow in watched.items() if flow.gradient is not None}
            flows.append(
                LossFlow(
                    name=name,
                    value=float(term.detach()),
                    share=float((term / losses.total).detach()),
                    gradients={layer: magnitudes.as_floats() for layer, magnitudes in reached.items()},
                    picture=Magnitudes.of(gradient).as_floats(),
                )
            )
        activations = {layer: flow.activation.as_floats() for layer, flow in watched.items()}
    return Flow(losses=tuple(flows[:-1]), activations=activations, total=flows[-1])


def weighted_terms(losses: Losses, settings: Settings) -> dict[str, Tensor]:
    """The terms whose sum is the loss: the style's by layer, each with its weight."""
    weights = {name: settings.style_weight * weight for name, weight in layer_weights(settings).items()}
    weights |= {"content": settings.content_weight, "tv": settings.tv_weight, "range": settings.range_weight}
    return {name: weights[name] * losses.terms[name] for name in weights if name in losses.terms}


def share_at_bounds(image: Tensor) -> float:
    """The share of the values of a picture in [0, 1] that are black or white when saved with 8 bits."""
    levels = (image * 255).round()
    return float(((levels <= 0) | (levels >= 255)).float().mean())
