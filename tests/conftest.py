"""What the tests of the method share: small networks, pictures made from seeds, and a check on hooks."""

from __future__ import annotations

import os

from stylize.process import WAITING

os.environ.update(WAITING | os.environ)  # before torch is loaded

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from stylize import api
from stylize.nst.hooks import count_hooks
from stylize.nst.vgg import CONVOLUTIONS, TORCHVISION, Weights, load_weights

TINY_CHANNELS = (4, 5, 6, 7, 8)  # of the five blocks


def random_weights(seed: int = 0) -> Weights:
    """A VGG19 of a few channels, whose random convolutions keep the size of what passes through them."""
    generator = torch.Generator().manual_seed(seed)
    convolutions = {}
    inputs = 3
    for name in CONVOLUTIONS:
        outputs = TINY_CHANNELS[int(name[4]) - 1]
        deviation = math.sqrt(2 / (9 * inputs))  # He et al. 2015, equation 10: a ReLU halves the mean square
        weight = torch.randn(outputs, inputs, 3, 3, generator=generator) * deviation
        convolutions[name] = (weight, torch.randn(outputs, generator=generator) * 0.1)
        inputs = outputs
    return Weights("tiny", TORCHVISION, "0" * 64, convolutions)


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """A picture [1, 3, H, W] float32 in [0, 1]: large soft forms under a little noise."""
    generator = torch.Generator().manual_seed(seed)
    forms = F.interpolate(torch.rand(1, 3, 4, 4, generator=generator), (height, width), mode="bilinear")
    noise = torch.randn(1, 3, height, width, generator=generator)
    return (forms + 0.05 * noise).clamp(0, 1)


def image_of(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured noise in blocks: something to see at every size."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)


@contextmanager
def hooks_unchanged(network: nn.Module) -> Iterator[None]:
    """Check that a network carries as many hooks after the block as before it, however the block ends."""
    before = count_hooks(network)
    try:
        yield
    finally:
        assert count_hooks(network) == before


@pytest.fixture(scope="session")
def tiny_weights() -> Weights:
    """Random weights of a few channels: what the mathematics is tested with."""
    return random_weights()


@pytest.fixture(scope="session")
def embedded() -> Weights:
    """The weights that come with the package, read once."""
    return load_weights()


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when weights are loaded: what is to be refused must be refused before."""

    def load(*_: object) -> NoReturn:
        pytest.fail("The weights were loaded.")

    monkeypatch.setattr(api, "load_weights", load)
