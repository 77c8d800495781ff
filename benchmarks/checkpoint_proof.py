"""The heavy proof of what docs/checkpoints.md promises: killed at random moments, the run ends in the same bytes.

    python benchmarks/checkpoint_proof.py --size 256 --kills 10

One command runs uninterrupted. The same command with --checkpoint is killed by SIGKILL again and again, each time
a random while after its first own checkpoint, and at last runs to its end.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stylize.checkpoint import NAME, read_state

ASSETS = Path(__file__).parents[1] / "assets"
PICTURES = (ASSETS / "content" / "red_panda.webp", ASSETS / "style" / "starry_night.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="256")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", default="1s", help="between two checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        sys.exit(not prove(Path(name), arguments, more))


def prove(folder: Path, arguments: argparse.Namespace, more: list[str]) -> bool:
    """Run, kill, compare; print what happened."""
    command = [sys.executable, "-m", "stylize", *map(str, PICTURES), "--size", arguments.size, "--quiet", *more]
    began = time.monotonic()
    subprocess.run([*command, "--out", str(folder / "whole.png")], check=True)
    whole_s = time.monotonic() - began
    print(f"uninterrupted: {whole_s:.0f} s", flush=True)
    checkpoint = folder / NAME
    command += ["--out", str(folder / "killed.png"), "--checkpoint", str(folder)]
    command += ["--checkpoint-every", arguments.every]
    moments = random.Random(arguments.seed)
    for kill in range(1, arguments.kills + 1):
        delay = moments.uniform(0, 0.5 * whole_s / arguments.kills)
        if not kill_after(command, checkpoint, delay):
            print(f"It ended before kill {kill}: take a larger --size, or fewer --kills.")
            return False
        print(f"kill {kill}, {delay:.1f} s after its first checkpoint: {described(checkpoint)}", flush=True)
    began = time.monotonic()
    subprocess.run(command, check=True)
    print(f"the rest: {time.monotonic() - began:.0f} s")
    same = (folder / "killed.png").read_bytes() == (folder / "whole.png").read_bytes()
    gone = not checkpoint.exists()
    print("The file is", "the same, byte for byte." if same else "ANOTHER ONE.")
    print("The checkpoint is", "gone." if gone else "STILL THERE.")
    return same and gone


def kill_after(command: list[str], checkpoint: Path, delay: float) -> bool:
    """Start it, and kill it so many seconds after it has written a checkpoint; False if it ended before."""
    before = written(checkpoint)
    process = subprocess.Popen(command)
    while written(checkpoint) == before:
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    time.sleep(delay)
    process.kill()
    return process.wait() < 0 and checkpoint.exists()


def written(checkpoint: Path) -> int | None:
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else None


def described(checkpoint: Path) -> str:
    _, state = read_state(checkpoint)
    made = len(state["history"]) + len((state["under_way"] or {"history": ()})["history"])
    size = checkpoint.stat().st_size / 1e6
    return f"{made} evaluations at scale {state['scale'] + 1} are kept in {size:.1f} MB"


if __name__ == "__main__":
    main()
