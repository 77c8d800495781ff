"""images.py: what a file holds is what is painted, and what was painted is what the file holds."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageCms, ImageFile, JpegImagePlugin
from PIL.PngImagePlugin import PngInfo

from stylize.errors import InputError, OutputError, PictureError, SaveError, SettingsError
from stylize.images import (
    DEFAULT_MAX_PIXELS,
    Picture,
    check_output,
    probe_size,
    read_picture,
    read_record,
    read_settings,
    read_suffixes,
    save_picture,
    to_pil,
)

FORMATS = (".png", ".jpg", ".webp", ".tiff")
few = settings(max_examples=25, deadline=None)


def flat(colour: tuple[float, float, float], size: tuple[int, int] = (5, 3)) -> torch.Tensor:
    """A picture [1, 3, H, W] of one colour in 0 … 255; `size` is width and height."""
    return torch.tensor(colour, dtype=torch.float32).div(255).view(1, 3, 1, 1).repeat(1, 1, size[1], size[0])


def ramp(width: int = 16, height: int = 8) -> torch.Tensor:
    """A picture [1, 3, H, W] of many colours, each of them a whole level of 255."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (1, 3, height, width), generator=generator).float() / 255


def opened(path: Path) -> Image.Image:
    """A file as Pillow sees it, and with no file left open."""
    return Image.open(io.BytesIO(path.read_bytes()))


def unit(picture: Picture) -> npt.NDArray[Any]:
    """[H, W, 3] in [0, 1]."""
    array: npt.NDArray[Any] = picture.tensor[0].permute(1, 2, 0).numpy()
    return array


def levels(picture: Picture) -> npt.NDArray[np.float64]:
    """[H, W, 3] in levels of 0 … 255, not rounded."""
    return unit(picture).astype(np.float64) * 255


def assert_is_picture(picture: Picture) -> None:
    assert picture.tensor.dtype == torch.float32
    assert picture.tensor.shape[:2] == (1, 3)
    assert picture.tensor.is_contiguous()
    assert 0 <= float(picture.tensor.min()) <= float(picture.tensor.max()) <= 1


