"""What a program may do to its own process, and a library may not: for the command and its workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping

# The parameters of glibc's mallopt (its malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 1 << 27  # bytes; what is larger goes back at once: of many megapixels each copy counts
_LARGEST_KEPT_IF_SCARCE = 1 << 25
_MOST_KEPT = (1 << 31) - 1  # in all

# Variables of torch's threads that wait for one another, as libgomp reads them when torch is loaded. By themselves
# they do so in a busy loop, for so long that a run takes ten times as long where another program wants a core. If
# they give up their core at once, waking them takes a quarter of the time of a picture of 96 pixels and 2 % at
# 512; a thousand rounds of the loop, microseconds, lose next to nothing either way (docs/benchmarks.md).
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


class _Allocator:
    """The system's allocator, where it is glibc's."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self.is_told = False  # by this program, which may tell it otherwise, then

    def tell(self, parameters: Mapping[int, int]) -> None:
        """Set parameters of mallopt."""
        mallopt = getattr(self._library, "mallopt", None)  # not every C library has it
        if mallopt is not None:
            for parameter, value in parameters.items():
                mallopt(parameter, value)
            self.is_told = True

    def trim(self) -> None:
        """Give back what is free."""
        self._library.malloc_trim(0)  # type: ignore[union-attr]  # what can be told can be trimmed


_allocator = _Allocator()


def wait_briefly() -> bool:
    """Have torch's threads wait as `WAITING` says; False, and nothing done, if the user has said how they are to.

    To be called before torch is loaded. Processes that this one starts inherit it.
    """
    if WAITING.keys() & os.environ.keys():
        return False
    os.environ.update(WAITING)
    return True


def prepare() -> None:
    """Make the process a good place to paint in; to be called before torch is loaded.

    Its threads wait briefly. And the system's allocator gives every large block back as soon as it is free, so that
    each evaluation of a picture begins by having the same pages cleared again: 11 % of the time at 768×576 px
    (measured). It is told to keep them.
    """
    wait_briefly()
    _allocator.tell({_MMAP_THRESHOLD: LARGEST_KEPT, _TRIM_THRESHOLD: _MOST_KEPT})


@contextlib.contextmanager
def scarce_memory() -> Iterator[None]:
    """While memory is scarce, have large blocks go back after all, if `prepare` has had them kept.

    Of what is kept, pieces are cut off for smaller things, so that it must be had anew when it is wanted in one
    piece again: a tile of a megapixel took between 1.4 and 2.0 GB, and takes 1.35 so, in 3 % more time (measured).
    With twice this size 48 megapixels took 5 % less time, and 12 megapixels 0.8 GB more.
    """
    if not _allocator.is_told:
        yield
        return
    _allocator.tell({_MMAP_THRESHOLD: _LARGEST_KEPT_IF_SCARCE})
    _allocator.trim()
    try:
        yield
    finally:
        _allocator.tell({_MMAP_THRESHOLD: LARGEST_KEPT})
