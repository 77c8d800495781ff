"""vgg.py: the network is VGG19 exactly, frozen; its weights are the right ones or a clear refusal."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import socket
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import VGG19_Weights, vgg16, vgg19

from conftest import picture
from stylize.errors import SettingsError, WeightsError
from stylize.nst import vgg
from stylize.nst.hooks import capture
from stylize.nst.vgg import CAFFE, TORCHVISION, MaxPool, Vgg19, Weights, load_weights, minimum_size
from stylize.settings import LAYERS

# Where torchvision's `vgg19().features` keeps each layer, read off its printed form.
# fmt: off
POSITIONS = {
    "conv1_1": 0, "relu1_1": 1, "conv1_2": 2, "relu1_2": 3, "pool1": 4,
    "conv2_1": 5, "relu2_1": 6, "conv2_2": 7, "relu2_2": 8, "pool2": 9,
    "conv3_1": 10, "relu3_1": 11, "conv3_2": 12, "relu3_2": 13,
    "conv3_3": 14, "relu3_3": 15, "conv3_4": 16, "relu3_4": 17, "pool3": 18,
    "conv4_1": 19, "relu4_1": 20, "conv4_2": 21, "relu4_2": 22,
    "conv4_3": 23, "relu4_3": 24, "conv4_4": 25, "relu4_4": 26, "pool4": 27,
    "conv5_1": 28, "relu5_1": 29, "conv5_2": 30, "relu5_2": 31,
    "conv5_3": 32, "relu5_3": 33, "conv5_4": 34, "relu5_4": 35, "pool5": 36,
}
# fmt: on
CONVOLUTION_NAMES = [name for name in POSITIONS if name.startswith("conv")]


def torchvision_features(kind: Callable[..., nn.Module] = vgg19) -> nn.Sequential:
    """torchvision's convolutions, without memory for any value."""
    with torch.device("meta"):
        features = kind(weights=None, init_weights=False).features
    assert isinstance(features, nn.Sequential)
    return features


def empty_state(kind: Callable[..., nn.Module] = vgg19, prefix: str = "features.") -> dict[str, Tensor]:
    """A state dict of the right shapes whose tensors all repeat one value: a file of a few kilobytes."""
    shapes = torchvision_features(kind).state_dict().items()
    return {f"{prefix}{name}": torch.full((1,), 0.5).expand(tensor.shape) for name, tensor in shapes}


