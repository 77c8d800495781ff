"""What a program may do to its own process, and a library may not: for the command and its workers."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

# The parameters of glibc's mallopt (its malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 1 << 27  # what is larger goes back at once: of many megapixels each copy counts
_MOST_KEPT = (1 << 31) - 1


def prepare() -> None:
    """Make the process a good place to paint in; to be called before torch is loaded.

    Torch's threads wait for one another in a busy loop. Where another program wants a core, that slows a run ten
    times over (measured); waiting politely costs nothing.

    And the system's allocator gives every large block back as soon as it is free, so that each evaluation of a
    picture begins by having the same pages cleared again: 11 % of the time at 768×576 px (measured). It is told to
    keep them.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _tell_allocator({_MMAP_THRESHOLD: _LARGEST_BLOCK, _TRIM_THRESHOLD: _MOST_KEPT})


def _tell_allocator(parameters: Mapping[int, int]) -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
        if mallopt is not None:
            for parameter, value in parameters.items():
                mallopt(parameter, value)
