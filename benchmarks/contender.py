"""Run one program on one pair and note what it had painted when; started by race.py, in a process of its own.

    python benchmarks/contender.py NAME CONTENT STYLE EVALUATIONS OUT.npz STARTED

NAME is stylize, torch-lbfgs or adam (our network and losses, another optimiser), or pastiche. All minimise the
objective of the preset gatys2016 from the content picture. OUT.npz holds the 8-bit pictures of a few
evaluations, the seconds since STARTED (`time.time`) and since the optimisation began, without the time that the
note-taking itself took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

NOTED = (5, 10, 15, 20, 30, 40, 60, 80, 110, 150, 200, 300)

Frame = tuple[int, float, "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]  # evaluation, when, [3, H, W]


def main() -> None:
    name, content, style, evaluations, out, started = sys.argv[1:]
    run = pastiche if name == "pastiche" else ours
    begun = [0.0]
    paused = 0.0
    numbers, since_start, since_begin, pictures = [], [], [], []
    for evaluation, now, picture in run(name, Path(content), Path(style), int(evaluations), begun):
        numbers.append(evaluation)
        since_start.append(now - float(started) - paused)
        since_begin.append(now - begun[0] - paused)
        pictures.append(picture)
        paused += time.time() - now
    np.savez(
        out, evaluation=numbers, whole=since_start, optimisation=since_begin, picture=np.stack(pictures)
    )


def noted(evaluations: int) -> set[int]:
    """The evaluations after which a picture is kept."""
    return {number for number in NOTED if number < evaluations} | {evaluations}


def ours(name: str, content: Path, style: Path, evaluations: int, begun: list[float]) -> Iterator[Frame]:
    """Our engine; a thread, so that its events can be handed on one by one."""
    from queue import Queue
    from threading import Thread

    from stylize.process import prepare

    prepare()  # as the command does
    from stylize import stylize
    from stylize.events import Event, ScaleStarted, Snapshot

    queue: Queue[Frame | None] = Queue(maxsize=1)
    keep = noted(evaluations)

    def listen(event: Event) -> None:
        if isinstance(event, ScaleStarted):
            begun[0] = time.time()
        if isinstance(event, Snapshot) and event.evaluation in keep:
            queue.put((event.evaluation, time.time(), event.picture.numpy()))

    def work() -> None:
        optimizer = "lbfgs" if name == "stylize" else name
        stylize(
            content,
            style,
            config="gatys2016",
            size="full",
            iterations=evaluations,
            optimizer=optimizer,
            on_event=listen,
            snapshot_every=1,
        )
        queue.put(None)

    Thread(target=work).start()
    while (frame := queue.get()) is not None:
        yield frame


def pastiche(name: str, content: Path, style: Path, evaluations: int, begun: list[float]) -> Iterator[Frame]:
    """The peer's own loop, step by step: `draw` evaluates once. Its weights are ours divided by 100."""
    from pastiche.pastiche import VGG_MEAN, PasticheArtist

    with Image.open(style) as image:
        style_size = image.size[::-1]  # or it would be resized to the content's number of pixels
    artist = PasticheArtist(str(content), [str(style)], style_size=style_size)
    means = np.asarray(VGG_MEAN, dtype=np.float64)[:, None, None]
    begun[0] = time.time()
    for step in range(1, evaluations + 1):
        artist.draw()
        if step in noted(evaluations):
            now = time.time()
            levels = artist.pastiche.detach()[0].double().numpy() + means  # as its own save_image does
            yield step, now, levels[::-1].round().clip(0, 255).astype(np.uint8)


if __name__ == "__main__":
    main()