def own_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with torchvision's keys, with this project's."""
    return {
        f"{name}.{part}": state[f"features.{POSITIONS[name]}.{part}"]
        for name in CONVOLUTION_NAMES
        for part in ("weight", "bias")
    }


def captured(network: nn.Module, image: Tensor, *layers: str) -> dict[str, Tensor]:
    with torch.no_grad(), capture(network, layers) as features:
        network(image)
    return features


# The network


def test_layer_names_are_those_of_vgg19() -> None:
    assert list(LAYERS) == list(POSITIONS)


def test_every_layer_equals_torchvisions(embedded: Weights) -> None:
    weights = dataclasses.replace(embedded, normalization=TORCHVISION)
    image = picture(32, 40).double()
    network = Vgg19(weights, LAYERS, dtype=torch.float64)
    found = captured(network, image, *LAYERS)
    features = torchvision_features()
    state = {
        f"{POSITIONS[name]}.{part}": tensor.double()
        for name, parts in weights.convolutions.items()
        for part, tensor in zip(("weight", "bias"), parts, strict=True)
    }
    features.load_state_dict(state, assign=True)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64)
    x = (image - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    with torch.no_grad():
        for name, module in zip(LAYERS, features, strict=True):
            x = module(x.clone())  # its ReLU writes over what it is given
            assert float((found[name] - x).abs().max() / x.abs().max()) < 1e-10, name


def test_caffe_normalization_by_hand(tiny_weights: Weights) -> None:
    """Blue, green, red in 0 … 255, each minus its mean over ImageNet."""
    network = Vgg19(dataclasses.replace(tiny_weights, normalization=CAFFE), ["relu1_1"], dtype=torch.float64)
    red, green, blue = 0.25, 0.5, 1.0
    image = torch.tensor([red, green, blue], dtype=torch.float64).view(1, 3, 1, 1)
    expected = [255 * blue - 103.939, 255 * green - 116.779, 255 * red - 123.68]
    assert network.get_submodule("normalize")(image).flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_torchvision_normalization_is_torchvisions(tiny_weights: Weights) -> None:
    image = picture(5, 6)
    published = VGG19_Weights.IMAGENET1K_V1.transforms()
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (published.mean, published.std))
    normalize = Vgg19(tiny_weights, ["relu1_1"]).get_submodule("normalize")
    torch.testing.assert_close(normalize(image), (image - mean) / std)


def test_weights_carry_their_normalization(embedded: Weights) -> None:
    """Case 35: Caffe's weights are never given torchvision's pictures."""
    assert embedded.normalization == CAFFE
    network = Vgg19(embedded, ["conv1_1"])
    image = picture(8, 8)
    weight, bias = embedded.convolutions["conv1_1"]
    bgr = image[:, [2, 1, 0]] * 255 - torch.tensor([103.939, 116.779, 123.68]).view(1, 3, 1, 1)
    expected = F.conv2d(bgr, weight, bias, padding=1)
    torch.testing.assert_close(captured(network, image, "conv1_1")["conv1_1"], expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("layer", LAYERS)
def test_network_ends_at_the_deepest_layer_asked_for(tiny_weights: Weights, layer: str) -> None:
    network = Vgg19(tiny_weights, ["relu1_1", layer])
    names = [name for name, _ in network.named_children()]
    deepest = layer if layer != "conv1_1" else "relu1_1"
    assert names == ["normalize", *LAYERS[: LAYERS.index(deepest) + 1]]
    assert network.deepest == deepest


def test_network_is_frozen(tiny_weights: Weights) -> None:
    network = Vgg19(tiny_weights)
    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    image = picture(32, 32).requires_grad_()
    network(image).sum().backward()
    assert image.grad is not None
    assert all(parameter.grad is None for parameter in network.parameters())


def test_building_leaves_torch_as_it_was(tiny_weights: Weights) -> None:
    random, enabled, threads = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_num_threads()
    dtype = torch.get_default_dtype()
    Vgg19(tiny_weights, pooling="l2", padding="reflect", dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled() == enabled
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == dtype


def test_networks_do_not_change_their_weights(tiny_weights: Weights) -> None:
    before = {name: [part.clone() for part in parts] for name, parts in tiny_weights.convolutions.items()}
    Vgg19(tiny_weights)(picture(32, 32))
    for name, parts in tiny_weights.convolutions.items():
        for old, new in zip(before[name], parts, strict=True):
            assert torch.equal(old, new)
            assert not new.requires_grad


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ("max", lambda x: F.max_pool2d(x, 2)),
        ("avg", lambda x: F.avg_pool2d(x, 2)),
        ("l2", lambda x: F.avg_pool2d(x.square(), 2).sqrt()),
    ],
)
def test_pooling_is_what_its_name_says(
    tiny_weights: Weights, pooling: Any, pool: Callable[[Tensor], Tensor]
) -> None:
    network = Vgg19(tiny_weights, ["relu1_2", "pool1"], pooling=pooling, dtype=torch.float64)
    found = captured(network, picture(12, 14).double(), "relu1_2", "pool1")
    torch.testing.assert_close(found["pool1"], pool(found["relu1_2"]), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("size", [(1, 3, 6, 8), (2, 4, 7, 5)])
def test_gradient_of_max_pooling_goes_where_torch_sends_it_also_at_ties(size: tuple[int, ...]) -> None:
    """Whole numbers from 0 to 3: most of the fours have their largest value twice or more."""
    features = torch.randint(0, 4, size, generator=torch.Generator().manual_seed(0)).double()
    outer = torch.rand(*size[:2], size[2] // 2, size[3] // 2, dtype=torch.float64)
    found = []
    for pool in (MaxPool(), torch.nn.MaxPool2d(2)):
        leaf = features.clone(memory_format=torch.channels_last).requires_grad_()
        pooled = pool(leaf)
        pooled.backward(outer)
        found.append((pooled.detach(), leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_network_keeps_the_outputs_of_its_relus_and_pools_and_nothing_else(tiny_weights: Weights) -> None:
    """No indices, no copies, but the picture as it enters; each piece of memory is counted once."""
    network = Vgg19(tiny_weights, ["relu5_1"])
    image = picture(64, 96)
    layers = [name for name, _ in network.named_children() if name.startswith(("relu", "pool"))]
    outputs = captured(network, image, *layers)
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4 and tensor.shape[2:] not in ((3, 3), (1, 1)):  # those are weights
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(image.requires_grad_())
    assert sum(saved.values()) == sum(tensor.nbytes for tensor in (image, *outputs.values()))


def test_l2_pooling_has_a_finite_gradient_at_zero() -> None:
    image = torch.zeros(1, 3, 4, 4, requires_grad=True)
    vgg.L2Pool()(image).sum().backward()
    assert image.grad is not None
    assert image.grad.isfinite().all()


@pytest.mark.parametrize(("padding", "mode"), [("replicate", "replicate"), ("reflect", "reflect")])
def test_padding_is_that_of_the_first_convolution(tiny_weights: Weights, padding: Any, mode: str) -> None:
    network = Vgg19(tiny_weights, ["conv1_1", "conv1_2"], padding=padding, dtype=torch.float64)
    image = picture(6, 7).double()
    found = captured(network, image, "conv1_1", "conv1_2")
    weight, bias = (part.double() for part in tiny_weights.convolutions["conv1_1"])
    padded = F.pad(network.get_submodule("normalize")(image), (1, 1, 1, 1), mode)
    torch.testing.assert_close(found["conv1_1"], F.conv2d(padded, weight, bias))
    weight, bias = (part.double() for part in tiny_weights.convolutions["conv1_2"])
    torch.testing.assert_close(found["conv1_2"], F.conv2d(found["conv1_1"].relu(), weight, bias, padding=1))


def test_relu_works_in_place_except_after_a_convolution_asked_for(tiny_weights: Weights) -> None:
    network = Vgg19(tiny_weights, ["conv2_1", "relu2_2", "conv4_2", "pool4"])
    relus = {name: module.inplace for name, module in network.named_children() if isinstance(module, nn.ReLU)}
    assert {name for name, inplace in relus.items() if not inplace} == {"relu2_1", "relu4_2"}


def test_unknown_layer_is_refused_with_a_suggestion(tiny_weights: Weights) -> None:
    """Case 10."""
    with pytest.raises(SettingsError, match=r"relu9_1.*Did you mean relu\d_1\?"):
        Vgg19(tiny_weights, ["relu1_1", "relu9_1"])


@pytest.mark.parametrize("layer", LAYERS)
def test_minimum_size_is_the_smallest_that_passes(tiny_weights: Weights, layer: str) -> None:
    network = Vgg19(tiny_weights, [layer])
    least = network.minimum_size
    assert min(network(picture(least, least)).shape[2:]) >= 1
    if least > 2:  # two is for the neighbours, not for the network
        with pytest.raises(RuntimeError, match=r"(?i)output size is too small"):
            network(picture(least, least - 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_features_have_the_networks_dtype(tiny_weights: Weights, dtype: torch.dtype) -> None:
    found = captured(Vgg19(tiny_weights, ["relu3_1"], dtype=dtype), picture(16, 16), "relu3_1")["relu3_1"]
    exact = captured(Vgg19(tiny_weights, ["relu3_1"], dtype=torch.float64), picture(16, 16), "relu3_1")["relu3_1"]
    assert found.dtype == dtype
    # Five layers, each rounded once or twice.
    assert float((found - exact).abs().max() / exact.abs().max()) < 10 * torch.finfo(dtype).eps


# The embedded weights


def test_embedded_weights_are_a_vgg19(embedded: Weights) -> None:
    shapes = {name: tuple(weight.shape) for name, (weight, _) in embedded.convolutions.items()}
    features = torchvision_features().state_dict()
    assert shapes == {name: tuple(features[f"{POSITIONS[name]}.weight"].shape) for name in CONVOLUTION_NAMES}
    for part in (part for parts in embedded.convolutions.values() for part in parts):
        assert part.dtype == torch.float32
        assert part.isfinite().all()
    assert embedded.name == "embedded"


def test_embedded_weights_are_known_by_their_hash(embedded: Weights) -> None:
    path = Path(vgg.__file__).parents[1] / "weights" / "vgg19.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == embedded.sha256 == vgg.EMBEDDED_SHA256


def test_damaged_embedded_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte in the middle, as a bad disk leaves it."""
    contents = bytearray((Path(vgg.__file__).parents[1] / "weights" / "vgg19.safetensors").read_bytes())
    contents[len(contents) // 2] ^= 1
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "vgg19.safetensors").write_bytes(contents)
    monkeypatch.setattr("stylize.nst.vgg.resources.files", lambda package: tmp_path)
    with pytest.raises(WeightsError, match=r"damaged.*Install the package again"):
        load_weights()


