"""What is done: one line of JSON for each picture that was painted or could not be, kept in the output folder.

The lines are only ever appended, each flushed to the disk before the next picture counts as done; the last
line about an output is the one that holds. A line cut short by a crash is no line. A picture counts as done
as long as its content, its styles, the settings and the output itself are what the line says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stylize.batch.plan import MARK, Job
from stylize.errors import OutputError, PictureError, SaveError
from stylize.images import DEFAULT_MAX_PIXELS, read_picture, read_record
from stylize.locking import try_lock
from stylize.settings import NAMED_STARTS, NAMED_WEIGHTS, Settings

# What `images.save_picture` writes before it renames: .NAME.PROCESS.RANDOM.tmp, NAME cut to 40 characters.
_TEMPORARY = re.compile(r"\.(?P<name>.{1,40})\.\d+\.[0-9a-f]{8}\.tmp", re.DOTALL)
_WRITING_S = 3600.0  # a temporary file of this age belongs to no shard that is still at work


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the manifest."""

    name: str  # the output's path inside the output folder, with slashes
    status: Literal["done", "failed"]
    content: str  # its path inside the content folder
    content_sha256: str | None  # None when it could not be read
    settings_sha256: str  # of all choices and styles, from `Choices`
    output_sha256: str | None = None
    size: tuple[int, int] | None = None  # width and height of the result in pixels
    seconds: float | None = None  # for the optimisation; None when the picture was found painted
    evaluations: int | None = None
    threads: int | None = None  # of the process that painted; another number may give other bytes
    losses: Mapping[str, float] = field(default_factory=dict)
    notices: Sequence[str] = ()
    error: str | None = None  # why it failed: a sentence and a remedy
    version: str = ""  # of the program
    finished: float = 0.0  # seconds since 1970