# ---- what is a picture --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM", "JPEG2000", "ICO"])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPG", ".txt", ""])
def test_a_file_is_known_by_its_content(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    Image.new("RGB", (32, 16), (250, 120, 40)).save(path, kind)
    picture = read_picture(path)
    assert_is_picture(picture)
    assert picture.size == probe_size(path) == opened(path).size
    assert picture.source == str(path)
    assert picture.notices == ()
    np.testing.assert_allclose(levels(picture)[0, 0], (250, 120, 40), atol=4)


@pytest.mark.parametrize("name", ["2023李.png", "St'tteben (1).png", 'a "b" c.png', "  x .png", "ünï→.png"])
def test_any_name_works(tmp_path: Path, name: str) -> None:
    path = tmp_path / "dossier été" / name
    assert save_picture(ramp(), path, record={"content": name}) == path
    assert torch.equal(read_picture(str(path)).tensor, ramp())
    assert read_record(path) == {"content": name}


@pytest.mark.parametrize("size", [(1, 1), (5000, 2), (2, 5000), (17, 31)])
def test_any_size_is_read(tmp_path: Path, size: tuple[int, int]) -> None:
    path = save_picture(flat((1, 2, 3), size), tmp_path / "x.png")
    assert read_picture(path).size == probe_size(path) == size


def test_suffixes_are_those_that_can_be_read() -> None:
    assert {".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".gif", ".bmp"} <= read_suffixes()
    assert not {".eps", ".pdf", ".txt", ".mp4", ".tga"} & read_suffixes()


# ---- orientation --------------------------------------------------------------------------------------

# Rows of the file for the upright picture ABC/DEF, from EXIF's definition: the side of the picture on which
# the first row of the file lies, and that of its first column (1: top, left; 6: right, top; …).
ORIENTATIONS = {
    1: ("ABC", "DEF"),
    2: ("CBA", "FED"),
    3: ("FED", "CBA"),
    4: ("DEF", "ABC"),
    5: ("AD", "BE", "CF"),
    6: ("CF", "BE", "AD"),
    7: ("FC", "EB", "DA"),
    8: ("DA", "EB", "FC"),
}


def letters(rows: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    return np.array([[[30 * (ord(letter) - ord("A"))] * 3 for letter in row] for row in rows], dtype=np.uint8)


def squares(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Each pixel as 16 x 16, which a JPEG keeps apart."""
    return pixels.repeat(16, axis=0).repeat(16, axis=1)


def write_oriented(path: Path, rows: npt.NDArray[Any], orientation: int) -> None:
    if path.suffix == ".tiff":
        tags = [(int(ExifTags.Base.Orientation), "H", 1, orientation, True)]
        tifffile.imwrite(path, rows, photometric="rgb", extratags=tags)
        return
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(rows).save(path, exif=exif, lossless=True)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize(("suffix", "depth"), [(".png", 8), (".webp", 8), (".tiff", 8), (".tiff", 16)])
def test_a_picture_is_read_upright(tmp_path: Path, orientation: int, suffix: str, depth: int) -> None:
    path = tmp_path / f"x{suffix}"
    stored = letters(ORIENTATIONS[orientation])
    write_oriented(path, stored if depth == 8 else stored.astype(np.uint16) * 257, orientation)
    picture = read_picture(path)
    np.testing.assert_array_equal(levels(picture).round(), letters(ORIENTATIONS[1]))
    assert probe_size(path) == picture.size == (3, 2)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_a_tiff_that_pillow_decodes_is_read_upright(
    tmp_path: Path, orientation: int, compression: str | None
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image = Image.fromarray(letters(ORIENTATIONS[orientation])).convert("L").convert("P")
    image.save(tmp_path / "x.tiff", exif=exif, compression=compression)
    picture = read_picture(tmp_path / "x.tiff")
    np.testing.assert_array_equal(levels(picture).round(), letters(ORIENTATIONS[1]))
    assert probe_size(tmp_path / "x.tiff") == picture.size == (3, 2)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_jpeg_is_read_upright(tmp_path: Path, orientation: int) -> None:
    path = tmp_path / "x.jpg"
    write_oriented(path, squares(letters(ORIENTATIONS[orientation])), orientation)
    picture = read_picture(path)
    assert picture.size == probe_size(path) == (48, 32)
    np.testing.assert_allclose(levels(picture)[8::16, 8::16], letters(ORIENTATIONS[1]), atol=3)


def test_an_opened_pil_image_is_read_upright_and_stays_as_it_is(tmp_path: Path) -> None:
    write_oriented(tmp_path / "x.png", letters(ORIENTATIONS[6]), 6)
    with Image.open(tmp_path / "x.png") as image:
        picture = read_picture(image)
        assert image.size == (2, 3)
    np.testing.assert_array_equal(levels(picture).round(), letters(ORIENTATIONS[1]))
    assert picture.source == "a PIL image"


def test_an_orientation_that_does_not_exist_is_upright(tmp_path: Path) -> None:
    write_oriented(tmp_path / "x.png", letters(ORIENTATIONS[1]), 9)
    assert read_picture(tmp_path / "x.png").size == (3, 2)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow itself warns, too
@pytest.mark.parametrize("junk", [b"", b"no such thing", b"II*\0", b"II*\0\x08\0\0\0\x05\0\x12\x01"])
def test_damaged_exif_is_a_notice_at_most(tmp_path: Path, junk: bytes) -> None:
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "x.jpg", exif=b"Exif\0\0" + junk)
    picture = read_picture(tmp_path / "x.jpg")
    assert picture.size == probe_size(tmp_path / "x.jpg") == (4, 4)
    for notice in picture.notices:
        assert notice.startswith("x.jpg has EXIF data that cannot be read")


def test_probing_decodes_no_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save_picture(ramp(), tmp_path / f"x{suffix}") for suffix in FORMATS]

    decoded: list[ImageFile.ImageFile] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    assert [probe_size(path) for path in paths] == [(16, 8)] * len(paths)
    assert decoded == []


# ---- colour profiles ----------------------------------------------------------------------------------

D65 = (0.3127, 0.3290)
SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
Primaries: TypeAlias = tuple[tuple[float, float], ...]
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
D50_XYZ = np.array([0.9642, 1.0, 0.8249])


def xyz(x: float, y: float) -> npt.NDArray[np.float64]:
    return np.array([x / y, 1, (1 - x - y) / y])


def to_xyz(primaries: Primaries) -> npt.NDArray[np.float64]:
    """Linear RGB -> XYZ under D65, from chromaticities alone."""
    columns = np.stack([xyz(*primary) for primary in primaries], axis=1)
    matrix: npt.NDArray[np.float64] = columns * np.linalg.solve(columns, xyz(*D65))
    return matrix


def adapted_to_d50() -> npt.NDArray[np.float64]:
    gains = (BRADFORD @ D50_XYZ) / (BRADFORD @ xyz(*D65))
    matrix: npt.NDArray[np.float64] = np.linalg.inv(BRADFORD) @ np.diag(gains) @ BRADFORD
    return matrix


def encode_srgb(linear: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.abs(linear) ** (1 / 2.4) - 0.055)


def decode_srgb(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def fixed(*values: float) -> bytes:
    """ICC's s15Fixed16Number."""
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def icc(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    """An ICC profile of version 2.4 by the letter of the specification."""
    start = 128 + 4 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        padded = content + b"\0" * (-len(content) % 4)
        table += name + struct.pack(">II", start + len(data), len(content))
        data += padded
    header = struct.pack(">I4sI4s4s4s", start + len(data), b"\0" * 4, 0x02400000, kind, space, connection)
    header += struct.pack(">6H", 2000, 1, 1, 0, 0, 0) + b"acsp" + b"\0" * 24 + struct.pack(">I", 1)
    header += fixed(*D50_XYZ) + b"\0" * 48
    assert len(header) == 128
    return header + table + data


def curve(values: npt.NDArray[np.float64]) -> bytes:
    table = np.round(values * 65535).astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", len(table)) + table.tobytes()


def rgb_profile(primaries: Primaries, linear: npt.NDArray[np.float64]) -> bytes:
    columns = adapted_to_d50() @ to_xyz(primaries)
    tags = {b"wtpt": b"XYZ \0\0\0\0" + fixed(*D50_XYZ)}
    for i, colour in enumerate((b"r", b"g", b"b")):
        tags[colour + b"XYZ"] = b"XYZ \0\0\0\0" + fixed(*columns[:, i])
        tags[colour + b"TRC"] = curve(linear)
    return icc(b"mntr", b"RGB ", b"XYZ ", tags)


def grey_profile(linear: npt.NDArray[np.float64]) -> bytes:
    tags = {b"wtpt": b"XYZ \0\0\0\0" + fixed(*D50_XYZ), b"kTRC": curve(linear)}
    return icc(b"mntr", b"GRAY", b"XYZ ", tags)


STEPS = np.linspace(0, 1, 1024)
SRGB_PROFILE = rgb_profile(SRGB, decode_srgb(STEPS))
P3_PROFILE = rgb_profile(DISPLAY_P3, decode_srgb(STEPS))
ADOBE_PROFILE = rgb_profile(ADOBE_RGB, STEPS ** (563 / 256))  # Adobe RGB (1998), 4.3.4.2
COLOURS = np.array([[180, 90, 60], [110, 160, 100], [90, 80, 180], [128] * 3, [255] * 3, [0] * 3])


def expected_srgb(
    colours: npt.NDArray[Any], primaries: Primaries, gamma: float | None
) -> npt.NDArray[np.float64]:
    value = colours.astype(np.float64) / 255
    linear = decode_srgb(value) if gamma is None else value**gamma
    converted = linear @ (np.linalg.inv(to_xyz(SRGB)) @ to_xyz(primaries)).T
    assert converted.min() > -1e-6, "the colours were chosen to lie inside sRGB"
    assert converted.max() < 1 + 1e-6
    return 255 * encode_srgb(converted.clip(0, 1))


@pytest.mark.parametrize(
    ("profile", "primaries", "gamma"), [(P3_PROFILE, DISPLAY_P3, None), (ADOBE_PROFILE, ADOBE_RGB, 563 / 256)]
)
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_profile_is_converted_to_srgb(
    tmp_path: Path, profile: bytes, primaries: Primaries, gamma: float | None, suffix: str
) -> None:
    stored = Image.fromarray(squares(COLOURS[None].astype(np.uint8)))
    stored.save(tmp_path / f"x{suffix}", icc_profile=profile, quality=100, subsampling=0, lossless=True)
    picture = read_picture(tmp_path / f"x{suffix}")
    expected = expected_srgb(COLOURS, primaries, gamma)
    assert np.abs(expected - COLOURS).max() > 8, "the profile makes a difference"
    np.testing.assert_allclose(levels(picture)[8, 8::16], expected, atol=3 if suffix == ".jpg" else 1.2)
    assert picture.notices == ()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA"])
def test_a_profile_applies_to_every_mode_of_rgb(mode: str) -> None:
    colour = np.array([[90, 90, 90] if mode == "L" else [180, 90, 60]])
    image = Image.new("RGB", (2, 2), tuple(colour[0])).convert(mode, palette=Image.Palette.ADAPTIVE)
    image.info["icc_profile"] = ADOBE_PROFILE
    expected = expected_srgb(colour, ADOBE_RGB, 563 / 256)[0]
    picture = read_picture(image)
    np.testing.assert_allclose(levels(picture)[0, 0], expected, atol=1.2)
    assert picture.notices == ()


def test_a_grey_profile_is_converted_to_srgb() -> None:
    image = Image.fromarray(np.array([[0, 20, 60, 128, 255]], dtype=np.uint8))
    image.info["icc_profile"] = grey_profile(STEPS)  # linear light
    expected = 255 * encode_srgb(np.array([0, 20, 60, 128, 255]) / 255)
    np.testing.assert_allclose(levels(read_picture(image))[0], np.stack([expected] * 3, axis=-1), atol=1.2)


def test_values_in_srgb_stay_exactly_as_they_are(tmp_path: Path) -> None:
    stored = (ramp() * 255).round()[0].permute(1, 2, 0).numpy().astype(np.uint8)
    Image.fromarray(stored).save(tmp_path / "x.png", icc_profile=SRGB_PROFILE)
    np.testing.assert_array_equal(levels(read_picture(tmp_path / "x.png")).round(4), stored)


def test_sixteen_bits_in_srgb_are_all_kept(tmp_path: Path) -> None:
    stored = np.arange(7 * 9 * 3, dtype=np.uint16).reshape(7, 9, 3) * 321
    tifffile.imwrite(tmp_path / "x.tif", stored, photometric="rgb", iccprofile=SRGB_PROFILE)
    picture = read_picture(tmp_path / "x.tif")
    np.testing.assert_array_equal(unit(picture), stored / np.float32(65535))
    assert picture.notices == ()


def test_sixteen_bits_in_another_profile_are_converted_and_it_is_said(tmp_path: Path) -> None:
    stored = COLOURS[None].astype(np.uint16) * 257
    tifffile.imwrite(tmp_path / "x.tif", stored, photometric="rgb", iccprofile=P3_PROFILE)
    picture = read_picture(tmp_path / "x.tif")
    np.testing.assert_allclose(levels(picture)[0], expected_srgb(COLOURS, DISPLAY_P3, None), atol=1.2)
    (notice,) = picture.notices
    assert "8 bits" in notice


@pytest.mark.parametrize("profile", [b"no profile", P3_PROFILE[:200], grey_profile(STEPS)], ids=len)
def test_an_unusable_profile_is_a_notice_and_no_error(tmp_path: Path, profile: bytes) -> None:
    Image.new("RGB", (2, 2), (200, 90, 60)).save(tmp_path / "x.png", icc_profile=profile)
    picture = read_picture(tmp_path / "x.png")
    np.testing.assert_allclose(levels(picture)[0, 0], (200, 90, 60), atol=1e-3)
    (notice,) = picture.notices
    assert notice.startswith("x.png has a colour profile that cannot be used")


def test_adobe_rgb_without_a_profile_is_said(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.IFD.Exif] = {int(ExifTags.IFD.Interop): {1: "R03"}}
    Image.new("RGB", (2, 2)).save(tmp_path / "x.jpg", exif=exif)
    (notice,) = read_picture(tmp_path / "x.jpg").notices
    assert "Adobe RGB" in notice


# ---- CMYK, Lab and the other modes --------------------------------------------------------------------


def lab_to_srgb(lab: tuple[float, float, float]) -> npt.NDArray[np.float64]:
    """CIE Lab under D50 -> sRGB in 0 … 255 (CIE 15:2004, IEC 61966-2-1)."""
    y = (lab[0] + 16) / 116
    f = np.array([y + lab[1] / 500, y, y - lab[2] / 200])
    relative = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29))
    linear = np.linalg.inv(adapted_to_d50() @ to_xyz(SRGB)) @ (relative * D50_XYZ)
    return 255 * encode_srgb(linear.clip(0, 1))


Inks: TypeAlias = tuple[int, ...]
# Full inks (C, M, Y, K) and their Lab on paper; every mixture of them is black.
INKS: dict[Inks, tuple[int, int, int]] = {
    (0, 0, 0, 0): (100, 0, 0),
    (1, 0, 0, 0): (60, -20, -25),
    (0, 1, 0, 0): (50, 45, 5),
    (0, 0, 1, 0): (85, 0, 55),
    (0, 0, 0, 1): (20, 0, 0),
}


def cmyk_profile() -> bytes:
    """A press as a table of the 16 mixtures of full inks (ICC.1:2001-04, 6.5.9, lut8Type)."""
    identity = bytes(range(256))
    table = b""
    for corner in np.ndindex(2, 2, 2, 2):
        lightness, a, b = INKS.get(corner, (0, 0, 0))
        table += bytes((round(lightness * 255 / 100), a + 128, b + 128))
    lut = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    lut += identity * 4 + table + identity * 3
    tags = {b"wtpt": b"XYZ \0\0\0\0" + fixed(*D50_XYZ), b"A2B0": lut, b"A2B1": lut}
    return icc(b"prtr", b"CMYK", b"Lab ", tags)


@pytest.mark.parametrize("inks", INKS)
@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_converted_through_its_profile(tmp_path: Path, inks: Inks, kind: str) -> None:
    image = Image.new("CMYK", (16, 16), tuple(255 * ink for ink in inks))
    image.save(tmp_path / "x", kind, icc_profile=cmyk_profile())
    picture = read_picture(tmp_path / "x")
    np.testing.assert_allclose(levels(picture)[8, 8], lab_to_srgb(INKS[inks]), atol=3)
    assert picture.notices == ()


def test_cmyk_without_a_profile_is_a_guess_and_it_is_said(tmp_path: Path) -> None:
    stored = np.zeros((16, 64, 4), dtype=np.uint8)
    stored[:, 16:32, 3] = 255  # all black ink: not a transparent picture
    stored[:, 32:48, 1:3] = 255  # magenta and yellow make red
    stored[:, 48:, 0] = 255
    image = Image.merge("CMYK", [Image.fromarray(stored[..., i]) for i in range(4)])
    image.save(tmp_path / "x.jpg", quality=95)  # inverted, as Adobe does
    picture = read_picture(tmp_path / "x.jpg")
    expected = [(255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 255, 255)]
    np.testing.assert_allclose(levels(picture)[8, 8::16], expected, atol=3)
    assert picture.alpha is None
    (notice,) = picture.notices
    assert notice.startswith("x.jpg is CMYK without")


def test_lab_is_converted() -> None:
    image = Image.new("LAB", (1, 1), (153, 128 + 20, 128 - 30))  # 153 = 60 % of 255
    expected = lab_to_srgb((60, 20, -30))
    np.testing.assert_allclose(levels(read_picture(image))[0, 0], expected, atol=2)


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 100, (100, 100, 100)),
        ("RGBX", (10, 20, 30, 40), (10, 20, 30)),
        ("HSV", (0, 255, 200), (200, 0, 0)),
        ("YCbCr", (100, 128, 128), (100, 100, 100)),
        ("I;16", 257 * 100, (100, 100, 100)),
        ("I;16B", 257 * 100, (100, 100, 100)),
        ("I", 257 * 100, (100, 100, 100)),
        ("F", 0.5, (127.5, 127.5, 127.5)),
        ("LA", (100, 255), (100, 100, 100)),
        ("La", (100, 255), (100, 100, 100)),
        ("RGBa", (10, 20, 30, 255), (10, 20, 30)),
    ],
)
def test_every_mode_is_read(mode: str, value: Any, expected: tuple[float, float, float]) -> None:
    picture = read_picture(Image.new(mode, (3, 2), value))
    assert_is_picture(picture)
    np.testing.assert_allclose(levels(picture), np.broadcast_to(expected, (2, 3, 3)), atol=1e-3)
    assert picture.alpha is None
    assert picture.notices == ()