# Weights from a file


def saved(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


@pytest.mark.parametrize(
    "state",
    [
        empty_state(),
        empty_state(prefix=""),
        own_names(empty_state()),
        {"state_dict": empty_state(), "epoch": 3},
        empty_state() | {"classifier.0.weight": torch.zeros(1)},
    ],
    ids=["features.N", "N", "own names", "nested", "with a classifier"],
)
def test_file_may_name_its_layers_in_any_usual_way(tmp_path: Path, state: dict[str, Any]) -> None:
    path = saved(state, tmp_path / "mine.pth")
    weights = load_weights(str(path), "torchvision")
    assert weights.normalization == TORCHVISION
    assert weights.name == "mine.pth"
    assert weights.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert list(weights.convolutions) == CONVOLUTION_NAMES
    assert all(float(part.flatten()[0]) == 0.5 for parts in weights.convolutions.values() for part in parts)


def test_layers_of_a_file_are_not_mixed_up(tmp_path: Path) -> None:
    state = empty_state()
    for position, key in enumerate(state):
        state[key] = torch.full((1,), float(position)).expand(state[key].shape)
    weights = load_weights(str(saved(state, tmp_path / "mine.pth")), "caffe")
    firsts = [float(part.flatten()[0]) for parts in weights.convolutions.values() for part in parts]
    assert firsts == list(range(32))


@pytest.mark.parametrize(
    ("metadata", "named", "expected"),
    [
        ({"normalization": "torchvision"}, None, "torchvision"),
        ({"normalization": "torchvision"}, "caffe", "caffe"),
        ({"provenance": '{"normalization": "caffe"}'}, None, "caffe"),
        (None, "torchvision", "torchvision"),
    ],
)
def test_safetensors_may_say_their_normalization(
    tmp_path: Path, metadata: dict[str, str] | None, named: str | None, expected: str
) -> None:
    path = tmp_path / "mine.safetensors"
    state = {name: torch.zeros(tensor.shape, dtype=torch.float8_e4m3fn) for name, tensor in empty_state().items()}
    safetensors.torch.save_file(state, path, metadata)
    assert load_weights(str(path), named).normalization.name == expected


@pytest.mark.parametrize("named", [None, "imagenet"])
def test_file_without_normalization_is_refused_with_the_option(tmp_path: Path, named: str | None) -> None:
    """Case 35."""
    path = saved(empty_state(), tmp_path / "mine.pth")
    with pytest.raises(WeightsError, match=r"mine\.pth.*--weights-normalization caffe"):
        load_weights(str(path), named)


def html(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><body>Not Found</body></html>")


def empty(path: Path) -> None:
    path.touch()


def truncated(path: Path) -> None:
    saved(empty_state(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def another_network(path: Path) -> None:
    saved(empty_state(vgg16), path)


def wrong_weight(path: Path) -> None:
    saved(empty_state() | {"features.5.weight": torch.zeros(1).expand(128, 64, 5, 5)}, path)


def wrong_bias(path: Path) -> None:
    saved(empty_state() | {"features.5.bias": torch.zeros(1)}, path)


def one_layer_short(path: Path) -> None:
    saved({key: value for key, value in empty_state().items() if not key.startswith("features.34")}, path)


def not_a_state(path: Path) -> None:
    saved([1, 2, 3], path)


def a_nested_number(path: Path) -> None:
    saved({"state_dict": 3}, path)


def nothing_known(path: Path) -> None:
    saved({"fc.weight": torch.zeros(1)}, path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("damage", [html, empty, truncated])
def test_damaged_file_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], suffix: str) -> None:
    path = tmp_path / f"bad{suffix}"
    damage(path)
    with pytest.raises(WeightsError, match=rf"bad\{suffix} is not a state dict.*fetch it again"):
        load_weights(str(path), "caffe")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (another_network, r"is not a VGG19: features\.\d+\.weight is .*expected"),
        (wrong_weight, r"is not a VGG19: features\.5\.weight is \(128, 64, 5, 5\), expected \(128, 64, 3, 3\)"),
        (wrong_bias, r"is not a VGG19: features\.5\.bias is \(1,\), expected \(128,\)"),
        (one_layer_short, r"is not a VGG19: features\.34\.weight is missing"),
        (not_a_state, "holds a list, not a state dict"),
        (a_nested_number, "is not a VGG19: .*state_dict"),
        (nothing_known, r"is not a VGG19: .*fc\.weight"),
    ],
)
def test_file_of_another_network_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=rf"other\.pth {reason}"):
        load_weights(str(tmp_path / "other.pth"), "caffe")


