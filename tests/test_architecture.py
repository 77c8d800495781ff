"""The floors of the house: which room may know which, and which library lives in which room."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stylize"
GROUND = {"errors", "settings", "events", "process", "locking"}
HALLS = {"images", "nst"}  # side by side: neither knows the other
UPSTAIRS = {"batch", "inspect"}

# What each room may import of this package. A new room needs a line here: decide on which floor it stands.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "events": {"errors"},
    "process": set(),
    "locking": set(),
    "images": GROUND,
    "regions": {"images"} | GROUND,
    "checkpoint": {"images"} | GROUND,
    "nst": GROUND,
    "batch": HALLS | GROUND,
    "inspect": HALLS | GROUND,
    "api": {"regions", "checkpoint"} | UPSTAIRS | HALLS | GROUND,
    "progress": GROUND,  # of the command and the page
    "cli": {"progress", "api", "regions", "checkpoint", "web"} | UPSTAIRS | HALLS | GROUND,
    "web": {"progress", "api", "regions"} | UPSTAIRS | HALLS | GROUND,
    "__main__": {"cli"},
    "__init__": {"api", "batch", "errors", "regions", "settings", "nst"},  # the names it exports
}
# Libraries that only some rooms may know.
LIVES_IN: dict[str, set[str]] = {
    "click": {"cli"},
    "tqdm": {"progress"},
    "PIL": {"images", "api", "web"},
    "tifffile": {"images"},
    "gradio": {"web"},
    "fastapi": {"web"},
    "uvicorn": {"web"},
    "ray": {"batch"},
    "matplotlib": {"inspect"},
    "torch": {"events", "images", "checkpoint", "nst", "api", "batch", "inspect", "web"},
    "torchvision": {"nst"},
    "safetensors": {"nst", "checkpoint"},
}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The module or package directly under `stylize`."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, by its dotted name; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls_of(path: Path) -> Iterator[str]:
    """The last name of everything that a file calls: `print`, `register_forward_hook`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            yield str(getattr(function, "attr", getattr(function, "id", "")))


def test_there_is_something_to_hold() -> None:
    assert {"cli.py", "api.py", "images.py", "vgg.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_only(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is on no floor"
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top != "stylize" or room == rest.split(".")[0]:
            continue
        wanted = rest.split(".")[0]
        if wanted in rooms:  # otherwise a name in stylize/__init__.py
            assert wanted in MAY_IMPORT[room], f"{room} imports {wanted}"
        else:
            assert wanted == "__version__", f"{room} imports {name} from the package itself"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    for name in imports_of(path):
        library = name.partition(".")[0]
        assert room_of(path) in LIVES_IN.get(library, {room_of(path)}), f"{room_of(path)} imports {library}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_hooks_are_registered_in_one_file(path: Path) -> None:
    if path != SOURCE / "nst" / "hooks.py":
        hooks = {name for name in calls_of(path) if name.startswith("register_") and name.endswith("hook")}
        assert not hooks


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_library_never_prints_and_never_exits(path: Path) -> None:
    if room_of(path) not in {"cli", "progress"}:
        assert not {"print", "exit", "_exit", "breakpoint"} & set(calls_of(path))


def test_there_is_no_room_for_odds_and_ends() -> None:
    assert not {"utils", "helpers", "misc", "common"} & {path.stem for path in FILES}


@pytest.mark.parametrize("module", ["stylize", "stylize.cli", "stylize.settings", "stylize.errors"])
def test_these_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'PIL', 'numpy', 'tqdm'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_package_hands_out_its_names_on_demand() -> None:
    code = (
        "import sys, stylize; stylize.Settings; assert 'torch' not in sys.modules;"
        "stylize.stylize; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
