"""A folder on the command line: what is painted, said and left, through refusals, signals and crashes."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

from conftest import image_of as picture
from fake_painters import copying, painted
from stylize import api, images
from stylize.batch.manifest import Entry, read_entries
from stylize.batch.plan import MARK
from stylize.cli import FOLDER_OPTIONS, paint, program
from stylize.events import Evaluated, Notice, ScaleStarted
from stylize.progress import FolderBars, FolderLines, showing_folder

TINY = ("--size", "32", "--iterations", "2", "--precision", "fp32", "--device", "cpu")
SHALLOW = ("--style-layers", "relu1_1", "--content-layers", "relu2_1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder of three pictures and a style."""
    monkeypatch.chdir(tmp_path)
    Path("photos/sub").mkdir(parents=True)
    for seed, name in enumerate(("a.png", "b.JPG", "sub/2023李 (1).png")):
        picture(48, 32 + seed, seed).save(Path("photos") / name)
    picture(40, 40, seed=9).save("style.png")
    return tmp_path


NAMES = ["a.png", "b.png", "sub/2023李 (1).png"]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a fake paint, in this process; the names that it painted."""
    path = tmp_path / "painted.log"
    monkeypatch.setattr("stylize.api._open_painter", lambda settings, _: copying(path, settings)())
    return path


def run(*arguments: str | Path) -> Result:
    command = ["photos", "style.png", "--out", "out", "--engine", "inline", *TINY, *arguments]
    return CliRunner().invoke(program, [str(each) for each in command])


def test_a_start_that_cannot_be_read_is_refused_before_any_picture_fails() -> None:
    result = run("--init", "nowhere.png")
    assert result.exit_code == 2
    assert "nowhere.png" in result.stderr
    assert not Path("out").exists()


def test_a_single_pattern_is_not_taken_for_its_letters(log: Path) -> None:
    report = api.stylize_folder("photos", "style.png", "out", include="*.jpg", engine="inline", size=32)
    assert [entry.name for entry in report.painted] == painted(log) == ["b.png"]


def report(out: str = "out", name: str = "report.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(out, name).read_text(encoding="ascii"))
    return found


def pictures(out: str | Path = "out") -> dict[str, bytes]:
    """The outputs, by their names."""
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in Path(out).rglob("*.png")}


# ---- done and not done ---------------------------------------------------------------------------------


def test_a_folder_is_painted_and_then_done(log: Path) -> None:
    first = run()
    assert first.exit_code == 0, first.output
    assert sorted(pictures()) == sorted(painted(log)) == NAMES
    assert first.stdout == f"{Path('out').resolve()}\n"
    assert "3 painted" in first.stderr
    second = run()
    assert second.exit_code == 0
    assert len(painted(log)) == 3
    assert "3 done before" in second.stderr
    assert report()["skipped"] == NAMES


def test_bad_pictures_are_named_and_the_rest_is_painted(log: Path) -> None:
    Path("photos/notes.txt").write_text("milk")
    Path("photos/text.jpg").write_text("no picture")
    Path("photos/empty.png").touch()
    Path("photos/cut.png").write_bytes(Path("photos/a.png").read_bytes()[:-40])
    picture(48, 32).save("photos/refuse.png")
    for _ in range(2):
        result = run()
        assert result.exit_code == 3
        assert sorted(painted(log)) == NAMES  # the second time too: a failure is not tried again by itself
        for name in ("text.png", "empty.png", "cut.png", "refuse.png"):
            assert f"failed: {name}: " in result.stderr
        assert "ignored: " in result.stderr
        found = report()
        assert found["outcome"] == "failures"
        assert {each["name"] for each in found["failed"]} == {"cut.png", "empty.png", "refuse.png", "text.png"}
        assert all(each["error"] for each in found["failed"])


def test_what_has_changed_is_painted_again_and_nothing_else(log: Path) -> None:
    run()
    log.unlink()
    picture(48, 40, seed=7).save("photos/a.png")
    Path("out/b.png").write_bytes(Path("out/b.png").read_bytes()[:-10])
    assert run().exit_code == 0
    assert sorted(painted(log)) == ["a.png", "b.png"]
    log.unlink()
    assert run("--seed", "1").exit_code == 0
    assert sorted(painted(log)) == NAMES


def test_what_failed_is_tried_again_when_asked(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(48, 32).save("photos/refuse.png")
    assert run().exit_code == 3
    monkeypatch.setattr("fake_painters.misbehave", lambda job: None)
    assert run().exit_code == 3
    assert run("--retry-failed").exit_code == 0
    assert painted(log)[-1] == "refuse.png"
    assert run().exit_code == 0


def test_fail_fast_ends_at_the_first_failure(log: Path) -> None:
    picture(480, 320).save("photos/refuse.png")  # the largest is the first
    result = run("--fail-fast")
    assert result.exit_code == 3
    assert painted(log) == []
    assert sorted(report()["left"]) == NAMES


def test_a_full_disk_ends_the_run_and_is_no_failure_of_the_picture(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(480, 320).save("photos/full.png")
    result = run()
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert painted(log) == []
    monkeypatch.setattr("fake_painters.misbehave", lambda job: None)
    assert run().exit_code == 0
    assert sorted(painted(log)) == sorted([*NAMES, "full.png"])


def test_shards_paint_everything_once_between_them(log: Path) -> None:
    for seed in range(9):
        picture(32, 32, seed).save(f"photos/p{seed}.png")
    for part in (1, 2, 3):
        assert run("--shard", f"{part}/3").exit_code == 0
        assert report(name=f"report.{part}-of-3.json")["left"] == []
    assert Counter(painted(log)) == Counter(list(pictures()))
    assert len(painted(log)) == 12
    assert "12 done before" in run().stderr


def test_a_folder_of_styles_and_another_format(log: Path) -> None:
    Path("styles").mkdir()
    picture(20, 20, 1).save("styles/night.png")
    picture(20, 20, 2).save("styles/wave.png")
    command = ["photos", "styles", "--out", "out", "--engine", "inline", "--format", "jpg", "--exclude", "sub"]
    assert CliRunner().invoke(program, [*command, *TINY]).exit_code == 0
    assert painted(log) == ["night/b.jpg", "night/a.jpg", "wave/b.jpg", "wave/a.jpg"]  # style by style


def test_a_broken_style_is_refused_before_anything_is_painted(log: Path) -> None:
    Path("style.png").write_bytes(Path("style.png").read_bytes()[:-60])
    result = run()
    assert result.exit_code == 2
    assert "style.png" in result.stderr
    assert not Path("out").exists()


def test_a_dry_run_tells_all_and_writes_nothing(log: Path) -> None:
    Path("photos/text.jpg").write_text("no picture")
    result = run("--dry-run")
    assert result.exit_code == 0
    longest_first = [NAMES[2], "b.png", "a.png"]
    assert result.stdout.splitlines() == [str(Path("out").resolve() / name) for name in longest_first]
    assert "failed: text.png" in result.stderr
    assert "3 to be painted" in result.stderr
    assert "at most about" in result.stderr
    assert "GB of memory" in result.stderr
    assert not Path("out").exists()
    assert painted(log) == []


def test_one_enormous_picture_fails_alone_and_costs_the_others_no_worker(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stylize.batch.estimate.cores", lambda: 2)
    data = bytearray(Path("photos/a.png").read_bytes())
    data[16:24] = (60_000).to_bytes(4, "big") * 2  # width and height in the header, whose checksum follows
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    Path("photos/bomb.png").write_bytes(data)
    result = run("--dry-run", "--engine", "processes", "--json")
    found = json.loads(result.stdout)
    assert [each["name"] for each in found["failed"]] == ["bomb.png"]
    assert "--max-pixels" in found["failed"][0]["error"]
    assert found["workers"] == 2


def test_json_is_the_report(log: Path) -> None:
    result = run("--json")
    found = json.loads(result.stdout)
    assert found.pop("exit_code") == 0
    assert found == report()
    assert {each["status"] for each in found["painted"]} == {"done"}


def test_quiet_says_nothing(log: Path) -> None:
    result = run("--quiet")
    assert (result.exit_code, result.output) == (0, "")


# ---- refusals ------------------------------------------------------------------------------------------


def test_files_of_others_are_replaced_only_when_asked(log: Path) -> None:
    Path("out").mkdir()
    Path("out/a.png").write_bytes(b"mine")
    result = run()
    assert result.exit_code == 2
    assert "out/a.png exists already" in result.stderr
    assert Path("out/a.png").read_bytes() == b"mine"
    assert painted(log) == []
    assert run("--overwrite").exit_code == 0
    assert images.read_picture("out/a.png").size == (48, 32)


def test_a_refused_folder_is_left_as_it_was(log: Path) -> None:
    Path("out").mkdir()
    Path("out/a.png").write_bytes(Path("photos/a.png").read_bytes())
    for shard in ((), ("--shard", "1/1")):
        result = run(*shard)
        assert result.exit_code == 2
        assert "out/a.png exists already" in result.stderr
        assert [path.name for path in Path("out").iterdir()] == ["a.png"]


@pytest.mark.parametrize("out", ["out", "out/deeper/still"])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_file_in_place_of_the_output_folder_is_refused(log: Path, out: str, dry: tuple[str, ...]) -> None:
    Path("out").write_text("mine")
    result = run("--out", out, *dry)
    assert result.exit_code == 2
    assert f"{Path('out').resolve()} is a file" in result.stderr
    assert Path("out").read_text() == "mine"


def test_originals_are_never_overwritten(log: Path) -> None:
    before = pictures("photos")
    for out in ("photos", "photos/sub/.."):
        result = CliRunner().invoke(program, ["photos", "style.png", "--out", out, "--overwrite"])
        assert result.exit_code == 2
        assert "originals" in result.stderr
    assert pictures("photos") == before


@pytest.mark.parametrize("arguments", [("--shard", "3/2"), ("--save-every", "2"), ("--log-dir", "logs")])
def test_what_does_not_go_with_a_folder_is_refused(log: Path, arguments: tuple[str, str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert not Path("out").exists()


@pytest.mark.parametrize("arguments", [("--fail-fast",), ("--workers", "2"), ("--include", "*.jpg")])
def test_what_is_for_folders_is_refused_without_one(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(program, ["photos/a.png", "style.png", *arguments])
    assert result.exit_code == 2
    assert f"{arguments[0]} is for folders" in result.stderr


def test_a_second_run_on_the_folder_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Result] = []

    def meanwhile(job: object) -> None:
        if not results:
            results.append(run())

    monkeypatch.setattr("fake_painters.misbehave", meanwhile)
    assert run().exit_code == 0
    assert results[0].exit_code == 2
    assert "Another stylize is at work" in results[0].stderr
    assert len(painted(log)) == 3


def test_the_options_stand_under_a_heading_of_their_own() -> None:
    text = CliRunner().invoke(program, ["--help"]).stdout
    block = text.split("\nFolders:\n")[1].split("\n\n")[0]
    spellings = {option.opts[0] for option in paint.params if option.name in FOLDER_OPTIONS}
    assert len(spellings) == len(FOLDER_OPTIONS)
    assert all(spelling in block for spelling in spellings)
    assert all(isinstance(option, click.Option) for option in paint.params if option.name in FOLDER_OPTIONS)


# ---- what is shown -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_all_pictures_and_the_one_at_work() -> None:
    stream = Terminal()
    with showing_folder(stream) as view:
        assert isinstance(view, FolderBars)
        view.start(3)
        view.show("a.png", ScaleStarted(0, 2, 64, 48, 10))
        view.show("a.png", Evaluated(0, 2, 4, 20, 1.0, 0.5))
        view.show("b.png", Evaluated(0, 2, 9, 20, 1.0, 0.5))
        view.end("a.png", None, 1.0)
        view.end("b.png", "it is cut short", None)
    shown = stream.getvalue()
    assert "2/3 pictures" in shown
    assert "1 failed" in shown
    assert "left" in shown
    assert "failed: b.png: it is cut short" in shown
    assert "a.png scale 1/2 64×48" in shown


def test_a_file_gets_a_line_for_each_picture_and_each_note_once() -> None:
    stream = io.StringIO()
    with showing_folder(stream) as view:
        assert isinstance(view, FolderLines)
        view.start(2)
        for name in ("a.png", "b.png"):
            view.show(name, Notice("the style is animated"))
        view.end("a.png", None, 12.0)
        view.end("b.png", "it is cut short", None)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "note: the style is animated"
    assert lines[1].startswith("1/2 a.png, 12 s, about ")
    assert lines[2] == "2/2 failed: b.png: it is cut short, 1 failed"
    assert len(lines) == 3


# ---- the real command, signals and crashes -------------------------------------------------------------

unix = pytest.mark.skipif(os.name == "nt", reason="signals")


def start(*arguments: str, out: str = "out") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stylize", "photos", "style.png", "--out", out, *TINY, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(out: str = "out") -> list[str]:
    try:
        return Path(out, MARK, "manifest.jsonl").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []


def wait_for_lines(process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 60
    while len(lines_of()) < count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def seeds(count: int) -> None:
    """So many pictures in all."""
    for seed in range(count - 3):
        picture(48, 32, seed).save(f"photos/p{seed:02d}.png")


@unix
@pytest.mark.parametrize("times", [1, 2])
def test_the_first_signal_finishes_what_is_painted_and_the_second_ends(times: int) -> None:
    seeds(30)
    with start(*SHALLOW, "--iterations", "200", "--workers", "1") as process:
        wait_for_lines(process, 1)
        for _ in range(times):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    assert len(read_entries(Path("out"))) == len(pictures()) >= 1
    assert len(report()["left"]) == 30 - len(pictures()) > 0
    assert not list(Path("out").rglob("*.tmp"))


@unix
def test_killed_at_any_moment_and_taken_up_again_it_ends_as_if_never_killed() -> None:
    seeds(12)
    options = (*SHALLOW, "--threads", "1", "--workers")
    with start(*options, "2", out="whole") as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    generator = random.Random(0)
    finished: dict[str, tuple[int, int]] = {}  # inode and time of every output that a killed run has left
    for _ in range(5):
        before = len(lines_of())
        with start(*options, "1") as process:
            wait_for_lines(process, before + 1)
            time.sleep(generator.uniform(0, 0.1))
            process.kill()
        for path in Path("out").rglob("*.png"):
            status = path.stat()
            finished.setdefault(str(path), (status.st_ino, status.st_mtime_ns))
    with start(*options, "2") as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert pictures("out") == pictures("whole")
    assert len(pictures("out")) == 12
    assert not list(Path("out").rglob("*.tmp"))
    for name, was in finished.items():  # what a killed run has finished was not painted again
        status = Path(name).stat()
        assert (status.st_ino, status.st_mtime_ns) == was
    names = Counter(json.loads(line)["name"] for line in lines_of())
    assert set(names.values()) == {1}


def test_the_manifest_says_what_was_painted_how() -> None:
    result = run(*SHALLOW, "--include", "a.png")
    assert result.exit_code == 0, result.output
    (entry,) = read_entries(Path("out")).values()
    record = images.read_record("out/a.png")
    assert entry == Entry(
        name="a.png",
        status="done",
        content="a.png",
        content_sha256=record["content"]["sha256"],
        settings_sha256=entry.settings_sha256,
        output_sha256=entry.output_sha256,
        size=(32, 21),  # 48×32 with a long side of 32 px
        seconds=entry.seconds,
        evaluations=2,
        threads=torch.get_num_threads(),
        losses=record["losses"],
        notices=[],
        version=record["version"],
        finished=entry.finished,
    )
    assert entry.seconds is not None
    assert 0 < entry.seconds < 60
    assert abs(entry.finished - time.time()) < 60
