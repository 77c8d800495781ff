"""Looking inside: the numbers are right, the diagnosis is, Grad-CAM is captum's, and the report is whole."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from importlib import util
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn

from conftest import hooks_unchanged, picture
from stylize import images
from stylize.cli import program
from stylize.errors import InputError, OutputError, RefusedError, SaveError, SettingsError, WeightsError
from stylize.inspect import inspection
from stylize.inspect.diagnosis import (
    Finding,
    diagnose,
    judge_bounds,
    judge_clipping,
    judge_gradients,
    judge_shares,
)
from stylize.inspect.gradcam import grad_cam, heat
from stylize.inspect.inspection import inspect_picture
from stylize.inspect.measure import (
    content_errors,
    look,
    measure_flow,
    share_at_bounds,
    strongest,
    style_errors,
    style_targets,
)
from stylize.nst import classifier
from stylize.nst.classifier import Classifier, class_names, find_class, load_classifier
from stylize.nst.hooks import watch_gradients
from stylize.nst.objective import Objective
from stylize.nst.vgg import Vgg19, Weights
from stylize.settings import CHOICES, Settings

pytest.importorskip("matplotlib")

SETTINGS = Settings(device="cpu", precision="fp32", size=32)
LAYERS = ("relu1_1", "relu2_1", "relu3_1", "relu4_1", "relu4_2", "relu5_1")


# What is measured


def test_strongest_channels_are_those_with_the_largest_mean_square() -> None:
    features = torch.tensor([1.0, 0.0, -3.0, 2.0]).view(1, 4, 1, 1).expand(1, 4, 2, 2)
    found = strongest(features, 3)
    assert found.channels == (2, 3, 0)
    assert found.shares == pytest.approx((9 / 14, 4 / 14, 1 / 14))
    assert (found.count, found.silent) == (4, 1)
    assert found.maps[0].tolist() == [[-3, -3], [-3, -3]]


def test_strongest_of_a_silent_layer_has_no_energy() -> None:
    found = strongest(torch.zeros(1, 3, 2, 2), 2)
    assert (found.shares, found.silent) == ((0, 0), 3)


def test_picture_has_no_error_against_itself(tiny_weights: Weights) -> None:
    sight = look(Vgg19(tiny_weights, LAYERS), picture(32, 40), LAYERS)
    assert set(style_errors(sight, sight, SETTINGS).values()) == {0}
    assert set(content_errors(sight, sight).values()) == {0}


def test_content_error_is_relative_to_the_contents_features(tiny_weights: Weights) -> None:
    network = Vgg19(tiny_weights, LAYERS)
    one, other = (look(network, picture(32, 40, seed), LAYERS) for seed in (0, 1))
    for layer, found in content_errors(other, one).items():
        difference = other.outputs[layer] - one.outputs[layer]
        expected = float(difference.norm() ** 2 / one.outputs[layer].norm() ** 2)
        assert found == pytest.approx(expected, rel=1e-5)


def test_statistics_are_numpys_covariance(tiny_weights: Weights) -> None:
    sight = look(Vgg19(tiny_weights, LAYERS), picture(32, 40), LAYERS)
    for layer in LAYERS[:4]:
        mean, covariance = style_targets(sight, [layer], SETTINGS)[layer]
        flat = sight.outputs[layer][0].flatten(1)
        torch.testing.assert_close(covariance[0], torch.cov(flat, correction=0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean[0], flat.mean(1))


@pytest.mark.parametrize("style_loss", CHOICES["style_loss"])
def test_style_errors_are_the_terms_of_the_objective(tiny_weights: Weights, style_loss: Any) -> None:
    settings = SETTINGS.replace(style_loss=style_loss)
    network = Vgg19(tiny_weights, LAYERS)
    image, style = (look(network, picture(32, 40, seed), LAYERS) for seed in (0, 1))
    targets = style_targets(style, settings.style_layers, settings)
    terms = Objective(network, None, targets, settings)(picture(32, 40)).terms
    errors = style_errors(image, style, settings)
    for layer in settings.style_layers:
        assert errors[layer] == pytest.approx(float(terms[f"style.{layer}"]), rel=1e-4)


@pytest.fixture
def objective(tiny_weights: Weights) -> Objective:
    network = Vgg19(tiny_weights, LAYERS)
    style = look(network, picture(40, 32, seed=1), LAYERS)
    return Objective(
        network, picture(32, 32), style_targets(style, SETTINGS.style_layers, SETTINGS), SETTINGS
    )


def test_terms_of_the_flow_are_the_whole_loss(objective: Objective) -> None:
    image = picture(32, 32, seed=2)
    flow = measure_flow(objective, image)
    assert sum(loss.value for loss in flow.losses) == pytest.approx(float(objective(image).total), rel=1e-5)
    assert sum(loss.share for loss in flow.losses) == pytest.approx(1, rel=1e-5)


def test_flow_at_the_picture_is_the_losses_gradient(objective: Objective) -> None:
    image = picture(32, 32, seed=2).requires_grad_()
    (expected,) = torch.autograd.grad(objective(image).total, image)
    with hooks_unchanged(objective.network):
        flow = measure_flow(objective, image)
    assert flow.total.picture["norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    assert flow.total.picture["largest"] == pytest.approx(float(expected.abs().max()), rel=1e-5)


def test_gradient_of_a_layers_loss_reaches_the_layers_before_it_only(objective: Objective) -> None:
    flow = measure_flow(objective, picture(32, 32, seed=2))
    reached = {loss.name: list(loss.gradients) for loss in flow.losses}
    assert reached["style.relu1_1"] == ["relu1_1"]
    assert reached["style.relu2_1"] == ["relu1_1", "relu1_2", "pool1", "relu2_1"]
    assert reached["content"][-1] == "relu4_2"
    assert reached["tv"] == []


def test_share_at_bounds_counts_what_a_file_would_hold() -> None:
    values = torch.tensor([0.0, 0.001, 0.5, 0.999, 1.0, 1.5, -0.5, 0.01])
    assert share_at_bounds(values) == 6 / 8  # 0.001 · 255 rounds to 0, 0.999 · 255 to 255


# Diagnosis


def deep(*, gain: float = 1.0, layers: int = 8, seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLUs, initialised after He et al. 2015, times `gain`."""
    torch.manual_seed(seed)
    network = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(64, 64)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        with torch.no_grad():
            linear.weight *= gain
        network.extend([linear, nn.ReLU()])
    return network


