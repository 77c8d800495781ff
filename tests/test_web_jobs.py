"""The queue of the web page: one job on a device at a time, and every way in which a job can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch

from stylize.api import Result
from stylize.errors import RefusedError, RunError, StylizeError
from stylize.events import Evaluated, Listener, ScaleStarted, Snapshot
from stylize.settings import Settings
from stylize.web.jobs import Job, Order, Queue
from stylize.web.limits import Limits
from stylize.web.store import Painted

LIMITS = Limits(waiting=5, waiting_each=3)


@dataclass
class FakeResult:
    """As much of a Result as the queue looks at."""

    outcome: str = "done"
    reason: str = "It is enough."
    evaluations: int = 3
    seconds: float = 1.0


@dataclass
class FakePainter:
    """Paints for as long as it is not let go; an order's content says what it does."""

    go_on: threading.Event = field(default_factory=threading.Event)
    began: list[str] = field(default_factory=list)
    at_work: int = 0
    most_at_work: int = 0

    def __call__(self, order: Order, listen: Listener) -> Result:
        self.began.append(order.content.name)
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            return self._paint(order, listen)
        finally:
            self.at_work -= 1

    def _paint(self, order: Order, listen: Listener) -> Result:
        listen(ScaleStarted(0, 1, 32, 24, 1000))
        if order.content.name == "refuse":
            raise RunError("It cannot be done. Do something else.")
        if order.content.name == "defect":
            raise ZeroDivisionError("/secret/folder")
        if order.content.name == "memory":
            raise MemoryError
        evaluation = 0
        try:
            while not self.go_on.is_set() or evaluation < 3:
                evaluation += 1
                listen(Evaluated(0, 1, evaluation, 1000, float(evaluation), 1 / evaluation))
                listen(Snapshot(evaluation, torch.zeros(3, 24, 32, dtype=torch.uint8)))
                time.sleep(0.005)
        except KeyboardInterrupt:
            return cast("Result", FakeResult("interrupted", "Interrupted.", evaluation))
        return cast("Result", FakeResult(evaluations=evaluation))


@dataclass
class FakeKeeper:
    """Notes what it is given."""

    kept: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    on_keep: Callable[[Job], None] = lambda job: None

    def keep(self, job: Job, result: Result) -> Painted:
        self.on_keep(job)
        self.kept.append(job.key)
        return Painted(job.key, Path(), "stem", "caption", "content", (32, 24), job.session)

    def forget(self, painted: Painted) -> None:
        self.forgotten.append(painted.key)


@pytest.fixture
def painter() -> FakePainter:
    return FakePainter()


@pytest.fixture
def keeper() -> FakeKeeper:
    return FakeKeeper()


@pytest.fixture
def queue(painter: FakePainter, keeper: FakeKeeper) -> Iterator[Queue]:
    queue = Queue([painter], keeper, LIMITS)
    yield queue
    queue.close()


def submit(queue: Queue, session: str = "a", name: str = "picture") -> Job:
    job = Job(session, Order(Path(name), (Path("style"),), Settings()))
    queue.submit(job)
    return job


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def test_a_job_is_painted_and_kept(queue: Queue, painter: FakePainter, keeper: FakeKeeper) -> None:
    job = submit(queue)
    painter.go_on.set()
    wait_for(lambda: job.ended)
    assert job.phase == "done"
    assert job.painted is not None
    assert keeper.kept == [job.key]
    assert job.observer.view().frames >= 1


def test_jobs_are_painted_one_at_a_time_in_their_order(queue: Queue, painter: FakePainter) -> None:
    jobs = [submit(queue, session, name) for session, name in (("a", "1"), ("b", "2"), ("a", "3"))]
    painter.go_on.set()
    wait_for(lambda: all(job.ended for job in jobs))
    assert painter.began == ["1", "2", "3"]
    assert painter.most_at_work == 1


def test_each_device_paints_one_job(keeper: FakeKeeper) -> None:
    painters = [FakePainter(), FakePainter()]
    queue = Queue(painters, keeper, LIMITS)
    jobs = [submit(queue, name=str(k)) for k in range(3)]
    wait_for(lambda: sum(painter.at_work for painter in painters) == 2)
    assert jobs[2].phase == "waiting"
    for painter in painters:
        painter.go_on.set()
    wait_for(lambda: all(job.ended for job in jobs))
    assert [painter.most_at_work for painter in painters] == [1, 1]
    queue.close()


