"""Colour kept: paint in lightness alone, or recolour the style first (Gatys et al. 2016, arXiv 1606.05897).

Lightness and chroma are those of CIE L*a*b*, reached through linear light. L* is a function of luminance alone: a
grey picture holds a colour's L* exactly, and a*, b* stay what they were while L* is painted. In OKLab, whose
lightness leans on all three primaries, the content's a* and b* moved twice as far in our trials.

Pictures are [1, 3, H, W] sRGB in [0, 1], float32 or float64. What works on single pixels goes through them by bands
of rows, so that a large picture costs no more than two copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stylize.events import Event, Listener, Snapshot
from stylize.nst.transfer import resize
from stylize.settings import ColorMatch, Settings

BAND_ROWS = 256
REGULARISATION = 1e-5  # added to every covariance: a grey or flat picture has none in some direction
CHROMA_KEPT = 0.9  # at least, of a colour that does not fit
FADING_STEPS = 14  # halvings, to find what still fits: within 0.01 of what the display can show
OUT_OF_GAMUT = 1e-5  # of linear light; less is rounding

# Linear sRGB to XYZ as fractions, from the primaries and the white of IEC 61966-2-1 (CSS Color 4, section 18).
_TO_XYZ = (
    (506752 / 1228815, 87881 / 245763, 12673 / 70218),
    (87098 / 409605, 175762 / 245763, 12673 / 175545),
    (7918 / 409605, 87881 / 737289, 1001167 / 1053270),
)
_TOE = 6 / 29  # CIE 15: where the cube root of L*a*b* gives way to a straight line


# ---- what a run is shown, and what comes out of it ----------------------------------------------------


def shown(picture: Tensor, settings: Settings) -> Tensor:
    """A content picture, or a start, as the network is to see it: in grey where only lightness is painted."""
    return grey(lightness(picture)) if settings.preserve_color == "luminance" else picture


def shown_style(style: Tensor, content: Tensor, settings: Settings) -> Tensor:
    """A style picture as the network is to see it beside this content; its size is its own."""
    if settings.preserve_color == "luminance":
        return match_lightness(style, content)
    if settings.preserve_color == "match":
        return match_colors(style, content, settings.color_match)
    return style


def keep_grey(gradient: Tensor) -> Tensor:
    """A gradient hook that lets a grey picture stay grey: its three colours move alike."""
    return gradient.mean(dim=1, keepdim=True).expand_as(gradient).contiguous()


def showing_chroma(listen: Listener, content: Tensor) -> Listener:
    """A listener that passes all events on, the grey pictures among them in the content's chroma."""

    def show(event: Event) -> None:
        if isinstance(event, Snapshot):
            painted = with_chroma(event.picture[None] / 255, content)
            event = Snapshot(event.evaluation, (painted[0] * 255).round().to(torch.uint8))
        listen(event)

    return show


def with_chroma(picture: Tensor, content: Tensor) -> Tensor:
    """The lightness of `picture` with the hue and chroma of `content`, which may have another size.

    A colour that sRGB does not have at the new lightness keeps its hue; lightness goes back towards the content's,
    and a part of the chroma goes, until it fits.
    """
    height, width = picture.shape[2:]

    def join(light: Tensor, colored: Tensor) -> Tensor:
        own = _to_lab(colored[0].flatten(1))
        lab = torch.cat([_lightness(_luminance(light[0].flatten(1))), own[1:]])
        return _encoded(_into_gamut(lab, own)).clamp(0, 1).view_as(light)

    return _by_bands(join, picture, resize(content, (width, height)).to(picture))


# ---- lightness ----------------------------------------------------------------------------------------


def lightness(picture: Tensor) -> Tensor:
    """CIE L* of every pixel, [1, 1, H, W] in [0, 100]."""
    return _by_bands(
        lambda band: _lightness(_luminance(band[0].flatten(1))).view(1, 1, *band.shape[2:]), picture
    )


