"""Race stylize against its peers to a good *saved* picture.

    make bench          or          python benchmarks/race.py [--quick] [--out docs/benchmarks]

For each pair and size, one process after another paints the same pre-sized pictures with the same weights and
the objective of the preset gatys2016 (contender.py): our engine, pastiche 1.6.0, and torch.optim.LBFGS and Adam
on our network. What each had painted after a number of evaluations is clamped to 8 bits, as it would be saved,
and judged in float64 by evaluator.py, which shares no code with any of them. Writes race.json, race.md and a
plot for each size. Ratios hold on a noisy machine, absolute seconds do not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from evaluator import Evaluator, read
from stylize.process import WAITING

ROOT = Path(__file__).parents[1]
PAIRS = {
    "bridge, Night Café": ("content/cincinnati-bridge.jpg", "style/night_cafe.webp"),
    "panda, Starry Night": ("content/red_panda.webp", "style/starry_night.png"),
    "fruit, Sunflower": ("content/citrus-fruits.jpg", "style/sunflower.png"),
    "castle, Café Terrace": ("content/neuschwanstein.webp", "style/cafe_terrace.webp"),
}  # every picture of assets/ once
EVALUATIONS = {256: 200, 384: 300, 768: 30}  # at 768 px a peer's 300 would take a quarter of an hour
QUICK = {96: 30}
CONTENDERS = ("stylize", "pastiche", "torch-lbfgs", "adam")
PEER = "pastiche"


@dataclass(frozen=True)
class Track:
    """What one contender had reached on one pair at one size."""

    contender: str
    pair: str
    size: int
    evaluation: list[int]
    whole: list[float]  # seconds since the process was started
    optimisation: list[float]  # seconds since the first scale began
    loss: list[float]  # of the saved 8-bit picture, float64


def race(pair: str, size: int, evaluations: int, folder: Path, contenders: Sequence[str]) -> list[Track]:
    """Some contenders on one pair at one size, one after the other."""
    content, style = (presized(ROOT / "assets" / path, size, folder) for path in PAIRS[pair])
    evaluator = Evaluator(read(content), read(style))
    tracks = []
    for contender in contenders:
        out = folder / "noted.npz"
        script = Path(__file__).with_name("contender.py")
        command = [sys.executable, script, contender, content, style, evaluations, out, time.time()]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        with np.load(out) as noted:
            losses = [
                evaluator.judge(torch.from_numpy(picture)[None].double() / 255).gatys
                for picture in noted["picture"]
            ]
            times = noted["whole"].tolist(), noted["optimisation"].tolist()
            tracks.append(Track(contender, pair, size, noted["evaluation"].tolist(), *times, losses))
        print(f"{size} px, {pair}: {contender} {losses[-1]:,.0f} after {times[0][-1]:.1f} s", file=sys.stderr)
    return tracks


def presized(path: Path, size: int, folder: Path) -> Path:
    """A PNG with this long side, so that no contender resizes."""
    with Image.open(path) as image:
        flat = image.convert("RGB")
    factor = size / max(flat.size)
    target = folder / f"{path.stem}-{size}.png"
    flat.resize((round(flat.width * factor), round(flat.height * factor)), Image.Resampling.LANCZOS).save(target)
    return target


def reached(track: Track, loss: float, clock: list[float]) -> float:
    """When a track first was at a loss, between its notes log-linearly; infinite if never."""
    for k, found in enumerate(track.loss):
        if found <= loss:
            if k == 0:
                return clock[0]
            before, after = math.log(track.loss[k - 1]), math.log(found)
            share = (before - math.log(loss)) / (before - after) if before > after else 1.0
            return clock[k - 1] + share * (clock[k] - clock[k - 1])
    return math.inf


def loss_at(track: Track, moment: float) -> float:
    """The loss of what a track had painted by a moment of its optimisation."""
    known = [loss for loss, when in zip(track.loss, track.optimisation, strict=True) if when <= moment]
    return known[-1] if known else track.loss[0]


def peer_of(track: Track, tracks: Sequence[Track]) -> Track:
    """What the peer did on the same pair at the same size."""
    return next(t for t in tracks if (t.pair, t.size, t.contender) == (track.pair, track.size, PEER))


def against_peer(track: Track, tracks: Sequence[Track]) -> tuple[float, float, float]:
    """A track's last loss over the peer's on the same pair and size; and how much faster it came to the peer's.

    Times faster are those of the whole process and of the optimisation alone; 0 when it never did.
    """
    peer = peer_of(track, tracks)
    goal = peer.loss[-1]
    whole = peer.whole[-1] / reached(track, goal, track.whole)
    alone = peer.optimisation[-1] / reached(track, goal, track.optimisation)
    return track.loss[-1] / goal, whole, alone


def table(tracks: list[Track]) -> str:
    """The race as a Markdown table; ratios are against the peer on the same pair and size."""
    lines = [
        "| size | pair | program | loss of the saved picture, thousands | over pastiche's | whole process, s | "
        "pastiche's final loss reached in (evaluations) | whole process, times faster | "
        "optimisation alone, times faster |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for track in sorted(tracks, key=lambda track: (track.size, list(PAIRS).index(track.pair))):
        goal = peer_of(track, tracks).loss[-1]
        evaluations = reached(track, goal, [float(e) for e in track.evaluation])
        loss, whole, alone = against_peer(track, tracks)
        cells = [
            str(track.size),
            track.pair,
            track.contender,
            f"{track.loss[-1] / 1e3:,.0f}",
            f"{loss:.2f}",
            f"{track.whole[-1]:.1f}",
            f"{evaluations:.0f}" if math.isfinite(evaluations) else "never",
            f"{whole:.1f}" if whole else "—",
            f"{alone:.1f}" if alone else "—",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(tracks: list[Track], size: int, path: Path) -> None:
    """Loss of the saved picture against seconds and against evaluations, one row for each pair."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = [pair for pair in PAIRS if any((t.pair, t.size) == (pair, size) for t in tracks)]
    figure, axes = pyplot.subplots(len(pairs), 2, figsize=(10, 3.6 * len(pairs)), squeeze=False, sharey="row")
    for row, pair in zip(axes, pairs, strict=True):
        for track in (t for t in tracks if t.pair == pair and t.size == size):
            row[0].plot(track.whole, track.loss, marker=".", label=track.contender)
            row[1].plot(track.evaluation, track.loss, marker=".", label=track.contender)
        for axis, unit in zip(row, ("seconds since the process began", "evaluations"), strict=True):
            axis.set(xscale="log", yscale="log", xlabel=unit, title=f"{pair}, {size} px")
            axis.grid(alpha=0.3, which="both")
        row[0].set_ylabel("loss of the saved picture")
        row[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def kept(path: Path, sizes: Collection[int], pairs: Collection[str]) -> list[Track]:
    """The tracks of an earlier run at other sizes or of other pairs."""
    earlier = [Track(**track) for track in json.loads(path.read_text())] if path.exists() else []
    return [track for track in earlier if track.size not in sizes or track.pair not in pairs]


def medians(tracks: Sequence[Track], size: int) -> str:
    """Over all pairs at one size, what our engine is to the peer."""
    ours = [track for track in tracks if (track.size, track.contender) == (size, CONTENDERS[0])]
    each = zip(*(against_peer(track, tracks) for track in ours), strict=True)
    loss, whole, alone = map(statistics.median, each)
    times = f"{whole:.1f} and {alone:.1f} times faster"
    return f"{size} px, medians of {len(ours)} pairs: {times}, loss {loss:.2f} of {PEER}'s\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--sizes", type=int, nargs="*", help="only these; other sizes in race.json are kept")
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, help="only these; others in race.json are kept")
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS, help=f"some of {', '.join(CONTENDERS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(WAITING)  # every contender's threads, as our command's
    wanted = arguments.sizes or EVALUATIONS
    plan = QUICK if arguments.quick else {size: n for size, n in EVALUATIONS.items() if size in wanted}
    pairs = arguments.pairs or list(PAIRS)
    tracks = kept(arguments.out / "race.json", plan, pairs) if arguments.sizes or arguments.pairs else []
    with tempfile.TemporaryDirectory() as folder:
        for size, evaluations in plan.items():
            for pair in pairs:
                tracks += race(pair, size, evaluations, Path(folder), arguments.contenders)
            plot(tracks, size, arguments.out / f"race-{size}.png")
            # After each size, so that a run cut short leaves what it has.
            told = json.dumps([asdict(track) for track in tracks], indent=1) + "\n"
            (arguments.out / "race.json").write_text(told)
            (arguments.out / "race.md").write_text(table(tracks))
    print(table(tracks))
    print(*(medians(tracks, size) for size in plan), sep="")


if __name__ == "__main__":
    main()