@pytest.mark.parametrize("name", ["nowhere.pth", "nowhere.safetensors", "."])
def test_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(WeightsError) as refused:
        load_weights(str(path), "caffe")
    assert str(path) in str(refused.value)
    assert "'embedded'" in str(refused.value)


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("save", [torch.save, lambda state, path: Path(path).write_bytes(pickle.dumps(state))])
def test_code_in_a_file_is_never_run(tmp_path: Path, save: Callable[[object, Path], object]) -> None:
    trace = tmp_path / "trace"
    save({**empty_state(), "extra": Malicious(trace)}, tmp_path / "evil.pth")
    with pytest.raises(WeightsError, match=r"evil\.pth is not a state dict that can be read safely"):
        load_weights(str(tmp_path / "evil.pth"), "caffe")
    assert not trace.exists()


# Weights from torchvision


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torchvision's file on a server (a folder, here) and an empty cache; the path of the cached file."""
    contents = saved(empty_state(), tmp_path / "plain.pth").read_bytes()
    name = f"vgg19-{hashlib.sha256(contents).hexdigest()[:8]}.pth"
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / name).write_bytes(contents)
    monkeypatch.setattr(VGG19_Weights.IMAGENET1K_V1.value, "url", (tmp_path / "server" / name).as_uri())
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hub" / "checkpoints" / name


