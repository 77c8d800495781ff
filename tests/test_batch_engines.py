"""Whoever paints, each job comes back once with its outcome, and a crash takes no other picture along."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_painters import copying, painted
from stylize import images
from stylize.api import _open_painter, stylize, stylize_folder
from stylize.batch.cluster import RayEngine
from stylize.batch.engines import (
    Engine,
    Failed,
    Feed,
    Inline,
    OpenPainter,
    Outcome,
    Paint,
    Painted,
    Processes,
    Throttle,
    Unbegun,
)
from stylize.batch.estimate import share_out
from stylize.batch.plan import Job
from stylize.errors import RunError, SettingsError
from stylize.events import Evaluated, Event, ScaleStarted, ignore
from stylize.nst.transfer import transfer
from stylize.process import WAITING
from stylize.settings import Settings

TINY = Settings(size=32, iterations=2, precision="fp32", device="cpu")
ONE_THREAD = {"OMP_NUM_THREADS": "1", **WAITING}
TWO_PROCESSES = Processes([ONE_THREAD] * 2)


def make_jobs(folder: Path, *names: str) -> list[Job]:
    """A job for a small picture of each name."""
    style = folder / "style.png"
    generator = torch.Generator().manual_seed(0)
    images.save_picture(torch.rand(3, 24, 24, generator=generator), style, overwrite=True)
    jobs = []
    for name in names:
        content = folder / "in" / f"{name}.png"
        images.save_picture(torch.rand(3, 24, 32, generator=generator), content)
        jobs.append(Job(f"{name}.png", f"{name}.png", content, (style,), folder / "out" / f"{name}.png", (32, 24)))
    return jobs


def run(
    engine: Engine,
    jobs: list[Job],
    painter: OpenPainter,
    listen: Callable[[str, Event], None] = lambda name, event: None,
    stop: threading.Event | None = None,
) -> dict[str, Outcome]:
    """The outcome of each job, by name; each may come but once."""
    outcomes: dict[str, Outcome] = {}
    with closing(engine.run(Feed(jobs, stop or threading.Event()), painter, listen)) as ended:
        for job, outcome in ended:
            assert job.name not in outcomes
            outcomes[job.name] = outcome
    return outcomes


# ---- every engine --------------------------------------------------------------------------------------

ENGINES = [pytest.param(Inline(), id="inline"), pytest.param(TWO_PROCESSES, id="processes")]


@pytest.mark.parametrize("engine", ENGINES)
def test_failures_stay_with_their_picture(engine: Engine, tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, "a", "refuse", "b", "memory", "c", "defect", "print", "d")
    outcomes = run(engine, jobs, copying(tmp_path / "log"))
    assert sorted(painted(tmp_path / "log")) == ["a.png", "b.png", "c.png", "d.png", "print.png"]
    errors = {name: each.error for name, each in outcomes.items() if isinstance(each, Failed)}
    assert set(errors) == {"refuse.png", "memory.png", "defect.png"}
    assert "Leave it out" in errors["refuse.png"]
    assert "not enough memory" in errors["memory.png"]
    assert "ZeroDivisionError: by nothing" in errors["defect.png"]
    assert all(str(tmp_path / "in") in error for error in errors.values())
    assert len(outcomes) == len(jobs)


@pytest.mark.parametrize("name", ["weights", "full"])
def test_what_every_picture_would_meet_is_fatal(tmp_path: Path, name: str) -> None:
    outcomes = run(Inline(), make_jobs(tmp_path, name, "refuse"), copying(tmp_path / "log"))
    fatal = {name: each.fatal for name, each in outcomes.items() if isinstance(each, Failed)}
    assert fatal == {f"{name}.png": True, "refuse.png": False}


def test_stopping_begins_no_other_picture(tmp_path: Path) -> None:
    stop = threading.Event()
    jobs = make_jobs(tmp_path, "a", "b", "c")
    outcomes = run(Inline(), jobs, copying(tmp_path / "log"), lambda name, event: stop.set(), stop)
    assert list(outcomes) == ["a.png"]
    assert isinstance(outcomes["a.png"], Painted)


def test_a_feed_gives_each_job_once_and_keeps_a_reserve(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, "a", "b", "c")
    feed = Feed(jobs, threading.Event())
    assert feed.take(3) is None
    assert [feed.take(2), feed.take(), feed.take(), feed.take()] == [*jobs, None]


def test_a_throttle_keeps_all_but_the_evaluations_that_follow_too_soon() -> None:
    seen: list[Event] = []
    throttle = Throttle(seen.append)
    started = ScaleStarted(0, 1, 32, 24, 2)
    soon = [Evaluated(0, 1, number, 9, 0.0, 1.0) for number in range(1, 9)]
    events: list[Event] = [started, *soon, started]
    for event in events:
        throttle(event)
    assert seen == [started, started]


# ---- the real painter ----------------------------------------------------------------------------------


def test_all_engines_give_the_bytes_of_the_single_command(tmp_path: Path) -> None:
    painter = partial(_open_painter, TINY, None)
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), **WAITING}
    jobs = make_jobs(tmp_path, "a", "b", "c")
    written = []
    for engine in (Inline(), Processes([threads])):
        outcomes = run(engine, jobs, painter)
        assert {type(outcome) for outcome in outcomes.values()} == {Painted}
        written.append([job.out.read_bytes() for job in jobs])
    for job in jobs:
        stylize(job.content, job.styles, out=job.out, settings=TINY, overwrite=True)
    written.append([job.out.read_bytes() for job in jobs])
    assert written[0] == written[1] == written[2]


def test_a_picture_too_large_for_the_memory_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of_memory(network: Any, content: torch.Tensor, *args: Any, **options: Any) -> Any:
        if content.shape[2] > 24:
            raise RunError("Out of memory on cpu at 32×32 px. Use a smaller --size.")
        return transfer(network, content, *args, **options)

    monkeypatch.setattr("stylize.api.transfer", short_of_memory)
    make_jobs(tmp_path, "a", "b")
    images.save_picture(torch.rand(3, 32, 32), tmp_path / "in" / "large.png")
    report = stylize_folder(
        tmp_path / "in", tmp_path / "style.png", tmp_path / "out", settings=TINY, engine="inline"
    )
    assert [each.name for each in report.painted] == ["a.png", "b.png"]
    (failure,) = report.failed
    assert "Use a smaller --size" in str(failure.error)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the memory of a process")
def test_memory_does_not_grow_with_the_pictures(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, *(f"p{i:02d}" for i in range(25)))
    shallow = TINY.replace(style_layers=("relu1_1",), style_layer_weights=None, content_layers=("relu2_1",))
    paint = _open_painter(shallow, None)
    used = []
    for job in jobs:
        paint(job, ignore)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        used.append(pages)
    assert used[-1] < 1.03 * used[4]


# ---- processes -----------------------------------------------------------------------------------------

unix = pytest.mark.skipif(os.name == "nt", reason="signals")


@unix
def test_a_crash_costs_one_picture_and_only_when_it_comes_twice(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, "a", "kill", "b", "killonce", "c", "exit", "d")
    outcomes = run(TWO_PROCESSES, jobs, copying(tmp_path / "log"))
    failed = {name: each.error for name, each in outcomes.items() if isinstance(each, Failed)}
    assert set(failed) == {"kill.png", "exit.png"}
    assert "signal 9" in failed["kill.png"]
    assert "2 times" in failed["kill.png"]
    assert len(outcomes) == len(jobs)
    assert sorted(painted(tmp_path / "log")) == ["a.png", "b.png", "c.png", "d.png", "killonce.png"]


def test_events_come_from_processes_too(tmp_path: Path) -> None:
    seen: list[tuple[str, Event]] = []
    threads: set[threading.Thread] = set()

    def listen(name: str, event: Event) -> None:
        seen.append((name, event))
        threads.add(threading.current_thread())

    jobs = make_jobs(tmp_path, "a", "b")
    run(TWO_PROCESSES, jobs, copying(tmp_path / "log"), listen)
    assert sorted(seen, key=str) == [(job.name, ScaleStarted(0, 1, 32, 24, 1)) for job in jobs]
    assert threads == {threading.current_thread()}


def test_stopping_processes_finishes_what_is_painted_and_nothing_else(tmp_path: Path) -> None:
    stop = threading.Event()
    jobs = make_jobs(tmp_path, *"abcdefgh")
    seen: set[str] = set()

    def listen(name: str, event: Event) -> None:
        seen.add(name)
        stop.set()

    outcomes = run(Processes([ONE_THREAD]), jobs, copying(tmp_path / "log", seconds=0.5), listen, stop)
    done = {name for name, each in outcomes.items() if isinstance(each, Painted)}
    assert done == set(painted(tmp_path / "log"))
    assert 1 <= len(done) <= 2  # the fake painter has no lock: both hands paint
    assert {type(each) for each in outcomes.values()} <= {Painted, Unbegun}


def broken() -> Paint:
    """A painter that cannot be opened."""
    raise ImportError("no such library")


def test_a_process_that_cannot_begin_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="before it could begin"):
        run(Processes([ONE_THREAD]), make_jobs(tmp_path, "a", "b"), broken)


def children(parent: int) -> set[int]:
    """The processes that a process has started, from any of its threads, on Linux."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return {int(number) for path in tasks for number in path.read_text(encoding="ascii").split()}


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")


