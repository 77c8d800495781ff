"""The presets: each is whole, says what it is for, and can be asked for by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import picture
from stylize import load_settings
from stylize.cli import program
from stylize.images import read_record, save_picture
from stylize.settings import Settings, load_config, preset_names, preset_summary

CONFIGS = Path(__file__).parents[1] / "configs"


def test_presets_are_the_files_in_configs() -> None:
    assert preset_names() == sorted(path.stem for path in CONFIGS.glob("*.toml"))
    assert {"poster", "portrait", "gentle", "bold", "texture", "sketch", "gatys2016"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_preset_says_in_a_line_what_it_is_for(name: str) -> None:
    first = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# {preset_summary(name)}"
    assert preset_summary(name).endswith(".")
    assert len(preset_summary(name)) <= 100


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_applied_by_its_name(name: str) -> None:
    settings = load_settings(name).as_dict()
    for key, value in load_config(name).items():
        assert settings[key] == (tuple(value) if isinstance(value, list) else value)
    assert load_settings(name) != Settings()


def test_presets_are_listed_a_line_each_and_nothing_fails() -> None:
    result = CliRunner().invoke(program, ["presets"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == preset_names()
    assert all(preset_summary(line.split()[0]) in line for line in lines)


def test_preset_is_another_spelling_of_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_picture(picture(24, 32), tmp_path / "c.png")
    save_picture(picture(24, 32, seed=1), tmp_path / "s.png")
    for spelling in ("--preset", "--config"):
        arguments = ["c.png", "s.png", spelling, "portrait", "--size", "32", "--iterations", "2", "--overwrite"]
        assert CliRunner().invoke(program, arguments).exit_code == 0
        settings = read_record("c_s.png")["settings"]
        assert settings["content_weight"] == load_settings("portrait").content_weight


def test_texture_preset_paints_a_texture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_picture(picture(32, 32), tmp_path / "s.png")
    arguments = ["s.png", "--content", "none", "--config", "texture", "--size", "32x24", "--iterations", "2"]
    assert CliRunner().invoke(program, arguments).exit_code == 0
    assert read_record("texture_s.png")["content"] is None
