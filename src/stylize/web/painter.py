"""From an order to a result: the program's own `Stylizer`, one network at a time."""

from __future__ import annotations

from stylize.api import Result, Stylizer
from stylize.events import Listener
from stylize.web.jobs import Order


class Painter:
    """Paints orders on one device; keeps the network for the next order with the same settings."""

    def __init__(self, device: str, max_pixels: int) -> None:
        self._device = device
        self._max_pixels = max_pixels
        self._stylizer: Stylizer | None = None

    def __call__(self, order: Order, listen: Listener) -> Result:
        """Paint; errors and result are those of `stylize.api.Stylizer`."""
        settings = order.settings.replace(device=self._device)
        if self._stylizer is None or self._stylizer.settings != settings:
            self._stylizer = None  # let go of the old network before the next is loaded
            self._stylizer = Stylizer(settings)
        return self._stylizer(
            order.content,
            order.styles,
            on_event=listen,
            snapshot_every=1,  # cheap; the page shows one of them a second
            max_pixels=self._max_pixels,
            **dict(order.more),
        )
