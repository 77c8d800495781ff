"""What is done stays done: lines that survive a crash, locks, and how a picture is known to be done."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fake_painters import record_of
from stylize import images
from stylize.batch.manifest import (
    Choices,
    Entry,
    Manifest,
    adopted,
    file_hash,
    is_about,
    output_is_whole,
    read_entries,
    sweep,
)
from stylize.batch.plan import MARK, Job
from stylize.errors import OutputError, SaveError
from stylize.settings import Settings

SETTINGS = Settings(size=32)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A content, a style, and an output that is painted."""
    content, style, out = tmp_path / "a.png", tmp_path / "style.png", tmp_path / "out" / "a.png"
    for level, path in enumerate((content, style, out)):
        images.save_picture(torch.full((3, 4, 4), level / 4), path)
    return Job("a.png", "a.png", content, (style,), out, (4, 4))


@pytest.fixture
def choices(job: Job) -> Choices:
    return Choices.of(SETTINGS, job.styles)


def line(job: Job, choices: Choices) -> Entry:
    return Entry(
        name=job.name,
        status="done",
        content=job.origin,
        content_sha256=file_hash(job.content),
        settings_sha256=choices.sha256,
        output_sha256=file_hash(job.out),
        size=(4, 4),
        seconds=1.5,
        losses={"total": 0.25},
        finished=1.0,
    )


def entry(name: str, finished: float = 1.0, **more: str) -> Entry:
    hashes = {"content_sha256": None, "settings_sha256": "0"} | more
    return Entry(name=name, status="done", content=name, finished=finished, **hashes)  # type: ignore[arg-type]


# ---- lines ---------------------------------------------------------------------------------------------


def test_a_line_comes_back_as_it_was(tmp_path: Path, job: Job, choices: Choices) -> None:
    written = replace(line(job, choices), name="2023李 \udce9.png", notices=["a\nb"])
    with Manifest(tmp_path) as manifest:
        manifest.append(written)
    assert read_entries(tmp_path) == {written.name: written}


def test_the_last_line_about_an_output_holds(tmp_path: Path) -> None:
    with Manifest(tmp_path) as manifest:
        for finished in (1.0, 2.0):
            manifest.append(entry("a", finished))
    with Manifest(tmp_path, (1, 2)) as manifest:
        manifest.append(entry("a", 3.0, settings_sha256="new"))
    assert read_entries(tmp_path)["a"].settings_sha256 == "new"


def test_a_line_cut_short_harms_no_other(tmp_path: Path) -> None:
    with Manifest(tmp_path) as manifest:
        manifest.append(entry("a"))
    path = tmp_path / MARK / "manifest.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole + whole[:length])
        with Manifest(tmp_path) as manifest:
            manifest.append(entry("b"))
        assert {"a", "b"} == set(read_entries(tmp_path)), length


@pytest.mark.parametrize("damage", [{"finished": "soon"}, {"size": [1]}, {"size": {}}, {"size": 3}])
def test_a_damaged_line_harms_no_other(tmp_path: Path, damage: dict[str, object]) -> None:
    with Manifest(tmp_path) as manifest:
        manifest.append(entry("a"))
        manifest.append(entry("b"))
    path = tmp_path / MARK / "manifest.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(json.dumps(json.loads(first) | damage | {"name": "c"}) + f"\n{first}\n{second}\n")
    assert set(read_entries(tmp_path)) - {"c"} == {"a", "b"}


def test_lines_of_a_later_version_are_understood(tmp_path: Path) -> None:
    (tmp_path / MARK).mkdir()
    values = {"name": "a", "status": "done", "content": "a", "content_sha256": "1", "settings_sha256": "2"}
    values["unheard-of"] = "3"
    (tmp_path / MARK / "manifest.jsonl").write_text(json.dumps(values) + "\n[]\nnull\n{}\n")
    assert set(read_entries(tmp_path)) == {"a"}


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Manifest(tmp_path) as manifest:
        manifest.append(entry("a"))
        before = (tmp_path / MARK / "manifest.jsonl").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(SaveError, match=r"No space left.*Make room"):
                manifest.append(entry("b"))
        assert (tmp_path / MARK / "manifest.jsonl").read_bytes() == before
        manifest.append(entry("c"))
    assert set(read_entries(tmp_path)) == {"a", "c"}


