"""A folder of pictures -> the pictures to paint: in a fixed order, each with an output of its own.

Whether a file is a picture is found out from its first bytes, not from its name. Nothing is written here.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from stylize.errors import OutputError, PictureError, SettingsError
from stylize.images import WRITE_FORMATS, probe_size, read_suffixes

MARK = ".stylize"  # the folder of a manifest; a folder that holds one is an output folder
SYSTEM_NAMES = frozenset(
    {"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"}
    | {"system volume information", "lost+found"}
)
# A camera's raw file is a TIFF by its first bytes, whose first picture is a preview of a few pixels.
RAW_SUFFIXES = frozenset({".dng", ".nef", ".nrw", ".cr2", ".arw", ".orf", ".rw2", ".pef", ".srw", ".3fr"})
READERS = 8  # threads that look into files: they mostly wait for the disk


@dataclass(frozen=True)
class Job:
    """One picture to paint; plain data that can be sent to another process or machine."""

    name: str  # the output's path inside the output folder, with slashes
    origin: str  # the content's path inside its folder, with slashes, after the style's where there are several
    content: Path  # absolute, as all paths here
    styles: tuple[Path, ...]  # painted together
    out: Path
    size: tuple[int, int] = (0, 0)  # width and height of the content in pixels; 0 when `problem` is set
    problem: str | None = None  # why the content cannot be painted, as far as its header tells

    @property
    def pixels(self) -> int:
        """Of the content."""
        return self.size[0] * self.size[1]


@dataclass(frozen=True)
class Ignored:
    """A file or folder that is none of the pictures to paint."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Plan:
    """All pictures that a command means."""

    out: Path
    jobs: tuple[Job, ...]
    ignored: tuple[Ignored, ...]


@dataclass(frozen=True)
class _Found:
    """A file that is to be a picture."""

    path: Path
    relative: str  # inside the folder that was searched, with slashes
    size: tuple[int, int] = (0, 0)
    problem: str | None = None


def make_plan(
    content: Path,
    styles: Sequence[Path],
    out: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    suffix: str = ".png",
) -> Plan:
    """Every picture in the folder `content` with `styles` together, or with each of a folder of styles.

    The tree of folders is mirrored in `out`, in one subfolder for each style of a folder. `include` and
    `exclude` are patterns as `*.jpg` or `holiday/*`, for names or paths below `content`, in any case.

    Raises:
        PictureError: when there is no such folder, or no picture in it.
        SettingsError: when folders and pictures are mixed as styles.
        OutputError: for an unknown format, when an original would be overwritten, or for a file as `out`.
    """
    if suffix not in WRITE_FORMATS:
        raise OutputError(f"{suffix!r} is no format that can be written. Formats: {', '.join(WRITE_FORMATS)}.")
    content, out = content.resolve(), out.resolve()
    if content == out:
        raise OutputError(f"{out} is the folder of the originals. Choose another output folder.")
    in_the_way = next(each for each in (out, *out.parents) if os.path.exists(each))  # noqa: PTH110 - it never raises
    if not in_the_way.is_dir():
        raise OutputError(f"{in_the_way} is a file, and the output has to be a folder. Choose another --out.")
    found, ignored = _search(content, out)
    groups, unsuited = _style_groups([style.resolve() for style in styles], out)
    chosen = [each for each in found if _is_chosen(each.relative, include, exclude)]
    if not chosen:
        seen = f"; {len(found)} were left out by --include and --exclude" if found else ""
        raise PictureError(f"There is no picture to paint in {content}{seen}. Check the folder.")
    names = _unique_names([each.relative for each in chosen], suffix)
    jobs = tuple(
        Job(
            name=folder + name,
            origin=folder + each.relative,
            content=each.path,
            styles=group,
            out=out / (folder + name),
            size=each.size,
            problem=each.problem,
        )
        for folder, group in groups
        for each, name in zip(chosen, names, strict=True)
        if each.path not in group  # a style in its own manner is no picture anybody wants
    )
    _check_spares_inputs(jobs)
    return Plan(out, jobs, (*ignored, *unsuited))


