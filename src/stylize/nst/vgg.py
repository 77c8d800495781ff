"""The frozen VGG19 with its weights and its normalisation, which are one object.

A picture enters as RGB in [0, 1]; the order and range of colours that the weights were trained with are the
business of the network's first module and of nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import sys
import urllib.error
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stylize.errors import SettingsError, WeightsError
from stylize.settings import CONVOLUTIONS_PER_BLOCK, LAYERS, Padding, Pooling, did_you_mean

CHANNELS_PER_BLOCK = (64, 128, 256, 512, 512)
CONVOLUTIONS = tuple(name for name in LAYERS if name.startswith("conv"))

EMBEDDED_SHA256 = "22b8147aa2af47dcfd3b22d29ad5cbde820552c8f1de4359d45586573dc3f954"

# No network, a wrong hash, a file cut short, a web page in the file's place.
_FETCH_ERRORS = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Normalization:
    """How a picture in RGB [0, 1] becomes what the weights were trained on: `(x · scale − mean) / std`."""

    name: Literal["caffe", "torchvision"]
    scale: float
    mean: tuple[float, float, float]  # in the order that the weights want
    std: tuple[float, float, float]
    bgr: bool


# Means of ImageNet in BGR, 0…255: the VGG19 Caffe model's own description.
CAFFE = Normalization("caffe", 255.0, (103.939, 116.779, 123.68), (1.0, 1.0, 1.0), bgr=True)
# torchvision's VGG19_Weights.IMAGENET1K_V1.transforms().
TORCHVISION = Normalization("torchvision", 1.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), bgr=False)
NORMALIZATIONS = {normalization.name: normalization for normalization in (CAFFE, TORCHVISION)}


@dataclass(frozen=True)
class Weights:
    """The sixteen convolutions of a VGG19, with the normalisation that belongs to them."""

    name: str
    normalization: Normalization
    sha256: str  # of the file, or of torchvision's download; it goes into every result
    convolutions: Mapping[str, tuple[Tensor, Tensor]]  # conv1_1: ([64, 3, 3, 3] OIHW, [64]), …


class Normalize(nn.Module):
    """RGB in [0, 1] to the input that the weights know, in the dtype of the weights."""

    def __init__(self, normalization: Normalization, dtype: torch.dtype) -> None:
        super().__init__()
        self.bgr = normalization.bgr
        self.scale = normalization.scale
        self.dtype = dtype
        self.mean: Tensor
        self.std: Tensor
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("mean", torch.tensor(normalization.mean, dtype=wide).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(normalization.std, dtype=wide).view(1, 3, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] RGB in [0, 1] -> [B, 3, H, W], normalised."""
        ordered = image.flip(1) if self.bgr else image
        return ((ordered * self.scale - self.mean) / self.std).to(self.dtype)