def findings_of(network: nn.Module, inputs: Tensor | None = None) -> list[Finding]:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(16, 64, generator=generator) if inputs is None else inputs
    with watch_gradients(network) as flows:
        network(given).square().mean().backward()
    return diagnose(flows)


@pytest.mark.parametrize("seed", range(5))
def test_well_initialised_network_is_healthy(seed: int) -> None:
    assert findings_of(deep(seed=seed)) == []


@pytest.mark.parametrize("seed", range(5))
def test_dead_layer_is_diagnosed_by_name(seed: int) -> None:
    network = deep(seed=seed)
    dead = network[6]
    assert isinstance(dead, nn.Linear)
    nn.init.constant_(dead.bias, -1000)  # its ReLU never fires again
    found = findings_of(network)
    assert [finding.text.split()[0] for finding in found if finding.kind == "dead"] == ["7"]
    assert "vanishing" in {finding.kind for finding in found}  # nothing comes back through it


@pytest.mark.parametrize("seed", range(5))
def test_exploding_scale_is_diagnosed(seed: int) -> None:
    kinds = {finding.kind for finding in findings_of(deep(gain=10, seed=seed))}
    assert kinds == {"exploding"}


@pytest.mark.parametrize("seed", range(5))
def test_vanishing_scale_is_diagnosed(seed: int) -> None:
    kinds = {finding.kind for finding in findings_of(deep(gain=0.1, seed=seed))}
    assert kinds == {"vanishing"}


def test_the_diagnosis_names_where_and_how_much() -> None:
    gradients = {
        name: {"norm": norm, "finite": 1.0} for name, norm in (("a", 1e6), ("b", 1e3), ("c", 1.0))
    }
    (finding,) = judge_gradients(gradients)
    assert finding.kind == "exploding"
    for words in ("1 at c", "1e+06 at a", "× 1e+03 from layer to layer"):
        assert words in finding.text


def test_values_that_are_not_finite_are_diagnosed_by_layer() -> None:
    network = deep()
    broken = network[4]
    assert isinstance(broken, nn.Linear)
    nn.init.constant_(broken.weight, float("nan"))
    texts = [finding.text for finding in findings_of(network) if finding.kind == "not finite"]
    assert texts[0].startswith("4 puts out values that are not finite")


