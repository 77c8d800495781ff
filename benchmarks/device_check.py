"""Check one device in one go: correctness against the CPU, speed, memory, a whole run. At most 8 minutes on CUDA.

    python benchmarks/device_check.py [--device cuda] [--tiny]

Prints one table in Markdown with the device's name. `--tiny` (the default without CUDA) uses sizes that a
processor finishes in seconds, to see that the script works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from evaluator import read
from stylize import Settings, Stylizer
from stylize.nst.device import choose_device
from stylize.nst.objective import Objective
from stylize.nst.optimize import Search
from stylize.nst.transfer import Style, resize
from stylize.nst.vgg import Vgg19, load_weights

ASSETS = Path(__file__).parents[1] / "assets"
CONTENT, STYLE = ASSETS / "content" / "red_panda.webp", ASSETS / "style" / "starry_night.png"
MULTIPLY_ADDS_A_PIXEL = 361_152  # of VGG19 to relu5_1, forward: 3 × 3 · C_in · C_out over the stride's square

Row = tuple[str, str]


def synchronize(device: torch.device) -> None:
    """Wait for a device's queue, if it has one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def search(device: torch.device, dtype: torch.dtype, width: int, height: int) -> Search:
    """The default run's search at one size."""
    settings = Settings()
    network = Vgg19(load_weights(), settings.content_layers + settings.style_layers, dtype=dtype).to(device)
    content = resize(read(CONTENT).float(), (width, height)).to(device)
    style = Style(network, [read(STYLE).float()], settings).at(max(width, height), device)
    return Search(Objective(network, content, style, settings), content, settings)


def correctness(device: torch.device) -> Iterator[Row]:
    """Loss and gradient of one evaluation against float32 on the CPU."""

    def evaluate(where: torch.device, dtype: torch.dtype) -> tuple[float, Tensor]:
        state = search(where, dtype, 96, 64)
        loss = state.step().loss
        gradient = state.coefficients.grad
        assert gradient is not None
        return loss, gradient.double().cpu()

    loss, gradient = evaluate(torch.device("cpu"), torch.float32)
    for dtype, loss_limit, gradient_limit in ((torch.float32, 1e-3, 1e-2), (torch.bfloat16, 3e-2, 0.2)):
        if device.type == "mps" and dtype == torch.bfloat16:
            continue
        other_loss, other = evaluate(device, dtype)
        loss_error = abs(other_loss / loss - 1)
        gradient_error = float((other - gradient).norm() / gradient.norm())
        verdict = "ok" if loss_error < loss_limit and gradient_error < gradient_limit else "FAILED"
        name = str(dtype).removeprefix("torch.")
        found = f"{verdict}: loss {loss_error:.1e}, gradient {gradient_error:.1e}"
        yield f"{name} against the CPU's float32", found


def peak(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of a large matrix product."""
    matrix = torch.randn(side, side, device=device).to(dtype)
    taken = []
    for _ in range(6):
        synchronize(device)
        begun = time.perf_counter()
        matrix @ matrix
        synchronize(device)
        taken.append(time.perf_counter() - begun)
    return 2 * side**3 / statistics.median(taken[2:])


def speed(device: torch.device, sizes: tuple[int, ...], steps: int, side: int) -> Iterator[Row]:
    """Time of an evaluation, share of the matrix product's rate, and peak memory, for each size and precision."""
    for dtype in (torch.bfloat16, torch.float32):
        if device.type == "mps" and dtype == torch.bfloat16:
            continue
        name = "bf16" if dtype == torch.bfloat16 else "TF32 or fp32"
        rate = peak(device, dtype, side)
        yield f"{name}: matrix product", f"{rate / 1e12:.2f} TFLOP/s"
        for size in sizes:
            height = size * 3 // 4
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            state = search(device, dtype, size, height)
            taken = []
            for _ in range(steps + 3):
                synchronize(device)
                begun = time.perf_counter()
                state.step()
                synchronize(device)
                taken.append(time.perf_counter() - begun)
            step = statistics.median(taken[3:])
            share = 4 * MULTIPLY_ADDS_A_PIXEL * size * height / step / rate
            memory = "memory not measured"
            if device.type == "cuda":
                memory = f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
            yield f"{name}: {size}×{height}", f"{1e3 * step:.1f} ms, {share:.0%} of the product's rate, {memory}"


def whole_run(device: torch.device, size: int) -> Row:
    """A full default run, without reading and writing files."""
    stylizer = Stylizer(Settings(size=size, device=str(device)))
    result = stylizer(CONTENT, STYLE)
    told = f"{result.seconds:.1f} s, {result.evaluations} evaluations, {result.outcome}"
    return f"a whole run at {size} px", told


def check(device: torch.device, *, tiny: bool) -> list[Row]:
    """All rows; those of a size that does not fit say so."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rows: list[Row] = [("device", f"{name}, torch {torch.__version__}")]
    rows += correctness(device)
    sizes = (64, 96) if tiny else (512, 1024, 2048, 4096)
    try:
        rows += speed(device, sizes, steps=2 if tiny else 10, side=256 if tiny else 8192)
    except torch.OutOfMemoryError:
        rows.append(("larger sizes", "out of memory"))
    rows.append(whole_run(device, 64 if tiny else 1024))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    print("| | |\n| --- | --- |")
    for name, value in check(device, tiny=arguments.tiny or device.type != "cuda"):
        print(f"| {name} | {value} |", flush=True)


if __name__ == "__main__":
    main()