@linux
def test_closing_ends_all_processes_at_once(tmp_path: Path) -> None:
    before = children(os.getpid())
    ended = TWO_PROCESSES.run(
        Feed(make_jobs(tmp_path, *"abcdef"), threading.Event()),
        copying(tmp_path / "log", seconds=0.2),
        lambda name, event: None,
    )
    next(ended)
    assert children(os.getpid()) - before
    started = time.monotonic()
    ended.close()
    assert time.monotonic() - started < 5
    assert not children(os.getpid()) - before


@linux
def test_no_process_outlives_the_one_that_gave_the_work(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, *"abcd")
    (tmp_path / "run").write_bytes(pickle.dumps((jobs, copying(tmp_path / "log", seconds=60))))
    code = (
        "import pickle, sys, threading; from pathlib import Path\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from stylize.batch.engines import Feed, Processes\n"
        "jobs, painter = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "listen = lambda name, event: print(name, flush=True)\n"
        "list(Processes([{'OMP_NUM_THREADS': '1'}]).run(Feed(jobs, threading.Event()), painter, listen))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the painting has begun
        (worker,) = children(process.pid)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and "Z" not in _state(worker):
        assert time.monotonic() < deadline, "the worker goes on"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


# ---- how many ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "memory", "jobs", "workers", "threads", "expected"),
    [
        (8, 64e9, 100, None, None, (8, 1)),
        (8, 64e9, 100, 2, None, (2, 4)),
        (8, 64e9, 100, None, 4, (2, 4)),
        (8, 64e9, 3, None, None, (3, 2)),
        (8, 2.5e9, 100, None, None, (2, 4)),
        (8, 0.1e9, 100, None, None, (1, 8)),
        (8, 64e9, 100, 16, None, (16, 1)),
    ],
)
def test_workers_times_threads_fit_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: int,
    memory: float,
    jobs: int,
    workers: int | None,
    threads: int | None,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr("stylize.batch.estimate.cores", lambda: cores)
    monkeypatch.setattr("stylize.batch.estimate.memory", lambda: memory)
    path = tmp_path / "a"
    found = share_out([Job("a", "a", path, (), path, (64, 64))] * jobs, TINY, workers, threads)
    assert found == expected


