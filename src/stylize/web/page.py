"""The page itself, in Gradio: what stands where, and what happens at which press.

The page adds nothing to the method: it makes settings, and shows the events of the program's own run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias

import gradio as gr

from stylize import images
from stylize.errors import StylizeError
from stylize.settings import Settings, preset_names
from stylize.web import choices, drawing
from stylize.web.choices import Choices
from stylize.web.components import mask_painter, picture_picker, static
from stylize.web.endpoints import add_endpoints
from stylize.web.jobs import Job
from stylize.web.limits import naming_only
from stylize.web.studio import Studio, mask_purposes

LOOK_S = 0.5  # between two looks at a job
TITLE = "stylize"
COLOURS = {"the painting's": "off", "the photograph's": "luminance", "both, matched": "match"}
EFFORT = {"quick": "draft", "good": "good", "best": "best"}

Controls: TypeAlias = "dict[str, gr.components.Component]"
Updates: TypeAlias = "dict[gr.components.Component, Any]"


def build_page(studio: Studio) -> gr.Blocks:
    """The page, to be mounted into a server."""
    page: gr.Blocks
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as page:
        base = gr.State(Settings().as_dict())  # what the controls do not show
        gr.HTML(
            "<h1>stylize</h1><p>Paint a photograph in the manner of a painting.</p>",
            elem_classes="heading",
            js_on_load=None,
        )
        with gr.Row(equal_height=False):
            with gr.Column(scale=2, min_width=320):
                content, styles = _pickers(studio)
                preset, controls = _controls(studio)
                masks = _masks(studio)
                former, said = _former(studio)
            with gr.Column(scale=3, min_width=320):
                with gr.Row():
                    paint = gr.Button("Paint", variant="primary", min_width=90, elem_id="paint")
                    stop = gr.Button("Stop and keep", interactive=False, min_width=90, elem_id="stop")
                    cancel = gr.Button("Cancel", interactive=False, min_width=90, elem_id="cancel")
                easel = gr.HTML(drawing.EASEL, js_on_load=static("easel.js"), elem_id="easel")
                gr.HTML("<h2>This session</h2>", js_on_load=None, elem_classes="session")
                history = gr.HTML(drawing.history([]), js_on_load=static("history.js"), elem_id="history")
        show_painting = _Painting(studio, paint, stop, cancel, easel, history)
        inputs = [content, styles, masks, base, *controls.values()]
        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        every: dict[str, Any] = {**quiet, "concurrency_limit": None}
        at_once: dict[str, Any] = {**quiet, "queue": False}
        paint.click(show_painting.run, inputs, show_painting.outputs, api_name="press_paint", **every)
        stop.click(show_painting.stop, None, None, api_name="press_stop", **at_once)
        cancel.click(show_painting.cancel, None, None, api_name="press_cancel", **at_once)
        history.pick(show_painting.pick, None, easel, **at_once)
        shown = [*controls.values(), base]
        preset.input(_choosing_preset(studio, controls, base), preset, shown, **at_once)
        former.change(_reading_former(studio, controls, base, said), former, [*shown, said], **at_once)
        for picker in (content, styles):
            picker.change(_showing_photo(studio), [content, styles, masks], masks, **at_once)
        masks.change(_claiming(studio), masks, None, **at_once)
        page.unload(_leaving(studio))
        add_endpoints(studio)
    page.queue(max_size=None)
    return page


# ---- what stands where ----------------------------------------------------------------------------------


def _pickers(studio: Studio) -> tuple[gr.HTML, gr.HTML]:
    def gallery(paths: Any) -> list[Any]:
        return [studio.store.picture(path.stem) for path in paths]

    content = picture_picker(
        label="Photograph",
        hint="Drop a photograph here, or choose a file",
        most=1,
        limits=studio.limits,
        gallery=gallery(studio.contents),
        elem_id="content",
    )
    styles = picture_picker(
        label="Painting, or several",
        hint="Drop paintings here, or choose files",
        most=studio.limits.styles,
        limits=studio.limits,
        gallery=gallery(studio.styles),
        elem_id="styles",
    )
    return content, styles


def _controls(studio: Studio) -> tuple[gr.Dropdown, Controls]:
    """The preset, and a control for each of `Choices`, in their order."""
    start = Choices.of(Settings())
    preset = gr.Dropdown(
        [choices.DEFAULT_PRESET, *preset_names()],
        value=choices.DEFAULT_PRESET,
        label="Preset",
        elem_id="preset",
    )
    most = studio.limits.size
    size = gr.Slider(
        64, most, value=min(512, most), step=16, label="Size", info="Long side in pixels", elem_id="size"
    )
    strength = gr.Slider(
        0,
        1,
        value=start.strength,
        step=0.01,
        label="Strength",
        info=f"0 photograph · {start.strength:g} default · 1 painting",
        elem_id="strength",
    )
    detail = gr.Slider(
        0, 1, value=start.detail, step=0.05, label="Detail", info="0 painterly · 1 photographic", elem_id="detail"
    )
    colour = gr.Radio(list(COLOURS.items()), value=start.preserve_color, label="Colours", elem_id="colours")
    with gr.Accordion("More choices", open=False):
        quality = gr.Radio(list(EFFORT.items()), value=start.quality, label="Effort", elem_id="effort")
        stroke = gr.Slider(
            0.25, 2, value=start.style_scale, step=0.05, label="Size of the strokes", elem_id="strokes"
        )
        smooth = gr.Slider(0, 30, value=start.tv_weight, step=0.5, label="Smoothness", elem_id="smoothness")
        iterations = gr.Number(
            0, label="Evaluations", info="0: the effort decides", precision=0, minimum=0, elem_id="evaluations"
        )
        seconds = gr.Number(0, label="Seconds at most", info="0: no limit", minimum=0, elem_id="seconds")
        shares = gr.Textbox(
            "", label="Shares of several paintings", placeholder="0.7, 0.3", elem_id="shares", max_lines=1
        )
    values = (size, strength, detail, colour, quality, stroke, smooth, iterations, seconds, shares)
    return preset, dict(zip([each.name for each in fields(Choices)], values, strict=True))


def _masks(studio: Studio) -> gr.HTML:
    purposes = mask_purposes(studio.limits.styles)
    with gr.Accordion("Paint a mask", open=False, visible=bool(purposes), elem_id="masks"):
        return mask_painter(purposes=purposes, elem_id="mask")


def _former(studio: Studio) -> tuple[gr.HTML, gr.HTML]:
    with gr.Accordion("Settings of a former result", open=False, elem_id="formers"):
        former = picture_picker(
            label="A former result",
            hint="Drop a result here to get its settings back",
            most=1,
            limits=studio.limits,
            elem_id="former",
        )
        return former, gr.HTML(drawing.status(""), js_on_load=None, elem_id="former-said")


# ---- what happens ---------------------------------------------------------------------------------------


class _Painting:
    """A job of a page, from the press of Paint to its result."""

    def __init__(
        self, studio: Studio, paint: gr.Button, stop: gr.Button, cancel: gr.Button, easel: gr.HTML, history: gr.HTML
    ) -> None:
        self._studio = studio
        self._paint, self._stop, self._cancel = paint, stop, cancel
        self._easel, self._history = easel, history
        self.outputs = [paint, stop, cancel, easel, history]

    async def run(self, request: gr.Request, *inputs: Any) -> AsyncIterator[Updates]:
        """Order what the page says, and show it until it has ended."""
        session = _session(request)
        try:
            job = await asyncio.to_thread(self._order, session, *inputs)
        except StylizeError as error:
            yield {self._easel: drawing.status(str(error), alert=True)}
            return
        try:
            yield self._buttons(painting=True)
            shown = ""
            while True:
                ended = job.ended  # first: what comes later is seen in the next round
                place = self._studio.queue.place(job)
                now = drawing.easel(job, place)
                if now != shown:
                    yield {self._easel: now}
                    shown = now
                if ended:
                    break
                await asyncio.sleep(LOOK_S)
            results = self._studio.store.results(session)
            yield self._buttons(painting=False) | {self._history: drawing.history(results)}
        finally:
            self._studio.queue.cancel(job, "The page was closed.")  # nothing, if it has ended

    def stop(self, request: gr.Request) -> None:
        """Keep the best picture so far."""
        for job in self._studio.queue.find(_session(request)):
            self._studio.queue.stop(job)

    def cancel(self, request: gr.Request) -> None:
        """Keep nothing."""
        for job in self._studio.queue.find(_session(request)):
            self._studio.queue.cancel(job)

    def pick(self, event: gr.EventData, request: gr.Request) -> str:
        """Show a former result of this session."""
        found = [each for each in self._studio.store.results(_session(request)) if each.key == event.key]
        if not found:
            return drawing.status("This result is no longer here. Paint it again.", alert=True)
        return f'{drawing.status("")}<div class="easel">{drawing.comparison(found[0])}</div>'

    def _order(
        self, session: str, content: Any, styles: Any, masks: Any, base: Mapping[str, Any], *values: Any
    ) -> Job:
        wanted = dict(zip([each.name for each in fields(Choices)], values, strict=True))
        wanted["style_weights"] = choices.parse_shares(wanted["style_weights"] or "")
        wanted |= {name: wanted[name] or None for name in ("iterations", "time_budget_s")}
        wanted["size"] = _whole(wanted["size"])
        settings = Choices(**wanted).applied_to(Settings.from_sources(base))
        keys = _keys(content)
        return self._studio.order(session, keys[0] if keys else "", _keys(styles), settings, _layers(masks))

    def _buttons(self, *, painting: bool) -> Updates:
        return {
            self._paint: gr.Button(interactive=not painting),
            self._stop: gr.Button(interactive=painting),
            self._cancel: gr.Button(interactive=painting),
        }


def _choosing_preset(studio: Studio, controls: Controls, base: gr.State) -> Callable[[str], Updates]:
    def choose(name: str) -> Updates:
        return _showing(choices.preset(name, studio.limits), controls, base)

    return choose


def _reading_former(
    studio: Studio, controls: Controls, base: gr.State, said: gr.HTML
) -> Callable[[Any, gr.Request], Updates]:
    def read(former: Any, request: gr.Request) -> Updates:
        keys = _keys(former)
        if not keys:
            return {said: drawing.status("")}
        try:
            path = studio.store.picture(keys[0], _session(request)).path
            with naming_only(path):
                settings, changed = choices.former_settings(images.read_settings(path), studio.limits)
        except StylizeError as error:
            return {said: drawing.status(str(error), alert=True)}
        but = f", but {'; '.join(changed)}" if changed else ""
        return _showing(settings, controls, base) | {said: drawing.status(f"Its settings are set above{but}.")}

    return read


def _showing(settings: Settings, controls: Controls, base: gr.State) -> Updates:
    """The controls as these settings have them."""
    shown: dict[str, Any] = vars(Choices.of(settings)) | {
        "iterations": settings.iterations or 0,
        "time_budget_s": settings.time_budget_s or 0,
        "style_weights": choices.written_shares(settings.style_weights),
    }
    return {controls[name]: value for name, value in shown.items()} | {base: settings.as_dict()}


def _showing_photo(studio: Studio) -> Callable[[Any, Any, Any, gr.Request], dict[str, Any]]:
    def show(content: Any, styles: Any, masks: Any, request: gr.Request) -> dict[str, Any]:
        """The mask painter with the photograph under it; what was painted on another one goes."""
        studio.claim(_session(request), [*_keys(content), *_keys(styles)])
        photo = (_keys(content) or [""])[0]
        layers = _layers(masks) if isinstance(masks, dict) and masks.get("photo") == photo else {}
        return {"photo": photo, "styles": len(_keys(styles)), "layers": layers}

    return show


def _claiming(studio: Studio) -> Callable[[Any, gr.Request], None]:
    def claim(masks: Any, request: gr.Request) -> None:
        studio.claim(_session(request), [*_layers(masks).values()])

    return claim


def _leaving(studio: Studio) -> Callable[[gr.Request], None]:
    def leave(request: gr.Request) -> None:
        studio.leave(_session(request))

    return leave


def _session(request: gr.Request) -> str:
    return str(request.session_hash or "")


def _keys(picked: Any) -> list[str]:
    """The keys of a picker's value, whatever a visitor sent in its place."""
    entries = picked if isinstance(picked, list) else []
    return [each["key"] for each in entries if isinstance(each, dict) and isinstance(each.get("key"), str)]


def _layers(masks: Any) -> dict[str, str]:
    """The masks that were painted, {purpose: key}, whatever a visitor sent in their place."""
    layers = masks.get("layers") if isinstance(masks, dict) else None
    entries = layers.items() if isinstance(layers, dict) else []
    return {str(purpose): key for purpose, key in entries if isinstance(key, str)}


def _whole(value: Any) -> Any:
    """Sliders say 512 as 512.0 now and then."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