def test_a_term_that_carries_the_loss_is_diagnosed() -> None:
    (finding,) = judge_shares({"content": 0.05, "style.relu1_1": 0.92, "tv": 0.03})
    assert finding.text.startswith("style.relu1_1 carries 92 % of the loss")
    assert judge_shares({"content": 0.9, "style.relu1_1": 0.1}) == []
    assert judge_shares({"content": 1.0}) == []  # there is no other


def test_a_picture_of_black_and_white_is_diagnosed_beside_its_originals() -> None:
    assert judge_bounds(0.30, 0.28) == []
    (finding,) = judge_bounds(0.30, 0.02)
    assert "30 %" in finding.text
    assert "2 %" in finding.text


def test_clipping_is_diagnosed_by_its_share() -> None:
    assert judge_clipping(0, 100) == []
    (finding,) = judge_clipping(25, 100)
    assert "25 of 100 evaluations (25 %)" in finding.text


def test_the_real_network_is_healthy(embedded: Weights) -> None:
    network = Vgg19(embedded, LAYERS)
    image = picture(64, 64).requires_grad_()
    with watch_gradients(network) as flows:
        network(image).square().mean().backward()
    assert diagnose(flows) == []


# Grad-CAM


def test_grad_cam_is_its_formula() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Identity())
    factors = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    image = picture(6, 6)
    found = grad_cam(network, image, "0", lambda image: (network(image) * factors).sum())
    weights = factors.mean(dim=(2, 3), keepdim=True)  # d score / d activation is `factors`
    expected = (weights * network(image)).sum(1, keepdim=True).clamp(min=0)
    torch.testing.assert_close(found, expected.detach())


