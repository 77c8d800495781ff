"""Between the page's controls and the settings: a few sliders stand for what most people change.

What the controls do not show stays as the preset, or a former result, has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stylize.errors import SettingsError
from stylize.settings import NAMED_STARTS, Settings, load_config, preset_names
from stylize.web.limits import Limits

DEFAULT_PRESET = "default"
# The ends of the strength slider: the photograph, hardly touched, and the painting, which has swallowed it.
PHOTOGRAPH, PAINTING = 0.6, 0.04  # content_weight
# A visitor says neither what the server runs on nor which of its files are read. `init` may name a file.
OF_THE_SERVER = (
    *("weights", "weights_normalization", "device", "precision"),
    *("memory_limit", "history_precision", "checkpoint_every_s"),
)


@dataclass(frozen=True)
class Choices:
    """What the controls say; the names are those of the settings, but for strength."""

    size: int | str | tuple[int, int]  # of a page's own result, a number
    strength: float  # 0, the photograph, … 1, the painting
    detail: float
    preserve_color: str
    quality: str
    style_scale: float
    tv_weight: float
    iterations: int | None
    time_budget_s: float | None
    style_weights: tuple[float, ...] | None

    @classmethod
    def of(cls, settings: Settings) -> Choices:
        """What the controls show for these settings."""
        values = {each.name: getattr(settings, each.name) for each in fields(cls) if each.name != "strength"}
        return cls(strength=strength_of(settings.content_weight), **values)

    def applied_to(self, base: Settings) -> Settings:
        """The settings with what differs from how the controls show `base`; all else stays to the last digit.

        Raises:
            SettingsError: for a value that cannot be.
        """
        shown = Choices.of(base)
        changes = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != getattr(shown, each.name)
        }
        if "strength" in changes:
            changes["content_weight"] = content_weight_of(changes.pop("strength"))
        return base.replace(**changes)


def content_weight_of(strength: float) -> float:
    """The content's weight for a strength of 0 … 1: from `PHOTOGRAPH` to `PAINTING` in equal ratios.

    It has two digits, so that the slider meets the default exactly.

    Raises:
        SettingsError: for another strength.
    """
    if not 0 <= strength <= 1:
        raise SettingsError(f"The strength is {strength!r}; it goes from 0 (photograph) to 1 (painting).")
    return float(f"{PHOTOGRAPH * (PAINTING / PHOTOGRAPH) ** strength:.2g}")


def strength_of(content_weight: float) -> float:
    """The strength 0 … 1 in hundredths whose content weight is nearest."""
    if content_weight <= 0:
        return 1.0
    share = math.log(content_weight / PHOTOGRAPH) / math.log(PAINTING / PHOTOGRAPH)
    return round(min(1.0, max(0.0, share)), 2)


def preset(name: str, limits: Limits) -> Settings:
    """The settings of a preset, or the defaults, as this page can use them.

    Raises:
        SettingsError: when there is no such preset.
    """
    if name == DEFAULT_PRESET:
        return former_settings({}, limits)[0]
    if name not in preset_names():  # anything else would be read as a path
        raise SettingsError(f"There is no preset {name!r}. Choose one of {', '.join(preset_names())}.")
    return former_settings(load_config(name), limits)[0]


def visitors_settings(given: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Settings that came from a visitor, without what is the server's business; and what was left out.

    Raises:
        SettingsError: for an unknown name or a value that cannot be.
    """
    wanted = Settings.from_sources(given)
    own = {name: getattr(Settings(), name) for name in OF_THE_SERVER}
    if wanted.init not in NAMED_STARTS:
        own["init"] = "content"
    left_out = [f"{name} stays {value}" for name, value in own.items() if getattr(wanted, name) != value]
    return wanted.replace(**own), left_out


def former_settings(given: Mapping[str, Any], limits: Limits) -> tuple[Settings, list[str]]:
    """Settings, as of a former result, as this page can use them; and what had to be changed.

    Raises:
        SettingsError: for an unknown name or a value that cannot be.
    """
    settings, changed = visitors_settings(given)
    if not isinstance(settings.size, int) or settings.size > limits.size:
        settings = settings.replace(size=limits.size)
        changed.append(f"size is at most {limits.size} here")
    if settings.history > limits.history:
        settings = settings.replace(history=limits.history)
        changed.append(f"history is at most {limits.history} here")
    return settings, changed


def parse_shares(text: str) -> tuple[float, ...] | None:
    """The shares of several styles from what was typed, such as "0.7, 0.3"; nothing = all alike.

    Raises:
        SettingsError: when a part is not a number.
    """
    try:
        return tuple(float(part) for part in text.replace(";", ",").split(",") if part.strip()) or None
    except ValueError as error:
        raise SettingsError(f"The shares are {text!r}; they are numbers with commas, as 0.7, 0.3.") from error


def written_shares(shares: tuple[float, ...] | None) -> str:
    """Shares as they are typed."""
    return "" if shares is None else ", ".join(f"{share:g}" for share in shares)
