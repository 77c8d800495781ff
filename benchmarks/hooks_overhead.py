"""What the hooks of a run cost, beside the evaluation that they sit in: `python benchmarks/hooks_overhead.py`.

The mechanism alone is timed: the network's layers are replaced by modules that do nothing, and the watchers by ones
that do nothing, so that what is left is the registering, calling and removing. It is microseconds, which the noise
of two whole evaluations, one with hooks and one without, would hide. The record of a run (--log-dir) is timed by
itself too, with its picture and histograms every 20 evaluations, and in whole runs, turn about.

On a machine that others use, set OMP_WAIT_POLICY=passive: torch's threads else spin while they wait for one
another, and whole runs measure the others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from stylize.api import Stylizer
from stylize.events import Evaluated, Snapshot, ignore
from stylize.inspect.record import EVERY, Wiring, wired
from stylize.nst.device import choose_device, choose_dtype
from stylize.nst.hooks import guard_gradient, observe
from stylize.nst.objective import Objective
from stylize.nst.transfer import Style
from stylize.nst.vgg import Vgg19, load_weights
from stylize.settings import Settings


def seconds(function: Callable[[], object], repeats: int) -> float:
    """The median time of a call, after one that does not count."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def evaluation_s(settings: Settings, width: int, height: int, repeats: int) -> float:
    """One evaluation of the default objective: losses and the gradient."""
    device = choose_device(settings.device)
    layers = (*settings.content_layers, *settings.style_layers)
    dtype = choose_dtype(settings.precision, device)
    network = Vgg19(load_weights(), layers, dtype=dtype).to(device)
    image = torch.rand(1, 3, height, width).to(device).requires_grad_()
    style = Style(network, [torch.rand(1, 3, height, width)], settings)
    objective = Objective(network, torch.rand_like(image), style.at(width, device), settings)
    return seconds(lambda: float(torch.autograd.grad(objective(image).total, image)[0].sum()), repeats)


def mechanism_s(settings: Settings, width: int, height: int) -> float:
    """The hooks of one evaluation alone: registered, called with nothing to do, removed; and the guard."""
    layers = dict.fromkeys((*settings.content_layers, *settings.style_layers))
    real = Vgg19(load_weights(), layers)
    network = nn.Sequential()
    for name, _ in real.named_children():
        network.add_module(name, nn.Identity())
    picture = torch.zeros(1, 3, height, width)

    def evaluate(hooked: bool) -> None:
        image = picture.clone().requires_grad_() * 1
        watchers = dict.fromkeys(layers, _watch) if hooked else {}
        with observe(network, watchers), guard_gradient(image) if hooked else nullcontext():
            network(image).sum().backward()

    pairs = [(seconds(lambda: evaluate(True), 20), seconds(lambda: evaluate(False), 20)) for _ in range(15)]
    return statistics.median(hooked - bare for hooked, bare in pairs)


def _watch(output: Tensor) -> None:
    """See a layer's output, and do nothing."""


def record_s(settings: Settings, width: int, height: int, count: int = 10 * EVERY) -> float:
    """What the record of a run takes for one evaluation, its files closed and all."""
    terms = dict.fromkeys(("content", "style", "tv", "range", *settings.style_layers), 0.5)
    gradient = torch.rand(1, 3, height, width)
    picture = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        # The import of TensorBoard is paid once a process, before anything is evaluated.
        with wired(Wiring(ignore, None, ()), Path(folder) / "first", settings):
            pass
        started = time.perf_counter()
        with wired(Wiring(ignore, None, ()), Path(folder) / "second", settings) as wiring:
            for i in range(1, count + 1):
                for hook in wiring.gradient_hooks:
                    hook(gradient)
                wiring.listen(Evaluated(0, 1, i, count, 0.0, 1.0, terms, 0.1, 0.2))
                if i % EVERY == 0:
                    wiring.listen(Snapshot(i, picture))
        return (time.perf_counter() - started) / count


def runs_s(settings: Settings, width: int, height: int, pairs: int) -> tuple[float, float]:
    """Seconds of a whole run without and with the record, turn about: the medians."""
    stylizer = Stylizer(settings.replace(size=max(width, height), scales=1, iterations=2 * EVERY))
    content, style = torch.rand(3, height, width), torch.rand(3, height, width)
    plain, recorded = [], []
    with tempfile.TemporaryDirectory() as folder:
        stylizer(content, style, log_dir=Path(folder) / "warm")
        for i in range(pairs):
            plain.append(stylizer(content, style).seconds)
            recorded.append(stylizer(content, style, log_dir=Path(folder) / str(i)).seconds)
    return statistics.median(plain), statistics.median(recorded)


@click.command()
@click.option("--size", "sizes", multiple=True, default=["128x96", "512x384"], show_default=True, metavar="WxH")
@click.option("--repeats", default=5, show_default=True, help="Evaluations to take the median of.")
@click.option("--runs", default=0, show_default=True, help="Pairs of whole runs, with and without the record.")
def main(sizes: tuple[str, ...], repeats: int, runs: int) -> None:
    """Print what hooks and record cost, in microseconds and per cent of an evaluation."""
    settings = Settings()
    click.echo(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for size in sizes:
        width, height = map(int, size.split("x"))
        evaluation = evaluation_s(settings, width, height, repeats)
        click.echo(f"{size}: an evaluation takes {1000 * evaluation:.1f} ms")
        for what, cost in (
            ("hooks", mechanism_s(settings, width, height)),
            ("--log-dir", record_s(settings, width, height)),
        ):
            click.echo(f"    {what:10} {1e6 * cost:7.0f} us = {cost / evaluation:.2%} of it")
        if runs:
            plain, recorded = runs_s(settings, width, height, runs)
            more = recorded / plain - 1
            click.echo(f"    whole runs: {plain:.2f} s without a record, {recorded:.2f} s with: {more:+.1%}")


if __name__ == "__main__":
    main()
