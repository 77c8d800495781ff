"""What stands behind the page: the store, the queue and the limits; from a visitor's order to a job."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stylize.api import Result
from stylize.errors import PictureError, SaveError, SettingsError
from stylize.regions import Region
from stylize.settings import Settings
from stylize.web.jobs import ABANDONED_S, Job, Order, Paint, Queue
from stylize.web.limits import Limits, check_order
from stylize.web.store import Painted, Store, gallery_paths

logger = logging.getLogger(__name__)
SWEEP_S = 60.0  # between two looks for pictures that nobody uses
KEEP = "keep"  # the purpose of a mask where the photograph stays; other masks have the number of a style


class Studio:
    """Takes orders, has them painted, and keeps what comes out until its session ends.

    Args:
        painters: one for each device.
        limits: for every visitor.
        folder: an empty one, for pictures and results.
        abandoned_s: seconds after which a job ends that nobody looks at.
    """

    def __init__(
        self, painters: Sequence[Paint], limits: Limits, folder: Path, *, abandoned_s: float = ABANDONED_S
    ) -> None:
        self.limits = limits
        self.contents, self.styles = gallery_paths("content"), gallery_paths("style")
        self.store = Store(folder, limits, [*self.contents, *self.styles])
        self.queue = Queue(painters, self, limits, abandoned_s=abandoned_s)
        self._closed = threading.Event()
        threading.Thread(target=self._sweep, name="stylize-sweeper", daemon=True).start()

    def order(
        self,
        session: str,
        content: str,
        styles: Sequence[str],
        settings: Settings,
        masks: Mapping[str, str] | None = None,
    ) -> Job:
        """Put an order into the queue; pictures and masks are named by their keys.

        Raises:
            StylizeError: when it cannot be painted as asked; nothing is computed then.
        """
        if not content:
            raise SettingsError("There is no photograph yet. Drop one, or pick one from the row below.")
        if not styles:
            raise SettingsError("There is no painting yet. Drop one, or pick one from the row below.")
        check_order(settings, len(styles), self.limits)
        photograph = self.store.picture(content, session)
        paintings = [self.store.picture(key, session) for key in styles]
        painted = {purpose: self.store.picture(key, session).path for purpose, key in (masks or {}).items()}
        paths = tuple(each.path for each in paintings)
        order = Order(photograph.path, paths, settings, inputs=(photograph.path, *paths, *painted.values()))
        if painted:
            order = divided(order, painted, len(paintings))
        caption = f"{photograph.path.stem} in the manner of {' + '.join(each.path.stem for each in paintings)}"
        job = Job(session, order, content, caption)
        self.queue.submit(job)
        return job

    def claim(self, session: str, keys: Iterable[str]) -> None:
        """Know whose these pictures are, so that they go with their session."""
        for key in keys:
            with contextlib.suppress(PictureError):  # gone; that is said when it is used
                self.store.picture(key, session)

    def leave(self, session: str) -> None:
        """A session is over: its jobs end, its pictures go."""
        self.queue.drop(session)
        self.store.drop(session)

    def close(self) -> None:
        """End everything; what is in the folder may then be removed."""
        self._closed.set()
        self.queue.close()

    def keep(self, job: Job, result: Result) -> Painted:
        """Save a result for the session that ordered it.

        Raises:
            SaveError: when it cannot be written; the text does not tell where.
        """
        stem = "_".join([job.order.content.stem, *(style.stem for style in job.order.styles)])
        try:
            return self.store.keep(
                result, owner=job.session, content=job.content_key, stem=stem, caption=job.caption
            )
        except (SaveError, OSError) as error:
            logger.error("A result could not be saved: %s", error)
            raise SaveError("The result could not be saved: the server may lack room. Try again later.") from error

    def forget(self, painted: Painted) -> None:
        """Remove a result that nobody wants any more."""
        self.store.forget(painted)

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_S):
            self.store.sweep()


def mask_purposes(styles: int) -> list[str]:
    """What masks can be painted for with so many styles at most."""
    return [KEEP, *(str(number) for number in range(1, styles + 1))]


def divided(order: Order, masks: Mapping[str, Path], styles: int) -> Order:
    """The same order with its painted masks: where the photograph stays, and where alone a style goes.

    Styles without a mask paint what is left over; where nothing is left to paint it, the photograph stays.

    Raises:
        SettingsError: for a mask of a style that was taken away.
    """
    unknown = sorted(set(masks) - set(mask_purposes(styles)))
    if unknown:
        raise SettingsError(f"A mask was painted for style {unknown[0]}, which is not there. Clear the masks.")
    more: dict[str, Any] = {"protect": masks[KEEP]} if KEEP in masks else {}
    more["regions"] = [
        Region(masks[str(number)], style) for number, style in enumerate(order.styles, 1) if str(number) in masks
    ]
    free = [number for number in range(1, styles + 1) if str(number) not in masks]
    weights = order.settings.style_weights
    if weights is not None and len(weights) == styles:
        left = tuple(weights[number - 1] for number in free)
        order = replace(order, settings=order.settings.replace(style_weights=left or None))
    return replace(order, styles=tuple(order.styles[number - 1] for number in free), more=tuple(more.items()))
