"""Whether what was read from a file has the form of a state, before anything goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_like(value: Any, like: Any, name: str) -> None:
    """Compare a state with one that is known to be right: the same names, kinds, and shapes of tensors.

    Where that one has None, anything may be; its tensors need no contents, so they may be on the device "meta".

    Raises:
        ValueError: at the first difference; it says where that is.
    """
    if isinstance(like, Tensor):
        if not isinstance(value, Tensor) or value.dtype != like.dtype or value.shape != like.shape:
            raise ValueError(f"its {name} is no {like.dtype} tensor of {list(like.shape)}")
    elif isinstance(like, Mapping):
        if not isinstance(value, Mapping) or value.keys() != like.keys():
            raise ValueError(f"its {name} is incomplete, or has more than it should")
        for key, each in like.items():
            check_like(value[key], each, f"{name}.{key}")
    elif isinstance(like, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"its {name} is no number")
    elif like is not None and type(value) is not type(like):
        raise ValueError(f"its {name} is of another kind")


def check_numbers(value: Any, name: str) -> None:
    """Find out whether this is a table of numbers by name.

    Raises:
        ValueError: when it is not.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"its {name} is no table")
    for key, each in value.items():
        check_like(each, 0.0, f"{name}.{key}")
