"""The curves of a run, drawn from its trace."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stylize.errors import OutputError, PictureError, SaveError
from stylize.images import check_output, write_whole
from stylize.inspect.diagnosis import Finding, judge_clipping
from stylize.inspect.drawing import (
    COLOURS,
    INK,
    MUTED,
    RULE,
    WIDTH,
    as_png,
    place_axes,
    scale_by_powers,
    style_axes,
)
from stylize.inspect.record import Trace, read_trace, trace_path


def plot_trace(
    path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, overwrite: bool = False
) -> tuple[Path, list[Finding]]:
    """Draw a trace to a PNG, by default beside it, and judge it.

    Returns:
        where the picture is; and what was found to be wrong.

    Raises:
        PictureError: when the trace cannot be read, or lines of it lack something.
        OutputError: when the picture cannot be written to its place, or exists already.
        SaveError: when writing fails.
    """
    trace = read_trace(path)
    place = trace_path(path).with_suffix(".png") if out is None else Path(out)
    if place.suffix.lower() != ".png":
        raise OutputError(f"{place} does not end in .png, the format of the curves.")
    check_output(place, overwrite=overwrite)
    try:
        png, findings = draw_trace(trace), judge_trace(trace)
    except (AttributeError, KeyError, TypeError) as error:
        raise PictureError(f"{trace_path(path)} is damaged, or the trace of another version: {error!r}.") from error
    try:
        write_whole(place, png, overwrite=overwrite)
    except OSError as error:
        raise SaveError(f"{place} could not be written: {error.strerror}. Choose another --out.") from error
    return place, findings


def draw_trace(trace: Trace) -> bytes:
    """Losses, terms, gradient norms and steps over the evaluations of a run, as PNG."""
    evaluations = [line["evaluation"] for line in trace.evaluations]
    panels = [
        ("loss", {"total": _column(trace, "loss")}),
        ("terms, unweighted", _terms(trace)),
        ("norm of the gradient", _norms(trace)),
        ("step in grey levels", {"RMS of the step": _column(trace, "step_levels")}),
        ("per cent of values", {"at 0 or 255": [100 * line["at_bounds"] for line in trace.snapshots]}),
    ]
    height, label = 1.75, 0.3  # inches
    figure = Figure(figsize=(WIDTH, len(panels) * (height + label) + 0.5))
    for i, (name, curves) in enumerate(panels):
        bottom = 0.5 + (len(panels) - 1 - i) * (height + label)
        axes = place_axes(figure, (0.85, bottom, WIDTH - 2.6, height))
        at_bounds = i == len(panels) - 1
        _draw(axes, [line["evaluation"] for line in trace.snapshots] if at_bounds else evaluations, curves)
        style_axes(axes, name)
        if not at_bounds:
            scale_by_powers(axes)
        _mark_scales(axes, trace, name_them=i == 0)
        axes.set_xlim(0, max([*evaluations, 1]))
    axes.set_xlabel("evaluation", fontsize=8.5, color=INK)
    return as_png(figure)


def judge_trace(trace: Trace) -> list[Finding]:
    """What the record of a run shows to be wrong; an empty list is a clean bill."""
    findings = []
    lost = sum(line["loss"] is None for line in trace.evaluations)
    count = len(trace.evaluations)
    if lost:
        findings.append(Finding("not finite", f"The loss was not finite in {lost} of {count} evaluations."))
    return findings + judge_clipping(_clipped(trace), count)


def _clipped(trace: Trace) -> int:
    """Evaluations in which the guard fired; the events count them anew at each scale."""
    by_scale = {line["scale"]: line["clipped"] for line in trace.evaluations}
    return sum(by_scale.values())


def _column(trace: Trace, name: str) -> list[float]:
    return [_number(line.get(name)) for line in trace.evaluations]


def _terms(trace: Trace) -> dict[str, list[float]]:
    names = dict.fromkeys(name for line in trace.evaluations for name in line["terms"])
    return {name: [_number(line["terms"].get(name)) for line in trace.evaluations] for name in names}


def _norms(trace: Trace) -> dict[str, list[float]]:
    before, after = _column(trace, "gradient_norm"), _column(trace, "gradient_norm_after_clipping")
    if before == after:
        return {"not clipped": before}
    return {"before clipping": before, "after clipping": after}


def _number(value: Any) -> float:
    """A gap in the curve where there was no finite number, or where a logarithm has none."""
    return math.nan if value is None or value <= 0 else float(value)


def _draw(axes: Axes, places: Sequence[int], curves: dict[str, list[float]]) -> None:
    drawn = {name: values for name, values in curves.items() if _any_number(values)}
    for i, (name, values) in enumerate(drawn.items()):
        marker = "o" if len(values) < 60 else None
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(places, values, color=colour, linewidth=1.2, label=name, marker=marker, markersize=2.4)
    if drawn:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.03), fontsize=7.5, frameon=False, labelcolor=INK)


def _any_number(values: Iterable[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def _mark_scales(axes: Axes, trace: Trace, *, name_them: bool) -> None:
    """A line where each size begins."""
    for scale in trace.scales:
        first = next((e["evaluation"] for e in trace.evaluations if e["scale"] == scale["scale"]), None)
        if first is None:
            continue
        axes.axvline(first, color=RULE, linewidth=0.8, zorder=0)
        if name_them:
            size = f"{scale['width']}×{scale['height']} px"
            above = axes.get_xaxis_transform()
            axes.text(first, 1.02, f" {size}", transform=above, va="bottom", fontsize=7.5, color=MUTED)
