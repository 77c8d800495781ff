"""One picture, from its smallest scale to the size asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from stylize.errors import InputError, RunError
from stylize.events import Evaluated, Listener, Notice, ScaleFinished, ScaleStarted, ignore
from stylize.nst.device import tuned
from stylize.nst.hooks import GradientHook
from stylize.nst.losses import Statistics
from stylize.nst.objective import Objective, blend, measure_style
from stylize.nst.optimize import (
    INTERRUPTED,
    OUT_OF_MEMORY,
    Optimized,
    Outcome,
    Progress,
    StopRule,
    is_out_of_memory,
    lack_of_memory,
    optimize,
)
from stylize.nst.vgg import Vgg19
from stylize.settings import Quality, Settings

SMALLEST_SCALE = 128  # px, long side, about: where the largest forms are laid down
MOST_SIZES = 32  # that a style's statistics are kept for: 2 MB each, and a folder may hold a thousand
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
    """

    def __init__(self, network: Vgg19, images: Sequence[Tensor], settings: Settings) -> None:
        self._network = network
        self._images = images
        self._settings = settings
        self._weights = settings.style_weights or (1.0,) * len(images)
        self._measured: dict[int, dict[str, Statistics]] = {}

    @property
    def first_image(self) -> Tensor:
        """The first of the pictures."""
        return self._images[0]

    def at(self, long_side: int, device: torch.device) -> Mapping[str, Statistics]:
        """The target statistics for a result whose long side has so many pixels."""
        if long_side not in self._measured:
            measured = []
            for image in self._images:
                height, width = image.shape[2:]
                size = style_size(width, height, long_side, self._settings, self._network.minimum_size)
                measured.append(measure_style(self._network, resize(image, size).to(device), self._settings))
            self._measured[long_side] = blend(measured, self._weights)
            if len(self._measured) > MOST_SIZES:
                del self._measured[next(iter(self._measured))]  # the one measured first
        return self._measured[long_side]


def transfer(
    network: Vgg19,
    content: Tensor,
    style: Style,
    settings: Settings,
    *,
    init: Tensor | None = None,
    listen: Listener = ignore,
    snapshot_every: int | None = None,
    gradient_hooks: Sequence[GradientHook] = (),
) -> Painting:
    """Paint `content` [1, 3, H, W] in [0, 1] in the manner of `style`.

    Args:
        network: on the device that paints.
        init: a picture to start from, when `settings.init` names a file.
        listen: called with every event.
        snapshot_every: evaluations between two `Snapshot` events.
        gradient_hooks: called with the picture's gradient, in this order; may return another one.

    Raises:
        InputError: when the picture is too small for the network.
        RunError: when nothing finite came out.
        KeyboardInterrupt: when it came before there was anything to keep.
    """
    started = time.perf_counter()
    device = next(network.parameters()).device
    sizes = scale_sizes(content, settings, network.minimum_size)
    stops = plan_stops(len(sizes), settings, started)
    planned = sum(stop.evaluations for stop in stops)
    history: list[Evaluated] = []
    result: Optimized | None = None
    coarse_content = content  # at the size of the result so far
    try:
        for scale, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
            width, height = size
            listen(ScaleStarted(scale, len(sizes), width, height, stop.evaluations))
            scale_started = time.perf_counter()
            fine_content = resize(content, size).to(device)
            if result is None:
                start = _first_picture(fine_content, style, settings, init)
            else:
                start = hand_over(result.image, coarse_content, fine_content, settings.detail)
            with tuned(device):
                result = optimize(
                    Objective(network, fine_content, style.at(max(size), device), settings),
                    start,
                    settings,
                    stop,
                    progress=Progress(scale, len(sizes), len(history), planned, started),
                    listen=listen,
                    snapshot_every=snapshot_every,
                    gradient_hooks=gradient_hooks,
                )
            coarse_content = fine_content
            history.extend(result.history)
            seconds, loss = time.perf_counter() - scale_started, result.losses["total"]
            listen(ScaleFinished(scale, len(sizes), len(result.history), seconds, loss, result.reason))
            if result.outcome != "done":
                break
    except KeyboardInterrupt:
        if result is None:
            raise
        result = replace(result, outcome="interrupted", reason=INTERRUPTED)
    except (RunError, RuntimeError) as error:
        if result is None and is_out_of_memory(error):
            raise lack_of_memory(device, *sizes[0]) from error
        # A finer scale that could not even begin leaves the coarser one's picture.
        if result is None or not (isinstance(error, RunError) or is_out_of_memory(error)):
            raise
        reason = str(error) if isinstance(error, RunError) else OUT_OF_MEMORY
        result = replace(result, outcome="failed", reason=reason)
    if result is None:
        raise RunError("There was no scale to paint at.")
    image = _finished(result, coarse_content, resize(content, sizes[-1]), settings.detail)
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


def target_size(width: int, height: int, settings: Settings) -> tuple[int, int]:
    """The result's (width, height) for a content picture of this size."""
    long_side = max(width, height)
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
        noise = torch.randn(content.shape, generator=generator) * 0.15 + 0.5  # grey, hardly ever out of range
        return noise.clamp(0, 1).to(content.device)
    picture = style.first_image if settings.init == "style" else init
    if picture is None:
        raise InputError(f"init is {settings.init!r}, but no picture of that was handed over.")
    return resize(picture, (width, height)).to(content.device)


def _finished(result: Optimized, coarse_content: Tensor, content: Tensor, detail: float) -> Tensor:
    """The picture at the size asked for, also of a run that ended at a coarser scale.

    On the CPU, since the device may have ended the run for lack of memory.
    """
    image = result.image.float().cpu()
    if image.shape == content.shape:
        return image
    return hand_over(image, coarse_content.cpu(), content.cpu(), detail).clamp(0, 1)


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