class Manifest:
    """The lines about one output folder, and the right to add to them.

    A context manager: inside, this process alone works on the folder, or on its part of it.

    Args:
        out: the output folder.
        shard: which part of how many this run paints; None for all of it.
    """

    def __init__(self, out: Path, shard: tuple[int, int] | None = None) -> None:
        self._folder = out / MARK
        self._shard = shard
        part = "" if shard is None else f".{shard[0]}-of-{shard[1]}"
        self._path = self._folder / f"manifest{part}.jsonl"
        self._lock_path = self._folder / f"lock{part}"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Manifest:
        """Lock the folder.

        Raises:
            OutputError: when another process has it, or it cannot be written to.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # A run of everything wants the folder for itself; shards share it, and each has its own part.
            self._lock(self._folder / "lock", shared=self._shard is not None)
            if self._shard is not None:
                self._lock(self._lock_path, shared=False)
            self._file = self._stack.enter_context(self._path.open("ab", buffering=0))
        except OSError as error:
            self._stack.close()
            raise OutputError(f"{self._folder} cannot be written: {error}. Choose another place.") from error
        except OutputError:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Let others in."""
        self._stack.close()

    def append(self, entry: Entry) -> None:
        """Write one line so that it survives whatever comes next.

        Raises:
            SaveError: when the disk is full or gone.
        """
        before = self._file.seek(0, os.SEEK_END)
        data = json.dumps(dataclasses.asdict(entry)).encode("ascii") + b"\n"
        if before and not self._ends_whole():
            data = b"\n" + data  # what a crash cut short stays a line of its own
        try:
            if self._file.write(data) != len(data):
                raise OSError("only a part of the line was written")
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)
            raise SaveError(
                f"{self._path} could not be written: {error}. Make room, and give the same command again."
            ) from error

    def _ends_whole(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _lock(self, path: Path, *, shared: bool) -> None:
        file = self._stack.enter_context(path.open("ab"))
        if not try_lock(file, shared=shared):
            raise OutputError(
                f"Another stylize is at work in {self._folder.parent}. Wait until it is done, choose another "
                "output folder, or let each paint a part of its own with --shard 1/2 and --shard 2/2."
            )


def read_entries(out: Path) -> dict[str, Entry]:
    """The latest line about each output in a folder, from all its manifests; none when there is none."""
    lines = [entry for path in (out / MARK).glob("manifest*.jsonl") for entry in _read_lines(path)]
    return {entry.name: entry for entry in sorted(lines, key=lambda entry: entry.finished)}


def _read_lines(path: Path) -> Iterator[Entry]:
    known = {each.name for each in dataclasses.fields(Entry)}
    for line in path.read_bytes().splitlines():
        # cut short, or not ours
        with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
            values = json.loads(line)
            entry = Entry(**{name: value for name, value in values.items() if name in known})
            size, finished = entry.size and (entry.size[0], entry.size[1]), float(entry.finished)
            yield dataclasses.replace(entry, size=size, finished=finished)


# ---- hashes -------------------------------------------------------------------------------------------


def file_hash(path: Path) -> str | None:
    """The SHA-256 of a file's contents; None when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


@dataclass(frozen=True)
class Choices:
    """All that decides how a content is painted."""

    settings: Settings
    styles_sha256: tuple[str | None, ...]
    sha256: str  # of all of it; files count by what they hold

    @classmethod
    def of(cls, settings: Settings, styles: Iterable[Path]) -> Choices:
        """Read what there is to be read. The device is left out: a run may be finished on another machine."""
        choices = _comparable(settings.as_dict())
        for name, words in (("init", NAMED_STARTS), ("weights", NAMED_WEIGHTS)):
            if choices[name] not in words:
                choices[name] = file_hash(Path(choices[name])) or choices[name]
        hashes = tuple(file_hash(style) for style in styles)
        text = json.dumps(choices | {"styles": hashes}, sort_keys=True)
        return cls(settings, hashes, hashlib.sha256(text.encode()).hexdigest())


# ---- done or not --------------------------------------------------------------------------------------


def is_about(entry: Entry, job: Job, choices: Choices) -> bool:
    """Whether a line tells of this very content in these very settings."""
    return entry.settings_sha256 == choices.sha256 and entry.content_sha256 == file_hash(job.content)


def output_is_whole(entry: Entry, job: Job) -> bool:
    """Whether the output is, to the byte, what the line says."""
    return entry.output_sha256 is not None and entry.output_sha256 == file_hash(job.out)


def adopted(job: Job, choices: Choices, max_pixels: int = DEFAULT_MAX_PIXELS) -> Entry | None:
    """A line about an output that was written whole before its line could be; None when it is another's.

    What the picture says of itself must be what this run would say of it, and all of it must be there.
    """
    try:
        record = read_record(job.out)
        read_picture(job.out, max_pixels=max_pixels)
    except PictureError:
        return None
    content = file_hash(job.content)
    expected = {
        "settings": _comparable(choices.settings.as_dict()),
        "content": content,
        "styles": list(choices.styles_sha256),
        "outcome": "done",
    }
    if content is None or _said(record) != expected:
        return None
    return Entry(
        name=job.name,
        status="done",
        content=job.origin,
        content_sha256=content,
        settings_sha256=choices.sha256,
        output_sha256=file_hash(job.out),
        evaluations=record.get("evaluations"),
        losses=record.get("losses", {}),
        version=record.get("version", ""),
        finished=time.time(),
    )


def _said(record: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return {
            "settings": _comparable(record["settings"]),
            "content": record["content"]["sha256"],
            "styles": [style["sha256"] for style in record["styles"]],
            "outcome": record["outcome"],
        }
    except (KeyError, TypeError):
        return None


def _comparable(settings: Mapping[str, Any]) -> Any:
    """Settings as JSON gives them back, without the device."""
    return json.loads(json.dumps({name: value for name, value in settings.items() if name != "device"}))


# ---- what a crash leaves behind -----------------------------------------------------------------------


def sweep(jobs: Iterable[Job], *, shared: bool) -> None:
    """Delete the temporary files that a killed run left beside these outputs.

    Args:
        jobs: whose outputs this process alone may write.
        shared: other shards are at work in the same folders; only old files are deleted then.
    """
    wanted: dict[Path, set[str]] = {}
    for job in jobs:
        wanted.setdefault(job.out.parent, set()).add(job.out.name[:40])
    newest = time.time() - _WRITING_S if shared else float("inf")
    for folder, names in wanted.items():
        for path in folder.glob(".*.tmp"):
            match = _TEMPORARY.fullmatch(path.name)
            if match is None or match["name"] not in names:
                continue
            with contextlib.suppress(OSError):
                if path.stat().st_mtime <= newest:
                    path.unlink()
