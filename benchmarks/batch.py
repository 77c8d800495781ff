"""How much sooner a folder is done than a loop of single commands, and where the time goes.

    python benchmarks/batch.py --pictures 20 --size 256 --iterations 40

Both are measured in one run, one after the other, so that the ratio holds on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ASSETS = Path(__file__).parents[1] / "assets"
STYLE = ASSETS / "style" / "starry_night.png"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=20)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contents = make_contents(Path(folder) / "in", arguments.pictures, arguments.size)
        options = ["--size", str(arguments.size), "--iterations", str(arguments.iterations)]
        compare(Path(folder), contents, options)


def make_contents(folder: Path, count: int, size: int) -> list[Path]:
    """Different parts of the project's pictures, all of one size."""
    folder.mkdir()
    sources = sorted((ASSETS / "content").iterdir())
    paths = []
    for index in range(count):
        with Image.open(sources[index % len(sources)]) as image:
            shift = 4 * (index // len(sources))
            part = image.convert("RGB").resize((size + shift, size * 3 // 4 + shift))
            paths.append(folder / f"{index:03d}.png")
            part.crop((shift, shift, size + shift, size * 3 // 4 + shift)).save(paths[-1])
    return paths


def compare(folder: Path, contents: list[Path], options: list[str]) -> None:
    """Time a loop of commands, one command with next to no painting, and the folder."""
    least = [*options[:-1], "1"]
    starting = timed([str(contents[0]), str(STYLE), "--out", str(folder / "least.png"), *least])
    started = time.perf_counter()
    for path in contents:
        timed([str(path), str(STYLE), "--out", str(folder / "loop" / path.name), *options])
    loop = time.perf_counter() - started
    batch = timed([str(folder / "in"), str(STYLE), "--out", str(folder / "batch"), *options])
    report = json.loads((folder / "batch" / "report.json").read_text(encoding="ascii"))
    painting = sum(entry["seconds"] for entry in report["painted"])
    count, workers = len(contents), report["workers"]
    print(f"{count} pictures, {' '.join(options)}")
    print(f"loop of single commands   {loop:7.1f} s = {count} × {loop / count:.2f} s")
    print(f"  of which starting       {starting:7.2f} s each: Python, torch, weights, style, one evaluation")
    print(f"folder                    {batch:7.1f} s = {count} × {batch / count:.2f} s")
    print(f"  workers × threads       {workers} × {report['threads']}")
    print(f"  painting                {painting / count:7.2f} s a picture in a worker")
    print(f"  workers at the network  {100 * painting / workers / batch:7.0f} % of the time")
    print(f"ratio                     {loop / batch:7.2f}")


def timed(arguments: list[str]) -> float:
    """Seconds that one command takes."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "stylize", *arguments, "--quiet"], check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
