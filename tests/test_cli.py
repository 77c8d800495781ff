"""The command: what it refuses, what it says where, its exit codes, signals, and its documentation."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from conftest import image_of as picture
from stylize import __version__, api, images
from stylize.cli import flag, paint, program, snapshot_path
from stylize.errors import RunError
from stylize.events import Evaluated, Notice, ScaleFinished, ScaleStarted
from stylize.nst.transfer import Painting, transfer
from stylize.progress import Forecast, LineListener, TqdmListener, duration, figures, showing
from stylize.settings import Settings, preset_names

ROOT = Path(__file__).parents[1]
TINY = ("--size", "32", "--iterations", "3", "--precision", "fp32", "--device", "cpu")
OUTPUT_OPTIONS = {
    "--content",
    *("--out", "--overwrite", "--config", "--save-every", "--log-dir", "--max-pixels", "--quiet", "--json"),
    *("--region", "--protect", "--checkpoint"),
    *("--version", "--help"),
    *("--include", "--exclude", "--format", "--dry-run", "--retry-failed", "--fail-fast", "--shard"),
    *("--engine", "--workers", "--threads", "--ray-address"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a content and a style picture."""
    monkeypatch.chdir(tmp_path)
    picture(48, 32).save("content.png")
    picture(40, 40, seed=1).save("style.png")
    return tmp_path


