"""What a run says in a terminal: a bar where there is one, a few lines where there is none."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, Protocol, TextIO

from tqdm import tqdm

from stylize.events import Evaluated, Event, Listener, Notice, ScaleFinished, ScaleStarted, ignore

BAR = "{desc} {bar} {n_fmt}/{total_fmt}{unit} [{elapsed}{postfix}]"
FIRST_FORECAST_S = 5.0  # a forecast after fewer seconds is mostly the cost of starting


@contextmanager
def showing(
    stream: TextIO | None, *, quiet: bool = False, relative: bool = True, budget_s: float | None = None
) -> Iterator[Listener]:
    """The listener that suits `stream`: a bar in a terminal, lines in a file, nothing when `quiet`.

    Args:
        stream: usually standard error; None where a program has none.
        quiet: say nothing at all.
        relative: the losses are errors relative to the target, shown in per cent.
        budget_s: the seconds that the run may take at most, if there is such a limit.
    """
    if quiet or stream is None:
        yield ignore
    elif stream.isatty():
        listener = TqdmListener(stream, relative=relative, budget_s=budget_s)
        try:
            yield listener
        finally:
            listener.close()
    else:
        yield LineListener(stream, relative=relative, budget_s=budget_s)


class Forecast:
    """The seconds that a run will still take at most, from the evaluations that it has made.

    The first evaluation of a scale does not count: it waits for the measuring of the targets. Nor do those that
    were made before a checkpoint. A finer scale costs as much more as it has more pixels.
    """

    def __init__(self, budget_s: float | None = None) -> None:
        self._budget_s = budget_s
        self._cost: float | None = None  # seconds for one evaluation at this scale; None = not known yet
        self._pixels = 0
        self._planned = 0  # evaluations at this scale
        self._made = 0  # evaluations at all scales so far
        self._before = 0  # of them at the scales before this one
        self._first: tuple[int, float] | None = None  # the first evaluation seen at this scale, and when

    def start(self, event: ScaleStarted) -> None:
        """A scale begins."""
        pixels = event.width * event.height
        if self._cost is not None:
            self._cost *= pixels / self._pixels
        self._pixels, self._planned, self._first = pixels, event.evaluations, None
        self._before = max(self._made, event.before)

    def left(self, event: Evaluated) -> float | None:
        """Seconds left after this evaluation, at most; None while nothing can be said."""
        self._made = event.evaluation
        made_here = self._made - self._before
        if self._first is None:
            self._first = event.evaluation, event.seconds
        else:
            first, first_s = self._first
            self._cost = (event.seconds - first_s) / (event.evaluation - first)
        in_budget = math.inf if self._budget_s is None else max(0.0, self._budget_s - event.seconds)
        if self._cost is None:
            return None
        here = max(0, self._planned - made_here)
        finer = max(0, event.evaluations - self._before - self._planned)
        scales = event.scales - event.scale - 1  # finer ones, each of four times the pixels of the one before
        dearer = sum(4.0**step for step in range(1, scales + 1)) / max(1, scales)
        return min(self._cost * (here + finer * dearer), in_budget)


class TqdmListener:
    """A bar that shows scale, size, evaluations, errors and the time left; notices are written above it."""

    def __init__(self, stream: TextIO, *, relative: bool = True, budget_s: float | None = None) -> None:
        self._stream = stream
        self._relative = relative
        self._budget_s = budget_s
        self._forecast = Forecast(budget_s)
        self._figures: list[str] = []
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Notice():
                tqdm.write(f"note: {event.text}", file=self._stream)
            case ScaleStarted():
                self._forecast.start(event)
                self._open(event.evaluations).set_description_str(_scale(event), refresh=False)
            case Evaluated():
                self._show(event)
            case ScaleFinished() if self._bar is not None and event.scale == event.scales - 1:
                self._bar.total = self._bar.n  # what was planned was a maximum
                self._bar.set_postfix_str(", ".join(self._figures))
            case _:
                pass

    def close(self) -> None:
        """Leave the bar as it stands and go on below it."""
        if self._bar is not None:
            self._bar.close()

    def _open(self, evaluations: int) -> tqdm[NoReturn]:
        if self._bar is None:
            unit = "" if self._budget_s is None else " s"
            self._bar = tqdm(
                total=self._total(evaluations),
                unit=unit,
                file=self._stream,
                bar_format=BAR,
                ncols=None if _columns(self._stream) else 80,  # containers' terminals may have 0 columns
                dynamic_ncols=_columns(self._stream) > 0,
            )
        return self._bar

    def _show(self, event: Evaluated) -> None:
        bar = self._open(event.evaluations)
        total = self._total(event.evaluations)
        position = event.evaluation if self._budget_s is None else min(int(event.seconds), total)
        self._figures = figures(event.terms, self._relative)
        left = self._forecast.left(event)
        rest = [] if left is None else [f"about {duration(left)} left"]
        bar.total = total
        bar.set_postfix_str(", ".join([*self._figures, *rest]), refresh=False)
        bar.update(position - bar.n)

    def _total(self, evaluations: int) -> int:
        """The end of the bar: evaluations, or the seconds of the budget where these are what ends the run."""
        return evaluations if self._budget_s is None else max(1, round(self._budget_s))


class LineListener:
    """One line when the first evaluations tell how long the run will take, and one for every scale."""

    def __init__(self, stream: TextIO, *, relative: bool = True, budget_s: float | None = None) -> None:
        self._stream = stream
        self._relative = relative
        self._forecast = Forecast(budget_s)
        self._forecast_said = False
        self._scale = ""
        self._figures: list[str] = []

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Notice():
                self._say(f"note: {event.text}")
            case ScaleStarted():
                self._forecast.start(event)
                self._scale = _scale(event)
            case Evaluated():
                self._figures = figures(event.terms, self._relative)
                self._say_forecast(event)
            case ScaleFinished():
                plural = "" if event.evaluations == 1 else "s"
                took = f"{event.evaluations} evaluation{plural} in {duration(event.seconds)}"
                self._say(": ".join([self._scale, ", ".join([took, *self._figures])]))
            case _:
                pass

    def _say_forecast(self, event: Evaluated) -> None:
        left = self._forecast.left(event)
        if left is not None and not self._forecast_said and event.seconds >= FIRST_FORECAST_S:
            self._forecast_said = True
            self._say(f"about {duration(left)} left at most, judged by {event.evaluation} evaluations")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class FolderView(Protocol):
    """What a run over a folder says in a terminal or a file."""

    def start(self, total: int) -> None:
        """So many pictures are to be painted."""

    def show(self, name: str, event: Event) -> None:
        """Something happened to the picture of this name; "" is all of them."""

    def end(self, name: str, error: str | None, seconds: float | None) -> None:
        """A picture is done, or has failed for this reason."""


@contextmanager
def showing_folder(stream: TextIO | None, *, quiet: bool = False) -> Iterator[FolderView]:
    """The view that suits `stream`: two bars in a terminal, lines in a file, nothing when `quiet`."""
    if quiet or stream is None:
        yield _Silence()
    elif stream.isatty():
        bars = FolderBars(stream)
        try:
            yield bars
        finally:
            bars.close()
    else:
        yield FolderLines(stream)


class _Silence:
    """Says nothing."""

    def start(self, total: int) -> None:
        """Nothing."""

    def show(self, name: str, event: Event) -> None:
        """Nothing."""

    def end(self, name: str, error: str | None, seconds: float | None) -> None:
        """Nothing."""


class _Count:
    """How many pictures are done and have failed, and how long the rest will take at this pace."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.ended = 0
        self.failed = 0
        self._painted = 0
        self._started = time.monotonic()

    def add(self, error: str | None) -> None:
        """One more."""
        self.ended += 1
        self.failed += error is not None
        self._painted += error is None

    def rest(self) -> list[str]:
        """Failures and the time left, as far as there is something to say."""
        parts = [f"{self.failed} failed"] if self.failed else []
        left = self.total - self.ended
        if self._painted and left:  # a failure takes no time to speak of
            each = (time.monotonic() - self._started) / self._painted
            parts.append(f"about {duration(each * left)} left")
        return parts


