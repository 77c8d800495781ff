"""The gallery: every picture is there, small, and carries the settings of the command beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stylize.cli import _given, paint
from stylize.images import read_record
from stylize.settings import Settings

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "gallery"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "benchmarks" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
COMMANDS: Mapping[str, list[str]] = SCRIPT.commands(SCRIPT.PAGE.read_text(encoding="utf-8"))


def test_page_and_folder_hold_the_same_pictures() -> None:
    assert set(COMMANDS) == {path.stem for path in PICTURES.iterdir()}
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("name", COMMANDS)
def test_picture_is_small_and_made_by_its_command(name: str) -> None:
    """As far as the record tells: the command's own settings, and the names of its pictures."""
    path = PICTURES / f"{name}.jpg"
    assert path.stat().st_size <= 60_000
    context = paint.make_context("stylize", list(COMMANDS[name]))  # click takes the list apart
    given = {key: value for key, value in _given(context, context.params).items() if key in vars(Settings())}
    expected = Settings.from_sources(context.params["config"], **given).as_dict()
    record: Mapping[str, Any] = read_record(path)
    for key in given:
        value = record["settings"][key]
        assert (tuple(value) if isinstance(value, list) else value) == expected[key]
    names = [Path(argument).name for argument in COMMANDS[name] if argument.startswith("assets/")]
    content = [] if record["content"] is None else [record["content"]["name"]]
    assert [*content, *(style["name"] for style in record["styles"])] == names


def test_commands_of_the_page_are_whole() -> None:
    for arguments in COMMANDS.values():
        for argument in arguments:
            if argument.startswith("assets/"):
                assert (ROOT / argument).is_file()