def test_a_palette_is_resolved(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    for suffix in (".png", ".gif", ".tif", ".bmp"):
        image.save(tmp_path / f"x{suffix}")
        picture = read_picture(tmp_path / f"x{suffix}")
        np.testing.assert_allclose(levels(picture)[0], [[10, 20, 30], [200, 100, 50]], atol=1e-3)


# ---- more than 8 bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".tif", ".pgm"])
def test_grey_of_sixteen_bits_keeps_its_values(tmp_path: Path, suffix: str) -> None:
    stored = np.array([[0, 1, 255, 256, 40_000, 65_535]], dtype=np.uint16)
    path = tmp_path / f"x{suffix}"
    if suffix == ".pgm":
        path.write_bytes(b"P5 6 1 65535\n" + stored.astype(">u2").tobytes())
    else:
        Image.fromarray(stored).save(path)
    picture = read_picture(path)
    expected = np.stack([stored / np.float32(65_535)] * 3)
    np.testing.assert_allclose(picture.tensor[0].numpy(), expected, rtol=1e-6)
    assert len(torch.unique(picture.tensor)) == 6


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planes", ["contig", "separate"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_rgb_of_sixteen_bits_keeps_its_values(
    tmp_path: Path, order: Any, planes: str, compression: str | None
) -> None:
    stored = np.arange(3 * 4 * 5, dtype=np.uint16).reshape(4, 5, 3) * 1000
    tifffile.imwrite(
        tmp_path / "x.tif",
        stored if planes == "contig" else np.moveaxis(stored, -1, 0),
        photometric="rgb",
        planarconfig=planes,
        byteorder=order,
        compression=compression,
    )
    picture = read_picture(tmp_path / "x.tif")
    np.testing.assert_array_equal(unit(picture), stored / np.float32(65_535))
    assert probe_size(tmp_path / "x.tif") == picture.size == (5, 4)


