"""The heavy proofs of what docs/cluster.md promises; each prints its verdict.

    python benchmarks/batch_proof.py failures kills memory ray
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TINY = ("--size", "96", "--iterations", "3", "--style-layers", "relu1_1,relu2_1", "--content-layers", "relu2_2")


def main() -> None:
    """Run the proofs that are named; exit with 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("proofs", nargs="+", choices=PROOFS)
    failed = False
    for name in parser.parse_args().proofs:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            failed = not PROOFS[name]() or failed
            os.chdir("/")
    sys.exit(failed)


def verdict(name: str, claims: Mapping[str, bool], figures: str) -> bool:
    """Print what holds and what does not."""
    for claim, holds in claims.items():
        print(f"{name}: {'holds' if holds else 'FAILS'}: {claim}")
    print(f"{name}: {figures}", flush=True)
    return all(claims.values())


# ---- pictures ------------------------------------------------------------------------------------------


def make_pictures(count: int, side: int = 96) -> None:
    """A folder of different pictures, some in subfolders, and a style."""
    for index in range(count):
        folder = f"sub{index % 3}" if index % 4 == 0 else "."
        path = Path("in", folder, f"p{index:03d}.{'jpg' if index % 2 else 'png'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(side, side * 3 // 4, index).save(path)
    picture(side, side, 10_000).save("style.png")


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Coloured blocks, softly joined."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)


def make_bad_pictures() -> set[str]:
    """Twelve files that cannot be painted, each for a reason of its own; their names."""
    kinds = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "tif": "TIFF", "gif": "GIF", "bmp": "BMP"}
    for suffix, kind in kinds.items():  # cut short
        picture(96, 72, 1).save(f"in/cut_{suffix}.{suffix}", kind)
        data = Path(f"in/cut_{suffix}.{suffix}").read_bytes()
        Path(f"in/cut_{suffix}.{suffix}").write_bytes(data[: len(data) // 2])
    Path("in/empty.jpg").touch()
    Path("in/text.png").write_text("a shopping list")
    Path("in/page.jpg").write_text("<!doctype html><title>404</title>")
    Path("in/zeros.jpg").write_bytes(bytes(4096))
    picture(5000, 2, 2).save("in/narrow.png")
    picture(96, 72, 3).save("in/bomb.png")
    bomb = bytearray(Path("in/bomb.png").read_bytes())
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2  # width and height in the header, whose checksum follows
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    Path("in/bomb.png").write_bytes(bomb)
    bad = {path.stem for path in Path("in").iterdir() if path.is_file() and not path.stem.startswith("p0")}
    return {name for name in bad if not name[1:].isdecimal()}


def command(*arguments: str, out: str = "out") -> list[str]:
    """One run over the folder."""
    return [sys.executable, "-m", "stylize", "in", "style.png", "--out", out, *TINY, *arguments]


def run(*arguments: str, out: str = "out") -> tuple[subprocess.CompletedProcess[str], float]:
    """A whole run, and its seconds."""
    started = time.perf_counter()
    done = subprocess.run(command(*arguments, out=out), capture_output=True, text=True)
    return done, time.perf_counter() - started


def lines(out: str = "out") -> list[dict[str, Any]]:
    """What the manifest says."""
    path = Path(out, ".stylize", "manifest.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outputs(out: str = "out") -> dict[str, bytes]:
    """All results."""
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in Path(out).rglob("*.png")}


# ---- proofs --------------------------------------------------------------------------------------------


def failures() -> bool:
    """A folder of 200 with 12 bad ones; then the same command again."""
    make_pictures(188)
    bad = make_bad_pictures()
    first, seconds = run()
    said = [line for line in first.stderr.splitlines() if line.startswith("stylize: failed: ")]
    report = json.loads(Path("out/report.json").read_text())
    before = len(lines())
    second, again = run()
    repeated = json.loads(Path("out/report.json").read_text())
    claims = {
        "188 are done": len(report["painted"]) == len(outputs()) == 188,
        "12 are named with reasons": {Path(each["content"]).stem for each in report["failed"]} == bad
        and len(bad) == len(said) == 12
        and all(each["error"] for each in report["failed"]),
        "exit code 3, both times": (first.returncode, second.returncode) == (3, 3),
        "nothing is computed again": not repeated["painted"] and len(lines()) == before,
        "the second run works for less than 3 s": repeated["seconds"] < 3,
    }
    for line in said:
        print(line[:150])
    return verdict(
        "failures", claims, f"{seconds:.1f} s; again {again:.1f} s, of which work {repeated['seconds']:.2f} s"
    )


def kills() -> bool:
    """Twenty-five SIGKILLs at random moments."""
    make_pictures(120)
    options = ("--threads", "1", "--workers", "2")
    whole, _ = run(*options, out="whole")
    generator = random.Random(4)
    kept: dict[str, tuple[int, int]] = {}
    for _ in range(25):
        before = len(lines())
        with subprocess.Popen(command(*options), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            if generator.random() < 0.8:  # else anywhere in the first seconds, starting included
                while len(lines()) == before and process.poll() is None:
                    time.sleep(0.01)
            time.sleep(generator.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        for path in Path("out").rglob("*.png"):
            kept.setdefault(str(path), (path.stat().st_ino, path.stat().st_mtime_ns))
    reached = len(kept)
    last, _ = run(*options)
    claims = {
        "the last run ends well": (whole.returncode, last.returncode) == (0, 0),
        "every output equals an uninterrupted run's, byte for byte": outputs() == outputs("whole"),
        "no temporary file is left": not list(Path("out").rglob("*.tmp")),
        "nothing done was done again": set(Counter(each["name"] for each in lines()).values()) == {1}
        and all((Path(p).stat().st_ino, Path(p).stat().st_mtime_ns) == was for p, was in kept.items()),
    }
    return verdict("kills", claims, f"{len(outputs())} outputs, of which 25 killed runs had made {reached}")


def memory() -> bool:
    """The memory of driver and worker after picture 5 and after picture 200."""
    from stylize import stylize_folder
    from stylize.batch.report import BatchEvent, PictureEnded

    make_pictures(205)
    used: list[tuple[int, int]] = []

    def listen(event: BatchEvent) -> None:
        if isinstance(event, PictureEnded):
            used.append((resident(os.getpid()), sum(resident(child) for child in children(os.getpid()))))

    stylize_folder(
        *("in", "style.png", "out"),
        size=96,
        iterations=3,
        workers=1,
        threads=1,
        on_event=listen,
    )
    claims = {
        f"the {who} is within 3 %": abs(used[199][index] / used[4][index] - 1) < 0.03
        for index, who in enumerate(("driver", "worker"))
    }
    rows = [f"after {count}: {used[count - 1][0]:.0f} + {used[count - 1][1]:.0f} MB" for count in (5, 50, 100, 200)]
    return verdict("memory", claims, "; ".join(rows))


def resident(pid: int) -> int:
    """Megabytes of memory of a process, on Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


def children(parent: int) -> set[int]:
    """The processes that a process has started, on Linux."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return {int(number) for path in tasks for number in path.read_text().split()}


def ray() -> bool:
    """Two machines, of which one leaves, and a worker that is killed."""
    import ray as library
    from ray.cluster_utils import Cluster

    from stylize import stylize_folder
    from stylize.batch.report import BatchEvent, PictureEnded

    make_pictures(24)
    choices: dict[str, Any] = {"size": 96, "iterations": 3, "threads": 1}
    inline = stylize_folder("in", "style.png", "whole", workers=1, **choices)
    head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    library.init(address=cluster.address, log_to_driver=False)
    ended = 0

    def listen(event: BatchEvent) -> None:
        nonlocal ended
        if isinstance(event, PictureEnded):
            ended += 1
            if ended == 4:
                cluster.remove_node(second, allow_graceful=False)
            if ended == 10:
                for pid in actors():
                    os.kill(pid, signal.SIGKILL)

    report = stylize_folder("in", "style.png", "out", engine="ray", on_event=listen, **choices)
    library.shutdown()
    cluster.shutdown()
    claims = {
        "all pictures are done": (len(report.painted), report.outcome, inline.outcome) == (24, "done", "done"),
        "they equal those of this machine's own processes": outputs() == outputs("whole"),
    }
    return verdict("ray", claims, f"{report.seconds:.1f} s")


def actors() -> list[int]:
    """The processes of Ray's actors, which carry their class as their title."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::_Actor"):
            found.append(int(path.parent.name))
    return found


PROOFS: Mapping[str, Callable[[], bool]] = {"failures": failures, "kills": kills, "memory": memory, "ray": ray}

if __name__ == "__main__":
    main()
