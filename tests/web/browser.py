"""The web page in a real Chromium, with the real engine at small sizes.

`make test-web` runs it by its name, which pytest does not collect by itself: it needs a browser.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from PIL import Image, ImageDraw

webdriver = pytest.importorskip("selenium.webdriver")

from selenium.common.exceptions import WebDriverException  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from stylize.images import read_record, read_settings  # noqa: E402
from stylize.process import WAITING  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default::ResourceWarning", "default::DeprecationWarning")

ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DESKTOP, PHONE = (1280, 900), (390, 844)
PATIENCE_S = 120.0
FORMATS = ("png", "jpg", "tiff")  # of a result's downloads, in the page's order
SCREENSHOTS = Path(os.environ.get("STYLIZE_SCREENSHOTS", "outputs/screenshots"))

T = TypeVar("T")


@dataclass
class Served:
    """`stylize serve` in a process of its own."""

    url: str
    folder: Path  # the only place it writes to
    process: subprocess.Popen[str]

    @property
    def left(self) -> list[Path]:
        """What visitors have sent and painted and is still there."""
        return [path for path in self.folder.rglob("*.*") if path.is_file()]

    @property
    def memory(self) -> float:
        """Megabytes that the process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    home = tmp_path_factory.mktemp("home")  # where libraries of Gradio's keep caches of their own
    environment = os.environ | {"TMPDIR": str(folder), "HOME": str(home)} | WAITING
    process = subprocess.Popen(
        [sys.executable, "-m", "stylize", "serve", "--port", "0", "--max-upload", "2", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert process.stdout is not None
    yield Served(process.stdout.readline().strip(), folder, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert said == "stylize: The page is at this address. Ctrl-C ends it.\n"  # and no traceback
    assert process.returncode == 0
    assert [path for path in folder.rglob("*") if path.is_file()] == []


class Page:
    """One tab of a browser of its own."""

    def __init__(self, url: str, profile: Path, size: tuple[int, int] = DESKTOP) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        self.downloads = profile / "downloads"
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"):
            options.add_argument(argument)
        options.add_experimental_option("prefs", {"download.default_directory": str(self.downloads)})
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.browser: Any = webdriver.Chrome(
            options=options, service=webdriver.ChromeService("/usr/bin/chromedriver")
        )
        self.browser.get(url)
        self.wait(lambda: self.all("#styles .gallery button"))

    def close(self) -> None:
        """Close the tab, and the browser with it; once is enough."""
        if self.browser.service.is_connectable():
            self.browser.quit()

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> Any:
        return self.wait(lambda: self.all(selector))[0]

    def wait(self, condition: Callable[[], T], seconds: float = PATIENCE_S) -> T:
        """What the condition says once it says something."""
        end = time.monotonic() + seconds
        while True:
            try:
                if found := condition():
                    return found
            except WebDriverException:  # what was looked at was just drawn anew
                pass
            if time.monotonic() > end:
                self.screenshot("stuck")
                pytest.fail(f"It never came true; the page says: {self.said}")
            time.sleep(0.1)

    def value(self, selector: str) -> str:
        return str(self.one(selector).get_attribute("value"))

    def click(self, selector: str) -> None:
        self.wait(lambda: self._press(self.one(selector)))

    def type(self, selector: str, text: str) -> None:
        def typed() -> bool:
            element = self.one(selector)
            element.send_keys(Keys.CONTROL + "a")  # a call of its own: the key is let go at its end
            element.send_keys(text, Keys.TAB)
            return self.value(selector) == text

        self.wait(typed)

    def open(self, accordion: str) -> None:
        """Open what is closed; the page may still be drawing it."""

        def opened() -> bool:
            for button in self.all("button.label-wrap"):
                if accordion in button.text:
                    return "open" in button.get_attribute("class").split() or not self._press(button)
            return False

        self.wait(opened)

    def _press(self, element: Any) -> bool:
        """Click on it, which either happens or raises."""
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        return True

    def send(self, picker: str, path: Path) -> None:
        self.one(f"#{picker} input[type=file]").send_keys(str(path))

    def download(self, suffix: str) -> Path:
        """Save the result as the page offers it, in the format of this suffix; the browser's file."""
        before = set(self.downloads.glob(f"*.{suffix}"))
        place = FORMATS.index(suffix)
        self.wait(lambda: self._press(self.all("#easel a.download")[place]))
        return self.wait(lambda: set(self.downloads.glob(f"*.{suffix}")) - before).pop()

    @property
    def said(self) -> str:
        return " ".join(each.text for each in self.all("#easel .said"))

    def choose(self, size: int = 64, iterations: int = 8) -> None:
        """A photograph, a painting, and a small size."""
        self.click('#content [data-key="red_panda"]')
        self.click('#styles [data-key="starry_night"]')
        self.type("#size input[type=number]", str(size))
        if not self.all("#evaluations input"):
            self.open("More choices")
        self.type("#evaluations input", str(iterations))

    def paint(self) -> None:
        self.click("#paint")

    def finish(self) -> str:
        """Wait for the result; its key."""
        self.wait(lambda: self.all("#easel .compare"))
        self.wait(lambda: self.one("#paint").is_enabled())
        source = self.wait(lambda: self.one("#easel .compare img").get_attribute("src"))
        return str(source).split("/")[-2]

    def screenshot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.browser.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    def asked(self) -> list[str]:
        """The addresses that the page has asked for, with the answer's status where it was an error."""
        found = []
        for line in self.browser.get_log("performance"):
            message = json.loads(line["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(str(message["params"]["request"]["url"]))
        return found


@pytest.fixture
def pages(served: Served, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    opened: list[Page] = []

    def open_page(size: tuple[int, int] = DESKTOP) -> Page:
        opened.append(Page(served.url, tmp_path / f"profile{len(opened)}", size))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()


@pytest.fixture
def page(pages: Callable[..., Page]) -> Page:
    return pages()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A photograph, as good as: a red sun over green land."""
    image = Image.new("RGB", (160, 120), (90, 140, 220))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 80, 160, 120), fill=(40, 120, 50))
    draw.ellipse((50, 20, 110, 80), fill=(220, 60, 40))
    path = tmp_path / "St'tteben (1) ${x}.png"
    image.save(path)
    return path


def test_a_picture_is_sent_painted_watched_and_downloaded_with_its_settings(page: Page, photo: Path) -> None:
    page.choose(size=96, iterations=60)
    page.send("content", photo)
    page.wait(lambda: "tteben" in page.one("#content .chosen").text)
    page.paint()
    frames: set[str] = set()
    facts: set[str] = set()

    def watch() -> bool:
        frames.update(str(each.get_attribute("src"))[-400:] for each in page.all("#easel .frame"))
        facts.update(each.text for each in page.all("#easel .facts p"))
        return bool(page.all("#easel .compare"))

    page.wait(watch)
    assert len(frames) >= 2  # seen changing
    assert any(fact.startswith("About ") for fact in facts)
    assert page.all("#easel .curve polyline")
    page.finish()
    page.wait(lambda: len(page.all("#easel a.download")) == len(FORMATS))
    for suffix in FORMATS:
        path = page.download(suffix)
        told = subprocess.run(
            [sys.executable, "-m", "stylize", "info", str(path)], capture_output=True, text=True, check=True
        ).stdout
        assert "size = 96" in told
        assert "iterations = 60" in told
        assert "starry_night.png" in told
        assert read_record(path)["evaluations"] == 60
        with Image.open(path) as image:
            assert image.size == (96, 72)


def test_before_and_after_are_compared_with_the_keyboard(page: Page) -> None:
    page.choose()
    page.paint()
    page.finish()
    page.one("#easel .compare input").send_keys(Keys.END)
    clip = "return getComputedStyle(document.querySelector('#easel .before')).clipPath"
    whole = ("inset(0px calc(0%) 0px 0px)", "inset(0px)", "inset(0px 0% 0px 0px)")
    page.wait(lambda: page.browser.execute_script(clip) in whole)
    page.wait(lambda: page.one("#easel .before").get_attribute("complete") == "true")
    page.screenshot("compared")


def test_cancelling_works_at_once_and_stopping_keeps_the_picture(page: Page) -> None:
    page.choose(size=128, iterations=2000)
    page.paint()
    page.wait(lambda: page.all("#easel .frame"))
    page.click("#cancel")
    page.wait(lambda: page.said == "Cancelled.", 5)
    assert page.all("#history button") == []
    page.wait(lambda: page.one("#paint").is_enabled())
    page.paint()
    page.wait(lambda: page.all("#easel .frame"))
    page.click("#stop")
    page.finish()
    assert "best picture so far" in page.said
    page.wait(lambda: len(page.all("#history button")) == 1)


def test_bad_files_are_refused_in_a_sentence_and_the_page_goes_on(page: Page, photo: Path, tmp_path: Path) -> None:
    text, cut, wide, heavy = (tmp_path / name for name in ("text.png", "cut.png", "wide.png", "heavy.png"))
    text.write_text("not a picture")
    cut.write_bytes(photo.read_bytes()[:200])
    Image.new("1", (10_000, 20)).save(wide)
    heavy.write_bytes(os.urandom(2_100_000))
    for path, sentence in (
        (text, "text.png is not a picture"),
        (cut, "cut.png is damaged or cut short"),
        (wide, "wide.png has 10000 × 20 pixels; this page takes at most 8,192 a side"),
        (heavy, "heavy.png has 2.1 MB; this page takes at most 2"),
    ):
        page.send("content", path)
        page.wait(lambda expected=sentence: expected in page.one("#content .said").text)  # type: ignore[misc]
        assert page.all("#content .chosen li") == []
    page.paint()
    page.wait(lambda: "There is no photograph yet" in page.said)
    page.screenshot("refused")
    page.send("content", photo)
    page.wait(lambda: page.all("#content .chosen li"))


def test_two_tabs_wait_for_one_another_and_see_only_their_own(pages: Callable[..., Page]) -> None:
    first, second = pages(), pages()
    first.choose(size=128, iterations=2000)
    second.choose(iterations=4)
    first.paint()
    first.wait(lambda: first.all("#easel .frame"))
    second.paint()
    second.wait(lambda: second.said == "Waiting: 1 before you in the queue.")
    second.screenshot("waiting")
    first.click("#stop")
    first.finish()
    second.finish()
    first.wait(lambda: len(first.all("#history button")) == 1)
    second.wait(lambda: len(second.all("#history button")) == 1)
    theirs = [page.one("#history button").get_attribute("data-result") for page in (first, second)]
    assert theirs[0] != theirs[1]


def test_a_closed_tab_frees_the_device_and_leaves_no_file(served: Served, pages: Callable[..., Page]) -> None:
    first, second = pages(), pages()
    first.choose(size=128, iterations=2000)
    first.paint()
    first.wait(lambda: first.all("#easel .frame"))
    first.close()
    second.choose(iterations=4)
    second.paint()
    second.finish()
    second.close()
    end = time.monotonic() + 30
    while served.left:
        assert time.monotonic() < end, f"left: {served.left}"
        time.sleep(0.2)


def test_a_former_result_gives_its_settings_back(page: Page, tmp_path: Path) -> None:
    page.choose(size=80, iterations=5)
    page.type("#strength input[type=number]", "0.9")
    page.paint()
    page.finish()
    path = page.download("png")
    page.browser.refresh()
    page.wait(lambda: page.all("#styles .gallery button"))
    page.open("former result")
    page.send("former", path)
    page.wait(lambda: "Its settings are set above" in page.one("#former-said").text)
    page.wait(lambda: page.value("#size input[type=number]") == "80")
    page.wait(lambda: page.value("#strength input[type=number]") == "0.9")
    page.click('#content [data-key="red_panda"]')
    page.click('#styles [data-key="starry_night"]')
    page.paint()
    page.finish()
    path.rename(tmp_path / "first.png")
    again = page.download("png")
    assert read_settings(again) == read_settings(tmp_path / "first.png")
    assert again.read_bytes() == (tmp_path / "first.png").read_bytes()  # the same choices, the same bytes


def test_a_painted_mask_keeps_the_photograph(page: Page, photo: Path) -> None:
    page.choose(size=96, iterations=20)
    page.send("content", photo)
    page.wait(lambda: "tteben" in page.one("#content .chosen").text)
    page.open("Paint a mask")
    page.wait(lambda: page.one("#mask canvas").size["width"] > 50)
    canvas = page.one("#mask canvas")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width, height = canvas.size["width"], canvas.size["height"]
    stroke = ActionChains(page.browser).move_to_element_with_offset(canvas, -width // 3, -height // 4)
    stroke = stroke.click_and_hold()
    for _ in range(6):
        stroke = stroke.move_by_offset(width // 10, 0)
    stroke.release().perform()
    page.wait(lambda: "Painted: where the photograph stays." in page.one("#mask .said").text)
    page.screenshot("mask")
    page.paint()
    page.finish()
    page.screenshot("masked")
    path = page.download("png")
    with Image.open(path) as painted, Image.open(photo) as before:
        small = before.resize(painted.size, Image.Resampling.LANCZOS)
        spots = [(x, y) for x in (40, 48, 56) for y in (17, 18)], [(x, y) for x in (20, 48, 80) for y in (58, 66)]
        kept, free = (
            max(abs(a - b) for spot in each for a, b in zip(pixel(painted, spot), pixel(small, spot), strict=True))
            for each in spots
        )
    assert kept <= 12  # but for two ways to make a picture smaller
    assert free > 30


def pixel(image: Image.Image, place: tuple[int, int]) -> tuple[int, ...]:
    found = image.getpixel(place)
    assert isinstance(found, tuple)
    return tuple(int(value) for value in found)


def test_the_page_asks_no_other_host_and_its_scripts_have_no_errors(page: Page) -> None:
    page.asked()  # of the browser's own first page
    page.choose()
    page.paint()
    page.finish()
    page.click("#history button")
    page.browser.refresh()
    page.wait(lambda: page.all("#styles .gallery button"))
    page.open("Paint a mask")
    own = urlsplit(page.browser.current_url).netloc
    others = {url for url in page.asked() if urlsplit(url).netloc not in ("", own) and not url.startswith("chrome")}
    assert others == set()
    assert [line["message"] for line in page.browser.get_log("browser") if line["level"] == "SEVERE"] == []


def test_everything_has_a_label_and_can_be_reached_with_the_keyboard(page: Page) -> None:
    for accordion in ("More choices", "Paint a mask", "former result"):
        page.open(accordion)
    nameless = page.browser.execute_script("""
        return [...document.querySelectorAll("input, select, textarea, button, canvas, img")]
            .filter(each => each.checkVisibility())
            .filter(each => !(each.ariaLabel || each.title || each.alt || each.textContent.trim() ||
                (each.labels && [...each.labels].some(label => label.textContent.trim())) ||
                (each.tagName === "IMG" && each.getAttribute("alt") === "")))
            .map(each => each.outerHTML.slice(0, 200));
    """)
    assert nameless == []
    page.browser.execute_script("window.scrollTo(0, 0); document.activeElement.blur()")
    reached = set()
    for _ in range(90):
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
        reached.add(page.browser.execute_script("""
            const home = document.activeElement.closest("[id]:not([id^='html-']):not([id^='component-'])");
            return home ? home.id : "";
        """))
    wanted = {"content", "styles", "size", "strength", "detail", "colours", "paint", "former", "evaluations"}
    assert wanted <= reached


@pytest.mark.parametrize(("name", "size"), [("desktop", DESKTOP), ("phone", PHONE)])
def test_nothing_is_cut_off(pages: Callable[..., Page], name: str, size: tuple[int, int]) -> None:
    page = pages(size)
    page.choose(size=192, iterations=30)
    page.paint()
    page.finish()
    page.browser.execute_script("window.scrollTo(0, 0)")
    time.sleep(0.5)
    page.screenshot(f"{name}-top")
    page.browser.execute_script("document.querySelector('#paint').scrollIntoView()")
    time.sleep(0.5)
    page.screenshot(f"{name}-result")
    wide = page.browser.execute_script("""
        const room = document.documentElement.clientWidth;
        return [...document.querySelectorAll("main *, .gradio-container *")]
            .filter(each => each.checkVisibility() && each.getBoundingClientRect().right > room + 1)
            .map(each => each.outerHTML.slice(0, 120));
    """)
    assert wide == []


def test_memory_stays_flat_over_twenty_pictures(served: Served, page: Page) -> None:
    page.choose(iterations=2)
    before = 0.0
    for k in range(20):
        page.paint()
        page.wait(lambda done=k: len(page.all("#history button")) == done + 1)  # type: ignore[misc]
        page.wait(lambda: page.one("#paint").is_enabled())
        if k == 4:
            before = served.memory
    assert served.memory < before + 60
