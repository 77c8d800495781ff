"""The memory that a picture takes is planned, and the plan is kept."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from PIL import Image

import stylize.nst.transfer as transfer_module
from conftest import picture
from stylize import api
from stylize.errors import InputError, SettingsError
from stylize.events import Event, Notice
from stylize.nst.memory import Plan, features_per_pixel, objective_for, plan_memory
from stylize.settings import Settings, parse_bytes

CPU = torch.device("cpu")
DEFAULT = Settings(precision="fp32")
ASSETS = Path(__file__).parents[1] / "assets"


def planned(width: int, height: int, limit: float, settings: Settings = DEFAULT) -> Plan:
    return plan_memory((width, height), settings, limit=limit, device=CPU)


@given(
    width=st.integers(64, 12_000),
    height=st.integers(64, 12_000),
    limit=st.floats(1e9, 1e11),
    optimizer=st.sampled_from(["lbfgs", "adam", "torch-lbfgs"]),
)
@examples(deadline=None, max_examples=25)
def test_a_plan_keeps_the_limit_or_names_a_size_that_does(
    width: int, height: int, limit: float, optimizer: str
) -> None:
    settings = DEFAULT.replace(optimizer=optimizer)
    try:
        plan = planned(width, height, limit, settings)
    except InputError as error:
        found = re.search(r"--size (\d+)", str(error))
        if found:
            share = int(found[1]) / max(width, height)
            assert share < 1
            planned(max(1, int(width * share)), max(1, int(height * share)), limit, settings)
        else:
            assert limit < 1.2e9
        return
    assert plan.total == sum(plan.parts.values()) <= limit
    assert 1 <= plan.history <= settings.history


def test_more_memory_is_never_slower() -> None:
    """The plans stand in the order of the time that they cost; all in one piece comes first."""
    ranks = [planned(3000, 2000, limit).rank for limit in (3.2e9, 3.5e9, 4e9, 6e9, 20e9)]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[-1] == 0
    plan = planned(3000, 2000, 20e9)
    assert not plan.is_tiled
    assert (plan.history, plan.history_precision) == (DEFAULT.history, "fp32")


def test_pairs_of_sixteen_bits_take_half() -> None:
    wide, narrow = (
        planned(1000, 1000, 1e12, DEFAULT.replace(history_precision=precision)) for precision in ("fp32", "bf16")
    )
    assert narrow.parts["history"] == wide.parts["history"] / 2
    # Ten steps and ten differences of 4/3 · 3 numbers of 4 bytes a pixel.
    assert wide.parts["history"] == 2 * 10 * 4 * 4 * 1e6


def test_history_and_precision_that_are_asked_for_are_not_exceeded() -> None:
    settings = DEFAULT.replace(history_precision="fp32", history=3)
    plan = planned(3000, 2000, 3.4e9, settings)
    assert (plan.history_precision, plan.history <= 3) == ("fp32", True)


def test_a_square_needs_more_than_a_panorama_of_the_same_length() -> None:
    """Case 13: by pixels, not by the long side."""
    assert planned(2000, 2000, 1e12).total > planned(2000, 500, 1e12).total + 1e9


def test_what_cannot_be_had_in_tiles_says_why() -> None:
    for changes, why in (({"style_loss": "swd"}, "sorts"), ({"normalize_gradients": True}, "whole layer")):
        with pytest.raises(InputError, match=rf"--size \d+ or less.*{why}"):
            planned(3000, 2000, 3e9, DEFAULT.replace(**changes))


def test_a_picture_that_cannot_fit_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    source = tmp_path / "large.png"
    Image.new("RGB", (3000, 2400)).save(source)
    with pytest.raises(InputError, match=r"3000×2400 px does not fit into 1\.2 GB.*--size \d+.*--memory-limit"):
        api.stylize(source, source, size=3000, memory_limit="1.2GB")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("6GB", 6 * 10**9), ("1.5 GiB", 3 * 2**29), ("2048MB", 2048 * 10**6), ("8000000000", 8 * 10**9)],
)
def test_sizes_of_memory_are_read_as_they_are_written(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert Settings(memory_limit=text).memory_limit == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "six", "6 XB", "1e9", "12", "500MB", "9" * 400 + "GB"])
def test_what_is_no_size_of_memory_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_bytes(text)


def test_a_limit_changes_the_way_and_not_the_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In tiles, which float32 and a different order of sums alone tell from the picture in one piece."""
    monkeypatch.setattr("stylize.nst.memory._WINDOWS", (40_000,))
    monkeypatch.setattr("stylize.nst.memory.PIECES_SHARE", 0.0)
    monkeypatch.setattr("stylize.nst.memory.PROGRAM_BYTES", {"cpu": 1e9})
    notices: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    content, style = picture(160, 320), picture(96, 96, seed=1)
    settings = DEFAULT.replace(size="full", scales=1, iterations=4, history=3, history_precision="fp32")
    whole = api.stylize(content, style, settings=settings)
    limit = 1e9 + 0.8 * (plan_memory((320, 160), settings, device=CPU).total - 1e9)
    tiled = api.stylize(content, style, settings=settings.replace(memory_limit=int(limit)), on_event=listen)
    assert any("tiles" in notice for notice in notices)
    assert tiled.losses["total"] == pytest.approx(whole.losses["total"], rel=1e-4)
    assert float((tiled.tensor - whole.tensor).abs().max()) < 2 / 255


