"""A folder becomes jobs: which files are pictures, what their outputs are called, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stylize.batch.estimate import peak_bytes, too_large, too_many_pixels
from stylize.batch.plan import Job, Plan, check_shard, in_shard, make_plan, parse_shard
from stylize.errors import OutputError, PictureError, SettingsError
from stylize.nst.memory import features_per_pixel
from stylize.settings import Settings

ODD_NAMES = ("2023李.jpg", "St'tteben (1).jpg", 'say "hi".png', "two  spaces.png", "-dash.png", "9%.png", "ü.webp")


def save(path: Path, size: tuple[int, int] = (8, 6), kind: str | None = None) -> Path:
    """A small picture of one colour that depends on its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    level = sum(os.fsencode(path.name)) % 256
    Image.fromarray(np.full((size[1], size[0], 3), level, np.uint8)).save(path, kind)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    return folder


@pytest.fixture
def style(tmp_path: Path) -> Path:
    return save(tmp_path / "style.png")


def names(plan: Plan) -> list[str]:
    return [job.name for job in plan.jobs]


def reasons(plan: Plan) -> dict[str, str]:
    return {each.path.name: each.reason for each in plan.ignored}


# ---- which files ---------------------------------------------------------------------------------------


def test_the_tree_is_mirrored_in_the_order_of_paths(photos: Path, style: Path, tmp_path: Path) -> None:
    for name in ("b.png", "a.png", "sub/deep/c.png", "sub/B.png", "a/z.png"):
        save(photos / name)
    plan = make_plan(photos, [style], tmp_path / "out")
    assert names(plan) == ["a/z.png", "a.png", "b.png", "sub/B.png", "sub/deep/c.png"]
    assert [job.out for job in plan.jobs] == [tmp_path / "out" / name for name in names(plan)]
    assert [job.content for job in plan.jobs] == [photos / name for name in names(plan)]
    assert {job.styles for job in plan.jobs} == {(style,)}
    assert {job.size for job in plan.jobs} == {(8, 6)}


def test_content_decides_what_is_a_picture(photos: Path, style: Path, tmp_path: Path) -> None:
    save(photos / "no-ending", kind="PNG")
    save(photos / "wrong.txt", kind="JPEG")
    save(photos / "LOUD.JPG")
    (photos / "notes.txt").write_text("milk, bread")
    (photos / "text.jpg").write_text("not a picture")
    (photos / "empty.png").touch()
    plan = make_plan(photos, [style], tmp_path / "out")
    assert names(plan) == ["LOUD.png", "empty.png", "no-ending.png", "text.png", "wrong.png"]
    assert reasons(plan) == {"notes.txt": "not a picture"}
    problems = {job.name: job.problem for job in plan.jobs if job.problem}
    assert set(problems) == {"empty.png", "text.png"}
    assert str(photos / "text.jpg") in problems["text.png"]


@pytest.mark.parametrize("name", [".hidden.png", "Thumbs.db", "desktop.ini", "__MACOSX/a.png", ".cache/a.png"])
def test_hidden_and_system_files_are_not_seen(photos: Path, style: Path, tmp_path: Path, name: str) -> None:
    save(photos / "a.png")
    save(photos / name, kind="PNG")
    plan = make_plan(photos, [style], tmp_path / "out")
    assert names(plan) == ["a.png"]
    assert not plan.ignored


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_works(photos: Path, style: Path, tmp_path: Path, name: str) -> None:
    save(photos / name)
    (job,) = make_plan(photos, [style], tmp_path / "out").jobs
    assert job.content == photos / name
    assert job.out == (tmp_path / "out" / name).with_suffix(".png")
    assert job.problem is None


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
def test_a_name_that_is_no_text_works(photos: Path, style: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    try:
        save(photos / name)
    except OSError:
        pytest.skip("this file system takes text only")
    (job,) = make_plan(photos, [style], tmp_path / "out").jobs
    assert os.fsencode(job.out.name) == b"caf\xe9.png"


def test_links_are_not_followed_out_of_the_folder(photos: Path, style: Path, tmp_path: Path) -> None:
    inside = save(photos / "inside.png")
    save(tmp_path / "elsewhere" / "secret.png")
    (photos / "in.png").symlink_to(inside)
    (photos / "out.png").symlink_to(tmp_path / "elsewhere" / "secret.png")
    (photos / "folder").symlink_to(tmp_path / "elsewhere")
    (photos / "loop").symlink_to(photos)
    (photos / "broken.png").symlink_to(photos / "nothing.png")
    plan = make_plan(photos, [style], tmp_path / "results")
    assert names(plan) == ["in.png", "inside.png"]
    assert reasons(plan) == {
        "out.png": "a link out of the folder",
        "folder": "a link to a folder",
        "loop": "a link to a folder",
        "broken.png": "a broken link",
    }


def test_a_pipe_is_not_waited_for(photos: Path, style: Path, tmp_path: Path) -> None:
    save(photos / "a.png")
    os.mkfifo(photos / "pipe.png")
    plan = make_plan(photos, [style], tmp_path / "out")
    assert names(plan) == ["a.png"]
    assert reasons(plan) == {"pipe.png": "not a regular file"}


def test_raw_files_of_cameras_are_not_taken_for_their_previews(photos: Path, style: Path, tmp_path: Path) -> None:
    save(photos / "a.jpg")
    save(photos / "a.NEF", kind="TIFF")
    plan = make_plan(photos, [style], tmp_path / "out")
    assert names(plan) == ["a.png"]
    assert "raw" in reasons(plan)["a.NEF"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*.jpg"], [], ["b.png", "trip/c.png"]),
        (["trip/*"], [], ["trip/c.png", "trip/d.png"]),
        (["trip"], ["*.jpg"], ["trip/d.png"]),
        ([], ["trip"], ["a.png", "b.png"]),
        ([], ["*.PNG", "b.*"], ["trip/c.png"]),
    ],
)
def test_include_and_exclude_choose(
    photos: Path, style: Path, tmp_path: Path, include: list[str], exclude: list[str], expected: list[str]
) -> None:
    for name in ("a.png", "b.JPG", "trip/c.jpg", "trip/d.png"):
        save(photos / name)
    plan = make_plan(photos, [style], tmp_path / "out", include=include, exclude=exclude)
    assert names(plan) == expected


