"""What a run over a folder tells: events while it goes on, a report at its end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stylize.batch.manifest import Entry
from stylize.batch.plan import Ignored
from stylize.errors import SaveError
from stylize.events import Event
from stylize.images import write_whole

BatchOutcome: TypeAlias = Literal["done", "failures", "interrupted", "stopped", "planned"]


@dataclass(frozen=True)
class BatchStarted:
    """It is known what there is to do."""

    todo: int  # pictures to be painted now
    skipped: int  # done before
    failed: int  # before
    engine: str
    workers: int | None  # None where a cluster decides
    threads: int  # of each worker


@dataclass(frozen=True)
class PictureEvent:
    """Something happened to a picture that is being painted."""

    name: str  # "" for what concerns all of them
    event: Event


@dataclass(frozen=True)
class PictureEnded:
    """A picture is done, or has failed; its line is in the manifest."""

    entry: Entry


BatchEvent: TypeAlias = "BatchStarted | PictureEvent | PictureEnded"
BatchListener: TypeAlias = Callable[[BatchEvent], None]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is still to be done will cost this, about."""

    seconds: float | None  # at most, for the optimisation; None where it cannot be told
    bytes_per_worker: float  # of memory, at the peak


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """What became of every picture of a folder.

    `outcome` is "done"; "failures", when some failed, each listed with its reason; "interrupted", by a wish to
    stop; "stopped", when the run could not go on (`reason` says why); or "planned", after a dry run.
    """

    out: Path
    outcome: BatchOutcome
    reason: str  # why the run ended: a sentence
    painted: tuple[Entry, ...]  # by this run
    skipped: tuple[str, ...]  # names of outputs that were done before, with the same content and settings
    failed: tuple[Entry, ...]  # by this run or before
    left: tuple[str, ...]  # names of outputs that are still to be painted
    ignored: tuple[Ignored, ...]  # files and folders that are no pictures
    seconds: float
    engine: str
    workers: int | None
    threads: int  # of each worker
    forecast: Forecast | None = None  # of a dry run

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        values = dataclasses.asdict(self)
        values["ignored"] = [{"path": str(each.path), "reason": each.reason} for each in self.ignored]
        return values | {"out": str(self.out)}

    def save(self, path: Path) -> Path:
        """Write it as JSON, whole or not at all.

        Raises:
            SaveError: when it cannot be written.
        """
        try:
            write_whole(path, json.dumps(self.as_dict(), indent=1).encode("ascii"), overwrite=True)
        except OSError as error:
            raise SaveError(f"{path} could not be written: {error}. The manifest has all of it.") from error
        return path


def report_path(out: Path, shard: tuple[int, int] | None) -> Path:
    """Where a run's report goes: `report.json`, or a part's own."""
    return out / ("report.json" if shard is None else f"report.{shard[0]}-of-{shard[1]}.json")