class _Notes:
    """Says everything once: what is wrong with a style would be said of each picture."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        """One note."""
        if text not in self._said:
            self._said.add(text)
            tqdm.write(f"note: {text}", file=self._stream)


class FolderBars:
    """A bar for all pictures, and below it one for a picture that is being painted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._note = _Notes(stream)
        self._followed: str | None = None  # of several that are painted at a time, the one whose bar is shown
        self._scale = ""
        self._count = _Count(0)
        self._all: tqdm[NoReturn] | None = None
        self._one: tqdm[NoReturn] | None = None

    def start(self, total: int) -> None:
        """So many pictures are to be painted."""
        self._count = _Count(total)
        self._all, self._one = self._open(total, 0), self._open(0, 1)

    def show(self, name: str, event: Event) -> None:
        """Show one event of one picture."""
        if isinstance(event, Notice):
            self._note(event.text)
        if self._one is None or not name or self._followed not in (None, name):
            return
        self._followed = name
        match event:
            case ScaleStarted():
                self._scale = _scale(event)
            case Evaluated():
                self._one.total = event.evaluations
                self._one.set_description_str(f"{name} {self._scale}".strip(), refresh=False)
                self._one.update(event.evaluation - self._one.n)
            case _:
                pass

    def end(self, name: str, error: str | None, seconds: float | None) -> None:
        """A picture is done, or has failed."""
        if self._followed == name:
            self._followed = None
        self._count.add(error)
        if error is not None:
            tqdm.write(f"failed: {name}: {error}", file=self._stream)
        if self._all is not None:
            self._all.set_postfix_str(", ".join(self._count.rest()), refresh=False)
            self._all.update()

    def close(self) -> None:
        """Leave the bar of all pictures as it stands."""
        for bar in (self._one, self._all):
            if bar is not None:
                bar.close()

    def _open(self, total: int, position: int) -> tqdm[NoReturn]:
        columns = _columns(self._stream)
        return tqdm(
            total=total,
            unit="" if position else " pictures",
            file=self._stream,
            position=position,
            leave=position == 0,
            bar_format=BAR,
            ncols=None if columns else 80,
            dynamic_ncols=columns > 0,
        )


