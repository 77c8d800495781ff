"""The one room between files and pictures.

Inside the project a picture is a float32 tensor [1, 3, H, W]: upright, RGB, sRGB, 0 = black, 1 = white.
Here files, Pillow images and arrays become such a tensor, and such a tensor becomes a file again.

Nothing of Pillow's is changed for the rest of the process: no truncated files are allowed, and the limit
on pixels is an argument. Transparent pictures are laid on white, with the plain sRGB values as browsers do.

A picture may fill most of the memory. So there is never more than the file's own pixels, as they were decoded
or are to be encoded, and one tensor of floats; all between the two is done for a few rows at a time.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import secrets
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import tifffile
import torch
from PIL import ExifTags, Image, ImageCms, ImageFile
from PIL.PngImagePlugin import PngInfo

from stylize import __version__
from stylize.errors import InputError, OutputError, PictureError, SaveError, SettingsError
from stylize.settings import Settings, did_you_mean

DEFAULT_MAX_PIXELS = 178_956_970  # where Pillow by itself refuses to open a picture
MOST_SAMPLES = 8  # of a TIFF's pixel; thousands of them would fit into a small file, and into no memory

# The formats of Pillow's that are read: pictures of pixels that are known by their first bytes. EPS, which
# starts another program, and TGA, which text can be mistaken for, are left out. HEIF needs a plugin.
READ_FORMATS = (
    *("PNG", "JPEG", "MPO", "WEBP", "TIFF", "GIF", "BMP", "PPM"),
    *("JPEG2000", "AVIF", "HEIF", "ICO", "PSD", "QOI"),
)
WRITE_FORMATS: Mapping[str, str] = {
    **{".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"},
    **{".tif": "TIFF", ".tiff": "TIFF"},
}
# libjpeg stops at 65,500, a little before the 65,535 that the format could count.
_LONGEST_SIDE = {"JPEG": 65_500, "WEBP": 16_383}  # pixels

_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ANIMATED = ("PNG", "GIF", "WEBP", "AVIF")  # in others, further frames are previews and layers
_PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}  # ICC's names and Pillow's
_SOFTWARE = f"stylize {__version__}"
BAND_PIXELS = 1 << 18  # that are converted at a time: 3 MB of floats, which a processor's cache can hold
# A picture whose long side is more than FAR_LARGER times the one wanted is read smaller, but AMPLE times as large
# as wanted: what is left to a better filter decides how the result looks.
FAR_LARGER, AMPLE = 8, 4
_EXIF_ROOM = 65_000  # characters of the record in a JPEG, whose EXIF block ends at 65,533 bytes

Floats: TypeAlias = npt.NDArray[np.float32]
Edges: TypeAlias = npt.NDArray[np.float64]
Colours: TypeAlias = "Image.Image | Floats"  # 8 bits in mode L, RGB or CMYK; or [H, W, 1 or 3] in [0, 1]
Source: TypeAlias = "str | os.PathLike[str] | Image.Image | torch.Tensor | npt.NDArray[Any]"


@dataclass(frozen=True)
class Picture:
    """A picture that was read."""

    tensor: torch.Tensor  # [1, 3, H, W] float32 on the CPU, sRGB in [0, 1], on white where transparent
    alpha: torch.Tensor | None  # [1, 1, H, W] float32 in [0, 1]; None when opaque everywhere
    source: str  # the path as given, or what else it was
    notices: tuple[str, ...] = ()  # what the user should know: one sentence each
    reduced_from: tuple[int, int] | None = None  # its width and height in the file, if it was read smaller

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.tensor.shape[3], self.tensor.shape[2]


@dataclass(frozen=True)
class _Raw:
    """Pixels as a file has them: in its own colours, and not yet upright."""

    size: tuple[int, int]  # width and height
    rows: Callable[[int, int], tuple[Colours, Floats | None]]  # from, to -> colours, and alpha [h, W, 1] in [0, 1]
    profile: bytes | None  # ICC
    orientation: int  # as EXIF counts, 1 … 8
    white: int = 1  # what 1 is in the file
    shrunk: int = 1  # pixels of the file, along a side, of which its decoder has made one
    size_before: tuple[int, int] | None = None  # of the file, if they are not one to one

    @property
    def full_size(self) -> tuple[int, int]:
        """Width and height in pixels of the file."""
        return self.size_before or self.size

    @property
    def extent(self) -> tuple[float, float]:
        """Width and height of what there is of the picture: in a JPEG that was shrunk, less than whole pixels."""
        return self.full_size[0] / self.shrunk, self.full_size[1] / self.shrunk


# ---- reading ------------------------------------------------------------------------------------------


def read_picture(source: Source, *, max_pixels: int = DEFAULT_MAX_PIXELS, long_side: int = sys.maxsize) -> Picture:
    """Read a file, a Pillow image, a tensor or an array as an upright sRGB picture.

    A file is known by its content, whatever its name says. Its orientation is applied, its colour profile
    converted to sRGB, and its transparency laid on white and kept beside the picture. A tensor is float
    [3, H, W] or [1, 3, H, W] in [0, 1]; an array is that too, or [H, W, 3] in floats or uint8 (0 … 255);
    both are taken as sRGB.

    `long_side` is how large the picture will be used, in pixels. A file or an image that is more than 8 times as
    large is read smaller, to save memory: averaged, and still at least 4 times as large as it will be used.

    Raises:
        PictureError: for a file that is missing, damaged, not a picture, or larger than `max_pixels`.
        InputError: for a tensor or array of another shape, dtype or range.
    """
    if isinstance(source, torch.Tensor):
        return Picture(_in_range(_from_tensor(source), "The tensor"), None, "a tensor")
    if isinstance(source, np.ndarray):
        return Picture(_in_range(_from_array(source), "The array"), None, "an array")
    if isinstance(source, Image.Image):
        notices: list[str] = []
        with _naming("The PIL image"):
            _check_pixels(source.size, max_pixels)
            return _finish(_raw_image(source, notices), "a PIL image", notices, long_side)
    if isinstance(source, (str, os.PathLike)):
        return _read_file(os.fspath(source), max_pixels, long_side)
    raise InputError(
        f"A picture cannot be a {type(source).__name__}. Give a path, a PIL image, a tensor or an array."
    )


def read_mask(source: Source, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture:
    """Read what `read_picture` reads as a mask: its tensor is [1, 1, H, W] in [0, 1], how far each place is chosen.

    White chooses wholly, grey in part; of a picture that is transparent somewhere, what is opaque is chosen. A
    tensor or array may also be [H, W] or [1, 1, H, W], in floats, in uint8 (0 … 255) or of truth values.

    Raises:
        PictureError, InputError: as `read_picture`.
    """
    if isinstance(source, (torch.Tensor, np.ndarray)) and _is_plane(source.shape):
        if not _is_mask_type(source):
            raise InputError(
                f"The mask has the type {source.dtype}; a mask is float in [0, 1], uint8 in 0 … 255, or bool."
            )
        source = _plane_as_picture(torch.from_numpy(np.array(source)) if isinstance(source, np.ndarray) else source)
    picture = read_picture(source, max_pixels=max_pixels)
    red, green, blue = picture.tensor.split(1, dim=1)
    grey = green + 0.299 * (red - green) + 0.114 * (blue - green)  # ITU-R BT.601; of grey exactly itself
    return replace(picture, tensor=grey if picture.alpha is None else picture.alpha, alpha=None)


def _is_mask_type(mask: torch.Tensor | npt.NDArray[Any]) -> bool:
    if isinstance(mask, torch.Tensor):
        return mask.is_floating_point() or mask.dtype in (torch.uint8, torch.bool)
    return mask.dtype.kind in "fb" or mask.dtype == np.uint8


def _is_plane(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and tuple(shape[:-2]) in ((), (1,), (1, 1))


def _plane_as_picture(plane: torch.Tensor) -> torch.Tensor:
    """[H, W] or [1, 1, H, W] as a grey picture [3, H, W] in floats."""
    levels = plane / 255 if plane.dtype == torch.uint8 else plane.float() if plane.dtype == torch.bool else plane
    return levels.reshape(1, *plane.shape[-2:]).expand(3, -1, -1)


def is_far_larger(size: tuple[int, int], long_side: int) -> bool:
    """Whether `read_picture` reads a file of this width and height smaller when it will be used at `long_side`."""
    return max(size) > FAR_LARGER * long_side


def read_suffixes() -> frozenset[str]:
    """The endings, such as ".jpg", of the files that `read_picture` can be expected to read."""
    known = Image.registered_extensions()
    return frozenset(suffix for suffix, name in known.items() if name in READ_FORMATS)


def probe_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the width and height in pixels that `read_picture` would give, from the file's header alone.

    Only the orientation of a PNG that has it behind its pixels is not seen.

    Raises:
        PictureError: when the file is missing, damaged, or not a picture.
    """
    name = os.fspath(path)
    with _opened(name) as file, _naming(name):
        if _is_tiff(file):
            with tifffile.TiffFile(file) as tiff:
                size, orientation = _tiff_size(tiff.pages[0]), _tiff_orientation(tiff.pages[0])
        else:
            image = _identify(file, name)
            size, orientation = image.size, _orientation(image, [])
    return _turned(size, orientation)