# ---- names ---------------------------------------------------------------------------------------------


def test_pictures_that_differ_in_their_ending_get_two_outputs(photos: Path, style: Path, tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png", "A.webp", "b.jpg"):
        save(photos / name)
    plan = make_plan(photos, [style], tmp_path / "out")
    assert names(plan) == ["A.webp.png", "a.jpg.png", "a.png.png", "b.png"]


@given(st.lists(st.from_regex(r"[abA]{1,2}(\.[jpJ]{1,2}){0,3}", fullmatch=True), min_size=1, unique=True))
def test_no_two_outputs_share_a_name(relatives: list[str]) -> None:
    from stylize.batch.plan import _unique_names

    found = [name.casefold() for name in _unique_names(relatives, ".png")]
    assert len(set(found)) == len(relatives)
    assert _unique_names(relatives, ".png") == _unique_names(relatives, ".png")


def test_a_folder_of_styles_gives_a_folder_of_results_for_each(photos: Path, tmp_path: Path) -> None:
    save(photos / "a.png")
    save(photos / "sub" / "b.png")
    for name in ("night.jpg", "wave.png", "notes.txt"):
        save(tmp_path / "styles" / name, kind="PNG") if name != "notes.txt" else None
    (tmp_path / "styles" / "notes.txt").write_text("by whom?")
    plan = make_plan(photos, [tmp_path / "styles"], tmp_path / "out")
    assert names(plan) == ["night/a.png", "night/sub/b.png", "wave/a.png", "wave/sub/b.png"]
    assert [job.styles[0].name for job in plan.jobs] == ["night.jpg"] * 2 + ["wave.png"] * 2
    assert reasons(plan) == {"notes.txt": "not a picture"}


def test_one_picture_in_each_style_of_a_folder(tmp_path: Path) -> None:
    content = save(tmp_path / "content.png")
    save(tmp_path / "styles" / "night.png")
    save(tmp_path / "styles" / "wave.png")
    plan = make_plan(content, [tmp_path / "styles"], tmp_path / "out")
    assert names(plan) == ["night/content.png", "wave/content.png"]


def test_a_style_is_not_painted_in_its_own_manner(photos: Path, tmp_path: Path) -> None:
    save(photos / "a.png")
    style = save(photos / "style.png")
    assert names(make_plan(photos, [style], tmp_path / "out")) == ["a.png"]


# ---- refusals ------------------------------------------------------------------------------------------


def test_the_folder_of_the_originals_cannot_be_the_output(photos: Path, style: Path) -> None:
    save(photos / "a.png")
    with pytest.raises(OutputError, match="folder of the originals"):
        make_plan(photos, [style], photos / "sub" / "..")


def test_an_original_is_never_an_output(photos: Path, style: Path, tmp_path: Path) -> None:
    original = save(photos / "a.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.png").symlink_to(original)
    with pytest.raises(OutputError, match="one of the originals"):
        make_plan(photos, [style], tmp_path / "out")


def test_a_tree_that_is_mirrored_onto_itself_is_refused(photos: Path, style: Path, tmp_path: Path) -> None:
    save(photos / "a.png")
    save(photos / "photos" / "a.png")
    with pytest.raises(OutputError, match="one of the originals"):
        make_plan(photos, [style], tmp_path)


def test_results_inside_the_originals_are_not_painted_again(photos: Path, style: Path) -> None:
    save(photos / "a.png")
    save(photos / "painted" / "a.png")
    save(photos / "earlier" / "a.png")
    (photos / "earlier" / ".stylize").mkdir()
    plan = make_plan(photos, [style], photos / "painted")
    assert names(plan) == ["a.png"]
    assert reasons(plan) == {"painted": "the output folder", "earlier": "results of an earlier run"}


def test_a_folder_without_pictures_is_refused(photos: Path, style: Path, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="no picture to paint"):
        make_plan(photos, [style], tmp_path / "out")
    save(photos / "a.png")
    with pytest.raises(PictureError, match="1 were left out by --include"):
        make_plan(photos, [style], tmp_path / "out", exclude=["*"])


def test_folders_and_pictures_cannot_be_mixed_as_styles(photos: Path, style: Path, tmp_path: Path) -> None:
    save(photos / "a.png")
    with pytest.raises(SettingsError, match="one folder of styles"):
        make_plan(photos, [style, photos], tmp_path / "out")


def test_an_unknown_format_is_refused(photos: Path, style: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"\.bmp"):
        make_plan(photos, [style], tmp_path / "out", suffix=".bmp")


# ---- shards --------------------------------------------------------------------------------------------


def job(origin: str, size: tuple[int, int] = (8, 6)) -> Job:
    return Job(origin, origin, Path(origin), (), Path(origin), size)


@given(st.lists(st.text(min_size=1), unique=True), st.integers(1, 9))
def test_every_picture_is_in_exactly_one_shard(origins: list[str], parts: int) -> None:
    for origin in origins:
        assert sum(in_shard(job(origin), (part, parts)) for part in range(1, parts + 1)) == 1


def test_a_shard_does_not_depend_on_what_else_there_is(photos: Path, style: Path, tmp_path: Path) -> None:
    save(photos / "a.jpg")
    (before,) = make_plan(photos, [style], tmp_path / "out").jobs
    save(photos / "a.png")  # a.jpg's output is now called otherwise
    after = make_plan(photos, [style], tmp_path / "out").jobs[0]
    assert before.name != after.name
    assert [in_shard(before, (i, 64)) for i in range(1, 65)] == [in_shard(after, (i, 64)) for i in range(1, 65)]


def test_shards_are_of_about_equal_size() -> None:
    counts = [sum(in_shard(job(f"{i}.jpg"), (part, 4)) for i in range(4000)) for part in (1, 2, 3, 4)]
    # Binomial with n = 4000 and p = 1/4: a deviation of 27; five of them hold in all but one case of a million.
    assert all(abs(count - 1000) < 5 * 27.4 for count in counts)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/2", "1/2/3", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="i from 1 to n"):
        parse_shard(text)


def test_shards_count_from_one() -> None:
    assert parse_shard("8/8") == (8, 8)
    with pytest.raises(SettingsError):
        check_shard((0, 8))


# ---- what it will cost -----------------------------------------------------------------------------------


def test_operations_to_relu5_1_are_those_of_the_paper() -> None:
    # Simonyan and Zisserman 2015, table 1, E: 9 · in · out multiply-adds for each pixel of a block, by hand.
    block_1 = 9 * (3 * 64 + 64 * 64)
    block_2 = 9 * (64 * 128 + 128 * 128) / 4
    block_3 = 9 * (128 * 256 + 3 * 256 * 256) / 16
    block_4 = 9 * (256 * 512 + 3 * 512 * 512) / 64
    block_5 = 9 * 512 * 512 / 256
    floats = 2 * 64 + 2 * 128 / 4 + 4 * 256 / 16 + 4 * 512 / 64 + 512 / 256
    assert features_per_pixel(Settings()) == (floats, block_1 + block_2 + block_3 + block_4 + block_5)


def test_a_square_needs_more_memory_than_a_panorama_of_the_same_length() -> None:
    settings = Settings(size=1000, style_loss="swd")  # which cannot make do with tiles
    square, wide = job("square", (1000, 1000)), job("wide", (1000, 250))
    more = peak_bytes(square, settings, 4) - peak_bytes(wide, settings, 4)
    assert more > 0
    limit = (peak_bytes(square, settings, 4) + peak_bytes(wide, settings, 4)) / 2
    assert too_large(wide, settings, 4, limit) is None
    refusal = too_large(square, settings, 4, limit)
    assert refusal is not None
    assert "1000×1000" in refusal


def test_a_content_of_too_many_pixels_is_not_read() -> None:
    assert too_many_pixels(job("fits", (100, 50)), 5000) is None
    assert "--max-pixels 5100" in str(too_many_pixels(job("large", (102, 50)), 5000))


def test_the_size_that_is_advised_fits() -> None:
    settings = Settings(size=4000)
    big = job("big", (4000, 3000))
    refusal = too_large(big, settings, 4, 2.6e9)
    assert refusal is not None
    size = int(refusal.split("--size ")[1].split()[0])
    assert too_large(big, settings.replace(size=size), 4, 2.6e9) is None
    assert too_large(big, settings.replace(size=size + 20), 4, 2.6e9) is not None
