"""One HTML file with everything inside: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light; --ink: #24292f; --muted: #57606a; --rule: #d8dee4; --soft: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 1080px; background: #fff; color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 3.2rem 0 .3rem; padding-top: .9rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 2rem 0 .4rem; }
p { max-width: 46rem; margin: .3rem 0 1rem; }
.muted, figcaption, h3 span { color: var(--muted); font-weight: 400; }
figure { margin: 0 0 1.3rem; min-width: 0; }
figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: .85rem; margin-bottom: .3rem; }
.row img { max-height: 22rem; object-fit: contain; object-position: left top; }
.row { display: grid; gap: 1rem; grid-template-columns: repeat(3, minmax(0, 1fr)); align-items: start; }
.table { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--rule); }
td { white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
ul.findings { list-style: none; margin: .6rem 0; padding: 0; max-width: 46rem; }
ul.findings li { padding: .55rem .9rem; margin: .4rem 0; border-left: 4px solid #bf8700; background: #fff8e5; }
ul.findings li.fine { border-color: #2da44e; background: #f0faf3; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--muted); }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole file of a title and the HTML of its parts."""
    name = escape(title)
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{name}</h1>
{body}
</body>
</html>
"""


def heading(text: str) -> str:
    """A chapter begins."""
    return f"<h2>{escape(text)}</h2>"


def subheading(text: str, aside: str) -> str:
    """A section begins, with something small beside its name."""
    return f"<h3>{escape(text)} <span>{escape(aside)}</span></h3>"


def paragraph(text: str, *, muted: bool = False) -> str:
    """A few sentences."""
    return f"<p{' class=muted' if muted else ''}>{escape(text)}</p>"


def figure(png: bytes, caption: str) -> str:
    """A picture with its caption above."""
    data = base64.b64encode(png).decode("ascii")
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>"
        f'<img alt="{escape(caption, quote=True)}" src="data:image/png;base64,{data}"></figure>'
    )


def row(figures: Iterable[str]) -> str:
    """Figures beside each other, three in a line."""
    return f'<div class="row">{"".join(figures)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Names on the left, numbers on the right."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n" for cells in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="table"><table><thead><tr>{names}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def folded(summary: str, inside: str) -> str:
    """Something that most readers skip."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def findings(sentences: Iterable[tuple[str, bool]]) -> str:
    """Sentences, each with whether all is fine."""
    items = "".join(f"<li{' class=fine' if fine else ''}>{escape(text)}</li>" for text, fine in sentences)
    return f'<ul class="findings">{items}</ul>'
