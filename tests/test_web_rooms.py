"""The web page's rooms that need no Gradio: what may be sent, what is kept, and what the controls mean."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stylize.api import Result
from stylize.errors import PictureError, SettingsError
from stylize.events import Evaluated, Notice, ScaleStarted, Snapshot
from stylize.settings import Settings, preset_names
from stylize.web import drawing
from stylize.web.choices import (
    Choices,
    content_weight_of,
    former_settings,
    parse_shares,
    preset,
    strength_of,
    visitors_settings,
)
from stylize.web.jobs import Job, Order
from stylize.web.limits import LONGEST_NAME, Limits, check_order, safe_name
from stylize.web.observer import FRAME_SIDE, Observer
from stylize.web.store import FORMATS, Painted, Store, gallery_paths
from stylize.web.studio import divided

LIMITS = Limits(pixels=100_000, side=2000, pictures=3)


def encoded(width: int, height: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 90)).save(buffer, kind)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is so large."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def deep_bomb() -> bytes:
    """A TIFF of few pixels, each of which has a thousand samples; compressed, it would be small."""
    buffer = io.BytesIO()
    pixels = np.zeros((64, 64, 1000), np.uint8)
    tifffile.imwrite(buffer, pixels, photometric="rgb", planarconfig="contig", extrasamples=[0] * 997)
    return buffer.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, LIMITS)


def result_of(width: int = 40, height: int = 30) -> Result:
    settings = Settings(size=40)
    return Result(
        tensor=torch.rand(1, 3, height, width),
        alpha=None,
        losses={},
        history=(),
        evaluations=1,
        seconds=1.0,
        settings=settings,
        outcome="done",
        reason="It is enough.",
        notices=(),
        record={"settings": settings.as_dict()},
    )


# ---- what may be sent -----------------------------------------------------------------------------------


@given(st.text(max_size=200))
def test_a_safe_name_is_one_part_of_a_path_and_never_hidden(name: str) -> None:
    safe = safe_name(name)
    assert safe
    assert len(safe) <= LONGEST_NAME
    assert not set(safe) & set('/\\\0:*?"<>|\n')
    assert not safe.startswith(".")
    assert Path("folder", safe).parent == Path("folder")


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("St'tteben (1).jpg", "St'tteben (1).jpg"),
        ("2023李.jpg", "2023李.jpg"),
        ("<script>.png", "_script_.png"),
        ("..", "picture"),
    ],
)
def test_names_that_people_give_stay_as_far_as_they_can(name: str, safe: str) -> None:
    assert safe_name(name) == safe


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "picture.png is empty"),
        (b"MZ this is a program", "picture.png is not a picture"),
        (encoded(60, 40)[:90], "picture.png is damaged or cut short"),
        (encoded(400, 300), "picture.png has 400 × 300 pixels"),
        (encoded(2001, 10), "picture.png has 2001 × 10 pixels"),
        (bomb(60_000, 60_000), "picture.png has 60000 × 60000 pixels"),
        (bomb(300, 300), "picture.png is damaged or cut short"),
        (deep_bomb(), "picture.png is damaged or cut short"),
        (encoded(400, 300, "TIFF"), "picture.png has 400 × 300 pixels"),
        (encoded(400, 300, "WEBP"), "picture.png has 400 × 300 pixels"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence_without_a_path(
    store: Store, tmp_path: Path, data: bytes, sentence: str
) -> None:
    with pytest.raises(PictureError) as caught:
        store.receive(data, "../picture.png")
    assert sentence in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_orders_that_would_keep_the_machine_are_refused() -> None:
    check_order(Settings(size=1024, iterations=2000, time_budget_s=1800, history=50), 4, Limits())
    refused = [
        *(Settings(size=1025), Settings(size="full"), Settings(size=(64, 64))),
        *(Settings(iterations=2001), Settings(time_budget_s=1801), Settings(history=51)),
    ]
    for settings in refused:
        with pytest.raises(SettingsError, match="this page"):
            check_order(settings, 1, Limits())
    with pytest.raises(SettingsError, match="5 styles"):
        check_order(Settings(), 5, Limits())


# ---- what is kept ---------------------------------------------------------------------------------------


def test_pictures_and_results_go_with_their_session_and_only_those(store: Store, tmp_path: Path) -> None:
    mine, other = store.receive(encoded(60, 40), "a.png"), store.receive(encoded(60, 40), "b.png")
    assert store.picture(mine.key, "me").path.read_bytes() == encoded(60, 40)
    store.picture(other.key, "you")
    painted = store.keep(result_of(), owner="me", content=mine.key, stem="a_b", caption="a in the manner of b")
    assert [painted.path(kind).exists() for kind in FORMATS] == [True] * len(FORMATS)
    assert store.results("me") == [painted]
    assert store.results("you") == []
    store.drop("me")
    for key in (mine.key, "unknown", "../" + other.key):
        with pytest.raises(PictureError, match="no longer here"):
            store.picture(key)
    with pytest.raises(PictureError, match="no longer here"):
        store.result(painted.key)
    assert [folder.name for folder in tmp_path.iterdir()] == [other.key]


def test_a_picture_that_is_used_by_another_session_stays_its_owners(store: Store) -> None:
    kept = store.receive(encoded(60, 40), "a.png")
    store.picture(kept.key, "me")
    assert store.picture(kept.key, "you").owner == "me"


def test_the_oldest_go_when_one_session_keeps_too_many(store: Store, tmp_path: Path) -> None:
    keys = [store.receive(encoded(20, 20), f"{k}.png").key for k in range(5)]
    for key in keys:
        store.picture(key, "me")
    assert {folder.name for folder in tmp_path.iterdir()} == set(keys[2:])


def test_a_full_folder_lets_go_of_the_oldest_and_first_of_what_nobody_used(tmp_path: Path) -> None:
    one = len(encoded(20, 20))
    store = Store(tmp_path, dataclasses.replace(LIMITS, folder_bytes=2 * one + one // 2))
    used, unused, last = (store.receive(encoded(20, 20), f"{k}.png") for k in range(3))
    assert {folder.name for folder in tmp_path.iterdir()} == {unused.key, last.key}
    store.picture(unused.key, "me")
    newest = store.receive(encoded(20, 20), "4.png")
    assert {folder.name for folder in tmp_path.iterdir()} == {unused.key, newest.key}
    assert used.path.exists() is False


def test_what_was_sent_and_never_used_is_swept_away(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, unused = store.receive(encoded(20, 20), "a.png"), store.receive(encoded(20, 20), "b.png")
    store.picture(used.key, "me")
    store.sweep()
    assert len(list(tmp_path.iterdir())) == 2
    later = unused.since + 3601
    monkeypatch.setattr("time.monotonic", lambda: later)
    store.sweep()
    assert [folder.name for folder in tmp_path.iterdir()] == [used.key]


def test_a_preview_is_a_small_upright_jpeg(store: Store) -> None:
    kept = store.receive(encoded(600, 100), "wide.png")
    with Image.open(io.BytesIO(store.preview(kept.key, 192))) as image:
        assert (image.format, image.size) == ("JPEG", (192, 32))


def test_the_gallery_is_there_and_is_nobodys(tmp_path: Path) -> None:
    paths = [*gallery_paths("content"), *gallery_paths("style")]
    assert len(paths) >= 6
    assert len({path.stem for path in paths}) == len(paths)  # their names are their keys
    store = Store(tmp_path, LIMITS, paths)
    store.drop("me")
    assert store.picture("starry_night", "me").path.is_file()


# ---- what the controls mean -----------------------------------------------------------------------------


def test_the_strength_runs_from_photograph_to_painting_through_the_default() -> None:
    assert content_weight_of(0) == 0.6
    assert content_weight_of(1) == 0.04
    assert content_weight_of(strength_of(Settings().content_weight)) == Settings().content_weight == 0.2
    weights = [content_weight_of(k / 100) for k in range(101)]
    assert weights == sorted(weights, reverse=True)
    for wrong in (-0.01, 1.01, float("nan")):
        with pytest.raises(SettingsError):
            content_weight_of(wrong)


@given(st.floats(0, 1e6))
def test_every_content_weight_has_a_place_on_the_slider(weight: float) -> None:
    assert 0 <= strength_of(weight) <= 1


@given(
    content_weight=st.floats(0, 10),
    detail=st.floats(0, 1),
    tv_weight=st.floats(0, 100),
    style_scale=st.floats(0.01, 10),
    seed=st.integers(0, 2**64 - 1),
)
def test_controls_that_nobody_touched_change_no_setting(**values: float) -> None:
    base = Settings.from_sources(None, **values)
    assert Choices.of(base).applied_to(base) == base


def test_a_touched_control_changes_its_setting_alone() -> None:
    base = Settings(content_weight=0.1234, seed=7)
    shown = Choices.of(base)
    assert dataclasses.replace(shown, size=256).applied_to(base) == base.replace(size=256)
    assert dataclasses.replace(shown, strength=1.0).applied_to(base) == base.replace(content_weight=0.04)
    assert dataclasses.replace(shown, preserve_color="luminance").applied_to(base).preserve_color == "luminance"


def test_a_visitor_does_not_say_which_files_of_the_server_are_read() -> None:
    given = {"weights": "/etc/passwd", "init": "/etc/passwd", "device": "cuda:7", "precision": "bf16", "seed": 3}
    settings, left_out = visitors_settings(given)
    assert settings == Settings(seed=3)
    assert len(left_out) == 4
    assert visitors_settings({"weights": "torchvision"})[0].weights == "embedded"  # that would be a download


def test_a_visitor_does_not_say_how_much_memory_a_run_may_take() -> None:
    given = {"memory_limit": 10**15, "history_precision": "fp32", "checkpoint_every_s": 1e-3, "seed": 3}
    settings, left_out = visitors_settings(given)
    assert settings == Settings(seed=3)
    assert [each.split()[0] for each in left_out] == ["memory_limit", "history_precision", "checkpoint_every_s"]


def test_the_settings_of_a_former_result_fit_the_page() -> None:
    settings, changed = former_settings(Settings(size=4096, seed=3, style_weights=(2, 1)).as_dict(), Limits())
    assert settings == Settings(size=1024, seed=3, style_weights=(2, 1))
    assert changed == ["size is at most 1024 here"]
    settings, changed = former_settings(Settings(history=1000).as_dict(), Limits())
    assert settings == Settings(history=50)
    assert changed == ["history is at most 50 here"]
    with pytest.raises(SettingsError, match="There is no setting"):
        former_settings({"colour": "red"}, Limits())


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "pyproject.toml", ""])
def test_a_preset_is_a_name_and_never_a_path(name: str) -> None:
    with pytest.raises(SettingsError, match="There is no preset"):
        preset(name, Limits())


def test_presets_are_those_of_the_command_but_no_larger_than_the_page_paints() -> None:
    assert preset("default", Limits()) == Settings()
    for name in preset_names():
        settings = Settings.from_sources(name)
        assert preset(name, Limits(size=16_384)) == settings.replace(device="auto", precision="auto")
        assert preset(name, Limits(size=100)).size == 100


def test_shares_are_numbers_with_commas_between() -> None:
    assert parse_shares(" 0.7, 0.3") == (0.7, 0.3)
    assert parse_shares("  ") is None
    with pytest.raises(SettingsError, match="The shares are"):
        parse_shares("half")


def test_a_masked_style_goes_where_it_was_painted_and_the_others_paint_the_rest() -> None:
    paths = (Path("a.png"), Path("b.png"), Path("c.png"))
    order = Order(Path("photo.png"), paths, Settings(style_weights=(3, 2, 1)))
    masked = divided(order, {"2": Path("m.png"), "keep": Path("k.png")}, 3)
    more = dict(masked.more)
    assert list(masked.styles) == [paths[0], paths[2]]
    assert list(masked.settings.style_weights or ()) == [3, 1]
    assert more["protect"] == Path("k.png")
    assert [(region.mask, region.style) for region in more["regions"]] == [(Path("m.png"), paths[1])]
    with pytest.raises(SettingsError, match="Clear the masks"):
        divided(order, {"4": Path("m.png")}, 3)


# ---- what is shown --------------------------------------------------------------------------------------


def observed() -> Observer:
    observer = Observer()
    observer(ScaleStarted(0, 2, 40, 30, 10))
    for k in range(1, 5):
        observer(Evaluated(0, 2, k, 20, float(k), 8.0 / 2**k))
    observer(ScaleStarted(1, 2, 80, 60, 10))
    observer(Evaluated(1, 2, 5, 20, 6.0, 1.0))
    observer(Notice("Mind the <gap>."))
    return observer


def test_the_curve_falls_in_a_straight_line_when_the_loss_halves() -> None:
    view = observed().view()
    points = drawing.curve(view).split('points="')[1].split('"')[0].split()
    xs, ys = np.array([[float(number) for number in point.split(",")] for point in points]).T
    assert np.allclose(np.diff(xs), 240 / 19, atol=0.11)
    assert np.allclose(np.diff(ys)[:3], 120 / 3, atol=0.11)
    assert view.starts == (0, 4)


def test_a_curve_of_nothing_finite_is_left_out() -> None:
    observer = Observer()
    observer(Evaluated(0, 1, 1, 2, 1.0, float("nan")))
    observer(Evaluated(0, 1, 2, 2, 1.0, float("inf")))
    assert drawing.curve(observer.view()) == ""


def test_frames_come_about_once_a_second_and_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    observer = Observer()
    for k in range(20):
        observer(Snapshot(k, torch.zeros(3, 600, 1200, dtype=torch.uint8)))
        now[0] += 0.25
    view = observer.view()
    assert view.frames == 5
    with Image.open(io.BytesIO(view.frame)) as image:
        assert max(image.size) == FRAME_SIDE


class Tags(html.parser.HTMLParser):
    """The tags of a page and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in {"img", "input"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_what_visitors_say_is_escaped() -> None:
    wicked = '"><script>alert(1)</script>${alert(1)}'
    painted = Painted("key", Path(wicked), wicked, wicked, wicked, (40, 30), "me")
    job = Job("me", Order(Path(wicked), (), Settings()), wicked, wicked)
    job.observer = observed()
    job.observer(Snapshot(1, torch.zeros(3, 30, 40, dtype=torch.uint8)))
    job.observer(Notice(wicked))
    texts = [drawing.history([painted]), drawing.easel(job, 0)]
    job.painted, job.phase, job.message = painted, "done", wicked
    texts.append(drawing.easel(job, 0))
    for text in texts:
        tags = Tags(text)
        assert "script" not in tags.seen
        assert tags.open == []