def test_a_png_of_sixteen_bits_is_scaled(tmp_path: Path) -> None:
    row = b"\0" + struct.pack(">6H", *(257 * level for level in (10, 20, 30, 200, 100, 50)))
    (tmp_path / "x.png").write_bytes(png(2, 1, bits=16, colour=2, rows=row))
    picture = read_picture(tmp_path / "x.png")
    np.testing.assert_allclose(levels(picture)[0], [[10, 20, 30], [200, 100, 50]], atol=0.6)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u4"])
def test_other_tiffs_are_read_at_their_own_scale(tmp_path: Path, dtype: str) -> None:
    values = np.array([[[0, 0.25, 0.5], [1, 0.75, 0.125]]])
    stored = values.astype(dtype) if dtype[0] == "f" else (values * (2**32 - 1)).astype(dtype)
    tifffile.imwrite(tmp_path / "x.tif", stored, photometric="rgb")
    np.testing.assert_allclose(unit(read_picture(tmp_path / "x.tif")), values, atol=1e-6)


def test_four_bits_of_grey_reach_white(tmp_path: Path) -> None:
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, np.array([[0x0F, 0x3C]], np.uint8), photometric="minisblack")
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags["BitsPerSample"].overwrite(4)
        tiff.pages[0].tags["ImageWidth"].overwrite(4)
    np.testing.assert_allclose(levels(read_picture(path))[0, :, 0], [0, 255, 51, 204], atol=1e-3)


def test_white_can_be_nought(tmp_path: Path) -> None:
    stored = np.array([[0, 65_535, 13_107]], dtype=np.uint16)
    tifffile.imwrite(tmp_path / "x.tif", stored, photometric="miniswhite")
    np.testing.assert_allclose(levels(read_picture(tmp_path / "x.tif"))[0, :, 0], [255, 0, 204], atol=1e-3)


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), float("inf")])
def test_floats_beyond_a_picture_are_refused(tmp_path: Path, value: float) -> None:
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, np.full((2, 2, 3), value, np.float32), photometric="rgb")
    with pytest.raises(PictureError, match=r"x\.tif holds values from"):
        read_picture(path)


def test_a_compression_that_is_not_known_in_sixteen_bits_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asarray(page: tifffile.TiffPage) -> None:
        raise ValueError("<COMPRESSION.LZW: 5> requires the 'imagecodecs' package")

    tifffile.imwrite(tmp_path / "x.tif", COLOURS[None].astype(np.uint16) * 257, photometric="rgb")
    monkeypatch.setattr(tifffile.TiffPage, "asarray", asarray)
    picture = read_picture(tmp_path / "x.tif")
    np.testing.assert_allclose(levels(picture)[0], COLOURS, atol=0.6)
    (notice,) = picture.notices
    assert "imagecodecs" in notice


# ---- transparency -------------------------------------------------------------------------------------


def transparent(kind: str) -> Image.Image:
    """Two pixels: a colour of level 60, opaque; and one that is covered to 0 or to 51/255."""
    if kind == "P with one index":
        image = Image.new("P", (2, 1))
        image.putpalette([60, 60, 60, 9, 9, 9])
        image.putpixel((1, 0), 1)
        image.info["transparency"] = 1
        return image
    if kind == "P with a table":
        image = transparent("P with one index")
        image.info["transparency"] = bytes((255, 51))
        return image
    if kind == "PA":
        return transparent("P with one index").convert("PA")
    if kind in ("L with a key", "RGB with a key"):
        image = Image.new(kind.split()[0], (2, 1), (60, 60, 60) if kind[0] == "R" else 60)
        image.putpixel((1, 0), (9, 9, 9) if kind[0] == "R" else 9)
        image.info["transparency"] = (9, 9, 9) if kind[0] == "R" else 9
        return image
    image = Image.new(kind, (2, 1), (60, 255) if kind == "LA" else (60, 60, 60, 255))
    image.putpixel((1, 0), (60, 51) if kind == "LA" else (60, 60, 60, 51))
    return image


