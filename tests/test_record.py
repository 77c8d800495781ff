"""The record of a run: true, whole however the run ends, and free when nobody asks for it."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from conftest import picture
from stylize import images
from stylize.api import Stylizer, stylize
from stylize.cli import program
from stylize.errors import OutputError, PictureError, RefusedError
from stylize.events import Evaluated, Event, Notice, ScaleFinished, ScaleStarted, Snapshot, ignore
from stylize.inspect.record import EVERY, TRACE, Recorder, Wiring, check_log_dir, read_trace, wired
from stylize.nst.hooks import count_hooks
from stylize.settings import Settings

pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")

SETTINGS = Settings(size=32, scales=1, iterations=EVERY + 3, precision="fp32", device="cpu")


@pytest.fixture(scope="module")
def stylizer() -> Stylizer:
    return Stylizer(SETTINGS)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def evaluated(evaluation: int, **more: Any) -> Evaluated:
    numbers: dict[str, Any] = {"scale": 0, "scales": 1, "evaluations": 9, "seconds": 0.0, "loss": 1.0} | more
    return Evaluated(evaluation=evaluation, **numbers)


def board_of(folder: Path) -> Any:
    """TensorBoard's own reader of what is in a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    board.Reload()
    return board


# What is written


def test_the_trace_is_the_runs_history(stylizer: Stylizer, log: Path) -> None:
    result = stylizer(picture(32, 32), picture(40, 40, seed=1), log_dir=log)
    trace = read_trace(log)
    assert [line["loss"] for line in trace.evaluations] == [event.loss for event in result.history]
    assert [line["terms"] for line in trace.evaluations] == [dict(event.terms) for event in result.history]
    assert [line["evaluation"] for line in trace.evaluations] == list(range(1, EVERY + 4))
    assert [(line["width"], line["height"]) for line in trace.scales] == [(32, 32)]
    assert trace.run["settings"] == json.loads(json.dumps(SETTINGS.replace(init="content").as_dict()))
    assert [line["evaluation"] for line in trace.snapshots] == [EVERY]


def test_tensorboard_reads_the_same_numbers(stylizer: Stylizer, log: Path) -> None:
    result = stylizer(picture(32, 32), picture(40, 40, seed=1), log_dir=log)
    board = board_of(log)
    for tag, values in (
        ("loss/total", [event.loss for event in result.history]),
        ("gradient/norm", [event.gradient_norm for event in result.history]),
        ("step/grey_levels", [event.step_levels for event in result.history]),
    ):
        assert [scalar.value for scalar in board.Scalars(tag)] == pytest.approx(values, rel=1e-6)
    assert {"picture/levels", "gradient/values"} <= set(board.Tags()["histograms"])
    (drawn,) = board.Images("picture")
    with Image.open(io.BytesIO(drawn.encoded_image_string)) as image:
        assert image.size == (32, 32)


def test_a_recorded_run_paints_the_same_bytes(stylizer: Stylizer, log: Path) -> None:
    pictures = picture(32, 32), picture(40, 40, seed=1)
    plain, recorded = stylizer(*pictures), stylizer(*pictures, log_dir=log)
    assert torch.equal(plain.tensor, recorded.tensor)
    assert plain.losses == recorded.losses


def test_norms_before_and_after_clipping(log: Path) -> None:
    settings = SETTINGS.replace(iterations=5, clip_norm=1e-3)
    stylize(picture(32, 32), picture(40, 40, seed=1), log_dir=log, settings=settings)
    lines = read_trace(log).evaluations
    assert all(line["gradient_norm"] > 1e-3 for line in lines)
    assert [line["gradient_norm_after_clipping"] for line in lines] == pytest.approx([1e-3] * 5, rel=1e-4)


def test_without_clipping_both_norms_are_the_same(stylizer: Stylizer, log: Path) -> None:
    stylizer(picture(32, 32), picture(40, 40, seed=1), log_dir=log)
    for line in read_trace(log).evaluations:
        assert line["gradient_norm_after_clipping"] == line["gradient_norm"]


def test_share_at_bounds_is_that_of_the_picture(log: Path) -> None:
    levels = torch.tensor([0, 255, 128, 1], dtype=torch.uint8).view(1, 2, 2).expand(3, 2, 2)
    with wired(Wiring(ignore, None, ()), log, SETTINGS) as wiring:
        wiring.listen(Snapshot(7, levels))
    assert read_trace(log).snapshots == [{"kind": "Snapshot", "evaluation": 7, "at_bounds": 0.5}]


