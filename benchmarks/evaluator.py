"""Judge a saved picture in float64, by code that shares nothing with the product.

    python benchmarks/evaluator.py CONTENT STYLE RESULT...

prints, for each result, its style error (plain Gram matrices, relu1_1 … relu5_1, Johnson's normalisation,
equal weights) as a share of the content picture's own, its content error, and its speckle. Only the weights'
file is common: it is read here once more, from its 8-bit tables.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS = Path(__file__).parents[1] / "src" / "stylize" / "weights" / "vgg19.safetensors"
STYLE_LAYERS = ("1_1", "2_1", "3_1", "4_1", "5_1")
CONTENT_LAYER = "4_2"


@dataclass(frozen=True)
class Judgement:
    """What one picture costs against a content and a style picture."""

    style: float  # Σ mean((G − Ĝ)²) / C²
    content: float  # mean((F − P)²)
    gatys: float  # content + 1000 · style: the objective of the preset gatys2016
    speckle: float  # RMS of chroma minus its 3 × 3 mean over the darker half, grey levels of 255


class Evaluator:
    """VGG19 to relu5_1 in float64, a content and a style picture."""

    def __init__(self, content: Tensor, style: Tensor) -> None:
        packed = load_file(WEIGHTS)
        names = [f"{block}_{i}" for block, n in zip("12345", (2, 2, 4, 4, 1), strict=True) for i in range(1, n + 1)]
        self.convolutions = {
            name: (
                packed[f"conv{name}.table"].double()[packed[f"conv{name}.indices"].long()],
                packed[f"conv{name}.bias"].double(),
            )
            for name in names
        }
        self.content_features = self.features(content)[CONTENT_LAYER]
        self.style_grams = self.grams(self.features(style))

    @torch.no_grad()
    def features(self, image: Tensor) -> dict[str, Tensor]:
        """relu1_1 … relu5_1 of [1, 3, H, W] RGB in [0, 1], float64."""
        means = torch.tensor([103.939, 116.779, 123.68], dtype=torch.float64).view(1, 3, 1, 1)
        x = image.double().flip(1) * 255 - means
        found = {}
        for name, (weight, bias) in self.convolutions.items():
            if name[2] == "1" and name[0] != "1":
                x = F.max_pool2d(x, 2)
            x = F.relu(F.conv2d(x, weight, bias, padding=1))
            found[name] = x
        return found

    @staticmethod
    def grams(features: dict[str, Tensor]) -> dict[str, Tensor]:
        """The Gram matrix of each style layer, divided by its own number of positions."""
        return {
            name: torch.einsum("chw,dhw->cd", features[name][0], features[name][0]) / features[name][0, 0].numel()
            for name in STYLE_LAYERS
        }

    def judge(self, image: Tensor) -> Judgement:
        """The costs of a picture [1, 3, H, W] in [0, 1] of the content's size."""
        features = self.features(image)
        grams = self.grams(features)
        style = sum(
            float((grams[name] - self.style_grams[name]).square().mean()) / len(grams[name]) ** 2
            for name in STYLE_LAYERS
        )
        content = float((features[CONTENT_LAYER] - self.content_features).square().mean())
        return Judgement(style, content, content + 1000 * style, speckle(image))


def speckle(image: Tensor) -> float:
    """RMS of chroma minus its 3 × 3 mean over the darker half of [1, 3, H, W] in [0, 1], in grey levels."""
    levels = image.double() * 255
    luma = (levels * torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64).view(1, 3, 1, 1)).sum(1, keepdim=True)
    chroma = levels - luma
    rough = chroma - F.avg_pool2d(chroma, 3, 1, 1)
    dark = luma[0, 0] <= luma.median()
    return float(rough[0][:, dark].square().mean().sqrt())


def read(path: Path, size: tuple[int, int] | None = None) -> Tensor:
    """A picture as [1, 3, H, W] in [0, 1], on white, resized to (width, height) if asked."""
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright).convert("RGB")
    if size is not None and flat.size != size:
        flat = flat.resize(size, Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(flat)).permute(2, 0, 1)[None].double() / 255


def main() -> None:
    content_path, style_path, *results = (Path(argument) for argument in sys.argv[1:])
    for path in results:
        result = read(path)
        height, width = result.shape[2:]
        content = read(content_path, (width, height))
        style = read(style_path)
        shrink = min(1.0, max(width, height) / max(style.shape[2:]))
        style = read(style_path, (round(style.shape[3] * shrink), round(style.shape[2] * shrink)))
        evaluator = Evaluator(content, style)
        mine, theirs = evaluator.judge(result), evaluator.judge(content)
        print(
            f"{path}: style error {mine.style / theirs.style:.2%} of the content picture's own, "
            f"content error {mine.content:.0f}, speckle {mine.speckle:.2f} (the style's own {speckle(style):.2f})"
        )


if __name__ == "__main__":
    main()
