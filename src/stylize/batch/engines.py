"""Who paints the pictures of a folder: this process, processes of its own, or (in `cluster`) Ray's actors.

An engine takes jobs from a `Feed`, one at a time as it has hands free, and yields what became of each, in
any order. It knows nothing of manifests and reports, and nobody else knows which engine it is.

Each worker has two hands for one painter, which lets one of them at the network at a time: while one paints,
the other has read its picture or is writing it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from stylize.batch.manifest import file_hash
from stylize.batch.plan import Job
from stylize.errors import RunError, SettingsError, StylizeError, WeightsError
from stylize.events import Evaluated, Event, Listener
from stylize.nst.optimize import is_out_of_memory

HANDS = 2  # jobs that one worker has at a time
CRASHES = 2  # of workers over one picture, before the picture is given up
READY, STOP = "ready", "stop"  # what is said between processes besides jobs, events and outcomes
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
REPORT_EVERY_S = 0.2  # between two events of one picture that are sent from process to process


@dataclass(frozen=True, kw_only=True)
class Painted:
    """A picture that is painted and saved."""

    content_sha256: str
    output_sha256: str | None
    size: tuple[int, int]  # width and height in pixels
    seconds: float  # for the optimisation
    evaluations: int
    threads: int  # of the process that painted
    losses: Mapping[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A picture that could not be painted."""

    error: str  # a sentence and a remedy
    content_sha256: str | None = None
    fatal: bool = False  # every other picture would fail alike: the run has to end


@dataclass(frozen=True)
class Unbegun:
    """A picture that nobody began, because the run is to stop."""


Outcome: TypeAlias = "Painted | Failed | Unbegun"
Outcomes: TypeAlias = "Generator[tuple[Job, Outcome], None, None]"
Paint: TypeAlias = Callable[[Job, Listener], Painted]  # for several threads; raises what goes wrong
OpenPainter: TypeAlias = Callable[[], Paint]  # can be pickled
PictureListener: TypeAlias = Callable[[str, Event], None]  # the job's name, and what happened


class Feed:
    """The jobs that are left, for any number of threads; dry as soon as `stop` is set."""

    def __init__(self, jobs: Iterable[Job], stop: threading.Event) -> None:
        self.stop = stop
        self._jobs = deque(jobs)
        self._lock = threading.Lock()

    def take(self, reserve: int = 0) -> Job | None:
        """The next job, if more than `reserve` are left."""
        with self._lock:
            return None if self.stop.is_set() or len(self._jobs) <= reserve else self._jobs.popleft()


class Engine(Protocol):
    """Paints jobs."""

    def run(self, feed: Feed, open_painter: OpenPainter, listen: PictureListener) -> Outcomes:
        """Yield each job that was taken from `feed` with its outcome; close it to end everything at once."""
        ...  # pragma: no cover


class Attempts:
    """Turns jobs into outcomes, whatever the painter raises, until it is told to begin no more."""

    def __init__(self, open_painter: OpenPainter, stop: threading.Event | None = None) -> None:
        self.stop = stop or threading.Event()
        self._paint = open_painter()

    def __call__(self, job: Job, listen: Listener) -> Outcome:
        """Paint one picture."""
        begun = False

        def guarded(event: Event) -> None:
            nonlocal begun
            if not begun and self.stop.is_set():
                raise _StoppedError
            begun = True
            listen(event)

        if self.stop.is_set():
            return Unbegun()
        try:
            return self._paint(job, guarded)
        except _StoppedError:
            return Unbegun()
        except Exception as error:
            return Failed(_told(error, job), file_hash(job.content), _is_fatal(error))


class _StoppedError(Exception):
    """Raised where a picture would have begun."""


def _told(error: Exception, job: Job) -> str:
    """What went wrong, in a sentence."""
    if isinstance(error, StylizeError):
        return str(error)
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return f"There was not enough memory for {job.content}. Use a smaller --size, or fewer --workers."
    return f"{job.content}: {type(error).__name__}: {error}. This is a defect."


def _is_fatal(error: BaseException | None) -> bool:
    """Whether the next picture would fare no better: the disk is full, or it is not about the picture."""
    if error is None:
        return False
    full = isinstance(error, OSError) and error.errno in DISK_FULL
    return full or isinstance(error, (WeightsError, SettingsError)) or _is_fatal(error.__cause__)


# ---- in this process ----------------------------------------------------------------------------------


class Inline:
    """One picture after the other in this thread: the plainest engine, which the others must equal."""

    def run(self, feed: Feed, open_painter: OpenPainter, listen: PictureListener) -> Outcomes:
        """Paint; Ctrl-C passes through."""
        attempt = Attempts(open_painter)
        while (job := feed.take()) is not None:
            yield job, attempt(job, partial(listen, job.name))


# ---- in processes of its own --------------------------------------------------------------------------