def _read_file(path: str, max_pixels: int, long_side: int) -> Picture:
    notices: list[str] = []
    with _opened(path) as file, _naming(path):
        raw = _raw_tiff(file, max_pixels, notices) if _is_tiff(file) else None
        if raw is None:
            image = _identify(file, path)
            _check_pixels(image.size, max_pixels)
            if image.format in _ANIMATED and getattr(image, "is_animated", False):
                notices.append("is animated; only its first frame is used")
            size, shrunk = image.size, _let_decoder_shrink(image, long_side)
            raw = _raw_image(image, notices)
            if shrunk > 1:
                raw = replace(raw, shrunk=shrunk, size_before=size)
        return _finish(raw, path, notices, long_side)


def _let_decoder_shrink(image: Image.Image, long_side: int) -> int:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8, as long as that is ample; return the 2, 4 or 8, or 1."""
    if not is_far_larger(image.size, long_side):
        return 1
    width, share = image.width, AMPLE * long_side / max(image.size)
    drafted = image.draft(None, (max(1, math.ceil(width * share)), max(1, math.ceil(image.height * share))))
    return 1 if drafted is None else round(width / drafted[1][2])


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The open file, or one error that says why there is none."""
    place = Path(path)
    try:
        if place.is_dir():
            raise PictureError(f"{path} is a folder, not a picture. Name one file in it.")
        if place.exists() and not place.is_file():  # a pipe would wait for ever
            raise PictureError(f"{path} is not a regular file. Save the picture in a file first.")
        file = place.open("rb")
    except FileNotFoundError as error:
        raise PictureError(f"There is no file {path}. Check the spelling and the folder.") from error
    except (OSError, ValueError) as error:
        raise PictureError(f"{path} cannot be opened: {_reason(error)}. Check its permissions.") from error
    with file:
        if not file.read(1):
            raise PictureError(f"{path} is empty (0 bytes). Copy or download it again.")
        file.seek(0)
        yield file