def test_a_run_that_is_out_of_memory_goes_on_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 11: nothing is lost, and one line says so."""
    monkeypatch.setattr("stylize.nst.memory._WINDOWS", (40_000,))
    monkeypatch.setattr("stylize.nst.memory.PIECES_SHARE", 0.0)
    monkeypatch.setattr("stylize.nst.memory.PROGRAM_BYTES", {"cpu": 0.0})
    real = objective_for
    plans: list[Plan] = []

    def scarce(plan: Plan, *more: object) -> object:
        plans.append(plan)
        objective = real(plan, *more)  # type: ignore[arg-type]
        calls = [0]

        def evaluate(image: torch.Tensor) -> object:
            calls[0] += 1
            if calls[0] == 4 and not plan.is_tiled:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return objective(image)

        return evaluate

    monkeypatch.setattr(transfer_module, "objective_for", scarce)
    notices: list[str] = []
    result = api.stylize(
        picture(160, 320),
        picture(96, 96, seed=1),
        settings=DEFAULT.replace(size="full", scales=1, iterations=8, history=2, history_precision="fp32"),
        on_event=lambda event: notices.append(event.text) if isinstance(event, Notice) else None,
    )
    assert result.outcome == "done"
    assert [plan.is_tiled for plan in plans] == [False, True]
    assert [event.evaluation for event in result.history] == list(range(1, 9))
    assert any("memory" in notice and "goes on" in notice for notice in notices)


def test_when_nothing_smaller_is_left_the_best_picture_is_kept_and_a_size_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = objective_for

    def scarce(plan: Plan, *more: object) -> object:
        objective = real(plan, *more)  # type: ignore[arg-type]
        calls = [0]

        def evaluate(image: torch.Tensor) -> object:
            calls[0] += 1
            if calls[0] == 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return objective(image)

        return evaluate

    monkeypatch.setattr(transfer_module, "objective_for", scarce)
    settings = DEFAULT.replace(scales=1, size="full", iterations=8)
    result = api.stylize(picture(64, 96), picture(64, 64, seed=1), settings=settings)
    assert result.outcome == "failed"
    assert len(result.history) >= 3
    assert "out of memory" in result.reason
    assert result.tensor.isfinite().all()


def test_an_objective_keeps_no_more_than_the_plan_counts() -> None:
    """Features of one evaluation, counted as bytes that autograd saves: within what the plan allows for them."""
    kept, _ = features_per_pixel(DEFAULT)
    plan = planned(512, 512, 1e12)
    assert plan.parts["features"] >= kept * 4 * 512 * 512


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak there")
def test_a_limit_is_kept_by_the_whole_process(tmp_path: Path) -> None:
    """Seen from outside, by the operating system's own mark of high water."""
    limit = 1_300_000_000
    content, style = ASSETS / "content/red_panda.webp", ASSETS / "style/night_cafe.webp"
    assert api.plan(content, Settings(size=900, upscale=True, memory_limit=limit)).is_tiled
    chosen = ["--size", "900", "--upscale", "--scales", "1", "--iterations", "2", "--memory-limit", str(limit)]
    command = [sys.executable, "-m", "stylize", str(content), str(style), *chosen]
    command += ["--out", str(tmp_path / "result.png")]
    peak = 0
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        while run.poll() is None:
            found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{run.pid}/status").read_text(encoding="ascii"))
            peak = 1024 * int(found[1]) if found else peak
            time.sleep(0.05)
    assert run.returncode == 0
    assert 5e8 < peak < limit


def test_a_limit_that_pytorch_alone_exceeds_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"1\.0 GB"):
        Settings(memory_limit=12)


def test_what_is_protected_divides_the_picture_in_two() -> None:
    """Each part has a guide at every layer: with a region, the rest has one, too."""
    content = ASSETS / "content/red_panda.webp"
    parts = [
        api.plan(content, DEFAULT, regions=regions, protect=protect).parts["guides"]
        for regions, protect in ((0, False), (0, True), (1, False), (1, True))
    ]
    assert parts[0] == 0 < parts[1]
    assert parts[2] == parts[3] == 2 * parts[1]
