"""Regions and protection: masks carried to layers, pictures divided, and what comes out of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from conftest import image_of, picture, random_weights
from stylize import Region, Settings, Stylizer, stylize
from stylize.cli import program
from stylize.errors import InputError, OutputError, PictureError, SettingsError
from stylize.events import Evaluated, Event, ScaleFinished
from stylize.images import read_mask, read_picture
from stylize.nst.objective import Objective, measure_style
from stylize.nst.regions import NO_REST, Division, Regions, carry, compose, guides_at, resize_mask
from stylize.nst.transfer import Style, resize, transfer
from stylize.nst.vgg import Vgg19, Weights
from stylize.regions import described, parse_region
from stylize.settings import LAYERS, OptimizerName, Pooling

STYLE_LAYERS = ("relu1_1", "relu2_1", "relu3_1", "relu4_1", "relu5_1")
SHALLOW = Settings(
    content_layers=("relu2_2",),
    style_layers=("relu1_1", "relu2_1"),
    style_layer_weights=None,
    size=32,
    scales=1,
    iterations=6,
    precision="fp32",
    device="cpu",
)
# Of a feature: how many pixels the next one is away, and how far it sees beyond these; by hand from 3 × 3
# convolutions and 2 × 2 pools (Galerne et al. 2024 need the same numbers for tiles).
FIELDS = {"relu1_1": (1, 1), "relu2_1": (2, 4), "relu3_1": (4, 10), "relu4_1": (8, 30), "relu5_1": (16, 70)}


def tiny_network(layers: tuple[str, ...] = SHALLOW.content_layers + SHALLOW.style_layers, **more: Any) -> Vgg19:
    return Vgg19(random_weights(), layers, **more)


def half_mask(height: int, width: int) -> Tensor:
    """White in its left half."""
    mask = torch.zeros(1, 1, height, width)
    mask[..., : width // 2] = 1
    return mask


def random_masks(count: int, height: int, width: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(1, 1, height, width, generator=generator) for _ in range(count)]


# ---- masks at the layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", STYLE_LAYERS)
def test_a_pixel_is_seen_by_exactly_the_features_whose_field_holds_it(layer: str) -> None:
    stride, halo = FIELDS[layer]
    mask = torch.zeros(1, 16, 320, dtype=torch.float64)
    mask[0, 8, 163] = 1
    carried = carry(tiny_network((layer,)), (layer,), mask)[layer][0]
    seeing = [j for j in range(320 // stride) if stride * j - halo <= 163 < stride * (j + 1) + halo]
    assert torch.nonzero(carried.sum(dim=0)).flatten().tolist() == seeing


def test_a_feature_belongs_by_the_share_of_its_field_inside_the_picture() -> None:
    mask = torch.zeros(1, 6, 6, dtype=torch.float64)
    mask[0, 0, 0] = mask[0, 3, 3] = 1
    carried = carry(tiny_network(("relu1_1",)), ("relu1_1",), mask)["relu1_1"][0]
    assert carried[0, 0] == pytest.approx(1 / 4)  # a corner sees four pixels
    assert carried[0, 1] == pytest.approx(1 / 6)  # an edge six
    assert carried[3, 4] == pytest.approx(1 / 9)
    assert carried[0, 5] == 0


@pytest.mark.parametrize("pooling", ["max", "avg", "l2"])
def test_a_mask_is_as_large_as_the_features_whatever_the_pooling(pooling: Pooling) -> None:
    network = tiny_network(STYLE_LAYERS, pooling=pooling)
    features = network(picture(37, 51))
    assert carry(network, STYLE_LAYERS, torch.rand(2, 37, 51))["relu5_1"].shape == (2, *features.shape[2:])


def test_masks_that_add_up_to_one_do_so_at_every_layer() -> None:
    masks = torch.softmax(torch.randn(3, 37, 51, dtype=torch.float64), dim=0)
    for carried in carry(tiny_network(STYLE_LAYERS), STYLE_LAYERS, masks).values():
        torch.testing.assert_close(carried.sum(dim=0), torch.ones_like(carried[0]))


@given(st.integers(0, 16), st.integers(0, 16))
@settings(max_examples=20, deadline=None)
def test_even_a_dot_has_a_guide_of_sum_one_at_the_deepest_layer(row: int, column: int) -> None:
    mask = torch.zeros(1, 17, 17)
    mask[0, row, column] = 1 / 255
    for guide in guides_at(tiny_network(STYLE_LAYERS), STYLE_LAYERS, mask).values():
        assert guide.min() >= 0
        torch.testing.assert_close(guide.sum(), torch.tensor(1.0))


def test_a_dot_survives_shrinking() -> None:
    mask = torch.zeros(1, 1, 500, 700)
    mask[..., 333, 444] = 1
    assert resize_mask(mask, (9, 7)).sum() > 0


# ---- how a picture is divided ----------------------------------------------------------------------------


def test_without_a_main_style_or_with_full_masks_there_is_no_rest() -> None:
    left = half_mask(8, 12)
    assert Division([left]).cover((12, 8)).shape[0] == 2
    assert Division([left], keep_rest=True).cover((12, 8)).shape[0] == 1
    assert Division([left, 1 - left]).cover((12, 8)).shape[0] == 2
    assert Division([left * (1 - NO_REST), 1 - left]).cover((12, 8)).shape[0] == 2


@given(st.integers(1, 4), st.booleans(), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_regions_and_what_is_protected_fill_the_picture(count: int, protected: bool, seed: int) -> None:
    *masks, protect = random_masks(count + 1, 9, 7, seed)
    division = Division(masks, protect if protected else None)
    cover, free = division.cover((7, 9)), division.free((7, 9))
    assert cover.min() >= 0
    expected = 1 - protect[0, 0] if protected else torch.ones(9, 7)
    torch.testing.assert_close(cover.sum(dim=0), expected)
    assert (free is None) != protected


def test_regions_that_overlap_share_the_place_in_proportion() -> None:
    whole, half = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)
    cover = Division([whole, half]).cover((2, 2))
    torch.testing.assert_close(cover[:, 0, 0], torch.tensor([2 / 3, 1 / 3]))


def test_without_a_main_style_the_rest_stays_as_it_is() -> None:
    free = Division([half_mask(4, 8)], keep_rest=True).free((8, 4))
    assert free is not None
    assert torch.equal(free, half_mask(4, 8))


def test_composing_is_exact_at_both_ends() -> None:
    content, painted = picture(6, 8), picture(6, 8, seed=1)
    assert torch.equal(compose(content, painted, half_mask(6, 8))[..., :4], painted[..., :4])
    assert torch.equal(compose(content, painted, half_mask(6, 8))[..., 4:], content[..., 4:])
    assert compose(content, painted, None) is painted


# ---- losses ----------------------------------------------------------------------------------------------


class FixedStyle:
    """A style that was measured before."""

    def __init__(self, network: Vgg19, image: Tensor) -> None:
        self.measured = measure_style(network, image, SHALLOW)

    def at(self, long_side: int, device: torch.device, most_pixels: int = 0) -> Mapping[str, tuple[Tensor, ...]]:
        return self.measured


def test_regions_of_even_masks_and_one_style_cost_what_the_plain_picture_costs() -> None:
    network = tiny_network(dtype=torch.float64)
    image, content = picture(16, 24).double().requires_grad_(), picture(16, 24, seed=2).double()
    style = FixedStyle(network, picture(20, 18, seed=1).double())
    masks = [torch.full((1, 1, 16, 24), share, dtype=torch.float64) for share in (0.25, 0.5)]
    regions = Regions(Division(masks), [style, style, style]).at(network, SHALLOW.style_layers, (24, 16))
    assert [region.share for region in regions] == pytest.approx([0.25, 0.5, 0.25])
    plain = Objective(network, content, style.measured, SHALLOW)(image).total
    divided = Objective(network, content, regions, SHALLOW)(image).total
    torch.testing.assert_close(divided, plain)
    (gradient,) = torch.autograd.grad(divided, image)
    (expected,) = torch.autograd.grad(plain, image)
    torch.testing.assert_close(gradient, expected)


def test_the_regions_gram_matrices_add_up_to_the_pictures() -> None:
    """Each times its part of the layer, which is where T differs from T²."""
    network = tiny_network(dtype=torch.float64)
    gram = SHALLOW.replace(style_loss="gram")
    image = picture(16, 24).double()
    cover = Division(random_masks(2, 16, 24)).cover((24, 16)).double()
    carried = carry(network, gram.style_layers, cover)
    guides = guides_at(network, gram.style_layers, cover)
    whole = measure_style(network, image, gram)
    parts = [
        measure_style(network, image, gram, {layer: guide[k] for layer, guide in guides.items()})
        for k in range(len(cover))
    ]
    for layer in gram.style_layers:
        shares = carried[layer].mean(dim=(1, 2))
        total = torch.stack([share * part[layer][0] for share, part in zip(shares, parts, strict=True)]).sum(dim=0)
        torch.testing.assert_close(total, whole[layer][0])


def test_a_white_mask_on_a_style_changes_nothing() -> None:
    network, image, cpu = tiny_network(), picture(20, 28), torch.device("cpu")
    plain = Style(network, [image], SHALLOW).at(28, cpu)
    masked = Style(network, [image], SHALLOW, torch.ones(1, 1, 5, 5)).at(28, cpu)
    for layer, parts in plain.items():
        for a, b in zip(masked[layer], parts, strict=True):
            torch.testing.assert_close(a, b)


def test_a_masked_style_is_that_part_of_the_picture() -> None:
    """At relu1_1, whose features see one pixel beyond: the other half hardly counts."""
    network, cpu = tiny_network(), torch.device("cpu")
    settings = SHALLOW.replace(style_loss="gram")
    both = torch.cat([picture(32, 32, seed=1), picture(32, 32, seed=2)], dim=3)
    found = Style(network, [both], settings, half_mask(32, 64)).at(64, cpu)["relu1_1"][0]
    left, right = (measure_style(network, picture(32, 32, seed=seed), settings)["relu1_1"][0] for seed in (1, 2))
    assert (found - left).norm() < 0.1 * (found - right).norm()


# ---- what the engine keeps -------------------------------------------------------------------------------


def protecting(network: Vgg19, protect: Tensor, style: Style) -> Regions:
    return Regions(Division((), protect), [style])


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam", "torch-lbfgs"])
@pytest.mark.parametrize("init", ["content", "noise"])
def test_what_is_protected_is_the_content_to_the_last_bit(optimizer: OptimizerName, init: str) -> None:
    network, content = tiny_network(), picture(24, 32)
    settings = SHALLOW.replace(optimizer=optimizer, init=init, scales=2, content_weight=0.0)
    style = Style(network, [picture(20, 28, seed=1)], settings)
    regions = protecting(network, half_mask(24, 32), style)
    image = transfer(network, content, style, settings, regions=regions).image
    assert torch.equal(image[..., :16], content[..., :16])
    assert (image - content)[..., 16:].abs().max() > 2 / 255


def test_what_is_protected_stays_when_the_run_ends_at_a_coarser_scale() -> None:
    network, content = tiny_network(), picture(48, 64)
    settings = SHALLOW.replace(size=64, scales=2, iterations=8)
    style = Style(network, [picture(20, 28, seed=1)], settings)

    def interrupt(event: Event) -> None:
        if isinstance(event, ScaleFinished):
            raise KeyboardInterrupt

    regions = protecting(network, half_mask(48, 64), style)
    painting = transfer(network, content, style, settings, regions=regions, listen=interrupt)
    assert painting.outcome == "interrupted"
    assert torch.equal(painting.image[..., :32], content[..., :32])


def test_a_half_protected_place_moves_half_as_far() -> None:
    network, content = tiny_network(), picture(24, 32)
    style = Style(network, [picture(20, 28, seed=1)], SHALLOW)
    init = picture(24, 32, seed=3)
    settings = SHALLOW.replace(init="start.png", iterations=1)  # the first evaluation is that of the start
    regions = protecting(network, torch.full((1, 1, 24, 32), 0.5), style)
    image = transfer(network, content, style, settings, regions=regions, init=init).image
    torch.testing.assert_close(image, (content + init) / 2)


# ---- what comes out, judged by independent code ------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(embedded: Weights) -> Mapping[str, Any]:
    """An even content, painted in two halves of two styles that have nothing in common."""
    rows = torch.arange(96).view(-1, 1)
    stripes = ((rows // 3) % 2).float().expand(96, 96)
    warm = torch.stack([0.6 + 0.4 * stripes, 0.2 + 0.4 * stripes, 0.1 * stripes])[None]
    cold = torch.stack([0.1 * stripes.T, 0.3 + 0.3 * stripes.T, 0.6 + 0.4 * stripes.T])[None]
    noise = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    result = stylize(
        0.5 + 0.05 * noise.clamp(-4, 4),
        cold,
        regions=[Region(half_mask(64, 96), warm)],
        size=96,
        iterations=60,
        scales=1,
        content_layers=("relu3_1",),
        style_layers=("relu1_1", "relu2_1", "relu3_1"),
        content_weight=0.02,
        tv_weight=0.0,  # the stripes are fine
        device="cpu",
        precision="fp32",
    )
    return {"image": result.tensor, "warm": warm, "cold": cold, "weights": embedded}


def features(weights: Weights, image: Tensor) -> Iterator[Tensor]:
    """relu1_1, relu2_1 and relu3_1 in float64, each [C, H, W]: VGG19 written down once more."""
    x = image.double().flip(1) * 255 - torch.tensor([103.939, 116.779, 123.68]).double().view(1, 3, 1, 1)
    for name in [layer for layer in LAYERS[: LAYERS.index("conv3_1") + 1] if not layer.startswith("relu")]:
        if name.startswith("pool"):
            x = F.max_pool2d(x, 2)
            continue
        weight, bias = weights.convolutions[name]
        x = F.relu(F.conv2d(x, weight.double(), bias.double(), padding=1))
        if name.endswith("_1"):
            yield x[0]


def gram(layer: Tensor) -> Tensor:
    rows = layer.flatten(1)
    return rows @ rows.T / rows.shape[1]


def test_each_half_has_its_own_styles_statistics(halves: Mapping[str, Any]) -> None:
    layers = [features(halves["weights"], halves[name]) for name in ("image", "warm", "cold")]
    for image, warm, cold in zip(*layers, strict=True):
        width = image.shape[2]
        left, right = gram(image[..., : width // 2]), gram(image[..., width // 2 :])
        assert (left - gram(warm)).norm() < 0.5 * (left - gram(cold)).norm()
        assert (right - gram(cold)).norm() < 0.5 * (right - gram(warm)).norm()


def test_there_is_no_seam_between_two_regions(halves: Mapping[str, Any]) -> None:
    """Nowhere near the border is a step between columns larger than one that a style has itself."""
    column = halves["image"].mean(dim=(0, 2))  # [3, W]
    steps = (column[:, 1:] - column[:, :-1]).norm(dim=0)
    assert (column[:, :40].mean(dim=1) - column[:, 56:].mean(dim=1)).norm() > 0.8  # what a seam would be
    assert steps[43:52].max() < (0.1**2 + 0.3**2 + 0.4**2) ** 0.5  # of the cold style's stripes


# ---- from Python -----------------------------------------------------------------------------------------

TINY = Settings(size=32, iterations=3, precision="fp32", device="cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with pictures and masks."""
    monkeypatch.chdir(tmp_path)
    image_of(48, 32).save("content.png")
    image_of(40, 40, seed=1).save("style.png")
    image_of(40, 40, seed=2).save("other.png")
    mask = Image.new("L", (48, 32))
    mask.paste(255, (0, 0, 24, 32))
    mask.save("left.png")
    Image.eval(mask, lambda level: 255 - level).save("right.png")
    Image.eval(mask, lambda level: 200 - level // 2).save("left_too.png")
    Image.new("L", (5, 5)).save("black.png")
    Image.new("L", (5, 5), 255).save("white.png")
    return tmp_path


@pytest.fixture(scope="module")
def stylizer() -> Stylizer:
    return Stylizer(TINY)


def test_masks_of_all_kinds_give_the_same_picture(stylizer: Stylizer) -> None:
    array = np.asarray(Image.open("left.png"))
    flat = torch.from_numpy(array / np.float32(255))
    expected = stylizer("content.png", "style.png", regions=[Region("left.png", "other.png")]).tensor
    assert not torch.equal(expected, stylizer("content.png", "style.png").tensor)
    for mask in (Path("left.png"), Image.open("left.png"), array, array > 127, flat, flat[None, None]):
        found = stylizer("content.png", "style.png", regions=[Region(mask, "other.png")]).tensor
        assert torch.equal(found, expected)


def test_white_chooses_or_where_there_is_transparency_what_is_opaque() -> None:
    grey = Image.new("RGB", (4, 4), (51, 51, 51))
    assert torch.equal(read_mask(grey).tensor, torch.full((1, 1, 4, 4), 51 / 255))
    black_paint = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    black_paint.paste((0, 0, 0, 255), (0, 0, 2, 4))
    assert torch.equal(read_mask(black_paint).tensor, half_mask(4, 4))
    assert read_mask(Image.new("L", (4, 4), 255)).tensor.min() == 1  # exactly: protected places are the content


def test_a_picture_in_the_shape_of_no_mask_is_refused() -> None:
    with pytest.raises(InputError, match="shape"):
        read_mask(torch.rand(2, 4, 4))


def test_a_saved_picture_is_the_content_within_a_grey_level_where_it_is_protected(stylizer: Stylizer) -> None:
    for more in ({}, {"preserve_color": "luminance"}):
        out = Path(f"{len(more)}.png")
        stylize("content.png", "style.png", protect="left.png", out=out, settings=TINY.replace(scales=2, **more))
        content = resize(read_picture("content.png").tensor, (32, 21))
        difference = (read_picture(out).tensor - content).abs() * 255
        assert difference[..., :15].max() <= 1  # column 15 of 32 is beside the border, which is at 16
        assert difference[..., 16:].max() > 2


def test_what_is_transparent_can_be_protected(stylizer: Stylizer) -> None:
    content = image_of(32, 32).convert("RGBA")
    content.putalpha(Image.open("right.png").resize((32, 32)))
    result = stylizer(content, "style.png", protect="alpha")
    shown = read_picture(content).tensor
    assert torch.equal(result.tensor[..., :14], shown[..., :14])
    assert not torch.equal(result.tensor[..., 18:], shown[..., 18:])


def test_without_styles_the_regions_are_painted_and_the_rest_stays(stylizer: Stylizer) -> None:
    result = stylizer("content.png", [], regions=[Region("left.png", "style.png")])
    content = resize(read_picture("content.png").tensor, (32, 21))
    assert torch.equal(result.tensor[..., 17:], content[..., 17:])
    assert not torch.equal(result.tensor[..., :15], content[..., :15])


def test_a_texture_can_have_regions() -> None:
    settings = TINY.replace(size=(32, 24))
    result = stylize(None, "style.png", regions=[Region("left.png", "other.png")], settings=settings)
    assert result.tensor.shape == (1, 3, 24, 32)


def test_a_region_that_is_the_whole_picture_is_its_style_alone_at_its_own_scale() -> None:
    whole = [Region("white.png", "other.png", "white.png", style_scale=0.5)]
    divided = stylize("content.png", [], regions=whole, settings=TINY)
    plain = stylize("content.png", "other.png", settings=TINY.replace(style_scale=0.5))
    torch.testing.assert_close(divided.tensor, plain.tensor, rtol=0, atol=1e-3)
    assert divided.losses["total"] == pytest.approx(plain.losses["total"], rel=1e-3)


def test_what_was_measured_of_a_style_is_not_taken_for_another_regions(stylizer: Stylizer) -> None:
    """The cache knows a style's mask and scale."""
    plain = Region("left.png", "other.png")
    others = [Region("left.png", "other.png", "left.png"), Region("left.png", "other.png", style_scale=0.5)]
    first = stylizer("content.png", "style.png", regions=[plain]).tensor
    for other in others:
        again = stylizer("content.png", "style.png", regions=[other]).tensor
        assert not torch.equal(again, first)
        assert torch.equal(again, stylize("content.png", "style.png", regions=[other], settings=TINY).tensor)


def test_the_record_names_regions_and_protection_with_hashes(stylizer: Stylizer) -> None:
    region = Region("left.png", "other.png", "white.png", 0.5)
    record = stylizer("content.png", "style.png", regions=[region], protect="right.png", out="r.png").record
    (told,) = record["regions"]
    assert told["mask"]["name"] == "left.png"
    assert len({told[name]["sha256"] for name in ("mask", "style", "style_mask")}) == 3
    assert described(json.loads(json.dumps(record))) == [
        "--region left.png=other.png@white.png:0.5",
        "--protect right.png",
    ]


def test_interrupted_run_goes_on_to_the_same_picture_and_not_with_another_mask(stylizer: Stylizer) -> None:
    paint = partial(stylizer, "content.png", "style.png", regions=[Region("left.png", "other.png")])
    expected = paint(protect="right.png").tensor

    def interrupt(event: Event) -> None:
        if isinstance(event, Evaluated) and event.evaluation == 2:
            raise KeyboardInterrupt

    first = paint(protect="right.png", checkpoint="kept", on_event=interrupt)
    assert first.outcome == "interrupted"
    with pytest.raises(OutputError, match="another job, which differs in protect"):
        paint(protect="left_too.png", checkpoint="kept")
    again = paint(protect="right.png", checkpoint="kept")
    assert torch.equal(again.tensor, expected)


def test_a_mask_of_other_proportions_is_said_to_be_stretched(stylizer: Stylizer) -> None:
    result = stylizer("content.png", "style.png", regions=[Region("white.png", "other.png")])
    assert any("white.png has other proportions" in notice for notice in result.notices)
    assert not stylizer("content.png", "style.png", protect="left.png").notices


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "an empty mask": (
        lambda: stylize("content.png", "style.png", regions=[Region("black.png", "other.png")]),
        PictureError,
        "black.png chooses nothing",
    ),
    "an empty style mask": (
        lambda: stylize("content.png", "style.png", regions=[Region("left.png", "other.png", "black.png")]),
        PictureError,
        "black.png chooses nothing",
    ),
    "an empty protection": (
        lambda: stylize("content.png", "style.png", protect="black.png"),
        PictureError,
        "black.png chooses nothing",
    ),
    "everything protected": (
        lambda: stylize("content.png", "style.png", protect="white.png"),
        SettingsError,
        "nothing to paint",
    ),
    "a region that is protected": (
        lambda: stylize("content.png", "style.png", regions=[Region("left.png", "other.png")], protect="left.png"),
        SettingsError,
        "left.png lies wholly in what protect keeps",
    ),
    "alpha of an opaque picture": (
        lambda: stylize("content.png", "style.png", protect="alpha"),
        PictureError,
        "transparent nowhere",
    ),
    "a protected texture": (
        lambda: stylize(None, "style.png", protect="left.png", size=32),
        SettingsError,
        "a texture has none",
    ),
    "a loss that sorts": (
        lambda: stylize("content.png", "style.png", protect="left.png", style_loss="swd"),
        SettingsError,
        "regions",
    ),
    "a scale of nothing": (lambda: Region("left.png", "other.png", style_scale=0), SettingsError, "number from"),
    "neither style nor region": (lambda: stylize("content.png", []), SettingsError, "no style"),
    "weights of no styles": (
        lambda: stylize("content.png", [], regions=[Region("left.png", "other.png")], style_weights=(1.0,)),
        SettingsError,
        "1 values for 0",
    ),
    "a mask that is not there": (
        lambda: stylize("content.png", "style.png", protect="nowhere.png"),
        PictureError,
        "nowhere.png",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
@pytest.mark.usefixtures("no_weights")
def test_what_cannot_be_is_refused_before_computing(what: str) -> None:
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call()


# ---- on the command line ---------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Result:
    tiny = ("--size", "32", "--iterations", "3", "--precision", "fp32", "--device", "cpu")
    return CliRunner().invoke(program, [*(str(each) for each in arguments), *tiny])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("left.png=style.png", Region(Path("left.png"), Path("style.png"))),
        ("left.png=style.png:0.5", Region(Path("left.png"), Path("style.png"), None, 0.5)),
        ("left.png=style.png@right.png", Region(Path("left.png"), Path("style.png"), Path("right.png"))),
        ("left.png=style.png@right.png:2", Region(Path("left.png"), Path("style.png"), Path("right.png"), 2.0)),
        ("a=b.png=c d@e.png", Region(Path("a=b.png"), Path("c d@e.png"))),
        ("a=b.png=c d@e.png@left.png", Region(Path("a=b.png"), Path("c d@e.png"), Path("left.png"))),
        ("left.png=odd:2", Region(Path("left.png"), Path("odd:2"))),
        ("left.png=odd:2:2", Region(Path("left.png"), Path("odd:2"), None, 2.0)),
    ],
)
def test_a_region_is_read_so_that_its_files_exist(text: str, expected: Region) -> None:
    for name in ("a=b.png", "c d@e.png", "odd:2"):
        Image.new("L", (2, 2), 255).save(name, "PNG")
    assert parse_region(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("left.png", "is not MASK=STYLE"),
        ("=style.png", "is not MASK=STYLE"),
        ("nowhere.png=style.png", "no file nowhere.png"),
        ("left.png=nowhere.png@right.png:0.5", "no file nowhere.png"),
        ("left.png=style.png@nowhere.png", "no file nowhere.png"),
        ("left.png=style.png:-1", "number from"),
    ],
)
def test_a_region_that_cannot_be_read_is_refused_with_the_way_to_write_it(text: str, words: str) -> None:
    result = run("content.png", "style.png", "--region", text)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_region_takes_the_place_of_a_style_on_the_command_line() -> None:
    result = run("content.png", "--region", "left.png=style.png", "--region", "right.png=other.png")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "content_style_other.png\n"
    told = run_info("content_style_other.png")
    assert "# --region left.png=style.png\n# --region right.png=other.png\n" in told


