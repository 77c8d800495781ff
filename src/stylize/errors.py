"""What can go wrong, as one tree.

    StylizeError                the root: every error that this package raises on purpose
    ├── RefusedError            found before computing; the command exits with 2
    │   ├── SettingsError       a value that cannot be, or two that do not go together
    │   ├── PictureError        a file that cannot be read as a picture
    │   ├── OutputError         a place or format that cannot be written
    │   └── WeightsError        weights that are missing, damaged or of another network
    ├── InputError              a tensor that the network or a loss cannot take
    ├── HookError               a hook of the user's that broke its contract
    └── RunError                the run failed; the command exits with 1
        └── SaveError           the picture is done but could not be written

A message says what is wrong, where (the path or the option), and what to do about it.
"""


class StylizeError(Exception):
    """The root of every error raised on purpose; its text is one sentence and a remedy."""


class RefusedError(StylizeError):
    """Refused before anything was computed."""


class SettingsError(RefusedError):
    """A setting that cannot be, or two settings that do not go together."""


class PictureError(RefusedError):
    """A file that cannot be read as a picture; the text names the path."""


class OutputError(RefusedError):
    """A path that cannot be written, an unknown format, or a result that exists already."""


class WeightsError(RefusedError):
    """Weights that are missing, damaged, or belong to another network."""


class InputError(StylizeError, ValueError):
    """A tensor of the wrong shape, dtype, size or content; the text names the numbers."""


class HookError(StylizeError):
    """A gradient hook that returned something other than a finite gradient of the same shape."""


class RunError(StylizeError):
    """The run failed after it had begun."""


class SaveError(RunError):
    """The picture was painted but could not be written where it was asked for."""
