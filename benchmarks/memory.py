"""Peak memory and time of an evaluation against megapixels: ours under a limit, and pastiche beside it.

    python benchmarks/memory.py [--limit 6GB] [--sides 1024,2048,4000] [--out docs/benchmarks]
    python benchmarks/memory.py --sides 2048:2.6GB,4000:6GB,8000:12GB --programs stylize --name tiled

Each run is a process of its own, watched from outside: its peak is the operating system's figure (ru_maxrss), and
one that goes over the limit is stopped and counts as failed. The pictures are enlarged from assets/, 4:3. Ours runs
whole and in tiles as its own plan says, until its optimiser remembers as much as it is to. Seconds hold on a quiet
machine, ratios between neighbours on any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from PIL import Image

from stylize.process import WAITING

ROOT = Path(__file__).parents[1]
CONTENT, STYLE = ROOT / "assets/content/cincinnati-bridge.jpg", ROOT / "assets/style/night_cafe.webp"
EVALUATIONS = 3  # of the peer
POLL = 0.05  # seconds


@dataclass(frozen=True)
class Measured:
    """One process."""

    program: str
    width: int
    height: int
    limit: float | None
    peak: float  # bytes
    seconds: float | None  # of an evaluation, the median; None when it failed
    planned: float | None  # bytes that our plan said
    plan: str

    @property
    def megapixels(self) -> float:
        """Of the result."""
        return self.width * self.height / 1e6


def main() -> None:
    options = _options()
    if options.child:
        _child(options.child, Path(options.content), options.limit)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for side, limit in _sides(options):
            content = Path(folder) / f"{side}.png"
            with Image.open(CONTENT) as image:
                large = image.convert("RGB").resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
            large.save(content, compress_level=1)
            for program in options.programs.split(","):
                if any(each.program == program and each.seconds is None for each in results):
                    continue  # it failed at a smaller size
                results.append(measure(program, content, limit))
                print(_line(results[-1]), flush=True)
    name = options.out / f"memory-{options.name or options.limit or 'free'}"
    name.with_suffix(".json").write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    _plot(results, name.with_suffix(".png"))


def measure(program: str, content: Path, limit: str | None) -> Measured:
    """Run one program in a process of its own; stop it where it goes over the limit."""
    from stylize.settings import parse_bytes

    most = parse_bytes(limit) if limit else None
    command = [sys.executable, __file__, "--child", program, "--content", str(content)]
    command += ["--limit", limit] if limit else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | WAITING)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if most is not None and _resident(process.pid) > most:
            process.kill()
        time.sleep(POLL)
    said = process.stdout.read() if process.stdout else ""
    report = json.loads(said.splitlines()[-1]) if status == 0 and said.strip() else {}
    with Image.open(content) as image:
        width, height = image.size
    return Measured(
        program,
        width,
        height,
        most,
        usage.ru_maxrss * 1024.0,
        report.get("seconds"),
        report.get("planned"),
        report.get("plan", ""),
    )


def _resident(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _child(program: str, content: Path, limit: str | None) -> None:
    """Paint a little, and say as JSON how long an evaluation takes."""
    stamps: list[float] = []
    report: dict[str, object] = {}
    if program == "pastiche":
        from pastiche.pastiche import PasticheArtist

        artist = PasticheArtist(str(content), [str(STYLE)])
        stamps.append(time.perf_counter())
        for _ in range(EVALUATIONS):
            artist.draw()
            stamps.append(time.perf_counter())
    else:
        from stylize.process import prepare

        prepare()
        from stylize import Settings, stylize
        from stylize.events import Evaluated, Event
        from stylize.nst.memory import plan_memory

        settings = Settings(size="full", scales=1, memory_limit=limit)  # type: ignore[arg-type]
        with Image.open(content) as image:
            plan = plan_memory(image.size, settings)
        settings = settings.replace(iterations=plan.history + 2)
        report = {"planned": plan.total, "plan": str(plan)}

        def listen(event: Event) -> None:
            if isinstance(event, Evaluated):
                stamps.append(time.perf_counter())

        with tempfile.TemporaryDirectory() as folder:
            stylize(content, STYLE, settings=settings, on_event=listen, out=Path(folder) / "result.png")
    gaps = sorted(b - a for a, b in pairwise(stamps))
    print(json.dumps({**report, "seconds": gaps[len(gaps) // 2]}))


def _line(each: Measured) -> str:
    text = f"{each.program:9} {each.megapixels:6.1f} MP  peak {each.peak / 1e9:5.2f} GB"
    if each.planned:
        text += f" (planned {each.planned / 1e9:5.2f})"
    if each.seconds is None:
        return f"{text}  failed"
    speed = f"{each.seconds:7.2f} s an evaluation, {each.seconds / each.megapixels:5.2f} s a megapixel"
    return f"{text}  {speed}  {each.plan}"


def _plot(results: list[Measured], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (memory, speed) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for program in dict.fromkeys(each.program for each in results):
        own = [each for each in results if each.program == program]
        done = [(each.megapixels, each.peak / 1e9, each.seconds / each.megapixels) for each in own if each.seconds]
        sizes, peaks, times = zip(*done, strict=True) if done else ((), (), ())
        (line,) = memory.plot(sizes, peaks, "o-", label=program)
        speed.plot(sizes, times, "o-")
        failed = [(each.megapixels, each.peak / 1e9) for each in own if each.seconds is None]
        for point in failed:
            memory.plot(*point, "x", color=line.get_color())
    limits = sorted({(each.megapixels, each.limit / 1e9) for each in results if each.limit})
    if limits:
        memory.plot(*zip(*limits, strict=True), color="0.6", linestyle=":", label="limit; a cross is a failure")
    memory.set(xlabel="megapixels", ylabel="peak memory, GB")
    speed.set(xlabel="megapixels", ylabel="seconds an evaluation and megapixel")
    for axes in (memory, speed):
        axes.set_ylim(0, 1.08 * axes.dataLim.y1)
        axes.spines[["top", "right"]].set_visible(False)
    memory.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _sides(options: argparse.Namespace) -> list[tuple[int, str | None]]:
    """Long sides and the limit of each."""
    pairs = (each.partition(":") for each in options.sides.split(","))
    return [(int(side), own or options.limit) for side, _, own in pairs]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", help="as 6GB; without it, what is free")
    parser.add_argument("--sides", default="1024,2048,4000", help="long sides in pixels, or side:limit")
    parser.add_argument("--programs", default="stylize,pastiche")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks")
    parser.add_argument("--name", help="of the files; without it, the limit")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--content", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
