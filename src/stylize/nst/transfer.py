"""One picture, from its smallest scale to the size asked for."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from stylize.errors import InputError, RunError
from stylize.events import Evaluated, Listener, Notice, ScaleFinished, ScaleStarted, ignore
from stylize.nst.device import tuned
from stylize.nst.hooks import GradientHook
from stylize.nst.losses import Statistics
from stylize.nst.memory import Plan, measure_style_within, objective_for, plan_memory
from stylize.nst.objective import Losses, Region, Styles, blend
from stylize.nst.optimize import (
    INTERRUPTED,
    OUT_OF_MEMORY,
    Keeper,
    Optimized,
    Outcome,
    Progress,
    Search,
    State,
    StopRule,
    check_history,
    is_out_of_memory,
    keep_nothing,
    optimize,
)
from stylize.nst.ranks import ALONE, Ranks
from stylize.nst.regions import Regions, compose, guides_at, resize_mask
from stylize.nst.state import check_like, check_numbers
from stylize.nst.vgg import Vgg19
from stylize.process import scarce_memory
from stylize.settings import Quality, Settings

SMALLEST_SCALE = 128  # px, long side, about: where the largest forms are laid down
MOST_SIZES = 32  # that a style's statistics are kept for: 2 MB each, and a folder may hold a thousand
LESS = 0.8  # of what a plan counted that ran out of memory is taken to be there
FLAT_DEVIATION = 2 / 255  # a result that varies less than this is a flat sheet

# Evaluations at the coarsest scale, at most; each finer one, four times as dear and nearer to its goal, has two
# thirds as many. And the gain below which a scale is left.
_EVALUATIONS: Mapping[Quality, int] = {"draft": 80, "good": 200, "best": 500}
_FEWER = 2 / 3
_MIN_DECREASE: Mapping[Quality, float] = {"draft": 0.004, "good": 0.001, "best": 0.0002}


@dataclass(frozen=True)
class Painting:
    """What `transfer` returns."""

    image: Tensor  # [1, 3, H, W] float32 in [0, 1] on the CPU
    losses: Mapping[str, float]  # of exactly this picture: total, and every term unweighted
    history: tuple[Evaluated, ...]
    evaluations: int
    seconds: float
    outcome: Outcome
    reason: str  # why the run ended: a sentence


class Style:
    """The style that one or more pictures show together, measured at each size once.

    Args:
        network: that measures.
        images: [1, 3, H, W] in [0, 1] each, of any size.
        settings: the style's share of them.
        mask: [1, 1, H, W] in [0, 1], of any size: where the pictures are looked at; None = everywhere.
    """

    def __init__(
        self, network: Vgg19, images: Sequence[Tensor], settings: Settings, mask: Tensor | None = None
    ) -> None:
        self._network = network
        self._images = images
        self._settings = settings
        self._mask = mask
        self._weights = settings.style_weights or (1.0,) * len(images)
        self._measured: dict[int, dict[str, Statistics]] = {}

    @property
    def first_image(self) -> Tensor:
        """The first of the pictures."""
        return self._images[0]

    def at(
        self, long_side: int, device: torch.device, most_pixels: int = 1 << 62
    ) -> Mapping[str, Statistics]:
        """The target statistics for a result whose long side has so many pixels.

        Not more than `most_pixels` of a style picture are looked at together.
        """
        if long_side not in self._measured:
            measured = []
            for image in self._images:
                height, width = image.shape[2:]
                size = style_size(width, height, long_side, self._settings, self._network.minimum_size)
                measured.append(self._measure(resize(image, size).to(device), most_pixels))
            self._measured[long_side] = self._mixed(measured)
            if len(self._measured) > MOST_SIZES:
                del self._measured[next(iter(self._measured))]  # the one measured first
        return self._measured[long_side]

    def _measure(self, image: Tensor, most_pixels: int) -> dict[str, Statistics]:
        if self._mask is None:
            return measure_style_within(most_pixels, self._network, image, self._settings)
        mask = resize_mask(self._mask, (image.shape[3], image.shape[2])).to(image.device)
        guides = guides_at(self._network, self._settings.style_layers, mask[0])
        guide = {layer: guide[0] for layer, guide in guides.items()}
        return measure_style_within(most_pixels, self._network, image, self._settings, guide)

    def _mixed(self, measured: Sequence[Mapping[str, Statistics]]) -> dict[str, Statistics]:
        """For each layer what its own picture shows, or the blend of all."""
        layers = self._settings.style_layers
        sources = dict(zip(layers, self._settings.style_layer_sources or (0,) * len(layers), strict=True))
        own = {layer: measured[source - 1][layer] for layer, source in sources.items() if source}
        return blend(measured, self._weights) | own


def transfer(
    network: Vgg19,
    content: Tensor,
    style: Style,
    settings: Settings,
    *,
    regions: Regions | None = None,
    init: Tensor | None = None,
    listen: Listener = ignore,
    snapshot_every: int | None = None,
    gradient_hooks: Sequence[GradientHook] = (),
    keep: Keeper = keep_nothing,
    resume: Mapping[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> Painting:
    """Paint `content` [1, 3, H, W] in [0, 1] in the manner of `style`.

    Args:
        network: on the device that paints.
        regions: which have styles of their own, in place of `style`, or stay as they are.
        init: a picture to start from, when `settings.init` names a file.
        listen: called with every event.
        snapshot_every: evaluations between two `Snapshot` events.
        gradient_hooks: called with the picture's gradient, in this order; may return another one.
        keep: offered the run's state after every evaluation; must take it after each scale and when interrupted.
        resume: such a state of the same run, to go on from: on a CPU to the same picture, bit for bit.
        ranks: the processes that paint it together, each of which calls this with the same arguments.

    Raises:
        InputError: when the picture is too small for the network.
        RunError: when nothing finite came out.
        KeyboardInterrupt: when it came before there was anything to keep.
    """
    device = next(network.parameters()).device
    studio = _Studio(
        network, style, regions, settings, content, listen, snapshot_every, gradient_hooks, ranks
    )
    run = _Run() if resume is None else _Run.restored(resume, device)
    started = time.perf_counter() - run.seconds
    sizes = scale_sizes(content, settings, network.minimum_size)
    stops = plan_stops(len(sizes), settings, started)
    planned = sum(stop.evaluations for stop in stops)
    history, result = run.history, run.result
    coarse_content = resize(content, sizes[run.scale - 1]).to(device) if run.scale else content  # as `result`
    try:
        for scale, (size, stop) in list(enumerate(zip(sizes, stops, strict=True)))[run.scale :]:
            width, height = size
            listen(ScaleStarted(scale, len(sizes), width, height, stop.evaluations, len(history)))
            scale_started = time.perf_counter() - run.scale_seconds
            fine_content = resize(content, size).to(device)
            if run.under_way is not None:
                start = fine_content  # the state has a start of its own
            elif result is None:
                start = _first_picture(fine_content, style, settings, init)
            else:
                start = hand_over(result.image, coarse_content, fine_content, settings.detail)
            progress = Progress(scale, len(sizes), len(history), planned, started)
            keep_scale = _keeping(keep, _Run(scale, result, history), started, scale_started)
            task = _Task(fine_content, start, stop, progress, keep_scale, run.under_way)
            result = studio.paint(task)
            run = _Run()
            coarse_content = fine_content
            history.extend(result.history)
            seconds, loss = time.perf_counter() - scale_started, result.losses["total"]
            listen(ScaleFinished(scale, len(sizes), len(result.history), seconds, loss, result.reason))
            if result.outcome != "done":
                break
            _keeping(keep, _Run(scale + 1, result, history), started)(dict, now=True)
    except KeyboardInterrupt:
        if result is None:
            raise
        result = replace(result, outcome="interrupted", reason=INTERRUPTED)
    except RunError as error:
        if result is None:
            raise
        # A finer scale that could not even begin leaves the coarser one's picture.
        result = replace(result, outcome="failed", reason=str(error))
    if result is None:
        raise RunError("There was no scale to paint at.")
    image = _finished(result, coarse_content, resize(content, sizes[-1]), settings.detail, regions)
    try:
        for text in _warnings(result, image):
            listen(Notice(text))
    except KeyboardInterrupt:  # the picture is there; it must not be lost to the last word about it
        result = replace(result, outcome="interrupted", reason=INTERRUPTED)
    return Painting(
        image=image,
        losses=result.losses,
        history=tuple(history),
        evaluations=len(history),
        seconds=time.perf_counter() - started,
        outcome=result.outcome,
        reason=result.reason,
    )


@dataclass(frozen=True)
class _Task:
    """What is to be done at one scale."""

    content: Tensor
    start: Tensor
    stop: StopRule
    progress: Progress
    keep: Keeper
    resume: Mapping[str, Any] | None  # a state of `optimize` to go on from

    def after(self, result: Optimized) -> _Task:
        """What is left of it, from this picture."""
        made = len(result.history)
        return replace(
            self,
            start=result.image,
            stop=replace(self.stop, evaluations=self.stop.evaluations - made),
            progress=replace(self.progress, made=self.progress.made + made),
            resume=None,
        )


@dataclass(frozen=True)
class _Studio:
    """What all scales of a run share."""

    network: Vgg19
    style: Style
    regions: Regions | None
    settings: Settings
    source: Tensor  # the content as it was handed over
    listen: Listener
    snapshot_every: int | None
    gradient_hooks: Sequence[GradientHook]
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        """That paints."""
        return next(self.network.parameters()).device

    def paint(self, task: _Task) -> Optimized:
        """One scale. Each time that memory runs out, what is painted goes on in a way that takes less.

        Raises:
            RunError: when there is no such way, and nothing is painted yet.
        """
        plan = self._plan(task.content, rank=None if task.resume is None else task.resume["plan"])
        done: tuple[Evaluated, ...] = ()
        result: Optimized | None = None
        while True:
            if plan.is_tiled:
                self.listen(Notice(str(plan)))
            try:
                result = self._attempt(plan, task)
            except (RunError, RuntimeError) as error:
                if not (is_out_of_memory(error) or is_out_of_memory(error.__cause__ or error)):
                    raise
            else:
                task = task.after(result)
                done = *done, *result.history
                result = replace(result, history=done)
                if result.reason != OUT_OF_MEMORY:
                    return result
            try:
                plan = self._plan(task.content, limit=LESS * plan.total)
            except InputError as refusal:
                if result is None:
                    raise RunError(f"{OUT_OF_MEMORY} {refusal}") from None
                return replace(result, reason=f"{OUT_OF_MEMORY} {refusal}")
            self.listen(Notice(f"{OUT_OF_MEMORY} The run goes on with less."))

    def _plan(self, content: Tensor, *, limit: float | None = None, rank: int | None = None) -> Plan:
        height, width = content.shape[2:]
        return plan_memory(
            (width, height),
            self.settings,
            limit=limit if rank is None else math.inf,
            source_bytes=0 if content is self.source else self.source.nbytes,
            regions=0 if self.regions is None else len(self.regions.styles),
            device=self.device,
            skip=rank or 0,
            ranks=self.ranks,
        )

    def _attempt(self, plan: Plan, task: _Task) -> Optimized:
        """The scale as it is planned."""
        size = plan.width, plan.height
        settings = self.settings.replace(history=plan.history, history_precision=plan.history_precision)
        free = None if self.regions is None else self.regions.division.free(size)

        def keep_with_plan(make: Callable[[], State], *, now: bool = False) -> None:
            task.keep(lambda: {**make(), "plan": plan.rank}, now=now)

        scarce = scarce_memory() if plan.is_tiled else contextlib.nullcontext()
        with tuned(self.device), scarce:
            return optimize(
                objective_for(plan, self.network, task.content, self._targets(plan), settings, self.ranks),
                self.ranks.follow(compose(task.content, task.start, free)),
                settings,
                replace(task.stop, ranks=self.ranks),
                progress=task.progress,
                listen=self.listen,
                snapshot_every=self.snapshot_every,
                gradient_hooks=self.gradient_hooks,
                free=None if free is None else free.to(self.device),
                keep=keep_with_plan,
                resume=task.resume,
            )

    def _targets(self, plan: Plan) -> Styles | Sequence[Region]:
        size = plan.width, plan.height
        if self.regions is None:
            return self.style.at(max(size), self.device, plan.most_pixels)
        return self.regions.at(self.network, self.settings.style_layers, size, plan.most_pixels)


@dataclass
class _Run:
    """A run so far, between two evaluations."""

    scale: int = 0  # the one to go on with
    result: Optimized | None = None  # of the scale before
    history: list[Evaluated] = field(default_factory=list)  # of all scales before
    seconds: float = 0.0  # since it began
    scale_seconds: float = 0.0  # of them at this scale
    under_way: Mapping[str, Any] | None = None  # the state of `optimize` at this scale, once it has begun

    @classmethod
    def restored(cls, state: Mapping[str, Any], device: torch.device) -> _Run:
        """The run of which this is the state."""
        history = [Evaluated(**event) for event in state["history"]]
        result = state["result"]
        if result is not None:
            last = tuple(event for event in history if event.scale == state["scale"] - 1)
            result = Optimized(**{**result, "image": result["image"].to(device)}, history=last)
        return cls(**{**state, "result": result, "history": history})

    def state(self) -> State:
        """All of it, of the kinds that a `Keeper` takes."""
        result = self.result
        kept = ("image", "losses", "outcome", "reason")
        return {
            **vars(self),
            "result": None if result is None else {name: getattr(result, name) for name in kept},
            "history": [asdict(event) for event in self.history],
        }


def check_state(
    state: Any, network: Vgg19, content: Tensor, settings: Settings, *, regions: int = 0, ranks: Ranks = ALONE
) -> None:
    """Find out whether `transfer` can go on from a state, with these arguments; nothing is computed.

    Raises:
        ValueError: when it cannot; the text says in a few words what is wrong with the state.
    """
    check_like(state, {**_Run().state(), "result": None, "under_way": None}, "state")
    check_history(state["history"])
    sizes = scale_sizes(content, settings, network.minimum_size)
    scale, result, under_way = (state[name] for name in ("scale", "result", "under_way"))
    if not 0 <= scale <= len(sizes) or (scale == 0) != (result is None):
        raise ValueError(f"its scale is {scale} of {len(sizes)}")
    if result is not None:
        like = {"image": _form(sizes[scale - 1]), "losses": None, "outcome": "", "reason": ""}
        check_like(result, like, "result")
        check_numbers(result["losses"], "losses")
        if "total" not in result["losses"] or result["outcome"] not in get_args(Outcome):
            raise ValueError("its result is incomplete")
    if under_way is None:
        return
    check_like(under_way, {"search": None, "history": [], "plan": 0}, "under_way")
    check_history(under_way["history"])
    rank = under_way["plan"]
    if scale == len(sizes) or rank < 0:
        raise ValueError(f"its plan is {rank} at scale {scale} of {len(sizes)}")
    device = next(network.parameters()).device
    plan = plan_memory(
        sizes[scale], settings, limit=math.inf, regions=regions, device=device, skip=rank, ranks=ranks
    )
    planned = settings.replace(history=plan.history, history_precision=plan.history_precision)
    Search(_never, _form(sizes[scale]), planned).check_state_dict(under_way["search"])


def _never(image: Tensor) -> Losses:
    raise NotImplementedError("A state is checked without computing.")


def _form(size: tuple[int, int]) -> Tensor:
    """A picture of (width, height) without contents, which takes no memory."""
    width, height = size
    return torch.empty(1, 3, height, width, device="meta")


def _keeping(keep: Keeper, run: _Run, started: float, scale_started: float | None = None) -> Keeper:
    """The keeper for `optimize` at the run's scale; an empty state is that of a scale that has not begun."""

    def keep_run(make: Callable[[], State], *, now: bool = False) -> None:
        def state() -> State:
            clock = time.perf_counter()
            scale_seconds = 0.0 if scale_started is None else clock - scale_started
            under_way = make() or None
            return replace(
                run, seconds=clock - started, scale_seconds=scale_seconds, under_way=under_way
            ).state()

        keep(state, now=now)

    return keep_run


