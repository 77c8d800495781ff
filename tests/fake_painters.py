"""Painters that stand in for the real one where a law is about bookkeeping; other processes can import them."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

from stylize.batch.engines import OpenPainter, Paint, Painted
from stylize.batch.manifest import file_hash
from stylize.batch.plan import Job
from stylize.errors import PictureError, WeightsError
from stylize.events import Listener, ScaleStarted
from stylize.images import read_picture, save_picture
from stylize.settings import Settings


def copying(log: Path, settings: Settings | None = None, seconds: float = 0.0) -> OpenPainter:
    """A painter whose picture is the content itself; it notes each name in `log`, and obeys the content's name."""
    return partial(_open, log, settings or Settings(), seconds)


def painted(log: Path) -> list[str]:
    """The names that were painted, in their order."""
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def _open(log: Path, settings: Settings, seconds: float) -> Paint:
    def paint(job: Job, listen: Listener) -> Painted:
        listen(ScaleStarted(0, 1, *job.size, 1))
        misbehave(job)
        time.sleep(seconds)
        tensor = read_picture(job.content).tensor
        content = file_hash(job.content)
        assert content is not None
        save_picture(tensor, job.out, record=record_of(job, settings), overwrite=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{job.name}\n")
        return Painted(
            content_sha256=content,
            output_sha256=file_hash(job.out),
            size=job.size,
            seconds=seconds,
            evaluations=1,
            threads=1,
        )

    return paint


def record_of(job: Job, settings: Settings) -> dict[str, object]:
    """What a picture says of itself."""
    return {
        "settings": settings.as_dict(),
        "content": {"sha256": file_hash(job.content)},
        "styles": [{"sha256": file_hash(style)} for style in job.styles],
        "outcome": "done",
    }


def misbehave(job: Job) -> None:
    """Do what the content's name says."""
    word = job.content.stem.partition("-")[0]
    once = job.content.with_suffix(".once")
    match word:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "killonce" if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "refuse":
            raise PictureError(f"{job.content} is not to be painted. Leave it out.")
        case "memory":
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        case "defect":
            raise ZeroDivisionError("by nothing")
        case "exit":
            raise SystemExit(3)
        case "weights":
            raise WeightsError("The weights are gone. Fetch them again.")
        case "full":
            raise OSError(28, "No space left on device")
        case "print":
            print("what a library prints must not reach the pipe", flush=True)
        case _:
            pass