def test_numbers_that_are_not_finite_are_null(log: Path) -> None:
    with wired(Wiring(ignore, None, ()), log, SETTINGS) as wiring:
        wiring.listen(evaluated(1, loss=math.nan, terms={"tv": math.inf}, gradient_norm=math.nan))
    (line,) = read_trace(log).evaluations
    assert (line["loss"], line["terms"], line["gradient_norm"]) == (None, {"tv": None}, None)


# Who hears what


def test_snapshots_for_the_record_are_not_the_listeners(stylizer: Stylizer, log: Path) -> None:
    events: list[Event] = []
    stylizer(picture(32, 32), picture(40, 40, seed=1), log_dir=log, on_event=events.append)
    assert {type(event) for event in events} == {ScaleStarted, Evaluated, ScaleFinished}


def test_snapshots_come_as_often_as_the_user_says(stylizer: Stylizer, log: Path) -> None:
    events: list[Event] = []
    stylizer(
        picture(32, 32), picture(40, 40, seed=1), log_dir=log, on_event=events.append, snapshot_every=10
    )
    heard = [event.evaluation for event in events if isinstance(event, Snapshot)]
    assert heard == [line["evaluation"] for line in read_trace(log).snapshots] == [10, 20]


def test_users_gradient_hooks_run_as_before(stylizer: Stylizer, log: Path) -> None:
    seen: list[float] = []
    stylizer(
        picture(32, 32),
        picture(40, 40, seed=1),
        log_dir=log,
        gradient_hooks=[lambda gradient: seen.append(float(gradient.norm()))],
    )
    assert seen == pytest.approx([line["gradient_norm"] for line in read_trace(log).evaluations])


def test_nothing_is_wired_when_nothing_is_recorded() -> None:
    wiring = Wiring(ignore, 7, (torch.neg,))
    with wired(wiring, None, SETTINGS) as same:
        assert same is wiring


