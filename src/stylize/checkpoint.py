"""A run's state in a file, from which the same command goes on after a kill, a power cut or Ctrl-C.

The file is in the safetensors format: the state's tensors, and as metadata two texts of JSON, the state around its
tensors and the identity of the job that it belongs to. Its last tensor is the SHA-256 of all bytes before it, so
that damage is noticed. A new file is complete before it takes the place of the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stylize.errors import OutputError
from stylize.events import Listener, Notice
from stylize.images import write_whole
from stylize.locking import held

State: TypeAlias = dict[str, Any]  # numbers, texts, None and tensors, in dicts with texts as keys and in lists

NAME = "stylize-checkpoint.safetensors"
LOCK_NAME = ".stylize-checkpoint.lock"
FORMAT = "stylize-checkpoint-1"
MOST_DIFFERENCES = 4  # that a refusal names

_DIGEST = "sha256"  # the last tensor's name
_DIGEST_BYTES = hashlib.sha256().digest_size
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}


class Checkpoint:
    """The file in which one job keeps its state; `transfer` calls it whenever there is a new one.

    A context manager: inside, this run alone works in the folder. Who only reads need not enter.

    Args:
        folder: that the file is in, or will be.
        identity: what makes two jobs the same, ready for JSON.
        every_s: seconds between two writings.
        tell: hears of a checkpoint that cannot be read or written; the run goes on without.
    """

    def __init__(
        self, folder: str | os.PathLike[str], identity: Mapping[str, Any], every_s: float, tell: Listener
    ) -> None:
        self.path = Path(folder) / NAME
        self._identity = json.loads(json.dumps(identity))  # tuples become lists, as they will in the file
        self._every_s = every_s
        self._tell = tell
        self._written = time.monotonic()
        self._failed = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Checkpoint:
        """Lock the folder, and delete what a kill in the middle of writing has left in it.

        Raises:
            OutputError: when another run is at work there, or it cannot be written to.
        """
        folder = self.path.parent
        try:
            is_ours = self._stack.enter_context(held(folder / LOCK_NAME))
        except OSError as error:
            raise OutputError(
                f"{folder} cannot hold a checkpoint: {error.strerror}. Choose another folder."
            ) from error
        if not is_ours:
            self._stack.close()
            raise OutputError(
                f"Another stylize is at work in {folder}. Wait until it is done, or use another folder."
            )
        for path in folder.glob(f".{NAME[:40]}.*.tmp"):
            with contextlib.suppress(OSError):
                path.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        """Let others in."""
        self._stack.close()

    def __call__(self, make: Callable[[], State], *, now: bool = False) -> None:
        """Write the state that `make` gives, if it is time, or now."""
        if not now and time.monotonic() < self._written + self._every_s:
            return
        try:
            write_state(self.path, make(), self._identity)
        except OSError as error:
            if not self._failed:
                self._tell(Notice(f"The checkpoint cannot be written: {error}. The run goes on without a new one."))
            self._failed = True
        self._written = time.monotonic()

    def load(self, check: Callable[[State], None] = lambda state: None) -> State | None:
        """The state to go on from; None when there is none, or none that is whole.

        Args:
            check: raises ValueError for a state from which the job cannot go on.

        Raises:
            OutputError: when the file cannot be read, or belongs to another job.
        """
        try:
            identity, state = read_state(self.path)
            self._refuse_another(identity)
            check(state)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"{self.path} cannot be read: {error.strerror}. Choose another folder.") from error
        except ValueError as error:
            self._tell(Notice(f"{self.path} is damaged ({error}); the run starts afresh."))
            return None
        return state

    def remove(self) -> None:
        """Delete the file, if it is this job's: the job is done."""
        try:
            if next(_differences(_read_identity(self.path), self._identity), None) is None:
                self.path.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except ValueError:
            return  # damaged, so that nobody knows whose it is
        except OSError as error:
            self._tell(Notice(f"{self.path} is no longer needed but cannot be deleted: {error.strerror}."))

    def _refuse_another(self, identity: Mapping[str, Any]) -> None:
        differences = list(_differences(identity, self._identity))
        if differences:
            more = len(differences) - MOST_DIFFERENCES
            listed = [*differences[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])]
            raise OutputError(
                f"{self.path} belongs to another job, which differs in {', '.join(listed)}. "
                "Use another folder, or delete that file."
            )