def test_a_line_is_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    real = os.fsync

    def watched(handle: int) -> None:
        real(handle)
        synced.append((tmp_path / MARK / "manifest.jsonl").read_bytes())

    monkeypatch.setattr(os, "fsync", watched)
    with Manifest(tmp_path) as manifest:
        manifest.append(entry("a"))
    assert len(synced) == 1
    assert synced[0].endswith(b"}\n")


# ---- locks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (None, None, False),
        (None, (1, 2), False),
        ((1, 2), None, False),
        ((1, 2), (1, 2), False),
        ((1, 2), (2, 2), True),
    ],
)
def test_two_runs_do_not_work_on_the_same_pictures(
    tmp_path: Path, first: tuple[int, int] | None, second: tuple[int, int] | None, together: bool
) -> None:
    with Manifest(tmp_path, first):
        if together:
            with Manifest(tmp_path, second):
                pass
        else:
            refused = pytest.raises(OutputError, match=r"Another stylize is at work.*--shard")
            with refused, Manifest(tmp_path, second):
                pass
    with Manifest(tmp_path, second):
        pass


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from stylize.batch.manifest import Manifest\n"
        "with Manifest(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        with pytest.raises(OutputError), Manifest(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with Manifest(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"), Manifest(tmp_path / "file"):
        pass


# ---- done or not ---------------------------------------------------------------------------------------


def test_what_has_not_changed_is_done(job: Job, choices: Choices) -> None:
    assert is_about(line(job, choices), job, choices)
    assert output_is_whole(line(job, choices), job)


