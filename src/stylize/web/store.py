"""The session's folder: what visitors send and what was painted for them, each under a name nobody can guess.

A path is never made of what a visitor says. Whoever knows a picture's key may use it; the keys are random, and
only the one who sent a picture, or had it painted, is told its key.
"""

from __future__ import annotations

import io
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL import Image

from stylize import images
from stylize.api import Result
from stylize.errors import PictureError
from stylize.web.limits import Limits, naming_only, safe_name

FORMATS = ("png", "jpg", "tiff")  # in which a result can be fetched
PREVIEW = 1024  # px, long side
THUMBNAIL = 192
UNCLAIMED_S = 3600.0  # that a picture is kept which was sent and never used
UNUSED_S = 24 * 3600.0  # that one is kept which was; its page may still be open


@dataclass(frozen=True)
class Kept:
    """A picture in the folder."""

    key: str
    path: Path
    name: str  # as it is shown
    size: tuple[int, int]  # width and height in pixels
    weight: int  # bytes on the disk
    owner: str = ""  # the session; nobody's until it is used
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Painted:
    """A result in the folder, in all formats."""

    key: str
    folder: Path
    stem: str  # of its files' names
    caption: str
    content: str  # the key of what it was painted from
    size: tuple[int, int]
    owner: str
    weight: int = 0
    since: float = field(default_factory=time.monotonic)

    def path(self, suffix: str) -> Path:
        """The file in one of `FORMATS`."""
        return self.folder / f"{self.stem}.{suffix}"


