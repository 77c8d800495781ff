"""What a picture will cost before it is painted: memory by its pixels, time by its operations.

Both go by the number of pixels of the result, not by its long side: a square costs more than a panorama.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from stylize.batch.plan import Job
from stylize.errors import InputError
from stylize.images import is_far_larger
from stylize.nst.device import choose_device, choose_dtype, memory
from stylize.nst.memory import Plan as MemoryPlan
from stylize.nst.memory import features_per_pixel, plan_memory
from stylize.nst.transfer import plan_stops, scale_sizes, target_size
from stylize.settings import Settings

DECODED_BYTES = 4  # a pixel of the file while it is read: three colours of 8 bits, which Pillow keeps in four
FLOAT_BYTES = 12  # a pixel of a content picture: three floats


def peak_bytes(job: Job, settings: Settings, bytes_per_feature: int) -> float:
    """Memory of a process that paints a picture in one piece, at its peak, about."""
    return _plan(job, settings, bytes_per_feature, float("inf")).total


def _plan(job: Job, settings: Settings, bytes_per_feature: int, limit: float) -> MemoryPlan:
    return plan_memory(
        target_size(*job.size, settings),
        settings,
        limit=limit,
        source_bytes=content_bytes(job, settings),
        device=torch.device("cpu"),
        width=bytes_per_feature,
    )


def content_bytes(job: Job, settings: Settings) -> float:
    """Memory for the content that is painted and for the one that is read next."""
    if settings.size != "full" and is_far_larger(job.size, max(target_size(*job.size, settings))):
        return DECODED_BYTES * job.pixels  # of which little is kept
    return (DECODED_BYTES + 2 * FLOAT_BYTES) * job.pixels


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
    """Why a picture does not fit in so many bytes, not even in tiles, and which size would; None when it fits."""
    try:
        _plan(job, settings, bytes_per_feature, memory)
    except InputError as error:
        return f"{job.content}: {error}"
    return None


# ---- this machine -------------------------------------------------------------------------------------


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
