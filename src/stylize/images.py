"""The one room between files and pictures.

Inside the project a picture is a float32 tensor [1, 3, H, W]: upright, RGB, sRGB, 0 = black, 1 = white.
Here files, Pillow images and arrays become such a tensor, and such a tensor becomes a file again.

Nothing of Pillow's is changed for the rest of the process: no truncated files are allowed, and the limit
on pixels is an argument. Transparent pictures are laid on white, with the plain sRGB values as browsers do.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import tifffile
import torch
from PIL import ExifTags, Image, ImageCms, ImageFile
from PIL.PngImagePlugin import PngInfo

from stylize import __version__
from stylize.errors import InputError, OutputError, PictureError, SaveError
from stylize.settings import did_you_mean

DEFAULT_MAX_PIXELS = 178_956_970  # where Pillow by itself refuses to open a picture

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
_EXIF_ROOM = 65_000  # characters of the record in a JPEG, whose EXIF block ends at 65,533 bytes

Floats: TypeAlias = npt.NDArray[np.float32]
Source: TypeAlias = "str | os.PathLike[str] | Image.Image | torch.Tensor | npt.NDArray[Any]"


@dataclass(frozen=True)
class Picture:
    """A picture that was read."""

    tensor: torch.Tensor  # [1, 3, H, W] float32 on the CPU, sRGB in [0, 1], on white where transparent
    alpha: torch.Tensor | None  # [1, 1, H, W] float32 in [0, 1]; None when opaque everywhere
    source: str  # the path as given, or what else it was
    notices: tuple[str, ...] = ()  # what the user should know: one sentence each

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.tensor.shape[3], self.tensor.shape[2]


@dataclass(frozen=True)
class _Raw:
    """Pixels as a file has them: in its own colours, and not yet upright."""

    pixels: Image.Image | Floats  # 8 bits in mode L, RGB or CMYK; or [H, W, 1 or 3] in [0, 1]
    alpha: Floats | None  # [H, W, 1] in [0, 1]
    profile: bytes | None  # ICC
    orientation: int  # as EXIF counts, 1 … 8


# ---- reading ------------------------------------------------------------------------------------------


def read_picture(source: Source, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture:
    """Read a file, a Pillow image, a tensor or an array as an upright sRGB picture.

    A file is known by its content, whatever its name says. Its orientation is applied, its colour profile
    converted to sRGB, and its transparency laid on white and kept beside the picture. A tensor is float
    [3, H, W] or [1, 3, H, W] in [0, 1]; an array is that too, or [H, W, 3] in floats or uint8 (0 … 255);
    both are taken as sRGB.

    Raises:
        PictureError: for a file that is missing, damaged, not a picture, or larger than `max_pixels`.
        InputError: for a tensor or array of another shape, dtype or range.
    """
    if isinstance(source, torch.Tensor):
        return Picture(_in_range(_as_picture(source, "The tensor"), "The tensor"), None, "a tensor")
    if isinstance(source, np.ndarray):
        return Picture(_in_range(_from_array(source), "The array"), None, "an array")
    if isinstance(source, Image.Image):
        notices: list[str] = []
        with _naming("The PIL image"):
            _check_pixels(source.size, max_pixels)
            return _finish(_raw_image(source, notices), "a PIL image", notices)
    if isinstance(source, (str, os.PathLike)):
        return _read_file(os.fspath(source), max_pixels)
    raise InputError(
        f"A picture cannot be a {type(source).__name__}. Give a path, a PIL image, a tensor or an array."
    )


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
    return (size[1], size[0]) if orientation >= 5 else size


def _read_file(path: str, max_pixels: int) -> Picture:
    notices: list[str] = []
    with _opened(path) as file, _naming(path):
        raw = _raw_tiff(file, max_pixels, notices) if _is_tiff(file) else None
        if raw is None:
            image = _identify(file, path)
            _check_pixels(image.size, max_pixels)
            if image.format in _ANIMATED and getattr(image, "is_animated", False):
                notices.append("is animated; only its first frame is used")
            raw = _raw_image(image, notices)
        return _finish(raw, path, notices)


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
            return factory(file, path)
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
        return _Raw(*_deep_grey(image), profile, orientation)
    alpha = None
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode in ("1", "L", "La", "LA") else "RGBA")
        alpha = _unit(image.getchannel("A"))
    if image.mode == "LAB":  # measures colour by itself; a profile would have nothing to add
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image, profile = _known(ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")), None
    elif image.mode in ("1", "LA"):
        image = image.convert("L")
    elif image.mode not in ("L", "RGB", "CMYK"):
        image = image.convert("RGB")
    return _Raw(image, alpha, profile, orientation)


def _deep_grey(image: Image.Image) -> tuple[Floats, Floats | None]:
    """Grey of 16 bits (modes I, I;16 …) or in floats (F), and its transparency."""
    values = np.asarray(image)[..., None]
    top = 1 if image.mode == "F" else 65_535  # Pillow keeps 16 bits in mode I, too
    grey = values.astype(np.float32) / np.float32(top)
    _check_values(grey, top)
    key = image.info.get("transparency")  # one level of grey stands for "nothing here"
    return grey, None if key is None else (values != key).astype(np.float32)


def _check_values(values: Floats, top: int = 1) -> None:
    low, high = float(values.min()) * top, float(values.max()) * top
    if not 0 <= low <= high <= top:  # not a number is neither
        raise _UnsuitedError(
            f"holds values from {low:g} to {high:g}, which have to lie in 0 … {top}. Rescale them first."
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
        colours, alpha = _tiff_colours(values, page)
        return _Raw(colours, alpha, profile and profile.value, _tiff_orientation(page))


def _is_plain(page: Any) -> bool:
    """Whether a TIFF's page is grey or RGB, in whole bytes or floats."""
    kind = page.dtype
    numbers = kind is not None and kind.kind in "uf" and page.bitspersample == 8 * kind.itemsize
    return numbers and page.photometric in (0, 1, 2) and page.axes in ("YX", "YXS", "SYX")