class Small(nn.Module):
    """A classifier with in-place ReLUs, as torchvision's are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.classify = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.features(image).mean(dim=(2, 3)))
        return scores


def captums(network: nn.Module, layer: nn.Module, images: Tensor, target: int) -> Tensor:
    attr = pytest.importorskip("captum.attr")
    found: Tensor = attr.LayerGradCam(network, layer).attribute(images, target, relu_attributions=True)
    return found.detach()


@pytest.mark.parametrize("layer", ["features.1", "features.4"])
@pytest.mark.parametrize("target", range(5))
def test_grad_cam_equals_captums(layer: str, target: int) -> None:
    network = Small().eval()
    images = torch.cat([picture(24, 20, seed) for seed in range(3)])
    expected = captums(network, network.get_submodule(layer), images, target)
    with hooks_unchanged(network):
        found = grad_cam(network, images, layer, lambda images: network(images)[:, target].sum())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def random_classifier() -> Classifier:
    """torchvision's whole VGG19 with seeded weights; one draw of them for all layers, for they are many."""
    from torchvision.models import vgg19

    with torch.device("meta"):
        network = vgg19(weights=None)
    network = network.to_empty(device="cpu")
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in network.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1e4
            repeats = -(-parameter.numel() // len(noise))
            parameter.copy_(noise.repeat(repeats)[: parameter.numel()].view_as(parameter) * (2 / fan_in) ** 0.5)
    return Classifier(network)


def test_grad_cam_of_the_whole_vgg19_equals_captums(random_classifier: Classifier) -> None:
    image = picture(64, 64)
    layer = random_classifier.get_submodule(classifier.CAM_LAYER)
    expected = captums(random_classifier, layer, image, 281)
    found = grad_cam(
        random_classifier, image, classifier.CAM_LAYER, lambda image: random_classifier(image)[:, 281].sum()
    )
    assert float(expected.max()) > 0
    torch.testing.assert_close(found / expected.max(), expected / expected.max(), rtol=1e-6, atol=1e-6)


def test_grad_cam_leaves_the_parameters_gradients_alone() -> None:
    network = Small()
    grad_cam(network, picture(24, 20), "features.4", lambda image: network(image).sum())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_grad_cam_works_where_gradients_are_off() -> None:
    network = Small()
    with torch.no_grad():
        found = grad_cam(network, picture(24, 20), "features.4", lambda image: network(image).sum())
    assert not found.requires_grad


def test_grad_cam_of_what_does_not_depend_on_the_layer_is_refused() -> None:
    network = Small()
    with pytest.raises(InputError, match=r"does not depend on features\.4"):
        grad_cam(network, picture(24, 20), "features.4", lambda image: network.features[0](image).sum())
    with pytest.raises(InputError, match=r"classify has \[1, 5\]"):
        grad_cam(network, picture(24, 20), "classify", lambda image: network(image).sum())
    with pytest.raises(SettingsError, match=r"Did you mean features\.4"):
        grad_cam(network, picture(24, 20), "feature.4", lambda image: network(image).sum())


def test_grad_cam_of_our_own_losses(objective: Objective) -> None:
    image = picture(32, 32, seed=2)
    for term, layer, side in (("style.relu3_1", "relu3_1", 8), ("content", "relu4_2", 4)):

        def score(image: Tensor, term: str = term) -> Tensor:
            return objective(image).terms[term]

        with hooks_unchanged(objective.network):
            cam = grad_cam(objective.network, image, layer, score)
        assert cam.shape == (1, 1, side, side)
        assert cam.min() >= 0


def test_heat_goes_from_0_to_1_at_the_pictures_size() -> None:
    warmth = heat(torch.tensor([[[[0.0, 4.0], [2.0, 0.0]]]]), (6, 4))
    assert warmth.shape == (4, 6)
    assert (float(warmth.min()), float(warmth.max())) == (0, 1)
    assert not heat(torch.zeros(1, 1, 2, 2), (6, 4)).any()


# The classifier


def test_classes_are_found_by_name_and_by_number() -> None:
    assert len(class_names()) == 1000
    assert find_class("281") == find_class("tabby") == find_class("Tabby") == class_names().index("tabby")
    with pytest.raises(SettingsError, match="Did you mean tabby"):
        find_class("tabbi")
    with pytest.raises(SettingsError, match="1000"):
        find_class("1000")


def test_classifier_is_loaded_from_torchvisions_state(
    random_classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = random_classifier.vgg.state_dict()
    monkeypatch.setattr(classifier, "fetch_torchvision", lambda: (state, "somewhere"))
    loaded = load_classifier()
    image = picture(32, 32)
    torch.testing.assert_close(loaded(image), random_classifier(image))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_classifier_refuses_what_its_poolings_would_leave_nothing_of(random_classifier: Classifier) -> None:
    with pytest.raises(InputError, match="40×31 px is too small for the classifier"):
        random_classifier(picture(31, 40))


def test_state_without_a_classifier_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.pth"
    torch.save({"features.0.weight": torch.zeros(64, 3, 3, 3)}, path)
    with pytest.raises(WeightsError, match=r"features\.pth is not torchvision's VGG19 with its classifier"):
        load_classifier(str(path))
    path.write_bytes(b"<html>")
    with pytest.raises(WeightsError, match=r"features\.pth cannot be read"):
        load_classifier(str(path))


# The report


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A content, a style and a result of it, painted with settings of its own."""
    paths = {name: tmp_path / f"{name}.png" for name in ("content", "style", "result")}
    images.save_picture(picture(32, 48), paths["content"])
    images.save_picture(picture(40, 40, seed=1), paths["style"])
    record = {"settings": SETTINGS.replace(style_layers=("relu1_1", "relu2_1"), style_layer_weights=None).as_dict()}
    images.save_picture(picture(32, 48, seed=2), paths["result"], record=record)
    return paths


class Checked(HTMLParser):
    """Whether tags are closed in their order, and what is in the pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.sources.append(dict(attrs)["src"] or "")
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_report(path: Path) -> Checked:
    checked = Checked()
    html = path.read_text(encoding="utf-8")
    checked.feed(html)
    assert checked.open == []
    assert not re.search(r"https?:|<script|<link|@import|url\(", html)  # it opens offline
    assert all(source.startswith("data:image/png;base64,") for source in checked.sources)
    return checked


def test_report_is_whole_and_in_one_file(files: dict[str, Path], tmp_path: Path) -> None:
    report = inspect_picture(
        files["content"], files["style"], result=files["result"], out=tmp_path / "look", settings=SETTINGS
    )
    checked = read_report(report.path)
    text = " ".join(checked.text)
    for heading in (
        *("Diagnosis", "Layers and errors", "How the gradient flows", "Where the errors come from"),
        *("Gram matrices", "Feature maps"),
    ):
        assert heading in text
    names = {path.name for path in report.pictures}
    assert len(checked.sources) == len(names) + 3  # and the three pictures themselves
    for layer in LAYERS:
        assert layer in text
        assert f"gram_{layer}.png" in names
        assert {f"features_{layer}_{name}.png" for name in ("content", "style", "result")} <= names
    assert {"flow.png", "heat_style_relu5_1.png", "heat_content_relu4_2.png"} <= names
    for path in report.pictures:
        with Image.open(path) as image:
            image.load()


def test_the_numbers_in_the_report_are_the_measured_ones(
    files: dict[str, Path], tmp_path: Path, embedded: Weights
) -> None:
    report = inspect_picture(
        files["content"], files["style"], result=files["result"], out=tmp_path / "look", layers=["relu1_1"]
    )
    network = Vgg19(embedded, ["relu1_1"])
    read = {name: images.read_picture(path).tensor for name, path in files.items()}
    sights = {name: look(network, image, ["relu1_1"]) for name, image in read.items()}
    cells = read_report(report.path).text
    row = cells[cells.index("relu1_1") :][:7]
    expected = (
        style_errors(sights["content"], sights["style"], SETTINGS),
        style_errors(sights["result"], sights["style"], SETTINGS),
        content_errors(sights["result"], sights["content"]),
    )
    for cell, errors in zip(row[4:], expected, strict=True):
        assert float(cell.removesuffix(" %")) == pytest.approx(100 * errors["relu1_1"], rel=0.01)


def test_the_settings_are_those_inside_the_result(files: dict[str, Path], tmp_path: Path) -> None:
    report = inspect_picture(files["content"], files["style"], result=files["result"], out=tmp_path / "look")
    names = {path.name for path in report.pictures}
    assert {"gram_relu1_1.png", "gram_relu2_1.png"} <= names
    assert "gram_relu3_1.png" not in names


@pytest.mark.parametrize("size", [(1, 1), (200, 2), (15, 40)])
def test_a_picture_too_small_for_its_layers_is_refused_before_anything_is_written(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    with pytest.raises(InputError, match="at least 16 px"):
        inspect_picture(Image.new("RGB", size), out=tmp_path / "look")
    assert not (tmp_path / "look").exists()


def test_the_limit_on_pixels_is_an_option(files: dict[str, Path], tmp_path: Path) -> None:
    result = run("inspect", files["content"], "--out", tmp_path / "look", "--max-pixels", "99")
    assert (result.exit_code, "the limit is 99" in result.stderr) == (2, True)


def test_layers_can_be_chosen(files: dict[str, Path], tmp_path: Path) -> None:
    layers = ["conv2_1", "pool1"]
    report = inspect_picture(files["content"], out=tmp_path / "look", layers=layers, settings=SETTINGS)
    names = {path.name for path in report.pictures}
    assert names == {
        f"{kind}_{layer}{end}.png"
        for layer in ("conv2_1", "pool1")
        for kind, end in (("gram", ""), ("features", "_content"))
    }


def test_without_a_style_there_are_no_losses(files: dict[str, Path], tmp_path: Path) -> None:
    report = inspect_picture(files["content"], out=tmp_path / "look", settings=SETTINGS)
    text = " ".join(read_report(report.path).text)
    assert "How the gradient flows" not in text
    assert "Feature maps" in text


def test_a_dead_layer_is_in_the_report(
    files: dict[str, Path], tmp_path: Path, embedded: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = embedded.convolutions["conv2_1"]
    broken = dict(embedded.convolutions) | {"conv2_1": (weight, torch.full_like(bias, -1e9))}
    weights = Weights("broken", embedded.normalization, "0" * 64, broken)
    monkeypatch.setattr(inspection, "load_weights", lambda *_: weights)
    options: dict[str, Any] = {"layers": ["relu1_1"], "settings": SETTINGS}
    report = inspect_picture(files["content"], files["style"], out=tmp_path / "look", **options)
    text = " ".join(read_report(report.path).text)
    assert "relu2_1 is dead" in text
    assert "dead" in {finding.kind for finding in report.findings}


def test_an_imagenet_class_is_looked_for(
    files: dict[str, Path], tmp_path: Path, random_classifier: Classifier
) -> None:
    settings = SETTINGS.replace(size=48)
    options: dict[str, Any] = {"layers": ["relu1_1"], "settings": settings, "classifier": random_classifier}
    report = inspect_picture(files["content"], out=tmp_path / "named", explain="tabby", **options)
    assert "tabby" in " ".join(read_report(report.path).text)
    assert "heat_class_content.png" in {path.name for path in report.pictures}
    report = inspect_picture(files["content"], out=tmp_path / "top", explain="top", **options)
    with torch.no_grad():
        likeliest = int(random_classifier(images.read_picture(files["content"]).tensor).argmax())
    assert class_names()[likeliest] in " ".join(read_report(report.path).text)


def test_names_in_the_report_are_escaped(files: dict[str, Path], tmp_path: Path) -> None:
    strange = tmp_path / "<b>&'.png"
    files["content"].rename(strange)
    report = inspect_picture(strange, out=tmp_path / "look", layers=["relu1_1"], settings=SETTINGS)
    assert strange.name in read_report(report.path).text


# What is refused


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> NoReturn:
        pytest.fail("The weights were loaded.")

    monkeypatch.setattr(inspection, "load_weights", load)


@pytest.mark.usefixtures("no_weights")
def test_a_missing_library_names_the_extra(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        return None if name == "matplotlib" else util.find_spec(name)

    monkeypatch.setattr("stylize.inspect.extra.find_spec", find)
    with pytest.raises(RefusedError, match=r"matplotlib.*stylize-nst\[inspect\]"):
        inspect_picture(files["content"], out="look")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("change", "error", "words"), [
    ({"content": "missing.png"}, RefusedError, "missing.png"),
    ({"style": "missing.png"}, RefusedError, "missing.png"),
    ({"layers": ["rely4_2"]}, SettingsError, "Did you mean relu4_2"),
    ({"explain": "tabbi"}, SettingsError, "tabby"),
    ({"out": "content.png"}, OutputError, "cannot be made"),
    ({"size": 3}, SettingsError, "size is 3"),
])  # fmt: skip
def test_it_is_refused_before_anything_is_loaded(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], error: type, words: str
) -> None:
    monkeypatch.chdir(files["content"].parent)
    options: dict[str, Any] = {"content": "content.png", "style": "style.png", "out": "look"} | change
    with pytest.raises(error, match=words):
        inspect_picture(options.pop("content"), options.pop("style"), **options)


def test_a_report_is_replaced_only_when_asked(files: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "look", "layers": ["relu1_1"], "settings": SETTINGS}
    inspect_picture(files["content"], **options)
    with pytest.raises(OutputError, match="--overwrite"):
        inspect_picture(files["content"], **options)
    inspect_picture(files["content"], overwrite=True, **options)


@pytest.mark.parametrize("name", ["flow.png", "gram_relu1_1.png", "features_relu1_1_style.png", "heat_content.png"])
def test_a_picture_of_a_report_is_replaced_only_when_asked(
    files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    (tmp_path / "look").mkdir()
    (tmp_path / "look" / name).write_text("mine")
    options: dict[str, Any] = {"out": tmp_path / "look", "layers": ["relu1_1"], "settings": SETTINGS}
    with pytest.raises(OutputError, match=rf"{name} exists already.*--overwrite"):
        inspect_picture(files["content"], **options)
    assert [path.read_text() for path in (tmp_path / "look").iterdir()] == ["mine"]


def test_a_result_of_another_picture_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="40×40"):
        inspect_picture(files["content"], result=files["style"], out=tmp_path / "look", settings=SETTINGS)


def test_a_full_disk_is_said(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match="No space left on device"):
        inspect_picture(files["content"], out=tmp_path / "look", layers=["relu1_1"], settings=SETTINGS)
    assert list((tmp_path / "look").iterdir()) == []


# The command


def test_every_option_of_the_command_is_documented() -> None:
    document = Path(__file__).parents[1] / "docs" / "inspect.md"
    documented = re.findall(r"^\| `(--[a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    options = [each.opts[0] for each in program.commands["inspect"].params if each.opts[0].startswith("--")]
    assert documented == options


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(program, [str(each) for each in arguments])


def test_the_command_says_where_the_report_is(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "look"
    result = run("inspect", files["content"], "--out", out, "--layers", "relu1_1,relu2_1", "--size", "32")
    assert (result.exit_code, result.stdout) == (0, f"{out / 'report.html'}\n")
    again = run("inspect", files["content"], "--out", out)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_the_command_says_what_it_found(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*_: object) -> list[Finding]:
        return [Finding("dead", "relu1_1 is dead.")]

    monkeypatch.setattr(inspection, "judge_activations", judge)
    result = run("inspect", files["content"], "--out", tmp_path / "look", "--layers", "relu1_1", "--size", "32")
    assert result.stderr == "stylize: relu1_1 is dead.\n"