def test_a_changed_content_is_not_done(job: Job, choices: Choices) -> None:
    before = line(job, choices)
    job.content.write_bytes(job.content.read_bytes() + b"x")
    assert not is_about(before, job, choices)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_output_is_not_done(job: Job, choices: Choices, damage: str) -> None:
    before = line(job, choices)
    data = job.out.read_bytes()
    status = job.out.stat()
    if damage == "missing":
        job.out.unlink()
    else:
        job.out.write_bytes(data[:-9] if damage == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        os.utime(job.out, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a fault of the disk would
    assert is_about(before, job, choices)
    assert not output_is_whole(before, job)


@pytest.mark.parametrize("change", [{"size": 33}, {"seed": 1}, {"style_weight": 2.0}, {"precision": "fp32"}])
def test_other_settings_are_not_done(job: Job, choices: Choices, change: dict[str, object]) -> None:
    assert not is_about(line(job, choices), job, Choices.of(SETTINGS.replace(**change), job.styles))


def test_the_same_style_under_another_name_is_the_same_style(job: Job, choices: Choices) -> None:
    other = job.styles[0].rename(job.styles[0].with_name("renamed.png"))
    assert Choices.of(SETTINGS, [other]).sha256 == choices.sha256
    other.write_bytes(job.content.read_bytes())
    assert Choices.of(SETTINGS, [other]).sha256 != choices.sha256


def test_a_run_may_be_finished_on_another_device(job: Job, choices: Choices) -> None:
    assert Choices.of(SETTINGS.replace(device="cpu"), job.styles).sha256 == choices.sha256


def test_a_start_from_a_file_counts_by_what_the_file_holds(job: Job) -> None:
    start = SETTINGS.replace(init=str(job.out))
    before = Choices.of(start, job.styles)
    job.out.write_bytes(job.content.read_bytes())
    assert Choices.of(start, job.styles).sha256 != before.sha256


def test_a_failure_holds_until_its_content_changes(job: Job, choices: Choices) -> None:
    failure = replace(line(job, choices), status="failed", output_sha256=None, error="why")
    assert is_about(failure, job, choices)
    job.content.write_bytes(b"mended")
    assert not is_about(failure, job, choices)


# ---- outputs without a line ----------------------------------------------------------------------------


def test_an_output_that_was_written_before_its_line_is_adopted(job: Job, choices: Choices) -> None:
    record = record_of(job, SETTINGS) | {"losses": {"total": 0.5}, "evaluations": 7}
    images.save_picture(torch.zeros(3, 4, 4), job.out, record=record, overwrite=True)
    found = adopted(job, choices)
    assert found is not None
    assert is_about(found, job, choices)
    assert output_is_whole(found, job)
    assert (found.evaluations, found.losses) == (7, {"total": 0.5})


@pytest.mark.parametrize("key", ["settings", "content", "styles", "outcome", "everything"])
def test_an_output_of_another_origin_is_not_adopted(job: Job, choices: Choices, key: str) -> None:
    others = {
        "settings": SETTINGS.replace(seed=1).as_dict(),
        "content": {"sha256": "0" * 64},
        "styles": [],
        "outcome": "interrupted",
    }
    record = {} if key == "everything" else record_of(job, SETTINGS) | {key: others[key]}
    images.save_picture(torch.zeros(3, 4, 4), job.out, record=record, overwrite=True)
    assert adopted(job, choices) is None


def test_an_output_is_adopted_up_to_the_limit_on_pixels(job: Job, choices: Choices) -> None:
    images.save_picture(torch.zeros(3, 4, 4), job.out, record=record_of(job, SETTINGS), overwrite=True)
    assert adopted(job, choices, max_pixels=16) is not None
    assert adopted(job, choices, max_pixels=15) is None


def test_a_word_for_a_start_may_be_a_file_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = []
    for content in (b"one", b"two"):
        (tmp_path / "noise").write_bytes(content)
        known.append([Choices.of(Settings(init="noise"), []), Choices.of(Settings(weights="noise"), [])])
    assert known[0][0] == known[1][0]
    assert known[0][1].sha256 != known[1][1].sha256


def test_an_output_that_is_cut_short_is_not_adopted(job: Job, choices: Choices) -> None:
    noise = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    images.save_picture(noise, job.out, record=record_of(job, SETTINGS), overwrite=True)
    assert adopted(job, choices) is not None
    job.out.write_bytes(job.out.read_bytes()[:-500])
    assert adopted(job, choices) is None


def test_a_file_that_is_no_picture_is_not_adopted(job: Job, choices: Choices) -> None:
    job.out.write_bytes(b"what a crash of another program left")
    assert adopted(job, choices) is None


# ---- temporary files -----------------------------------------------------------------------------------


def interrupted_writing(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left when `save_picture` is killed between writing and renaming."""
    with monkeypatch.context() as patch:
        patch.setattr(images, "_publish", lambda *_, **__: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        images.save_picture(torch.zeros(3, 4, 4), path, overwrite=True)
    (left,) = path.parent.glob(f".{path.name[:40]}.*")
    return left


@pytest.mark.parametrize("name", ["a.png", "b" * 60 + ".png", "2023李 (1).png"])
def test_a_killed_writing_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    left = interrupted_writing(tmp_path / name, monkeypatch)
    sweep([Job(name, name, tmp_path / "x", (), tmp_path / name)], shared=False)
    assert not left.exists()


def test_only_what_was_ours_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    others = [tmp_path / "out" / name for name in (".a.png.tmp", ".a.png.1.tmp", "a.png.1.01234567.tmp", ".c.tmp")]
    others.append(interrupted_writing(tmp_path / "out" / "b.png", monkeypatch))
    for path in others:
        path.touch()
    sweep([job], shared=False)
    assert all(path.exists() for path in [*others, job.out])


def test_a_shard_spares_what_is_being_written(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    left = interrupted_writing(job.out, monkeypatch)
    sweep([job], shared=True)
    assert left.exists()
    yesterday = time.time() - 86_400
    os.utime(left, (yesterday, yesterday))
    sweep([job], shared=True)
    assert not left.exists()