def test_torchvision_weights_are_fetched_once(server: Path, tmp_path: Path) -> None:
    weights = load_weights("torchvision")
    assert weights.normalization == TORCHVISION
    assert weights.sha256 == server.stem.split("-")[1]
    assert server.exists()
    for file in (tmp_path / "server").iterdir():
        file.unlink()
    assert load_weights("torchvision").sha256 == weights.sha256


@pytest.mark.parametrize("damage", [html, empty, truncated])
def test_damaged_cache_is_removed_and_fetched_again(server: Path, damage: Callable[[Path], None]) -> None:
    """Case 34."""
    server.parent.mkdir(parents=True)
    damage(server)
    load_weights("torchvision")
    assert hashlib.sha256(server.read_bytes()).hexdigest().startswith(server.stem.split("-")[1])


def test_damaged_download_is_refused_and_not_kept(server: Path, tmp_path: Path) -> None:
    html(tmp_path / "server" / server.name)
    with pytest.raises(WeightsError, match=r"(?s)invalid hash.*embedded weights"):
        load_weights("torchvision")
    assert not server.exists()


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError(socket.gaierror(-3, "Temporary failure in name resolution")),
        urllib.error.HTTPError("https://example.invalid", 403, "Forbidden", None, None),  # type: ignore[arg-type]
        TimeoutError("timed out"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_without_network_the_embedded_weights_are_named(
    server: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise error

    monkeypatch.setattr("torch.hub.urlopen", refuse)
    with pytest.raises(WeightsError, match=r"could not be fetched.*Try again.*embedded weights"):
        load_weights("torchvision")
    assert not server.exists()


def test_lost_network_costs_no_cached_file(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_weights("torchvision")

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("torch.hub.urlopen", refuse)
    load_weights("torchvision")
    assert server.exists()


@pytest.mark.parametrize("layer", LAYERS)
def test_smallest_side_is_known_before_the_network(layer: str) -> None:
    """A pooling layer halves; and a side of one pixel has no neighbours to vary from."""
    pools = sum(LAYERS.index(f"pool{block}") <= LAYERS.index(layer) for block in range(1, 6))
    assert minimum_size([layer, "relu1_1"]) == max(2, 2**pools)


def test_smallest_side_is_the_networks_own(tiny_weights: Weights) -> None:
    for layer in ("conv1_1", "pool3", "relu5_4"):
        network = Vgg19(tiny_weights, [layer])
        side = network.minimum_size
        assert side == minimum_size([layer])
        network(torch.rand(1, 3, side, side))  # works
