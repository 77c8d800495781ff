"""What it costs how torch's threads wait for one another, alone and on a busy machine.

    python benchmarks/waiting.py [--sizes 96 256 512] [--rounds 0 1000 10000 100000 300000] [--busy 0 2]

Prints the median milliseconds of an evaluation by the rounds that a thread spins before it gives its core up (GNU
OpenMP's GOMP_SPINCOUNT; its own default is 300,000), beside so many other programs that want a core each. Every
figure is of a process of its own, since the number is read when torch is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
UNCOUNTED, COUNTED = 8, 12  # evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[96, 256, 512])
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 1000, 10_000, 100_000, 300_000])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # paint at this size, in this process
    arguments = parser.parse_args()
    if arguments.child:
        print(milliseconds(arguments.child))
        return
    print(f"| rounds | programs beside it |{''.join(f' {size} px |' for size in arguments.sizes)}")
    print(f"| ---: | ---: |{' ---: |' * len(arguments.sizes)}")
    for programs in arguments.busy:
        with company(programs):
            for rounds in arguments.rounds:
                taken = [in_a_process(size, rounds) for size in arguments.sizes]
                print(f"| {rounds:,} | {programs} |{''.join(f' {each:.0f} |' for each in taken)}", flush=True)


def in_a_process(size: int, rounds: int) -> float:
    """Milliseconds of an evaluation where threads spin so many rounds."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(rounds)}
    command = [sys.executable, __file__, "--child", str(size)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def milliseconds(size: int) -> float:
    """Of an evaluation, in this process."""
    from stylize.process import prepare

    prepare()  # as the command does
    from stylize import stylize
    from stylize.events import Evaluated, Event

    stamps: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Evaluated):
            stamps.append(event.seconds)

    content, style = ASSETS / "content" / "red_panda.webp", ASSETS / "style" / "starry_night.png"
    stylize(content, style, size=size, scales=1, iterations=UNCOUNTED + COUNTED, on_event=listen)
    return 1000 * statistics.median(after - before for before, after in pairwise(stamps[UNCOUNTED - 1 :]))


@contextlib.contextmanager
def company(programs: int) -> Iterator[None]:
    """So many programs that want a core each."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
