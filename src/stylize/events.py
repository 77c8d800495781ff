"""What happens during a run, as small frozen records that can be sent to another process.

A listener is any callable that takes one event. It is called in the thread that paints. It may raise
KeyboardInterrupt to end the run as Ctrl-C does, with the best picture so far; other errors pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class ScaleStarted:
    """The picture is about to be optimised at one size."""

    scale: int  # counted from 0
    scales: int
    width: int  # pixels
    height: int
    evaluations: int  # planned at this scale, at most
    before: int = 0  # evaluations made at coarser scales


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of the objective and the step that followed it."""

    scale: int
    scales: int
    evaluation: int  # counted from 1, over all scales
    evaluations: int  # planned in all, at most
    seconds: float  # since the run began
    loss: float  # the weighted sum that is minimised
    terms: Mapping[str, float] = field(default_factory=dict)  # unweighted: content, style, tv, range, relu1_1 …
    gradient_norm: float = 0.0  # of the image's gradient, before any clipping
    step_levels: float = 0.0  # RMS of the last step over the optimiser's variables, in grey levels of 255
    clipped: int = 0  # evaluations at this scale, so far, in which the clipping guard fired
    dropped_pairs: int = 0  # curvature pairs that L-BFGS refused at this scale, so far
    restarts: int = 0  # returns to the best point with an empty memory, at this scale, so far


@dataclass(frozen=True)
class Snapshot:
    """The picture as it stands, when snapshots were asked for."""

    evaluation: int
    picture: torch.Tensor  # [3, H, W] uint8 sRGB on the CPU


@dataclass(frozen=True)
class ScaleFinished:
    """One size is done."""

    scale: int
    scales: int
    evaluations: int  # made at this scale
    seconds: float  # spent at this scale
    loss: float
    reason: str  # why the optimiser stopped here: a sentence


@dataclass(frozen=True)
class Notice:
    """Something that the user should know and that does not stop the run."""

    text: str


Event: TypeAlias = "ScaleStarted | Evaluated | Snapshot | ScaleFinished | Notice"
Listener: TypeAlias = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of those who do not listen."""
