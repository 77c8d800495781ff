"""Large pictures: converted band by band with the same result, in bounded memory, and no larger than needed."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageFile

from stylize import api, images
from stylize.batch.estimate import peak_bytes
from stylize.batch.plan import Job
from stylize.cli import PIXELS, program
from stylize.errors import InputError, PictureError
from stylize.images import FAR_LARGER, Picture, read_picture, read_record, save_picture, to_pil
from stylize.nst.transfer import resize, target_size
from stylize.settings import Settings
from test_images import ADOBE_PROFILE, SRGB_PROFILE, cmyk_profile

few = settings(max_examples=30, deadline=None)
sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))
bands = st.sampled_from([1, 7, 40, 100])  # pixels: from one row at a time to several with a shorter last one
orientations = st.integers(1, 8)


def noise(size: tuple[int, int], channels: int, top: int = 255, seed: int = 0) -> npt.NDArray[np.int64]:
    """Levels [H, W, channels] from 0 to `top`; `size` is width and height."""
    return np.random.default_rng(seed).integers(0, top, (size[1], size[0], channels), endpoint=True)


def read_in_bands(source: Any, pixels: int, **options: Any) -> Picture:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "BAND_PIXELS", pixels)
        return read_picture(source, **options)


def assert_same(one: Picture, other: Picture) -> None:
    assert torch.equal(one.tensor, other.tensor)
    assert one.tensor.is_contiguous()
    assert (one.alpha is None) == (other.alpha is None)
    if one.alpha is not None and other.alpha is not None:
        assert torch.equal(one.alpha, other.alpha)
    assert one.notices == other.notices


# ---- reading in bands ---------------------------------------------------------------------------------

MODES = ("1", "L", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "LA", "La", "PA", "I", "F", "I;16")


def image(mode: str, size: tuple[int, int]) -> Image.Image:
    if mode in ("1", "P", "PA"):
        plain = Image.fromarray(noise(size, 3).astype(np.uint8))
        return plain.convert("1") if mode == "1" else plain.quantize(16).convert(mode)
    if mode in ("I", "F", "I;16"):
        dtype = {"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode]
        values = noise(size, 1, 65_535)[..., 0]
        return Image.fromarray((values / 65_535 if mode == "F" else values).astype(dtype))
    channels = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, size, noise(size, channels).astype(np.uint8).tobytes())


@given(st.sampled_from(MODES), sizes, bands, st.sampled_from([None, SRGB_PROFILE, ADOBE_PROFILE, cmyk_profile()]))
@settings(max_examples=80, deadline=None)
def test_the_height_of_a_band_changes_nothing(
    mode: str, size: tuple[int, int], pixels: int, profile: bytes | None
) -> None:
    source = image(mode, size)
    if profile is not None:
        source.info["icc_profile"] = profile
    if mode in ("L", "P", "I;16"):
        source.info["transparency"] = 7
    assert_same(read_in_bands(source, pixels), read_in_bands(source, 10**9))


@given(sizes, bands, orientations, st.sampled_from(["PNG", "TIFF"]))
@few
def test_a_transparent_picture_lies_on_white_and_upright_in_any_bands(
    size: tuple[int, int], pixels: int, orientation: int, kind: str
) -> None:
    levels = noise(size, 4)
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(levels.astype(np.uint8)).save(buffer, kind, exif=exif)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(buffer.getvalue())
        picture = read_in_bands(path, pixels)
    colour, cover = levels[..., :3] / 255, levels[..., 3:] / 255
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: 3, 6: 3, 7: 1, 8: 1}[orientation]  # quarters, against the clock
    upright = np.rot90(colour * cover + 1 - cover, turns)
    upright = upright[:, ::-1] if orientation in (2, 4, 5, 7) else upright
    np.testing.assert_allclose(picture.tensor[0].permute(1, 2, 0).numpy(), upright, atol=1e-6)


@given(sizes, bands, st.sampled_from(["u1", "u2", "f4"]), st.booleans(), st.sampled_from([None, "zlib"]))
@few
def test_a_tiff_has_its_own_values_in_any_bands(
    size: tuple[int, int], pixels: int, dtype: str, planar: bool, compression: str | None
) -> None:
    top = {"u1": 255, "u2": 65_535, "f4": 1}[dtype]
    levels = noise(size, 3, max(top, 255))
    values = (levels if top > 1 else levels / 255).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tif"
        tifffile.imwrite(
            path,
            np.ascontiguousarray(np.moveaxis(values, -1, 0)) if planar else values,
            photometric="rgb",
            planarconfig="separate" if planar else "contig",
            compression=compression,
            rowsperstrip=3,
        )
        picture = read_in_bands(path, pixels)
    expected = levels / max(top, 255)
    np.testing.assert_allclose(picture.tensor[0].permute(1, 2, 0).numpy(), expected, atol=1e-7)


@pytest.mark.parametrize("row", [0, 4, 8])
@pytest.mark.parametrize("value", [1.5, -0.5, float("nan")])
def test_what_is_no_colour_is_found_in_any_band(tmp_path: Path, row: int, value: float) -> None:
    values = np.full((9, 5, 3), 0.5, np.float32)
    values[row, 2, 1] = value
    values[2, 0, 0] = 1.25  # beyond, too, so that the message has to know the whole
    tifffile.imwrite(tmp_path / "x.tif", values, photometric="rgb")
    low = value if not value > 0.5 else 0.5
    high = value if math.isnan(value) else max(value, 1.25)
    with pytest.raises(PictureError, match=rf"holds values from {low:g} to {high:g},"):
        read_in_bands(tmp_path / "x.tif", 5)


def test_alpha_that_begins_in_a_later_band_is_kept() -> None:
    levels = np.full((6, 4, 4), 255, np.uint8)
    levels[5, 3, 3] = 51
    picture = read_in_bands(Image.fromarray(levels), 4)
    assert picture.alpha is not None
    assert picture.alpha.flatten().tolist() == [1.0] * 23 + [np.float32(0.2)]


# ---- writing in bands ---------------------------------------------------------------------------------


@given(sizes, bands, st.sampled_from([".png", ".jpg", ".webp", ".tiff"]), st.booleans())
@few
def test_a_file_has_the_same_bytes_in_any_bands(
    size: tuple[int, int], pixels: int, suffix: str, transparent: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.rand(1, 3, size[1], size[0], generator=generator) * 1.2 - 0.1
    alpha = torch.rand(1, 1, size[1], size[0], generator=generator) if transparent else None
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        whole = save_picture(tensor, Path(folder) / f"whole{suffix}", alpha=alpha)
        patch.setattr(images, "BAND_PIXELS", pixels)
        in_bands = save_picture(tensor, Path(folder) / f"bands{suffix}", alpha=alpha)
        assert whole.read_bytes() == in_bands.read_bytes()


@pytest.mark.parametrize(("suffix", "top"), [(".png", 255), (".tiff", 65_535)])
def test_levels_are_the_nearest_in_any_bands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, top: int
) -> None:
    monkeypatch.setattr(images, "BAND_PIXELS", 33)
    tensor = torch.rand(1, 3, 13, 11, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1
    path = save_picture(tensor, tmp_path / f"x{suffix}")
    stored = tifffile.imread(path) if suffix == ".tiff" else np.asarray(Image.open(io.BytesIO(path.read_bytes())))
    exact = tensor.double().clamp(0, 1)[0].permute(1, 2, 0).numpy() * top
    assert np.abs(stored - exact).max() <= 0.5 + 0.001  # the value itself was rounded to float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_saving_leaves_other_types_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.full((3, 4, 5), 2.0, dtype=dtype)
    save_picture(tensor, tmp_path / "x.png")
    assert tensor.dtype == dtype
    assert tensor.eq(2).all()


def test_a_number_too_large_for_float32_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="infinite"):
        save_picture(torch.full((3, 4, 5), 1e300, dtype=torch.float64), tmp_path / "x.png")


# ---- memory -------------------------------------------------------------------------------------------

WIDE, HIGH = 6000, 5000
MEASURED = """
import os, resource, sys
import torch
from stylize import images