@pytest.mark.parametrize(
    ("kind", "cover", "colour"),
    [
        ("LA", 51, 60),
        ("RGBA", 51, 60),
        ("P with one index", 0, 9),
        ("P with a table", 51, 9),
        ("L with a key", 0, 9),
        ("RGB with a key", 0, 9),
    ],
)
@pytest.mark.parametrize("via", ["PNG", "memory"])
def test_transparency_is_laid_on_white_and_kept(kind: str, cover: int, colour: int, via: str) -> None:
    image = transparent(kind)
    if via == "PNG":
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        image = Image.open(buffer)
    picture = read_picture(image)
    assert picture.alpha is not None
    assert picture.alpha.shape == (1, 1, 1, 2)
    np.testing.assert_allclose(picture.alpha.flatten().numpy() * 255, [255, cover], atol=1e-3)
    on_white = colour * cover / 255 + 255 * (1 - cover / 255)
    np.testing.assert_allclose(levels(picture)[0, :, 1], np.array([60, on_white]), atol=1e-3)


def test_a_grey_png_of_sixteen_bits_can_be_transparent(tmp_path: Path) -> None:
    rows = b"\0" + struct.pack(">2H", 60 * 257, 9)
    path = tmp_path / "x.png"
    path.write_bytes(png(2, 1, bits=16, colour=0, rows=rows, more=chunk(b"tRNS", struct.pack(">H", 9))))
    picture = read_picture(path)
    assert picture.alpha is not None
    assert picture.alpha.flatten().tolist() == [1, 0]
    np.testing.assert_allclose(levels(picture)[0, :, 0], [60, 255], atol=1e-3)


@pytest.mark.parametrize("kind", ["unassalpha", "assocalpha"])
def test_a_tiff_of_sixteen_bits_can_be_transparent(tmp_path: Path, kind: str) -> None:
    cover = np.array([0, 13_107, 65_535])
    colour = np.array([0, 30_000, 30_000])
    stored = colour * cover // 65_535 if kind == "assocalpha" else colour
    stored[0] += 1  # more than its cover, by rounding
    array = np.stack([stored, stored, stored, cover], axis=-1)[None].astype(np.uint16)
    tifffile.imwrite(tmp_path / "x.tif", array, photometric="rgb", extrasamples=[kind])
    picture = read_picture(tmp_path / "x.tif")
    assert picture.alpha is not None
    np.testing.assert_allclose(picture.alpha.flatten().numpy(), [0, 0.2, 1], atol=1e-6)
    expected = np.array([1, 0.2 * 30_000 / 65_535 + 0.8, 30_000 / 65_535])
    np.testing.assert_allclose(picture.tensor[0, 0, 0].numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_opaque_alpha_is_no_alpha(mode: str) -> None:
    assert read_picture(Image.new("RGBA", (2, 2), (9, 8, 7, 255)).convert(mode)).alpha is None


# ---- several frames -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_only_the_first_frame_is_read_and_it_is_said(tmp_path: Path, kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(tmp_path / "cats", kind, save_all=True, append_images=frames[1:], **lossless)
    picture = read_picture(tmp_path / "cats")
    np.testing.assert_allclose(levels(picture)[4, 4], (250, 0, 0), atol=1e-3)
    (notice,) = picture.notices
    what = "has 3 pages; only the first" if kind == "TIFF" else "is animated; only its first frame"
    assert notice == f"cats {what} is used."


def test_the_previews_of_a_camera_are_no_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), (9, 9, 9)) for _ in range(2)]
    frames[0].save(tmp_path / "x.jpg", "MPO", save_all=True, append_images=frames[1:])
    assert read_picture(tmp_path / "x.jpg").notices == ()


def test_a_preview_in_front_is_said(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "raw.nef", np.zeros((2, 2, 3), np.uint8), photometric="rgb", subfiletype=1)
    (notice,) = read_picture(tmp_path / "raw.nef").notices
    assert "preview" in notice


# ---- what is no picture -------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *, bits: int, colour: int, rows: bytes, more: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def assert_refused(path: Path, because: str) -> None:
    for read in (read_picture, probe_size):
        with pytest.raises(PictureError, match=because) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert str(caught.value).count(". ") >= 1, "a remedy follows"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.png", "There is no file")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, "is a folder")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").touch()
    assert_refused(tmp_path / "x.png", "is empty")


@pytest.mark.parametrize("content", [b"Hello, world.\n", b"<svg/>", b"%!PS-Adobe-3.0", b"\0" * 99])
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jpg").write_bytes(content)
    assert_refused(tmp_path / "x.jpg", "is not a picture")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    assert_refused(tmp_path / "x.png", "is not a regular file")


def test_a_name_that_cannot_be_is_refused() -> None:
    for name in ("a\0b.png", "x" * 5000 + ".png"):
        with pytest.raises(PictureError):
            read_picture(name)


def test_a_forbidden_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_picture(ramp(), tmp_path / "x.png")

    def forbidden(self: Path, *args: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", forbidden)
    assert_refused(path, "Permission denied")


@pytest.mark.parametrize("suffix", [*FORMATS, ".gif", ".bmp", ".jp2"])
def test_a_picture_that_is_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    whole = tmp_path / f"whole{suffix}"
    if suffix in FORMATS:
        save_picture(ramp(40, 30), whole)
    else:
        to_pil(ramp(40, 30)).save(whole)
    data = whole.read_bytes()
    for share in (0.02, 0.1, 0.3, 0.5, 0.8, 0.95):
        path = tmp_path / f"cut{suffix}"
        path.write_bytes(data[: int(share * len(data))])
        with pytest.raises(PictureError, match=r"Copy or download it again|Save it as") as caught:
            read_picture(path)
        assert str(path) in str(caught.value)


def test_a_tiff_with_a_hole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, np.ones((4, 4, 3), np.uint16), photometric="rgb", rowsperstrip=2)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags["StripByteCounts"].overwrite((48, 0))
    with pytest.raises(PictureError, match=r"x\.tif lacks a part of its pixels"):
        read_picture(path)