def target_size(width: int, height: int, settings: Settings) -> tuple[int, int]:
    """The result's (width, height) for a content picture of this size.

    Raises:
        InputError: when a width and a height are asked for: a content picture has its own proportions.
    """
    long_side = max(width, height)
    if isinstance(settings.size, tuple):
        raise InputError(
            "size {}x{} is for a texture, without a content picture. A content picture keeps its proportions: "
            "give the long side alone, as in --size {}.".format(*settings.size, max(settings.size))
        )
    wanted = long_side if settings.size == "full" else settings.size
    return fit(width, height, wanted if settings.upscale else min(wanted, long_side))


def style_size(width: int, height: int, long_side: int, settings: Settings, minimum: int) -> tuple[int, int]:
    """(width, height) at which a style picture is measured for a result with this long side.

    It is never enlarged: what its painter did not paint cannot be measured.
    """
    wanted = min(long_side * settings.style_scale, max(width, height))
    return fit(width, height, max(1, round(wanted)), at_least=minimum)


def fit(width: int, height: int, long_side: int, *, at_least: int = 1) -> tuple[int, int]:
    """(width, height) scaled to a long side, its proportions kept as whole pixels allow."""
    factor = long_side / max(width, height)
    return max(at_least, round(width * factor)), max(at_least, round(height * factor))


