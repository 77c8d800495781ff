"""settings.py: what cannot be is refused by name with a remedy, and what is written can be read again."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stylize.errors import SettingsError
from stylize.settings import CHOICES, LAYERS, Settings, did_you_mean, load_config, preset_names

few = hypothesis_settings(max_examples=60, deadline=None)
NAMES = [field.name for field in dataclasses.fields(Settings)]


# Values that can be


def layers(least: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(LAYERS), unique=True, min_size=least, max_size=5).map(tuple)


def weights(count: int) -> st.SearchStrategy[tuple[float, ...] | None]:
    if count == 0:
        return st.none()
    return st.none() | st.lists(st.floats(0.01, 1e6), min_size=count, max_size=count).map(tuple)


@st.composite
def valid_settings(draw: st.DrawFn) -> Settings:
    """Any settings that are allowed; about half of them differ from the default."""
    positive, counts = st.floats(1e-9, 1e9), st.integers(1, 10**6)
    texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
    style_layers = draw(layers(1))
    candidates: dict[str, st.SearchStrategy[Any]] = {
        "size": st.just("full") | st.integers(16, 10**5) | st.tuples(*[st.integers(16, 10**5)] * 2),
        "upscale": st.booleans(),
        "normalize_gradients": st.booleans(),
        "iterations": st.none() | counts,
        "time_budget_s": st.none() | positive,
        "scales": st.none() | st.integers(1, 12),
        "content_weight": positive,
        "style_weight": positive,
        "tv_weight": st.just(0) | positive,
        "detail": st.floats(0, 1),
        "content_layers": layers(0),
        "style_weights": weights(3),
        "style_scale": positive,
        "init": texts,
        "seed": st.integers(0, 2**64 - 1),
        "history": st.integers(1, 1000),
        "step_levels": st.none() | positive,
        "range_weight": st.just(0) | positive,
        "clip_norm": st.none() | positive,
        "clip_value": st.none() | positive,
        "weights": texts,
        "weights_normalization": st.sampled_from([None, "caffe", "torchvision"]),
        "device": texts,
        **{name: st.sampled_from(choices) for name, choices in CHOICES.items()},
    }
    names = draw(st.lists(st.sampled_from(sorted(candidates)), unique=True))
    chosen = {name: draw(candidates[name]) for name in names}
    if chosen.get("normalization", "relative") != "relative":
        chosen["style_loss"] = "gram"
    if draw(st.booleans()):
        chosen |= {"style_layers": style_layers, "style_layer_weights": draw(weights(len(style_layers)))}
        count = len(style_layers)
        sources = st.lists(st.integers(0, 3), min_size=count, max_size=count).map(tuple)
        chosen["style_layer_sources"] = draw(st.none() | sources)
    if "content_layers" in chosen:
        chosen["content_layer_weights"] = draw(weights(len(chosen["content_layers"])))
    return Settings(**chosen)


@few
@given(settings=valid_settings())
def test_toml_round_trip_is_exact(settings: Settings) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(settings.to_toml(), encoding="utf-8")
        assert Settings.from_sources(path) == settings


@few
@given(settings=valid_settings())
def test_json_round_trip_is_exact(settings: Settings) -> None:
    assert Settings.from_sources(json.loads(json.dumps(settings.as_dict()))) == settings


@few
@given(settings=valid_settings())
def test_settings_can_be_sent_and_compared(settings: Settings) -> None:
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert hash(again) == hash(settings)
    assert settings.replace() == settings


def test_defaults_need_no_words() -> None:
    assert Settings().to_toml() == ""
    assert Settings.from_sources() == Settings.from_sources({}) == Settings()


def test_settings_are_frozen() -> None:
    settings: Any = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.size = 300


def test_lists_become_tuples() -> None:
    lists: dict[str, list[Any]] = {
        "content_layers": ["relu2_1"],
        "style_layers": ["relu1_1", "relu2_1"],
        "style_layer_weights": [1, 2],
        "style_weights": [0.5],
    }
    settings = Settings.from_sources(lists)
    assert {name: getattr(settings, name) for name in lists} == {n: tuple(value) for n, value in lists.items()}


def test_paths_become_text(tmp_path: Path) -> None:
    settings = Settings.from_sources(init=tmp_path / "a.png", weights=tmp_path / "w.pth")
    assert (settings.init, settings.weights) == (str(tmp_path / "a.png"), str(tmp_path / "w.pth"))


def test_none_stays_only_where_it_is_the_default(tmp_path: Path) -> None:
    """TOML has no word for None, and what `stylize info` prints must rebuild the same run."""
    assert Settings(style_layer_weights=None).style_layer_weights == (1.0,) * 5
    for settings in (Settings(style_layer_weights=None), Settings(style_layers=(), style_layer_weights=None)):
        for field in dataclasses.fields(Settings):
            if getattr(settings, field.name) is None:
                assert field.default is None
        path = tmp_path / "mine.toml"
        path.write_text(settings.to_toml())
        assert Settings.from_sources(path) == settings


def test_layers_named_without_weights_count_alike() -> None:
    """Neither the defaults' weights nor a preset's belong to other layers."""
    two = {"style_layers": ["relu1_1", "relu2_1"]}
    sources = Settings.from_sources
    for settings in (sources(two), sources("gatys2016", **two), Settings().replace(**two)):
        assert settings.style_layer_weights == (1.0, 1.0)
    assert Settings().replace(**two, style_layer_weights=(3, 1)).style_layer_weights == (3, 1)


# Values that cannot be

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@hypothesis_settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(NAMES), value=ANYTHING)
def test_any_value_is_accepted_or_refused_by_name(name: str, value: Any) -> None:
    refusal = None
    try:
        settings = Settings(**{name: value})
    except SettingsError as error:
        refusal = str(error)
    if refusal is None:
        assert json.dumps(settings.as_dict(), allow_nan=False)
    else:
        assert name in refusal or (name == "style_layers" and "style_layer_weights" in refusal)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 15}, r"size is 15; it must be a whole number of pixels from 16 to 100000, or 'full'"),
        ({"size": "small"}, r"size is 'small'.*or 'full'"),
        ({"size": 512.0}, r"size is 512\.0.*whole number"),
        ({"size": True}, r"size is True"),
        ({"upscale": "no"}, r"upscale is 'no'; it can be true or false"),
        ({"normalize_gradients": 1}, r"normalize_gradients is 1; it can be true or false"),
        ({"quality": "god"}, r"quality is 'god'; it can be draft, good, best\. Did you mean good\?"),
        ({"iterations": 0}, r"iterations is 0; it must be a whole number of at least 1"),
        ({"iterations": 2.5}, r"iterations is 2\.5; it must be a whole number"),
        ({"time_budget_s": 0}, r"time_budget_s is 0; it must be a number above 0"),
        ({"scales": 0}, r"scales is 0; .* at least 1"),
        ({"content_weight": -0.1}, r"content_weight is -0\.1; .* at least 0"),
        ({"style_weight": "1"}, r"style_weight is '1'; it must be a number"),
        ({"tv_weight": math.nan}, r"tv_weight is nan; it must be a number of at least 0"),
        ({"tv_weight": math.inf}, r"tv_weight is inf"),
        ({"detail": 1.01}, r"detail is 1\.01; it goes from 0 .* to 1"),
        ({"detail": None}, r"detail is None; it must be a number"),
        ({"style_scale": 0}, r"style_scale is 0; .* above 0"),
        ({"seed": -1}, r"seed is -1; it must be a whole number of at least 0"),
        ({"seed": 2**64}, r"seed is \d+; it must be below 2\*\*64"),
        ({"history": 0}, r"history is 0; it must be a whole number of at least 1"),
        ({"step_levels": 0.0}, r"step_levels is 0\.0; .* above 0"),
        ({"range_weight": -1}, r"range_weight is -1; .* at least 0"),
        ({"clip_norm": 0}, r"clip_norm is 0; .* above 0"),
        ({"clip_value": -2}, r"clip_value is -2; .* above 0"),
        ({"optimizer": "l-bfgs"}, r"optimizer is 'l-bfgs'; it can be lbfgs, adam, .*Did you mean lbfgs\?"),
        ({"style_loss": "grams"}, r"style_loss is 'grams'.*Did you mean gram\?"),
        ({"normalization": "Johnson"}, r"normalization is 'Johnson'.*Did you mean johnson\?"),
        ({"precision": "fp16"}, r"precision is 'fp16'; it can be auto, fp32, bf16"),
        ({"pooling": "average"}, r"pooling is 'average'; it can be max, avg, l2"),
        ({"padding": "zero"}, r"padding is 'zero'.*Did you mean zeros\?"),
        ({"weights_normalization": "rgb"}, r"weights_normalization is 'rgb'; it can be caffe or torchvision"),
        ({"init": ""}, r"init is ''; it must be a text such as 'content'"),
        ({"device": 0}, r"device is 0; it must be a text such as 'auto'"),
        ({"style_layers": "relu1_1"}, r"style_layers is 'relu1_1'; it must be a list, also for a single value"),
        ({"content_layers": None}, r"content_layers is None; it must be a list"),
        ({"style_layers": ["relu9_9"]}, r"style_layers: there is no layer 'relu9_9'.*relu1_1 … relu5_4"),
        ({"content_layers": ["relu4_5"]}, r"content_layers: there is no layer 'relu4_5'\. Did you mean relu4_\d\?"),
        ({"content_layers": [42]}, r"content_layers: there is no layer 42"),
        ({"content_layers": ["relu1_1", "relu1_1"]}, r"content_layers: a layer is named twice in relu1_1, relu1_1"),
        ({"style_layer_weights": [1, 2]}, r"style_layer_weights has 2 values for 5 style layers"),
        ({"style_layer_weights": [0] * 5}, r"style_layer_weights is .*; weights are .*one of them above 0"),
        ({"style_weights": [1, -1]}, r"style_weights is \(1, -1\); weights are numbers of at least 0"),
        ({"style_weights": []}, r"style_weights is \(\)"),
        ({"style_weights": 1.0}, r"style_weights is 1\.0; it must be a list"),
        ({"content_layers": (), "style_layers": ()}, r"(?i)neither a content nor a style layer.*nothing to paint"),
        ({"content_weight": 0, "style_weight": 0}, r"content_weight and style_weight are both 0.*nothing to paint"),
        ({"normalization": "gatys"}, r"normalization 'gatys' .*add style_loss 'gram'"),
    ],
)
def test_refusal_names_the_setting_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    """Cases 7 and 10 among them."""
    if not changes.get("style_layers", True):
        changes = {**changes, "style_layer_weights": None}
    with pytest.raises(SettingsError, match=message):
        Settings(**changes)
    with pytest.raises(SettingsError, match=message):
        Settings().replace(**changes)


@pytest.mark.parametrize(("given_name", "meant"), [("itertions", "iterations"), ("style_weigth", "style_weight")])
def test_unknown_setting_is_refused_with_a_suggestion(tmp_path: Path, given_name: str, meant: str) -> None:
    message = rf"There is no setting '{given_name}'.*Did you mean {meant}\?"
    flag: dict[str, Any] = {given_name: 1}
    with pytest.raises(SettingsError, match=message):
        Settings.from_sources(**flag)
    with pytest.raises(SettingsError, match=message):
        Settings.from_sources(flag)
    with pytest.raises(SettingsError, match=message):
        Settings().replace(**flag)
    path = tmp_path / "mine.toml"
    path.write_text(f"{given_name} = 1\n")
    with pytest.raises(SettingsError, match=rf"'{given_name}' \(from .*mine\.toml\)\. Did you mean {meant}\?"):
        Settings.from_sources(path)


@pytest.mark.parametrize(("word", "answer"), [("relu4_22", "relu4_2"), ("conv11", "conv1_1"), ("pool6", "pool5")])
def test_suggestion_is_a_near_word(word: str, answer: str) -> None:
    assert did_you_mean(word, LAYERS).startswith(" Did you mean ")
    assert did_you_mean(word, [answer, "something else"]) == f" Did you mean {answer}?"


def test_no_suggestion_where_nothing_is_near() -> None:
    assert did_you_mean("xyz", LAYERS) == ""


# Sources


def test_overrides_beat_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('size = 300\nseed = 7\nstyle_layers = ["relu1_1"]\nstyle_layer_weights = [2.0]\n')
    settings = Settings.from_sources(path, seed=8)
    assert (settings.size, settings.seed, settings.style_layers) == (300, 8, ("relu1_1",))
    assert settings.replace(size=512, seed=0).content_weight == Settings().content_weight
    assert Settings.from_sources(str(path)) == Settings.from_sources(path)
    assert Settings.from_sources({"seed": 7}, seed=8) == Settings(seed=8)


def test_ellipsis_overrides_nothing() -> None:
    assert Settings.from_sources({"seed": 7, "size": 300}, seed=..., size=400) == Settings(seed=7, size=400)


def test_mapping_is_left_alone() -> None:
    config = {"seed": 7}
    Settings.from_sources(config, size=300)
    assert config == {"seed": 7}


def test_preset_has_the_numbers_of_its_published_form() -> None:
    """content mean((F − P)²) × 1 + Σ_l 1000/C² · mean((G − A)²), at one scale and without smoothing."""
    assert "gatys2016" in preset_names()
    settings = Settings.from_sources("gatys2016")
    assert settings.content_layers == ("relu4_2",)
    assert settings.style_layers == ("relu1_1", "relu2_1", "relu3_1", "relu4_1", "relu5_1")
    assert settings.style_layer_weights in (None, (1.0,) * 5)
    assert (settings.style_loss, settings.normalization) == ("gram", "johnson")
    assert (settings.content_weight, settings.style_weight, settings.tv_weight) == (1.0, 1000.0, 0.0)
    assert (settings.scales, settings.init, settings.weights, settings.pooling) == (1, "content", "embedded", "max")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid(name: str) -> None:
    assert Settings.from_sources(name) == Settings(**load_config(name))


@pytest.mark.parametrize("source", ["gatys2017", "nowhere.toml"])
def test_unknown_source_is_refused_with_the_presets(source: str) -> None:
    with pytest.raises(SettingsError, match=rf"{source} is neither a preset \(.*gatys2016.*\) nor a file"):
        Settings.from_sources(source)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"size = \n", r"mine\.toml is not TOML: .*gatys2016\.toml for an example"),
        (b"<!DOCTYPE html>", r"mine\.toml is not TOML"),
        (b"\xff\xfe\x00", r"mine\.toml cannot be read as a TOML file"),
        (b"size = 3", r"size is 3"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, contents: bytes, reason: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(contents)
    with pytest.raises(SettingsError, match=reason):
        Settings.from_sources(path)


def test_folder_is_no_file_of_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="neither a preset"):
        load_config(tmp_path)


# The tables


def test_every_choice_is_one_that_the_types_allow() -> None:
    hints = get_type_hints(Settings)
    for name, choices in CHOICES.items():
        assert get_args(hints[name]) == choices
        for choice in choices:
            needed = {"style_loss": "gram"} if name == "normalization" else {}
            assert getattr(Settings.from_sources({**needed, name: choice}), name) == choice


def test_layers_are_in_the_order_of_the_network() -> None:
    """Simonyan and Zisserman 2015, table 1, column E: sixteen convolutions, five poolings."""
    assert len(LAYERS) == 16 + 16 + 5
    assert LAYERS[:6] == ("conv1_1", "relu1_1", "conv1_2", "relu1_2", "pool1", "conv2_1")
    assert LAYERS[-3:] == ("conv5_4", "relu5_4", "pool5")
    assert len(set(LAYERS)) == len(LAYERS)


def test_as_dict_has_every_setting() -> None:
    assert list(Settings().as_dict()) == NAMES