def size_of(path: str | Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.width, image.height


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(program, [str(each) for each in arguments])


def paint_tiny(*arguments: str | Path) -> Result:
    return run("content.png", "style.png", *TINY, *arguments)


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("stylize: ")
    for word in words:
        assert word in line


@pytest.fixture
def instead_of_transfer(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Put an error, or a change of the real result, in the engine's place."""
    def install(what: object) -> None:
        def other(*args: Any, **options: Any) -> Painting:
            if isinstance(what, BaseException):
                raise what
            assert isinstance(what, dict)
            painting = transfer(*args, **options)
            return Painting(**(vars(painting) | what))

        monkeypatch.setattr(api, "transfer", other)

    return install


# ---- help and options --------------------------------------------------------------------------------


def options_of_paint() -> dict[str, click.Option]:
    """By the first spelling; --help is an option that click adds."""
    options = paint.get_params(click.Context(paint))
    return {each.opts[0]: each for each in options if isinstance(each, click.Option)}


def test_every_setting_has_an_option_and_every_option_a_purpose() -> None:
    settings = {flag(name): default for name, default in vars(Settings()).items()}
    options = options_of_paint()
    assert set(options) == set(settings) | OUTPUT_OPTIONS
    for spelling, default in settings.items():
        assert options[spelling].default == default
        assert options[spelling].help


def test_flags_are_the_settings_names_with_dashes() -> None:
    assert flag("content_weight") == "--content-weight"
    assert flag("time_budget_s") == "--time-budget"


def test_help_shows_sections_defaults_and_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for heading in ("Picture:", "Style and content:", "Search:", "Network and machine:", "Output:"):
        assert heading in result.stdout
    assert f"[default: {Settings().size}]" in result.stdout
    assert "--out result.png" in result.stdout
    assert "presets" in result.stdout


def documented_options() -> dict[str, tuple[str, str]]:
    """docs/options.md: {option: (default, meaning)}."""
    rows: dict[str, tuple[str, str]] = {}
    for line in (ROOT / "docs" / "options.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `--"):
            option, default, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
            name = re.findall(r"--[a-z-]+", option)[0]
            assert name not in rows, f"{name} is documented twice"
            rows[name] = default, meaning
    return rows


def test_every_option_is_documented_and_nothing_else() -> None:
    assert set(documented_options()) == set(options_of_paint())


def test_the_documented_defaults_are_the_defaults() -> None:
    documented = documented_options()
    for name, value in vars(Settings()).items():
        expected = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        expected = {"None": "", "False": "no", "True": "yes"}.get(expected, expected)
        default, meaning = documented[flag(name)]
        assert default.strip("`") == expected
        assert meaning


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for name in program.commands:
        assert f"\nstylize {name} " in text or name == "paint"


def test_help_and_usage_errors_import_no_torch() -> None:
    code = (
        "import sys; from stylize.cli import program\n"
        "for arguments in (['--help'], ['--sizee', '3'], [], ['presets']):\n"
        "    try: program(arguments)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'PIL', 'numpy', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True)


def test_help_takes_less_than_half_a_second() -> None:
    def once() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "stylize", "--help"], check=True, capture_output=True)
        return time.perf_counter() - started

    assert min(once() for _ in range(5)) < 0.5  # the fastest: others share the machine


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"stylize {__version__}\n"


# ---- refused before the weights are loaded -----------------------------------------------------------


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["CONTENT", "For example: stylize"]),
        (["content.png"], ["STYLE", "For example: stylize"]),
        (["missing.jpg", "style.png"], ["missing.jpg"]),
        (["content.png", "missing.jpg"], ["missing.jpg"]),
        (["content.png", "style.png", "--sizee", "3"], ["--sizee", "--size"]),
        (["content.png", "style.png", "--size", "huge"], ["--size", "huge", "full"]),
        (["content.png", "style.png", "--size", "3"], ["size is 3", "16"]),
        (["content.png", "style.png", "--iterations", "2.5"], ["--iterations", "2.5"]),
        (["content.png", "style.png", "--history", "0"], ["history is 0", "at least 1"]),
        (["content.png", "style.png", "--tv-weight", "nan"], ["tv_weight is nan"]),
        (["content.png", "style.png", "--time-budget", "2x"], ["--time-budget", "2x", "2m"]),
        (["content.png", "style.png", "--style-layers", "relu9_9"], ["relu9_9", "Did you mean relu"]),
        (["content.png", "style.png", "--content-layers", "rely4_2"], ["Did you mean relu4_2?"]),
        (["content.png", "style.png", "--style-layers", "relu1_1=4,relu2_1"], ["every layer a weight"]),
        (
            ["content.png", "style.png", "--style-layers", "relu1_1=4", "--style-layer-weights", "3"],
            ["--style-layers", "--style-layer-weights"],
        ),
        (["content.png", "style.png", "--style-loss", "grm"], ["--style-loss", "grm", "gram"]),
        (["content.png", "style.png", "--normalization", "gatys"], ["gatys", "gram"]),
        (["content.png", "style.png", "--style-weights", "1,2"], ["2 values for 1 style"]),
        (["content.png", "style.png", "style.png", "--style-weights", "1"], ["1 values for 2 style"]),
        (["content.png", "style.png", "--device", "quda"], ["quda", "cpu"]),
        (["content.png", "style.png", "--device", "cuda:99"], ["cuda:99", "--device cpu"]),
        (["content.png", "style.png", "--init", "missing.png"], ["missing.png"]),
        (["content.png", "style.png", "--config", "impressionism"], ["impressionism", "gatys2016"]),
        (["content.png", "style.png", "--config", "style.png"], ["style.png", "settings"]),
        (["content.png", "style.png", "--out", "x.jgp"], ["x.jgp", ".jpg"]),
        (["content.png", "style.png", "--out", "folder"], ["folder", ".png"]),
        (["content.png", "style.png", "--out", "content.png"], ["content.png", "--overwrite"]),
        (["content.png", "style.png", "--out", "style.png", "--overwrite"], ["style.png", "paint from"]),
        (["content.png", "style.png", "--out", "content.png/x.png"], ["content.png/x.png"]),
        (["content.png", "style.png", "--max-pixels", "100"], ["48 x 32", "--max-pixels"]),
        (["content.png", "style.png", "--save-every", "0"], ["--save-every"]),
        ([".", "style.png", "--out", "."], ["originals"]),
        (["inof", "content.png"], ["inof"]),
        (["info"], ["PICTURE"]),
        (["info", "content.png"], ["content.png", "no settings"]),
        (["presets", "gatys2016"], ["unexpected"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].endswith(".png") else None,
)
def test_it_is_refused_in_one_line(arguments: list[str], words: list[str]) -> None:
    before = set(Path().iterdir())
    assert_refused(run(*arguments), *words)
    assert set(Path().iterdir()) == before


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("kind", ["empty", "text", "cut in half"])
def test_a_damaged_picture_is_refused_by_name(kind: str) -> None:
    path = Path("damaged.jpg")
    stream = io.BytesIO()
    picture(200, 200).save(stream, "JPEG")
    whole = stream.getvalue()
    path.write_bytes({"empty": b"", "text": b"hello", "cut in half": whole[: len(whole) // 2]}[kind])
    assert_refused(run(path, "style.png"), "damaged.jpg")
    assert_refused(run("content.png", path), "damaged.jpg")


@pytest.mark.usefixtures("no_weights")
def test_a_sliver_is_refused_with_its_numbers() -> None:
    Image.new("RGB", (5000, 2)).save("sliver.png")
    assert_refused(run("sliver.png", "style.png"), "512×1 px", "16 px")


@pytest.mark.usefixtures("no_weights")
def test_a_jpeg_larger_than_the_format_is_refused_before_computing() -> None:
    Image.new("RGB", (66_000, 16)).save("wide.png")
    arguments = ("wide.png", "style.png", "--size", "full", "--scales", "1")
    assert_refused(run(*arguments, "--out", "r.jpg"), "66000 x 16", ".png")


def test_missing_weights_are_refused_by_name() -> None:
    assert_refused(paint_tiny("--weights", "nowhere.pth"), "nowhere.pth")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("arguments", [["--sizee", "3"], ["--device", "quda"], ["--out", "x.jgp"]])
def test_refusals_are_json_too(arguments: list[str]) -> None:
    result = run("content.png", "style.png", "--json", *arguments)
    report = json.loads(result.stdout)
    assert result.exit_code == report["exit_code"] == 2
    assert result.stderr == f"stylize: {report['error']}\n"
    assert arguments[1] in report["error"] or arguments[0] in report["error"]


# ---- a picture is painted ----------------------------------------------------------------------------


def test_it_says_the_path_on_stdout_and_the_rest_on_stderr() -> None:
    result = paint_tiny()
    assert result.exit_code == 0
    assert result.stdout == "content_style.png\n"
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"content_style\.png · 32×21 · [\d.]+ s · style error [\d.]+ %, content error [\d.]+ %", last
    )
    assert size_of("content_style.png") == (32, 21)


def test_quiet_says_nothing() -> None:
    result = paint_tiny("--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert Path("content_style.png").exists()


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_json_is_one_report_on_stdout(quiet: list[str]) -> None:
    result = paint_tiny("--json", "--out", "r.webp", *quiet)
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert report["out"] == "r.webp"
    assert report["size"] == [32, 21]
    assert report["outcome"] == "done"
    assert report["evaluations"] == 3
    assert report["exit_code"] == 0
    assert report["settings"]["iterations"] == 3
    assert {"losses", "seconds", "notices", "reason"} <= set(report)
    assert bool(result.stderr) != bool(quiet)


def test_several_styles_are_blended_and_named() -> None:
    result = run("content.png", "style.png", "content.png", *TINY, "--style-weights", "0.7, 0.3")
    assert result.stdout == "content_style_content.png\n"
    assert images.read_record("content_style_content.png")["settings"]["style_weights"] == [0.7, 0.3]


def test_every_kind_of_option_reaches_the_settings() -> None:
    result = paint_tiny(
        *("--style-layers", "relu1_1=4, relu2_1=3", "--content-layers", "relu2_1", "--upscale"),
        *("--time-budget", "1m", "--clip-norm", "5", "--optimizer", "adam", "--init", "noise", "--json"),
    )
    settings = json.loads(result.stdout)["settings"]
    assert settings == Settings().as_dict() | {
        "size": 32,
        "iterations": 3,
        "precision": "fp32",
        "device": "cpu",
        "style_layers": ["relu1_1", "relu2_1"],
        "style_layer_weights": [4.0, 3.0],
        "content_layers": ["relu2_1"],
        "content_layer_weights": [1.0],
        "upscale": True,
        "time_budget_s": 60.0,
        "clip_norm": 5.0,
        "optimizer": "adam",
        "init": "noise",
    }


def test_style_layers_without_weights_count_alike() -> None:
    result = paint_tiny("--style-layers", "relu1_1,relu3_1", "--json")
    assert json.loads(result.stdout)["settings"]["style_layer_weights"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("60s", 60), ("2m", 120), ("1.5 min", 90), ("2h", 7200), ("none", None)]
)
def test_a_time_has_a_unit(text: str, seconds: float | None) -> None:
    context = paint.make_context("paint", ["a", "b", "--time-budget", text])
    assert context.params["time_budget_s"] == seconds


def test_the_example_of_painting_stands_by_the_command_that_paints() -> None:
    assert_refused(run("content.png"), "STYLE", "For example")
    for command in ("info", "plot"):
        assert "For example" not in run(command).stderr


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    "arguments",
    [("", "style.png"), ("content.png", ""), ("content.png", "style.png", "--config", "")],
)
def test_an_empty_path_is_not_the_working_directory(arguments: tuple[str, ...]) -> None:
    assert_refused(run(*arguments, *TINY), "empty")


def test_none_takes_back_what_a_config_says() -> None:
    Path("mine.toml").write_text("clip_norm = 3.0\ntv_weight = 1.0\n")
    result = paint_tiny("--config", "mine.toml", "--clip-norm", "none", "--json")
    settings = json.loads(result.stdout)["settings"]
    assert (settings["clip_norm"], settings["tv_weight"]) == (None, 1.0)


def test_info_prints_a_config_with_the_results_settings() -> None:
    paint_tiny("--out", "r.png", "--style-layers", "relu1_1,relu2_1", "--seed", "7")
    result = run("info", "r.png")
    assert result.exit_code == 0
    assert "content.png in the manner of style.png" in result.stdout
    Path("again.toml").write_text(result.stdout, encoding="utf-8")
    assert api.load_settings("again.toml") == api.load_settings("r.png")
    assert json.loads(run("info", "r.png", "--json").stdout) == images.read_record("r.png")


@pytest.mark.parametrize("settings", [None, 5, "gatys2016"])
def test_a_record_that_lacks_a_part_is_said_to(settings: object) -> None:
    record = {} if settings is None else {"settings": settings}
    images.save_picture(images.read_picture("style.png").tensor, "part.png", record=record)
    assert_refused(run("info", "part.png"), "part.png", "--json")
    assert_refused(paint_tiny("--config", "part.png"), "part.png", "settings are missing")


def test_a_result_of_a_newer_release_is_named() -> None:
    record = {
        "program": "stylize",
        "version": "9.9",
        "content": {"name": "a.png"},
        "styles": [{"name": "b.png"}],
        "outcome": "done",
        "evaluations": 1,
        "weights": {"name": "embedded", "sha256": "0" * 64},
        "losses": {},
        "settings": {"strokes": 7},
    }
    images.save_picture(images.read_picture("style.png").tensor, "new.png", record=record)
    assert_refused(run("info", "new.png"), "new.png: There is no setting 'strokes'", "--json")
    assert_refused(paint_tiny("--config", "new.png"), "new.png: There is no setting 'strokes'", "9.9")
    assert json.loads(run("info", "new.png", "--json").stdout) == record


def test_a_former_result_repeats_itself_to_the_byte() -> None:
    paint_tiny("--out", "a.png", "--init", "noise", "--seed", "7")
    result = run("content.png", "style.png", "--config", "a.png", "--out", "b.png")
    assert result.exit_code == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_presets_are_listed() -> None:
    result = run("presets")
    assert [line.split()[0] for line in result.stdout.splitlines()] == preset_names()


def test_the_same_command_again_is_refused_without_overwrite() -> None:
    assert paint_tiny().exit_code == 0
    first = Path("content_style.png").read_bytes()
    assert_refused(paint_tiny("--size", "30"), "content_style.png", "--overwrite")
    assert Path("content_style.png").read_bytes() == first
    assert paint_tiny("--size", "30", "--overwrite").exit_code == 0
    assert size_of("content_style.png") == (30, 20)


@pytest.mark.parametrize(
    "name", ["2023李.jpg", "St'tteben (1).jpg", "a b  c.jpg", 'say "hi".jpg', "-dash.jpg", "info"]
)
def test_any_file_name_works(name: str) -> None:
    picture(48, 32).save(name, "JPEG")
    result = run(*TINY, "--json", "--", name, "style.png")
    assert result.exit_code == 0, result.stderr
    out = Path(name).stem + "_style.png"
    assert json.loads(result.stdout)["out"] == out
    assert images.read_record(out)["content"]["name"] == name


def test_a_name_that_is_no_text_is_printed_as_its_bytes() -> None:
    name = os.fsdecode(b"caf\xe9.png")
    try:
        picture(48, 32).save(name)
    except OSError:
        pytest.skip("This file system takes names in UTF-8 only.")
    result = run(name, "style.png", *TINY)
    assert result.exit_code == 0
    assert result.stdout_bytes == b"caf\xe9_style.png\n"
    assert "caf" in result.stderr


def test_notices_are_shown() -> None:
    frames = [picture(32, 32, seed) for seed in (1, 2)]
    frames[0].save("cats.gif", save_all=True, append_images=frames[1:])
    result = run("cats.gif", "style.png", *TINY)
    assert "note: cats.gif is animated" in result.stderr
    report = json.loads(run("cats.gif", "style.png", *TINY, "--overwrite", "--json", "--quiet").stdout)
    assert "cats.gif is animated" in report["notices"][0]


def test_the_folder_of_the_result_is_made() -> None:
    assert paint_tiny("--out", "new/folder/r.png").stdout == f"{Path('new/folder/r.png')}\n"
    assert Path("new/folder/r.png").exists()


# ---- snapshots -----------------------------------------------------------------------------------------


def test_snapshots_are_numbered_and_stand_beside_the_result() -> None:
    result = paint_tiny("--out", "made/r.jpg", "--iterations", "5", "--save-every", "2")
    assert result.exit_code == 0
    assert sorted(path.name for path in Path("made").iterdir()) == ["r.000002.png", "r.000004.png", "r.jpg"]
    assert size_of(snapshot_path(Path("made/r.jpg"), 4)) == (32, 21)


@pytest.mark.usefixtures("no_weights")
def test_old_snapshots_are_not_overwritten_unasked() -> None:
    Path("r.000120.png").touch()
    assert_refused(paint_tiny("--out", "r.png", "--save-every", "2"), "r.000120.png", "--overwrite")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("how", ["on the command line", "in a config"])
def test_no_snapshot_replaces_what_it_is_painted_from(how: str) -> None:
    picture(48, 32, seed=2).save("r.000002.png")
    before = Path("r.000002.png").read_bytes()
    Path("mine.toml").write_text('init = "r.000002.png"\n')
    start = ("--init", "r.000002.png") if how == "on the command line" else ("--config", "mine.toml")
    assert_refused(paint_tiny("--out", "r.png", "--save-every", "2", "--overwrite", *start), "r.000002.png")
    assert Path("r.000002.png").read_bytes() == before


def test_a_snapshot_that_cannot_be_written_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    appearing = images._appearing

    def full_for_snapshots(path: Path, **options: Any) -> Any:
        if path.name.startswith("r.0000"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return appearing(path, **options)

    monkeypatch.setattr(images, "_appearing", full_for_snapshots)
    result = paint_tiny("--out", "r.png", "--save-every", "1")
    assert result.exit_code == 0
    assert result.stderr.count("No space left on device") == 1
    assert Path("r.png").exists()
    assert list(Path().glob("r.0*")) == []


# ---- when it does not go well ------------------------------------------------------------------------


@pytest.fixture
def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written into the working directory any more; the temporary folder is another."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent))
    appearing = images._appearing

    def full(path: Path, **options: Any) -> Any:
        if folder in [path.absolute(), *path.absolute().parents]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return appearing(path, **options)

    monkeypatch.setattr(images, "_appearing", full)


@pytest.mark.usefixtures("full_disk")
def test_on_a_full_disk_the_picture_is_saved_elsewhere() -> None:
    result = paint_tiny("--out", "r.png")
    assert result.exit_code == 1
    path = Path(result.stdout.removesuffix("\n"))
    assert path.name == "r.png"
    assert size_of(path) == (32, 21)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("stylize: r.png could not be written: No space left on device.")
    assert str(path) in last
    report = json.loads(paint_tiny("--out", "r.png", "--json").stdout)
    assert report["exit_code"] == 1
    assert "No space left" in report["error"]
    assert Path(report["out"]).exists()


@pytest.mark.usefixtures("full_disk")
def test_a_picture_that_can_be_saved_nowhere_is_said_to_be_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    result = paint_tiny("--out", "r.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "temporary folder" in result.stderr.splitlines()[-1]


def test_a_failed_run_exits_with_1_and_keeps_its_best_picture(
    instead_of_transfer: Callable[[object], None],
) -> None:
    instead_of_transfer({"outcome": "failed", "reason": "The loss was not finite 9 times."})
    result = paint_tiny("--out", "r.png")
    assert (result.exit_code, result.stdout) == (1, "r.png\n")
    assert result.stderr.splitlines()[-1] == (
        "stylize: The loss was not finite 9 times. The best picture so far is in r.png."
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RunError("Out of memory on cpu at 32×21 px."), 1, "Out of memory on cpu at 32×21 px."),
        (MemoryError(), 1, "There is not enough memory. Use a smaller --size."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "There is not enough memory."),
        (KeyboardInterrupt(), 130, "Interrupted before anything was painted."),
        (ZeroDivisionError("two\nlines"), 1, "ZeroDivisionError: two lines. This is a defect"),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_error_is_one_line_and_an_exit_code(
    instead_of_transfer: Callable[[object], None],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
    as_json: list[str],
) -> None:
    monkeypatch.delenv("STYLIZE_TRACEBACK", raising=False)
    instead_of_transfer(error)
    result = paint_tiny(*as_json)
    assert result.exit_code == code
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"stylize: {words}")
    assert not Path("content_style.png").exists()
    if as_json:
        report = json.loads(result.stdout)
        assert report["exit_code"] == code
        assert report["error"].replace("\n", " ").startswith(words)
    else:
        assert result.stdout == ""


def test_a_defect_shows_its_traceback_on_demand(
    instead_of_transfer: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STYLIZE_TRACEBACK", "1")
    instead_of_transfer(ZeroDivisionError("where?"))
    result = paint_tiny()
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_second_interrupt_stops_the_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(images, "save_picture", interrupted)
    result = paint_tiny()
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "stylize: Interrupted again while the picture was being saved."


def test_signal_handlers_are_put_back() -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]
    before = [signal.getsignal(number) for number in numbers]
    paint_tiny()
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def long_run() -> Iterator[subprocess.Popen[str]]:
    """A run that would take for ever, and has painted something."""
    command = [sys.executable, "-m", "stylize", "content.png", "style.png", *TINY]
    process = subprocess.Popen(
        [*command, "--iterations", "1000000", "--out", "r.png", "--save-every", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    while process.poll() is None and not Path("r.000003.png").exists():
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals.")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_the_best_picture_and_names_it(
    long_run: subprocess.Popen[str], name: str
) -> None:
    long_run.send_signal(getattr(signal, name))
    stdout, stderr = long_run.communicate(timeout=60)
    assert long_run.returncode == 130
    assert stdout == "r.png\n"
    assert stderr.splitlines()[-1] == "stylize: Interrupted. The best picture so far is in r.png."
    assert images.read_record("r.png")["outcome"] == "interrupted"
    assert size_of("r.png") == (32, 21)
    assert [path for path in Path().iterdir() if path.name.startswith(".")] == []


def test_readers_who_leave_do_not_cost_the_picture() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "stylize", "content.png", "style.png", *TINY]
    process = subprocess.run(command, stdout=write, stderr=write, check=False)
    os.close(write)
    assert process.returncode == 0
    assert size_of("content_style.png") == (32, 21)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="There is no device that is always full.")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_behind_a_stream_is_said_where_it_matters(stream: str) -> None:
    arguments = ["presets"] if stream == "stdout" else ["--typo", "--json"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "stylize", *arguments], **(streams | {stream: full}), check=False
        )
    if stream == "stdout":
        (line,) = process.stderr.decode().splitlines()
        assert (process.returncode, line[:39]) == (1, "stylize: Standard output cannot be writ")
    else:
        assert (process.returncode, json.loads(process.stdout)["exit_code"]) == (2, 2)