def scale_sizes(content: Tensor, settings: Settings, minimum: int) -> list[tuple[int, int]]:
    """(width, height) of each scale, the coarsest first, the result's last; each doubles the one before.

    Raises:
        InputError: when the result itself is too small for the network.
    """
    height, width = content.shape[2:]
    final = target_size(width, height, settings)
    if min(final) < minimum:
        raise InputError(
            f"The result would be {final[0]}×{final[1]} px; its layers need at least {minimum} px a side. "
            "Use a larger --size, a less narrow picture, or shallower layers."
        )
    wanted = settings.scales or max(1, round(math.log2(max(final) / SMALLEST_SCALE)) + 1)
    sizes = [final]
    while len(sizes) < wanted and min(smaller := fit(*final, max(final) >> len(sizes))) >= minimum:
        sizes.append(smaller)
    return sizes[::-1]


def plan_stops(scales: int, settings: Settings, started: float) -> list[StopRule]:
    """The stop rule of each scale: what the quality says, or the user's evaluations or time, shared out."""
    counts = [max(1, round(_EVALUATIONS[settings.quality] * _FEWER**k)) for k in range(scales)]
    rules = [StopRule(count, _MIN_DECREASE[settings.quality]) for count in counts]
    if settings.iterations is not None:
        rules = [StopRule(count) for count in _share_out(settings.iterations, counts)]
    if settings.time_budget_s is not None:
        shares = [4.0**k for k in range(scales)]  # a doubled scale costs four times as much
        ends = [sum(shares[: k + 1]) / sum(shares) for k in range(scales)]
        most = [100_000] * scales if settings.iterations is None else [rule.evaluations for rule in rules]
        rules = [
            StopRule(count, 0.0, started + settings.time_budget_s * end)
            for count, end in zip(most, ends, strict=True)
        ]
    return rules