def in_shard(job: Job, shard: tuple[int, int]) -> bool:
    """Whether a picture belongs to part i of n, counted from 1.

    The content's own path decides, so that a picture keeps its part when others come or go.
    """
    part, parts = shard
    return int(hashlib.sha256(os.fsencode(job.origin)).hexdigest(), 16) % parts == part - 1


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8).

    Raises:
        SettingsError: for anything else than i/n with 1 <= i <= n.
    """
    part, _, parts = text.partition("/")
    numbers = (int(part), int(parts)) if part.isdecimal() and parts.isdecimal() else (0, 0)
    return check_shard(numbers, text)


def check_shard(shard: tuple[int, int], text: str | None = None) -> tuple[int, int]:
    """Return what can be part i of n; `text` is how it was written.

    Raises:
        SettingsError: unless 1 <= i <= n.
    """
    if not 1 <= shard[0] <= shard[1]:
        raise SettingsError(f"shard is {text or shard!r}; it is i/n with i from 1 to n, such as 2/8.")
    return shard


# ---- searching ----------------------------------------------------------------------------------------


def _search(place: Path, out: Path) -> tuple[list[_Found], list[Ignored]]:
    """The pictures in a folder, or the one file, in the order of their paths; and what is none."""
    ignored: list[Ignored] = []
    if place.is_dir():
        paths = sorted(_walk(place, out, ignored), key=lambda path: path.relative_to(place).parts)
    elif place.is_file():
        paths, place = [place], place.parent
    else:
        raise PictureError(f"There is no file or folder {place}. Check the spelling.")
    suffixes = read_suffixes()
    found = []
    with ThreadPoolExecutor(READERS) as pool:
        for path, (size, problem) in zip(paths, pool.map(_probe, paths), strict=True):
            suffix = path.suffix.lower()
            if suffix in RAW_SUFFIXES:
                ignored.append(Ignored(path, "a camera's raw file; develop it first"))
            elif problem is not None and suffix not in suffixes:
                ignored.append(Ignored(path, "not a picture"))
            else:
                found.append(_Found(path, path.relative_to(place).as_posix(), size, problem))
    return found, ignored


def _walk(root: Path, out: Path, ignored: list[Ignored]) -> Iterator[Path]:
    """Regular files below `root`, without hidden ones, the system's, and whatever is elsewhere."""

    def unreadable(error: OSError) -> None:
        ignored.append(Ignored(Path(error.filename), f"cannot be opened: {error.strerror}"))

    for where, folders, files in os.walk(root, onerror=unreadable):
        folder = Path(where)
        kept = []
        for path in sorted(folder / name for name in folders if not _is_hidden(name)):
            reason = _why_not_entered(path, out)
            if reason is None:
                kept.append(path.name)
            else:
                ignored.append(Ignored(path, reason))
        folders[:] = kept
        for path in (folder / name for name in files if not _is_hidden(name)):
            reason = _why_not_read(path, root)
            if reason is None:
                yield path
            else:
                ignored.append(Ignored(path, reason))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def _why_not_entered(folder: Path, out: Path) -> str | None:
    if folder.is_symlink():
        return "a link to a folder"
    if folder == out:
        return "the output folder"
    return "results of an earlier run" if (folder / MARK).is_dir() else None


def _why_not_read(path: Path, root: Path) -> str | None:
    if path.is_symlink():
        target = path.resolve()
        if not target.is_relative_to(root):
            return "a link out of the folder"
        if not target.exists():
            return "a broken link"
    return None if path.is_file() else "not a regular file"


def _probe(path: Path) -> tuple[tuple[int, int], str | None]:
    try:
        return probe_size(path), None
    except PictureError as error:
        return (0, 0), str(error)


def _is_chosen(relative: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    included = not include or any(_matches(relative, pattern) for pattern in include)
    return included and not any(_matches(relative, pattern) for pattern in exclude)


def _matches(relative: str, pattern: str) -> bool:
    """Whether a pattern means a file: by its name, its path, or a folder that it lies in."""
    path = PurePosixPath(relative.lower())
    wanted = pattern.lower().strip("/")
    places = [path, *path.parents[:-1]]
    return any(fnmatchcase(str(each), wanted) or fnmatchcase(each.name, wanted) for each in places)


def _style_groups(styles: Sequence[Path], out: Path) -> tuple[list[tuple[str, tuple[Path, ...]]], list[Ignored]]:
    """(subfolder of the output, styles that are painted together): one group, or one for each of a folder."""
    if not any(style.is_dir() for style in styles):
        return [("", tuple(styles))], []
    if len(styles) > 1:
        raise SettingsError("Give one folder of styles, to have each of them in turn, or pictures to be blended.")
    found, ignored = _search(styles[0], out)
    if not found:
        raise PictureError(f"There is no style picture in {styles[0]}. Check the folder.")
    names = _unique_names([each.relative for each in found], "/")
    return [(name, (each.path,)) for each, name in zip(found, names, strict=True)], ignored


# ---- names --------------------------------------------------------------------------------------------


def _unique_names(relatives: Sequence[str], suffix: str) -> list[str]:
    """`a.jpg` -> `a.png`; `a.jpg.png` where an `a.png` would be meant twice. Case does not tell two apart."""
    spellings = [_spellings(PurePosixPath(relative), suffix) for relative in relatives]
    levels = [0] * len(relatives)
    while True:
        names = [each[level] for each, level in zip(spellings, levels, strict=True)]
        keys = [unicodedata.normalize("NFC", name).casefold() for name in names]
        counts = Counter(keys)
        twice = [i for i, key in enumerate(keys) if counts[key] > 1 and levels[i] < 2]
        if not twice:
            return names
        for i in twice:
            levels[i] += 1


def _spellings(path: PurePosixPath, suffix: str) -> tuple[str, str, str]:
    """The same output, named ever more exactly."""
    exact = hashlib.sha256(os.fsencode(str(path))).hexdigest()[:8]
    return f"{path.with_suffix('')}{suffix}", f"{path}{suffix}", f"{path}.{exact}{suffix}"


def _check_spares_inputs(jobs: Iterable[Job]) -> None:
    """No output may be an original, by whatever path."""
    inputs = {_identity(path) for job in jobs for path in (job.content, *job.styles)}
    for job in jobs:
        if job.out.exists() and _identity(job.out) in inputs:
            raise OutputError(f"{job.out} is one of the originals. Choose another output folder.")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