def has_checkpoint(folder: str | os.PathLike[str] | None) -> bool:
    """Is there a state to go on from, of whatever job?"""
    return folder is not None and (Path(folder) / NAME).is_file()


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Find out before any computing whether checkpoints can be written to a folder, and make it.

    Raises:
        OutputError: when it cannot be made or written to.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except (OSError, ValueError) as error:
        reason = "it is a file" if place.is_file() else getattr(error, "strerror", None) or error
        raise OutputError(f"{place} cannot hold a checkpoint: {reason}. Choose another folder.") from error


def write_state(path: Path, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Write a state, so that there is always a whole file under this name once there was one.

    Raises:
        OSError: as writing does; the file before is left as it was.
    """
    write_whole(path, _encoded(state, identity), overwrite=True)


def read_state(path: Path) -> tuple[dict[str, Any], State]:
    """The identity of a job, and its state with all tensors on the CPU.

    Raises:
        OSError: as reading does.
        ValueError: when the file is not whole, or no checkpoint; the text says in a few words what is wrong.
    """
    _check_digest(path)
    with _opened(path) as (file, metadata):
        state = _with_tensors(_table(metadata, "state"), file.get_tensor)
        return _table(metadata, "identity"), state


def _read_identity(path: Path) -> dict[str, Any]:
    """As `read_state`, of a file whose tensors need not be whole."""
    with _opened(path) as (_, metadata):
        return _table(metadata, "identity")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """A checkpoint and its metadata; what is wrong with it is a ValueError."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError("it is of another format")
            yield file, metadata
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _table(metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    table = json.loads(metadata.get(name, "null"))
    if not isinstance(table, dict):
        raise ValueError(f"it has no {name}")
    return table


def _check_digest(path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        if file.read() != digest.digest():
            raise ValueError("it is cut short, or some of its bytes have changed")


def _encoded(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """The file, part by part: a tensor is not copied, but from its device."""
    tensors: dict[str, Tensor] = {}
    around = _without_tensors(state, "", tensors)
    metadata = {"format": FORMAT, "identity": json.dumps(identity), "state": json.dumps(around)}
    header = _header(tensors, metadata)
    digest = hashlib.sha256(header)
    yield header
    for tensor in tensors.values():
        part = _bytes(tensor)
        digest.update(part)
        yield part
    yield digest.digest()


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """How a safetensors file begins: which tensors come, and where each one's bytes are."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in {**tensors, _DIGEST: torch.empty(_DIGEST_BYTES, dtype=torch.uint8)}.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the tensors' bytes are aligned
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The same, ready for JSON: in the place of each tensor its name, under which it is put into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: _without_tensors(each, f"{name}/{key}", tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(each, f"{name}/{i}", tensors) for i, each in enumerate(value)]
    return value


def _with_tensors(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The reverse of `_without_tensors`."""
    if isinstance(value, list):
        return [_with_tensors(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        return tensor(str(value[_TENSOR]))
    return {key: _with_tensors(each, tensor) for key, each in value.items()}


_TENSOR = "tensor"


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """In words, where two identities differ: `content`, `iterations (60 there, 80 here)`."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            inner = key if name in ("", "settings") else name if key == "sha256" else f"{name}.{key}"
            yield from _differences(there.get(key), here.get(key), inner)
    elif there != here and not (_is_nan(there) and _is_nan(here)):
        short = not any(isinstance(value, (dict, list)) or len(str(value)) > 40 for value in (there, here))
        words = ["not set" if value is None else value for value in (there, here)]
        yield "{} ({} there, {} here)".format(name, *words) if short else name


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