class MaxPool(nn.MaxPool2d):
    """The largest of 2 × 2 values. Which one it was is found anew for the way back.

    To keep it, as torch's own does, takes 8 bytes a value: in bfloat16 a third as much again as all features that
    are kept.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, features: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H // 2, W // 2]."""
        pooled: Tensor = _MaxPool.apply(features)
        return pooled


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.save_for_backward(features)  # which the ReLU before it keeps as well
        return F.max_pool2d(features, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        features: Tensor = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            pooled = F.max_pool2d(features, 2)
        return torch.autograd.grad(pooled, features, outer)[0]


class L2Pool(nn.Module):
    """The root of the mean square of 2 × 2 values (Hénaff and Simoncelli 2016 pool alike)."""

    kernel_size = stride = 2

    def forward(self, features: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H // 2, W // 2]."""
        tiny = 1e-8 if features.dtype == torch.float64 else 1e-6  # keeps the root's slope finite at zero
        return (F.avg_pool2d(features * features, 2) + tiny).sqrt()


class Vgg19(nn.Sequential):
    """VGG19's convolutions, trimmed after the deepest of `layers`, frozen and in evaluation mode.

    Its modules carry the field's names (`normalize`, `conv1_1`, `relu1_1`, … `pool5`). A ReLU works in place
    unless the convolution before it is among `layers`. No parameter ever needs a gradient.

    Args:
        weights: from `load_weights`.
        layers: those that will be captured; at least one.
        pooling: max as in the network's training, or avg (Gatys et al. found it smoother), or l2.
        padding: of the first convolution; the others pad with zeros, as they were trained.
        dtype: of weights and features.
    """

    def __init__(
        self,
        weights: Weights,
        layers: Iterable[str] = (LAYERS[-1],),
        *,
        pooling: Pooling = "max",
        padding: Padding = "zeros",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        wanted = set(layers)
        for layer in wanted:
            if layer not in LAYERS:
                raise SettingsError(f"There is no layer {layer!r}.{did_you_mean(layer, LAYERS)}")
        names = LAYERS[: max(LAYERS.index(layer) for layer in wanted) + 1]
        modules: OrderedDict[str, nn.Module] = OrderedDict(normalize=Normalize(weights.normalization, dtype))
        for name in names:
            modules[name] = self._module(name, weights, wanted, pooling, padding, dtype)
        super().__init__(modules)
        self.deepest = names[-1]
        self.minimum_size = minimum_size(wanted)
        self.eval().requires_grad_(False).to(memory_format=torch.channels_last)

    @staticmethod
    def _module(
        name: str, weights: Weights, wanted: set[str], pooling: Pooling, padding: Padding, dtype: torch.dtype
    ) -> nn.Module:
        if name.startswith("conv"):
            weight, bias = weights.convolutions[name]
            mode: Padding = padding if name == CONVOLUTIONS[0] else "zeros"
            # Made on the meta device: its random initial values would cost time and the caller's RNG.
            convolution = nn.Conv2d(
                weight.shape[1], weight.shape[0], 3, padding=1, padding_mode=mode, device="meta"
            )
            convolution.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            convolution.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
            return convolution
        if name.startswith("relu"):
            return nn.ReLU(inplace=name.replace("relu", "conv") not in wanted)
        return {"max": MaxPool(), "avg": nn.AvgPool2d(2), "l2": L2Pool()}[pooling]


def skeleton(layers: Iterable[str]) -> Vgg19:
    """The network down to the deepest of `layers` without its weights: to ask for its shape."""
    empty = {}
    for name, shape in zip(CONVOLUTIONS, _shapes(), strict=True):
        empty[name] = torch.empty(shape, device="meta"), torch.empty(shape[0], device="meta")
    return Vgg19(Weights("none", CAFFE, "", empty), layers)


def minimum_size(layers: Iterable[str]) -> int:
    """The least height and width in pixels of a picture that reaches the deepest of `layers`."""
    deepest = max(LAYERS.index(layer) for layer in layers)
    # Two, since a picture of one pixel a side has no neighbours to vary from.
    return max(2, 1 << sum(name.startswith("pool") for name in LAYERS[: deepest + 1]))


def load_weights(source: str = "embedded", normalization: str | None = None, *, progress: bool = False) -> Weights:
    """Load VGG19 weights.

    Args:
        source: "embedded" (in the package, no network needed), "torchvision" (downloaded once and verified by
            torchvision), or the path of a state dict (.pth, .pt or .safetensors).
        normalization: "caffe" or "torchvision"; needed for a file that does not say it itself.
        progress: show torch's own progress bar during a download.

    Raises:
        WeightsError: when they are missing, damaged, of another network, or of unknown normalisation.
    """
    if source == "embedded":
        return _load_embedded()
    if source == "torchvision":
        return _load_torchvision(progress)
    return _load_file(Path(source), normalization)


def _load_embedded() -> Weights:
    contents = (resources.files("stylize") / "weights" / "vgg19.safetensors").read_bytes()
    sha256 = hashlib.sha256(contents).hexdigest()
    if sha256 != EMBEDDED_SHA256:
        raise WeightsError(
            f"The embedded weights are damaged: SHA-256 {sha256}, expected {EMBEDDED_SHA256}. "
            "Install the package again, or use --weights torchvision."
        )
    packed = safetensors.torch.load(contents)
    convolutions = {
        name: (packed[f"{name}.table"][packed[f"{name}.indices"].int()], packed[f"{name}.bias"])
        for name in CONVOLUTIONS
    }
    return Weights("embedded", CAFFE, sha256, convolutions)


def _load_torchvision(progress: bool) -> Weights:
    state, url = fetch_torchvision(progress=progress)
    sha256 = url.rsplit("-", 1)[-1].removesuffix(".pth")  # torchvision names files by their hash
    return Weights("torchvision", TORCHVISION, sha256, _by_layer(state, url))


def fetch_torchvision(*, progress: bool = False) -> tuple[Mapping[str, Any], str]:
    """torchvision's whole VGG19 state dict, from its cache or fetched and verified; and its address.

    Raises:
        WeightsError: when it cannot be had.
    """
    from torchvision.models import VGG19_Weights  # half a second that only its users should wait

    entry = VGG19_Weights.IMAGENET1K_V1

    def fetch() -> Mapping[str, Any]:
        with contextlib.redirect_stdout(sys.stderr):  # where torch.hub's notice of a download belongs
            return entry.get_state_dict(progress=progress, check_hash=True, weights_only=True)  # type: ignore[no-any-return]

    try:
        try:
            state = fetch()
        except _FETCH_ERRORS as error:
            if isinstance(error, urllib.error.URLError) or not _remove_cached(entry.url):
                raise
            state = fetch()  # the cached file was damaged
    except _FETCH_ERRORS as error:
        raise WeightsError(
            f"torchvision's VGG19 weights could not be fetched ({error}). Try again when the network is there, "
            f"or use the embedded weights, which need none."
        ) from error
    return state, entry.url


def _remove_cached(url: str) -> bool:
    """Remove torch.hub's cached file for `url`; was there one?"""
    cached = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    existed = cached.exists()
    cached.unlink(missing_ok=True)
    return existed


def _load_file(path: Path, named: str | None) -> Weights:
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read as weights: {error.strerror}. "
            "Use 'embedded', 'torchvision', or the path of a .pth or .safetensors file."
        ) from error
    told = None
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load(contents)
            told = _told_normalization(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each loader has its own zoo of errors for a damaged file
        raise WeightsError(
            f"{path} is not a state dict that can be read safely, as .pth or .safetensors. "
            "It may be damaged, or a saved web page; fetch it again."
        ) from error
    name = named or told
    if name not in NORMALIZATIONS:
        raise WeightsError(
            f"{path} does not say how its weights want their pictures: add --weights-normalization caffe "
            "(BGR, 0…255, minus the mean) or torchvision (RGB, mean and deviation of ImageNet)."
        )
    sha256 = hashlib.sha256(contents).hexdigest()
    return Weights(path.name, NORMALIZATIONS[name], sha256, _by_layer(state, str(path)))


def _told_normalization(path: Path) -> str | None:
    """The normalisation that a safetensors file names in its metadata."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    told = metadata.get("normalization") or json.loads(metadata.get("provenance", "{}")).get("normalization")
    return str(told) if told else None


def _by_layer(state: object, where: str) -> dict[str, tuple[Tensor, Tensor]]:
    """A state dict's convolutions by layer name, whichever of the usual names its keys have."""
    if not isinstance(state, Mapping):
        raise WeightsError(f"{where} holds a {type(state).__name__}, not a state dict of VGG19.")
    nested = state.get("state_dict")
    tensors: Mapping[str, Any] = nested if isinstance(nested, Mapping) else state
    for keys in (CONVOLUTIONS, *_torchvision_keys()):
        if f"{keys[0]}.weight" in tensors:
            break
    else:
        raise WeightsError(
            f"{where} is not a VGG19: it has neither conv1_1.weight nor features.0.weight, "
            f"but {', '.join(list(map(str, tensors))[:3]) or 'nothing'} …"
        )
    convolutions = {}
    for name, key, shape in zip(CONVOLUTIONS, keys, _shapes(), strict=True):
        parts = []
        for part, expected in ((f"{key}.weight", shape), (f"{key}.bias", shape[:1])):
            tensor = tensors.get(part)
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != expected:
                found = tuple(tensor.shape) if isinstance(tensor, Tensor) else "missing"
                raise WeightsError(f"{where} is not a VGG19: {part} is {found}, expected {expected}.")
            parts.append(tensor.float())
        convolutions[name] = (parts[0], parts[1])
    return convolutions


def _torchvision_keys() -> Iterator[tuple[str, ...]]:
    """`features.0 … features.34` and the same without their prefix."""
    positions = [LAYERS.index(name) for name in CONVOLUTIONS]
    for prefix in ("features.", ""):
        yield tuple(f"{prefix}{position}" for position in positions)


def _shapes() -> Iterator[tuple[int, int, int, int]]:
    channels = 3
    for convolutions, width in zip(CONVOLUTIONS_PER_BLOCK, CHANNELS_PER_BLOCK, strict=True):
        for _ in range(convolutions):
            yield (width, channels, 3, 3)
            channels = width
