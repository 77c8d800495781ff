"""What one evaluation costs, and where its time goes.

    python benchmarks/evaluation.py [--size 768] [--repeat 9] [--json FILE]

Prints the rate of a whole step of the default run (losses, gradient, L-BFGS) over the machine's own rates: a
large matrix product and the best single 3 × 3 convolution, in bfloat16 and float32; and the share of the step
that is not the network: hooks, losses and optimiser. Medians; the parts are measured in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stylize.nst.device import choose_device, choose_dtype
from stylize.nst.objective import Objective, measure_style
from stylize.nst.optimize import Search
from stylize.nst.vgg import Vgg19, load_weights
from stylize.process import prepare, wait_briefly
from stylize.settings import Settings


def seconds(work: Callable[[], object], repeat: int) -> list[float]:
    """The seconds of `repeat` calls, after two that are not counted."""
    taken = []
    for turn in range(repeat + 2):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn >= 2:
            taken.append(time.perf_counter() - begun)
    return taken


def multiply_adds(network: Vgg19, height: int, width: int) -> int:
    """Multiply-adds of the network's convolutions in one forward pass, counted from its modules."""
    count = 0
    for module in network:
        if isinstance(module, torch.nn.Conv2d):
            count += module.weight.numel() * height * width
        elif not isinstance(module, torch.nn.ReLU) and module is not network[0]:
            height, width = height // 2, width // 2
    return count


def product_rate(dtype: torch.dtype, device: torch.device, repeat: int) -> float:
    """FLOP/s of a 4096³ matrix product."""
    matrix = torch.randn(4096, 4096, device=device).to(dtype)
    return float(2 * 4096**3 / statistics.median(seconds(lambda: matrix @ matrix, repeat)))


def convolution_rate(dtype: torch.dtype, device: torch.device, size: int, repeat: int) -> float:
    """The best FLOP/s of the network's own convolutions, forward, at the sizes that they have in it."""
    rates = []
    for channels, shrink in ((64, 1), (128, 2), (256, 4), (512, 8)):
        height, width = size * 3 // 4 // shrink, size // shrink
        image = torch.randn(1, channels, height, width, device=device).to(dtype, memory_format=torch.channels_last)
        weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype, memory_format=torch.channels_last)
        taken = seconds(lambda image=image, weight=weight: F.conv2d(image, weight, padding=1), repeat)  # type: ignore[misc]
        rates.append(2 * 9 * channels**2 * height * width / statistics.median(taken))
    return max(rates)


def measure(size: int, repeat: int, precision: str = "auto") -> dict[str, float]:
    """All figures at one size (long side, 4:3)."""
    settings = Settings(precision=precision)  # type: ignore[arg-type]
    device = choose_device()
    dtype = choose_dtype(settings.precision, device)
    generator = torch.Generator().manual_seed(0)
    content, style = (
        F.interpolate(torch.rand(1, 3, 24, 32, generator=generator), (size * 3 // 4, size), mode="bicubic")
        .clamp(0, 1)
        .to(device)
        for _ in range(2)
    )
    network = Vgg19(load_weights(), settings.content_layers + settings.style_layers, dtype=dtype).to(device)
    objective = Objective(network, content, measure_style(network, style, settings), settings)
    search = Search(objective, content, settings)

    def network_alone() -> Tensor:
        image = content.clone().requires_grad_()
        features = network(image)
        features.backward(torch.ones_like(features))
        return image

    def forward_and_losses() -> None:
        image = content.clone().requires_grad_()
        objective(image).total.backward()

    for _ in range(settings.history + 1):  # a full history: the optimiser's real cost
        search.step()
    whole, bare, losses = [], [], []
    for _ in range(repeat):  # in turn, so that a slow moment meets all three
        whole += seconds(search.step, 1)
        bare += seconds(network_alone, 1)
        losses += seconds(forward_and_losses, 1)
    step = statistics.median(whole)
    flops = 2 * 2 * multiply_adds(network, size * 3 // 4, size)
    best = convolution_rate(dtype, device, size, repeat)
    return {
        "size": size,
        "step_s": step,
        "network_s": statistics.median(bare),
        "network_and_losses_s": statistics.median(losses),
        "step_gflops": flops / step / 1e9,
        "best_convolution_gflops": best / 1e9,
        "matrix_product_gflops": product_rate(dtype, device, repeat) / 1e9,
        "matrix_product_fp32_gflops": product_rate(torch.float32, device, repeat) / 1e9,
        "share_of_best_convolution": flops / step / best,
        "share_not_network": 1 - statistics.median(b / w for b, w in zip(bare, whole, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if wait_briefly():  # too late for torch, which is loaded here: once more from the beginning
        os.execv(sys.executable, [sys.executable, *sys.argv])
    prepare()  # as the command does
    figures = measure(arguments.size, arguments.repeat, arguments.precision)
    for name, value in figures.items():
        print(f"{name:30} {value:10.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