def grey(lightness: Tensor) -> Tensor:
    """The picture [1, 3, H, W] without chroma that has this L* [1, 1, H, W]."""
    level = _by_bands(lambda band: _encoded(_cubed((band + 16) / 116)).clamp(0, 1), lightness)
    return level.expand(-1, 3, -1, -1).contiguous()


def match_lightness(style: Tensor, content: Tensor) -> Tensor:
    """The style picture in grey, its mean and deviation of L* moved to the content's (section 5.2)."""
    found, wanted = lightness(style), lightness(content)
    floor = REGULARISATION * 100**2
    gain = ((wanted.double().var() + floor) / (found.double().var() + floor)).sqrt()
    moved = (found - found.double().mean()) * gain + wanted.double().mean()
    return grey(moved.clamp(0, 100).to(style))


# ---- statistics of colours ----------------------------------------------------------------------------


def match_colors(style: Tensor, content: Tensor, method: ColorMatch) -> Tensor:
    """The style picture with the content's mean and covariance of R, G and B, within [0, 1] (section 5.1).

    x' = A(x − μ_S) + μ_C with A from `color_map`; what leaves [0, 1] is clamped.
    """
    mean, covariance = color_moments(style)
    mean_wanted, covariance_wanted = color_moments(content)
    matrix = color_map(covariance, covariance_wanted, method)
    shift = mean_wanted - matrix @ mean

    def move(band: Tensor) -> Tensor:
        colors = torch.addmm(shift[:, None].to(band), matrix.to(band), band[0].flatten(1))
        return colors.clamp(0, 1).view_as(band)

    return _by_bands(move, style)


def color_moments(picture: Tensor) -> tuple[Tensor, Tensor]:
    """The mean [3] and the covariance [3, 3] of a picture's colours, in float64 on the CPU."""
    count = picture.shape[2] * picture.shape[3]
    bands = [band[0].flatten(1) for band in picture.cpu().split(BAND_ROWS, dim=2)]
    mean = torch.stack([band.double().sum(dim=1) for band in bands]).sum(dim=0) / count
    centred = (band.double() - mean[:, None] for band in bands)
    return mean, torch.stack([band @ band.T for band in centred]).sum(dim=0) / count


def color_map(covariance: Tensor, wanted: Tensor, method: ColorMatch) -> Tensor:
    """A matrix A [3, 3] with A Σ Aᵀ = Σ_wanted, both with 1e-5·I added, in float64.

    pca: Σ_w^½ Σ^−½; cholesky: L_w L⁻¹; transport: Σ^−½ (Σ^½ Σ_w Σ^½)^½ Σ^−½, which of all such maps moves
    normally distributed colours least.
    """
    unit = REGULARISATION * torch.eye(3, dtype=torch.float64)
    covariance, wanted = covariance.double() + unit, wanted.double() + unit
    if method == "cholesky":
        lower: Tensor = torch.linalg.cholesky(covariance)
        lower_wanted: Tensor = torch.linalg.cholesky(wanted)
        return lower_wanted @ torch.inverse(lower)
    root, inverse = _power(covariance, 0.5), _power(covariance, -0.5)
    if method == "pca":
        return _power(wanted, 0.5) @ inverse
    return inverse @ _power(root @ wanted @ root, 0.5) @ inverse


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """A power of a symmetric, positive definite matrix."""
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=torch.finfo(values.dtype).tiny).pow(exponent) @ vectors.T


# ---- CIE L*a*b* ---------------------------------------------------------------------------------------


def to_lab(picture: Tensor) -> Tensor:
    """sRGB [1, 3, H, W] as CIE L*a*b* under the display's own white (CIE 15; IEC 61966-2-1).

    Greys have a* = b* = 0. Values a little outside [0, 1] have a meaning, too.
    """
    return _by_bands(lambda band: _to_lab(band[0].flatten(1)).view_as(band), picture)


def from_lab(lab: Tensor) -> Tensor:
    """CIE L*a*b* [1, 3, H, W] as sRGB: the inverse of `to_lab`, outside [0, 1] for what sRGB does not have."""
    return _by_bands(lambda band: _encoded(_linear_of_lab(band[0].flatten(1))).view_as(band), lab)