class FolderLines:
    """One line for each picture."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._note = _Notes(stream)
        self._count = _Count(0)

    def start(self, total: int) -> None:
        """So many pictures are to be painted."""
        self._count = _Count(total)

    def show(self, name: str, event: Event) -> None:
        """Say a notice."""
        if isinstance(event, Notice):
            self._note(event.text)

    def end(self, name: str, error: str | None, seconds: float | None) -> None:
        """Say what became of a picture."""
        self._count.add(error)
        place = f"{self._count.ended}/{self._count.total}"
        took = [] if seconds is None else [duration(seconds)]
        what = f"failed: {name}: {error}" if error is not None else ", ".join([name, *took])
        print(", ".join([f"{place} {what}", *self._count.rest()]), file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Seconds in words: `4.2 s`, `36 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def figures(terms: Mapping[str, float], relative: bool = True, suffix: str = "") -> list[str]:
    """The style and content terms that there are, in words: `style 4.1 %`, `content 62 %`."""
    names = [name for name in ("style", "content") if name in terms]
    return [f"{name}{suffix} {_figure(terms[name], relative)}" for name in names]


def _figure(value: float, relative: bool) -> str:
    if not relative:
        return f"{value:.3g}"
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def _columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns
    except (OSError, ValueError):
        return 0


def _scale(event: ScaleStarted) -> str:
    return f"scale {event.scale + 1}/{event.scales} {event.width}×{event.height}"