def _share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the weights with exactly this sum, each at least 1 where that can be."""
    spare = max(0, total - len(weights))
    edges = [round(spare * sum(weights[: k + 1]) / sum(weights)) for k in range(len(weights))]
    return [1 + b - a for a, b in pairwise([0, *edges])]


def resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, 3, H, W] in [0, 1] at (width, height): bicubic, filtered when it shrinks, kept in [0, 1]."""
    width, height = size
    if image.shape[2:] == (height, width):
        return image
    resized = F.interpolate(image, (height, width), mode="bicubic", antialias=True, align_corners=False)
    return resized.clamp(0, 1)


def hand_over(coarse: Tensor, coarse_content: Tensor, fine_content: Tensor, detail: float) -> Tensor:
    """The start at a finer scale: the result enlarged, plus a share of what enlarging lost of the content.

    All are [1, 3, H, W] floats; nothing passes through 8 bits.
    """
    height, width = fine_content.shape[2:]

    def enlarged(image: Tensor) -> Tensor:
        return F.interpolate(image, (height, width), mode="bicubic", align_corners=False)

    return enlarged(coarse) + detail * (fine_content - enlarged(coarse_content))


def _first_picture(content: Tensor, style: Style, settings: Settings, init: Tensor | None) -> Tensor:
    height, width = content.shape[2:]
    if settings.init == "content":
        return content
    if settings.init == "noise":
        generator = torch.Generator().manual_seed(settings.seed)
        noise = torch.randn(content.shape, generator=generator) * 0.15 + 0.5  # hardly ever out of range
        if settings.preserve_color == "luminance":
            noise = noise[:, :1].expand_as(noise)  # what begins in grey stays grey
        return noise.clamp(0, 1).to(content.device)
    picture = style.first_image if settings.init == "style" else init
    if picture is None:
        raise InputError(f"init is {settings.init!r}, but no picture of that was handed over.")
    return resize(picture, (width, height)).to(content.device)


