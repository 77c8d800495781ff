"""Exact evaluation by tiles: in float64 it is the untiled one, whatever the network and the sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from conftest import picture
from stylize.errors import InputError
from stylize.nst.objective import Losses, Objective, Region, measure_content, measure_style
from stylize.nst.tiles import (
    Geometry,
    TiledObjective,
    Tiles,
    measure_content_by_tiles,
    measure_style_by_tiles,
    reaches,
)
from stylize.nst.vgg import Vgg19, Weights
from stylize.settings import LAYERS, Settings

DEFAULT = Settings()


def network_of(weights: Weights, settings: Settings, dtype: torch.dtype = torch.float64) -> Vgg19:
    layers = settings.content_layers + settings.style_layers
    return Vgg19(weights, layers, pooling=settings.pooling, dtype=dtype)


def geometry_of(network: Vgg19, settings: Settings) -> Geometry:
    return Geometry.of(network, settings.content_layers + settings.style_layers)


def evaluated(objective: Objective, image: Tensor) -> tuple[Losses, Tensor]:
    image = image.clone().requires_grad_()
    losses = objective(image)
    (gradient,) = torch.autograd.grad(losses.total, image)
    return losses, gradient


def assert_equal(found: tuple[Losses, Tensor], expected: tuple[Losses, Tensor], tolerance: float = 1e-10) -> None:
    (losses, gradient), (wanted, wanted_gradient) = found, expected
    assert list(losses.terms) == list(wanted.terms)
    for name, value in {"total": wanted.total, **wanted.terms}.items():
        assert float(dict(losses.terms, total=losses.total)[name].detach()) == pytest.approx(
            float(value.detach()), rel=tolerance, abs=1e-14
        )
    assert float((gradient - wanted_gradient).norm()) <= tolerance * float(wanted_gradient.norm())


def hole_guides(settings: Settings, height: int, width: int) -> dict[str, Tensor]:
    """Weights of sum 1 that are different everywhere, zero in places."""
    guides = {}
    for layer in settings.style_layers:
        stride = 2 ** sum(name.startswith("pool") for name in LAYERS[: LAYERS.index(layer) + 1])
        size = (height // stride, width // stride)
        values = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(len(layer)))
        values = values * (values > 0.3) + 1e-3
        guides[layer] = values / values.sum()
    return guides


# Geometry


def test_reach_is_that_of_the_literature(tiny_weights: Weights) -> None:
    """Receptive fields of VGG19 as published: 3, 10, 24, 68, 84 and 156 px (jump 1, 2, 4, 8, 8, 16)."""
    found = reaches(Vgg19(tiny_weights, ["relu5_1"]))
    layers = ("relu1_1", "relu2_1", "relu3_1", "relu4_1", "relu4_2", "relu5_1")
    assert [found[layer].before + 1 + found[layer].after for layer in layers] == [3, 10, 24, 68, 84, 156]
    assert [found[layer].stride for layer in layers] == [1, 2, 4, 8, 8, 16]


@pytest.mark.parametrize("pooling", ["max", "avg", "l2"])
def test_no_feature_sees_beyond_its_reach(tiny_weights: Weights, pooling: Any) -> None:
    """The gradient of one feature in the middle is zero outside its reach, and not zero at the ends of it."""
    layers = ("relu1_1", "relu2_1", "conv3_2", "relu4_1", "pool4")
    network = Vgg19(tiny_weights, layers, pooling=pooling, dtype=torch.float64)
    found = reaches(network)
    for layer in layers:
        image = torch.rand(1, 3, 16, 320, dtype=torch.float64, requires_grad=True)
        features = image
        for name, module in network.named_children():
            features = module(features.clone())
            if name == layer:
                break
        middle = features.shape[3] // 2
        (gradient,) = torch.autograd.grad(features[..., middle].square().sum(), image)
        seen = gradient.abs().amax((0, 1, 2)).nonzero().flatten()
        reach = found[layer]
        assert int(seen.min()) >= middle * reach.stride - reach.before
        assert int(seen.max()) <= middle * reach.stride + reach.after
        if pooling != "max":  # which looks at one of four
            assert (int(seen.min()), int(seen.max())) == (
                middle * reach.stride - reach.before,
                middle * reach.stride + reach.after,
            )


@given(
    length=st.integers(32, 3000), count=st.integers(1, 12), deepest=st.sampled_from(["relu2_1", "relu4_2", "pool5"])
)
@examples(deadline=None)
def test_every_feature_belongs_to_exactly_one_tile(length: int, count: int, deepest: str) -> None:
    levels = LAYERS[: LAYERS.index(deepest) + 1]
    alignment = 2 ** sum(name.startswith("pool") for name in levels)
    geometry = Geometry(dict.fromkeys(levels, 1), alignment, 2 * alignment)
    spans = geometry.spans(length, count)
    assert len(spans) <= count
    stride = 1
    while stride <= alignment:
        owned = [index for span in spans for index in range(length // stride)[span.core(stride)]]
        assert owned == list(range(length // stride))
        stride *= 2
    for span in spans:
        assert span.window_start % alignment == 0
        assert span.window_stop == length or span.window_stop % alignment == 0
        assert span.start - span.window_start >= min(span.start, geometry.halo)
        assert span.window_stop - span.stop >= min(length - span.stop, geometry.halo)
    # All windows are alike, but for what the length has beyond whole strides.
    *others, last = (span.window_stop - span.window_start for span in spans)
    assert set(others) <= {last - length % alignment}


def test_tiles_look_at_as_few_pixels_as_the_memory_allows(tiny_weights: Weights) -> None:
    geometry = geometry_of(Vgg19(tiny_weights, ["relu5_1", "relu4_2"]), DEFAULT.replace(style_layers=("relu5_1",)))
    assert geometry.halo == 80  # 70 px, in whole strides of 16
    assert len(geometry.fitting(600, 800, 480_000)) == 1
    for most in (1_500_000, 700_000):
        tiles = geometry.fitting(3000, 4000, most)
        assert max(tile.pixels for tile in tiles) <= most
        looked_at = sum(tile.pixels for tile in tiles)
        # Every other cutting that fits looks at as much or more.
        for rows in range(1, 12):
            for columns in range(1, 12):
                other = geometry.tiles(3000, 4000, rows, columns)
                if max(tile.pixels for tile in other) <= most:
                    assert sum(tile.pixels for tile in other) >= looked_at


def test_tiles_that_cannot_be_small_enough_are_refused(tiny_weights: Weights) -> None:
    geometry = geometry_of(Vgg19(tiny_weights, ["relu5_1", "relu4_2"]), DEFAULT.replace(style_layers=("relu5_1",)))
    with pytest.raises(InputError, match=r"halo of 80 px.*--size"):
        geometry.fitting(3000, 4000, 10_000)


# The two passes


@given(
    height=st.integers(17, 220),
    width=st.integers(17, 420),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    pooling=st.sampled_from(["max", "avg", "l2"]),
    padding=st.sampled_from(["zeros", "replicate", "reflect"]),
    loss=st.sampled_from(["centred", "gram"]),
    layers=st.sampled_from(
        [
            (("relu4_2",), ("relu1_1", "relu2_1", "relu3_1", "relu4_1", "relu5_1")),
            (("conv4_2", "relu2_2"), ("conv1_1", "relu1_1", "pool1", "relu3_4")),
            ((), ("pool2", "relu4_3")),
            (("relu3_1",), ()),
        ]
    ),
)
@examples(deadline=None, max_examples=40)
def test_tiled_loss_and_gradient_equal_untiled(
    tiny_weights: Weights,
    height: int,
    width: int,
    rows: int,
    columns: int,
    pooling: Any,
    padding: Any,
    loss: Any,
    layers: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    """All layer sets, poolings, paddings, odd sizes and tile sizes: relative 1e-10 in float64."""
    content_layers, style_layers = layers
    chosen = Settings(
        content_layers=content_layers,
        style_layers=style_layers,
        style_layer_weights=None,
        pooling=pooling,
        padding=padding,
        style_loss=loss,
    )
    network = network_of(tiny_weights, chosen)
    geometry = geometry_of(network, chosen)
    content, image = (picture(height, width, seed).double() for seed in (0, 1))
    style = measure_style(network, picture(48, 40, seed=2).double(), chosen)
    tiles = Tiles(network, geometry, geometry.tiles(height, width, rows, columns))
    untiled = evaluated(Objective(network, content, style, chosen), image)
    assert_equal(evaluated(TiledObjective(content, style, chosen, tiles), image), untiled)


def test_tiles_of_the_real_network_are_exact(embedded: Weights) -> None:
    network = network_of(embedded, DEFAULT)
    geometry = geometry_of(network, DEFAULT)
    content, image = (picture(40, 330, seed).double() for seed in (0, 1))
    style = measure_style(network, picture(64, 64, seed=2).double(), DEFAULT)
    tiles = Tiles(network, geometry, geometry.tiles(40, 330, 1, 4))
    assert len(tiles.tiles) == 4
    untiled = evaluated(Objective(network, content, style, DEFAULT), image)
    assert_equal(evaluated(TiledObjective(content, style, DEFAULT, tiles), image), untiled)


def test_tiles_with_regions_equal_regions_without(tiny_weights: Weights) -> None:
    chosen = DEFAULT
    network = network_of(tiny_weights, chosen)
    geometry = geometry_of(network, chosen)
    height, width = 221, 250
    content, image = (picture(height, width, seed).double() for seed in (0, 1))
    guides = hole_guides(chosen, height, width)
    rest = {layer: (guide.max() - guide) / (guide.max() - guide).sum() for layer, guide in guides.items()}
    styles = [measure_style(network, picture(48, 40, seed).double(), chosen) for seed in (2, 3)]
    regions = [Region(styles[0], guides, 0.3), Region(styles[1], rest, 0.7)]
    tiles = Tiles(network, geometry, geometry.tiles(height, width, 3, 4))
    assert len(tiles.tiles) == 9
    untiled = evaluated(Objective(network, content, regions, chosen), image)
    assert_equal(evaluated(TiledObjective(content, regions, chosen, tiles), image), untiled)


def test_content_and_style_measured_by_tiles_are_the_same(tiny_weights: Weights) -> None:
    network = network_of(tiny_weights, DEFAULT)
    geometry = geometry_of(network, DEFAULT)
    image = picture(231, 207).double()
    tiles = Tiles(network, geometry, geometry.tiles(231, 207, 4, 3))
    assert len(tiles.tiles) > 4
    layers = DEFAULT.content_layers
    for layer, expected in measure_content(network, image, layers).items():
        torch.testing.assert_close(
            measure_content_by_tiles(image, layers, tiles)[layer], expected, rtol=1e-12, atol=1e-12
        )
    guide = hole_guides(DEFAULT, 231, 207)
    for guides in (None, guide):
        found = measure_style_by_tiles(image, DEFAULT, tiles, guides)
        for layer, statistics in measure_style(network, image, DEFAULT, guides).items():
            for part, wanted in zip(found[layer], statistics, strict=True):
                torch.testing.assert_close(part, wanted, rtol=1e-10, atol=1e-12)


def test_tiles_in_bfloat16_are_within_its_rounding(embedded: Weights) -> None:
    """Two cuttings differ by what the order of sums does to 8 bits: as little as bf16 differs from float32."""
    network = network_of(embedded, DEFAULT, torch.bfloat16)
    geometry = geometry_of(network, DEFAULT)
    content, image = (picture(96, 300, seed) for seed in (0, 1))
    style = measure_style(network, picture(64, 64, seed=2), DEFAULT)
    tiles = Tiles(network, geometry, geometry.tiles(96, 300, 1, 3))
    assert len(tiles.tiles) == 3
    plain, gradient = evaluated(Objective(network, content, style, DEFAULT), image)
    tiled, tiled_gradient = evaluated(TiledObjective(content, style, DEFAULT, tiles), image)
    assert float(tiled.total.detach()) == pytest.approx(float(plain.total.detach()), rel=2 * 2**-8)
    cosine = torch.cosine_similarity(gradient.flatten(), tiled_gradient.flatten(), dim=0)
    assert float(cosine) > 0.99


def test_gradient_has_no_seam_along_tile_borders(tiny_weights: Weights) -> None:
    """On a picture of pure noise the gradient's size along the borders of tiles is that of everywhere."""
    network = network_of(tiny_weights, DEFAULT)
    geometry = geometry_of(network, DEFAULT)
    image = torch.rand(1, 3, 64, 640, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    style = measure_style(network, picture(64, 64, seed=2).double(), DEFAULT)
    tiles = Tiles(network, geometry, geometry.tiles(64, 640, 1, 5))
    _, gradient = evaluated(TiledObjective(image.flip(3), style, DEFAULT, tiles), image)
    size = gradient.square().mean((0, 1, 2)).sqrt()
    borders = [tile.columns.start for tile in tiles if tile.columns.start]
    near = torch.cat([size[border - 2 : border + 2] for border in borders]).mean()
    spread = size[32:-32].std() / math.sqrt(4 * len(borders) / 8)  # of a mean over so many, neighbours alike
    assert abs(float(near - size[32:-32].mean())) < 4 * float(spread)


def test_a_second_backward_pass_gives_the_same(tiny_weights: Weights) -> None:
    network = network_of(tiny_weights, DEFAULT)
    geometry = geometry_of(network, DEFAULT)
    style = measure_style(network, picture(64, 64, seed=2).double(), DEFAULT)
    tiles = Tiles(network, geometry, geometry.tiles(64, 220, 1, 2))
    assert len(tiles.tiles) == 2
    objective = TiledObjective(picture(64, 220).double(), style, DEFAULT, tiles)
    image = picture(64, 220, seed=1).double().requires_grad_()
    losses = objective(image)
    first, second = (torch.autograd.grad(losses.total, image, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
