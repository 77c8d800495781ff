"""Which device paints, in which precision, and how much memory there is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stylize.errors import SettingsError
from stylize.settings import Precision


def choose_device(name: str = "auto") -> torch.device:
    """The device that a user means by `name`: auto, cpu, cuda, cuda:N or mps.

    "auto" is the first CUDA device, else MPS, else the CPU.

    Raises:
        SettingsError: when there is no such device here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"There is no device {name!r}; it can be auto, cpu, cuda, cuda:N or mps.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise SettingsError(
                f"device {name!r} is not there: torch sees {count} CUDA devices. "
                "Use --device cpu, or install a torch that fits the graphics driver."
            )
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise SettingsError("device 'mps' is not there: this torch sees no Apple GPU. Use --device cpu.")
    elif device.type != "cpu":
        raise SettingsError(f"device {name!r} is not supported; it can be auto, cpu, cuda, cuda:N or mps.")
    return device


def choose_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of weights and features; the picture, the losses and the optimiser are always float32.

    "auto" is bfloat16 where the hardware multiplies it faster than float32 (CUDA from Ampere on, processors
    with AVX512-BF16 or AMX), float32 elsewhere.

    Raises:
        SettingsError: for bf16 on a device that cannot do it.
    """
    if precision == "fp32":
        return torch.float32
    if precision == "bf16":
        if device.type == "mps":
            raise SettingsError("precision 'bf16' is not offered on MPS; use fp32 or auto.")
        return torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    if device.type == "cpu" and _cpu_has_bf16():
        return torch.bfloat16
    return torch.float32


@contextmanager
def tuned(device: torch.device) -> Iterator[None]:
    """torch's switches as painting wants them on a device, for a while; whatever they were comes back.

    On CUDA: cuDNN tries its algorithms once for each shape, which pays since a scale has one shape for a
    hundred evaluations, and float32 convolutions may use TF32.
    """
    if device.type != "cuda":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
        yield


def _cpu_has_bf16() -> bool:
    capabilities = torch.backends.cpu.get_cpu_capability()
    if "AVX512" not in capabilities:
        return False
    # torch names the question differently from release to release, and has no public one.
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        supported = getattr(torch.cpu, name, None)
        if supported is not None and supported():
            return True
    return False


def free_memory(device: torch.device) -> float:
    """Bytes that this process may use on a device, those that it uses already among them; infinite if nobody tells.

    Of a Mac's GPU, which shares the machine's memory, that is the machine's.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux: what other programs use is not known
        return memory()
    available = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return min(memory(), available + pages * os.sysconf("SC_PAGE_SIZE"))


def memory() -> float:
    """Bytes of memory that this process and its children may use in all; infinite when nobody tells."""
    limits = [_number(path) for path in _limit_files()]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    return min((limit for limit in limits if limit > 0), default=float("inf"))


def _limit_files() -> list[Path]:
    """Where Linux keeps the limits of containers and of jobs under Slurm (control groups, both versions)."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files = []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if not controllers:
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        files += [root / part.lstrip("/") / name for part in ("", group)]
    return files


def _number(path: Path) -> float:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0.0
