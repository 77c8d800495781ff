"""Several processes that paint one picture together: each looks at its own tiles, and they add up what they saw.

What is added is small (means, Gram matrices, errors) but for the picture's gradient. Everything else, the optimiser
above all, each process does for itself with the same numbers, so that all of them hold the same picture at every
step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stylize.errors import RefusedError, RunError, SettingsError


class Sized(Protocol):
    """Work that is dealt out by its pixels."""

    @property
    def pixels(self) -> int:
        """How much it is."""


Work = TypeVar("Work", bound=Sized)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as one of them sees them; by default there is no other."""

    rank: int = 0
    count: int = 1
    on_this_machine: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """Those of the process group that torch.distributed has, if any."""
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        count = dist.get_world_size()
        return cls(dist.get_rank(), count, int(os.environ.get("LOCAL_WORLD_SIZE", count)))

    @property
    def is_first(self) -> bool:
        """Is this the one that speaks, and writes files?"""
        return self.rank == 0

    def deal(self, work: Sequence[Work]) -> list[Work]:
        """This process's share: the largest pieces first, each to the one that has least so far."""
        return self.dealt(work)[self.rank]

    def dealt(self, work: Sequence[Work]) -> list[list[Work]]:
        """The shares of all."""
        shares: list[list[Work]] = [[] for _ in range(self.count)]
        for piece in sorted(work, key=lambda each: -each.pixels):
            min(shares, key=pixels_of).append(piece)
        return shares

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            _asked(lambda: dist.all_reduce(tensor))
        return tensor

    def follow(self, tensor: Tensor) -> Tensor:
        """The first process's tensor for all, in place."""
        if self.count > 1:
            _asked(lambda: dist.broadcast(tensor, src=0))
        return tensor

    @contextlib.contextmanager
    def checked_by_first(self) -> Iterator[None]:
        """What the first process refuses in this block, the others refuse as well, when they come to its end.

        Raises:
            RefusedError: in the others.
        """
        refused = 1
        try:
            yield
            refused = 0
        finally:
            refused = self.follow_number(refused)
        if refused:
            raise RefusedError("The first process of this run has refused it.")

    def follow_number(self, number: int) -> int:
        """The first process's whole number for all: two clocks never agree, nor do two readings of free memory."""
        if self.count == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return int(self.follow(torch.tensor(number, device=device)))


ALONE = Ranks()


def pixels_of(work: Sequence[Sized]) -> int:
    """Of all the pieces."""
    return sum(piece.pixels for piece in work)


def _asked(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise RunError(
            "Another process of this run is gone. Start the run again; with --checkpoint the same command goes on "
            "from where it was."
        ) from error


def is_started_by_torchrun() -> bool:
    """Is this process one of several that torchrun has started?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the others that torchrun has started: gloo between processors, nccl between CUDA devices.

    Args:
        device: the setting; on CUDA each process of a machine takes the card of its own number.

    Raises:
        SettingsError: when torchrun has not started this, or for a device that several processes cannot share.
    """
    if not is_started_by_torchrun():
        raise SettingsError("There are no other processes to join: start the program with torchrun.")
    on_cards = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_cards:
        card = int(os.environ.get("LOCAL_RANK", "0"))
        if card >= torch.cuda.device_count():
            raise SettingsError(
                f"There are more processes than the {torch.cuda.device_count()} CUDA devices of this machine; "
                "start as many as there are cards."
            )
        torch.cuda.set_device(card)
    elif device not in ("auto", "cpu"):
        raise SettingsError(f"Several processes cannot share device {device!r}; use auto, cpu or cuda.")
    dist.init_process_group("nccl" if on_cards else "gloo")
    try:
        yield Ranks.here()
    finally:
        dist.destroy_process_group()