def _tiff_colours(values: npt.NDArray[Any], page: Any) -> tuple[Image.Image | Floats, Floats | None]:
    """Colours and alpha of a TIFF's page, as in `_Raw`."""
    values = {"YX": values[..., None], "SYX": np.moveaxis(values, 0, -1)}.get(page.axes, values)
    top = np.iinfo(values.dtype).max if values.dtype.kind == "u" else 1
    unit: Floats = values.astype(np.float32) / np.float32(top)
    samples = 3 if page.photometric == 2 else 1
    colours = 1 - unit[..., :1] if page.photometric == 0 else unit[..., :samples]  # 0 = white is nought
    alpha = None
    if page.extrasamples and page.extrasamples[0] in (1, 2):
        alpha = unit[..., samples : samples + 1]
        _check_values(alpha)
        if page.extrasamples[0] == 1:  # colours that are multiplied by alpha already
            colours = np.minimum(colours / np.maximum(alpha, np.finfo(np.float32).tiny), 1)
    _check_values(colours)
    return _image_of(colours) if values.dtype == np.uint8 else colours, alpha


def _finish(raw: _Raw, source: str, notices: list[str]) -> Picture:
    """Convert to sRGB, lay on white, and turn upright."""
    rgb = _in_srgb(raw.pixels, raw.profile, notices)
    alpha = raw.alpha if raw.alpha is not None and raw.alpha.min() < 1 else None
    if alpha is not None:
        rgb = rgb * alpha + (1 - alpha)
    name = "The picture" if source == "a PIL image" else Path(source).name
    return Picture(
        tensor=_upright(rgb, raw.orientation),
        alpha=None if alpha is None else _upright(alpha, raw.orientation),
        source=source,
        notices=tuple(f"{name} {notice}." for notice in notices),
    )


def _upright(values: Floats, orientation: int) -> torch.Tensor:
    """[H, W, C] as it lies in the file -> [1, C, H, W] upright.

    Source: EXIF 2.32, tag 0x0112: on which sides of the picture the first row and column are.
    """
    if orientation in (5, 6, 7, 8):
        values = values.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[::-1]
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(values, -1, 0)))[None]


