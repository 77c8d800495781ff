"""What programs may call besides the page: /paint, /stop and /cancel, for gradio_client and plain HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
from gradio.events import api

from stylize.errors import StylizeError
from stylize.web.choices import visitors_settings
from stylize.web.drawing import headline
from stylize.web.jobs import Job
from stylize.web.store import FORMATS
from stylize.web.studio import Studio

LOOK_S = 0.5  # between two looks at a job


def add_endpoints(studio: Studio) -> None:
    """Add them to the page that is being built."""

    async def paint(
        content: str, styles: list[str], settings: dict[str, Any], request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Paint; pictures are named by the keys that POST /pictures answers with. Yields the job as it stands."""
        session = str(request.session_hash or "")
        job = await asyncio.to_thread(_order, studio, session, content, styles, settings)
        try:
            while True:
                ended = job.ended
                yield describe(job, studio.queue.place(job))
                if ended:
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            studio.queue.cancel(job, "The client is gone.")  # nothing, if it has ended

    def stop(key: str, request: gr.Request) -> int:
        """End jobs of this session with the best picture so far: one by its key, or all. Returns how many."""
        jobs = studio.queue.find(str(request.session_hash or ""), key)
        for job in jobs:
            studio.queue.stop(job)
        return len(jobs)

    def cancel(key: str, request: gr.Request) -> int:
        """End jobs of this session and keep nothing: one by its key, or all. Returns how many."""
        jobs = studio.queue.find(str(request.session_hash or ""), key)
        for job in jobs:
            studio.queue.cancel(job)
        return len(jobs)

    api(paint, api_name="paint", concurrency_limit=None)
    api(stop, api_name="stop", concurrency_limit=None)
    api(cancel, api_name="cancel", concurrency_limit=None)


def describe(job: Job, place: int) -> dict[str, Any]:
    """A job as it stands, ready for JSON; the addresses in "files" are relative to the server's own."""
    view = job.observer.view()
    painted = job.painted
    evaluation, loss = view.curve[-1] if view.curve else (0, None)
    return {
        "job": job.key,
        "phase": job.phase,
        "message": headline(job, place),
        "place": place,
        "evaluation": evaluation,
        "evaluations": view.evaluations,
        "loss": loss,
        "seconds_left": view.left_s,
        "files": {} if painted is None else {each: f"results/{painted.key}/{each}" for each in FORMATS},
    }


def _order(
    studio: Studio, session: str, content: Any, styles: Any, settings: Any
) -> Job:
    named = isinstance(content, str) and isinstance(styles, list) and all(isinstance(each, str) for each in styles)
    if not named or not isinstance(settings, dict):
        raise gr.Error("Name pictures by their keys, and give settings as {name: value}.", print_exception=False)
    try:
        return studio.order(session, content, styles, visitors_settings(settings)[0])
    except StylizeError as error:
        raise gr.Error(str(error), print_exception=False) from error