class _UnsuitedError(Exception):
    """What is wrong with a picture, without its name, which `_naming` puts in front."""


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn whatever a decoder raises (there are many, and they raise anything) into one error with a name."""
    try:
        yield
    except PictureError:
        raise
    except _UnsuitedError as error:
        raise PictureError(f"{what} {error}") from error
    except MemoryError as error:
        raise PictureError(f"{what} does not fit in memory. Make it smaller first.") from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"{what} is too large for its format: {error} Save it as PNG or TIFF.") from error
    except Exception as error:
        raise PictureError(
            f"{what} is damaged or cut short ({_reason(error)}). Copy or download it again."
        ) from error


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.rstrip(".") or type(error).__name__


def _identify(file: BinaryIO, path: str) -> ImageFile.ImageFile:
    """Open a picture by its first bytes.

    This is `Image.open` without its limit on pixels: that one is set for the whole process, and to lift it
    for one picture would lift it for every thread.
    """
    Image.init()
    file.seek(0)
    start = file.read(16)
    for name in READ_FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory is not None and accept is not None and accept(start) is True:
            file.seek(0)
            # With its path Pillow may map a file into memory, and mistake the sides of a TIFF that is not upright.
            return factory(file, "" if name == "TIFF" else path)
    raise PictureError(
        f"{path} is not a picture, whatever its name says, or of a kind that is not read. "
        "Save it as PNG, JPEG, WebP or TIFF."
    )


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height == 0:
        raise _UnsuitedError("has no pixels.")
    if width * height > max_pixels:
        raise _UnsuitedError(
            f"has {width} x {height} = {width * height:,} pixels; the limit is {max_pixels:,}. "
            f"Make it smaller, or raise the limit with --max-pixels {width * height}."
        )


def _orientation(image: Image.Image, notices: list[str]) -> int:
    """How the picture lies, as EXIF counts: 1 (upright) … 8."""
    try:
        exif = Image.Image.getexif(image)  # not PNG's own, which decodes all pixels to look behind them
        turned = exif.get(ExifTags.Base.Orientation, 1)
        camera_space = exif.get_ifd(ExifTags.IFD.Interop).get(1) if ExifTags.IFD.Exif in exif else None
    except Exception as error:  # EXIF is a file format of its own, and as often damaged
        notices.append(f"has EXIF data that cannot be read ({_reason(error)}); it may lie on its side")
        return 1
    if camera_space == "R03" and "icc_profile" not in image.info:
        notices.append("was taken in Adobe RGB but has no colour profile; its colours are taken as sRGB")
    return turned if turned in range(1, 9) else 1


def _raw_image(image: Image.Image, notices: list[str]) -> _Raw:
    """Decode what Pillow has opened."""
    image.load()
    orientation = _orientation(image, notices)  # after `load`, which turns a TIFF upright
    profile = image.info.get("icc_profile")
    if image.mode.startswith(("I", "F")):
        white = 1 if image.mode == "F" else 65_535  # Pillow keeps 16 bits in mode I, too
        return _Raw(image.size, functools.partial(_grey_rows, image, white), profile, orientation, white)
    if image.mode == "LAB":  # measures colour by itself; a profile would have nothing to add
        profile = None
    return _Raw(image.size, functools.partial(_image_rows, image), profile, orientation)


def _image_rows(image: Image.Image, start: int, stop: int) -> tuple[Image.Image, Floats | None]:
    """Some rows of an image of 8 bits."""
    band, alpha = _cut(image, start, stop), None
    if band.has_transparency_data:
        band = band.convert("LA" if band.mode in ("1", "L", "La", "LA") else "RGBA")
        alpha = _unit(band.getchannel("A"))
    if band.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return _known(ImageCms.profileToProfile(band, lab, srgb, outputMode="RGB")), alpha
    if band.mode in ("1", "LA"):
        return band.convert("L"), alpha
    return band if band.mode in ("L", "RGB", "CMYK") else band.convert("RGB"), alpha


def _grey_rows(image: Image.Image, white: int, start: int, stop: int) -> tuple[Floats, Floats | None]:
    """Some rows of grey of 16 bits (modes I, I;16 …) or in floats (F), and their transparency."""
    values = np.asarray(_cut(image, start, stop))[..., None]
    grey = values.astype(np.float32) / np.float32(white)
    key = image.info.get("transparency")  # one level of grey stands for "nothing here"
    return grey, None if key is None else (values != key).astype(np.float32)


def _cut(image: Image.Image, start: int, stop: int) -> Image.Image:
    """Some rows as they are; `crop` would do the same, but minds the process's own limit on pixels."""
    box = (0, start, image.width, stop)
    return image.resize((image.width, stop - start), Image.Resampling.NEAREST, box)


def _check_values(low: float, high: float, white: int = 1) -> None:
    if not 0 <= low <= high <= 1:  # not a number is neither
        raise _UnsuitedError(
            f"holds values from {low * white:g} to {high * white:g}, which have to lie in 0 … {white}. "
            "Rescale them first."
        )


def _is_tiff(file: BinaryIO) -> bool:
    start = file.read(4)
    file.seek(0)
    return start in _TIFF_STARTS


