"""The engine `ray`: actors on the machines of a Ray cluster. The only file that knows Ray.

Contents, styles and outputs are paths on storage that all machines share; this process hands out the work and
keeps the manifest. An actor whose process dies is started again by Ray, on any machine with room. Its pictures
are not left waiting for that: they go to whoever is free.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stylize.batch.engines import (
    HANDS,
    Attempts,
    Feed,
    OpenPainter,
    Outcome,
    Outcomes,
    PictureListener,
    given_up,
)
from stylize.batch.plan import Job
from stylize.errors import RunError, SettingsError
from stylize.events import Notice, ignore

LOSSES = 3  # of actors over one picture, before it is given up; a machine that leaves is no picture's fault
WAIT_S = 1.0  # between two looks at whether the run is to stop
PATIENCE_S = 30.0  # before the user is told that the cluster has no room


@dataclass(frozen=True)
class RayEngine:
    """One actor for each GPU of a cluster, or for each share of its processors.

    Args:
        address: of the cluster: "auto", or HOST:PORT; None starts one on this machine, or uses the one that
            this process is connected to.
        workers: actors; None = as many as the cluster has room for now.
        threads: processors of each actor.
        gpus: graphics processors of each actor: 1, 0, or None = 1 where the cluster has any.
        variables: of the actors' environment.
    """

    address: str | None = None
    workers: int | None = None
    threads: int = 1
    gpus: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, feed: Feed, open_painter: OpenPainter, listen: PictureListener) -> Outcomes:
        """Paint; of what happens to a picture meanwhile, actors tell nothing.

        Raises:
            SettingsError: when Ray is not installed, or there is no such cluster.
        """
        ray = _import_ray()
        ours = not ray.is_initialized()
        if ours:
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise SettingsError(f"There is no Ray cluster at {self.address!r}: {error}") from error
        crew = _Crew(ray, self, open_painter)
        try:
            yield from crew.work(feed, listen)
        finally:
            crew.dismiss()
            if ours:
                ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise SettingsError("The engine ray needs Ray: pip install 'stylize-nst[ray]'.") from error
    return ray


class _Actor:
    """What runs on the other side: a painter with its network, kept from picture to picture."""

    def __init__(self, open_painter: OpenPainter) -> None:
        self._stop = threading.Event()
        self._attempts = Attempts(open_painter, self._stop)

    def ready(self) -> bool:
        """Answer once the painter is there."""
        return True

    def paint(self, job: Job) -> Outcome:
        """Paint one picture."""
        return self._attempts(job, ignore)

    def stop(self) -> None:
        """Begin no other picture."""
        self._stop.set()


class _Crew:
    """The actors, and which job is at whom."""

    def __init__(self, ray: Any, engine: RayEngine, open_painter: OpenPainter) -> None:
        self._ray = ray
        resources = ray.cluster_resources()
        gpus = engine.gpus if engine.gpus is not None else float(resources.get("GPU", 0) >= 1)
        room = resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1) / engine.threads
        kind = ray.remote(_Actor).options(
            num_cpus=engine.threads,
            num_gpus=gpus,
            max_restarts=-1,  # LOSSES bounds what one picture can destroy
            max_task_retries=0,  # a call that is lost is given to another actor, not kept for this one
            max_concurrency=HANDS + 1,  # the last one is for `stop`
            runtime_env={"env_vars": dict(engine.variables)},
        )
        self._actors = [kind.remote(open_painter) for _ in range(engine.workers or max(1, int(room)))]
        self._greetings = {self._greet(actor): actor for actor in self._actors}  # sent, and not answered yet
        self._ready: list[Any] = []  # actors that have answered
        self._at_work: dict[Any, tuple[Job, Any]] = {}
        self._again: deque[Job] = deque()
        self._losses: Counter[str] = Counter()

    def work(self, feed: Feed, listen: PictureListener) -> Outcomes:
        """Until nothing is left."""
        waited, told = 0.0, False
        while True:
            if feed.stop.is_set() and not told:
                told = True
                self._again.clear()
                for actor in self._actors:
                    actor.stop.options(max_task_retries=0).remote()
            self._hand_out(feed)
            if not self._at_work and (feed.stop.is_set() or self._ready):
                return
            waiting = [*self._at_work, *self._greetings]
            ended, _ = self._ray.wait(waiting, timeout=WAIT_S)
            waited = 0.0 if self._at_work or ended else waited + WAIT_S
            if waited == PATIENCE_S:
                listen("", Notice("The cluster has no room for the work yet; it is waited for."))
            for reference in ended:
                yield from self._ended(reference)

    def dismiss(self) -> None:
        """End all actors."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _hand_out(self, feed: Feed) -> None:
        load = Counter(actor for _, actor in self._at_work.values())
        for hand in range(HANDS):
            for actor in self._ready:
                if load[actor] == hand and (job := self._next(feed, hand * len(self._ready))) is not None:
                    self._at_work[actor.paint.remote(job)] = job, actor
                    load[actor] += 1

    def _next(self, feed: Feed, reserve: int) -> Job | None:
        return self._again.popleft() if self._again else feed.take(reserve)

    def _greet(self, actor: Any) -> Any:
        """Ask whether an actor is there; Ray keeps the question until it has started it, or started it again."""
        return actor.ready.options(max_task_retries=-1).remote()

    def _ended(self, reference: Any) -> Outcomes:
        if reference in self._greetings:
            actor = self._greetings.pop(reference)
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                raise RunError(f"An actor could not begin; is stylize on every machine? {error}") from error
            self._ready.append(actor)
            return
        job, actor = self._at_work.pop(reference)
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._lost(actor)
            yield from self._retried(job, error)
            return
        yield job, outcome

    def _lost(self, actor: Any) -> None:
        """No more work for an actor until it answers again."""
        if actor in self._ready:
            self._ready.remove(actor)
            self._greetings[self._greet(actor)] = actor

    def _retried(self, job: Job, error: Exception) -> Outcomes:
        self._losses[job.name] += 1
        if self._losses[job.name] < LOSSES:
            self._again.append(job)
        else:
            reason = str(error).splitlines()[0].rstrip(".")
            yield job, given_up(job, f"The actor that painted {job.content} was lost ({reason})", LOSSES)
