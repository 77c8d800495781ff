"""The server: the page, the routes for pictures and results, and the guard around them all."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fastapi
import gradio as gr
import uvicorn
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from stylize.errors import OutputError, StylizeError
from stylize.nst.device import choose_device
from stylize.web.components import static
from stylize.web.guard import Access, Guard, choose_access
from stylize.web.limits import Limits
from stylize.web.page import build_page
from stylize.web.painter import Painter
from stylize.web.store import FORMATS, THUMBNAIL
from stylize.web.studio import Studio

GOODBYE_S = 3  # that open connections are given when the server ends
MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg", "tiff": "image/tiff"}


def serve(
    *,
    host: str,
    port: int,
    auth: str | None,
    token: str | None,
    devices: Sequence[str],
    limits: Limits,
    folder: Path,
    tell: Callable[[str], None],
) -> None:
    """Serve the page until the process is told to end.

    Args:
        host: the address to listen on; other than loopback it needs `auth` or `token`.
        port: 0 takes a free one.
        auth: "user:password".
        token: that stands in the page's address; "auto" has one made.
        devices: one job at a time is painted on each.
        limits: for every visitor.
        folder: an empty one, for pictures and results; remove it afterwards.
        tell: is given the page's address once it can be opened.

    Raises:
        RefusedError: when others could come in without being asked, or the address cannot be had.
    """
    access = choose_access(host, auth, token)
    for device in devices:
        choose_device(device)  # refuses one that is not there
    with _listening(host, port) as listener:
        studio = Studio([Painter(device, limits.pixels) for device in devices], limits, folder)
        try:
            server = Server(make_app(studio, access))
            tell(_address(host, listener.getsockname()[1], access))
            with _ending_as_ctrl_c(), contextlib.suppress(KeyboardInterrupt):
                server.run([listener])
        finally:
            studio.close()


class Server(uvicorn.Server):
    """Serves one application over HTTP; ends the pages' open streams before it waits for them."""

    def __init__(self, app: Guard, *, host: str = "127.0.0.1", port: int = 0) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level=logging.WARNING,
            lifespan="on",
            timeout_graceful_shutdown=GOODBYE_S,
            server_header=False,
            ws="none",
        )
        super().__init__(config)
        self._guard = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What uvicorn does, once the streams have ended."""
        self._guard.close()
        await super().shutdown(sockets)


def make_app(studio: Studio, access: Access) -> Guard:
    """The whole application, as ASGI."""
    app = fastapi.FastAPI(openapi_url=None)
    _add_routes(app, studio)
    page = build_page(studio)
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        footer_links=[],
        run_history=False,
        max_file_size=0,  # nothing is sent through Gradio
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=_theme(),
        css=static("page.css"),
    )
    page.has_launched = True  # else a mounted page copies any file of this machine that a visitor names
    return Guard(app, access, studio.limits)


def _theme() -> gr.themes.Base:
    """Calm, with the machine's own fonts, and with enough contrast to be read (WCAG 2.2, 1.4.3)."""
    theme = gr.themes.Default(
        primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    return theme.set(
        body_text_color_subdued="#5b616b",
        body_text_color_subdued_dark="#a6adb8",
        block_info_text_color="#5b616b",
        block_info_text_color_dark="#a6adb8",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        slider_color="*primary_600",
    )


def _add_routes(app: fastapi.FastAPI, studio: Studio) -> None:
    @app.post("/pictures")
    async def send(request: Request, name: str = "picture") -> Response:
        kept = await run_in_threadpool(studio.store.receive, await request.body(), name)
        width, height = kept.size
        return JSONResponse({"key": kept.key, "name": kept.name, "width": width, "height": height})

    @app.get("/pictures/{key}")
    def preview(key: str) -> Response:
        return _jpeg(studio.store.preview(key))

    @app.get("/pictures/{key}/thumbnail")
    def thumbnail(key: str) -> Response:
        return _jpeg(studio.store.preview(key, THUMBNAIL))

    @app.get("/results/{key}/{kind}")
    def result(key: str, kind: str) -> Response:
        painted = studio.store.result(key)
        if kind == "thumbnail":
            return _jpeg(studio.store.thumbnail(painted))
        if kind not in FORMATS:
            return PlainTextResponse("There is no such format.", status_code=404)
        return FileResponse(painted.path(kind), media_type=MEDIA_TYPES[kind], headers={"cache-control": "no-store"})

    @app.exception_handler(StylizeError)
    async def refuse(request: Request, error: StylizeError) -> Response:
        return PlainTextResponse(str(error), status_code=400 if request.method == "POST" else 404)


def _jpeg(data: bytes) -> Response:
    return Response(data, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OutputError(
            f"The page cannot be served on {host}, port {port}: {error.strerror or error}. Choose another --port."
        ) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _ending_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal end the server as Ctrl-C does, so that its folder is removed."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    in_main_thread = threading.current_thread() is threading.main_thread()  # only there signals can be set
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in names if in_main_thread}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _address(host: str, port: int, access: Access) -> str:
    """What to type into a browser."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={access.token}" if access.token else "")
