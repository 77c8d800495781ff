"""Colour kept: the colour space by an independent implementation, the maps by their algebra, and whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import picture
from stylize import stylize, stylize_folder
from stylize.api import Result, Stylizer
from stylize.errors import SettingsError
from stylize.events import Evaluated, Event, Snapshot
from stylize.images import read_picture, save_picture, to_pil
from stylize.nst.color import (
    REGULARISATION,
    color_map,
    color_moments,
    from_lab,
    grey,
    keep_grey,
    lightness,
    match_colors,
    match_lightness,
    shown,
    shown_style,
    to_lab,
    with_chroma,
)
from stylize.settings import ColorMatch, Settings

few = hypothesis_settings(max_examples=50, deadline=None)
METHODS: tuple[ColorMatch, ...] = get_args(ColorMatch)
TINY = Settings(size=32, iterations=3, precision="fp32", device="cpu")
Floats = npt.NDArray[np.float64]


def cie_lab(image: Tensor) -> Floats:
    """CIE 15:2004, 8.2.1, for [1, 3, H, W] in sRGB, as [3, H, W]; the matrix as IEC 61966-2-1 prints it."""
    value = image[0].double().numpy()
    linear = np.where(value <= 0.04045, value / 12.92, ((np.maximum(value, 0.04045) + 0.055) / 1.055) ** 2.4)
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = np.einsum("ij,jhw->ihw", matrix, linear) / np.array([0.9505, 1.0, 1.089])[:, None, None]
    root = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.stack([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def chroma_difference(image: Tensor, content: Tensor) -> float:
    """Mean ΔE*ab of two pictures as if both had the same lightness."""
    a, b = cie_lab(image)[1:], cie_lab(content)[1:]
    return float(np.sqrt(((a - b) ** 2).sum(0)).mean())


def muted(height: int, width: int, seed: int = 0) -> Tensor:
    """A picture whose colours can be lighter and darker without leaving what sRGB has."""
    image = picture(height, width, seed)
    return 0.25 + 0.5 * (0.6 * image + 0.4 * image.mean(dim=1, keepdim=True))


def flat(*rgb: float, height: int = 24, width: int = 32) -> Tensor:
    return torch.tensor(rgb, dtype=torch.float32).view(1, 3, 1, 1).expand(1, 3, height, width).clone()


# ---- the space -----------------------------------------------------------------------------------------


@few
@given(st.lists(st.floats(-0.2, 1.2), min_size=3, max_size=3))
def test_lab_round_trip_is_exact(rgb: list[float]) -> None:
    """Also a little outside of what a display has. The curve of sRGB itself is only continuous to 3e-8."""
    image = torch.tensor(rgb, dtype=torch.float64).view(1, 3, 1, 1)
    torch.testing.assert_close(from_lab(to_lab(image)), image, rtol=0, atol=1e-7)


@few
@given(st.tuples(*[st.integers(0, 255)] * 3))
def test_lab_round_trip_in_float32_gives_the_same_bytes(rgb: tuple[int, int, int]) -> None:
    image = flat(*(level / 255 for level in rgb), height=1, width=1)
    assert to_pil(from_lab(to_lab(image))).getpixel((0, 0)) == rgb


def test_lab_is_that_of_the_standards() -> None:
    """Against CIE's formulas, written down a second time with the matrix as printed, of four digits."""
    image = torch.rand(1, 3, 17, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert np.abs(to_lab(image)[0].numpy() - cie_lab(image)).max() < 0.05


@pytest.mark.parametrize(
    ("rgb", "lab"),  # B. Lindbloom's calculator, D65, no adaptation
    [
        ((1, 1, 1), (100, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((1, 0, 0), (53.2408, 80.0925, 67.2032)),
        ((0, 1, 0), (87.7347, -86.1827, 83.1793)),
        ((0, 0, 1), (32.2970, 79.1875, -107.8602)),
    ],
)
def test_lab_of_the_primaries(rgb: tuple[float, ...], lab: tuple[float, ...]) -> None:
    assert to_lab(flat(*rgb, height=1, width=1).double()).flatten().tolist() == pytest.approx(lab, abs=0.02)


def test_greys_have_no_chroma_and_hold_any_lightness() -> None:
    ramp = torch.linspace(0, 100, 101, dtype=torch.float64).view(1, 1, 1, -1)
    picture_of_it = grey(ramp)
    torch.testing.assert_close(lightness(picture_of_it), ramp, rtol=0, atol=1e-6)
    assert to_lab(picture_of_it)[:, 1:].abs().max() < 1e-9
    assert torch.equal(picture_of_it[:, 0], picture_of_it[:, 1])


def test_bands_of_rows_leave_no_trace() -> None:
    tall = torch.rand(1, 3, 700, 3, dtype=torch.float64)
    pieces = torch.cat([to_lab(row) for row in tall.split(1, dim=2)], dim=2)
    torch.testing.assert_close(to_lab(tall), pieces)
    mean, covariance = color_moments(tall)
    torch.testing.assert_close(covariance, torch.cov(tall[0].flatten(1), correction=0))
    torch.testing.assert_close(mean, tall.mean(dim=(0, 2, 3)))


# ---- lightness alone -----------------------------------------------------------------------------------


@few
@given(st.tuples(*[st.integers(0, 255)] * 3))
def test_flat_colour_survives_its_own_lightness(rgb: tuple[int, int, int]) -> None:
    """Case 21, for every colour of 8 bits, those at the edge of the display's among them."""
    content = flat(*(level / 255 for level in rgb), height=2, width=2)
    joined = with_chroma(shown(content, Settings(preserve_color="luminance")), content)
    assert to_pil(joined).getpixel((0, 0)) == rgb


def test_chroma_is_the_contents_and_lightness_the_pictures() -> None:
    content, painted = muted(40, 56), shown(muted(40, 56, seed=1), Settings(preserve_color="luminance"))
    joined = with_chroma(painted, content)
    assert chroma_difference(joined, content) < 0.05
    assert np.abs(cie_lab(joined)[0] - cie_lab(painted)[0]).max() < 0.05


@few
@given(st.tuples(*[st.integers(0, 255)] * 3), st.floats(1, 99))
def test_colour_that_does_not_fit_keeps_its_hue(rgb: tuple[int, int, int], light: float) -> None:
    content = flat(*(level / 255 for level in rgb), height=1, width=1).double()
    joined = with_chroma(grey(torch.full((1, 1, 1, 1), light, dtype=torch.float64)), content)
    before, after = cie_lab(content).flatten(), cie_lab(joined).flatten()
    assert 0 <= joined.min() <= joined.max() <= 1
    assert min(light, before[0]) - 0.1 <= after[0] <= max(light, before[0]) + 0.1
    chroma = math.hypot(*after[1:])
    assert 0.9 * math.hypot(*before[1:]) - 0.1 <= chroma <= math.hypot(*before[1:]) + 0.1
    cross = before[1] * after[2] - before[2] * after[1]
    assert abs(cross) <= 0.1 * math.hypot(*before[1:])  # how far the new colour is from the old hue's line


def test_style_gets_the_contents_mean_and_deviation_of_lightness() -> None:
    style, content = muted(40, 50, seed=1).double(), muted(30, 30, seed=2).double()
    matched = cie_lab(match_lightness(style, content))
    wanted = cie_lab(content)
    assert np.abs(matched[1:]).max() < 0.05  # the printed matrix has a white of its own
    assert matched[0].mean() == pytest.approx(wanted[0].mean(), abs=0.05)
    assert matched[0].std() == pytest.approx(wanted[0].std(), rel=0.01)


def test_gradient_of_a_grey_picture_stays_grey() -> None:
    gradient = torch.randn(1, 3, 5, 7, dtype=torch.float64)
    kept = keep_grey(gradient)
    assert torch.equal(kept[:, 0], kept[:, 2])
    # The nearest grey gradient: what is taken away is orthogonal to every grey picture.
    assert ((gradient - kept).sum(dim=1)).abs().max() < 1e-12


# ---- the maps ------------------------------------------------------------------------------------------


def covariance_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(3, 3, dtype=torch.float64, generator=generator) * 0.2
    return root @ root.T


@few
@given(st.sampled_from(METHODS), st.integers(0, 1000), st.integers(0, 1000))
def test_map_carries_one_covariance_to_the_other(method: ColorMatch, one: int, other: int) -> None:
    unit = REGULARISATION * torch.eye(3, dtype=torch.float64)
    found, wanted = covariance_of(one), covariance_of(other)
    matrix = color_map(found, wanted, method)
    torch.testing.assert_close(matrix @ (found + unit) @ matrix.T, wanted + unit, rtol=1e-6, atol=1e-9)


def test_each_map_is_the_one_of_its_name() -> None:
    """What tells them apart: all carry the covariance, and differ by a rotation."""
    found, wanted = covariance_of(1), covariance_of(2)
    transport = color_map(found, wanted, "transport")
    torch.testing.assert_close(transport, transport.T)  # Brenier 1991: the gradient of a convex function
    assert torch.linalg.eigvalsh(transport).min() > 0
    cholesky = color_map(found, wanted, "cholesky")
    assert cholesky.triu(1).abs().max() < 1e-12
    pca = color_map(found, wanted, "pca")
    values, vectors = torch.linalg.eigh(found + REGULARISATION * torch.eye(3, dtype=torch.float64))
    root = vectors @ values.sqrt().diag() @ vectors.T
    torch.testing.assert_close(pca @ root, (pca @ root).T)  # it is the square root of the wanted covariance


@pytest.mark.parametrize("method", METHODS)
def test_recoloured_style_has_the_contents_mean_and_covariance(method: ColorMatch) -> None:
    """Colours that no map of these carries out of [0, 1], so that nothing is clamped."""
    style, content = muted(60, 70, seed=3).double(), 0.5 * muted(50, 40, seed=4).double() + 0.25
    recoloured = match_colors(style, content, method)
    assert 0 < recoloured.min() <= recoloured.max() < 1
    planes = content[0].flatten(1)
    moved = recoloured[0].flatten(1)
    torch.testing.assert_close(moved.mean(1), planes.mean(1))
    # 1e-5·I is added to both: a hundredth of the smallest variance here.
    torch.testing.assert_close(torch.cov(moved), torch.cov(planes), rtol=0.05, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_matching_a_picture_to_itself_changes_nothing(method: ColorMatch) -> None:
    style = picture(30, 40)
    torch.testing.assert_close(match_colors(style, style, method), style, rtol=0, atol=1e-5)


GREY = picture(24, 32).mean(dim=1, keepdim=True).expand(1, 3, 24, 32)
FLAT, WHITE = flat(0.2, 0.5, 0.9), flat(1, 1, 1)


@pytest.mark.parametrize("mode", [*METHODS, "luminance"])
@pytest.mark.parametrize("content", [GREY, FLAT, WHITE, picture(24, 32)])
@pytest.mark.parametrize("style", [GREY, FLAT, WHITE, picture(24, 32, seed=1)])
def test_pictures_without_colour_or_form_give_finite_ones(mode: str, content: Tensor, style: Tensor) -> None:
    named: dict[str, Any] = {"color_match": mode} if mode in METHODS else {}
    settings = Settings(preserve_color="match" if named else "luminance", **named)
    seen = shown_style(style, content, settings)
    assert seen.shape == style.shape
    assert seen.isfinite().all()
    assert 0 <= seen.min() <= seen.max() <= 1
    joined = with_chroma(seen, content)
    assert joined.isfinite().all()


def test_off_changes_nothing() -> None:
    style = picture(24, 32)
    assert shown_style(style, GREY, Settings()) is style
    assert shown(style, Settings()) is style


# ---- whole runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def painters() -> dict[str, Stylizer]:
    return {mode: Stylizer(TINY.replace(preserve_color=mode)) for mode in ("luminance", "match")}


@pytest.mark.parametrize("init", ["content", "noise", "style", "picture"])
def test_luminance_run_keeps_the_contents_chroma(painters: dict[str, Stylizer], init: str) -> None:
    """Mean ΔE of chroma under 1, by the second implementation, whatever the picture starts from."""
    content = muted(24, 32)
    start = picture(24, 32, seed=7) if init == "picture" else init
    result = painters["luminance"](content, picture(40, 40, seed=1), init=start)
    assert chroma_difference(result.tensor, content) < 1
    assert np.abs(cie_lab(result.tensor)[0] - cie_lab(content)[0]).max() > 1  # and yet something was painted


def test_flat_content_comes_out_as_it_went_in(painters: dict[str, Stylizer]) -> None:
    """A flat style in the content's lightness asks for nothing; case 21 through the whole program."""
    content = flat(0.2, 0.6, 0.3)
    result = painters["luminance"](content, flat(0.9, 0.1, 0.1))
    assert to_pil(result.tensor).getcolors() == to_pil(content).getcolors()


def test_frames_of_a_luminance_run_are_in_colour(painters: dict[str, Stylizer]) -> None:
    content = muted(24, 32)
    frames: list[Tensor] = []

    def listen(event: Event) -> None:
        if isinstance(event, Snapshot):
            frames.append(event.picture[None] / 255)

    painters["luminance"](content, picture(40, 40, seed=1), on_event=listen, snapshot_every=1)
    assert len(frames) == 3
    assert frames[0].shape == (1, 3, 24, 32)
    for frame in frames:
        assert chroma_difference(frame, content) < 1.5  # frames have 8 bits: half a level is up to 0.4 of ΔE


@pytest.mark.parametrize("mode", ["luminance", "match"])
def test_style_is_measured_anew_for_each_content(painters: dict[str, Stylizer], mode: str) -> None:
    style = picture(40, 40, seed=1)
    contents = [picture(24, 32, seed=2), muted(24, 32, seed=3)]

    def paint(content: Tensor) -> Tensor:
        return painters[mode](content, style).tensor

    first, second, again = paint(contents[0]), paint(contents[1]), paint(contents[0])
    assert torch.equal(first, again)
    assert torch.equal(second, stylize(contents[1], style, settings=painters[mode].settings).tensor)


def test_matched_run_paints_with_the_contents_colours() -> None:
    """From the style itself, before anything has moved much: its mean colour is the content's, not its own."""
    content, style = flat(0.2, 0.6, 0.3) * 0.5 + muted(24, 32) * 0.5, picture(24, 32, seed=1)
    result = stylize(content, style, settings=TINY, preserve_color="match", init="style", content_weight=0.0)
    means = [each.mean(dim=(0, 2, 3)) for each in (result.tensor, content, style)]
    assert (means[0] - means[1]).norm() < 0.2 * (means[2] - means[1]).norm()


def test_interrupted_luminance_run_is_in_colour() -> None:
    content = muted(24, 32)

    def stop(event: Event) -> None:
        if isinstance(event, Evaluated) and event.evaluation == 2:
            raise KeyboardInterrupt

    result = stylize(content, picture(40, 40, seed=1), settings=TINY, preserve_color="luminance", on_event=stop)
    assert result.outcome == "interrupted"
    assert chroma_difference(result.tensor, content) < 1


@pytest.mark.parametrize("mode", ["luminance", "match"])
def test_folder_gives_what_single_runs_give(tmp_path: Path, painters: dict[str, Stylizer], mode: str) -> None:
    for seed in range(2):
        save_picture(muted(24, 32, seed), tmp_path / "in" / f"{seed}.png")
    save_picture(picture(24, 24, seed=5), tmp_path / "style.png")
    report = stylize_folder(
        tmp_path / "in", tmp_path / "style.png", tmp_path / "out", settings=painters[mode].settings, engine="inline"
    )
    assert report.outcome == "done"
    for seed in range(2):
        alone: Result = painters[mode](tmp_path / "in" / f"{seed}.png", tmp_path / "style.png")
        alone.save(tmp_path / f"{seed}.png")
        assert torch.equal(
            read_picture(tmp_path / "out" / f"{seed}.png").tensor, read_picture(tmp_path / f"{seed}.png").tensor
        )


def test_choices_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"preserve_color is 'luma'; .*Did you mean luminance\?"):
        Settings(preserve_color="luma")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"color_match is 'PCA'; it can be pca, cholesky, transport"):
        Settings(color_match="PCA")  # type: ignore[arg-type]
