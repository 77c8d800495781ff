"""The record of a run: each event as a line of JSON, and the same for TensorBoard.

    with wired(Wiring(listen, snapshot_every, hooks), folder, settings) as wiring:
        transfer(..., listen=wiring.listen, ...)

A trace begins with one line of kind "run" and goes on with one line for each event, in their order. Numbers that
are not finite are null.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from stylize import __version__
from stylize.errors import OutputError, PictureError
from stylize.events import Evaluated, Event, Listener, Notice, Snapshot, ignore
from stylize.inspect.extra import require
from stylize.nst.hooks import GradientHook, clip_gradient
from stylize.settings import Settings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TRACE = "trace.jsonl"
EVERY = 20  # evaluations between two pictures and their histograms


def check_log_dir(folder: str | os.PathLike[str]) -> Path:
    """Find out before any computing whether a run can be recorded in a folder, and make it.

    Raises:
        RefusedError: when tensorboard is not installed.
        OutputError: when the folder cannot be made or written to, or holds the record of another run.
    """
    require("tensorboard")
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        taken = (place / TRACE).exists()
        writable = os.access(place, os.W_OK)
    except OSError as error:
        raise OutputError(f"{place} cannot be made: {error.strerror}. Choose another folder.") from error
    if taken:
        raise OutputError(f"{place} holds the record of a run already. Choose another folder for this one.")
    if not writable:
        raise OutputError(f"{place} cannot be written to. Choose another folder.")
    return place


@dataclasses.dataclass(frozen=True)
class Wiring:
    """What a run is to be called with."""

    listen: Listener
    snapshot_every: int | None
    gradient_hooks: tuple[GradientHook, ...]


@contextmanager
def wired(wiring: Wiring, folder: str | os.PathLike[str] | None, settings: Settings) -> Iterator[Wiring]:
    """The same with a recorder in it, or exactly the same when there is no folder to record in.

    Raises:
        RefusedError: as `check_log_dir`.
    """
    if folder is None:
        yield wiring
        return
    with recording(folder, settings, wiring.listen) as recorder:

        def listen(event: Event) -> None:
            recorder(event)
            if wiring.snapshot_every or not isinstance(event, Snapshot):  # nobody else asked for these
                wiring.listen(event)

        hooks = (*wiring.gradient_hooks, recorder.see_gradient)
        yield Wiring(listen, wiring.snapshot_every or EVERY, hooks)


@contextmanager
def recording(
    folder: str | os.PathLike[str], settings: Settings, tell: Listener = ignore
) -> Iterator[Recorder]:
    """Record a run in a folder; its files are complete when the block ends, however it ends.

    `tell` is told when the record cannot be written any more; the run goes on.

    Raises:
        RefusedError: as `check_log_dir`.
    """
    place = check_log_dir(folder)
    from torch.utils.tensorboard import SummaryWriter  # half a second that only its users should wait

    with ExitStack() as undoing:
        try:
            # Line by line, so that the trace of a run which is killed is whole but for its last line.
            trace = (place / TRACE).open("x", encoding="utf-8", buffering=1)
            undoing.callback((place / TRACE).unlink)  # else the next try would be refused because of it
            undoing.callback(trace.close)
            board = SummaryWriter(str(place), max_queue=1000)  # by default each tenth number waits for the disk
        except OSError as error:
            raise OutputError(f"{place} cannot be written to: {error.strerror}. Choose another folder.") from error
        undoing.pop_all()
    try:
        yield Recorder(trace, board, settings, tell)
    finally:
        for file in (trace, board):
            with suppress(OSError):  # a full disk has been told of, and the picture matters more
                file.close()


class Recorder:
    """A listener that writes down what happens, and a gradient hook that sees what clipping does."""

    def __init__(
        self, trace: TextIO, board: SummaryWriter, settings: Settings, tell: Listener = ignore
    ) -> None:
        self._trace = trace
        self._board = board
        self._settings = settings
        self._tell = tell
        self._broken = False  # could something not be written?
        self._clipped_norm = torch.zeros(())  # of the latest gradient, after clipping
        self._gradient: Tensor | None = None  # the latest, until the next one
        with self._ending_when_full():
            self._write({"kind": "run", "version": __version__, "settings": settings.as_dict()})

    def see_gradient(self, gradient: Tensor) -> None:
        """Take the picture's gradient [1, 3, H, W], before any clipping."""
        self._gradient = gradient.detach()
        settings = self._settings
        if settings.clip_norm is not None or settings.clip_value is not None:
            clipped, _ = clip_gradient(self._gradient, norm=settings.clip_norm, value=settings.clip_value)
            self._clipped_norm = torch.linalg.vector_norm(clipped)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if not self._broken:
            with self._ending_when_full():
                self._note(event)

    @contextmanager
    def _ending_when_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._broken = True
            self._tell(Notice(f"The record of the run ends here: it cannot be written: {error}"))

    def _note(self, event: Event) -> None:
        if isinstance(event, Snapshot):
            self._see_picture(event)
            return
        line = {"kind": type(event).__name__, **dataclasses.asdict(event)}
        if isinstance(event, Evaluated):
            after = self._norm_after(event)
            line["gradient_norm_after_clipping"] = after
            self._see_numbers(event, after)
        self._write(line)

    def _norm_after(self, event: Evaluated) -> float:
        guarded = self._settings.clip_norm is not None or self._settings.clip_value is not None
        return float(self._clipped_norm) if guarded else event.gradient_norm

    def _see_numbers(self, event: Evaluated, norm_after: float) -> None:
        numbers = {
            "loss/total": event.loss,
            **{f"loss/{name}": value for name, value in event.terms.items()},
            "gradient/norm": event.gradient_norm,
            "gradient/norm_after_clipping": norm_after,
            "step/grey_levels": event.step_levels,
            "guard/clipped": event.clipped,
            "guard/dropped_pairs": event.dropped_pairs,
            "guard/restarts": event.restarts,
        }
        for name, value in numbers.items():
            self._board.add_scalar(name, value, event.evaluation)

    def _see_picture(self, event: Snapshot) -> None:
        picture = event.picture
        at_bounds = float(((picture == 0) | (picture == 255)).float().mean())
        self._board.add_image("picture", picture, event.evaluation)
        self._board.add_scalar("picture/at_bounds", at_bounds, event.evaluation)
        self._board.add_histogram("picture/levels", picture.flatten(), event.evaluation, bins="fd")
        if self._gradient is not None and self._gradient.isfinite().all():
            self._board.add_histogram("gradient/values", self._gradient.float().cpu(), event.evaluation)
        self._write({"kind": "Snapshot", "evaluation": event.evaluation, "at_bounds": at_bounds})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._trace.write(json.dumps(_finite(line), allow_nan=False) + "\n")


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace that was read."""

    run: Mapping[str, Any]  # version and settings
    evaluations: list[dict[str, Any]]  # one for each `Evaluated`
    snapshots: list[dict[str, Any]]  # evaluation, at_bounds
    scales: list[dict[str, Any]]  # one for each `ScaleStarted`


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, also that of a run which was cut off.

    Raises:
        PictureError: when the file cannot be read, or is no trace.
    """
    place = trace_path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PictureError(f"{place} cannot be read as a trace: {error}") from error
    lines = list(_lines(text))
    if not lines or lines[0].get("kind") != "run":
        raise PictureError(f"{place} is no trace of a run; --log-dir writes one, named {TRACE}.")
    by_kind = {kind: [line for line in lines if line.get("kind") == kind] for kind in _KINDS}
    return Trace(lines[0], by_kind["Evaluated"], by_kind["Snapshot"], by_kind["ScaleStarted"])


def trace_path(path: str | os.PathLike[str]) -> Path:
    """A trace's path, given that or its folder."""
    place = Path(path)
    return place / TRACE if place.is_dir() else place


_KINDS = ("Evaluated", "Snapshot", "ScaleStarted")


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            read = json.loads(line)
        except ValueError:
            return  # the last line of a run that was killed while it wrote
        if not isinstance(read, dict):
            return
        yield read


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
