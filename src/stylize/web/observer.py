"""What the page shows of a run, gathered from its events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from PIL import Image

from stylize.events import Evaluated, Event, Notice, ScaleStarted, Snapshot
from stylize.progress import Forecast
from stylize.web.store import small_jpeg

FRAME_S = 1.0  # between two frames
FRAME_SIDE = 640  # px; a frame is looked at for a second


@dataclass(frozen=True)
class View:
    """A run as it stands."""

    frame: bytes = b""  # JPEG, the latest one
    frames: int = 0  # how many there were
    curve: tuple[tuple[int, float], ...] = ()  # evaluation, counted from 1 over all scales, and loss
    starts: tuple[int, ...] = ()  # the evaluation before which each scale began
    size: tuple[int, int] = (0, 0)  # width and height in pixels of the present scale
    scales: int = 0
    evaluations: int = 0  # planned in all, at most
    left_s: float | None = None  # seconds, at most; None while nothing can be said
    notices: tuple[str, ...] = ()


@dataclass
class Observer:
    """A listener; `view` may be called from other threads."""

    budget_s: float | None = None
    _curve: list[tuple[int, float]] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _notices: list[str] = field(default_factory=list)
    _frame: bytes = b""
    _frames: int = 0
    _next_frame: float = 0.0  # in seconds of `time.monotonic`
    _size: tuple[int, int] = (0, 0)
    _scales: int = 0
    _evaluations: int = 0
    _left_s: float | None = None

    def __post_init__(self) -> None:
        """Know the time that the run may take."""
        self._forecast = Forecast(self.budget_s)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case ScaleStarted():
                self._forecast.start(event)
                self._size, self._scales = (event.width, event.height), event.scales
                self._starts.append(len(self._curve))
            case Evaluated():
                self._curve.append((event.evaluation, event.loss))
                self._evaluations = event.evaluations
                self._left_s = self._forecast.left(event)
            case Snapshot() if time.monotonic() >= self._next_frame:
                image = Image.fromarray(event.picture.movedim(0, -1).contiguous().numpy())
                self._frame = small_jpeg(image, FRAME_SIDE)
                self._frames += 1
                self._next_frame = time.monotonic() + FRAME_S
            case Notice():
                self._notices.append(event.text)
            case _:
                pass

    def view(self) -> View:
        """What there is to see."""
        return View(
            frame=self._frame,
            frames=self._frames,
            curve=tuple(self._curve),
            starts=tuple(self._starts),
            size=self._size,
            scales=self._scales,
            evaluations=self._evaluations,
            left_s=self._left_s,
            notices=tuple(self._notices),
        )