def test_a_reader_who_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "stylize", "presets"]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (0, b"")


# ---- progress ------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def events_of_a_run(
    cost: float = 3.0, plans: tuple[int, ...] = (4, 2), made: tuple[int, ...] = (4, 1)
) -> Iterator[ScaleStarted | Evaluated | ScaleFinished]:
    """Two scales, the second four times as dear; it stops before its plan is used up."""
    evaluation, seconds = 0, 0.0
    for scale, count in enumerate(made):
        width, height = 128 * 2**scale, 72 * 2**scale
        yield ScaleStarted(scale, len(made), width, height, plans[scale])
        for _ in range(count):
            evaluation, seconds = evaluation + 1, seconds + cost * 4**scale
            terms = {"style": 0.041, "content": 0.62}
            yield Evaluated(scale, len(made), evaluation, sum(plans), seconds, 1.0, terms)
        yield ScaleFinished(scale, len(made), count, seconds, 1.0, "Good enough.")


def test_the_forecast_knows_that_finer_scales_cost_more() -> None:
    forecast = Forecast()
    left: list[float | None] = []
    for event in events_of_a_run():
        if isinstance(event, ScaleStarted):
            forecast.start(event)
        elif isinstance(event, Evaluated):
            left.append(forecast.left(event))
    # 3 s each at the first scale, 12 s at the second: after two, 2·3 + 2·12 are left.
    assert left == [None, 30.0, 27.0, 24.0, 12.0]


