"""What a picture will cost before it is painted: memory by its pixels, time by its operations.

Both go by the number of pixels of the result, not by its long side: a square costs more than a panorama.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from stylize.batch.plan import Job
from stylize.nst.device import choose_device, choose_dtype
from stylize.nst.transfer import plan_stops, scale_sizes, target_size
from stylize.nst.vgg import CHANNELS_PER_BLOCK
from stylize.settings import CONVOLUTIONS_PER_BLOCK, LAYERS, Settings

PROCESS_BYTES = 850e6  # torch, the network and a style: measured on Linux, embedded weights
COPIES = 2  # of the features: their values for the way back, and gradients and buffers on it
CONTENT_BYTES = 24  # a pixel: three floats, of the content that is painted and of the one that is read next


def features_per_pixel(settings: Settings) -> tuple[float, float]:
    """(floats kept, multiply-adds of one forward pass) for each pixel, down to the deepest layer."""
    deepest = max(LAYERS.index(layer) for layer in (*settings.content_layers, *settings.style_layers))
    kept, operations, inputs = 0.0, 0.0, 3
    for block, (channels, count) in enumerate(zip(CHANNELS_PER_BLOCK, CONVOLUTIONS_PER_BLOCK, strict=True)):
        area = 4.0**-block  # pixels of this block for each pixel of the picture
        for convolution in range(count):
            if LAYERS.index(f"conv{block + 1}_{convolution + 1}") > deepest:
                return kept, operations
            kept += channels * area
            operations += 9 * inputs * channels * area
            inputs = channels
    return kept, operations


def peak_bytes(job: Job, settings: Settings, bytes_per_feature: int) -> float:
    """Memory of a process that paints a picture, at its peak, about."""
    width, height = target_size(*job.size, settings)
    kept, _ = features_per_pixel(settings)
    history = 2 * settings.history if settings.optimizer != "adam" else 4
    variables = 3 * 4 / 3 * 4  # bytes a pixel: three colours, all levels of the pyramid, float32
    per_pixel = kept * COPIES * bytes_per_feature + history * variables
    return PROCESS_BYTES + CONTENT_BYTES * job.pixels + per_pixel * width * height


def operations(job: Job, settings: Settings) -> float:
    """Floating point operations for a picture, at most."""
    shape = torch.empty((1, 3, job.size[1], job.size[0]), device="meta")
    sizes = scale_sizes(shape, settings, minimum=1)
    stops = plan_stops(len(sizes), settings, started=0.0)
    _, forward = features_per_pixel(settings)
    return sum(
        # One pass forward and one back to the pixels; a multiplication and an addition each.
        stop.evaluations * width * height * forward * 2 * 2
        for (width, height), stop in zip(sizes, stops, strict=True)
    )


def feature_bytes(settings: Settings) -> int:
    """Bytes of a feature on the device that the settings mean here."""
    return choose_dtype(settings.precision, choose_device(settings.device)).itemsize


def too_many_pixels(job: Job, limit: int) -> str | None:
    """Why a content is not even read; None when it is small enough."""
    if job.pixels <= limit:
        return None
    width, height = job.size
    return (
        f"{job.content} has {width}×{height} = {job.pixels:,} pixels; the limit is {limit:,}. "
        f"Make it smaller, or raise the limit with --max-pixels {job.pixels}."
    )


def too_large(job: Job, settings: Settings, bytes_per_feature: int, memory: float) -> str | None:
    """Why a picture does not fit in so many bytes, and which size would; None when it fits."""
    needed = peak_bytes(job, settings, bytes_per_feature)
    if needed <= memory:
        return None
    fixed = PROCESS_BYTES + CONTENT_BYTES * job.pixels
    width, height = target_size(*job.size, settings)
    text = f"{job.content} would need about {gigabytes(needed)} of memory for {width}×{height} px; "
    text += f"there are {gigabytes(memory)}."
    share = max(0.0, (memory - fixed) / (needed - fixed))  # of the pixels
    fits = int(0.99 * max(width, height) * share**0.5)  # a little less: sides are rounded
    return text + (f" Use --size {fits} or less." if fits >= 16 else " Make the picture smaller first.")


def gigabytes(count: float) -> str:
    """Bytes in words: `3.2 GB`."""
    return f"{count / 1e9:.1f} GB"


# ---- this machine -------------------------------------------------------------------------------------


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def share_out(
    jobs: Sequence[Job], settings: Settings, workers: int | None, threads: int | None
) -> tuple[int, int]:
    """(workers, threads of each) for a processor, of which what is not given is chosen.

    One thread each: small layers leave the second thread waiting, so two processes with a thread each get
    more done than one with two. Fewer processes with more threads where memory, or the number of pictures in
    the whole folder, allows no more. None of it depends on what is done already, so that a run that is taken
    up again gives the same bytes.
    """
    here = cores()
    if workers is None:
        largest = max((peak_bytes(job, settings, feature_bytes(settings)) for job in jobs), default=1.0)
        most = max(1, int(0.8 * memory() / largest))
        workers = max(1, min(here // (threads or 1), len(jobs), most))
    return workers, threads or max(1, here // workers)


def measured_speed(settings: Settings) -> float:
    """Floating point operations a second that all of this machine does in a layer such as the network's."""
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.precision, device)
    channels, side, passes = 128, 128, 8
    image = torch.ones((1, channels, side, side), device=device, dtype=dtype)
    weight = torch.ones((channels, channels, 3, 3), device=device, dtype=dtype)
    image, weight = (each.to(memory_format=torch.channels_last) for each in (image, weight))
    with torch.no_grad():
        float(F.conv2d(image, weight, padding=1).sum())  # the first pass prepares; the sum waits for a device
        started = time.perf_counter()
        for _ in range(passes):
            result = F.conv2d(image, weight, padding=1)
        float(result.sum())
    return passes * 2 * 9 * channels**2 * side**2 / (time.perf_counter() - started)
