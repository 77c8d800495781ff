"""A process that paints for the one that started it: `python -m stylize.batch.worker`, never by hand.

Jobs come in by standard input, events and outcomes go out by standard output, both pickled. When the input
ends, whoever gave the work is gone, and so is this process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
from functools import partial
from typing import BinaryIO

from stylize.batch.engines import HANDS, READY, Attempts, Failed, Throttle
from stylize.batch.plan import Job
from stylize.events import Event
from stylize.process import prepare


def main() -> None:
    """Paint what comes in."""
    prepare()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job, as Slurm does
        signal.signal(number, signal.SIG_IGN)
    inbox, outbox = sys.stdin.buffer, _take_stdout()
    bench = _Bench(Attempts(pickle.load(inbox)), outbox)
    bench.say(READY)
    with contextlib.suppress(EOFError):
        while True:
            message = pickle.load(inbox)
            if isinstance(message, Job):
                bench.take(message)
            else:
                bench.attempts.stop.set()
    if bench.is_busy:  # nobody will hear of it, and the next run may be at the same picture already
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


class _Bench:
    """Two hands, which take the jobs in turn."""

    def __init__(self, attempts: Attempts, outbox: BinaryIO) -> None:
        self.attempts = attempts
        self._outbox = outbox
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._at_hand = 0
        for _ in range(HANDS):
            threading.Thread(target=self._work, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a job has come in whose outcome has not gone out."""
        return self._at_hand > 0

    def take(self, job: Job) -> None:
        """Take a job; it is begun when a hand is free."""
        with self._lock:
            self._at_hand += 1
        self._jobs.put(job)

    def say(self, message: object) -> None:
        """Send a message; that nobody is there is noticed by the input's end."""
        data = pickle.dumps(message)
        with self._lock, contextlib.suppress(OSError):
            self._outbox.write(data)
            self._outbox.flush()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                outcome = self.attempts(job, Throttle(partial(self._tell, job.name)))
            except BaseException as error:  # a hand that is lost would be waited for
                outcome = Failed(f"{job.content}: {error!r}. This is a defect.")
            with self._lock:
                self._at_hand -= 1
            self.say((job.name, outcome))

    def _tell(self, name: str, event: Event) -> None:
        self.say((name, event))


def _take_stdout() -> BinaryIO:
    """Standard output for this module alone; what others print goes to standard error."""
    outbox = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return outbox


if __name__ == "__main__":
    main()