@given(st.integers(0, 10_000), st.integers(1, 255), st.sampled_from(FORMATS))
@few
def test_a_flipped_byte_gives_a_picture_or_a_picture_error(where: int, change: int, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_picture(ramp(12, 9), Path(folder) / f"x{suffix}")
        data = bytearray(path.read_bytes())
        data[where % len(data)] ^= change
        path.write_bytes(data)
        try:
            assert_is_picture(read_picture(path, max_pixels=100_000))
        except PictureError as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("source", [3, None, b"x.png", ["x.png"]])
def test_what_cannot_be_a_source_is_refused(source: Any) -> None:
    with pytest.raises(InputError, match=f"cannot be a {type(source).__name__}"):
        read_picture(source)


# ---- the limit on pixels ------------------------------------------------------------------------------


def test_a_huge_picture_is_refused_from_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(60_000, 50_000, bits=8, colour=2, rows=b""))
    with pytest.raises(PictureError, match=r"bomb\.png has 60000 x 50000 = 3,000,000,000 pixels") as caught:
        read_picture(path)
    assert f"{DEFAULT_MAX_PIXELS:,}" in str(caught.value)
    assert "--max-pixels 3000000000" in str(caught.value)
    assert probe_size(path) == (60_000, 50_000)


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_limit_is_exact(tmp_path: Path, suffix: str) -> None:
    path = save_picture(ramp(16, 8), tmp_path / f"x{suffix}")
    assert read_picture(path, max_pixels=128).size == (16, 8)
    for source in (path, opened(path)):
        with pytest.raises(PictureError, match="128 pixels; the limit is 127"):
            read_picture(source, max_pixels=127)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tiff", ".gif", ".bmp"])
def test_pillows_own_limit_is_neither_met_nor_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    to_pil(ramp(16, 8)).save(path)
    for limit in (100, 10):  # Pillow would warn, and refuse
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert read_picture(path).size == (16, 8)
        assert limit == Image.MAX_IMAGE_PIXELS
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


# ---- tensors and arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_is_a_picture(dtype: torch.dtype) -> None:
    tensor = (ramp() > 0.5).to(dtype).requires_grad_()
    for given_tensor in (tensor, tensor[0], tensor.to(memory_format=torch.channels_last)):
        picture = read_picture(given_tensor)
        assert_is_picture(picture)
        assert torch.equal(picture.tensor, tensor.detach().float())
        assert not picture.tensor.requires_grad
        assert picture.source == "a tensor"


def test_a_picture_does_not_share_memory_with_its_source() -> None:
    tensor, array = ramp(), ramp()[0].numpy()
    pictures = read_picture(tensor), read_picture(array)
    tensor.zero_()
    array[:] = 0
    assert all(torch.equal(picture.tensor, ramp()) for picture in pictures)


@pytest.mark.parametrize("dtype", ["f2", "<f4", ">f4", "f8"])
def test_an_array_is_a_picture(dtype: str) -> None:
    array = (ramp() > 0.5).numpy().astype(dtype)
    for given_array in (array, array[0], array[0].transpose(1, 2, 0), array[0, :, :, ::-1][:, :, ::-1]):
        picture = read_picture(given_array)
        assert_is_picture(picture)
        np.testing.assert_array_equal(picture.tensor.numpy(), array)
        assert picture.source == "an array"


def test_an_array_of_bytes_is_a_picture() -> None:
    array = (ramp()[0].permute(1, 2, 0) * 255).round().numpy().astype(np.uint8)
    assert torch.equal(read_picture(array).tensor, ramp())


@pytest.mark.parametrize(
    "shape", [(3,), (3, 4), (1, 4, 5), (4, 4, 5), (2, 3, 4, 5), (1, 1, 4, 5), (1, 4, 5, 3), (3, 0, 5)]
)
def test_another_shape_is_refused_with_its_numbers(shape: tuple[int, ...]) -> None:
    for source in (torch.zeros(shape), np.zeros(shape, np.float32)):
        with pytest.raises(InputError, match="has the shape") as caught:
            read_picture(source)
        assert str(list(shape)) in str(caught.value)
        assert "float32" in str(caught.value)


@pytest.mark.parametrize("source", [torch.zeros(3, 4, 5, dtype=torch.uint8), np.zeros((3, 4, 5), np.uint8)])
def test_another_type_is_refused_with_its_name(source: Any) -> None:
    with pytest.raises(InputError, match="uint8"):
        read_picture(source)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 1.0), (0.0, 1.01), (0.0, 255.0)])
def test_values_outside_are_refused_with_their_range(low: float, high: float) -> None:
    tensor = torch.tensor([low, high, 0.5]).view(3, 1, 1)
    for source in (tensor, tensor.numpy()):
        with pytest.raises(InputError, match=rf"from {low:g} to {high:g}; .*\[0, 1\]"):
            read_picture(source)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    tensor = ramp()
    tensor[0, 1, 2, 3] = value
    with pytest.raises(InputError, match="infinite or not numbers"):
        read_picture(tensor)
    with pytest.raises(InputError, match="infinite or not numbers"):
        save_picture(tensor, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_to_pil_rounds_to_the_nearest_level_and_clamps() -> None:
    values = torch.tensor([-0.5, 0.4 / 255, 0.6 / 255, 99.51 / 255, 254.4 / 255, 254.6 / 255, 1.7])
    image = to_pil(values.view(1, 1, 1, -1).repeat(1, 3, 1, 1))
    assert image.mode == "RGB"
    assert [image.getpixel((x, 0)) for x in range(7)] == [(v, v, v) for v in (0, 0, 1, 100, 254, 255, 255)]


def test_to_pil_with_alpha_gives_the_picture_again_on_white() -> None:
    alpha = torch.tensor([0, 51, 128, 255]).div(255).view(1, 1, 1, 4)
    colour = torch.tensor([200, 30, 90]).div(255).view(1, 3, 1, 1)
    image = to_pil(colour * alpha + 1 - alpha, alpha)
    assert image.mode == "RGBA"
    assert [image.getpixel((x, 0)) for x in (1, 2, 3)] == [(200, 30, 90, a) for a in (51, 128, 255)]


@pytest.mark.parametrize("alpha", [torch.ones(1, 1, 4, 4), torch.ones(8, 16), torch.ones(1, 1, 8, 16).byte()])
def test_alpha_of_another_size_is_refused(alpha: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"alpha has the shape .* \[1, 1, 8, 16\]"):
        to_pil(ramp(), alpha)


# ---- where a picture may go ---------------------------------------------------------------------------


def test_an_unknown_extension_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"x\.jgp.*Did you mean \.jpg\?"):
        check_output(tmp_path / "new" / "x.jgp", overwrite=False)
    with pytest.raises(OutputError, match=r"Formats: \.png"):
        check_output(tmp_path / "x", overwrite=False)
    with pytest.raises(OutputError):
        save_picture(ramp(), tmp_path / "new" / "x.gif")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".PNG", ".Jpg"])
