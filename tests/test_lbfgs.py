"""lbfgs.py: the steps are L-BFGS's own, they have no unit, and nothing false enters the memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stylize.nst import lbfgs as module
from stylize.nst.lbfgs import Lbfgs
from stylize.nst.objective import Losses
from stylize.nst.optimize import Search
from stylize.settings import Settings

Function: TypeAlias = Callable[[Tensor], Tensor]

few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**31)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def quadratic(n: int, condition: float, seed: int = 0) -> Function:
    """½ xᵀ·A·x with eigenvalues from 1 to `condition` in random directions."""
    directions = torch.linalg.qr(randn(n, n, seed=seed)).Q
    matrix = directions @ torch.logspace(0, math.log10(condition), n, dtype=torch.float64).diag() @ directions.t()
    return lambda x: 0.5 * x @ matrix @ x


def rosenbrock(x: Tensor) -> Tensor:
    """Rosenbrock's valley in n dimensions; its minimum is 0, at (1, …, 1)."""
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


class Run:
    """An optimiser, its variable and the function that it minimises."""

    def __init__(
        self, function: Function, start: Tensor, project: Callable[[Tensor], object] | None = None, **options: Any
    ) -> None:
        self.function = function
        self.project = project  # what the caller does to the variable between two steps
        self.x = start.clone().requires_grad_()
        self.optimizer = Lbfgs([self.x], **{"first_step": 0.1, **options})

    def evaluate(self) -> Tensor:
        self.x.grad = None
        loss = self.function(self.x)
        loss.backward()
        return loss

    def step(self, trusted: Callable[[Sequence[float]], bool] | None = None) -> float:
        """Evaluate and move once; the loss before the move."""
        self.optimizer.step(self.evaluate, trusted)
        if self.project is not None:
            self.project(self.x.detach())
        return self.optimizer.fetched[0]

    def steps(self, count: int) -> tuple[list[float], list[Tensor]]:
        """The losses before each move, and the points after it."""
        losses, points = [], []
        for _ in range(count):
            losses.append(self.step())
            points.append(self.point)
        return losses, points

    @property
    def point(self) -> Tensor:
        return self.x.detach().clone()


def rms(vector: Tensor) -> float:
    return float(vector.square().mean().sqrt())


# L-BFGS itself


def two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Minus the inverse Hessian's estimate times the gradient: Nocedal and Wright 2006, algorithm 7.4."""
    q = gradient.clone()
    alphas = []
    for s, y in reversed(pairs):
        alpha = float(s @ q) / float(y @ s)
        alphas.append(alpha)
        q -= alpha * y
    r = scale * q
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        beta = float(y @ r) / float(y @ s)
        r += s * (alpha - beta)
    return -r


def textbook(
    function: Function, x: Tensor, count: int, first_step: float, history: int, min_cosine: float
) -> list[Tensor]:
    """The points of plain L-BFGS with steps of length 1, all of them accepted."""
    pairs: list[tuple[Tensor, Tensor]] = []
    points, previous = [], None
    for _ in range(count):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
        if previous is not None:
            s, y = x - previous[0], gradient - previous[1]
            if float(s @ y) > min_cosine * float(s.norm() * y.norm()):
                pairs = [*pairs, (s, y)][-history:]
        previous = x, gradient
        if pairs:
            s, y = pairs[-1]
            scale = float(s @ y) / float(y @ y)
        else:
            scale = first_step * math.sqrt(len(x)) / float(gradient.norm())
        x = x + two_loops(gradient, pairs, scale)
        points.append(x)
    return points


@few
@given(seed=seeds, n=st.integers(5, 50), condition=st.floats(1, 50), history=st.integers(1, 12))
def test_steps_are_the_textbooks_on_quadratics(seed: int, n: int, condition: float, history: int) -> None:
    function, start = quadratic(n, condition, seed), randn(n, seed=seed + 1)
    options: dict[str, Any] = {"first_step": 0.05, "history": history}
    _, points = Run(function, start, max_rise=math.inf, min_curvature=1e-8, **options).steps(12)
    for found, expected in zip(points, textbook(function, start, 12, 0.05, history, 1e-8), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8 * rms(start))