class Processes:
    """A process for each of `environments`, which are variables on top of this process's own.

    A process that dies is replaced. The pictures that it had at hand are tried again, one at a time, so that
    only the one that kills it a second time is given up.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self._environments = environments

    def run(self, feed: Feed, open_painter: OpenPainter, listen: PictureListener) -> Outcomes:
        """Paint; the listener is called in this thread."""
        painter = pickle.dumps(open_painter)
        said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        workers = len(self._environments)
        tenders = [_Tender(feed, painter, each, said.put, workers) for each in self._environments]
        at_work = len(tenders)
        try:
            for tender in tenders:
                tender.start()
            while at_work:
                match _next_said(said, feed.stop, tenders):
                    case _Gone(error=None):
                        at_work -= 1
                    case _Gone(error=BaseException() as error):
                        raise error
                    case Job() as job, (Painted() | Failed() | Unbegun()) as outcome:
                        yield job, outcome
                    case Job() as job, event:
                        listen(job.name, event)
        finally:
            for tender in tenders:
                tender.end()


@dataclass(frozen=True)
class _Gone:
    """The last word of a tender."""

    error: BaseException | None = None


_Said: TypeAlias = "tuple[Job, Outcome | Event] | _Gone"


def _next_said(
    said: queue.SimpleQueue[_Said], stop: threading.Event, tenders: Sequence[_Tender]
) -> _Said:
    """Wait for a word; pass the wish to stop on meanwhile."""
    while True:
        if stop.is_set():
            for tender in tenders:
                tender.stop()
        with contextlib.suppress(queue.Empty):
            return said.get(timeout=0.2)


class _Tender(threading.Thread):
    """Keeps one process busy, and starts another when it dies."""

    def __init__(
        self,
        feed: Feed,
        painter: bytes,
        environment: Mapping[str, str],
        say: Callable[[_Said], None],
        workers: int,
    ) -> None:
        super().__init__(daemon=True)
        self._feed = feed
        self._painter = painter
        self._environment = environment
        self._say = say
        self._workers = workers  # a second job is taken only while each of them finds a first one
        self._again: deque[Job] = deque()  # what a dead process had at hand
        self._suspected: set[str] = set()  # names of jobs that were at hand when a process died
        self._crashes: Counter[str] = Counter()  # deaths with this job alone at hand, by its name
        self._worker: _Worker | None = None
        self._ended = False

    def run(self) -> None:
        """Until there is nothing left."""
        error: BaseException | None = None
        try:
            while not self._ended and (job := self._next(0)) is not None:
                self._worker = _Worker(self._painter, self._environment)
                self._tend(self._worker, job)
        except BaseException as reason:  # it must not end unheard in this thread
            error = reason
        self._say(_Gone(error))

    def stop(self) -> None:
        """Begin no other picture."""
        if self._worker is not None:
            self._worker.send(STOP)

    def end(self) -> None:
        """At once."""
        self._ended = True
        while self.is_alive():
            if self._worker is not None:
                self._worker.kill()
            self.join(0.1)

    def _next(self, reserve: int) -> Job | None:
        if self._again and not self._feed.stop.is_set():
            return self._again.popleft()
        return self._feed.take(reserve)

    def _tend(self, worker: _Worker, first: Job) -> None:
        """Until the process has nothing to do, or dies."""
        worker.send(first)
        at_hand = {first.name: first}
        ready = False
        for message in worker.messages():
            match message:
                case str(name), (Painted() | Failed() | Unbegun()) as outcome:
                    self._say((at_hand.pop(name), outcome))
                case str(name), event:
                    self._say((at_hand[name], event))
                case _:
                    ready = True
            self._hand_out(worker, at_hand)
            if not at_hand:
                worker.close()
        how = _how_it_ended(worker.wait())
        if self._ended or self._feed.stop.is_set():
            return
        if at_hand and not ready:
            raise RunError(f"A process that was to paint {how} before it could begin. Try --engine inline.")
        for job in at_hand.values():
            self._crashed(job, how, alone=len(at_hand) == 1)

    def _hand_out(self, worker: _Worker, at_hand: dict[str, Job]) -> None:
        while len(at_hand) < self._hands(at_hand):
            job = self._next(len(at_hand) * self._workers)
            if job is None:
                return
            at_hand[job.name] = job
            worker.send(job)

    def _hands(self, at_hand: Iterable[str]) -> int:
        """One, while pictures are tried of which one has killed a process."""
        names = {*at_hand, *(job.name for job in self._again)}
        return 1 if names & self._suspected else HANDS

    def _crashed(self, job: Job, how: str, *, alone: bool) -> None:
        """A death with another job at hand proves nothing against this one: it is only tried alone from now on."""
        self._suspected.add(job.name)
        self._crashes[job.name] += alone
        if self._crashes[job.name] < CRASHES:
            self._again.append(job)
            return
        self._say((job, given_up(job, f"The process that painted {job.content} {how}", CRASHES)))


class _Worker:
    """A process that runs `stylize.batch.worker`, and the two pipes to it."""

    def __init__(self, painter: bytes, environment: Mapping[str, str]) -> None:
        # A process made with `multiprocessing` would import the caller's script again, and could not be given
        # variables that the OpenMP library reads when it is loaded.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stylize.batch.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **environment},
            start_new_session=True,  # Ctrl-C is for the one who hands out the work
        )
        self._lock = threading.Lock()  # jobs and the wish to stop come from different threads
        self._write(painter)

    def send(self, message: object) -> None:
        """Hand over a job, or STOP; a dead process is noticed by its silence."""
        self._write(pickle.dumps(message))

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def messages(self) -> Iterator[Any]:
        """What the process says, until it ends."""
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, pickle.UnpicklingError, OSError):
            while True:
                yield pickle.load(self._process.stdout)

    def close(self) -> None:
        """No more work."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """At once."""
        self._process.kill()

    def wait(self) -> int:
        """Until it is gone; its exit status."""
        self.close()
        with self._process:
            return self._process.wait()


def given_up(job: Job, what: str, times: int) -> Failed:
    """A picture that has cost so many workers their lives."""
    return Failed(f"{what}, {times} times. Use a smaller --size, or leave it out.", file_hash(job.content))


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    reason = " (as the system does it when memory runs out)" if code == -getattr(signal, "SIGKILL", 9) else ""
    return f"was ended by signal {-code}{reason}"


class Throttle:
    """Passes on as many events of one picture as anybody can look at."""

    def __init__(self, listen: Listener) -> None:
        self._listen = listen
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        now = time.monotonic()
        if not isinstance(event, Evaluated) or now - self._last >= REPORT_EVERY_S:
            self._last = now
            self._listen(event)