path, width, height = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
images.save_picture(torch.zeros(3, 9, 9), path, overwrite=True)  # what is loaded once is no cost of a picture

def highest():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def grown(work):
    sys.stdout.flush()
    if os.fork() == 0:  # a new process, whose highest use of memory begins with what it has now
        before = highest()
        work()
        print(highest() - before, flush=True)
        os._exit(0)
    os.wait()

grown(lambda: images.save_picture(torch.full((1, 3, height, width), 0.25), path, overwrite=True))
grown(lambda: images.read_picture(path))
grown(lambda: images.read_picture(path, long_side=width // 9))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the highest use of memory is told otherwise")
@pytest.mark.parametrize(("suffix", "stored"), [(".png", 3), (".tiff", 6)])  # bytes a pixel
def test_a_picture_takes_the_file_and_one_tensor_of_memory(tmp_path: Path, suffix: str, stored: int) -> None:
    command = [sys.executable, "-c", MEASURED, str(tmp_path / f"x{suffix}"), str(WIDE), str(HIGH)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, check=True, capture_output=True, env=environment).stdout
    written, read, read_smaller = (int(line) / (WIDE * HIGH) for line in told.split())
    assert max(written, read) < 1.4 * (stored + 3 * 4)
    assert read_smaller < 1.4 * (4 + stored)  # Pillow keeps three colours in four bytes


# ---- read smaller -------------------------------------------------------------------------------------


def shares(count: int, side: int) -> npt.NDArray[np.float64]:
    """[count, side]: how much of each of `count` equal cells is covered by each of `side` pixels."""
    cells, pixels = (np.arange(number + 1) / number for number in (count, side))
    end = np.minimum(cells[1:, None], pixels[None, 1:])
    begin = np.maximum(cells[:-1, None], pixels[None, :-1])
    covered: npt.NDArray[np.float64] = np.maximum(end - begin, 0) * count
    return covered


def averages(values: npt.NDArray[np.float64], size: tuple[int, int]) -> npt.NDArray[np.float64]:
    """[H, W, C] in `size` equal cells, in width and height, each with its mean by area."""
    rows, columns = shares(size[1], values.shape[0]), shares(size[0], values.shape[1])
    return np.asarray(np.einsum("ay,bx,yxc->abc", rows, columns, values, optimize=True))


@given(st.tuples(st.integers(130, 400), st.integers(1, 60)), st.integers(1, 16), bands)
@few
def test_what_is_read_smaller_is_the_mean_of_its_pixels(size: tuple[int, int], long_side: int, pixels: int) -> None:
    levels = noise(size, 4)
    picture = read_in_bands(Image.fromarray(levels.astype(np.uint8)), pixels, long_side=long_side)
    if max(size) <= FAR_LARGER * long_side:
        assert picture.reduced_from is None
        return
    assert picture.reduced_from == size
    assert max(picture.size) >= 4 * long_side
    colour, cover = levels[..., :3] / 255, levels[..., 3:] / 255
    on_white = averages(colour * cover + 1 - cover, picture.size)
    assert picture.alpha is not None
    np.testing.assert_allclose(picture.tensor[0].permute(1, 2, 0).numpy(), on_white, atol=1e-5)
    np.testing.assert_allclose(picture.alpha[0].permute(1, 2, 0).numpy(), averages(cover, picture.size), atol=1e-5)


def soft(width: int, height: int) -> torch.Tensor:
    """A picture [1, 3, H, W] of large forms."""
    small = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(small, (height, width), mode="bicubic", align_corners=True).clamp(0, 1)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tiff", ".webp"])
def test_every_format_is_read_smaller_alike(tmp_path: Path, suffix: str) -> None:
    path = save_picture(soft(1001, 703), tmp_path / f"x{suffix}")
    picture = read_picture(path, long_side=50)
    assert picture.reduced_from == (1001, 703)
    assert 200 <= max(picture.size) < 300
    small, whole = (resize(each, (50, 35)) for each in (picture.tensor, read_picture(path).tensor))
    assert float((small - whole).abs().max()) * 255 < 3


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("suffix", [".jpg", ".tiff"])
def test_the_size_before_is_told_upright(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    mode = "CMYK" if suffix == ".tiff" else "RGB"  # which Pillow itself turns upright while it decodes
    Image.new(mode, (640, 320)).save(tmp_path / f"x{suffix}", exif=exif)
    picture = read_picture(tmp_path / f"x{suffix}", long_side=40)
    assert picture.reduced_from == ((320, 640) if orientation == 6 else (640, 320))
    assert picture.size == ((80, 160) if orientation == 6 else (160, 80))


def test_an_image_that_is_handed_over_stays_as_large_as_it_is(tmp_path: Path) -> None:
    to_pil(soft(640, 320)).save(tmp_path / "x.jpg")
    with Image.open(tmp_path / "x.jpg") as source:
        assert read_picture(source, long_side=40).reduced_from == (640, 320)
        assert source.size == (640, 320)


@given(st.integers(16, 40), st.tuples(st.integers(330, 500), st.integers(120, 500)))
@few
def test_a_result_has_the_size_that_the_whole_content_asks_for(long_side: int, size: tuple[int, int]) -> None:
    chosen = Settings(size=long_side)
    content = api._read_content(Image.new("RGB", size, (9, 8, 7)), None, chosen).picture
    assert target_size(*content.size, chosen) == target_size(*size, chosen)
    if max(size) <= FAR_LARGER * long_side:
        assert content.size == size


def test_an_ordinary_content_is_read_as_it_is(tmp_path: Path) -> None:
    path = save_picture(soft(320, 200), tmp_path / "x.png")
    for chosen in (Settings(size=40), Settings(size=512), Settings(size="full")):
        content = api._read_content(path, None, chosen)
        assert torch.equal(content.picture.tensor, read_picture(path).tensor)


def test_a_style_is_read_as_large_as_its_strokes_ask_for(tmp_path: Path) -> None:
    path = save_picture(soft(640, 320), tmp_path / "x.png")
    sides = {scale: api._style_side(Settings(size=40, style_scale=scale)) for scale in (0.5, 1.0, 2.0)}
    assert sides == {0.5: 20, 1.0: 40, 2.0: 80}
    assert api._style_side(Settings(size="full", style_scale=0.5)) * FAR_LARGER > 10**9
    widths = {scale: api._read(path, None, side).picture.size[0] for scale, side in sides.items()}
    assert widths == {0.5: 80, 1.0: 160, 2.0: 640}


def test_a_far_larger_content_needs_little_memory() -> None:
    job = Job("x.png", "x.png", Path("x.png"), (), Path("out/x.png"), size=(20_000, 15_000))
    small, whole = (peak_bytes(job, Settings(size=size), 4) for size in (512, 4000))
    assert small < 4 * 300e6 + 3e9  # the pixels as Pillow decodes them, and what 512 px take
    assert whole > (4 + 12) * 300e6


# ---- the record ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tiff"])
def test_a_record_is_read_without_a_pixel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path = save_picture(soft(64, 48), tmp_path / f"x{suffix}", record={"seed": 7})

    def decoded(*_: object) -> None:
        raise AssertionError("a pixel was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    monkeypatch.setattr(tifffile.TiffPage, "asarray", decoded)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert read_record(path) == {"seed": 7}


def test_more_than_a_tiff_can_hold_makes_a_big_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = tifffile.imwrite
    monkeypatch.setattr(tifffile, "imwrite", lambda *a, **more: write(*a, **more, bigtiff=True))
    path = save_picture(soft(16, 12), tmp_path / "x.tiff", record={"seed": 7})
    assert path.read_bytes()[:4] == b"II+\0"
    assert read_record(path) == {"seed": 7}
    assert float((read_picture(path).tensor - soft(16, 12)).abs().max()) < 1e-5


# ---- the option ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["300000000", "300M", "300MP", "300 MP", "300mp", "3e8", "0.3G", "300000k"])
def test_many_pixels_can_be_written_in_short(text: str) -> None:
    assert PIXELS.convert(text, None, None) == 300_000_000


@pytest.mark.parametrize("text", ["", "M", "0", "-5", "many", "nan", "inf", "3e400", "1e30", "300 MB", "3MM"])
def test_what_is_no_number_of_pixels_is_refused(text: str) -> None:
    result = CliRunner().invoke(program, ["a.png", "b.png", "--max-pixels", text])
    assert result.exit_code == 2
    assert "--max-pixels" in result.stderr
    assert "300M" in result.stderr


def test_a_picture_above_the_limit_is_refused_with_both_numbers_and_the_option(tmp_path: Path) -> None:
    path = str(save_picture(soft(50, 40), tmp_path / "x.png"))
    for command in ([path, path], ["inspect", path, "--out", str(tmp_path / "look")]):
        result = CliRunner().invoke(program, [*command, "--max-pixels", "1.5K"])
        assert result.exit_code == 2
        for words in ("50 x 40", "2,000 pixels", "the limit is 1,500", "--max-pixels 2000"):
            assert words in result.stderr
