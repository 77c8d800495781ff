"""`stylize inspect`: read the pictures, measure them, judge what was measured, and write the report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stylize import images
from stylize.errors import InputError, OutputError, PictureError
from stylize.images import Picture, Source
from stylize.inspect.diagnosis import (
    Finding,
    judge_activations,
    judge_bounds,
    judge_clipping,
    judge_gradients,
    judge_shares,
)
from stylize.inspect.extra import require
from stylize.inspect.measure import (
    Flow,
    Subject,
    look,
    measure_flow,
    share_at_bounds,
    style_targets,
)
from stylize.nst.classifier import Classifier, find_class, load_classifier
from stylize.nst.device import choose_device
from stylize.nst.hooks import watch_gradients
from stylize.nst.objective import Objective
from stylize.nst.transfer import resize, style_size, target_size
from stylize.nst.vgg import Vgg19, load_weights, minimum_size
from stylize.settings import LAYERS, Settings

REPORT = "report.html"
FIGURES = ("gram", "features")  # of each layer; flow and heat are those of the losses
PROPORTIONS = 0.02  # how much a result's may differ from its content's, by rounding to whole pixels


@dataclass(frozen=True)
class Report:
    """What was written, and what was found."""

    path: Path  # the HTML file
    pictures: tuple[Path, ...]  # the PNG files beside it
    findings: tuple[Finding, ...]


def inspect_picture(
    content: Source,
    style: Source | None = None,
    *,
    out: str | os.PathLike[str],
    result: Source | None = None,
    layers: Sequence[str] | None = None,
    settings: Settings | None = None,
    explain: str | None = None,
    classifier: str | Classifier = "torchvision",
    overwrite: bool = False,
    max_pixels: int | None = None,
    **overrides: Any,
) -> Report:
    """Write an HTML report, and its pictures as PNG, on what the network sees in pictures and what it asks.

    The network works in float32, whatever the settings' precision.

    Args:
        content: a path, a PIL image, a tensor or an array, as `stylize.stylize` takes them.
        style: the same; without it there are no losses to speak of.
        out: the folder to write to; it is made.
        result: what was painted from these two; without it, the losses are those of the content picture.
        layers: which to look at; None = all that the settings measure.
        settings: whose losses are explained; None = those inside `result` when it has some, else the defaults.
        explain: an ImageNet class, by name or number, or "top" for the likeliest, to be found in each picture.
        classifier: "torchvision" (a download), the path of its state dict, or a loaded one; for `explain`.
        overwrite: may an older report be replaced, or what has the name of one of its pictures?
        max_pixels: refuse to read larger pictures; None is Pillow's own limit.
        overrides: single settings, on top.

    Raises:
        RefusedError: before anything is computed: a picture, a layer, the folder, weights, a missing library.
        InputError: when the result has other proportions than the content, or a picture is too small.
        SaveError: when the report cannot be written.
    """
    require("matplotlib")
    sources = {"content": content, "style": style, "result": result}
    limit = max_pixels or images.DEFAULT_MAX_PIXELS
    read = {
        name: images.read_picture(source, max_pixels=limit)
        for name, source in sources.items()
        if source is not None
    }
    settings = (settings or _settings_of(result)).replace(**overrides)
    chosen = _chosen_layers(layers, settings)
    size = _common_size(read, settings)
    _check_size(size, (*chosen, *settings.style_layers, *settings.content_layers))
    number = None if explain in (None, "top") else find_class(str(explain))
    folder = _check_folder(Path(out), chosen, overwrite=overwrite)
    if explain is not None and not isinstance(classifier, Classifier):
        classifier = load_classifier(classifier)
    from stylize.inspect.chapters import write_report  # it draws, which needs the extra

    subject = _look(read, size, chosen, settings)
    objective = _objective(subject) if "style" in subject.pictures else None
    flow = None if objective is None else measure_flow(objective, subject.pictures[subject.last])
    found = _judge_without_losses(subject) if flow is None else _judge(subject, flow)
    explained = (classifier, number) if isinstance(classifier, Classifier) and explain is not None else None
    written = write_report(folder / REPORT, subject, found, objective, flow, explained)
    return Report(folder / REPORT, tuple(written), tuple(found))


# ---- what is looked at -------------------------------------------------------------------------------


def _settings_of(result: Source | None) -> Settings:
    """The settings inside a result, or the defaults where it has none."""
    if not isinstance(result, (str, os.PathLike)):
        return Settings()
    try:
        return Settings.from_sources(images.read_settings(result))
    except PictureError:
        return Settings()


def _chosen_layers(layers: Sequence[str] | None, settings: Settings) -> tuple[str, ...]:
    wanted = layers or (*settings.style_layers, *settings.content_layers)
    settings.replace(content_layers=tuple(wanted))  # refuses what is no layer
    return tuple(sorted(set(wanted), key=LAYERS.index))


def _check_folder(folder: Path, layers: Sequence[str], *, overwrite: bool) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror}. Choose another folder.") from error
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder} cannot be written to. Choose another folder.")
    names = [REPORT, "flow.png", "heat_*.png", *(f"{what}_{layer}*.png" for layer in layers for what in FIGURES)]
    taken = [path for name in names for path in folder.glob(name)]
    if taken and not overwrite:
        raise OutputError(f"{taken[0]} exists already. Choose another folder, or replace it with --overwrite.")
    return folder


def _look(
    read: Mapping[str, Picture], size: tuple[int, int], layers: tuple[str, ...], settings: Settings
) -> Subject:
    device = choose_device(settings.device)
    network = Vgg19(
        load_weights(settings.weights, settings.weights_normalization),
        (*layers, *settings.style_layers, *settings.content_layers),
        pooling=settings.pooling,
        padding=settings.padding,
    ).to(device)
    pictures = {name: resize(read[name].tensor, size) for name in ("content", "result") if name in read}
    if "style" in read:
        style = read["style"]  # as large as in a run
        pictures["style"] = resize(
            style.tensor, style_size(*style.size, max(size), settings, network.minimum_size)
        )
    pictures = {name: pictures[name].to(device) for name in ("content", "style", "result") if name in pictures}
    measured = tuple(sorted({*layers, *settings.style_layers}, key=LAYERS.index))
    sights = {name: look(network, picture, measured) for name, picture in pictures.items()}
    names = {name: Path(picture.source).name for name, picture in read.items()}
    return Subject(settings, layers, network, names, pictures, sights)


def _common_size(read: Mapping[str, Picture], settings: Settings) -> tuple[int, int]:
    """Width and height at which content and result are compared: the result's own."""
    width, height = read["content"].size
    if "result" not in read:
        return target_size(width, height, settings)
    own = read["result"].size
    if abs(own[0] / own[1] * height / width - 1) > PROPORTIONS + 1 / min(own):
        raise InputError(
            f"The result has {own[0]}×{own[1]} px and the content {width}×{height} px: with other proportions it "
            "was not painted from it."
        )
    return own