@pytest.mark.parametrize("history", [1, 3, 10])
def test_steps_are_the_textbooks_on_rosenbrock(history: int) -> None:
    start = torch.tensor([-1.2, 1.0, -0.5, 0.8], dtype=torch.float64)
    run = Run(rosenbrock, start, first_step=0.01, history=history, max_rise=math.inf, min_curvature=1e-8)
    _, points = run.steps(15)
    expected = textbook(rosenbrock, start, 15, 0.01, history, 1e-8)
    torch.testing.assert_close(torch.stack(points), torch.stack(expected), rtol=1e-8, atol=1e-8)


def test_ill_conditioned_quadratic_is_solved() -> None:
    losses, _ = Run(quadratic(30, 1e4), randn(30, seed=1)).steps(300)
    assert min(losses) < 1e-8 * losses[0]


def test_rosenbrock_is_solved() -> None:
    run = Run(rosenbrock, torch.tensor([-1.2, 1.0], dtype=torch.float64))
    losses, _ = run.steps(100)
    assert min(losses) < 1e-12
    torch.testing.assert_close(run.point, torch.ones(2, dtype=torch.float64))


@few
@given(seed=seeds, factor=st.floats(1e-9, 1e9))
def test_steps_do_not_depend_on_the_losses_unit(seed: int, factor: float) -> None:
    """Case 5: a loss of 1e12 is no reason to stop, nor one of 1e-9."""
    function, start = quadratic(10, 100, seed), randn(10, seed=seed + 1)
    _, plain = Run(function, start).steps(8)
    _, scaled = Run(lambda x: function(x) * factor, start).steps(8)
    torch.testing.assert_close(torch.stack(scaled), torch.stack(plain), rtol=1e-7, atol=1e-7 * rms(start))


@few
@given(n=st.integers(1, 200), length=st.floats(1e-3, 1e3))
def test_first_step_has_the_length_asked_for(n: int, length: float) -> None:
    start = randn(n)
    run = Run(quadratic(n, 10), start, first_step=length)
    run.step()
    assert rms(run.point - start) == pytest.approx(length, rel=1e-9)


def test_first_step_goes_down_the_gradient() -> None:
    start = randn(20)
    run = Run(quadratic(20, 10), start)
    run.step()
    assert run.x.grad is not None
    assert float(torch.cosine_similarity(run.point - start, -run.x.grad, dim=0)) == pytest.approx(1, rel=1e-12)


def test_at_a_minimum_nothing_moves() -> None:
    run = Run(quadratic(5, 10), torch.zeros(5, dtype=torch.float64))
    losses, _ = run.steps(5)
    assert losses == [0.0] * 5
    assert torch.equal(run.point, torch.zeros(5, dtype=torch.float64))


