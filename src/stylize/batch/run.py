"""One run over a folder: what is left to do is painted by an engine, and every outcome becomes a line."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from stylize import __version__
from stylize.batch.cluster import RayEngine
from stylize.batch.engines import Engine, Failed, Feed, Inline, OpenPainter, Outcome, Painted, Processes
from stylize.batch.estimate import (
    cores,
    feature_bytes,
    measured_speed,
    operations,
    peak_bytes,
    share_out,
    too_large,
    too_many_pixels,
)
from stylize.batch.manifest import (
    Choices,
    Entry,
    Manifest,
    adopted,
    file_hash,
    is_about,
    output_is_whole,
    read_entries,
    sweep,
)
from stylize.batch.plan import MARK, READERS, Job, Plan, check_shard, in_shard
from stylize.batch.report import (
    BatchListener,
    BatchOutcome,
    BatchReport,
    BatchStarted,
    Forecast,
    PictureEnded,
    PictureEvent,
    report_path,
)
from stylize.errors import OutputError, RunError, SaveError, SettingsError
from stylize.events import Event, Notice
from stylize.images import DEFAULT_MAX_PIXELS
from stylize.nst.device import choose_device, memory
from stylize.process import WAITING
from stylize.settings import Settings, did_you_mean

ENGINES = ("auto", "inline", "processes", "ray")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a run goes, as far as the pictures themselves do not depend on it."""

    shard: tuple[int, int] | None = None
    overwrite: bool = False  # of files in the output folder that no manifest knows
    retry_failed: bool = False
    fail_fast: bool = False
    dry_run: bool = False
    engine: str = "auto"
    workers: int | None = None
    threads: int | None = None
    ray_address: str | None = None
    max_pixels: int | None = None  # of a content; None is Pillow's own limit


@dataclass(frozen=True)
class Crew:
    """An engine and its size."""

    engine: Engine
    name: str
    workers: int | None  # None where a cluster decides
    threads: int


def run_folder(
    plan: Plan,
    settings: Settings,
    open_painter: OpenPainter,
    choice: Choice,
    listen: BatchListener,
    stop: threading.Event,
) -> BatchReport:
    """Paint what is not done yet; `stop` ends the run after the pictures that are being painted.

    Raises:
        RefusedError: before anything is computed: a choice, or an output folder that is in use, cannot be
            written to, or holds other files under the names of outputs.
    """
    if choice.shard is not None:
        check_shard(choice.shard)
    plan = replace(plan, jobs=tuple(_examined(plan.jobs, settings, choice)))
    crew = choose_crew(plan.jobs, settings, choice)
    run = _Run(plan, settings, choice, crew, listen, stop)
    if choice.dry_run:
        return run.forecast()
    run.check_unmarked()
    with Manifest(plan.out, choice.shard) as manifest:
        run.survey()
        return run.paint(manifest, open_painter)


def _examined(jobs: Iterable[Job], settings: Settings, choice: Choice) -> Iterator[Job]:
    """The jobs, those marked that cannot be painted for all that is known before."""
    # How much memory a graphics processor or another machine has is not known here.
    local = not _means_ray(choice) and choose_device(settings.device).type == "cpu"
    room = memory() if local else float("inf")
    width = feature_bytes(settings) if local else 0
    for job in jobs:
        problem = job.problem or too_many_pixels(job, choice.max_pixels or DEFAULT_MAX_PIXELS)
        yield replace(job, problem=problem or (too_large(job, settings, width, room) if local else None))


# ---- who paints ---------------------------------------------------------------------------------------


def choose_crew(jobs: Sequence[Job], settings: Settings, choice: Choice) -> Crew:
    """The engine that is meant, and how many workers and threads it gets.

    Raises:
        SettingsError: for an unknown engine, or numbers that cannot be.
    """
    if choice.engine not in ENGINES:
        raise SettingsError(
            f"There is no engine {choice.engine!r}; it can be {', '.join(ENGINES)}."
            f"{did_you_mean(choice.engine, ENGINES)}"
        )
    for name, number in (("workers", choice.workers), ("threads", choice.threads)):
        if number is not None and number < 1:
            raise SettingsError(f"{name} is {number}; it must be at least 1.")
    if _means_ray(choice):
        threads = choice.threads or 1
        engine = RayEngine(choice.ray_address, choice.workers, threads, variables=_threads(threads))
        return Crew(engine, "ray", choice.workers, threads)
    if choice.engine == "inline":
        # How many threads there are is this process's own affair; to change it here would change it for all.
        return Crew(Inline(), "inline", 1, torch.get_num_threads())
    environments = _environments([job for job in jobs if job.problem is None], settings, choice)
    threads = int(environments[0]["OMP_NUM_THREADS"])
    return Crew(Processes(environments), "processes", len(environments), threads)


def _means_ray(choice: Choice) -> bool:
    return choice.engine == "ray" or (choice.engine == "auto" and choice.ray_address is not None)


