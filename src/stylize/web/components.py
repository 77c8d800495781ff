"""The parts of the page that Gradio does not have: HTML with its own script, in static/.

Their templates stand still: Gradio would run as JavaScript what a visitor writes into one. What changes is set by
the scripts, as text. They are functions, since Gradio writes a file beside each class made from one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

import gradio as gr

from stylize.web.limits import Limits
from stylize.web.store import Kept


def static(name: str) -> str:
    """A file of this package's folder static/."""
    return (resources.files("stylize.web") / "static" / name).read_text(encoding="utf-8")


def picture_picker(
    *, label: str, hint: str, most: int, limits: Limits, gallery: Sequence[Kept] = (), elem_id: str
) -> gr.HTML:
    """A place to drop pictures or to pick some that come with the program; its value is a list of {key, name}."""
    template = static("picker.html").replace("LABEL", escape(label)).replace("HINT", escape(hint))
    template = template.replace("MULTIPLE", "multiple" if most > 1 else "")
    return gr.HTML(
        [],
        html_template=template.replace("GALLERY", _gallery(gallery)),
        js_on_load=static("picker.js"),
        apply_default_css=False,
        container=True,
        elem_id=elem_id,
        most=most,
        bytes=limits.upload_bytes,
    )


def mask_painter(*, purposes: Sequence[str], elem_id: str) -> gr.HTML:
    """Masks painted over the photograph; its value is {photo, styles, layers: {purpose: key}}."""
    return gr.HTML(
        {"photo": "", "styles": 1, "layers": {}},
        html_template=static("mask.html"),
        js_on_load=static("mask.js"),
        apply_default_css=False,
        elem_id=elem_id,
        purposes=list(purposes),
    )


def _gallery(pictures: Sequence[Kept]) -> str:
    if not pictures:
        return ""
    buttons = "".join(
        f'<li><button type="button" aria-pressed="false" data-key="{each.key}" data-name="{escape(each.name)}" '
        f'title="{escape(_title(each))}"><img src="pictures/{each.key}/thumbnail" alt="{escape(_title(each))}">'
        "</button></li>"
        for each in pictures
    )
    return f'<p class="hint">or one of these</p><ul class="gallery">{buttons}</ul>'


def _title(picture: Kept) -> str:
    """The starry night, for starry_night.png."""
    return picture.path.stem.replace("_", " ").replace("-", " ").capitalize()
