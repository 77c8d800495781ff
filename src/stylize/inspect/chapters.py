"""What the report of `stylize inspect` says, chapter by chapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stylize import images
from stylize.errors import SaveError
from stylize.inspect import report
from stylize.inspect.diagnosis import Finding
from stylize.inspect.drawing import GRAM_CHANNELS, draw_features, draw_flow, draw_grams, draw_heat
from stylize.inspect.gradcam import grad_cam, heat
from stylize.inspect.measure import Flow, Numbers, Subject, content_errors, gram_of, style_errors
from stylize.nst.classifier import CAM_LAYER, Classifier, class_names
from stylize.nst.objective import Objective


def write_report(
    path: Path,
    subject: Subject,
    found: Sequence[Finding],
    objective: Objective | None,
    flow: Flow | None,
    explained: tuple[Classifier, int | None] | None,
) -> list[Path]:
    """Write the report to `path` and its pictures beside it, and return the pictures' paths.

    Args:
        objective: the losses, and
        flow: what they send back; None without a style.
        explained: the classifier and the class to look for, None for the likeliest.

    Raises:
        SaveError: when a file cannot be written.
    """
    writer = _Writer(path.parent)
    parts = [*_opening(subject), *_tell_diagnosis(found), *_tell_errors(subject)]
    if objective is not None and flow is not None:
        parts += [*_tell_flow(flow, writer), *_tell_heat(subject, objective, writer)]
    if explained is not None:
        parts += _tell_class(subject, *explained, writer)
    parts += [*_tell_grams(subject, writer), *_tell_features(subject, writer)]
    writer.write(path.name, report.page(_title(subject), parts).encode("utf-8"))
    return writer.pictures


class _Writer:
    """Writes the files of one report."""

    def __init__(self, folder: Path) -> None:
        self.pictures: list[Path] = []
        self._folder = folder

    def write(self, name: str, data: bytes) -> Path:
        path = self._folder / name
        try:
            images.write_whole(path, data, overwrite=True)
        except OSError as error:
            raise SaveError(
                f"{path} could not be written: {error.strerror}. Make room, or choose another --out."
            ) from error
        return path

    def figure(self, name: str, png: bytes, caption: str) -> str:
        """Write a PNG beside the report, and return it as a figure for the report."""
        self.pictures.append(self.write(f"{name}.png", png))
        return report.figure(png, caption)


def _title(subject: Subject) -> str:
    names = subject.names
    return names["content"] + (f" in the manner of {names['style']}" if "style" in names else "")


def _opening(subject: Subject) -> Iterator[str]:
    settings = subject.settings
    yield report.paragraph(
        "What the network sees, and what the losses ask of the picture. "
        f"VGG19 with the weights {settings.weights!r}, {settings.pooling} pooling, in float32.",
        muted=True,
    )
    figures = []
    for name, picture in subject.pictures.items():
        height, width = picture.shape[2:]
        caption = f"{name} · {width}×{height} px"
        figures.append(report.figure(images.encode_png(picture), caption))
    yield report.row(figures)


def _tell_diagnosis(found: Sequence[Finding]) -> Iterator[str]:
    yield report.heading("Diagnosis")
    clean = "Nothing unusual: no layer is dead, no gradient vanishes or explodes, and no term drowns the others."
    yield report.findings([(each.text, each.fine) for each in found] or [(clean, True)])


def _tell_errors(subject: Subject) -> Iterator[str]:
    yield report.heading("Layers and errors")
    sights = subject.sights
    columns: dict[str, Mapping[str, float]] = {}
    if "style" in sights:
        columns["style error of the content"] = style_errors(sights["content"], sights["style"], subject.settings)
        if "result" in sights:
            columns["style error of the result"] = style_errors(
                sights["result"], sights["style"], subject.settings
            )
    if "result" in sights:
        columns["content error of the result"] = content_errors(sights["result"], sights["content"])
    yield report.paragraph(
        "An error of 0 % means: just like the style, or like the content. 100 % means: as far from it as its own "
        "size. A channel is silent when it is 0 all over the picture."
    )
    rows = []
    for layer in subject.layers:
        _, C, H, W = sights[subject.last].outputs[layer].shape
        silent = sights[subject.last].features[layer].silent
        errors = [_percent(column[layer]) for column in columns.values()]
        rows.append([layer, f"{C}", f"{W}×{H}", f"{silent}", *errors])
    yield report.table(["layer", "channels", "size", f"silent in the {subject.last}", *columns], rows)


def _tell_flow(flow: Flow, writer: _Writer) -> Iterator[str]:
    yield report.heading("How the gradient flows")
    yield report.paragraph(
        "Each term of the loss, with its weight, sends a gradient from its layer (right) back to the shallow ones "
        "(left) and to the picture. A healthy line stays within a few powers of ten. In a finished picture the "
        "terms pull against each other, and the gradient of their sum is smaller than theirs."
    )
    yield report.table(
        ["term", "weighted value", "share of the loss", "norm of its gradient at the picture"],
        [
            [loss.name, _number(loss.value), _percent(loss.share), _number(loss.picture["norm"])]
            for loss in (*flow.losses, flow.total)
        ],
    )
    yield writer.figure("flow", draw_flow(flow), "L2 norm of each term's gradient, by layer")
    yield report.subheading("The whole loss, layer by layer", "sizes are of absolute values")
    yield _magnitudes_table({"activation": flow.activations, "gradient": flow.total.gradients})
    for loss in flow.losses:
        if loss.gradients and loss.picture["norm"] > 0:
            inside = _magnitudes_table({"gradient": loss.gradients})
            yield report.folded(f"The gradient of {loss.name}", inside)


def _magnitudes_table(columns: Mapping[str, Mapping[str, Numbers]]) -> str:
    head = [f"{name}: {what}" for name in columns for what in ("mean", "largest", "zeros")]
    layers = list(next(iter(columns.values())))
    rows = []
    for layer in layers:
        cells = []
        for numbers in columns.values():
            each = numbers.get(layer)
            cells += ["–"] * 3 if each is None else _three(each)
        rows.append([layer, *cells])
    return report.table(["layer", *head], rows)


def _three(numbers: Numbers) -> list[str]:
    return [_number(numbers["mean"]), _number(numbers["largest"]), _percent(numbers["zeros"])]


def _tell_heat(subject: Subject, objective: Objective, writer: _Writer) -> Iterator[str]:
    yield report.heading("Where the errors come from")
    yield report.paragraph(
        f"Grad-CAM over the {subject.last}: the bright places, red to yellow, speak for a larger error. Where no "
        "place of a layer does, the map shows in green which places speak for a smaller one. Each map is scaled to "
        "its own strongest place, so it tells where, not how much."
    )
    figures = []
    image = subject.pictures[subject.last]
    settings = subject.settings
    wanted = [(f"style.{layer}", layer) for layer in settings.style_layers]
    if subject.last == "result":  # the content's own content error is 0 everywhere
        wanted += [("content", layer) for layer in settings.content_layers]
    for term, layer in wanted:
        cam, cool = _speaking(objective, image, layer, term)
        caption = f"{term} · speaks for a {'smaller' if cool else 'larger'} error"
        name = f"heat_{term.replace('.', '_')}" + (f"_{layer}" if term == "content" else "")
        figures.append(_heat_figure(image, cam, name, caption, writer, cool=cool))
    yield report.row(figures)


def _speaking(objective: Objective, image: Tensor, layer: str, term: str) -> tuple[Tensor, bool]:
    """What speaks for more of a term; or, where nothing does, for less of it, and that this is so."""
    more = grad_cam(objective.network, image, layer, lambda image: objective(image).terms[term])
    if bool(more.any()):
        return more, False
    return grad_cam(objective.network, image, layer, lambda image: -objective(image).terms[term]), True


def _heat_figure(
    image: Tensor, cam: Tensor, name: str, caption: str, writer: _Writer, *, cool: bool = False
) -> str:
    height, width = image.shape[2:]
    drawn = draw_heat(image, heat(cam, (width, height)), cool=cool)
    return writer.figure(name, images.encode_png(drawn), caption)


def _tell_class(
    subject: Subject, classifier: Classifier, number: int | None, writer: _Writer
) -> Iterator[str]:
    yield report.heading("What VGG19 takes it for")
    classifier = classifier.to(subject.pictures["content"].device)
    names = class_names()
    figures = []
    for name, image in subject.pictures.items():
        with torch.no_grad():
            chances = classifier(image).softmax(dim=1)[0]
        wanted = int(chances.argmax()) if number is None else number

        def score(image: Tensor, wanted: int = wanted) -> Tensor:
            scores: Tensor = classifier(image)
            return scores[:, wanted].sum()

        cam = grad_cam(classifier, image, CAM_LAYER, score)
        caption = f"{name} · {names[wanted]}, {_percent(float(chances[wanted]))} likely"
        figures.append(_heat_figure(image, cam, f"heat_class_{name}", caption, writer))
    yield report.paragraph("Grad-CAM at relu5_4: the bright places speak for the class of ImageNet that is named.")
    yield report.row(figures)


def _tell_grams(subject: Subject, writer: _Writer) -> Iterator[str]:
    centred = subject.settings.style_loss != "gram"
    guide = "style" if "style" in subject.sights else "content"
    yield report.heading("Gram matrices, centred" if centred else "Gram matrices")
    text = (
        "Which channels are strong in the same places. Up to "
        f"{GRAM_CHANNELS} channels of each layer, those that are strongest in the {guide}, stand in the same order "
        "and on one scale, that of square roots; the bar shows the values. Red is positive, blue is negative."
    )
    if "style" in subject.sights:
        text += f" The difference is {subject.last} − style."
    yield report.paragraph(text)
    for layer in subject.layers:
        matrices = {
            name: gram_of(sight, layer, subject.settings) for name, sight in subject.sights.items()
        }
        order = matrices[guide].diagonal().argsort(descending=True, stable=True).tolist()
        difference = matrices[subject.last] - matrices["style"] if "style" in matrices else None
        png = draw_grams(matrices, order, difference)
        shown = min(len(order), GRAM_CHANNELS)
        yield writer.figure(f"gram_{layer}", png, f"{layer} · {shown} of {len(order)} channels")


def _tell_features(subject: Subject, writer: _Writer) -> Iterator[str]:
    yield report.heading("Feature maps")
    yield report.paragraph(
        "The strongest channels of each layer, each from 0 (black) to its own 99.5th percentile (white). Beside a "
        "channel's number stands its share of the layer's energy."
    )
    for layer in subject.layers:
        _, C, H, W = subject.sights["content"].outputs[layer].shape
        yield report.subheading(layer, f"{C} channels, {W}×{H} for the content")
        for name, sight in subject.sights.items():
            maps = sight.features[layer]
            covered = _percent(sum(maps.shares))
            caption = f"{name} · the {len(maps.channels)} shown hold {covered} of the energy"
            yield writer.figure(f"features_{layer}_{name}", draw_features(maps), caption)


def _number(value: float) -> str:
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if abs(share) < 0.1 else f"{100 * share:.1f} %"