def test_torchs_compiler_is_not_loaded() -> None:
    """Which takes a second; the first of torch's own optimisers loads it."""
    code = (
        "import sys, torch; from stylize.nst.lbfgs import Lbfgs; x = torch.ones(3, requires_grad=True);"
        "optimizer = Lbfgs([x], first_step=0.1); optimizer.step(lambda: (x.square().sum().backward(), x[0])[1]);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The closure


def test_closure_is_called_once_a_step() -> None:
    plain = quadratic(5, 10)
    points: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        points.append(x.detach().clone())
        return plain(x)

    run = Run(function, randn(5))
    run.steps(10)
    assert len(points) == 10


def test_closure_runs_with_gradients_on() -> None:
    run = Run(quadratic(5, 10), randn(5))
    with torch.no_grad():
        run.step()  # its backward would raise
        assert not torch.is_grad_enabled()


def test_other_numbers_of_the_closure_are_fetched_with_the_loss() -> None:
    run = Run(quadratic(5, 10), randn(5))
    asked: list[list[float]] = []

    def closure() -> Tensor:
        loss = run.evaluate().detach()
        return torch.stack([loss, loss * 2, torch.tensor(7.0, dtype=loss.dtype)])

    def trusted(numbers: Sequence[float]) -> bool:
        asked.append(list(numbers))
        return True

    numbers = run.optimizer.step(closure, trusted)
    assert run.optimizer.fetched == numbers.tolist() == asked[0]
    loss = run.optimizer.fetched[0]
    assert run.optimizer.fetched == [loss, 2 * loss, 7.0]


def test_closure_without_a_gradient_is_refused() -> None:
    run = Run(quadratic(5, 10), randn(5))
    with pytest.raises(ValueError, match="no gradient"):
        run.optimizer.step(lambda: run.function(run.x).detach())


def test_error_in_the_closure_leaves_the_point_where_it_was() -> None:
    run = Run(quadratic(5, 10), randn(5))
    run.steps(3)
    before = run.point

    def closure() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step(closure)
    assert torch.equal(run.point, before)


# What must not enter the memory


class Spoilt:
    """A quadratic whose loss or gradient is not finite at some evaluations, counted from 1."""

    def __init__(self, *at: int, value: float = math.nan, gradient: bool = False) -> None:
        self.plain = quadratic(8, 30)
        self.evaluations = 0
        self.at, self.value, self.gradient = at, value, gradient

    def __call__(self, x: Tensor) -> Tensor:
        self.evaluations += 1
        loss = self.plain(x)
        if self.evaluations not in self.at:
            return loss
        if self.gradient:  # the loss is fine, its gradient is not
            return loss + (x[0] - x[0].detach()) * self.value
        return loss * self.value


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("at", [2, 3, 6, 15])
def test_what_is_not_finite_leads_back_to_the_best_point(value: float, gradient: bool, at: int) -> None:
    """Case 1."""
    start = randn(8, seed=1)
    run = Run(Spoilt(at, value=value, gradient=gradient), start, history=5)
    points = [start]
    losses = []
    for _ in range(at - 1):
        losses.append(run.step())
        points.append(run.point)
    run.step()
    assert run.optimizer.counters.restarts == 1
    best = points[losses.index(min(losses))]
    assert torch.equal(run.point, best)
    assert run.step() == pytest.approx(min(losses), rel=1e-12)
    step = run.point - best  # with an empty memory: down the gradient, no longer than a first step
    assert run.x.grad is not None
    assert float(torch.cosine_similarity(step, -run.x.grad, dim=0)) == pytest.approx(1, rel=1e-9)
    assert 0 < rms(step) <= 0.1 * (1 + 1e-9)


def test_run_goes_on_after_values_that_are_not_finite() -> None:
    run = Run(Spoilt(1, 4, 5, 12, 13), randn(8, seed=1), history=5)
    losses, points = run.steps(90)
    assert run.optimizer.counters.restarts == 5
    assert all(point.isfinite().all() for point in points)
    assert losses[-1] < 1e-9 * losses[1]


def test_first_loss_that_is_not_finite_leaves_the_start() -> None:
    start = randn(8, seed=1)
    run = Run(Spoilt(1), start)
    run.step()
    assert torch.equal(run.point, start)


def test_badly_risen_loss_is_taken_back_and_the_next_step_is_shorter() -> None:
    start = randn(6)
    run = Run(quadratic(6, 5), start, first_step=100.0, max_rise=0.5)
    first = run.step()
    far = run.point
    assert run.step() > 10 * first  # the loss far out, which is not accepted
    assert run.optimizer.counters.rejected_steps == 1
    assert run.optimizer.loss == first
    assert 0 < float((run.point - start).norm()) < 0.5 * float((far - start).norm())
    losses, _ = run.steps(60)
    assert losses[-1] < 1e-9 * first


def test_step_without_a_memory_is_shorter_after_each_step_taken_back() -> None:
    """Only ever far points: each comes back, and each try is nearer than the one before."""
    start = torch.tensor([1e-3], dtype=torch.float64)
    run = Run(lambda x: (x**2).sum(), start, first_step=1.0)
    distances = []
    run.step(lambda numbers: False)
    while run.optimizer.counters.rejected_steps < 3:
        distances.append(abs(float(run.point - start)))
        run.step(lambda numbers: False)
    assert distances == sorted(distances, reverse=True)
    assert len(set(distances)) == len(distances)


def test_mild_rise_is_accepted() -> None:
    start = torch.tensor([1.0], dtype=torch.float64)
    run = Run(lambda x: (x**2).sum(), start, first_step=2.1, max_rise=0.5)  # to −1.1: from 1 to 1.21
    run.step()
    assert run.step() == pytest.approx(1.21, rel=1e-9)
    assert run.optimizer.counters.rejected_steps == 0
    assert run.optimizer.loss == pytest.approx(1.21, rel=1e-9)


def test_untrusted_gradients_enter_no_pair() -> None:
    """With none to be trusted every step is a first step."""
    run = Run(quadratic(8, 3), randn(8), first_step=0.01)
    for _ in range(10):
        before = run.point
        run.step(lambda numbers: False)
        assert rms(run.point - before) == pytest.approx(0.01, rel=1e-9)
    assert run.optimizer.counters.dropped_pairs == 9


def test_untrusted_gradient_costs_the_two_pairs_that_it_is_in() -> None:
    run = Run(quadratic(8, 3), randn(8), first_step=0.01)
    for step in range(8):
        run.step(lambda numbers, step=step: step != 4)  # type: ignore[misc]
    assert run.optimizer.counters.dropped_pairs == 2


def test_pair_of_negative_curvature_is_dropped() -> None:
    run = Run(lambda x: -(x**2).sum(), torch.tensor([0.5, 1.0], dtype=torch.float64), first_step=0.1)
    losses, _ = run.steps(6)
    assert run.optimizer.counters.dropped_pairs == 5
    assert losses == sorted(losses, reverse=True)


# Bounds


def test_remembered_step_is_the_one_after_projection() -> None:
    function = quadratic(6, 3)
    run = Run(function, randn(6).clamp(-1, 1), first_step=0.7, project=lambda x: x.clamp_(-1, 1))
    before = run.point
    run.step()
    moved = run.point - before
    assert run.point.abs().max() <= 1
    run.step()
    assert run.optimizer.step_rms == pytest.approx(rms(moved), rel=1e-9)


def test_projected_steps_are_those_of_the_textbook_with_projection() -> None:
    """The pairs hold what was moved, not what was asked for."""
    centre = 0.5 + randn(12, seed=3)
    weights = torch.logspace(0, 1, 12, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return 0.5 * ((x - centre) ** 2 * weights).sum()

    start = torch.full((12,), 0.5, dtype=torch.float64)
    run = Run(function, start, first_step=0.2, max_rise=math.inf, project=lambda x: x.clamp_(0, 1))
    x, previous, pairs = start, None, []
    for _ in range(6):
        gradient = (x - centre) * weights
        if previous is not None:
            pairs.append((x - previous[0], gradient - previous[1]))
        previous = x, gradient
        s, y = pairs[-1] if pairs else (gradient, gradient)
        scale = float(s @ y) / float(y @ y) if pairs else 0.2 * math.sqrt(12) / float(gradient.norm())
        x = (x + two_loops(gradient, pairs, scale)).clamp(0, 1)
        run.step()
        torch.testing.assert_close(run.point, x, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("n", [4, 40])
def test_bounded_quadratic_reaches_the_bounded_minimum(n: int) -> None:
    """Without mixed terms it is the clamped free minimum."""
    centre = 0.5 + randn(n)
    weights = torch.logspace(0, 1.5, n, dtype=torch.float64)
    start = torch.full((n,), 0.5, dtype=torch.float64)
    run = Run(lambda x: 0.5 * ((x - centre) ** 2 * weights).sum(), start, project=lambda x: x.clamp_(0, 1))
    _, points = run.steps(100)
    assert all(point.min() >= 0 and point.max() <= 1 for point in points)
    torch.testing.assert_close(run.point, centre.clamp(0, 1), rtol=0, atol=1e-5)


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bfloat16_history_takes_two_bytes_a_value(dtype: torch.dtype) -> None:
    sizes = {}
    for history_dtype in (None, torch.bfloat16):
        run = Run(lambda x: (x**2).sum(), randn(1000, dtype=dtype), history_dtype=history_dtype, history=10)
        sizes[history_dtype] = run.optimizer._rows.untyped_storage().nbytes()
    assert sizes[torch.bfloat16] * dtype.itemsize == 2 * sizes[None]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_precision_of_the_history_is_a_setting(precision: Any, dtype: torch.dtype) -> None:
    chosen = Settings(history_precision=precision)
    search = Search(lambda image: Losses(image.sum(), {}), torch.zeros(1, 3, 8, 8), chosen)
    assert isinstance(search.optimizer, Lbfgs)
    assert search.optimizer._rows.dtype == dtype


@pytest.mark.parametrize("n", [200, 10_000])
def test_bfloat16_history_still_converges(n: int) -> None:
    """Also where the products are summed in more than one run."""
    weights = torch.logspace(0, 2, n)
    run = Run(lambda x: 0.5 * (x**2 * weights).sum(), randn(n, dtype=torch.float32), history_dtype=torch.bfloat16)
    losses, points = run.steps(60)
    assert points[-1].dtype == torch.float32
    assert losses[-1] < 1e-4 * losses[0]


def test_memory_is_twice_the_history_and_two_vectors_more() -> None:
    """And does not grow: 8 bytes a value, whatever happens on the way down."""
    run = Run(quadratic(30, 100), randn(30), history=4)
    for _ in range(20):
        run.step()
        held = {id(tensor): tensor for tensor in vars(run.optimizer).values() if isinstance(tensor, Tensor)}
        lengths = [tensor.numel() for tensor in held.values() if tensor.shape[-1:] == (30,)]
        assert sum(lengths) == (2 * 4 + 2 + 1) * 30  # with the parameter


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_length_of_the_pieces_does_not_matter(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None) -> None:
    """Up to rounding: the sums are taken in another order."""
    function, start = quadratic(50, 100), randn(50)
    _, whole = Run(function, start, history=4, history_dtype=dtype).steps(12)
    monkeypatch.setattr(module, "RUN", 7)
    monkeypatch.setattr(module, "PIECE", 14)  # of the fifty: three of them, a run, and one value
    _, pieces = Run(function, start, history=4, history_dtype=dtype).steps(12)
    torch.testing.assert_close(torch.stack(pieces), torch.stack(whole), rtol=1e-8, atol=1e-8 * rms(start))


def test_best_point_is_kept_while_worse_ones_are_accepted() -> None:
    """Mild rises are accepted; what is not finite then leads back behind all of them."""
    losses = iter([5.0, 4.0, 4.1, 4.2, 4.3, math.nan, 4.0])
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = Lbfgs([x], first_step=0.1)
    points = []

    def closure() -> Tensor:
        points.append(x.detach().clone())
        x.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        return torch.tensor(next(losses), dtype=torch.float64)

    for _ in range(7):
        optimizer.step(closure)
    assert optimizer.counters.restarts == 1
    assert torch.equal(points[6], points[1])
    assert not torch.equal(points[4], points[1])


def test_reset_makes_the_next_step_a_first_step() -> None:
    run = Run(quadratic(8, 3), randn(8), first_step=0.01)
    run.steps(5)
    run.optimizer.reset()
    before = run.point
    run.optimizer.step(run.evaluate, lambda numbers: False)
    assert rms(run.point - before) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (1, 24)])
def test_shape_of_the_parameter_does_not_matter(shape: tuple[int, ...]) -> None:
    function, start = quadratic(24, 10), randn(24)
    _, flat = Run(function, start).steps(6)
    _, shaped = Run(lambda x: function(x.view(-1)), start.view(shape)).steps(6)
    assert shaped[-1].shape == shape
    assert torch.equal(shaped[-1].view(-1), flat[-1])


# What is refused


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ([], {}),
        ([torch.zeros(3), torch.zeros(3)], {}),
        ([torch.zeros(3, dtype=torch.long)], {}),
        ([torch.zeros(3, 4).t()], {}),
        ([torch.zeros(3)], {"history": 0}),
        ([torch.zeros(3)], {"history": -1}),
        ([torch.zeros(3)], {"first_step": 0.0}),
        ([torch.zeros(3)], {"first_step": -1.0}),
        ([torch.zeros(3)], {"first_step": math.nan}),
    ],
)
def test_what_cannot_work_is_refused_at_once(parameters: list[Tensor], options: dict[str, Any]) -> None:
    """Case 7: a history of 0 ends a peer's run with `pop from empty list`."""
    with pytest.raises(ValueError, match=r"exactly one|at least 1|above 0"):
        Lbfgs(parameters, **{"first_step": 0.1, **options})


