"""L-BFGS for pictures: one evaluation a step, measured steps, a memory that is never fed garbage.

The direction is the two-loop recursion of Nocedal (1980), carried out on coefficients instead of vectors
(Chen, Wang and Zhou 2014, "Large-scale L-BFGS using MapReduce"): every vector in it is a combination of the
stored steps, gradient differences and the gradient, so that one matrix product gives all the inner products
and another one the step. On a picture there is no line search: a step of length 1 is almost always good, and
one that is not is taken back.

Differences from torch.optim.LBFGS: the first step has a length that the caller names in its own units, not
1/|g|₁; the step that is remembered is the one that was made, after any projection; curvature is judged
relative to the vectors' lengths; the history is stored once, in one block; there is one device
synchronisation an iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Tensor]


@dataclass
class Counters:
    """What the optimiser had to do beyond its plain steps."""

    dropped_pairs: int = 0  # curvature pairs refused: a clipped gradient, or no positive curvature
    rejected_steps: int = 0  # steps taken back because the loss rose badly
    restarts: int = 0  # returns to the best point with an empty memory


class Lbfgs(Optimizer):
    """L-BFGS on one parameter tensor; `step(closure)` evaluates once and moves once.

    The caller may change the parameter between two steps, to project it onto bounds say: the step that is
    remembered is the one that was made in all.

    Args:
        params: exactly one contiguous floating point tensor.
        first_step: RMS length of the first step, in the parameter's units.
        history: curvature pairs remembered.
        history_dtype: of the stored pairs; None = the parameter's. bfloat16 halves the memory.
        max_rise: a step after which the loss has risen by more than this share is taken back and shortened.
        min_curvature: a pair is refused below this cosine between step and gradient difference.

    Raises:
        ValueError: for other parameters or numbers.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        first_step: float,
        history: int = 20,
        history_dtype: torch.dtype | None = None,
        max_rise: float = 0.5,
        min_curvature: float = 1e-6,
    ) -> None:
        params = list(params)
        if len(params) != 1 or not params[0].is_floating_point() or not params[0].is_contiguous():
            raise ValueError("Lbfgs takes exactly one contiguous floating point tensor.")
        if history < 1:
            raise ValueError(f"history is {history}; L-BFGS needs at least 1 pair.")
        if not first_step > 0:
            raise ValueError(f"first_step is {first_step}; it must be above 0.")
        super().__init__(params, {})
        self.first_step = first_step
        self.history = history
        self.max_rise = max_rise
        self.min_curvature = min_curvature
        self.counters = Counters()
        self.loss = math.inf  # at the last accepted point
        self.step_rms = 0.0  # RMS of the last measured step
        self.fetched: list[float] = []  # the last closure's numbers, on the host
        self._parameter = params[0]
        n = self._parameter.numel()
        dtype = history_dtype or self._parameter.dtype
        slots = history + 1  # one is always free for the pair that is being judged
        # Rows: `slots` steps, `slots` gradient differences, the gradient.
        self._vectors = torch.zeros(2 * slots + 1, n, dtype=dtype, device=self._parameter.device)
        self._products = torch.zeros(2 * slots + 1, 2 * slots + 1, dtype=torch.float64)  # of the rows, on the host
        self._slots = slots
        self._order: list[int] = []  # slots in use, oldest first
        self._previous = torch.empty_like(self._flat)  # the last accepted point
        self._gradient = torch.empty_like(self._flat)  # the gradient there
        self._best = self._flat.clone()  # the point of the lowest loss
        self._best_loss = math.inf
        self._trusted = False  # is `_gradient` the gradient of the loss at `_previous`?
        self._shorten = 1.0  # after steps that were taken back
        self._restarting = 1.0  # after non-finite values

    @property
    def _flat(self) -> Tensor:
        return self._parameter.detach().view(-1)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure, trusted: Callable[[Sequence[float]], bool] | None = None
    ) -> Tensor:
        """Evaluate the closure at the present point, learn from it, and move on.

        Args:
            closure: clears the gradient, computes the loss, calls backward, and returns the loss: a scalar, or
                a vector that begins with it, whose other numbers are fetched with the optimiser's own.
            trusted: asked with those numbers: is the gradient that of the loss (not clipped)? If not, the
                pairs that it takes part in are dropped.

        Returns:
            what the closure returned, at the point before the move; on the host it is `fetched`.
        """
        with torch.enable_grad():
            numbers = closure()
        if self._parameter.grad is None:
            raise ValueError("The closure left no gradient.")
        gradient = self._parameter.grad.detach().view(-1)
        has_pair = math.isfinite(self.loss)
        self._measure(numbers, gradient, has_pair)
        value = self.fetched[0]
        is_trusted = trusted is None or trusted(self.fetched)
        if not math.isfinite(value + float(self._products[-1, -1])):
            self._restart()
            return numbers
        if has_pair:
            self._judge_pair(is_trusted)
        if value < self._best_loss:
            self._best_loss = value
            self._best.copy_(self._flat)
        if has_pair and value > self.loss + self.max_rise * abs(self.loss):
            self._take_back()
        else:
            self._accept(value, gradient, is_trusted)
        self._move()
        return numbers

    def reset(self) -> None:
        """Forget all pairs: the next step is a first step."""
        self._order.clear()

    def _measure(self, numbers: Tensor, gradient: Tensor, has_pair: bool) -> None:
        """Store the pair under judgement and the gradient; fetch the closure's numbers and all new products."""
        s = self._free_slot()
        y = self._slots + s
        if has_pair:
            torch.sub(self._flat, self._previous, out=self._vectors[s])
            torch.sub(gradient, self._gradient, out=self._vectors[y])
        self._vectors[-1].copy_(gradient)
        rows = [s, y, len(self._vectors) - 1]
        products = _products(self._vectors, self._vectors[rows])  # [2·slots + 1, 3]
        numbers = numbers.detach().view(-1).to(products.dtype)
        fetched = torch.cat([products.flatten(), numbers]).tolist()  # the one synchronisation
        self.fetched = fetched[products.numel() :]
        table = torch.tensor(fetched[: products.numel()], dtype=torch.float64).view(-1, 3)
        self._products[:, rows] = table
        self._products[rows, :] = table.t()

    def _free_slot(self) -> int:
        return next(slot for slot in range(self._slots) if slot not in self._order)

    def _judge_pair(self, trusted: bool) -> None:
        """Keep the pair in the free slot if it tells of positive curvature; make room for the next."""
        free = self._free_slot()
        y = self._slots + free
        step_square, difference_square = float(self._products[free, free]), float(self._products[y, y])
        self.step_rms = math.sqrt(step_square / self._flat.numel())
        curvature = float(self._products[free, y])
        useful = curvature > self.min_curvature * math.sqrt(step_square * difference_square)
        if not (trusted and self._trusted and useful):
            self.counters.dropped_pairs += 1
            return
        self._order.append(free)
        if len(self._order) > self.history:
            self._order.pop(0)

    def _accept(self, value: float, gradient: Tensor, trusted: bool) -> None:
        self.loss = value
        self._previous.copy_(self._flat)
        self._gradient.copy_(gradient)
        self._trusted = trusted
        self._shorten = min(1.0, self._shorten * 2)

    def _take_back(self) -> None:
        """Return to the last accepted point; the next step from there is shorter."""
        self.counters.rejected_steps += 1
        self._shorten *= 0.25
        self._flat.copy_(self._previous)
        self._vectors[-1].copy_(self._gradient)
        products = _products(self._vectors, self._vectors[-1:]).flatten().double().cpu()
        self._products[-1, :] = self._products[:, -1] = products

    def _restart(self) -> None:
        """Return to the best point with an empty memory; each time with half the first step."""
        self.counters.restarts += 1
        self._restarting *= 0.5
        self._flat.copy_(self._best)
        self._vectors.zero_()  # a coefficient of 0 would not silence a row that is not finite
        self.loss = math.inf
        self.reset()

    def _move(self) -> None:
        coefficients, slope = self._direction()
        if slope >= 0 and self._order:  # the memory lies: steepest descent instead
            self.reset()
            coefficients, slope = self._direction()
        self._flat.add_((coefficients * self._shorten).to(self._vectors) @ self._vectors)

    def _direction(self) -> tuple[Tensor, float]:
        """The step as coefficients of the stored vectors [2·slots + 1], and its slope along the gradient."""
        products = self._products
        coefficients = torch.zeros(len(products), dtype=torch.float64)
        coefficients[-1] = -1.0  # minus the gradient
        alphas: dict[int, float] = {}
        for s in reversed(self._order):
            y = self._slots + s
            alphas[s] = float(products[s] @ coefficients / products[s, y])
            coefficients[y] -= alphas[s]
        coefficients *= self._initial_scale()
        for s in self._order:
            y = self._slots + s
            beta = float(products[y] @ coefficients / products[s, y])
            coefficients[s] += alphas[s] - beta
        return coefficients, float(products[-1] @ coefficients)

    def _initial_scale(self) -> float:
        """γ of H₀ = γ·I: from the newest pair (Nocedal and Wright 2006, equation 7.20), or the first step."""
        if self._order:
            s = self._order[-1]
            y = self._slots + s
            return float(self._products[s, y] / self._products[y, y])
        norm = math.sqrt(float(self._products[-1, -1]))
        wanted = self.first_step * self._restarting * math.sqrt(self._flat.numel())
        return wanted / norm if norm > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Not offered: the memory belongs to one picture at one size."""
        raise NotImplementedError("Lbfgs keeps no state that outlives its picture.")


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """Inner products [R, K] of rows [R, n] and columns [K, n], summed in at least float32."""
    if rows.dtype in (torch.float32, torch.float64):
        return rows @ columns.t()
    run = 4096  # values whose 16-bit product is rounded to 16 bits once
    n = rows.shape[1] - rows.shape[1] % run
    left, right = (part[:, :n].unflatten(1, (-1, run)).transpose(0, 1) for part in (rows, columns))
    total = torch.bmm(left, right.transpose(1, 2)).float().sum(0)
    return total + (rows[:, n:].float() @ columns[:, n:].float().t())
