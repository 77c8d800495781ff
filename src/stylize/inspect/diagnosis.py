"""Numbers to sentences: is a layer dead, does the gradient vanish or explode, does one term drown the others?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from stylize.inspect.measure import Numbers
from stylize.nst.hooks import LayerFlow

DEAD = 0.999  # share of zeros: ReLU layers of a healthy VGG19 have 0.2 to 0.9
# A gradient's norm may change by so much between the layer where it begins and any other. Through the sixteen
# layers of VGG19 it changes by less than 100; in float32, 1e4 is where the smaller half of the digits goes.
GROWTH = 1e4
DOMINANT = 0.9  # share of the weighted loss
CROWDED = 0.05  # share of a picture's values at 0 or 255, beyond that of the pictures it was made from


@dataclass(frozen=True)
class Finding:
    """One thing that was found, as a sentence."""

    kind: Literal["fine", "dead", "vanishing", "exploding", "not finite", "dominant", "bounds", "clipped"]
    text: str

    @property
    def fine(self) -> bool:
        """Is there nothing to worry about?"""
        return self.kind == "fine"


def diagnose(flows: Mapping[str, LayerFlow]) -> list[Finding]:
    """Judge what `watch_gradients` saw in any network after a backward pass; an empty list is a clean bill."""
    activations = {layer: flow.activation.as_floats() for layer, flow in flows.items()}
    gradients = {layer: flow.gradient.as_floats() for layer, flow in flows.items() if flow.gradient is not None}
    return [*judge_activations(activations), *judge_gradients(gradients)]


def judge_activations(activations: Mapping[str, Numbers]) -> list[Finding]:
    """Judge activations by layer, in the order of the forward pass."""
    findings = []
    for layer, numbers in activations.items():
        if numbers["finite"] < 1:
            share = _percent(1 - numbers["finite"])
            text = f"{layer} puts out values that are not finite: {share} of them."
            findings.append(Finding("not finite", text))
        elif numbers["zeros"] >= DEAD:
            share = _percent(numbers["zeros"])
            text = f"{layer} is dead: {share} of its values are 0, and almost nothing flows back through it."
            findings.append(Finding("dead", text))
    means = {layer: numbers["mean"] for layer, numbers in activations.items()}
    alive = {layer: mean for layer, mean in means.items() if 0 < mean < math.inf}
    if alive:
        findings += _judge_change(alive, next(iter(alive)), "The activation", "mean")
    return findings


def judge_gradients(gradients: Mapping[str, Numbers], what: str = "The gradient") -> list[Finding]:
    """Judge the gradients of one loss by layer, in the order of the forward pass."""
    findings = []
    for layer, numbers in gradients.items():
        if numbers["finite"] < 1:
            findings.append(Finding("not finite", f"{what} is not finite at {layer}."))
    norms = {layer: numbers["norm"] for layer, numbers in gradients.items() if math.isfinite(numbers["norm"])}
    begins = next((layer for layer in reversed(norms) if norms[layer] > 0), None)
    if begins is None:
        return findings
    before = list(norms)[: list(norms).index(begins)]
    cut = next((layer for layer in reversed(before) if norms[layer] == 0), None)
    if cut is not None:
        text = f"{what} ends at {cut}: it is 0 there, and nothing reaches the layers before it."
        findings.append(Finding("vanishing", text))
    reached = {layer: norm for layer, norm in norms.items() if norm > 0}
    return [*findings, *_judge_change(reached, begins, what, "norm")]


def _judge_change(sizes: Mapping[str, float], begins: str, what: str, measure: str) -> Iterator[Finding]:
    """Compare sizes, all above 0, with the one where they begin."""
    largest, smallest = max(sizes, key=lambda each: sizes[each]), min(sizes, key=lambda each: sizes[each])
    if sizes[largest] > GROWTH * sizes[begins]:
        yield Finding("exploding", f"{what} explodes: {_change(sizes, begins, largest, measure)}")
    if sizes[smallest] < sizes[begins] / GROWTH:
        yield Finding("vanishing", f"{what} vanishes: {_change(sizes, begins, smallest, measure)}")


def _change(sizes: Mapping[str, float], begins: str, ends: str, measure: str) -> str:
    names = list(sizes)
    steps = abs(names.index(ends) - names.index(begins))
    each = (sizes[ends] / sizes[begins]) ** (1 / steps)
    return (
        f"its {measure} is {sizes[begins]:.2g} at {begins} and {sizes[ends]:.2g} at {ends}, "
        f"× {each:.2g} from layer to layer."
    )


def judge_shares(shares: Mapping[str, float]) -> list[Finding]:
    """Judge the weighted terms of a loss by their shares of the sum."""
    return [
        Finding("dominant", f"{name} carries {_percent(share)} of the loss; the other terms hardly count.")
        for name, share in shares.items()
        if share > DOMINANT and len(shares) > 1
    ]


def judge_bounds(share: float, others: float) -> list[Finding]:
    """Judge the share of a picture's values at their bounds, beside that of the pictures it was made from."""
    if share <= others + CROWDED:
        return []
    text = (
        f"{_percent(share)} of the picture's values are at 0 or 255; of the pictures it was made from, at most "
        f"{_percent(others)} are."
    )
    return [Finding("bounds", text)]


def judge_clipping(clipped: int, evaluations: int) -> list[Finding]:
    """Judge how often the guard on the picture's gradient fired in a run."""
    if not clipped:
        return []
    text = (
        f"The gradient was clipped in {clipped} of {evaluations} evaluations ({_percent(clipped / evaluations)}): "
        "the guard is meant never to fire; raise clip_norm or clip_value."
    )
    return [Finding("clipped", text)]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