# ---- Ray -----------------------------------------------------------------------------------------------


def test_ray_that_is_not_installed_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"pip install 'stylize-nst\[ray\]'"):
        run(RayEngine(), make_jobs(tmp_path, "a"), copying(tmp_path / "log"))


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A cluster of two machines with a processor each, and the second of them."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keeps a warning about the future quiet
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray: Any = pytest.importorskip("ray")
    cluster_utils: Any = pytest.importorskip("ray.cluster_utils")
    small = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    second = cluster.add_node(**small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


@unix
@pytest.mark.filterwarnings("ignore::Warning")  # Ray's own
def test_ray_survives_the_loss_of_a_machine_and_of_a_worker(tmp_path: Path, two_nodes: tuple[Any, Any]) -> None:
    cluster, second = two_nodes
    jobs = make_jobs(tmp_path, *"abcdefg", "killonce")  # of which one kills its worker, once
    ended = []
    painter = copying(tmp_path / "log", seconds=0.3)
    engine = RayEngine(variables={"PYTHONPATH": str(Path(__file__).parent)})
    with closing(engine.run(Feed(jobs, threading.Event()), painter, lambda name, event: None)) as outcomes:
        for job, outcome in outcomes:
            assert isinstance(outcome, Painted), outcome
            ended.append(job.name)
            if len(ended) == 2:
                cluster.remove_node(second, allow_graceful=False)
    assert sorted(ended) == sorted(job.name for job in jobs)
    expected = [images.read_picture(job.content).tensor for job in jobs]
    assert all(torch.equal(images.read_picture(j.out).tensor, e) for j, e in zip(jobs, expected, strict=True))