# The state


def halves(
    function: Function, start: Tensor, first: int, second: int, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The points after `first` steps of one run, and of another optimiser that goes on from its state."""
    run = Run(function, start, **options)
    run.steps(first)
    state, point = deepcopy(run.optimizer.state_dict()), run.point
    _, expected = run.steps(second)
    other = Run(function, point, **options)
    other.optimizer.load_state_dict(state)
    _, found = other.steps(second)
    assert other.optimizer.counters == run.optimizer.counters
    assert other.optimizer.loss == run.optimizer.loss
    return found, expected


@pytest.mark.parametrize("first", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("history_dtype", [None, torch.bfloat16])
def test_steps_from_a_state_are_the_same_bit_for_bit(first: int, history_dtype: torch.dtype | None) -> None:
    found, expected = halves(quadratic(20, 100), randn(20), first, 8, history=4, history_dtype=history_dtype)
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("first", range(1, 14))
def test_state_holds_what_went_wrong(first: int) -> None:
    """A step taken back, restarts, and a best point behind mild rises."""

    def walled(x: Tensor) -> Tensor:
        loss = (x**4).sum() + 3 * torch.sin(5 * x).sum() + 20
        return loss * math.nan if float(x.detach().square().sum()) > 8 else loss

    start = randn(6, seed=8)
    options: dict[str, Any] = {"first_step": 0.2, "max_rise": 0.3}
    whole = Run(walled, start, **options)
    whole.steps(14)
    assert whole.optimizer.counters.rejected_steps == 1
    assert whole.optimizer.counters.restarts == 2
    found, expected = halves(walled, start, first, 14, **options)
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_taking_a_state_changes_nothing() -> None:
    function, start = quadratic(20, 100), randn(20)
    _, expected = Run(function, start).steps(8)
    run = Run(function, start)
    for point in expected:
        run.optimizer.state_dict()
        run.step()
        assert torch.equal(run.point, point)


@pytest.mark.parametrize(
    ("n", "options"), [(9, {}), (8, {"history": 5}), (8, {"history_dtype": torch.bfloat16})]
)
def test_state_of_another_optimiser_is_refused(n: int, options: dict[str, Any]) -> None:
    run = Run(quadratic(8, 10), randn(8), history=4)
    run.steps(3)
    other = Run(quadratic(n, 10), randn(n), **{"history": 4, **options})
    with pytest.raises(ValueError, match="its L-BFGS of"):
        other.optimizer.load_state_dict(run.optimizer.state_dict())
