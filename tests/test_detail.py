"""The slider `detail`: the content layers that it chooses, and when they follow it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stylize.errors import SettingsError
from stylize.settings import LAYERS, Settings, layers_by_detail

few = hypothesis_settings(max_examples=60, deadline=None)


@pytest.mark.parametrize(
    ("detail", "layers"),
    [
        (0, {"relu5_2": 1.0}),
        (0.25, {"relu5_2": 0.5, "relu4_2": 0.5}),
        (0.5, {"relu4_2": 1.0}),
        (0.75, {"relu4_2": 0.5, "relu3_2": 0.5}),
        (1, {"relu3_2": 1.0}),
    ],
)
def test_detail_goes_from_deep_layers_to_shallow_ones(detail: float, layers: dict[str, float]) -> None:
    settings = Settings(detail=detail)
    assert settings.content_layers == tuple(layers)
    assert settings.content_layer_weights == tuple(layers.values())


@few
@given(st.floats(0, 1))
def test_weights_sum_to_one_and_none_is_zero(detail: float) -> None:
    layers = layers_by_detail(detail)
    assert sum(layers.values()) == pytest.approx(1)
    assert all(weight > 0 for weight in layers.values())


@few
@given(st.floats(0, 1), st.floats(0, 1))
def test_more_detail_is_never_deeper(one: float, other: float) -> None:
    """Depth counted in the network's own order, averaged by the weights."""

    def depth(detail: float) -> float:
        return sum(LAYERS.index(layer) * weight for layer, weight in layers_by_detail(detail).items())

    low, high = sorted((one, other))
    assert depth(low) >= depth(high) - 1e-9


def test_default_is_the_measured_one() -> None:
    assert Settings().content_layers == ("relu4_2",)
    assert Settings().content_layer_weights == (1.0,)


@few
@given(st.floats(0, 1), st.floats(0, 1))
def test_chosen_layers_follow_the_slider(before: float, after: float) -> None:
    """From settings, from TOML, and from the whole record of a result alike."""
    expected = Settings(detail=after)
    assert Settings(detail=before).replace(detail=after) == expected
    assert Settings.from_sources({"detail": before}, detail=after) == expected
    assert Settings.from_sources(Settings(detail=before).as_dict(), detail=after) == expected


def test_layers_named_by_the_user_stay() -> None:
    named = Settings(content_layers=("relu2_2",))
    assert named.replace(detail=1.0).content_layers == ("relu2_2",)
    assert Settings.from_sources(named.as_dict(), detail=0.0).content_layers == ("relu2_2",)
    assert Settings.from_sources({"content_layers": ["relu2_2"]}, detail=0.0).content_layers == ("relu2_2",)
    weighted = Settings(content_layers=("relu3_2", "relu4_2"), content_layer_weights=(2.0, 1.0))
    assert weighted.replace(detail=0.75).content_layer_weights == (2.0, 1.0)
    assert weighted.replace(content_layers=("relu4_2", "relu5_2")).content_layer_weights == (1.0, 1.0)


def test_word_detail_gives_the_choice_back() -> None:
    named = Settings(content_layers=("relu2_2",), detail=0.0)
    assert named.replace(content_layers=("detail",)) == Settings(detail=0.0)


@pytest.mark.parametrize(
    ("detail", "layers"), [(0.3, ("relu4_2",)), (0.3, ("relu5_2", "relu4_2")), (0.5, ("relu5_2",))]
)
def test_layers_beside_another_detail_survive_toml(tmp_path: Path, detail: float, layers: tuple[str, ...]) -> None:
    settings = Settings(detail=detail, content_layers=layers)
    path = tmp_path / "mine.toml"
    path.write_text(settings.to_toml())
    assert Settings.from_sources(path) == settings


def test_slider_alone_is_all_that_toml_says() -> None:
    assert Settings(detail=0.3).to_toml() == "detail = 0.3\n"


@pytest.mark.parametrize("weights", [(1.0, 2.0), (0.0,), (-1.0,), ("a",)])
def test_weights_that_do_not_fit_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(SettingsError, match="content_layer_weights"):
        Settings(content_layers=("relu4_2",), content_layer_weights=weights)