def run_info(path: str) -> str:
    return CliRunner().invoke(program, ["info", path]).stdout


def test_a_result_as_config_reminds_of_its_regions() -> None:
    run("content.png", "style.png", "--region", "left.png=other.png", "--out", "first.png")
    again = run("content.png", "style.png", "--config", "first.png", "--out", "second.png")
    assert "first.png was painted with --region left.png=other.png" in again.stderr
    assert again.exit_code == 0


@pytest.mark.parametrize("name", ["left.png", "other.png", "right.png", "white.png"])
def test_no_mask_is_ever_replaced(name: str) -> None:
    before = Path(name).read_bytes()
    options = ("--region", "left.png=other.png@white.png", "--protect", "right.png", "--overwrite", "--out", name)
    result = run("content.png", "style.png", *options)
    assert result.exit_code == 2
    assert "pictures to paint from" in result.stderr
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize("option", [("--region", "left.png=other.png"), ("--protect", "left.png")])
def test_masks_are_for_one_picture(option: tuple[str, str]) -> None:
    Path("photos").mkdir()
    image_of(40, 30).save("photos/a.png")
    result = run("photos", "style.png", *option)
    assert result.exit_code == 2
    assert f"{option[0]} is for one picture" in result.stderr


def test_a_run_hears_of_its_evaluations_with_regions(stylizer: Stylizer) -> None:
    heard: list[Event] = []
    stylizer("content.png", "style.png", regions=[Region("left.png", "other.png")], on_event=heard.append)
    assert sum(isinstance(event, Evaluated) for event in heard) == 3
