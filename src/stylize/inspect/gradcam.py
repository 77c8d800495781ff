"""Where in a picture a number comes from: Grad-CAM, for any scalar and any network."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stylize.errors import InputError
from stylize.nst.hooks import watch_gradients


def grad_cam(network: nn.Module, image: Tensor, layer: str, score: Callable[[Tensor], Tensor]) -> Tensor:
    """Map how much each place of a layer speaks for a score: ReLU(Σ over channels of weight × activation).

        grad_cam(network, image, "features.35", lambda image: network(image)[:, 281].sum())

    A channel's weight is the spatial mean of the score's gradient at the layer. The gradients are seen by
    tensor hooks on the layer's output; the parameters' `.grad` is left alone.

    Args:
        network: any module that `score` runs.
        image: what the network takes.
        layer: named as in `named_modules()`; its output is [B, C, H, W].
        score: runs the network and returns one number; of several pictures, the sum of their scores.

    Returns:
        [B, 1, H, W] of the layer, 0 or more, in the layer's own dtype.

    Raises:
        SettingsError: when the network has no such layer.
        InputError: when the score does not depend on that layer, or its output is not [B, C, H, W].

    Source: Selvaraju et al. 2017, equations 1 and 2.
    """
    image = image.detach().clone().requires_grad_()
    with torch.enable_grad(), watch_gradients(network, [layer], keep=True) as flows:
        torch.autograd.grad(score(image), image, allow_unused=True)
    activations = flows[layer].activations if layer in flows else None
    gradients = flows[layer].gradients if layer in flows else None
    if activations is None or gradients is None:
        raise InputError(f"The score does not depend on {layer}: no gradient came back through it.")
    if activations.ndim != 4:
        raise InputError(f"Grad-CAM needs a layer with [B, C, H, W]; {layer} has {list(activations.shape)}.")
    weights = gradients.mean(dim=(2, 3), keepdim=True)  # [B, C, 1, 1]
    return (weights * activations).sum(dim=1, keepdim=True).relu()  # [B, 1, H, W]


def heat(cam: Tensor, size: tuple[int, int]) -> Tensor:
    """A map [1, 1, h, w] enlarged to (width, height) as [H, W] on the CPU, from 0 to 1 at its strongest place.

    A map that is 0 everywhere stays so.
    """
    width, height = size
    enlarged = F.interpolate(cam.float(), (height, width), mode="bilinear", align_corners=False)[0, 0].cpu()
    return enlarged / enlarged.amax().clamp(min=torch.finfo(torch.float32).tiny)