def _unit(image: Image.Image) -> Floats:
    """[H, W, C] in [0, 1] of an image of 8 bits."""
    values: Floats = np.asarray(image).astype(np.float32) / np.float32(255)
    return values if values.ndim == 3 else values[..., None]


# ---- colours ------------------------------------------------------------------------------------------


def _in_srgb(pixels: Image.Image | Floats, profile: bytes | None, notices: list[str]) -> Floats:
    """Colours [H, W, 3] in sRGB, whatever they were in."""
    if profile:
        try:
            return _through_profile(pixels, profile, notices)
        except (ImageCms.PyCMSError, ValueError, OSError) as error:
            notices.append(f"has a colour profile that cannot be used ({_reason(error)}); it is left out")
    if _mode(pixels) == "CMYK":
        notices.append("is CMYK without a usable profile; its colours are a guess")
    return _plain_rgb(pixels)


def _through_profile(pixels: Image.Image | Floats, profile: bytes, notices: list[str]) -> Floats:
    source = ImageCms.getOpenProfile(io.BytesIO(profile))
    space = source.profile.xcolor_space.strip()
    mode, own = _PROFILE_MODES.get(space, ""), _mode(pixels)
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
        return _plain_rgb(pixels)
    if not isinstance(pixels, Image.Image):  # Pillow converts colours in 8 bits only
        notices.append("has a colour profile other than sRGB; to convert it, its colours became 8 bits")
        pixels = _image_of(pixels)
    return _unit(_known(ImageCms.applyTransform(pixels.convert(mode), transform)))


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


def _mode(pixels: Image.Image | Floats) -> str:
    if isinstance(pixels, Image.Image):
        return pixels.mode
    return "L" if pixels.shape[-1] == 1 else "RGB"


def _plain_rgb(pixels: Image.Image | Floats) -> Floats:
    """[H, W, 3] without any profile."""
    if isinstance(pixels, Image.Image):
        return _unit(pixels.convert("RGB"))
    return np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels


def _srgb_profile() -> bytes:
    """An ICC profile of sRGB that is the same at any time: its date of making is replaced by a fixed one."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    date = struct.pack(">6H", 2000, 1, 1, 0, 0, 0)  # year, month, day, hours, minutes, seconds
    return profile[:24] + date + profile[36:]


# ---- tensors and arrays -------------------------------------------------------------------------------


def _as_picture(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A copy [1, 3, H, W] in float32 on the CPU, all of it finite."""
    shape = (1, *tensor.shape) if tensor.ndim == 3 else tuple(tensor.shape)
    if len(shape) != 4 or shape[:2] != (1, 3) or not tensor.numel() or not tensor.is_floating_point():
        raise InputError(_not_a_picture(what, tuple(tensor.shape), tensor.dtype))
    copy = tensor.detach().to("cpu", torch.float32, copy=True).reshape(shape).contiguous()
    if not all(torch.isfinite(end) for end in torch.aminmax(copy)):
        raise InputError(f"{what} holds values that are infinite or not numbers; it cannot be a picture.")
    return copy


def _from_array(array: npt.NDArray[Any]) -> torch.Tensor:
    rows_first = array.ndim == 3 and array.shape[2] == 3
    if rows_first and array.dtype == np.uint8:
        array = array.astype(np.float32) / np.float32(255)
    if array.dtype.kind != "f":
        raise InputError(_not_a_picture("The array", array.shape, array.dtype))
    planes = np.moveaxis(array, 2, 0) if rows_first else array
    return _as_picture(torch.from_numpy(np.array(planes, np.float32, order="C")), "The array")


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
    return _image_of(_layers(tensor, alpha))


def _image_of(unit: Floats) -> Image.Image:
    levels = _levels(unit, np.uint8)
    return Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)


def _levels(unit: Floats, dtype: type[np.uint8] | type[np.uint16]) -> npt.NDArray[Any]:
    levels: npt.NDArray[Any] = np.rint(unit * np.float32(np.iinfo(dtype).max)).astype(dtype)
    return levels