def _finished(
    result: Optimized, coarse_content: Tensor, content: Tensor, detail: float, regions: Regions | None
) -> Tensor:
    """The picture at the size asked for, also of a run that ended at a coarser scale.

    On the CPU, since the device may have ended the run for lack of memory.
    """
    image = result.image.float().cpu()
    if image.shape == content.shape:
        return image
    content = content.cpu()
    free = None if regions is None else regions.division.free((content.shape[3], content.shape[2]))
    return compose(content, hand_over(image, coarse_content.cpu(), content, detail).clamp(0, 1), free)


def _warnings(result: Optimized, image: Tensor) -> list[str]:
    """What a user should know about a result that cannot be what was wanted."""
    warnings = []
    last = result.losses["total"]
    losses = [event.loss for event in result.history if math.isfinite(event.loss)] or [last]
    if len(losses) > 1 and not last < 0.999 * losses[0]:
        warnings.append(
            "The optimiser made no progress: the picture is its starting point. "
            "Raise --style-weight, or try another --init or --optimizer."
        )
    after_best = losses[losses.index(min(losses)) :]
    if max(after_best) > 10 * losses[0]:
        warnings.append("The loss jumped during the run; the best picture before that was kept.")
    if image.std(dim=(2, 3)).max() < FLAT_DEVIATION:
        warnings.append(
            "The result is almost one flat colour: --tv-weight may be far too high, or the style picture is flat."
        )
    return warnings
