"""Several processes paint one picture: the same one as a single process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stylize.nst.ranks import ALONE, Ranks

ASSETS = Path(__file__).parents[1] / "assets"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # and conftest.py's


@dataclass(frozen=True)
class Piece:
    pixels: int


@given(pieces=st.lists(st.integers(1, 1000).map(Piece), max_size=30), count=st.integers(1, 6))
def test_every_piece_is_dealt_to_exactly_one_and_the_loads_are_alike(pieces: list[Piece], count: int) -> None:
    shares = [Ranks(rank, count).deal(pieces) for rank in range(count)]
    assert sorted(piece.pixels for share in shares for piece in share) == sorted(piece.pixels for piece in pieces)
    loads = [sum(piece.pixels for piece in share) for share in shares]
    # Graham 1969: dealing the largest first, no load exceeds the smallest by more than one piece.
    assert max(loads) - min(loads) <= max((piece.pixels for piece in pieces), default=0)


def test_alone_nothing_is_asked_of_others() -> None:
    tensor = torch.ones(3)
    assert ALONE.is_first
    assert ALONE.add(tensor) is tensor
    assert ALONE.follow(tensor) is tensor
    assert ALONE.follow_number(7) == 7


PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from conftest import picture, random_weights
from test_tiles import hole_guides
from stylize.nst.objective import Objective, Region, measure_style
from stylize.nst.ranks import joined
from stylize.nst.tiles import Geometry, TiledObjective, Tiles, measure_style_by_tiles
from stylize.nst.vgg import Vgg19
from stylize.settings import Settings

settings = Settings()
layers = settings.content_layers + settings.style_layers
network = Vgg19(random_weights(), layers, dtype=torch.float64)
content, image, style = (picture(101, 230, seed).double() for seed in range(3))
with joined("cpu") as ranks:
    geometry = Geometry.of(network, layers)
    tiles = Tiles(network, geometry, geometry.tiles(101, 230, 2, 4), ranks)

    def compare(style, shared_style):
        found = []
        for objective in (
            Objective(network, content, style, settings),
            TiledObjective(content, shared_style, settings, tiles),
        ):
            leaf = image.clone().requires_grad_()
            losses = objective(leaf)
            losses.total.backward()
            found.append((float(losses.total.detach()), leaf.grad))
        (loss, gradient), (shared_loss, shared_gradient) = found
        return abs(loss - shared_loss) / loss, float((gradient - shared_gradient).norm() / gradient.norm())

    plain = measure_style(network, style, settings)
    guides = hole_guides(settings, 101, 230)
    regions = [Region(plain, guides, 0.3), Region(measure_style(network, content, settings), guides, 0.7)]
    whole = compare(plain, measure_style_by_tiles(style, settings, tiles))
    divided = compare(regions, regions)
    own = sum(tile.pixels for tile in tiles)
    everything = ranks.add(torch.tensor(own))
    report = {
        "loss": max(whole[0], divided[0]),
        "gradient": max(whole[1], divided[1]),
        "share": own / float(everything),
        "number": ranks.follow_number(10 + ranks.rank),
    }
    print(json.dumps(report), flush=True)
"""


def test_two_processes_find_the_loss_and_the_gradient_of_one(tmp_path: Path) -> None:
    """In float64 to 1e-10, with regions and without, each with half of the work, and both with the first one's
    number.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    run = subprocess.run(
        [*TORCHRUN, str(program), str(Path(__file__).parent)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in re.findall(r"\{.*?\}", run.stdout)]
    assert len(reports) == 2
    for report in reports:
        assert report["loss"] < 1e-10
        assert report["gradient"] < 1e-10
        assert 0.4 < report["share"] < 0.6
        assert report["number"] == 10


def command(out: Path, *more: str) -> list[str]:
    chosen = ["--size", "512", "--scales", "1", "--precision", "fp32", "--optimizer", "adam"]
    pictures = [str(ASSETS / "content/red_panda.webp"), str(ASSETS / "style/starry_night.png")]
    return ["-m", "stylize", *pictures, "--out", str(out), *chosen, *more]


def test_torchrun_paints_the_picture_of_a_single_process(tmp_path: Path) -> None:
    """Within one grey level in float32; the steps of Adam are the same two of each way."""
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    for start, out in (([sys.executable], one), (TORCHRUN, two)):
        run = subprocess.run(
            [*start, *command(out, "--iterations", "2")], capture_output=True, text=True, env=ENVIRONMENT
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines()[-1] == str(out)
    assert "1×2 tiles" in run.stderr
    first, second = (np.asarray(Image.open(path)).astype(int) for path in (one, two))
    difference = np.abs(first - second)
    assert np.quantile(difference, 0.999) <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_process_that_dies_ends_the_run_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    out, checkpoint = tmp_path / "out.png", tmp_path / "checkpoint"
    chosen = command(out, "--iterations", "500", "--checkpoint", str(checkpoint), "--checkpoint-every", "0.5s")
    pipe = subprocess.PIPE
    run = subprocess.Popen([*TORCHRUN, *chosen], text=True, env=ENVIRONMENT, stdout=pipe, stderr=pipe)
    deadline = time.monotonic() + 120
    while not list(checkpoint.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.2)
    victim = next(pid for pid in workers_of(run.pid) if variable(pid, "RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    _, said = run.communicate(timeout=120)
    assert run.returncode != 0
    assert [path for path in checkpoint.iterdir() if not path.name.startswith(".")]
    assert len([line for line in said.splitlines() if line.startswith("stylize: ")]) == 1


def workers_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(stat[1]) == parent:
            found.append(int(folder.name))
    return found


def variable(pid: int, name: str) -> str:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key.decode() == name:
            return value.decode()
    return ""