def _tiff_size(page: Any) -> tuple[int, int]:
    return int(page.imagewidth), int(page.imagelength)  # tuples of numbers in a damaged file


def _tiff_orientation(page: Any) -> int:
    tag = page.tags.get(ExifTags.Base.Orientation)
    return tag.value if tag is not None and tag.value in range(1, 9) else 1


def _raw_tiff(file: BinaryIO, max_pixels: int, notices: list[str]) -> _Raw | None:
    """Decode a TIFF that is plain grey or RGB, of which Pillow keeps 8 bits only; None for all others."""
    with tifffile.TiffFile(file) as tiff:
        page: Any = tiff.pages[0]
        _check_pixels(_tiff_size(page), max_pixels)
        if page.is_reduced:
            notices.append("begins with a small preview, as cameras' raw files do; only that is used")
        elif len(tiff.pages) > 1:
            notices.append(f"has {len(tiff.pages)} pages; only the first is used")
        if not _is_plain(page):
            return None
        if not all(page.databytecounts):
            raise _UnsuitedError("lacks a part of its pixels. Copy or download it again.")
        try:
            values = page.asarray()
        except (KeyError, ValueError) as error:
            deep = page.bitspersample > 8
            if "imagecodecs" not in str(error) or (deep and page.photometric == 0):
                raise  # Pillow would read deep grey from white to black as if from black to white
            if deep and page.photometric == 2:
                notices.append("is read with 8 bits only; install the package imagecodecs for all of them")
            return None
        profile = page.tags.get(34675)  # InterColorProfile
        layout = _Layout.of(page)
        values = {"YX": values[..., None], "SYX": np.moveaxis(values, 0, -1)}.get(page.axes, values)
        if layout.alpha and values.dtype.kind == "f":
            _check_values(*_span(values[..., layout.samples]))
        rows = functools.partial(_tiff_rows, values, layout)
        return _Raw(_tiff_size(page), rows, profile and profile.value, _tiff_orientation(page))


def _is_plain(page: Any) -> bool:
    """Whether a TIFF's page is grey or RGB, in whole bytes or floats."""
    kind = page.dtype
    numbers = kind is not None and kind.kind in "uf" and page.bitspersample == 8 * kind.itemsize
    few = page.samplesperpixel <= MOST_SAMPLES
    return numbers and few and page.photometric in (0, 1, 2) and page.axes in ("YX", "YXS", "SYX")


@dataclass(frozen=True)
class _Layout:
    """What the samples of a TIFF's pixel are."""

    samples: int  # of colour, which come first
    negative: bool  # 0 is white
    alpha: bool  # the next sample is how much is covered
    multiplied: bool  # the colours are multiplied by it already

    @classmethod
    def of(cls, page: Any) -> _Layout:
        """By the tags of a page."""
        extra = page.extrasamples[0] if page.extrasamples else 0
        return cls(3 if page.photometric == 2 else 1, page.photometric == 0, extra in (1, 2), extra == 1)


def _tiff_rows(values: npt.NDArray[Any], layout: _Layout, start: int, stop: int) -> tuple[Colours, Floats | None]:
    """Some rows of a TIFF's pixels [H, W, samples]."""
    white = np.iinfo(values.dtype).max if values.dtype.kind == "u" else 1
    unit: Floats = values[start:stop].astype(np.float32) / np.float32(white)
    colours = 1 - unit[..., :1] if layout.negative else unit[..., : layout.samples]
    alpha = unit[..., layout.samples : layout.samples + 1] if layout.alpha else None
    if alpha is not None and layout.multiplied:
        colours = np.minimum(colours / np.maximum(alpha, np.finfo(np.float32).tiny), 1)
    return _image_of(colours) if values.dtype == np.uint8 else colours, alpha


def _span(values: npt.NDArray[Any]) -> tuple[float, float]:
    """The lowest and the highest value in float32; both are no numbers when one is."""
    return float(np.float32(values.min())), float(np.float32(values.max()))


# ---- from the file's pixels to the tensor -------------------------------------------------------------


