"""What a visitor may send and ask for; it needs no torch, so that the command can show the defaults."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stylize.errors import RefusedError, SettingsError
from stylize.settings import Settings

MEGABYTE = 1_000_000
LONGEST_NAME = 80  # characters of a file's name that are kept
_UNSAFE = re.compile(r"[^\w .()+,'&-]")  # \w: letters and digits of every script


@dataclass(frozen=True)
class Limits:
    """What one visitor may send and ask for; the machine is shared with others."""

    upload_bytes: int = 30 * MEGABYTE
    pixels: int = 25_000_000  # of a picture that is sent; a decoded one takes 12 bytes for each
    side: int = 8192  # px, of such a picture
    styles: int = 4
    size: int = 1024  # px, long side of a result
    iterations: int = 2000
    history: int = 50  # pairs of L-BFGS, each of which takes the memory of two pictures
    time_s: float = 1800.0  # for one picture
    waiting: int = 64  # jobs of everybody together
    waiting_each: int = 8  # jobs of one visitor
    folder_bytes: int = 4_000 * MEGABYTE  # of everything that is kept for everybody
    pictures: int = 64  # pictures of one visitor that are kept, and as many results


def check_order(settings: Settings, styles: int, limits: Limits) -> None:
    """Refuse what would keep the machine from the others.

    Raises:
        SettingsError: for too large a result, too long a run, too long a memory, or too many styles.
    """
    if styles > limits.styles:
        raise SettingsError(f"There are {styles} styles; this page blends at most {limits.styles}. Take some away.")
    if not isinstance(settings.size, int) or settings.size > limits.size:
        raise SettingsError(f"size is {settings.size}; this page paints at most {limits.size} px. Choose less.")
    if (settings.iterations or 0) > limits.iterations:
        raise SettingsError(
            f"iterations is {settings.iterations}; this page makes at most {limits.iterations}. Choose fewer."
        )
    if settings.history > limits.history:
        raise SettingsError(
            f"history is {settings.history}; this page remembers at most {limits.history} pairs. Choose fewer."
        )
    if (settings.time_budget_s or 0) > limits.time_s:
        raise SettingsError(
            f"The time is {settings.time_budget_s:g} s; this page gives at most {limits.time_s:g}. Choose less."
        )


def safe_name(name: str) -> str:
    """The last part of a file's name as a visitor sent it, without anything that a path could be made of."""
    last = name.replace("\\", "/").rpartition("/")[2]
    plain = _UNSAFE.sub("_", last).strip(" .")
    stem, dot, suffix = plain.rpartition(".")
    short = f"{stem[: LONGEST_NAME - len(suffix[:9]) - 1]}.{suffix[:9]}" if dot else plain[:LONGEST_NAME]
    return short or "picture"


@contextlib.contextmanager
def naming_only(*paths: Path) -> Iterator[None]:
    """Errors about these pictures name the files alone: where they lie is not the visitor's business."""
    try:
        yield
    except RefusedError as error:
        text = str(error)
        for path in paths:
            text = text.replace(str(path), path.name)
        raise type(error)(text) from error
