"""What the optional parts need."""

from __future__ import annotations

from importlib.util import find_spec

from stylize.errors import RefusedError


def require(*libraries: str) -> None:
    """Refuse, before anything is computed, what cannot be done without these libraries.

    Raises:
        RefusedError: naming the first that is missing and what to install.
    """
    for library in libraries:
        if find_spec(library) is None:
            raise RefusedError(
                f"This needs {library}, which is not installed. Run: pip install 'stylize-nst[inspect]'"
            )