def _finish(raw: _Raw, source: str, notices: list[str], long_side: int) -> Picture:
    """Convert to sRGB, lay on white, turn upright, and make smaller what is far larger than wanted."""
    reduced = is_far_larger(raw.full_size, long_side)
    factor = max(1, max(raw.size) // (AMPLE * long_side)) if reduced else 1
    tensor, alpha = _in_bands(raw, factor, _conversion(raw.rows(0, 1)[0], raw.profile, notices))
    name = "The picture" if source == "a PIL image" else Path(source).name
    return Picture(
        tensor=tensor,
        alpha=alpha,
        source=source,
        notices=tuple(f"{name} {notice}." for notice in notices),
        reduced_from=_turned(raw.full_size, raw.orientation) if reduced else None,
    )


def _in_bands(
    raw: _Raw, factor: int, in_srgb: Callable[[Colours], Floats]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Colours [1, 3, H, W] and alpha [1, 1, H, W], upright; `factor` x `factor` pixels of the file become one."""
    columns, rows = (_edges(extent, factor) for extent in raw.extent)
    width, height = _turned((len(columns) - 1, len(rows) - 1), raw.orientation)
    tensor, alpha = torch.empty(1, 3, height, width), None
    for first, last in _bands(raw.size[0] * factor, len(rows) - 1):
        start, stop = math.floor(rows[first]), math.ceil(rows[last])
        colours, cover = raw.rows(start, stop)
        _check_colours(colours, raw)
        rgb, cells = in_srgb(colours), (rows[first : last + 1] - start, columns)
        if cover is not None and cover.min() < 1:
            rgb = rgb * cover + (1 - cover)
            alpha = torch.ones(1, 1, height, width) if alpha is None else alpha
            _lying(alpha, raw.orientation)[first:last] = _averaged(cover, *cells)
        _lying(tensor, raw.orientation)[first:last] = _averaged(rgb, *cells)
    return tensor, alpha


def _edges(extent: float, factor: int) -> Edges:
    """Between which edges, in pixels, as many equal cells lie as have room for `factor` pixels each."""
    count = max(1, int(extent / factor))
    return np.linspace(0, extent, count + 1)


def _averaged(values: Floats, rows: Edges, columns: Edges) -> Floats:
    """[h, W, C] -> the mean of each cell."""
    if values.shape[:2] == (len(rows) - 1, len(columns) - 1):
        return values
    narrow = _means(values.swapaxes(0, 1), columns).swapaxes(0, 1)
    return _means(narrow, rows).astype(np.float32)


def _means(values: npt.NDArray[Any], edges: Edges) -> npt.NDArray[np.float64]:
    """[N, …] -> the means between neighbouring edges; an edge may cut a value in two, by area."""
    total = np.zeros((len(values) + 1, *values.shape[1:]))  # float64: thousands are added up
    np.cumsum(values, axis=0, out=total[1:])
    before = edges.astype(np.intp)
    share = (edges - before)[:, None, None]
    until = total[before] * (1 - share) + total[np.minimum(before + 1, len(values))] * share
    return np.diff(until, axis=0) / np.diff(edges)[:, None, None]


def _bands(width: int, height: int) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of one band after the other."""
    rows = max(1, BAND_PIXELS // width)
    for start in range(0, height, rows):
        yield start, min(start + rows, height)


def _check_colours(colours: Colours, raw: _Raw) -> None:
    """Refuse floats that are no colours, and tell the range of the whole picture."""
    if isinstance(colours, Image.Image):
        return
    low, high = _span(colours)
    if not 0 <= low <= high <= 1:
        every = (raw.rows(start, stop)[0] for start, stop in _bands(*raw.size))
        spans = np.array([_span(each) for each in every if not isinstance(each, Image.Image)])
        _check_values(float(spans[:, 0].min()), float(spans[:, 1].max()), raw.white)


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Width and height upright of those in the file, and the other way round."""
    return (size[1], size[0]) if orientation >= 5 else size


def _lying(upright: torch.Tensor, orientation: int) -> Floats:
    """A view [H, W, C], as the picture lies in its file, of a tensor [1, C, H, W] that is upright.

    Source: EXIF 2.32, tag 0x0112: on which sides of the picture the first row and column are.
    """
    view: Floats = upright[0].movedim(0, -1).numpy()
    if orientation in (3, 4, 7, 8):
        view = view[::-1]
    if orientation in (2, 3, 6, 7):
        view = view[:, ::-1]
    return view.swapaxes(0, 1) if orientation in (5, 6, 7, 8) else view


def _unit(image: Image.Image) -> Floats:
    """[H, W, C] in [0, 1] of an image of 8 bits."""
    values: Floats = np.asarray(image).astype(np.float32) / np.float32(255)
    return values if values.ndim == 3 else values[..., None]


# ---- colours ------------------------------------------------------------------------------------------


def _conversion(sample: Colours, profile: bytes | None, notices: list[str]) -> Callable[[Colours], Floats]:
    """What makes [h, W, 3] in sRGB of colours such as the sample, whatever they are in."""
    if profile:
        try:
            return _through_profile(sample, profile, notices)
        except (ImageCms.PyCMSError, ValueError, OSError) as error:
            notices.append(f"has a colour profile that cannot be used ({_reason(error)}); it is left out")
    if _mode(sample) == "CMYK":
        notices.append("is CMYK without a usable profile; its colours are a guess")
    return _plain_rgb


def _through_profile(sample: Colours, profile: bytes, notices: list[str]) -> Callable[[Colours], Floats]:
    source = ImageCms.getOpenProfile(io.BytesIO(profile))
    space = source.profile.xcolor_space.strip()
    mode, own = _PROFILE_MODES.get(space, ""), _mode(sample)
    if mode != own and (mode, own) != ("RGB", "L"):  # grey is a colour, too
        raise ValueError(f"it is made for {space}, not for {own}")
    # Photoshop's choice: colours that both can show stay as they are, and black stays black.
    transform = ImageCms.buildTransform(
        source,
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    if _changes_nothing(transform, mode):
        return _plain_rgb
    if not isinstance(sample, Image.Image):
        notices.append("has a colour profile other than sRGB; to convert it, its colours became 8 bits")
    return functools.partial(_transformed, transform, mode)


def _transformed(transform: ImageCms.ImageCmsTransform, mode: str, colours: Colours) -> Floats:
    image = colours if isinstance(colours, Image.Image) else _image_of(colours)  # Pillow converts 8 bits only
    return _unit(_known(ImageCms.applyTransform(image.convert(mode), transform)))


def _changes_nothing(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Whether a profile is sRGB but for rounding: then exact values are worth more than a conversion."""
    levels = np.linspace(0, 255, 6, dtype=np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(36, 6, 3)
    probe = Image.fromarray(cube).convert(mode)
    converted = _unit(_known(ImageCms.applyTransform(probe, transform)))
    return bool(np.abs(converted - _plain_rgb(probe)).max() < 1.5 / 255)


def _known(converted: Image.Image | None) -> Image.Image:
    """ImageCms returns None only when it converts in place, which is never asked of it here."""
    assert converted is not None
    return converted


def _mode(colours: Colours) -> str:
    if isinstance(colours, Image.Image):
        return colours.mode
    return "L" if colours.shape[-1] == 1 else "RGB"


def _plain_rgb(colours: Colours) -> Floats:
    """[H, W, 3] without any profile."""
    if isinstance(colours, Image.Image):
        return _unit(colours.convert("RGB"))
    return np.repeat(colours, 3, axis=-1) if colours.shape[-1] == 1 else colours


def _srgb_profile() -> bytes:
    """An ICC profile of sRGB that is the same at any time: its date of making is replaced by a fixed one."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    date = struct.pack(">6H", 2000, 1, 1, 0, 0, 0)  # year, month, day, hours, minutes, seconds
    return profile[:24] + date + profile[36:]


# ---- tensors and arrays -------------------------------------------------------------------------------


def _as_picture(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A view [1, 3, H, W] of a picture of any float type on any device, all of it finite."""
    shape = (1, *tensor.shape) if tensor.ndim == 3 else tuple(tensor.shape)
    if len(shape) != 4 or shape[:2] != (1, 3) or not tensor.numel() or not tensor.is_floating_point():
        raise InputError(_not_a_picture(what, tuple(tensor.shape), tensor.dtype))
    view = tensor.detach().view(shape)
    if not all(torch.isfinite(end.float()) for end in torch.aminmax(view)):
        raise InputError(f"{what} holds values that are infinite or not numbers; it cannot be a picture.")
    return view


def _from_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy [1, 3, H, W] in float32 on the CPU."""
    view = _as_picture(tensor, "The tensor")
    return view.to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)


def _from_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """A copy [1, 3, H, W] in float32."""
    rows_first = array.ndim == 3 and array.shape[2] == 3
    levels = rows_first and array.dtype == np.uint8
    if array.dtype.kind != "f" and not levels:
        raise InputError(_not_a_picture("The array", array.shape, array.dtype))
    planes = np.array(np.moveaxis(array, 2, 0) if rows_first else array, np.float32, order="C")
    if levels:
        planes /= np.float32(255)
    return _as_picture(torch.from_numpy(planes), "The array")


def _in_range(picture: torch.Tensor, what: str) -> torch.Tensor:
    low, high = (float(end) for end in torch.aminmax(picture))
    if low < 0 or high > 1:
        raise InputError(
            f"{what} holds values from {low:g} to {high:g}; a picture's lie in [0, 1]. "
            "Divide levels of 0 … 255 by 255, and clamp what lies a little outside."
        )
    return picture


def _not_a_picture(what: str, shape: tuple[int, ...], dtype: object) -> str:
    arrays = ", or an array [H, W, 3] in floats or uint8" if what == "The array" else ""
    return (
        f"{what} has the shape {list(shape)} and the type {dtype}; "
        f"a picture is float [3, H, W] or [1, 3, H, W] in [0, 1]{arrays}."
    )


def to_pil(tensor: torch.Tensor, alpha: torch.Tensor | None = None) -> Image.Image:
    """Return a picture [3, H, W] or [1, 3, H, W] as an RGB image of 8 bits, or RGBA when `alpha` is given.

    Values outside [0, 1] are clamped; all are rounded to the nearest level. With `alpha` [1, 1, H, W] the
    colours are what gives the picture again when laid on white, as far as colours can.

    Raises:
        InputError: for another shape or dtype, or values that are not finite.
    """
    return _image_to_write(*_as_layers(tensor, alpha))


def _image_to_write(rgb: torch.Tensor, alpha: torch.Tensor | None) -> Image.Image:
    """RGB or RGBA of 8 bits, put together band by band."""
    image = Image.new("RGB" if alpha is None else "RGBA", (rgb.shape[3], rgb.shape[2]))
    for start, levels in _level_bands(rgb, alpha, np.uint8):
        image.paste(Image.fromarray(levels), (0, start))
    return image


def _level_bands(
    rgb: torch.Tensor, alpha: torch.Tensor | None, dtype: type[np.uint8] | type[np.uint16]
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(first row, levels [h, W, 3 or 4]) of one band after the other."""
    for start, stop in _bands(rgb.shape[3], rgb.shape[2]):
        band = _unit_band(rgb[:, :, start:stop], None if alpha is None else alpha[:, :, start:stop])
        yield start, _levels(band, dtype)


def _image_of(unit: Floats) -> Image.Image:
    levels = _levels(unit, np.uint8)
    return Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)


def _levels(unit: Floats, dtype: type[np.uint8] | type[np.uint16]) -> npt.NDArray[Any]:
    levels: npt.NDArray[Any] = np.rint(unit * np.float32(np.iinfo(dtype).max)).astype(dtype)
    return levels


def _as_layers(tensor: torch.Tensor, alpha: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A picture and its alpha as they were given, found to be both and to belong together."""
    rgb = _as_picture(tensor, "The picture")
    if alpha is not None and (alpha.shape != (1, 1, *rgb.shape[2:]) or not alpha.is_floating_point()):
        raise InputError(
            f"alpha has the shape {list(alpha.shape)} and the type {alpha.dtype}; "
            f"to this picture belongs float {[1, 1, *rgb.shape[2:]]} in [0, 1]."
        )
    return rgb, alpha


def _unit_band(rgb: torch.Tensor, alpha: torch.Tensor | None) -> Floats:
    """[h, W, 3], or [h, W, 4] with alpha, in [0, 1]."""
    colour: Floats = rgb.to("cpu", torch.float32).clamp(0, 1)[0].movedim(0, -1).numpy()
    if alpha is None:
        return colour
    cover = alpha.detach().to("cpu", torch.float32).clamp(0, 1)[0, 0, :, :, None].nan_to_num(1).numpy()
    # rgb = colour · cover + white · (1 − cover), solved for the colour where anything is covered
    own = np.where(cover > 0, 1 - (1 - colour) / np.maximum(cover, np.finfo(np.float32).tiny), colour)
    return np.concatenate([np.clip(own, 0, 1), cover], axis=-1)


# ---- writing ------------------------------------------------------------------------------------------


def check_output(
    path: str | os.PathLike[str], *, overwrite: bool, size: tuple[int, int] | None = None
) -> Path:
    """Find out before any computing whether a picture can be written to `path`; make its folder.

    `size` is the width and height in pixels, when they are known.

    Raises:
        OutputError: for an unknown extension, a folder that cannot be made or written to, a file that
            exists without `overwrite`, or a size that the format cannot hold.
    """
    place = Path(path)
    _check_format(place, size)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        taken = _exists(place)
        if place.is_dir():
            raise OutputError(f"{place} is a folder. Name a file in it, such as {place / 'picture.png'}.")
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except (OSError, ValueError) as error:
        raise OutputError(f"{place} cannot be written: {_reason(error)}. Choose another place.") from error
    if taken and not overwrite:
        raise OutputError(f"{place} exists already. Choose another name, or replace it with --overwrite.")
    return place


def _exists(path: Path) -> bool:
    """Whether a name is taken, be it by a broken link; unlike `Path.exists` it hides no other error."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _check_format(path: Path, size: tuple[int, int] | None) -> None:
    suffix = path.suffix.lower()
    if suffix not in WRITE_FORMATS:
        raise OutputError(
            f"{path} ends in {suffix!r}, which is no format that can be written."
            f"{did_you_mean(suffix, WRITE_FORMATS)} Formats: {', '.join(WRITE_FORMATS)}."
        )
    longest = _LONGEST_SIDE.get(WRITE_FORMATS[suffix])
    if size is not None and longest is not None and max(size) > longest:
        raise OutputError(
            f"{path} would have {size[0]} x {size[1]} pixels, and {WRITE_FORMATS[suffix]} holds at most "
            f"{longest:,} a side. Choose .png or .tiff."
        )


def save_picture(
    tensor: torch.Tensor,
    path: str | os.PathLike[str],
    *,
    record: Mapping[str, Any] | None = None,
    alpha: torch.Tensor | None = None,
    overwrite: bool = False,
    quality: int = 95,
) -> Path:
    """Write a picture float [3, H, W] or [1, 3, H, W] so that there is a whole file or none.

    The extension decides: PNG, JPEG and WebP in 8 bits, TIFF in 16; JPEG and WebP with `quality` 1 … 100.
    Values outside [0, 1] are clamped. `alpha` [1, 1, H, W] is kept as in `to_pil`, but not in a JPEG, which
    shows the picture on white. The file is marked as sRGB and carries `record` as JSON, which `read_record`
    reads; a JPEG has room for 65,000 characters and leaves out "history" first, then the longest entries.
    The same values give the same bytes.

    Raises:
        InputError: for another shape or dtype, or values that are not finite.
        OutputError: as `check_output`.
        SaveError: when the writing itself fails, as on a full disk; nothing is left behind.
    """
    place = Path(path)
    rgb, alpha = _as_layers(tensor, alpha if WRITE_FORMATS.get(place.suffix.lower()) != "JPEG" else None)
    check_output(place, overwrite=overwrite, size=(rgb.shape[3], rgb.shape[2]))
    try:
        with _appearing(place, overwrite=overwrite) as file:
            _encode(file, WRITE_FORMATS[place.suffix.lower()], rgb, alpha, record, quality)
    except (OSError, ValueError, MemoryError) as error:
        raise SaveError(
            f"{place} could not be written: {_reason(error)}. Make room, or choose another place."
        ) from error
    return place


def _encode(
    file: BinaryIO,
    kind: str,
    rgb: torch.Tensor,
    alpha: torch.Tensor | None,
    record: Mapping[str, Any] | None,
    quality: int,
) -> None:
    """Write a whole file."""
    if kind == "TIFF":
        _encode_tiff(file, rgb, alpha, record)
        return
    options: dict[str, Any] = {"icc_profile": _srgb_profile()}
    if kind == "PNG":
        options["pnginfo"] = _png_texts(record)
    else:
        options |= {"quality": quality, "exif": _exif(record, _EXIF_ROOM if kind == "JPEG" else None)}
        options |= {"subsampling": 0} if kind == "JPEG" else {"method": 4}
    _image_to_write(rgb, alpha).save(file, kind, **options)


def _encode_tiff(
    file: BinaryIO, rgb: torch.Tensor, alpha: torch.Tensor | None, record: Mapping[str, Any] | None
) -> None:
    """In 16 bits; above 4 GB, tifffile makes it a BigTIFF."""
    pixels = np.empty((*rgb.shape[2:], 3 if alpha is None else 4), np.uint16)
    for start, levels in _level_bands(rgb, alpha, np.uint16):
        pixels[start : start + len(levels)] = levels
    tifffile.imwrite(
        file,
        pixels,
        photometric="rgb",
        extrasamples=None if alpha is None else ["unassalpha"],
        description=None if record is None else _as_json(record),
        software=_SOFTWARE,
        iccprofile=_srgb_profile(),
        metadata=None,  # else tifffile describes the array where the record belongs
    )


def encode_png(tensor: torch.Tensor) -> bytes:
    """Return the PNG of a picture float [3, H, W] or [1, 3, H, W] in 8 bits, marked as sRGB, without a record.

    Values outside [0, 1] are clamped.

    Raises:
        InputError: for another shape or dtype, or values that are not finite.
    """
    buffer = io.BytesIO()
    _encode(buffer, "PNG", *_as_layers(tensor, None), record=None, quality=95)
    return buffer.getvalue()


def write_whole(path: Path, data: bytes | Iterable[bytes | memoryview], *, overwrite: bool) -> None:
    """Write beside the target and rename, so that no one ever sees half a file under its name.

    `data` may come in parts, so that a large file need not be in memory at once.

    Raises:
        OSError: as writing does, or when the name is taken and `overwrite` is false; nothing is left behind.
    """
    with _appearing(path, overwrite=overwrite) as file:
        file.writelines([data] if isinstance(data, bytes) else data)


@contextlib.contextmanager
def _appearing(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to be written, which has its name only when it is whole; when something fails, nothing is left."""
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, overwrite=overwrite)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _publish(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Give the file its name; without `overwrite`, a file that appeared meanwhile is left alone."""
    if not overwrite:
        try:
            path.hardlink_to(temporary)  # refuses a taken name, which a renaming would not
            return
        except OSError:  # taken, or a file system without hard links
            if _exists(path):
                raise
    temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where folders can be synchronised (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---- the record in the file ---------------------------------------------------------------------------


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings and measurements that `save_picture` put into a file; tuples come back as lists.

    Raises:
        PictureError: when the file cannot be read, or holds no record.
    """
    name = os.fspath(path)
    with _opened(name) as file, _naming(name):
        exif = _webp_exif(file)
        text = _find_record(_identify(file, name)) if exif is None else _user_comment(exif)
    try:
        record = json.loads(text)["stylize"]
    except (ValueError, TypeError, KeyError):
        record = None
    if not isinstance(record, dict):
        raise PictureError(
            f"{name} holds no settings of stylize: another program made it, or saved it again without them."
        )
    return record


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings in a file's record, as `Settings.as_dict` gave them.

    Raises:
        PictureError: when the file cannot be read, or holds no settings.
        SettingsError: when this release does not know them.
    """
    record = read_record(path)
    settings = record.get("settings")
    if not isinstance(settings, dict):
        raise PictureError(f"{os.fspath(path)} tells something of how it was made, but its settings are missing.")
    try:
        Settings.from_sources(settings)
    except SettingsError as error:
        raise SettingsError(
            f"{os.fspath(path)}: {error} Release {record.get('version', '(unknown)')} of stylize made it, and this "
            f"is {__version__}: update, or choose the settings anew."
        ) from error
    return settings


def _find_record(image: ImageFile.ImageFile) -> str:
    if image.format == "PNG":
        return str(image.info.get("stylize", ""))
    if image.format == "TIFF":
        return str(image.getexif().get(ExifTags.Base.ImageDescription, ""))
    return _user_comment(image.getexif())


def _user_comment(exif: Image.Exif) -> str:
    comment = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
    return comment[8:].decode("ascii", "replace") if isinstance(comment, bytes) else ""


def _webp_exif(file: BinaryIO) -> Image.Exif | None:
    """The EXIF data of a WebP file, if it is one and has them.

    Pillow reads them too, but makes its decoder first, which from release 13 on holds the size to the limit of the
    whole process (see `_identify`). The chunks are those of RIFF: a name, a size, as many bytes, an even number.
    """
    file.seek(0)
    start = file.read(12)
    if start[:4] != b"RIFF" or start[8:] != b"WEBP":
        return None
    while len(head := file.read(8)) == 8:
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"EXIF":
            exif = Image.Exif()
            exif.load(file.read(size))
            return exif
        file.seek(size + size % 2, os.SEEK_CUR)
    return None


def _as_json(record: Mapping[str, Any]) -> str:
    """ASCII, which each format takes; what JSON does not know becomes text rather than an error."""
    return json.dumps({"stylize": dict(record)}, default=str)


def _png_texts(record: Mapping[str, Any] | None) -> PngInfo:
    texts = PngInfo()
    texts.add_text("Software", _SOFTWARE)
    if record is not None:
        texts.add_itxt("stylize", _as_json(record))
    return texts


def _exif(record: Mapping[str, Any] | None, room: int | None) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = _SOFTWARE
    if record is not None:
        text = _as_json(record if room is None else _shortened(record, room))
        code = b"ASCII\0\0\0"  # EXIF 2.32, 4.6.5: the character code of a UserComment
        exif[ExifTags.IFD.Exif] = {ExifTags.Base.UserComment: code + text.encode("ascii")}
    return exif.tobytes()


def _shortened(record: Mapping[str, Any], room: int) -> dict[str, Any]:
    """As much of the record as fits: without its history first, then without its longest entries."""
    kept = dict(record)
    while kept and len(_as_json(kept)) > room:
        longest = max(kept, key=lambda name: len(_as_json({name: kept[name]})))
        del kept["history" if "history" in kept else longest]
    return kept