def _environments(jobs: Sequence[Job], settings: Settings, choice: Choice) -> list[dict[str, str]]:
    """The variables of each process: its threads, and which graphics processor it sees."""
    device = choose_device(settings.device)
    if device.type == "cpu":
        workers, threads = share_out(jobs, settings, choice.workers, choice.threads)
        return [_threads(threads)] * workers
    if device.type != "cuda" or settings.device not in ("auto", "cuda"):  # the only one, or one that is named
        workers = choice.workers or 1
        return [_threads(choice.threads or max(1, cores() // workers))] * workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    workers = choice.workers or min(len(names), max(1, len(jobs)))
    variables = _threads(choice.threads or max(1, cores() // workers))
    return [{**variables, "CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(workers)]


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), **WAITING}


# ---- the run ------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """What is known of every picture so far."""

    plan: Plan
    settings: Settings
    choice: Choice
    crew: Crew
    listen: BatchListener
    stop: threading.Event
    started: float = field(default_factory=time.perf_counter)
    entries: dict[str, Entry] = field(default_factory=dict)  # from the manifests, by the output's name
    todo: dict[str, Job] = field(default_factory=dict)  # in the order of painting
    skipped: list[str] = field(default_factory=list)
    found: list[Entry] = field(default_factory=list)  # painted, but without a line
    failed: list[Entry] = field(default_factory=list)
    painted: list[Entry] = field(default_factory=list)
    fatal: str | None = None  # why the run could not go on
    interrupted: bool = False
    choices: dict[tuple[object, ...], Choices] = field(default_factory=dict)

    def check_unmarked(self) -> None:
        """Refuse a folder of other files before a manifest in it marks it as an output folder.

        Raises:
            OutputError: when an output's name is taken by a file that is none of ours.
        """
        if (self.plan.out / MARK).exists():
            return
        jobs = [job for job in self._own_jobs() if os.path.lexists(job.out)]
        self._learn_choices(jobs)
        self._check_spares_others(job for job in jobs if self._state(job) is None)

    def _own_jobs(self) -> list[Job]:
        shard = self.choice.shard
        return [job for job in self.plan.jobs if shard is None or in_shard(job, shard)]

    def _learn_choices(self, jobs: Iterable[Job]) -> None:
        for styles in dict.fromkeys(job.styles for job in jobs):
            self.choices[styles] = self.choices.get(styles) or Choices.of(self.settings, styles)

    def survey(self) -> None:
        """Sort the pictures into what is done, what has failed, and what is to be painted.

        Raises:
            OutputError: when an output's name is taken by a file that is none of ours.
        """
        jobs = self._own_jobs()
        if not self.choice.dry_run:
            sweep(jobs, shared=self.choice.shard is not None)
        self.entries = read_entries(self.plan.out)
        self._learn_choices(jobs)
        with ThreadPoolExecutor(READERS) as pool:
            states = list(pool.map(self._state, jobs))
        todo = []
        for job, state in zip(jobs, states, strict=True):
            if isinstance(state, Entry) and state.status == "failed":
                self.failed.append(state)
            elif isinstance(state, Entry):
                known = self.entries.get(job.name)
                self.skipped.append(job.name)
                if state is not known:
                    self.found.append(state)
            else:
                todo.append(job)
        self._check_spares_others(todo)
        self.todo = {job.name: job for job in _in_order(todo)}

    @property
    def _max_pixels(self) -> int:
        return self.choice.max_pixels or DEFAULT_MAX_PIXELS

    def _state(self, job: Job) -> Entry | None:
        """The line that holds for a picture; None when it is to be painted."""
        choices = self.choices[job.styles]
        entry = self.entries.get(job.name)
        if entry is None or not is_about(entry, job, choices):
            return adopted(job, choices, self._max_pixels) if job.out.exists() else None
        if entry.status == "failed":
            return None if self.choice.retry_failed else entry
        return entry if output_is_whole(entry, job) else None

    def _check_spares_others(self, todo: Iterable[Job]) -> None:
        if self.choice.overwrite:
            return
        taken = [job for job in todo if job.name not in self.entries and os.path.lexists(job.out)]
        if taken:
            more = f" and {len(taken) - 1} others exist" if len(taken) > 1 else " exists"
            raise OutputError(
                f"{taken[0].out}{more} already, and no earlier run over this folder made it with these settings. "
                "Choose another output folder, or replace what is there with --overwrite."
            )

    def paint(self, manifest: Manifest, open_painter: OpenPainter) -> BatchReport:
        """Paint all that is to be painted, and report."""
        try:
            for entry in self.found:
                manifest.append(entry)
            crew = self.crew
            counts = len(self.todo), len(self.skipped), len(self.failed)
            self.listen(BatchStarted(*counts, crew.name, crew.workers, crew.threads))
            for job in [job for job in self.todo.values() if job.problem is not None]:
                self._end(manifest, job, _impossible(job))
            if self.todo and not (self.failed and self.choice.fail_fast):
                self._paint(manifest, open_painter)
        except RunError as error:  # the manifest cannot be written, or no worker can begin
            self.fatal = str(error)
        except KeyboardInterrupt:
            self.interrupted = True
        # What was at work when the run was ended at once has left files behind.
        sweep(self.todo.values(), shared=self.choice.shard is not None)
        return self._saved(self._report())

    def _paint(self, manifest: Manifest, open_painter: OpenPainter) -> None:
        feed = Feed(self.todo.values(), self.stop)
        outcomes = self.crew.engine.run(feed, open_painter, self._tell)
        try:
            for job, outcome in outcomes:
                self._end(manifest, job, outcome)
        finally:
            outcomes.close()  # at once, not when somebody collects the garbage

    def _tell(self, name: str, event: Event) -> None:
        self.listen(PictureEvent(name, event))

    def _end(self, manifest: Manifest, job: Job, outcome: Outcome) -> None:
        """Record what became of a picture."""
        if isinstance(outcome, Failed) and outcome.fatal:
            self.fatal = outcome.error
            self.stop.set()
            return
        if not isinstance(outcome, (Painted, Failed)):
            return
        entry = self._entry(job, outcome)
        manifest.append(entry)
        del self.todo[job.name]
        (self.painted if entry.status == "done" else self.failed).append(entry)
        self.listen(PictureEnded(entry))
        if entry.status == "failed" and self.choice.fail_fast:
            self.stop.set()

    def _entry(self, job: Job, outcome: Painted | Failed) -> Entry:
        entry = Entry(
            name=job.name,
            status="failed",
            content=job.origin,
            content_sha256=outcome.content_sha256,
            settings_sha256=self.choices[job.styles].sha256,
            version=__version__,
            finished=time.time(),
        )
        if isinstance(outcome, Failed):
            return replace(entry, error=outcome.error)
        return replace(
            entry,
            status="done",
            output_sha256=outcome.output_sha256,
            size=outcome.size,
            seconds=outcome.seconds,
            evaluations=outcome.evaluations,
            threads=outcome.threads,
            losses=outcome.losses,
            notices=outcome.notices,
        )

    def forecast(self) -> BatchReport:
        """What would be done, and what it would cost."""
        self.survey()
        for job in [job for job in self.todo.values() if job.problem is not None]:
            self.failed.append(self._entry(self.todo.pop(job.name), _impossible(job)))
        jobs = list(self.todo.values())
        width = feature_bytes(self.settings)
        peaks = [peak_bytes(job, self.settings, width) for job in jobs]
        seconds = None if self.crew.name == "ray" else self._seconds(jobs)
        forecast = Forecast(seconds=seconds, bytes_per_worker=max(peaks, default=0.0))
        return replace(self._report(), forecast=forecast, outcome="planned", reason="Nothing was painted.")

    def _seconds(self, jobs: Sequence[Job]) -> float:
        """By what this folder's pictures took before, or else by what this machine can do."""
        work = sum(operations(job, self.settings) for job in jobs)
        made, took = 0.0, 0.0
        for job in self.plan.jobs:
            entry = self.entries.get(job.name)
            if entry is not None and entry.seconds and job.problem is None:
                made += operations(job, self.settings)
                took += entry.seconds
        return work * took / made / (self.crew.workers or 1) if made else work / measured_speed(self.settings)

    def _report(self) -> BatchReport:
        outcome, reason = self._outcome()
        return BatchReport(
            out=self.plan.out,
            outcome=outcome,
            reason=reason,
            painted=tuple(self.painted),
            skipped=tuple(self.skipped),
            failed=tuple(self.failed),
            left=tuple(self.todo),
            ignored=self.plan.ignored,
            seconds=time.perf_counter() - self.started,
            engine=self.crew.name,
            workers=self.crew.workers,
            threads=self.crew.threads,
        )

    def _outcome(self) -> tuple[BatchOutcome, str]:
        if self.fatal is not None:
            return "stopped", self.fatal
        if self.interrupted or (self.todo and not (self.failed and self.choice.fail_fast)):
            return "interrupted", "The run was stopped; the same command goes on where it stopped."
        if self.failed:
            return "failures", f"{len(self.failed)} could not be painted; --retry-failed tries them again."
        return "done", "All pictures are painted."

    def _saved(self, report: BatchReport) -> BatchReport:
        try:
            report.save(report_path(self.plan.out, self.choice.shard))
        except SaveError as error:  # the manifest has all of it
            self.listen(PictureEvent("", Notice(str(error))))
        return report


def _impossible(job: Job) -> Failed:
    return Failed(job.problem or "", file_hash(job.content))


def _in_order(jobs: Sequence[Job]) -> list[Job]:
    """Style by style, each measured once; the longest first, so that no worker is late; equal sizes together."""
    styles: Mapping[tuple[object, ...], int] = {
        each: index for index, each in enumerate(dict.fromkeys(job.styles for job in jobs))
    }
    return sorted(jobs, key=lambda job: (styles[job.styles], -job.pixels, job.size, job.name))
