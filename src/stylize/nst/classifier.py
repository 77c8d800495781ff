"""VGG19 with its classifier, which Grad-CAM needs to explain a class; the method itself never uses it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from stylize.errors import SettingsError, WeightsError
from stylize.nst.hooks import check_image
from stylize.nst.vgg import TORCHVISION, Normalize, fetch_torchvision
from stylize.settings import did_you_mean

MINIMUM_SIZE = 32  # pixels a side: five poolings halve them
CAM_LAYER = "vgg.features.35"  # relu5_4, the last features before pooling and classifier


class Classifier(nn.Module):
    """torchvision's VGG19, frozen, from a picture to the scores of ImageNet's 1,000 classes."""

    def __init__(self, vgg: nn.Module) -> None:
        super().__init__()
        self.normalize = Normalize(TORCHVISION, torch.float32)
        self.vgg = vgg
        self.eval().requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] RGB in [0, 1] -> [B, 1000], before any softmax.

        Raises:
            InputError: for another shape or dtype, or a picture of less than 32 px a side.
        """
        check_image(image, MINIMUM_SIZE, "the classifier")
        scores: Tensor = self.vgg(self.normalize(image))
        return scores


def load_classifier(source: str = "torchvision") -> Classifier:
    """Load VGG19 with its classifier.

    Args:
        source: "torchvision" (downloaded once, 550 MB, and verified), or the path of its state dict.

    Raises:
        WeightsError: when the weights are missing, damaged, or of another network.
    """
    from torchvision.models import vgg19  # half a second that only its users should wait

    state = fetch_torchvision()[0] if source == "torchvision" else _read(Path(source))
    with torch.device("meta"):  # its random initial values would cost seconds and the caller's RNG
        vgg = vgg19(weights=None)
    try:
        vgg.load_state_dict(state, assign=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        first_line = str(error).splitlines()[0]
        raise WeightsError(
            f"{source} is not torchvision's VGG19 with its classifier: {first_line} "
            "The embedded weights have none; use 'torchvision', or a state dict of the whole network."
        ) from error
    return Classifier(vgg.float())


def class_names() -> list[str]:
    """The names of ImageNet's 1,000 classes, in the order of the classifier's scores."""
    from torchvision.models import VGG19_Weights

    return list(VGG19_Weights.IMAGENET1K_V1.meta["categories"])


def find_class(wanted: str) -> int:
    """The index of a class, given as its name or as a number from 0 to 999.

    Raises:
        SettingsError: when there is none, with the nearest name.
    """
    names = class_names()
    if wanted.isdecimal() and int(wanted) < len(names):
        return int(wanted)
    lower = [name.lower() for name in names]
    if wanted.lower() not in lower:
        raise SettingsError(f"ImageNet has no class {wanted!r}.{did_you_mean(wanted.lower(), lower)}")
    return lower.index(wanted.lower())


def _read(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the loader has its own zoo of errors for a damaged file
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{path} cannot be read as a state dict: {first_line}") from error
    return state