def test_known_extensions_are_accepted_in_any_case(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    assert check_output(path, overwrite=False) == path
    assert list(tmp_path.iterdir()) == [], "checking leaves nothing behind"
    save_picture(ramp(), path)
    kind = {"jpg": "JPEG", "jpeg": "JPEG", "tif": "TIFF"}.get(suffix[1:].lower(), suffix[1:].upper())
    assert opened(path).format == kind


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b" / "x.png", overwrite=False)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.png", tmp_path / "file" / "b" / "x.png"):
        with pytest.raises(OutputError, match="cannot be written") as caught:
            check_output(path, overwrite=True)
        assert str(path) in str(caught.value)


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    with pytest.raises(OutputError, match=r"x\.png is a folder"):
        check_output(tmp_path / "x.png", overwrite=True)


@pytest.mark.parametrize("name", ["a\0b.png", "x" * 300 + ".png"])
def test_a_name_that_cannot_be_is_no_output(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        check_output(tmp_path / name, overwrite=True)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(**options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", forbidden)
    with pytest.raises(OutputError, match=r"x\.png cannot be written: Permission denied"):
        check_output(tmp_path / "x.png", overwrite=False)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        check_output(tmp_path / "locked" / "x.png", overwrite=False)


def test_a_result_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = save_picture(flat((1, 2, 3)), tmp_path / "x.png")
    with pytest.raises(OutputError, match=r"x\.png exists already.*--overwrite"):
        check_output(path, overwrite=False)
    with pytest.raises(OutputError, match=r"x\.png exists already.*--overwrite"):
        save_picture(ramp(), path)
    assert torch.equal(read_picture(path).tensor, flat((1, 2, 3)))
    save_picture(ramp(), check_output(path, overwrite=True), overwrite=True)
    assert torch.equal(read_picture(path).tensor, ramp())


@pytest.mark.parametrize(("name", "longest"), [("x.jpg", 65_500), ("x.webp", 16_383)])
def test_a_size_that_the_format_cannot_hold_is_refused(tmp_path: Path, name: str, longest: int) -> None:
    for size in ((longest + 1, 2), (2, longest + 1)):
        with pytest.raises(OutputError, match=r"Choose \.png or \.tiff"):
            check_output(tmp_path / name, overwrite=False, size=size)
        for other in ("x.png", "x.tiff"):
            check_output(tmp_path / other, overwrite=False, size=size)
    save_picture(flat((9, 9, 9), (longest, 1)), tmp_path / name)  # the limit itself is within it
    assert probe_size(tmp_path / name) == (longest, 1)


# ---- what is written ----------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(*[st.integers(0, 255)] * 3),
    st.sampled_from(FORMATS),
)
@few
def test_a_flat_colour_survives(size: tuple[int, int], colour: tuple[int, int, int], suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_picture(flat(colour, size), Path(folder) / f"x{suffix}")
        picture = read_picture(path)
    assert picture.size == size
    if suffix in (".png", ".tiff"):
        assert torch.equal(picture.tensor, flat(colour, size))
    else:
        assert float((picture.tensor - flat(colour, size)).abs().max()) * 255 < 2.01


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_what_is_written_is_read_again_exactly(tmp_path: Path, suffix: str) -> None:
    path = save_picture(ramp(), tmp_path / f"x{suffix}")
    picture = read_picture(path)
    assert torch.equal(picture.tensor, ramp())
    assert (picture.alpha, picture.notices) == (None, ())


def test_a_tiff_has_sixteen_bits(tmp_path: Path) -> None:
    values = torch.linspace(0, 1, 3 * 8 * 16).view(1, 3, 8, 16)
    path = save_picture(values, tmp_path / "x.tiff")
    assert float((read_picture(path).tensor - values).abs().max()) <= 0.5 / 65_535 + 1e-7


def test_values_outside_are_clamped(tmp_path: Path) -> None:
    tensor = torch.tensor([-3.0, 0.0, 2.0]).view(1, 3, 1, 1)
    for suffix in (".png", ".tiff"):
        path = save_picture(tensor, tmp_path / f"x{suffix}")
        assert read_picture(path).tensor.flatten().tolist() == [0, 0, 1]
    assert tensor.flatten().tolist() == [-3, 0, 2], "the tensor itself is left alone"


@pytest.mark.parametrize("suffix", FORMATS)
def test_alpha_is_kept_where_the_format_can(tmp_path: Path, suffix: str) -> None:
    alpha = torch.arange(0, 256, 17).div(255).view(1, 1, 1, 16).repeat(1, 1, 8, 1)
    colour = flat((200, 90, 60), (16, 8)) if suffix == ".webp" else ramp()
    on_white = colour * alpha + 1 - alpha
    picture = read_picture(save_picture(on_white, tmp_path / f"x{suffix}", alpha=alpha))
    if suffix == ".jpg":
        assert picture.alpha is None
        return
    assert picture.alpha is not None
    assert float((picture.alpha - alpha).abs().max()) < 1e-6
    allowed = 6 / 255 if suffix == ".webp" else 1e-6
    assert float((picture.tensor - on_white).abs().max()) < allowed


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_result_is_marked_as_srgb_upright_and_by_whom(tmp_path: Path, suffix: str) -> None:
    image = opened(save_picture(ramp(), tmp_path / f"x{suffix}"))
    profile = ImageCms.getOpenProfile(io.BytesIO(image.info["icc_profile"]))
    assert "sRGB" in ImageCms.getProfileDescription(profile)
    assert ExifTags.Base.Orientation not in image.getexif()
    software = image.info.get("Software") or image.getexif()[ExifTags.Base.Software]
    assert software.startswith("stylize ")


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_same_picture_gives_the_same_bytes_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    record = {"seed": 0, "losses": [0.1, 0.2]}
    first = save_picture(ramp(), tmp_path / f"a{suffix}", record=record).read_bytes()
    made = ImageCms.ImageCmsProfile.tobytes

    def made_in_1990(profile: ImageCms.ImageCmsProfile) -> bytes:
        data = made(profile)
        return data[:24] + struct.pack(">6H", 1990, 5, 5, 5, 5, 5) + data[36:]

    monkeypatch.setattr(ImageCms.ImageCmsProfile, "tobytes", made_in_1990)
    assert save_picture(ramp(), tmp_path / f"b{suffix}", record=record).read_bytes() == first


def test_a_jpeg_keeps_all_of_its_colour(tmp_path: Path) -> None:
    image = opened(save_picture(ramp(), tmp_path / "x.jpg"))
    assert JpegImagePlugin.get_sampling(image) == 0  # 4:4:4


def test_quality_makes_a_difference(tmp_path: Path) -> None:
    for suffix in (".jpg", ".webp"):
        sizes = [
            save_picture(ramp(64, 64), tmp_path / f"{quality}{suffix}", quality=quality).stat().st_size
            for quality in (30, 95)
        ]
        assert sizes[0] < sizes[1]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's here")
def test_a_result_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    path = save_picture(ramp(), tmp_path / "x.png")
    (tmp_path / "y").touch()
    assert path.stat().st_mode == (tmp_path / "y").stat().st_mode


# ---- whole or not at all ------------------------------------------------------------------------------


def full_disk(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(("failure", "error"), [(full_disk, SaveError), (interrupted, KeyboardInterrupt)])
def test_a_failure_leaves_the_old_result_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    step: str,
    failure: Any,
    error: type[BaseException],
) -> None:
    path = save_picture(flat((1, 2, 3)), tmp_path / f"x{suffix}")
    before = path.read_bytes()
    monkeypatch.setattr(os, step, failure)
    with pytest.raises(error) as caught:
        save_picture(ramp(), path, overwrite=True)
    if error is SaveError:
        assert str(path) in str(caught.value)
        assert "No space left" in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


@pytest.mark.parametrize("step", ["fsync", "link"])
@pytest.mark.parametrize(("failure", "error"), [(full_disk, SaveError), (interrupted, KeyboardInterrupt)])
def test_a_failure_leaves_no_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: Any, error: type[BaseException]
) -> None:
    monkeypatch.setattr(os, step, failure)
    if step == "link":
        monkeypatch.setattr(os, "replace", failure)  # what is tried where there are no links
    with pytest.raises(error):
        save_picture(ramp(), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_to_encode_is_a_save_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "save", full_disk)
    with pytest.raises(SaveError, match=r"x\.png could not be written"):
        save_picture(ramp(), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    path = tmp_path / "x.png"

    def other_program(handle: int) -> None:
        path.write_text("mine")

    def no_links(*arguments: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fsync", other_program)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(SaveError, match=r"x\.png"):
        save_picture(ramp(), path)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", full_disk)
    assert torch.equal(read_picture(save_picture(ramp(), tmp_path / "x.png")).tensor, ramp())


def test_the_longest_name_that_a_folder_takes_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".png")  # 254 bytes of 255
    assert save_picture(ramp(), path).exists()


# ---- the record ---------------------------------------------------------------------------------------

RECORD: dict[str, Any] = {
    "settings": {"content_weight": 0.25, "style_layers": ["relu1_1", "relu5_1"], "size": None},
    "content": "2023李 “été”.jpg",
    "losses": {"content": 0.1 + 0.2, "style": 1e-12},
    "history": [{"evaluation": i, "loss": 1 / (i + 1)} for i in range(5)],
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_record_is_read_again_as_it_was(tmp_path: Path, suffix: str) -> None:
    path = save_picture(ramp(), tmp_path / f"x{suffix}", record=RECORD)
    assert read_record(path) == RECORD
    assert read_record(str(path)) == RECORD


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_record_does_not_change_the_picture(tmp_path: Path, suffix: str) -> None:
    pictures = [
        read_picture(save_picture(ramp(), tmp_path / f"{len(record)}{suffix}", record=record)).tensor
        for record in ({}, RECORD)
    ]
    assert torch.equal(*pictures)


@pytest.mark.parametrize("suffix", [".png", ".webp", ".tiff"])
def test_a_long_record_is_kept(tmp_path: Path, suffix: str) -> None:
    record = {"history": [i / 7 for i in range(100_000)]}  # about 2 MB
    assert read_record(save_picture(ramp(), tmp_path / f"x{suffix}", record=record)) == record


def test_a_jpeg_leaves_out_the_history_before_all_else(tmp_path: Path) -> None:
    record = {"settings": {"size": 512}, "prompt": "x" * 30_000, "history": ["y" * 20_000, "z" * 20_000]}
    path = save_picture(ramp(), tmp_path / "x.jpg", record=record)
    assert read_record(path) == {"settings": {"size": 512}, "prompt": "x" * 30_000}
    record["prompt"] = "x" * 80_000
    path = save_picture(ramp(), tmp_path / "y.jpg", record=record)
    assert read_record(path) == {"settings": {"size": 512}}


@given(st.integers(64_900, 65_700))
@few
def test_a_jpeg_takes_a_record_of_any_length(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_picture(flat((1, 2, 3)), Path(folder) / "x.jpg", record={"a": "x" * length})
        assert read_record(path) in ({}, {"a": "x" * length})


def test_what_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    record = {"content": Path("a") / "b.jpg", "layers": ("a", "b")}
    path = save_picture(ramp(), tmp_path / "x.png", record=record)
    assert read_record(path) == {"content": str(Path("a") / "b.jpg"), "layers": ["a", "b"]}


@pytest.mark.parametrize("suffix", [*FORMATS, ".gif"])
def test_a_picture_without_a_record_is_said_to_have_none(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    to_pil(ramp()).save(path)
    with pytest.raises(PictureError, match=rf"x\{suffix} holds no settings"):
        read_record(path)


def test_the_notes_of_other_programs_are_no_record(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "x.tif", np.zeros((2, 2), np.uint8), description='{"shape": 2}')
    exif = Image.Exif()
    exif[ExifTags.IFD.Exif] = {int(ExifTags.Base.UserComment): b"UNICODE\0\xff\xfeh\0i\0"}
    to_pil(ramp()).save(tmp_path / "x.jpg", exif=exif)
    texts = PngInfo()
    texts.add_itxt("stylize", json.dumps(["a list"]))
    to_pil(ramp()).save(tmp_path / "x.png", pnginfo=texts)
    for path in tmp_path.iterdir():
        with pytest.raises(PictureError, match="holds no settings"):
            read_record(path)


def test_settings_that_are_no_settings_are_not_read(tmp_path: Path) -> None:
    for value in (5, None, ["size"]):
        path = save_picture(ramp(), tmp_path / "x.png", record={"settings": value}, overwrite=True)
        with pytest.raises(PictureError, match=r"x\.png .* settings are missing"):
            read_settings(path)


def test_settings_of_a_newer_release_are_refused_with_its_file_and_release(tmp_path: Path) -> None:
    for settings_ in ({"strokes": 7}, {"quality": "superb"}):
        record = {"version": "9.9", "settings": settings_}
        path = save_picture(ramp(), tmp_path / "x.png", record=record, overwrite=True)
        with pytest.raises(SettingsError, match=r"x\.png: .*(strokes|superb).*9\.9"):
            read_settings(path)


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(PictureError, match="no pixels"):
        read_picture(Image.new("RGB", (0, 5)))


def test_no_record_is_read_from_what_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("no picture")
    with pytest.raises(PictureError, match="is not a picture"):
        read_record(tmp_path / "x.png")
