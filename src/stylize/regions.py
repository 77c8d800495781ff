"""What a user says of regions, and how the command spells it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stylize.errors import SettingsError

if TYPE_CHECKING:
    from stylize.images import Source

SYNTAX = "MASK=STYLE[@STYLEMASK][:SCALE]"


LEAST_SCALE, MOST_SCALE = 0.01, 100  # of strokes: beyond, a style is a dot, or all of it one stroke


@dataclass(frozen=True)
class Region:
    """A part of the picture that has a style of its own.

    A mask is whatever a picture can be, of any size, or [H, W] or [1, 1, H, W]: white chooses a place wholly, grey
    in part; of one that is transparent somewhere, what is opaque is chosen.

    Raises:
        SettingsError: for a `style_scale` that no picture can have.
    """

    mask: Source  # where the region is
    style: Source
    style_mask: Source | None = None  # which part of the style picture shows the style; None = all of it
    style_scale: float = 1.0  # size of this style's strokes, over what the setting style_scale gives

    def __post_init__(self) -> None:
        """Refuse a scale that cannot be."""
        scale: object = self.style_scale
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not is_number or not LEAST_SCALE <= self.style_scale <= MOST_SCALE:
            raise SettingsError(
                f"A region's style_scale is {scale!r}; it must be a number from {LEAST_SCALE} to {MOST_SCALE}."
            )


def parse_region(text: str) -> Region:
    """The region that `MASK=STYLE[@STYLEMASK][:SCALE]` means.

    Names of files may hold these signs: of all ways to read the text, the first whose files exist is meant.

    Raises:
        SettingsError: when there is no such way.
    """
    missing: list[list[Path]] = []
    for reading in _readings(text):
        # Path.exists raises for a name that is too long.
        missing.insert(0, [path for path in files_of(reading) if not os.path.exists(path)])  # noqa: PTH110
        if not missing[0]:
            return reading
    if not missing:
        raise SettingsError(f"--region {text!r} is not {SYNTAX}; write it as in sky.png=starry_night.jpg.")
    nearest = min(missing, key=len)  # of equals, what is read into the most parts
    raise SettingsError(f"--region {text!r}: there is no file {nearest[0]}. Write it as {SYNTAX}.")


def _readings(text: str) -> Iterator[Region]:
    """All ways to read it: the fewest parts first."""
    for i in _places(text, "="):
        mask, rest = Path(text[:i]), text[i + 1 :]
        for style, style_mask in _pairs(rest):
            yield Region(mask, style, style_mask)
        named, _, scale = rest.rpartition(":")
        number = _number(scale)
        if named and number is not None:
            for style, style_mask in _pairs(named):
                yield Region(mask, style, style_mask, number)


def _pairs(text: str) -> Iterator[tuple[Path, Path | None]]:
    """A style alone, and with a mask of its own."""
    yield Path(text), None
    for i in _places(text, "@"):
        yield Path(text[:i]), Path(text[i + 1 :])


def _places(text: str, sign: str) -> Iterator[int]:
    """Where a sign stands between two parts."""
    return (i for i, each in enumerate(text) if each == sign and 0 < i < len(text) - 1)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def files_of(region: Region) -> list[Path]:
    """Those of its pictures that are files, as they are named."""
    given = (region.mask, region.style, region.style_mask)
    return [Path(each) for each in given if isinstance(each, (str, Path))]


def described(record: Mapping[str, Any]) -> list[str]:
    """The regions and the protection in a result's record, each as it was spelled, in a line."""
    lines = []
    for region in record.get("regions", ()):
        style_mask = f"@{region['style_mask']['name']}" if region["style_mask"] else ""
        scale = f":{region['style_scale']:g}" if region["style_scale"] != 1 else ""
        lines.append(f"--region {region['mask']['name']}={region['style']['name']}{style_mask}{scale}")
    protect = record.get("protect")
    return lines if protect is None else [*lines, f"--protect {protect['name']}"]
