"""The queue: one job on a device at a time, first come, first served; it knows neither page nor network.

A job may be cancelled (nothing is kept) or stopped (the best picture so far is kept) at any time, from any thread.
A job that nobody has looked at for a while is cancelled: its page is gone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from stylize.api import Result
from stylize.errors import RefusedError, StylizeError
from stylize.events import Evaluated, Event, Listener
from stylize.progress import duration
from stylize.settings import Settings
from stylize.web.limits import Limits, naming_only
from stylize.web.observer import Observer
from stylize.web.store import Painted

Phase: TypeAlias = Literal["waiting", "painting", "done", "cancelled", "failed"]
ABANDONED_S = 60.0  # that a job goes on which nobody looks at
DEFECT = "This is a defect of the program; its server has the details"


@dataclass(frozen=True)
class Order:
    """What is to be painted."""

    content: Path
    styles: tuple[Path, ...]
    settings: Settings
    more: tuple[tuple[str, Any], ...] = ()  # what else `Stylizer.__call__` takes, by name
    inputs: tuple[Path, ...] = ()  # all pictures


Paint: TypeAlias = Callable[[Order, Listener], Result]


class Keeper(Protocol):
    """What saves results."""

    def keep(self, job: Job, result: Result) -> Painted:
        """Save one."""

    def forget(self, painted: Painted) -> None:
        """Remove it again."""


class _CancelledError(Exception):
    """Ends a run whose picture nobody wants."""


@dataclass(eq=False)
class Job:
    """One order on its way through the queue; only the queue changes it."""

    session: str
    order: Order
    content_key: str = ""
    caption: str = ""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    phase: Phase = "waiting"
    message: str = ""  # how it ended: a sentence
    painted: Painted | None = None
    seen: float = field(default_factory=time.monotonic)  # when somebody last looked
    stop_asked: bool = False

    def __post_init__(self) -> None:
        """Listen from the beginning."""
        self.observer = Observer(self.order.settings.time_budget_s)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.phase in ("done", "cancelled", "failed")

    def listen(self, event: Event) -> None:
        """Take one event of the run, or end it.

        Raises:
            KeyboardInterrupt: to keep the best picture so far.
        """
        if self.ended:
            raise _CancelledError
        self.observer(event)
        if self.stop_asked and isinstance(event, Evaluated):  # from the first one on there is a picture
            raise KeyboardInterrupt


class Queue:
    """Jobs and the threads that paint them, one for each device.

    Args:
        painters: one for each device.
        keeper: saves the results.
        limits: how many jobs may wait.
        abandoned_s: seconds after which a job ends that nobody has looked at.
    """

    def __init__(
        self, painters: Sequence[Paint], keeper: Keeper, limits: Limits, *, abandoned_s: float = ABANDONED_S
    ) -> None:
        self._keeper = keeper
        self._limits = limits
        self._abandoned_s = abandoned_s
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._painting: list[Job] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(paint,), name="stylize-painter", daemon=True)
            for paint in painters
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the visitors -------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue.

        Raises:
            RefusedError: when too many wait already.
        """
        with self._changed:
            self._drop_abandoned()
            if self._closed:
                raise RefusedError("The server is shutting down. Come back later.")
            most = self._limits.waiting_each
            if sum(each.session == job.session for each in self._waiting) >= most:
                raise RefusedError(f"{most} of your pictures wait already. Let one be done first.")
            if len(self._waiting) >= self._limits.waiting:
                raise RefusedError("Too many pictures wait to be painted. Try again in a few minutes.")
            self._waiting.append(job)
            self._changed.notify_all()

    def place(self, job: Job) -> int:
        """How many come before it: 0 = it is painted next or now. To ask is to look at it."""
        with self._changed:
            job.seen = time.monotonic()
            return self._waiting.index(job) + len(self._painting) if job in self._waiting else 0

    def find(self, session: str, key: str = "") -> list[Job]:
        """A session's jobs that have not ended: the one of this key, or all."""
        with self._changed:
            jobs = [*self._painting, *self._waiting]
        return [job for job in jobs if job.session == session and key in ("", job.key) and not job.ended]

    def cancel(self, job: Job, why: str = "Cancelled.") -> None:
        """End a job at once; nothing of it is kept."""
        with self._changed:
            self._end(job, "cancelled", why)

    def stop(self, job: Job) -> None:
        """End a job with the best picture so far; one that still waits is cancelled."""
        with self._changed:
            if job in self._waiting:
                self._end(job, "cancelled", "Stopped before anything was painted.")
            job.stop_asked = True

    def drop(self, session: str) -> None:
        """Cancel all jobs of a session that is gone."""
        for job in self.find(session):
            self.cancel(job, "The page was closed.")

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel everything and wait for the painters."""
        with self._changed:
            self._closed = True
            for job in [*self._waiting, *self._painting]:
                self._end(job, "cancelled", "The server was shut down.")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    # ---- the painters -----------------------------------------------------------------------------------

    def _work(self, paint: Paint) -> None:
        while (job := self._next()) is not None:
            try:
                self._paint(job, paint)
            finally:
                with self._changed:
                    self._painting.remove(job)
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        """The next job, once there is one; None when the queue is closed."""
        with self._changed:
            while not self._closed:
                self._drop_abandoned()
                if self._waiting:
                    job = self._waiting.pop(0)
                    job.phase = "painting"
                    self._painting.append(job)
                    return job
                self._changed.wait()
            return None

    def _paint(self, job: Job, paint: Paint) -> None:
        with self._judging(job):
            result = paint(job.order, functools.partial(self._listen, job))
            painted = None if job.ended else self._keeper.keep(job, result)
            if painted is not None and not self._deliver(job, painted, _how_it_ended(result)):
                self._keeper.forget(painted)

    def _deliver(self, job: Job, painted: Painted, message: str) -> bool:
        """End a job with its picture; False when it was cancelled while that was saved."""
        with self._changed:
            if job.ended:
                return False
            job.painted = painted
            self._end(job, "done", message)
            return True

    def _listen(self, job: Job, event: Event) -> None:
        with self._changed:
            self._drop_abandoned()
        job.listen(event)

    @contextlib.contextmanager
    def _judging(self, job: Job) -> Iterator[None]:
        """Whatever a run raises is how its job ended."""
        try:
            with naming_only(*job.order.inputs):
                yield
        except _CancelledError:
            pass
        except KeyboardInterrupt:
            self.cancel(job, "Stopped before anything was painted.")
        except StylizeError as error:
            self._fail(job, str(error))
        except MemoryError:
            self._fail(job, "There is not enough memory. Choose a smaller size.")
        except Exception as error:
            self._fail(job, f"{DEFECT} ({type(error).__name__}).")
            logging.getLogger(__name__).exception("A picture could not be painted.")

    def _fail(self, job: Job, why: str) -> None:
        with self._changed:
            self._end(job, "failed", why)

    def _end(self, job: Job, phase: Phase, message: str) -> None:
        """Under the lock: the first end counts."""
        if not job.ended:
            job.phase, job.message = phase, message
        if job in self._waiting:
            self._waiting.remove(job)

    def _drop_abandoned(self) -> None:
        """Under the lock."""
        oldest = time.monotonic() - self._abandoned_s
        for job in [*self._waiting, *self._painting]:
            if job.seen < oldest:
                self._end(job, "cancelled", "Nobody was there to see it.")


def _how_it_ended(result: Result) -> str:
    if result.outcome == "interrupted":
        return f"Stopped after {result.evaluations} evaluations; this is the best picture so far."
    if result.outcome == "failed":
        return f"{result.reason} This is the best picture so far."
    return f"Done: {result.evaluations} evaluations in {duration(result.seconds)}."