def test_a_waiting_job_knows_its_place(queue: Queue, painter: FakePainter) -> None:
    first = submit(queue)
    wait_for(lambda: first.phase == "painting")
    second, third = submit(queue), submit(queue)
    assert [queue.place(job) for job in (first, second, third)] == [0, 1, 2]
    queue.cancel(second)
    assert queue.place(third) == 1


def test_cancelling_ends_a_painting_job_at_once_and_keeps_nothing(
    queue: Queue, painter: FakePainter, keeper: FakeKeeper
) -> None:
    job, following = submit(queue), submit(queue, "b")
    wait_for(lambda: job.observer.view().curve)
    queue.cancel(job)
    assert (job.phase, job.message) == ("cancelled", "Cancelled.")
    wait_for(lambda: following.phase == "painting")  # the device is free
    assert keeper.kept == []


def test_stopping_keeps_the_best_picture_so_far(queue: Queue, keeper: FakeKeeper) -> None:
    job = submit(queue)
    wait_for(lambda: job.observer.view().curve)
    queue.stop(job)
    wait_for(lambda: job.ended)
    assert job.phase == "done"
    assert "best picture so far" in job.message
    assert keeper.kept == [job.key]


def test_stopping_a_waiting_job_cancels_it(queue: Queue, painter: FakePainter) -> None:
    submit(queue)
    job = submit(queue)
    queue.stop(job)
    assert job.phase == "cancelled"
    assert painter.began in ([], ["picture"])


def test_a_session_that_leaves_frees_the_device_and_no_other_session_loses_anything(
    queue: Queue, painter: FakePainter
) -> None:
    mine, other, mine_too = submit(queue, "a"), submit(queue, "b"), submit(queue, "a")
    wait_for(lambda: mine.phase == "painting")
    queue.drop("a")
    assert mine.phase == mine_too.phase == "cancelled"
    wait_for(lambda: other.phase == "painting")
    painter.go_on.set()
    wait_for(lambda: other.phase == "done")


def test_a_session_finds_its_own_jobs_only(queue: Queue) -> None:
    mine, other = submit(queue, "a"), submit(queue, "b")
    assert queue.find("a") == [mine]
    assert queue.find("a", other.key) == []
    assert queue.find("b", other.key) == [other]


def test_a_job_that_nobody_looks_at_ends(painter: FakePainter, keeper: FakeKeeper) -> None:
    queue = Queue([painter], keeper, LIMITS, abandoned_s=0.2)
    job, watched = submit(queue, "a"), submit(queue, "b")

    def look() -> bool:
        queue.place(watched)
        return job.ended

    wait_for(look)
    assert job.phase == "cancelled"
    queue.place(watched)
    assert watched.phase != "cancelled"
    queue.close()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("refuse", "It cannot be done. Do something else."),
        ("defect", "This is a defect of the program; its server has the details (ZeroDivisionError)."),
        ("memory", "There is not enough memory. Choose a smaller size."),
    ],
)
def test_a_failure_is_one_sentence_and_the_next_job_is_painted(
    queue: Queue, painter: FakePainter, name: str, sentence: str
) -> None:
    failing, following = submit(queue, name=name), submit(queue)
    painter.go_on.set()
    wait_for(lambda: following.ended)
    assert (failing.phase, failing.message) == ("failed", sentence)
    assert following.phase == "done"


def test_a_picture_that_is_cancelled_while_it_is_saved_leaves_nothing(
    queue: Queue, painter: FakePainter, keeper: FakeKeeper
) -> None:
    keeper.on_keep = queue.cancel
    job = submit(queue)
    painter.go_on.set()
    wait_for(lambda: keeper.forgotten)
    assert keeper.kept == keeper.forgotten == [job.key]
    assert job.painted is None


def test_too_many_jobs_are_refused(queue: Queue) -> None:
    first = submit(queue, "z")
    wait_for(lambda: first.phase == "painting")
    for _ in range(LIMITS.waiting_each):
        submit(queue, "a")
    with pytest.raises(RefusedError, match="3 of your pictures wait"):
        submit(queue, "a")
    submit(queue, "b")
    submit(queue, "c")
    with pytest.raises(RefusedError, match="Too many pictures wait"):
        submit(queue, "d")


def test_closing_ends_everything(painter: FakePainter, keeper: FakeKeeper) -> None:
    queue = Queue([painter], keeper, LIMITS)
    jobs = [submit(queue), submit(queue)]
    wait_for(lambda: jobs[0].phase == "painting")
    queue.close()
    assert [job.phase for job in jobs] == ["cancelled", "cancelled"]
    assert painter.at_work == 0
    with pytest.raises(StylizeError):
        submit(queue)
