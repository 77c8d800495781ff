"""The parts of the page that change while it paints, as HTML and SVG; all that visitors say is escaped."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

from stylize.progress import duration
from stylize.web.jobs import Job
from stylize.web.observer import View
from stylize.web.store import FORMATS, Painted

CURVE_SIZE = (240, 120)  # of the curve's own units
FORMAT_NAMES = {"png": "PNG", "jpg": "JPEG", "tiff": "TIFF, 16 bits"}
EASEL = '<p class="said" role="status">Choose a photograph and a painting, then press Paint.</p>'


def easel(job: Job, place: int) -> str:
    """A job as it stands: its picture, the curve beside it, and what there is to say."""
    view = job.observer.view()
    if job.painted is not None:
        picture = comparison(job.painted)
    else:
        picture = _frame(view) if view.frame and not job.ended else '<div class="stage blank"></div>'
    said = status(headline(job, place), alert=job.phase == "failed")
    facts = "" if job.phase == "waiting" else _facts(job, view)
    return f'{said}<div class="easel">{picture}<aside class="beside">{facts}{curve(view)}</aside></div>'


def status(text: str, *, alert: bool = False) -> str:
    """One sentence, which screen readers say, too."""
    return f'<p class="said{" alert" if alert else ""}" role="{"alert" if alert else "status"}">{escape(text)}</p>'


def headline(job: Job, place: int) -> str:
    """How a job stands, in a sentence."""
    match job.phase:
        case "waiting" if place == 0:
            return "Next in the queue."
        case "waiting":
            return f"Waiting: {place} before you in the queue."
        case "painting":
            return "Stopping…" if job.stop_asked else "Painting…"
        case _:
            return job.message


def comparison(painted: Painted) -> str:
    """Before and after, one over the other, with a slider between."""
    width, height = painted.size
    return (
        f'<figure class="stage"><div class="compare" style="aspect-ratio:{width}/{height}">'
        f'<img src="results/{painted.key}/png" alt="The painting">'
        f'<img class="before" src="pictures/{escape(painted.content)}" alt="The photograph">'
        '<input type="range" min="0" max="100" value="0" step="1" aria-label="Photograph or painting: '
        'how much of the photograph is shown"></div>'
        f"<figcaption>{escape(painted.caption)}</figcaption>{downloads(painted)}</figure>"
    )


def downloads(painted: Painted) -> str:
    """A link for each format."""
    links = " ".join(
        f'<a class="download" href="results/{painted.key}/{suffix}" '
        f'download="{escape(painted.path(suffix).name)}">{FORMAT_NAMES[suffix]}</a>'
        for suffix in FORMATS
    )
    return f'<p class="downloads"><span>Download, settings inside:</span> {links}</p>'


def history(results: Sequence[Painted]) -> str:
    """A session's results as buttons."""
    if not results:
        return '<p class="hint">What you paint is kept here until you close the page.</p>'
    buttons = "".join(
        f'<li><button type="button" data-result="{each.key}"><img src="results/{each.key}/thumbnail" alt="">'
        f"<span>{escape(each.caption)}</span></button></li>"
        for each in results
    )
    return f'<ul class="history">{buttons}</ul>'


def curve(view: View) -> str:
    """The loss over the evaluations, on a logarithmic scale; faint lines where a finer size began."""
    points = [(evaluation, math.log(loss)) for evaluation, loss in view.curve if loss > 0 and math.isfinite(loss)]
    if len(points) < 2:
        return ""
    width, height = CURVE_SIZE
    low, high = min(y for _, y in points), max(y for _, y in points)
    last = max(view.evaluations, points[-1][0])

    def across(evaluation: float) -> float:
        return width * (evaluation - 1) / max(1, last - 1)

    path = " ".join(f"{across(x):.1f},{height * (high - y) / ((high - low) or 1):.1f}" for x, y in points)
    lines = "".join(
        f'<line x1="{across(x + 1):.1f}" x2="{across(x + 1):.1f}" y1="0" y2="{height}"/>' for x in view.starts[1:]
    )
    first_loss, last_loss = math.exp(points[0][1]), math.exp(points[-1][1])
    return (
        f'<figure class="curve"><svg viewBox="-2 -4 {width + 4} {height + 8}" role="img" '
        f'aria-label="Loss, from {first_loss:.3g} down to {last_loss:.3g}">{lines}<polyline points="{path}"/></svg>'
        f"<figcaption>Loss {last_loss:.3g} after {points[-1][0]} evaluations</figcaption></figure>"
    )


def _frame(view: View) -> str:
    width, height = view.size
    data = base64.b64encode(view.frame).decode()
    return (
        f'<figure class="stage"><img class="frame" style="aspect-ratio:{width}/{height}" '
        f'data-frame="{view.frames}" src="data:image/jpeg;base64,{data}" alt="The picture as it forms"></figure>'
    )


def _facts(job: Job, view: View) -> str:
    made = view.curve[-1][0] if view.curve else 0
    parts = []
    if not job.ended:
        parts.append(f'<progress max="{max(1, view.evaluations)}" value="{made}" aria-label="Progress"></progress>')
    if view.scales:
        width, height = view.size
        parts.append(f"<p>Size {len(view.starts)} of {view.scales}: {width} × {height} px</p>")
    if view.left_s is not None and not job.ended:
        parts.append(f"<p>About {duration(view.left_s)} left at most</p>")
    parts += [f'<p class="note">{escape(notice)}</p>' for notice in view.notices]
    return f'<div class="facts">{"".join(parts)}</div>'