class Store:
    """A folder and what is in it; it may be used from several threads.

    Args:
        folder: an empty one.
        limits: how much is kept for one visitor.
        gallery: pictures that everybody may use.
    """

    def __init__(self, folder: Path, limits: Limits, gallery: Iterable[Path] = ()) -> None:
        self._limits = limits
        self._root = folder
        self._lock = threading.Lock()
        self._decoding = threading.Semaphore(2)  # a large picture takes much memory while it is read
        self._pictures: dict[str, Kept] = {}
        self._results: dict[str, Painted] = {}
        self._previews: dict[tuple[Path, int], bytes] = {}
        self._gallery = {
            path.stem: Kept(path.stem, path, path.name, images.probe_size(path), weight=0) for path in gallery
        }

    # ---- pictures that were sent ------------------------------------------------------------------------

    def receive(self, data: bytes, name: str) -> Kept:
        """Keep a picture that was sent, once it is known to be one.

        Raises:
            PictureError: for what is no picture, is damaged, or has too many pixels.
        """
        key = secrets.token_urlsafe(16)
        folder = self._root / key
        folder.mkdir()
        path = folder / safe_name(name)
        try:
            path.write_bytes(data)
            size = check_upload(path, self._limits)
            self._preview(path, PREVIEW)  # decodes all of it: what is damaged is refused here
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        kept = Kept(key, path, path.name, size, len(data))
        with self._lock:
            self._pictures[key] = kept
            self._make_room()
        return kept

    def picture(self, key: str, owner: str | None = None) -> Kept:
        """The picture of a key, of the gallery or sent; from now on it is its owner's, if one is named.

        Raises:
            PictureError: when there is none.
        """
        if key in self._gallery:
            return self._gallery[key]
        with self._lock:
            kept = self._pictures.get(key)
            if kept is None:
                raise PictureError(
                    f"There is no picture {key!r}, or it is no longer here. Choose it again, or one of those "
                    f"that come with the program: {', '.join(self._gallery)}."
                )
            if owner:
                kept = self._pictures[key] = replace(kept, owner=kept.owner or owner, since=time.monotonic())
                self._limit(owner)
            return kept

    def preview(self, key: str, long_side: int = PREVIEW) -> bytes:
        """A JPEG of a picture for the page, at most so many pixels a side.

        Raises:
            PictureError: when there is no such picture.
        """
        return self._preview(self.picture(key).path, long_side)

    def _preview(self, path: Path, long_side: int) -> bytes:
        """Made once, and kept as long as the picture."""
        with self._lock:
            known = self._previews.get((path, long_side))
        if known is None:
            known = self._shrunk(path, long_side)
            with self._lock:
                self._previews[path, long_side] = known
        return known

    def _shrunk(self, path: Path, long_side: int) -> bytes:
        with self._decoding, naming_only(path):
            picture = images.read_picture(path, max_pixels=self._limits.pixels, long_side=long_side)
            return small_jpeg(images.to_pil(picture.tensor), long_side)

    # ---- results ----------------------------------------------------------------------------------------

    def keep(self, result: Result, *, owner: str, content: str, stem: str, caption: str) -> Painted:
        """Save a result in all formats, with its settings inside.

        Raises:
            SaveError: when it cannot be written.
        """
        key = secrets.token_urlsafe(16)
        folder = self._root / key
        folder.mkdir()
        height, width = result.tensor.shape[2:]
        painted = Painted(key, folder, safe_name(stem), caption, content, (width, height), owner)
        try:
            for suffix in FORMATS:
                result.save(painted.path(suffix))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        painted = replace(painted, weight=sum(painted.path(suffix).stat().st_size for suffix in FORMATS))
        with self._lock:
            self._results[key] = painted
            self._limit(owner)
            self._make_room()
        return painted

    def result(self, key: str) -> Painted:
        """The result of a key.

        Raises:
            PictureError: when there is none.
        """
        with self._lock:
            painted = self._results.get(key)
        if painted is None:
            raise PictureError("This result is no longer here. Paint it again.")
        return painted

    def thumbnail(self, painted: Painted) -> bytes:
        """A small JPEG of a result."""
        return self._preview(painted.path("png"), THUMBNAIL)

    def forget(self, painted: Painted) -> None:
        """Remove a result."""
        with self._lock:
            self._remove(painted)

    def results(self, owner: str) -> list[Painted]:
        """A session's results, the latest first."""
        with self._lock:
            return [each for each in self._results.values() if each.owner == owner][::-1]

    # ---- cleaning ---------------------------------------------------------------------------------------

    def drop(self, owner: str) -> None:
        """Remove all that is a session's."""
        with self._lock:
            for each in self._all():
                if each.owner == owner:
                    self._remove(each)

    def sweep(self) -> None:
        """Remove what was sent or painted long ago and is not used."""
        with self._lock:
            now = time.monotonic()
            for each in self._all():
                if now - each.since > (UNUSED_S if each.owner else UNCLAIMED_S):
                    self._remove(each)

    def _all(self) -> list[Kept | Painted]:
        return [*self._pictures.values(), *self._results.values()]

    def _make_room(self) -> None:
        """Let go of the oldest of all when the folder is full: first what nobody has used."""
        everything = sorted(self._all(), key=lambda each: (bool(each.owner), each.since))
        excess = sum(each.weight for each in everything) - self._limits.folder_bytes
        for each in everything[:-1]:
            if excess > 0:
                excess -= each.weight
                self._remove(each)

    def _limit(self, owner: str) -> None:
        """Let go of a session's oldest pictures and results when there are too many."""
        for collection in (self._pictures, self._results):
            mine = [each for each in collection.values() if each.owner == owner]
            for each in mine[: max(0, len(mine) - self._limits.pictures)]:
                self._remove(each)

    def _remove(self, each: Kept | Painted) -> None:
        (self._pictures if isinstance(each, Kept) else self._results).pop(each.key, None)
        folder = each.path.parent if isinstance(each, Kept) else each.folder
        self._previews = {place: data for place, data in self._previews.items() if folder not in place[0].parents}
        shutil.rmtree(folder, ignore_errors=True)


def check_upload(path: Path, limits: Limits) -> tuple[int, int]:
    """Return width and height in pixels of a file that may be decoded, from its header alone.

    Raises:
        PictureError: when it is no picture or has too many pixels; the text names the file, not its folder.
    """
    with naming_only(path):
        width, height = images.probe_size(path)
    if max(width, height) > limits.side or width * height > limits.pixels:
        raise PictureError(
            f"{path.name} has {width} × {height} pixels; this page takes at most {limits.side:,} a side and "
            f"{limits.pixels / 1e6:g} million in all. Make it smaller first."
        )
    return width, height


def small_jpeg(image: Image.Image, long_side: int, quality: int = 85) -> bytes:
    """A JPEG of an RGB image, shrunk to at most so many pixels a side."""
    image.thumbnail((long_side, long_side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def gallery_paths(kind: str) -> list[Path]:
    """The pictures that come with the program: kind is "content" or "style"."""
    folder = _assets() / kind
    return sorted(path for path in folder.glob("*") if path.suffix in (".png", ".jpg", ".webp"))


def _assets() -> Path:
    """In the installed package, or in the source tree when it runs from there."""
    installed = Path(__file__).parents[1] / "assets"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "assets"
