"""L-BFGS for pictures: one evaluation a step, measured steps, a memory that is never fed garbage.

The direction is the two-loop recursion of Nocedal (1980), carried out on coefficients instead of vectors
(Chen, Wang and Zhou 2014, "Large-scale L-BFGS using MapReduce"): every vector in it is a combination of the
stored steps, gradient differences and the gradient, so that one reading of the block gives all the inner
products and another one the step. On a picture there is no line search: a step of length 1 is almost always
good, and one that is not is taken back.

For n variables there are 2·history·n numbers of the memory and 2·n of the last accepted point and its gradient.
Both readings go through the vectors piece by piece, so that nothing else as long as the variables is made.

Differences from torch.optim.LBFGS: the first step has a length that the caller names in its own units, not
1/|g|₁; the step that is remembered is the one that was made, after any projection; curvature is judged
relative to the vectors' lengths; the history is stored once, in one block; there is one device
synchronisation an iteration; the state can be saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from stylize.nst.state import check_like

Closure = Callable[[], Tensor]

# Values of each vector that are worked on at a time: what is made of them, rows in float32 that are kept in 16 bits
# most of all, is small beside the rows. Each piece is cut into runs, which one batched product takes together: on
# two cores that is twice as fast as products with one vector after the other, and sums of one run lose nothing.
RUN = 1 << 15
PIECE = 16 * RUN


@dataclass
class Counters:
    """What the optimiser had to do beyond its plain steps."""

    dropped_pairs: int = 0  # curvature pairs refused: a clipped gradient, or no positive curvature
    rejected_steps: int = 0  # steps taken back because the loss rose badly
    restarts: int = 0  # returns to the best point with an empty memory


class Lbfgs:
    """L-BFGS on one parameter tensor; `step(closure)` evaluates once and moves once.

    It is no torch.optim.Optimizer, whose first instance loads torch's compiler: a second for every process.

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
        self.first_step = first_step
        self.history = history
        self.max_rise = max_rise
        self.min_curvature = min_curvature
        self.counters = Counters()
        self.loss = math.inf  # at the last accepted point
        self.step_rms = 0.0  # RMS of the last measured step
        self.fetched: list[float] = []  # the last closure's numbers, on the host
        self._parameter = params[0]
        # Slot k has a step in row 2·k and its gradient difference in row 2·k + 1.
        shape = (2 * history, self._parameter.numel())
        self._rows = torch.zeros(shape, dtype=history_dtype or self._flat.dtype, device=self._flat.device)
        # Their inner products, and those with the gradient, which comes last; on the host.
        self._products = torch.zeros(2 * history + 1, 2 * history + 1, dtype=torch.float64)
        self._order: list[int] = []  # slots in use, oldest first: always the first ones of all
        self._previous = torch.zeros_like(self._flat)  # the last accepted point
        self._gradient = torch.zeros_like(self._flat)  # the gradient there
        self._best: Tensor | None = None  # the point of the lowest loss, when that is not `_previous`
        self._best_loss = math.inf
        self._trusted = False  # is `_gradient` the gradient of the loss at `_previous`?
        self._shorten = 1.0  # after steps that were taken back
        self._restarting = 1.0  # after non-finite values

    @property
    def _flat(self) -> Tensor:
        return self._parameter.detach().view(-1)

    @property
    def _used(self) -> Tensor:
        """The rows that hold pairs."""
        return self._rows[: 2 * len(self._order)]

    @torch.no_grad()
    def step(
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
        products = self._measure(numbers, gradient, has_pair)
        value = self.fetched[0]
        is_trusted = trusted is None or trusted(self.fetched)
        if not math.isfinite(value + float(products[-1, -1])):
            self._restart()
            return numbers
        self._enter(products, self._keep_pair(products, gradient, is_trusted) if has_pair else None)
        if has_pair and value > self.loss + self.max_rise * abs(self.loss):
            self._take_back()
        else:
            self._accept(value, gradient, is_trusted)
        self._move()
        return numbers

    def reset(self) -> None:
        """Forget all pairs: the next step is a first step."""
        self._order.clear()
        self._products[:-1] = self._products[:, :-1] = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything but the parameter itself, as numbers, lists and tensors, which are not copies."""
        return {
            "rows": self._used,
            "order": list(self._order),
            "products": self._products,
            "previous": self._previous,
            "gradient": self._gradient,
            "best": self._best,
            "counters": asdict(self.counters),
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; with the parameter as it then was, every step is the same bit for bit.

        Raises:
            ValueError: when it is the state of an optimiser of another size, history or dtype.
        """
        self.check_state_dict(state_dict)
        best = state_dict["best"]
        self._order = list(state_dict["order"])
        self._used.copy_(state_dict["rows"])
        self._products.copy_(state_dict["products"])
        self._previous.copy_(state_dict["previous"])
        self._gradient.copy_(state_dict["gradient"])
        self._best = None if best is None else best.to(self._previous, copy=True)
        self.counters = Counters(**state_dict["counters"])
        for name in _NUMBERS:
            setattr(self, name, state_dict[name])

    def check_state_dict(self, state_dict: Any) -> None:
        """Find out whether `load_state_dict` can take this; the parameter may be on the device "meta".

        Raises:
            ValueError: when it cannot.
        """
        what = f"L-BFGS of {self.history} pairs of {self._flat.numel()} values"
        check_like(state_dict, self.state_dict() | {"rows": None, "best": None}, what)
        order = state_dict["order"]
        if len(order) > self.history or not all(isinstance(slot, int) for slot in order):
            raise ValueError(f"its {what} has other pairs")
        if sorted(order) != list(range(len(order))):
            raise ValueError(f"its {what} has other pairs")
        check_like(state_dict["rows"], self._rows[: 2 * len(order)], what)
        if state_dict["best"] is not None:
            check_like(state_dict["best"], self._previous, what)

    def _measure(self, numbers: Tensor, gradient: Tensor, has_pair: bool) -> Tensor:
        """Fetch the closure's numbers, and the products of what is new with the stored rows and with itself.

        New are step, gradient difference and gradient, or the gradient alone.
        """
        pair = [(self._flat, self._previous), (gradient, self._gradient)] if has_pair else []
        products = self._inner_products([*pair, (gradient, None)])
        numbers = numbers.detach().view(-1).to(products.dtype)
        fetched = torch.cat([products.flatten(), numbers]).tolist()  # the one synchronisation
        self.fetched = fetched[products.numel() :]
        found = torch.tensor(fetched[: products.numel()], dtype=torch.float64).view(products.shape)
        if has_pair:  # rows · (g − g_previous), of which the table has the second half
            found[:-3, 1] = found[:-3, 2] - self._products[: len(found) - 3, -1]
        return found

    def _inner_products(self, vectors: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
        """Inner products [R + K, K] of the R rows in use, and of K vectors themselves, with the K vectors.

        Each of those is given as two, of which it is the difference, or as one. The rows' products with every
        second vector are left out, as zeros: a gradient difference has them from two gradients.
        """
        parts = []
        for piece in self._pieces():
            new = self._flat.new_empty(len(vectors), len(self._flat[piece]))
            for vector, (minuend, subtrahend) in zip(new, vectors, strict=True):
                if subtrahend is None:
                    vector.copy_(minuend[piece])
                else:
                    torch.sub(minuend[piece], subtrahend[piece], out=vector)
            runs, rows = _runs(new), _runs(self._used[:, piece].to(new.dtype))
            products = new.new_zeros(len(new), len(self._used) + len(new))
            torch.sum(torch.bmm(runs[:, ::2], rows.transpose(1, 2)), 0, out=products[::2, : len(self._used)])
            torch.sum(torch.bmm(runs, runs.transpose(1, 2)), 0, out=products[:, len(self._used) :])
            parts.append(products)
        return torch.stack(parts).sum(0).t()

    def _pieces(self) -> Iterator[slice]:
        """Whole runs, and what is left over as a piece of its own."""
        length = self._flat.numel()
        whole = length - length % RUN
        for start in range(0, whole, PIECE):
            yield slice(start, min(start + PIECE, whole))
        if whole < length:
            yield slice(whole, length)

    def _keep_pair(self, products: Tensor, gradient: Tensor, trusted: bool) -> int | None:
        """Store the new pair if it tells of positive curvature; its slot, or None when it is dropped."""
        step_square, difference_square = float(products[-3, 0]), float(products[-2, 1])
        self.step_rms = math.sqrt(step_square / self._flat.numel())
        useful = float(products[-3, 1]) > self.min_curvature * math.sqrt(step_square * difference_square)
        if not (trusted and self._trusted and useful):
            self.counters.dropped_pairs += 1
            return None
        slot = self._order.pop(0) if len(self._order) == self.history else len(self._order)
        self._order.append(slot)
        torch.sub(self._flat, self._previous, out=self._rows[2 * slot])
        torch.sub(gradient, self._gradient, out=self._rows[2 * slot + 1])
        return slot

    def _enter(self, products: Tensor, slot: int | None) -> None:
        """Note the products of the gradient, and of a pair that was kept, in the table."""
        new = products.shape[1]
        columns = torch.zeros(len(self._products), new, dtype=torch.float64)
        columns[: len(products) - new] = products[:-new]
        columns[-1] = products[-1]
        rows = [len(columns) - 1]
        if slot is not None:
            columns[2 * slot : 2 * slot + 2] = products[-3:-1]  # also where the oldest pair has made room
            rows = [2 * slot, 2 * slot + 1, *rows]
        self._products[rows] = columns[:, -len(rows) :].t()
        self._products[:, rows] = columns[:, -len(rows) :]

    def _accept(self, value: float, gradient: Tensor, trusted: bool) -> None:
        if value <= self._best_loss:
            self._best_loss, self._best = value, None
        elif self._best is None:  # the best point so far is the one that is about to be replaced
            self._best = self._previous.clone()
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
        products = self._inner_products([(self._gradient, None)])
        self._enter(products.cpu().double(), None)

    def _restart(self) -> None:
        """Return to the best point with an empty memory; each time with half the first step."""
        self.counters.restarts += 1
        self._restarting *= 0.5
        if math.isfinite(self._best_loss):  # else there was no step yet
            self._flat.copy_(self._previous if self._best is None else self._best)
        self.loss = math.inf
        self.reset()

    def _move(self) -> None:
        coefficients, slope = self._direction()
        if slope >= 0 and self._order:  # the memory lies: steepest descent instead
            self.reset()
            coefficients, slope = self._direction()
        coefficients *= self._shorten
        downhill = float(coefficients[-1])
        shares = coefficients[: len(self._used)].to(self._flat)
        for piece in self._pieces():
            point = self._flat[piece].add_(self._gradient[piece], alpha=downhill)
            runs = _runs(point.unsqueeze(0))
            runs.baddbmm_(shares.expand(len(runs), 1, -1), _runs(self._used[:, piece].to(point.dtype)))

    def _direction(self) -> tuple[Tensor, float]:
        """The step as coefficients [2·history + 1] of the rows and the gradient, and its slope."""
        products = self._products
        coefficients = torch.zeros(len(products), dtype=torch.float64)
        coefficients[-1] = -1.0  # minus the gradient
        alphas: dict[int, float] = {}
        for slot in reversed(self._order):
            s, y = 2 * slot, 2 * slot + 1
            alphas[s] = float(products[s] @ coefficients / products[s, y])
            coefficients[y] -= alphas[s]
        coefficients *= self._initial_scale()
        for slot in self._order:
            s, y = 2 * slot, 2 * slot + 1
            beta = float(products[y] @ coefficients / products[s, y])
            coefficients[s] += alphas[s] - beta
        return coefficients, float(products[-1] @ coefficients)

    def _initial_scale(self) -> float:
        """γ of H₀ = γ·I: from the newest pair (Nocedal and Wright 2006, equation 7.20), or the first step."""
        if self._order:
            s, y = 2 * self._order[-1], 2 * self._order[-1] + 1
            return float(self._products[s, y] / self._products[y, y])
        norm = math.sqrt(float(self._products[-1, -1]))
        wanted = self.first_step * self._restarting * math.sqrt(self._flat.numel())
        return wanted / norm if norm > 0 else 0.0


def _runs(vectors: Tensor) -> Tensor:
    """Vectors [K, n] by runs, as a view: [n / RUN, K, RUN], or a single shorter one."""
    runs: Tensor = vectors.unflatten(1, (-1, min(RUN, vectors.shape[1])))
    return runs.transpose(0, 1)


# What `state_dict` holds besides the vectors and the products.
_NUMBERS = ("loss", "step_rms", "_best_loss", "_trusted", "_shorten", "_restarting")