def test_a_time_budget_bounds_the_forecast() -> None:
    forecast = Forecast(budget_s=20.0)
    forecast.start(ScaleStarted(0, 1, 128, 72, 1000))
    forecast.left(Evaluated(0, 1, 1, 1000, 3.0, 1.0))
    assert forecast.left(Evaluated(0, 1, 2, 1000, 6.0, 1.0)) == 14.0


def test_without_a_terminal_a_forecast_and_a_line_for_each_scale_are_said() -> None:
    stream = io.StringIO()
    listener = LineListener(stream)
    listener(Notice("cats.gif is animated."))
    for event in events_of_a_run():
        listener(event)
    assert stream.getvalue().splitlines() == [
        "note: cats.gif is animated.",
        "about 30 s left at most, judged by 2 evaluations",
        "scale 1/2 128×72: 4 evaluations in 12 s, style 4.1 %, content 62 %",
        "scale 2/2 256×144: 1 evaluation in 24 s, style 4.1 %, content 62 %",
    ]


def test_a_fast_run_needs_no_forecast() -> None:
    stream = io.StringIO()
    listener = LineListener(stream)
    for event in events_of_a_run(cost=0.1):
        listener(event)
    assert "left" not in stream.getvalue()


def test_the_bar_shows_scale_size_errors_and_time_and_ends_full() -> None:
    stream = Terminal()
    with showing(stream) as listener:
        assert isinstance(listener, TqdmListener)
        for event in events_of_a_run():
            if isinstance(event, ScaleFinished):
                listener(Notice("The clipping guard fired."))
            listener(event)
    text = stream.getvalue()
    assert "\rscale 2/2 256×144" in text
    assert "style 4.1 %, content 62 %" in text
    assert "note: The clipping guard fired.\n" in text
    assert text.endswith("\n")
    last = text.rstrip("\n").split("\r")[-1]
    assert " 5/5 " in last  # six were planned at most


