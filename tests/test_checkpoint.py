"""checkpoint.py, and the states that go through it: what was killed goes on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conftest import picture, random_weights
from stylize import checkpoint as module
from stylize import cli, locking
from stylize.api import Stylizer
from stylize.checkpoint import LOCK_NAME, NAME, Checkpoint, check_folder, read_state, write_state
from stylize.errors import OutputError, SettingsError
from stylize.events import Evaluated, Event, Notice, ScaleFinished, ScaleStarted
from stylize.images import save_picture
from stylize.nst.lbfgs import Lbfgs
from stylize.nst.memory import PROGRAM_BYTES, Plan, objective_for, plan_memory
from stylize.nst.objective import Losses
from stylize.nst.optimize import Keeper, Optimized, Search, StopRule, optimize
from stylize.nst.transfer import Painting, Style, check_state, transfer
from stylize.nst.vgg import Vgg19
from stylize.progress import Forecast
from stylize.settings import Settings

IDENTITY = {"settings": {"size": 64}, "content": {"sha256": "1f" * 32}}
STATE: dict[str, Any] = {
    "numbers": [1, -2.5, math.inf, 1 / 3, 1e-300, True, None, "李"],
    "nothing": {},
    "tensors": {
        **{str(dtype): torch.tensor([0, 1, 3], dtype=dtype) for dtype in (torch.float64, torch.float32)},
        **{str(dtype): torch.tensor([0, 1, 3], dtype=dtype) for dtype in (torch.bfloat16, torch.int64)},
        "scalar": torch.tensor(1 / 3),
        "empty": torch.zeros(0, 5),
        "not finite": torch.tensor([math.nan, -math.inf]),
    },
    "list": [torch.ones(2, 3), None, [torch.arange(5).float()]],
    "part of another": torch.arange(20.0).view(4, 5)[:2],
    "strided": torch.arange(6.0).view(2, 3).t(),
}


def is_same(a: Any, b: Any) -> bool:
    """Of two states: the same kinds, names, numbers and bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(is_same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


class Notices:
    """A listener that keeps what the user is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.texts.append(event.text)


def checkpoint(folder: Path, *, every_s: float = 60, identity: Mapping[str, Any] = IDENTITY) -> Checkpoint:
    return Checkpoint(folder, identity, every_s, Notices())


def told(kept: Checkpoint) -> list[str]:
    assert isinstance(kept._tell, Notices)
    return kept._tell.texts


# The file


def test_state_comes_back_from_its_file_bit_for_bit(tmp_path: Path) -> None:
    write_state(tmp_path / NAME, STATE, IDENTITY)
    identity, state = read_state(tmp_path / NAME)
    assert identity == IDENTITY
    assert is_same(state, STATE)


def test_file_is_one_that_every_safetensors_reader_takes(tmp_path: Path) -> None:
    write_state(tmp_path / NAME, STATE, IDENTITY)
    with safe_open(tmp_path / NAME, framework="pt") as file:
        assert torch.equal(file.get_tensor("/list/0"), torch.ones(2, 3))
        assert json.loads(file.metadata()["identity"]) == IDENTITY


def test_every_changed_byte_and_every_missing_one_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_state(path, {"tensor of bytes": torch.arange(50, dtype=torch.uint8)}, {})
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(ValueError, match="cut short"):
            read_state(path)
        path.write_bytes(whole[:i])
        with pytest.raises(ValueError, match="cut short"):
            read_state(path)


@pytest.mark.parametrize("contents", [b"", b"none", b"\0" * 5000])
def test_damage_is_told_and_the_run_starts_afresh(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / NAME).write_bytes(contents)
    kept = checkpoint(tmp_path)
    assert kept.load() is None
    assert len(told(kept)) == 1
    assert str(tmp_path / NAME) in told(kept)[0]
    assert "starts afresh" in told(kept)[0]
    kept(lambda: STATE, now=True)
    assert is_same(checkpoint(tmp_path).load(), STATE)


def test_file_of_weights_is_not_taken_for_a_state(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / NAME)
    with pytest.raises(ValueError):
        read_state(tmp_path / NAME)


def test_where_there_is_none_there_is_no_state(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    assert kept.load() is None
    assert told(kept) == []


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"settings": {"size": 96}}, r"size \(64 there, 96 here\)"),
        ({"content": {"sha256": "2e" * 32}}, "differs in content"),
        ({"styles": [{"sha256": "2e" * 32}]}, "differs in styles"),
        ({"settings": {"size": 64, **{f"x{i}": i for i in range(9)}}}, "and 5 more"),
    ],
)
def test_another_jobs_state_is_refused_with_what_differs(
    tmp_path: Path, other: Mapping[str, Any], named: str
) -> None:
    checkpoint(tmp_path)(lambda: STATE, now=True)
    with pytest.raises(OutputError, match=named):
        checkpoint(tmp_path, identity={**IDENTITY, **other}).load()
    assert is_same(checkpoint(tmp_path).load(), STATE)


def test_lists_and_tuples_are_the_same_identity(tmp_path: Path) -> None:
    checkpoint(tmp_path, identity={"layers": ("relu1_1",)})(lambda: STATE, now=True)
    assert checkpoint(tmp_path, identity={"layers": ["relu1_1"]}).load() is not None


def test_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot hold a checkpoint"):
        check_folder(tmp_path / "file")
    check_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


# When it is written


def test_state_is_written_when_it_is_time_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    kept = checkpoint(tmp_path, every_s=10)
    made: list[float] = []

    def make() -> dict[str, Any]:
        made.append(clock[0])
        return {"at": clock[0]}

    for clock[0] in (100.0, 109.9, 110.0, 111.0, 119.0, 121.0):
        kept(make)
    kept(make, now=True)
    kept(make)
    assert made == [110.0, 121.0, 121.0]


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: the system's own refusal, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_full_disk_is_told_once_and_leaves_the_state_before(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    kept(lambda: STATE, now=True)
    with disk_of(2000):
        for _ in range(3):
            kept(lambda: {"large": torch.zeros(10_000)}, now=True)
    assert len(told(kept)) == 1
    assert "cannot be written" in told(kept)[0]
    assert is_same(checkpoint(tmp_path).load(), STATE)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_a_kill_has_left_of_a_file_is_swept_away(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path)
    kept(lambda: STATE, now=True)
    (tmp_path / f".{NAME}.123.abcd.tmp").write_bytes(b"half a file")
    with kept:
        assert kept.load() is not None
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


# Whose the folder is


def test_second_run_in_a_folder_is_refused_and_sweeps_nothing(tmp_path: Path) -> None:
    with checkpoint(tmp_path):
        being_written = tmp_path / f".{NAME}.123.abcd.tmp"
        being_written.write_bytes(b"half a file")
        with pytest.raises(OutputError, match="Another stylize is at work in"), checkpoint(tmp_path):
            pass
        assert being_written.exists()
        assert (tmp_path / LOCK_NAME).exists()
    with checkpoint(tmp_path):
        assert not being_written.exists()
    assert list(tmp_path.iterdir()) == []


def test_who_only_reads_needs_no_lock_and_sweeps_nothing(tmp_path: Path) -> None:
    """As the other processes of one run do."""
    with checkpoint(tmp_path) as kept:
        kept(lambda: STATE, now=True)
        (tmp_path / f".{NAME}.123.abcd.tmp").write_bytes(b"half a file")
        assert checkpoint(tmp_path).load() is not None
        assert len(list(tmp_path.iterdir())) == 3


def test_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from stylize.locking import held\n"
        "with held(Path(sys.argv[1])) as got: print(got, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / LOCK_NAME
    killed = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, b"True\n")
    assert path.exists()
    with checkpoint(tmp_path):
        pass


def test_lock_is_not_taken_on_a_file_that_its_holder_has_just_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tries = locking.try_lock, []

    def late(file: Any, *, shared: bool) -> bool:
        tries.append(1)
        if len(tries) == 1:
            (tmp_path / LOCK_NAME).unlink()
        return plain(file, shared=shared)

    monkeypatch.setattr(locking, "try_lock", late)
    with checkpoint(tmp_path):
        assert len(tries) == 2
        with pytest.raises(OutputError, match="at work"), checkpoint(tmp_path):
            pass


def test_only_the_jobs_own_file_is_removed(tmp_path: Path) -> None:
    other = checkpoint(tmp_path, identity={"content": {"sha256": "2e" * 32}})
    other.remove()
    checkpoint(tmp_path)(lambda: STATE, now=True)
    other.remove()
    assert checkpoint(tmp_path).load() is not None
    checkpoint(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []
    assert told(other) == []


# One size


class Memory:
    """A keeper that keeps every state, as a file would, and interrupts after some evaluation."""

    def __init__(self, folder: Path, interrupt_at: int | None = None) -> None:
        self.path = folder / NAME
        self.asked_for = 0
        self.now = 0
        self.interrupt_at = interrupt_at

    def __call__(self, make: Callable[[], dict[str, Any]], *, now: bool = False) -> None:
        self.now += now
        write_state(self.path, make(), {})
        if not now:
            self.asked_for += 1
            if self.asked_for == self.interrupt_at:
                raise KeyboardInterrupt

    def load(self) -> dict[str, Any]:
        return read_state(self.path)[1]


class Task:
    """The weighted distance to a picture; not finite at some evaluations, counted from 1 over all objects."""

    def __init__(self, spoilt: tuple[int, ...] = (), made: int = 0) -> None:
        self.target = picture(12, 14, seed=7)
        self.weight = torch.linspace(1, 30, 14)
        self.spoilt = spoilt
        self.made = made

    def __call__(self, image: Tensor) -> Losses:
        self.made += 1
        loss = (self.weight * (image - self.target) ** 2).mean()
        return Losses(loss * math.nan if self.made in self.spoilt else loss, {"content": loss.detach() / 2})


def search(task: Task, settings: Settings, stop: StopRule, **options: Any) -> Optimized:
    return optimize(task, picture(12, 14, seed=8), settings, stop, **options)


def without_time(history: tuple[Evaluated, ...]) -> list[str]:
    return [repr(replace(event, seconds=0.0)) for event in history]  # as text, where NaN equals NaN


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("lbfgs", "fp32"), ("lbfgs", "bf16"), ("adam", "fp32"), ("torch-lbfgs", "fp32")]
)
@pytest.mark.parametrize(
    ("at", "spoilt"), [(1, ()), (2, ()), (7, ()), (20, ()), (1, (1,)), (7, (5,)), (9, (9, 10))]
)
def test_interrupted_search_ends_as_the_uninterrupted_one(
    tmp_path: Path, optimizer: Any, precision: Any, at: int, spoilt: tuple[int, ...]
) -> None:
    """Also after losses that were not finite."""
    settings = Settings(optimizer=optimizer, history=4, history_precision=precision)
    whole = search(Task(spoilt), settings, StopRule(20))
    memory = Memory(tmp_path, at)
    try:
        first = search(Task(spoilt), settings, StopRule(20), keep=memory)
        assert first.outcome == "interrupted"
    except KeyboardInterrupt:
        assert at in spoilt  # there was nothing to keep
    rest = search(Task(spoilt, at), settings, StopRule(20), resume=memory.load())
    assert torch.equal(rest.image, whole.image)
    assert rest.losses == whole.losses
    assert without_time(rest.history) == without_time(whole.history)
    assert rest.outcome == whole.outcome == "done"


def test_stop_rules_window_reaches_back_behind_the_interruption(tmp_path: Path) -> None:
    stop = StopRule(500, min_decrease=0.01)
    whole = search(Task(), Settings(), stop)
    memory = Memory(tmp_path, len(whole.history) - 3)
    search(Task(), Settings(), stop, keep=memory)
    rest = search(Task(), Settings(), stop, resume=memory.load())
    assert rest.reason == whole.reason
    assert len(rest.history) == len(whole.history)


def test_search_that_was_given_up_does_not_go_on(tmp_path: Path) -> None:
    spoilt = tuple(range(5, 100))
    memory = Memory(tmp_path)
    whole = search(Task(spoilt), Settings(), StopRule(100), keep=memory)
    rest = search(Task(spoilt, 1000), Settings(), StopRule(100), resume=memory.load())
    assert (rest.outcome, rest.reason) == (whole.outcome, whole.reason)
    assert torch.equal(rest.image, whole.image)


def test_interruption_during_an_evaluation_is_kept(tmp_path: Path) -> None:
    class Interrupting(Task):
        def __call__(self, image: Tensor) -> Losses:
            if self.made == 6:
                raise KeyboardInterrupt
            return super().__call__(image)

    memory = Memory(tmp_path)
    first = search(Interrupting(), Settings(), StopRule(20), keep=memory)
    assert (first.outcome, len(first.history), memory.now) == ("interrupted", 6, 1)
    rest = search(Task(), Settings(), StopRule(20), resume=memory.load())
    assert torch.equal(rest.image, search(Task(), Settings(), StopRule(20)).image)


@pytest.mark.parametrize("method", ["_accept", "_move", "_enter"])
def test_interruption_in_the_middle_of_a_step_keeps_the_state_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain = getattr(Lbfgs, method)
    calls: list[int] = []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        plain(*arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Lbfgs, method, interrupted)
    memory = Memory(tmp_path)
    first = search(Task(), Settings(), StopRule(20), keep=memory)
    monkeypatch.undo()
    assert (first.outcome, memory.now) == ("interrupted", 0)
    rest = search(Task(), Settings(), StopRule(20), resume=memory.load())
    assert torch.equal(rest.image, search(Task(), Settings(), StopRule(20)).image)


# All sizes

SHALLOW = Settings(
    content_layers=("relu2_2",),
    style_layers=("relu1_1", "relu2_1"),
    style_layer_weights=None,
    scales=2,
    iterations=10,
    precision="fp32",
    device="cpu",
)


def paint(
    settings: Settings = SHALLOW,
    keep: Keeper | None = None,
    resume: Mapping[str, Any] | None = None,
    listen: Callable[[Event], None] = lambda event: None,
    content: Tensor | None = None,
) -> Painting:
    content = picture(24, 32) if content is None else content
    network = Vgg19(random_weights(), SHALLOW.content_layers + SHALLOW.style_layers)
    style = Style(network, [picture(20, 28, seed=1)], settings)
    if resume is not None:
        check_state(resume, network, content, settings)
    options: dict[str, Any] = {"resume": resume, "listen": listen} | ({} if keep is None else {"keep": keep})
    return transfer(network, content, style, settings, **options)


@pytest.mark.parametrize("init", ["content", "noise"])
@pytest.mark.parametrize("at", range(1, 11))
def test_run_interrupted_anywhere_ends_as_the_uninterrupted_one(tmp_path: Path, at: int, init: str) -> None:
    settings = SHALLOW.replace(init=init, seed=3)
    whole = paint(settings)
    memory = Memory(tmp_path, at)
    first = paint(settings, keep=memory)
    assert (first.outcome, first.evaluations) == ("interrupted", at)
    heard: list[Event] = []
    rest = paint(settings, resume=memory.load(), listen=heard.append)
    assert torch.equal(rest.image, whole.image)
    assert rest.losses == whole.losses
    assert without_time(rest.history) == without_time(whole.history)
    assert (rest.outcome, rest.reason) == (whole.outcome, whole.reason)
    numbers = [event.evaluation for event in heard if isinstance(event, Evaluated)]
    assert numbers == list(range(at + 1, 11))
    started = next(event for event in heard if isinstance(event, ScaleStarted))
    assert started.before == sum(event.scale < started.scale for event in whole.history)


def test_run_in_tiles_goes_on_in_the_same_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory is free by then: another cutting would end in other bits."""
    monkeypatch.setattr("stylize.nst.memory._WINDOWS", (1500, 700))
    monkeypatch.setattr("stylize.nst.memory.PIECES_SHARE", 0.0)
    plans: list[Plan] = []

    def noted(plan: Plan, *more: Any) -> Any:
        plans.append(plan)
        return objective_for(plan, *more)

    monkeypatch.setattr("stylize.nst.transfer.objective_for", noted)
    content, settings = picture(40, 60), SHALLOW.replace(history=3, scales=1)
    beyond = plan_memory((60, 40), settings).total - PROGRAM_BYTES["cpu"]
    scarce = settings.replace(memory_limit=int(2e9), iterations=10)
    monkeypatch.setattr("stylize.nst.memory.PROGRAM_BYTES", {"cpu": 2e9 - 0.8 * beyond})
    memory = Memory(tmp_path, 6)
    whole = paint(scarce, content=content)
    paint(scarce, keep=memory, content=content)
    rest = paint(settings.replace(memory_limit=10**12), resume=memory.load(), content=content)
    assert plans[0].is_tiled
    assert plans[0] == plans[1] == plans[2]
    assert torch.equal(rest.image, whole.image)


def test_state_at_the_end_of_a_scale_needs_no_evaluation_of_it(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, ScaleStarted) and event.scale == 1:
            raise KeyboardInterrupt

    memory = Memory(tmp_path)
    paint(keep=memory, listen=interrupt)
    heard: list[Event] = []
    rest = paint(resume=memory.load(), listen=heard.append)
    assert torch.equal(rest.image, paint().image)
    assert all(event.scale == 1 for event in heard if isinstance(event, (Evaluated, ScaleFinished)))


def test_finished_run_is_only_handed_out(tmp_path: Path) -> None:
    """As after a full disk at the end."""
    memory = Memory(tmp_path)
    whole = paint(keep=memory)
    heard: list[Event] = []
    rest = paint(resume=memory.load(), listen=heard.append)
    assert torch.equal(rest.image, whole.image)
    assert (rest.evaluations, rest.losses) == (whole.evaluations, whole.losses)
    assert not [event for event in heard if isinstance(event, Evaluated)]


def test_seconds_before_the_interruption_count(tmp_path: Path) -> None:
    """In the budget and in what is told; a spent budget leaves one evaluation for each scale to come."""
    settings = SHALLOW.replace(iterations=None, time_budget_s=1000.0)
    memory = Memory(tmp_path, 3)
    paint(settings, keep=memory)
    state = memory.load()
    state["seconds"] += 2000
    rest = paint(settings, resume=state)
    assert rest.evaluations == 4
    assert rest.reason == "The time is up."
    assert 2000 < rest.seconds < 2500
    assert rest.history[-1].seconds > 2000


# States that are none


def changed(state: Any, path: str, value: Any) -> Any:
    """The same with another value at a place such as `under_way.plan`; `...` leaves the place out."""
    if not path:
        return value
    key, _, rest = path.partition(".")
    if isinstance(state, list):
        return [changed(each, rest, value) if i == int(key) else each for i, each in enumerate(state)]
    new = changed(state.get(key), rest, value)
    kept = {name: new if name == key else each for name, each in state.items()}
    return {name: each for name, each in {key: new, **kept}.items() if each is not ...}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Of one run: in the first of two scales, in the second, and at the end."""
    found = {}
    for name, at in {"first": 4, "second": 9, "end": None}.items():
        memory = Memory(tmp_path_factory.mktemp(name), at)
        paint(keep=memory)
        found[name] = memory.load()
    return found


NO_STATES: list[tuple[str, str, Any]] = [
    ("second", "", {}),
    ("second", "", [1, 2]),
    *(("second", name, ...) for name in ("scale", "result", "history", "seconds", "scale_seconds", "under_way")),
    ("second", "more", 1),
    *(("second", "scale", value) for value in (-1, 0, 2, 9, 1.0, "1", None, True)),
    ("end", "scale", 1),  # whose result has another size
    ("end", "scale", 3),
    ("first", "scale", 1),
    *(("second", "seconds", value) for value in ("1", None, True)),
    ("second", "history", {}),
    ("second", "history", None),
    ("second", "history", [1]),
    ("second", "history", [{}]),
    *(("second", f"history.0.{name}", ...) for name in ("loss", "scale")),
    ("second", "history.0.terms", {"content": "1"}),
    ("second", "result", None),
    ("second", "result", {}),
    ("second", "result.image", None),
    ("second", "result.image", torch.zeros(1, 3, 5, 5)),
    ("second", "result.image", torch.zeros(1, 3, 12, 16, dtype=torch.uint8)),
    ("second", "result.losses", {}),
    ("second", "result.losses", {"total": "1"}),
    ("second", "result.outcome", "lost"),
    ("second", "under_way", {}),
    *(("second", "under_way.plan", value) for value in (..., -1, 10**6, "0", None)),
    ("second", "under_way.history", [{}]),
    *(("second", f"under_way.search.{name}", ...) for name in ("start", "coefficients", "optimizer", "best")),
    *(("second", f"under_way.search.{name}", torch.zeros(7)) for name in ("start", "coefficients", "best")),
    ("second", "under_way.search.best_losses", {"total": None}),
    ("second", "under_way.search.evaluations", "9"),
    ("second", "under_way.search.optimizer", None),
    *(("second", f"under_way.search.optimizer.{name}", ...) for name in ("rows", "counters", "loss")),
    *(("second", f"under_way.search.optimizer.{name}", torch.zeros(7)) for name in ("rows", "previous", "best")),
    *(("second", "under_way.search.optimizer.order", order) for order in ([99], [0, 0], ["0"], [], None)),
    ("second", "under_way.search.optimizer.counters", {"restarts": 1}),
]


@pytest.mark.parametrize("name", ["first", "second", "end"])
def test_state_of_the_run_passes_its_check(states: Mapping[str, Any], name: str) -> None:
    network = Vgg19(random_weights(), SHALLOW.content_layers + SHALLOW.style_layers)
    check_state(states[name], network, picture(24, 32), SHALLOW)


@pytest.mark.parametrize(("name", "path", "value"), NO_STATES)
def test_state_of_another_form_is_told_from_one(
    states: Mapping[str, Any], name: str, path: str, value: Any
) -> None:
    network = Vgg19(random_weights(), SHALLOW.content_layers + SHALLOW.style_layers)
    with pytest.raises(ValueError):
        check_state(changed(states[name], path, value), network, picture(24, 32), SHALLOW)


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam", "torch-lbfgs"])
def test_search_takes_only_a_search(optimizer: Any) -> None:
    found = Search(Task(), picture(12, 14, seed=8), Settings(optimizer=optimizer))
    for _ in range(3):
        found.step()
    form = torch.empty(1, 3, 12, 14, device="meta")
    other = Search(Task(), form, Settings(optimizer=optimizer))
    other.check_state_dict(found.state_dict())
    wrongs: list[Any] = [[], {}, {**found.state_dict(), "optimizer": 3}, {**found.state_dict(), "best": 1}]
    for wrong in wrongs:
        with pytest.raises(ValueError):
            other.check_state_dict(wrong)


def test_forecast_judges_by_what_this_process_has_seen() -> None:
    forecast = Forecast()
    forecast.start(ScaleStarted(1, 2, 128, 96, 40, before=60))
    left = [forecast.left(Evaluated(1, 2, made, 100, seconds, 1.0)) for made, seconds in ((81, 500.0), (82, 502.0))]
    assert left == [None, pytest.approx(2 * 18)]


# From outside


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pictures")
    content, style = folder / "photo.png", folder / "painting.png"
    save_picture(picture(48, 64), content)
    save_picture(picture(40, 40, seed=1), style)
    return content, style


@pytest.fixture(scope="module")
def stylizer() -> Stylizer:
    return Stylizer(Settings(size=64, scales=2, iterations=8, device="cpu", checkpoint_every_s=1e-6))


def interrupt_at(evaluation: int) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, Evaluated) and event.evaluation == evaluation:
            raise KeyboardInterrupt

    return listen


def test_same_call_goes_on_and_gives_the_same_bytes(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    """Over the picture that the interrupted run has saved, and the checkpoint is gone at the end."""
    stylizer(*pictures, out=tmp_path / "whole.png")
    kept: dict[str, Any] = {"out": tmp_path / "result.png", "checkpoint": tmp_path / "kept"}
    for at in (2, 7):
        assert stylizer(*pictures, on_event=interrupt_at(at), **kept).outcome == "interrupted"
        assert (tmp_path / "kept" / NAME).exists()
    result = stylizer(*pictures, **kept)
    assert result.path is not None
    assert result.path.read_bytes() == (tmp_path / "whole.png").read_bytes()
    assert any("goes on" in notice and "7 evaluations" in notice for notice in result.notices)
    assert list((tmp_path / "kept").iterdir()) == []


def test_picture_that_is_no_interrupted_one_of_the_job_is_not_replaced(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "result.png"
    kept: dict[str, Any] = {"out": out, "checkpoint": tmp_path / "kept"}
    stylizer(*pictures, on_event=interrupt_at(2), **kept)
    for other in (picture(8, 8), None):
        if other is not None:
            save_picture(other, out, overwrite=True)
        else:
            stylizer(*pictures, out=out, overwrite=True)  # a finished one
        with pytest.raises(OutputError, match="exists already"):
            stylizer(*pictures, **kept)


def test_interrupted_picture_is_kept_where_there_is_no_checkpoint(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "result.png"
    stylizer(*pictures, out=out, on_event=interrupt_at(2))
    with pytest.raises(OutputError, match="exists already"):
        stylizer(*pictures, out=out, checkpoint=tmp_path / "kept")


@pytest.mark.parametrize(
    ("path", "value"), [("", {}), ("scale", 9), ("under_way.plan", ...)]
)
def test_state_of_another_form_is_damage(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path, path: str, value: Any
) -> None:
    """Also where digest and identity are right: it is told, and the run starts afresh and takes its place."""
    stylizer(*pictures, on_event=interrupt_at(7), checkpoint=tmp_path)
    identity, state = read_state(tmp_path / NAME)
    write_state(tmp_path / NAME, changed(state, path, value), identity)
    heard: list[Event] = []
    result = stylizer(*pictures, checkpoint=tmp_path, on_event=heard.append)
    assert [notice for notice in result.notices if "is damaged" in notice and "starts afresh" in notice]
    assert next(event for event in heard if isinstance(event, Evaluated)).evaluation == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [{}, {"state": "[]"}, {"state": "{}", "identity": "3"}])
def test_file_without_state_or_identity_is_damage(tmp_path: Path, metadata: dict[str, str]) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "plain", metadata={"format": module.FORMAT, **metadata})
    whole = (tmp_path / "plain").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["sha256"] = {"dtype": "U8", "shape": [32], "data_offsets": [12, 44]}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + whole[8 + length :]
    (tmp_path / NAME).write_bytes(data + hashlib.sha256(data).digest())
    with pytest.raises(ValueError, match="it has no"):
        read_state(tmp_path / NAME)


def test_folder_is_the_runs_own_from_its_start_to_its_end(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    """Also when there is no file yet; and each end, a failure too, lets others in."""

    def listen(event: Event) -> None:
        if isinstance(event, ScaleStarted) and event.scale == 0:
            second = command(*pictures, "--out", tmp_path / "second.png", "--checkpoint", tmp_path / "kept")
            assert second.exit_code == 2
            assert f"Another stylize is at work in {tmp_path / 'kept'}" in second.stderr
            raise LookupError("the user's own")

    with pytest.raises(LookupError):
        stylizer(*pictures, checkpoint=tmp_path / "kept", on_event=listen)
    assert not (tmp_path / "second.png").exists()
    assert stylizer(*pictures, checkpoint=tmp_path / "kept").outcome == "done"


def test_other_job_is_refused(stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path) -> None:
    content, style = pictures
    stylizer(content, style, on_event=interrupt_at(2), checkpoint=tmp_path)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(OutputError, match=r"content, styles.* differ|differs in content, styles"):
        stylizer(style, content, checkpoint=tmp_path)
    other = Stylizer(stylizer.settings.replace(iterations=9))
    with pytest.raises(OutputError, match=r"iterations \(8 there, 9 here\)"):
        other(content, style, checkpoint=tmp_path)
    assert (tmp_path / NAME).read_bytes() == before


def test_names_of_the_files_and_times_of_writing_are_not_the_job(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    content, style = pictures
    stylizer(content, style, on_event=interrupt_at(3), checkpoint=tmp_path)
    renamed = tmp_path / "another name.png"
    renamed.write_bytes(content.read_bytes())
    later = Stylizer(stylizer.settings.replace(checkpoint_every_s=1000))
    heard: list[Event] = []
    later(renamed, style, checkpoint=tmp_path, on_event=heard.append)
    assert next(event for event in heard if isinstance(event, Evaluated)).evaluation == 4


def test_hooks_of_the_users_are_refused(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="gradient_hooks"):
        stylizer(*pictures, checkpoint=tmp_path, gradient_hooks=[lambda gradient: gradient])


def test_full_disk_does_not_end_the_run(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    result = stylizer(*pictures, checkpoint=tmp_path)
    assert result.outcome == "done"
    assert [notice for notice in result.notices if "No space left" in notice] == list(result.notices)
    assert len(result.notices) == 1


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.program, [str(argument) for argument in arguments])


def test_command_refuses_checkpoints_of_folders_and_of_other_jobs(
    stylizer: Stylizer, pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    stylizer(*pictures, on_event=interrupt_at(2), checkpoint=tmp_path)
    out = tmp_path / "result.png"
    of_another = command(*pictures, "--out", out, "--checkpoint", tmp_path)
    assert of_another.exit_code == 2
    assert "another job" in of_another.stderr
    of_a_folder = command(pictures[0].parent, pictures[1], "--out", tmp_path / "o", "--checkpoint", tmp_path)
    assert of_a_folder.exit_code == 2
    assert "--checkpoint" in of_a_folder.stderr
    assert not out.exists()


# Kills

KILLED = """
import os, signal, sys
import torch
from stylize.api import Stylizer
from stylize.events import Evaluated
from stylize.settings import Settings

content, style, folder, *kills = sys.argv[1:]
torch.set_num_threads(1)
layers = {"content_layers": ("relu2_2",), "style_layers": ("relu1_1", "relu2_1"), "style_layer_weights": None}
stylizer = Stylizer(Settings(size=64, scales=2, iterations=60, device="cpu", checkpoint_every_s=0.01, **layers))
stylizer._load_network()  # once, for all the processes below


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def paint(out, kill):
    evaluations = writings = 0
    sync = os.fsync

    def listen(event):
        nonlocal evaluations
        evaluations += isinstance(event, Evaluated)
        if kill.isdigit() and evaluations == int(kill):
            die()

    def dying_sync(file):  # with the file complete, and the one before still in its place
        nonlocal writings
        writings += 1
        die() if writings == 5 else sync(file)

    os.fsync = dying_sync if kill == "writing" else sync
    stylizer(content, style, out=out, checkpoint=folder if kill else None, on_event=listen)


for number, kill in enumerate(["", *kills, "never"]):
    child = os.fork()
    if child == 0:
        paint(f"{folder}/{'killed' if kill else 'whole'}.png", kill)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(kill, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "ended", os.WEXITSTATUS(status))
"""
KILLS = ("1", "9", "17", "writing", "2", "11", "writing", "6", "3", "8")  # evaluations after each start


def test_run_that_is_killed_ten_times_gives_the_bytes_of_the_uninterrupted_one(
    pictures: tuple[Path, Path], tmp_path: Path
) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", KILLED, *map(str, pictures), str(tmp_path), *KILLS],
        capture_output=True,
        text=True,
        check=False,
    )
    ends = [line.split()[-2] for line in process.stdout.splitlines()]
    assert ends == ["ended", *["9"] * 10, "ended"], process.stdout + process.stderr
    assert (tmp_path / "killed.png").read_bytes() == (tmp_path / "whole.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.png", "whole.png"]