def test_without_a_record_no_tensorboard_is_imported() -> None:
    code = (
        "import sys, torch; from stylize import stylize\n"
        "stylize(torch.rand(3, 32, 32), torch.rand(3, 32, 32), size=32, iterations=1, device='cpu')\n"
        "assert not {'tensorboard', 'matplotlib', 'torch.utils.tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# However the run ends


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_record_is_whole_after_an_interrupt_or_error(
    stylizer: Stylizer, log: Path, error: type[BaseException]
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Evaluated) and event.evaluation == 5:
            raise error

    if error is KeyboardInterrupt:
        assert stylizer(picture(32, 32), picture(40, 40, 1), log_dir=log, on_event=stop).outcome == "interrupted"
    else:
        with pytest.raises(error):
            stylizer(picture(32, 32), picture(40, 40, 1), log_dir=log, on_event=stop)
    assert len(read_trace(log).evaluations) == 5
    assert len(board_of(log).Scalars("loss/total")) == 5
    assert stylizer._network is not None
    assert count_hooks(stylizer._network) == 0


def test_a_full_disk_ends_the_record_and_not_the_run(
    stylizer: Stylizer, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = Recorder._write, []

    def full(self: Recorder, line: Any) -> None:
        written.append(line)
        if len(written) > 4:
            raise OSError(28, "No space left on device")
        write(self, line)

    monkeypatch.setattr(Recorder, "_write", full)
    events: list[Event] = []
    result = stylizer(picture(32, 32), picture(40, 40, seed=1), log_dir=log, on_event=events.append)
    assert result.outcome == "done"
    assert result.evaluations == EVERY + 3
    (notice,) = [event for event in events if isinstance(event, Notice)]
    assert "No space left on device" in notice.text
    assert notice.text in result.notices
    assert len(written) == 5  # and nothing is tried again


def test_a_trace_that_was_cut_off_is_read_up_to_there(log: Path) -> None:
    with wired(Wiring(ignore, None, ()), log, SETTINGS) as wiring:
        for i in range(1, 4):
            wiring.listen(evaluated(i))
    whole = (log / TRACE).read_text(encoding="utf-8")
    (log / TRACE).write_text(whole[:-10], encoding="utf-8")
    assert [line["evaluation"] for line in read_trace(log / TRACE).evaluations] == [1, 2]


# What is refused


def test_a_folder_with_a_record_is_refused(stylizer: Stylizer, log: Path) -> None:
    check_log_dir(log)
    (log / TRACE).touch()
    with pytest.raises(OutputError, match="record of a run already"):
        stylizer(picture(32, 32), picture(40, 40, seed=1), log_dir=log)


def test_a_run_that_is_refused_leaves_no_record(log: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="nowhere"):
        stylize(
            picture(32, 32), picture(40, 40, seed=1), weights=str(tmp_path / "nowhere.pth"), log_dir=log
        )
    assert list(log.iterdir()) == []


def test_a_record_that_cannot_begin_does_not_stand_in_the_way_of_the_next(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import tensorboard

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tensorboard, "SummaryWriter", full)
        with pytest.raises(OutputError, match="No space left"), wired(Wiring(ignore, 7, ()), log, SETTINGS):
            pass
    with wired(Wiring(ignore, 7, ()), log, SETTINGS):
        pass
    assert read_trace(log).run["kind"] == "run"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be made"):
        check_log_dir(tmp_path / "file" / "log")


def test_without_tensorboard_the_extra_is_named(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stylize.inspect.extra.find_spec", lambda name: None)
    with pytest.raises(RefusedError, match=r"tensorboard.*stylize-nst\[inspect\]"):
        check_log_dir(log)
    assert not log.exists()


@pytest.mark.parametrize("contents", ["", "hello", '{"kind": "Evaluated"}\n', "[1]\n", "\udcff"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, contents: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(contents.encode("utf-8", "surrogateescape"))
    with pytest.raises(PictureError, match=r"notes\.txt"):
        read_trace(path)


# The curves


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(program, [str(each) for each in arguments])


def test_the_command_records_and_plots(tmp_path: Path, log: Path) -> None:
    for name, seed in (("content", 0), ("style", 1)):
        images.save_picture(picture(32, 32, seed), tmp_path / f"{name}.png")
    options = ("--size", "32", "--iterations", "4", "--device", "cpu", "--out", tmp_path / "result.png")
    painted = run(tmp_path / "content.png", tmp_path / "style.png", *options, "--log-dir", log)
    assert painted.exit_code == 0
    plotted = run("plot", log)
    assert (plotted.exit_code, plotted.stdout, plotted.stderr) == (0, f"{log / 'trace.png'}\n", "")
    with Image.open(log / "trace.png") as image:
        image.load()
    assert run("plot", log).exit_code == 2  # it exists
    assert run("plot", log / TRACE, "--out", tmp_path / "other.png").exit_code == 0
    refused = run("plot", log, "--out", tmp_path / "curves.jpg")
    assert refused.exit_code == 2
    assert ".png" in refused.stderr


def test_a_run_without_a_single_finite_number_can_be_drawn(log: Path) -> None:
    with wired(Wiring(ignore, None, ()), log, SETTINGS) as wiring:
        wiring.listen(ScaleStarted(0, 1, 32, 32, 9))
        wiring.listen(evaluated(1, loss=math.nan, terms={"tv": math.nan}))
    plotted = run("plot", log)
    assert plotted.exit_code == 0
    assert "The loss was not finite in 1 of 1 evaluations." in plotted.stderr


@pytest.mark.parametrize("line", [{}, {"evaluation": "x", "loss": "y", "terms": [], "scale": 0, "clipped": 0}])
def test_a_trace_with_damaged_lines_is_refused_by_name(tmp_path: Path, line: dict[str, object]) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in ({"kind": "run"}, {"kind": "Evaluated"} | line)))
    result = run("plot", path)
    assert (result.exit_code, "odd.jsonl" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == [path]


def test_clippings_are_added_up_over_the_scales(log: Path) -> None:
    counts = [(0, 1), (0, 2), (1, 0), (1, 1)]  # each scale begins anew
    with wired(Wiring(ignore, None, ()), log, SETTINGS) as wiring:
        for i, (scale, clipped) in enumerate(counts, start=1):
            wiring.listen(evaluated(i, scale=scale, clipped=clipped))
    assert "clipped in 3 of 4 evaluations (75 %)" in run("plot", log).stderr


def test_a_full_disk_is_said_when_plotting(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wired(Wiring(ignore, None, ()), log, SETTINGS) as wiring:
        wiring.listen(evaluated(1))

    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = set(log.iterdir())
    result = run("plot", log)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert set(log.iterdir()) == before
