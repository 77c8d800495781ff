"""stylize: paint one picture in the manner of another.

    from stylize import stylize
    stylize("content.jpg", "style.jpg", out="result.png")

The names below are imported on first use, so that `stylize --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stylize.api import Result, Stylizer, UnsavedError, load_settings, stylize, stylize_folder
    from stylize.batch.report import BatchReport
    from stylize.errors import StylizeError
    from stylize.nst.hooks import capture, check_hook, clip_gradients, watch_gradients
    from stylize.nst.memory import plan_memory
    from stylize.regions import Region
    from stylize.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "BatchReport",
    "Region",
    "Result",
    "Settings",
    "StylizeError",
    "Stylizer",
    "UnsavedError",
    "capture",
    "check_hook",
    "clip_gradients",
    "load_settings",
    "plan_memory",
    "stylize",
    "stylize_folder",
    "watch_gradients",
]

_HOMES = {
    "BatchReport": "stylize.batch.report",
    "Region": "stylize.regions",
    "Settings": "stylize.settings",
    "plan_memory": "stylize.nst.memory",
    "StylizeError": "stylize.errors",
    **dict.fromkeys(("capture", "check_hook", "clip_gradients", "watch_gradients"), "stylize.nst.hooks"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stylize' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "stylize.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