def _to_lab(colors: Tensor) -> Tensor:
    """sRGB [3, N] as L*a*b* [3, N]."""
    matrix = _matrix(colors)
    x, y, z = _rooted(matrix @ _linear(colors) / matrix.sum(dim=1, keepdim=True))  # over white's X, Y and Z
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _linear_of_lab(lab: Tensor) -> Tensor:
    """L*a*b* [3, N] as linear light [3, N], within [0, 1] where the display has the colour."""
    matrix = _matrix(lab)
    y = (lab[0] + 16) / 116
    ratios = _cubed(torch.stack([y + lab[1] / 500, y, y - lab[2] / 200]))
    return _inverse(lab) @ (ratios * matrix.sum(dim=1, keepdim=True))


def _into_gamut(lab: Tensor, own: Tensor) -> Tensor:
    """L*a*b* [3, N] as linear light in [0, 1]; what the display does not have moves towards `own`, which it has."""
    linear = _linear_of_lab(lab)
    outside = ~_is_inside(linear)
    if outside.any():
        linear[:, outside] = _linear_of_lab(_fitted(lab[:, outside], own[:, outside]))
    return linear.clamp(0, 1)


def _fitted(lab: Tensor, own: Tensor) -> Tensor:
    """Colours [3, N] moved as little as fits towards those of their own lightness with less chroma, by halving."""
    goal = torch.stack([own[0], CHROMA_KEPT * own[1], CHROMA_KEPT * own[2]])
    too_little, enough = torch.zeros_like(lab[0]), torch.ones_like(lab[0])
    for _ in range(FADING_STEPS):
        middle = (too_little + enough) / 2
        inside = _is_inside(_linear_of_lab(torch.lerp(lab, goal, middle)))
        too_little, enough = torch.where(inside, too_little, middle), torch.where(inside, middle, enough)
    return torch.lerp(lab, goal, enough)


def _is_inside(linear: Tensor) -> Tensor:
    return ((linear >= -OUT_OF_GAMUT) & (linear <= 1 + OUT_OF_GAMUT)).all(dim=0)


def _luminance(colors: Tensor) -> Tensor:
    """sRGB [3, N] as relative luminance Y [1, N]."""
    return _matrix(colors)[1:2] @ _linear(colors)


def _lightness(luminance: Tensor) -> Tensor:
    return 116 * _rooted(luminance) - 16


def _linear(colors: Tensor) -> Tensor:
    """Linear light of sRGB values; below black the straight line goes on."""
    curve = ((colors.clamp(min=0.04045) + 0.055) / 1.055) ** 2.4
    return torch.where(colors <= 0.04045, colors / 12.92, curve)


def _encoded(linear: Tensor) -> Tensor:
    """sRGB values of linear light."""
    curve = 1.055 * linear.clamp(min=0.0031308) ** (1 / 2.4) - 0.055
    return torch.where(linear <= 0.0031308, linear * 12.92, curve)


def _rooted(ratio: Tensor) -> Tensor:
    """The cube root with a straight toe that CIE L*a*b* is made of."""
    return torch.where(ratio > _TOE**3, ratio.clamp(min=_TOE**3) ** (1 / 3), ratio / (3 * _TOE**2) + 4 / 29)


def _cubed(root: Tensor) -> Tensor:
    """The inverse of `_rooted`."""
    return torch.where(root > _TOE, root**3, 3 * _TOE**2 * (root - 4 / 29))


def _matrix(like: Tensor) -> Tensor:
    return torch.tensor(_TO_XYZ, dtype=torch.float64).to(like)


def _inverse(like: Tensor) -> Tensor:
    return torch.inverse(torch.tensor(_TO_XYZ, dtype=torch.float64)).to(like)


def _by_bands(function: Callable[..., Tensor], *pictures: Tensor) -> Tensor:
    """What a function of single pixels makes of pictures of one size, a band of rows at a time."""
    bands = zip(*(picture.split(BAND_ROWS, dim=2) for picture in pictures), strict=True)
    return torch.cat([function(*band) for band in bands], dim=2)