def _layers(tensor: torch.Tensor, alpha: torch.Tensor | None) -> Floats:
    """[H, W, 3], or [H, W, 4] with alpha, in [0, 1]."""
    rgb = _as_picture(tensor, "The picture").clamp_(0, 1)[0].movedim(0, -1).numpy()
    if alpha is None:
        return rgb
    if alpha.shape != (1, 1, *rgb.shape[:2]) or not alpha.is_floating_point():
        raise InputError(
            f"alpha has the shape {list(alpha.shape)} and the type {alpha.dtype}; "
            f"to this picture belongs float {[1, 1, *rgb.shape[:2]]} in [0, 1]."
        )
    cover = alpha.detach().to("cpu", torch.float32).clamp(0, 1)[0, 0, :, :, None].nan_to_num(1).numpy()
    # rgb = colour · cover + white · (1 − cover), solved for the colour where anything is covered
    colour = np.where(cover > 0, 1 - (1 - rgb) / np.maximum(cover, np.finfo(np.float32).tiny), rgb)
    return np.concatenate([np.clip(colour, 0, 1), cover], axis=-1)


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
    layers = _layers(tensor, alpha if WRITE_FORMATS.get(place.suffix.lower()) != "JPEG" else None)
    check_output(place, overwrite=overwrite, size=(layers.shape[1], layers.shape[0]))
    try:
        data = _encode(layers, WRITE_FORMATS[place.suffix.lower()], record, quality)
        write_whole(place, data, overwrite=overwrite)
    except (OSError, ValueError, MemoryError) as error:
        raise SaveError(
            f"{place} could not be written: {_reason(error)}. Make room, or choose another place."
        ) from error
    return place


def _encode(layers: Floats, kind: str, record: Mapping[str, Any] | None, quality: int) -> bytes:
    """The bytes of a whole file: in memory, so that a failure here touches no disk."""
    buffer = io.BytesIO()
    if kind == "TIFF":
        tifffile.imwrite(
            buffer,
            _levels(layers, np.uint16),
            photometric="rgb",
            extrasamples=["unassalpha"] if layers.shape[-1] == 4 else None,
            description=None if record is None else _as_json(record),
            software=_SOFTWARE,
            iccprofile=_srgb_profile(),
            metadata=None,  # else tifffile describes the array where the record belongs
        )
        return buffer.getvalue()
    options: dict[str, Any] = {"icc_profile": _srgb_profile()}
    if kind == "PNG":
        options["pnginfo"] = _png_texts(record)
    else:
        options |= {"quality": quality, "exif": _exif(record, _EXIF_ROOM if kind == "JPEG" else None)}
        options |= {"subsampling": 0} if kind == "JPEG" else {"method": 4}
    _image_of(layers).save(buffer, kind, **options)
    return buffer.getvalue()


def encode_png(tensor: torch.Tensor) -> bytes:
    """Return the PNG of a picture float [3, H, W] or [1, 3, H, W] in 8 bits, marked as sRGB, without a record.

    Values outside [0, 1] are clamped.

    Raises:
        InputError: for another shape or dtype, or values that are not finite.
    """
    return _encode(_layers(tensor, None), "PNG", None, quality=95)


def write_whole(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write beside the target and rename, so that no one ever sees half a file under its name.

    Raises:
        OSError: as writing does, or when the name is taken and `overwrite` is false; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
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
        text = _find_record(_identify(file, name))
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
    """
    settings = read_record(path).get("settings")
    if not isinstance(settings, dict):
        raise PictureError(f"{os.fspath(path)} tells something of how it was made, but its settings are missing.")
    return settings


def _find_record(image: ImageFile.ImageFile) -> str:
    if image.format == "PNG":
        return str(image.info.get("stylize", ""))
    if image.format == "TIFF":
        return str(image.getexif().get(ExifTags.Base.ImageDescription, ""))
    comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
    return comment[8:].decode("ascii", "replace") if isinstance(comment, bytes) else ""


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
