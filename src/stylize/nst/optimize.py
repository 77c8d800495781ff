"""One picture at one size: the loop around the optimiser.

The loop owns the budget, the best picture and the check for values that are not finite; the optimisers own
nothing but their steps. Whatever happens, the best finite picture that was seen comes back, with the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from stylize.errors import RunError
from stylize.events import Evaluated, Listener, Snapshot, ignore
from stylize.nst.hooks import GradientHook, guard_gradient
from stylize.nst.lbfgs import Lbfgs
from stylize.nst.objective import Losses
from stylize.nst.pyramid import Pyramid
from stylize.nst.ranks import ALONE, Ranks
from stylize.nst.state import check_like, check_numbers
from stylize.settings import Settings

# docs/benchmarks.md has the measurements behind these four.
PYRAMID_LEVELS = 8
PYRAMID_GAIN = 0.7
FIRST_STEP_LEVELS = 4.0  # grey levels of 255, RMS of the coefficients
ADAM_STEP_LEVELS = 4.0

WINDOW = 10  # evaluations over which a decrease is judged
INTERRUPTED = "Interrupted."
OUT_OF_MEMORY = "The device ran out of memory."
MAX_RESTARTS = 8  # returns to the best point, after which a run is given up

Outcome = Literal["done", "interrupted", "failed"]
State: TypeAlias = dict[str, Any]  # numbers, texts, None and tensors, in dicts with texts as keys and in lists


class Keeper(Protocol):
    """What keeps the state of a run somewhere, so that it can go on from there."""

    def __call__(self, make: Callable[[], State], *, now: bool = False) -> None:
        """Take the state that `make` gives, if it is time, or now; its tensors change after the call."""


def keep_nothing(make: Callable[[], State], *, now: bool = False) -> None:
    """The keeper of those who never go on."""


@dataclass(frozen=True)
class StopRule:
    """When one size is finished."""

    evaluations: int  # at most
    min_decrease: float = 0.0  # share of the loss that one evaluation must still gain, over the last window
    deadline: float | None = None  # in seconds of `time.perf_counter`
    ranks: Ranks = ALONE  # the first of which has the clock

    def reason(self, losses: Sequence[float]) -> str | None:
        """Why to stop after these losses, one for each evaluation; None to go on."""
        if len(losses) >= self.evaluations:
            return f"The {self.evaluations} planned evaluations were made."
        if self.deadline is not None and self.ranks.follow_number(time.perf_counter() >= self.deadline):
            return "The time is up."
        if self.min_decrease > 0 and len(losses) > 2 * WINDOW:
            before, now = min(losses[:-WINDOW]), min(losses)
            if before - now < self.min_decrease * WINDOW * abs(now):
                return f"An evaluation gained less than {self.min_decrease:.2%} of the loss."
        return None


@dataclass(frozen=True)
class Optimized:
    """What came out of one size."""

    image: Tensor  # [1, 3, H, W] float32 in [0, 1], on the device
    losses: dict[str, float]  # of exactly this picture: total and every term; before clamping if not "done"
    history: tuple[Evaluated, ...]
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Progress:
    """Where in the whole run one size stands; it goes into the events."""

    scale: int = 0
    scales: int = 1
    made: int = 0  # evaluations before this size
    planned: int = 0  # evaluations of all sizes, at most
    started: float = 0.0  # `time.perf_counter` when the run began


def optimize(
    objective: Callable[[Tensor], Losses],
    start: Tensor,
    settings: Settings,
    stop: StopRule,
    *,
    progress: Progress | None = None,
    listen: Listener = ignore,
    snapshot_every: int | None = None,
    gradient_hooks: Sequence[GradientHook] = (),
    free: Tensor | None = None,
    keep: Keeper = keep_nothing,
    resume: Mapping[str, Any] | None = None,
) -> Optimized:
    """Minimise the objective over pictures, from `start` [1, 3, H, W] in [0, 1].

    Where `free` [1, 1, H, W] is 0, the start stays as it is; it is how far each place may move, 1 when left out.

    KeyboardInterrupt, lack of memory and lasting non-finite losses end the loop; the best picture comes back.
    `keep` is offered the state after every evaluation, and must take it at an interruption; `resume` is such a
    state, from which the run goes on as if it had never ended.

    Raises:
        RunError: when it ended before a single evaluation was finite.
        HookError: when one of `gradient_hooks` broke its contract.
    """
    search = Search(objective, start, settings, gradient_hooks, free)
    progress = progress or Progress(planned=stop.evaluations, started=time.perf_counter())
    history: list[Evaluated] = []
    if resume is not None:
        search.load_state_dict(resume["search"])
        history = [Evaluated(**event) for event in resume["history"]]
    losses = [_comparable(event.loss) for event in history]

    def state() -> State:
        return {"search": search.state_dict(), "history": [asdict(event) for event in history]}

    outcome: Outcome = "done"
    reason: str | None = None
    try:
        if history:
            outcome, reason = _verdict(stop, losses, search.restarts)
        while reason is None:
            event = replace(
                search.step(),
                scale=progress.scale,
                scales=progress.scales,
                evaluation=progress.made + len(losses) + 1,
                evaluations=progress.planned,
                seconds=time.perf_counter() - progress.started,
            )
            history.append(event)
            losses.append(_comparable(event.loss))
            listen(event)
            if snapshot_every and event.evaluation % snapshot_every == 0 and search.best is not None:
                listen(Snapshot(event.evaluation, _as_bytes(search.best)))
            keep(state)
            outcome, reason = _verdict(stop, losses, search.restarts)
        return Optimized(*search.result(), tuple(history), outcome, reason)
    except KeyboardInterrupt:
        outcome, reason = "interrupted", INTERRUPTED
        if search.best is None:
            raise
        if search.settled and search.evaluations == len(history):  # else it came in the middle of a step
            keep(state, now=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        outcome, reason = "failed", OUT_OF_MEMORY
        if search.best is None:
            height, width = start.shape[2:]
            raise lack_of_memory(start.device, width, height) from error
    return Optimized(search.best, search.best_losses, tuple(history), outcome, reason)


def check_history(history: Any) -> None:
    """Find out whether this is a list of what `asdict` makes of events.

    Raises:
        ValueError: when it is not.
    """
    check_like(history, [], "history")
    like = asdict(Evaluated(0, 1, 1, 1, 0.0, 0.0)) | {"terms": None}
    for event in history:
        check_like(event, like, "history")
        check_numbers(event["terms"], "history")


def _comparable(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _verdict(stop: StopRule, losses: Sequence[float], restarts: int) -> tuple[Outcome, str | None]:
    """How a size ends after these losses, and why; without a reason it goes on."""
    if restarts > MAX_RESTARTS:
        return "failed", f"The loss was not finite {restarts} times."
    return "done", stop.reason(losses)


def is_out_of_memory(error: BaseException) -> bool:
    """Is this how torch says that a device, or the machine, has no memory left?"""
    # The CPU and MPS have sentences, a different one for each system, and no exception of their own.
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or ("DefaultCPUAllocator" in text and "memory" in text)
    )


def lack_of_memory(device: torch.device, width: int, height: int) -> RunError:
    """The error of a run that found no memory for even one evaluation."""
    return RunError(
        f"Out of memory on {device} at {width}×{height} px, before the first evaluation was done. "
        "Use a smaller --size, or --precision bf16 where it is offered."
    )


class Search:
    """The variables, their optimiser, and what has been found so far."""

    def __init__(
        self,
        objective: Callable[[Tensor], Losses],
        start: Tensor,
        settings: Settings,
        gradient_hooks: Sequence[GradientHook] = (),
        free: Tensor | None = None,
    ) -> None:
        height, width = start.shape[2:]
        levels = PYRAMID_LEVELS if settings.optimizer == "lbfgs" else 1
        self.pyramid = Pyramid(height, width, levels=levels, gain=PYRAMID_GAIN)
        self.objective = objective
        self.start = start
        self.settings = settings
        self.gradient_hooks = gradient_hooks
        self.free = free
        self.coefficients = torch.zeros(self.pyramid.length, device=start.device, requires_grad=True)
        self.optimizer = self._make_optimizer(1.0)
        self.best: Tensor | None = None  # in [0, 1]
        self.best_losses: dict[str, float] = {}
        self.evaluations = 0
        self.settled = True  # is all of this as it is between two steps?
        self._best_loss = math.inf
        self._restarts = 0
        self._clipped = 0
        self._image: Tensor | None = None  # the picture last evaluated, and its numbers
        self._names: list[str] = []
        self._numbers = torch.zeros(0)

    @property
    def restarts(self) -> int:
        """Returns to the best point after losses that were not finite."""
        return self._restarts + (self.optimizer.counters.restarts if isinstance(self.optimizer, Lbfgs) else 0)

    def step(self) -> Evaluated:
        """Evaluate once and move once."""
        optimizer = self.optimizer
        if isinstance(optimizer, Lbfgs):
            optimizer.step(self._evaluate, trusted=lambda numbers: not numbers[-1])
            numbers = optimizer.fetched
        else:
            optimizer.step(lambda: self._evaluate()[0])  # type: ignore[arg-type, return-value]  # torch's stub
            numbers = self._numbers.tolist()
        self.evaluations += 1
        *values, gradient_norm, fired = numbers
        losses = dict(zip(self._names, values, strict=True))
        self._clipped += fired > 0
        if math.isfinite(losses["total"]):
            self._remember(losses)
        elif not isinstance(optimizer, Lbfgs):
            self._restart()
        own = optimizer if isinstance(optimizer, Lbfgs) else None
        self.settled = True
        return Evaluated(
            scale=0,
            scales=1,
            evaluation=self.evaluations,
            evaluations=0,
            seconds=0.0,
            loss=losses.pop("total"),
            terms=losses,
            gradient_norm=gradient_norm,
            step_levels=255 * own.step_rms if own else 0.0,
            clipped=self._clipped,
            dropped_pairs=own.counters.dropped_pairs if own else 0,
            restarts=self.restarts,
        )

    def state_dict(self) -> State:
        """Everything that a search over the same objective needs to go on; the tensors are not copies."""
        optimizer = self.optimizer.state_dict()
        return {
            "start": self.start,
            "coefficients": self.coefficients.detach(),
            # Of torch's optimisers, what they know of their one parameter; the rest is made from the settings.
            "optimizer": optimizer if isinstance(self.optimizer, Lbfgs) else optimizer["state"].get(0),
            "best": self.best,
            "best_losses": dict(self.best_losses),
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def check_state_dict(self, state: Any) -> None:
        """Find out whether `load_state_dict` can take this; the start may be on the device "meta".

        Raises:
            ValueError: when it cannot. (Of what is inside torch's own optimisers, torch alone can tell.)
        """
        unknown = dict.fromkeys(("optimizer", "best", "best_losses"))
        check_like(state, self.state_dict() | unknown, "search")
        check_numbers(state["best_losses"], "best_losses")
        if state["best"] is not None:
            check_like(state["best"], self.start, "best")
        if isinstance(self.optimizer, Lbfgs):
            self.optimizer.check_state_dict(state["optimizer"])
        elif state["optimizer"] is not None and not isinstance(state["optimizer"], dict):
            raise ValueError("its optimizer is of another kind")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a search with the same settings at the same size.

        Raises:
            ValueError: when the optimiser's state is of another kind or size.
        """
        for name in _NUMBERS:
            setattr(self, name, state[name])
        self.start = state["start"].to(self.coefficients.device, copy=True)
        self.coefficients.copy_(state["coefficients"])
        self.best = None if state["best"] is None else state["best"].to(self.coefficients.device, copy=True)
        self.best_losses = dict(state["best_losses"])
        self.optimizer = self._make_optimizer(0.5**self._restarts)
        if isinstance(self.optimizer, Lbfgs):
            self.optimizer.load_state_dict(state["optimizer"])
        elif state["optimizer"] is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": {0: deepcopy(state["optimizer"])}, "param_groups": groups})

    @torch.no_grad()
    def result(self) -> tuple[Tensor, dict[str, float]]:
        """The best picture, and what it costs as it will be saved: within [0, 1]."""
        if self.best is None:
            raise RunError(
                "No evaluation gave a finite loss. Lower the weights, or use --precision fp32 if it was bf16."
            )
        losses = self.objective(self.best)
        values = torch.stack([losses.total, *losses.terms.values()]).tolist()
        measured = dict(zip(["total", *losses.terms], values, strict=True))
        return self.best, measured if math.isfinite(measured["total"]) else self.best_losses

    def _evaluate(self) -> Tensor:
        """Losses and gradient at the present point: total, terms, the gradient's norm, did the guard fire?"""
        self.coefficients.grad = self._image = None  # their memory is wanted for the next ones
        image = self._picture()
        with guard_gradient(
            image,
            clip_norm=self.settings.clip_norm,
            clip_value=self.settings.clip_value,
            hooks=self.gradient_hooks,
        ) as report:
            losses = self.objective(image)
            losses.total.backward()
        self._image = image.detach()
        self._names = ["total", *losses.terms]
        values = [losses.total, *losses.terms.values(), report.norm, report.fired]
        self._numbers = torch.stack([value.detach().to(losses.total.dtype) for value in values])
        self.settled = False  # from here on the optimiser works on its variables
        return self._numbers

    def _picture(self) -> Tensor:
        """[1, 3, H, W], a function of the coefficients."""
        moved = self.pyramid.synthesize(self.coefficients)
        return self.start + (moved if self.free is None else self.free * moved)

    def _remember(self, losses: dict[str, float]) -> None:
        """Keep the evaluated picture if it is the best; nothing else is done with it from here on."""
        if losses["total"] < self._best_loss and self._image is not None:
            self._best_loss = losses["total"]
            self.best = self._image.clamp_(0, 1)
            self.best_losses = dict(losses)

    def _restart(self) -> None:
        """What Lbfgs does by itself, for the others: back to the best point, afresh, with half the step."""
        self._restarts += 1
        with torch.no_grad():
            self.coefficients.zero_()
        self.start = self.start if self.best is None else self.best
        self.optimizer = self._make_optimizer(0.5**self._restarts)

    def _make_optimizer(self, shorten: float) -> Lbfgs | torch.optim.Optimizer:
        settings = self.settings
        if settings.optimizer == "adam":
            step = (settings.step_levels or ADAM_STEP_LEVELS) / 255
            return torch.optim.Adam([self.coefficients], lr=step * shorten)
        if settings.optimizer == "torch-lbfgs":
            return torch.optim.LBFGS(
                [self.coefficients],
                lr=shorten,
                max_iter=1,
                history_size=settings.history,
                tolerance_grad=0,
                tolerance_change=0,
            )
        return Lbfgs(
            [self.coefficients],
            first_step=(settings.step_levels or FIRST_STEP_LEVELS) / 255 * shorten,
            history=settings.history,
            history_dtype=_HISTORY_DTYPES[settings.history_precision],
        )


# What `Search.state_dict` holds besides tensors.
_NUMBERS = ("evaluations", "_best_loss", "_restarts", "_clipped")
# "auto" is what a plan of the memory may choose; without one it is the picture's own precision.
_HISTORY_DTYPES: Mapping[str, torch.dtype | None] = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def _as_bytes(image: Tensor) -> Tensor:
    """[1, 3, H, W] in [0, 1] as [3, H, W] uint8 on the CPU."""
    return (image[0].detach() * 255).round().to(torch.uint8).cpu()