def test_the_bar_of_a_time_budget_counts_seconds() -> None:
    stream = Terminal()
    with showing(stream, budget_s=40.0) as listener:
        for event in events_of_a_run():
            listener(event)
            if isinstance(event, Evaluated):
                time.sleep(0.11)  # tqdm draws ten times a second
    assert "24/40 s" in stream.getvalue() or "12/40 s" in stream.getvalue()


def test_quiet_shows_nothing_even_in_a_terminal() -> None:
    stream = Terminal()
    with showing(stream, quiet=True) as listener:
        for event in events_of_a_run():
            listener(event)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *[(0.04, "0.0 s"), (4.21, "4.2 s"), (36.4, "36 s"), (59.6, "1 min 00 s")],
        *[(185, "3 min 05 s"), (3599.6, "1 h 00 min"), (7810, "2 h 10 min")],
    ],
)
def test_durations_are_said_in_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_errors_are_said_in_per_cent_where_they_are_relative() -> None:
    terms = {"content": 1.042, "style": 0.0037, "tv": 3.0}
    assert figures(terms) == ["style 0.4 %", "content 104 %"]
    assert figures(terms, suffix=" error") == ["style error 0.4 %", "content error 104 %"]
    assert figures({"style": 12345.6}, relative=False) == ["style 1.23e+04"]