def _check_size(size: tuple[int, int], layers: Sequence[str]) -> None:
    least = minimum_size(layers)
    if min(size) < least:
        raise InputError(
            f"The content would be looked at with {size[0]}×{size[1]} px; its layers need at least {least} px a "
            "side. Use a larger --size, a less narrow picture, or shallower layers."
        )


def _objective(subject: Subject) -> Objective:
    settings = subject.settings
    targets = style_targets(subject.sights["style"], settings.style_layers, settings)
    return Objective(subject.network, subject.pictures["content"], targets, settings)


# ---- what is judged ----------------------------------------------------------------------------------


def _judge(subject: Subject, flow: Flow) -> list[Finding]:
    settings = subject.settings
    found = judge_activations(flow.activations)
    for loss in flow.losses:
        if loss.value > 0:
            found += judge_gradients(loss.gradients, f"The gradient of {loss.name}")
    found += judge_shares({loss.name: loss.share for loss in flow.losses})
    found += _judge_range(subject)
    picture = flow.total.picture
    over_norm = settings.clip_norm is not None and picture["norm"] > settings.clip_norm
    over_value = settings.clip_value is not None and picture["largest"] > settings.clip_value
    return found + judge_clipping(int(over_norm or over_value), 1)


def _judge_without_losses(subject: Subject) -> list[Finding]:
    with torch.no_grad(), watch_gradients(subject.network) as flows:
        subject.network(subject.pictures[subject.last])
    activations = {layer: flow.activation.as_floats() for layer, flow in flows.items()}
    return judge_activations(activations) + _judge_range(subject)


def _judge_range(subject: Subject) -> list[Finding]:
    shares = {name: share_at_bounds(picture) for name, picture in subject.pictures.items()}
    others = max(share for name, share in shares.items() if name != "result")
    return judge_bounds(shares[subject.last], others)
