"""A file as a lock between processes: it ends with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock of this name, and delete its file afterwards; False when another has it.

    Raises:
        OSError: when the file cannot be made.
    """
    while True:
        with path.open("ab") as file:
            if not try_lock(file, shared=False):
                yield False
                return
            if not _has_name(file, path):
                continue  # its last holder has just deleted it
            try:
                yield True
            finally:
                with contextlib.suppress(OSError):  # Windows deletes no open file: it stays, without harm
                    path.unlink()
            return


def try_lock(file: IO[bytes], *, shared: bool) -> bool:
    """Take the lock of an open file until it is closed; False when another process has it."""
    if sys.platform == "win32":
        import msvcrt

        if shared:  # there are no shared locks
            return True
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: better to paint than to refuse
    return True


def _has_name(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
