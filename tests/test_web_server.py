"""The web page's server over HTTP: what it hands out, what it refuses, and twenty orders from several clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from stylize import cli
from stylize.api import Result
from stylize.errors import OutputError
from stylize.events import Evaluated, Listener, ScaleStarted, Snapshot
from stylize.images import read_settings
from stylize.settings import Settings
from stylize.web.guard import CALLS, Access, Guard
from stylize.web.jobs import Order
from stylize.web.limits import Limits

pytest.importorskip("gradio")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Gradio's client

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Gradio's and its libraries' own
    import httpx
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    from stylize.web.server import Server, make_app, serve
    from stylize.web.studio import Studio

LIMITS = Limits(upload_bytes=200_000, pixels=100_000, side=5000, size=512, waiting_each=20)
TO_BE_CANCELLED = (3, 6, 9, 12)


def painting(order: Order, listen: Listener) -> Result:
    """Stands in for the real painter: a grey picture, after as many evaluations as the order says."""
    listen(ScaleStarted(0, 1, 24, 16, order.settings.iterations or 20))
    for k in range(1, (order.settings.iterations or 20) + 1):
        listen(Evaluated(0, 1, k, order.settings.iterations or 20, 0.01 * k, 1 / k))
        listen(Snapshot(k, torch.zeros(3, 16, 24, dtype=torch.uint8)))
        time.sleep(0.01)
    return Result(
        tensor=torch.full((1, 3, 16, 24), 0.5),
        alpha=None,
        losses={"total": 1.0},
        history=(),
        evaluations=20,
        seconds=0.2,
        settings=order.settings,
        outcome="done",
        reason="It is enough.",
        notices=(),
        record={"settings": order.settings.as_dict()},
    )


@dataclass
class Served:
    """A running server."""

    url: str
    folder: Path
    studio: Studio

    def send(self, width: int = 60, height: int = 40, name: str = "photo.png") -> str:
        """Send a picture; its key."""
        answer = httpx.post(f"{self.url}/pictures", params={"name": name}, content=encoded(width, height))
        return str(answer.raise_for_status().json()["key"])


def encoded(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 90)).save(buffer, "PNG")
    return buffer.getvalue()


async def made(studio: Studio, access: Access) -> Guard:
    """The application, made inside of a loop: outside, Gradio opens some that nobody closes."""
    return make_app(studio, access)


def running(folder: Path, access: Access) -> Iterator[Served]:
    studio = Studio([painting], LIMITS, folder)
    server = Server(asyncio.run(made(studio, access)))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Served(f"http://127.0.0.1:{port}", folder, studio)
    server.should_exit = True
    thread.join(20)
    studio.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from running(tmp_path_factory.mktemp("served"), Access())


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from running(tmp_path_factory.mktemp("locked"), Access("anna:secret", "open-sesame"))


class Visitor:
    """A page, as the server sees it: a heartbeat for as long as it is open, and orders."""

    def __init__(self, served: Served) -> None:
        self.session = secrets.token_hex(8)
        self._http = httpx.Client(base_url=served.url, timeout=60)
        self._open = contextlib.ExitStack()
        heart = self._open.enter_context(self._http.stream("GET", f"/gradio_api/heartbeat/{self.session}"))
        self._beats = heart.iter_text()
        next(self._beats)

    def order(self, iterations: int) -> str:
        """Order a picture; what to follow it by."""
        arguments = ["red_panda", ["starry_night"], {"iterations": iterations, "size": 64}]
        body = {"data": arguments, "session_hash": self.session}
        return str(self._http.post("/gradio_api/call/paint", json=body).raise_for_status().json()["event_id"])

    def follow(self, event: str) -> Iterator[dict[str, Any]]:
        """The states of a job until its end."""
        with self._http.stream("GET", f"/gradio_api/call/paint/{event}") as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ["):
                    yield json.loads(line.removeprefix("data: "))[0]

    def close(self) -> None:
        """Close the page."""
        self._open.close()
        self._http.close()


def wait_for_nothing_new_in(folder: Path, before: set[Path]) -> None:
    end = time.monotonic() + 20
    while left := set(folder.iterdir()) - before:
        assert time.monotonic() < end, f"left: {left}"
        time.sleep(0.05)


@pytest.fixture(scope="module", autouse=True)
def gradios_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that Gradio's server makes for itself.

    Its client notices at a heartbeat that it was closed, and sends telemetry unless it is told not to.
    """
    folder = tmp_path_factory.mktemp("gradio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradio.routes.DEFAULT_TEMP_DIR", str(folder))
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        patch.setattr("gradio.utils.get_heartbeat_rate", lambda: 0.2)
        patch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
        yield folder
    gc.collect()  # here, where what the client leaves open is no error, and not in somebody else's test


def client_of(served: Served, **more: Any) -> Client:
    return Client(served.url, verbose=False, download_files=False, **more)


def test_a_client_paints_and_downloads_a_picture_with_its_settings(served: Served, tmp_path: Path) -> None:
    client = client_of(served)
    job = client.submit(served.send(), [served.send(name="style.png")], {"seed": 7, "size": 64}, api_name="/paint")
    states = list(job)
    assert [state["phase"] for state in states][-1] == "done"
    assert set(states[-1]["files"]) == {"png", "jpg", "tiff"}
    for kind, place in states[-1]["files"].items():
        path = tmp_path / f"result.{kind}"
        path.write_bytes(httpx.get(f"{served.url}/{place}").raise_for_status().content)
        assert Settings.from_sources(read_settings(path)) == Settings(seed=7, size=64)
    client.close()


def test_what_cannot_be_painted_is_said_in_a_sentence(served: Served) -> None:
    client = client_of(served)
    photo = served.send()
    for arguments, sentence in [
        (("", [photo], {}), "There is no photograph yet"),
        ((photo, [], {}), "There is no painting yet"),
        (("../../etc/passwd", [photo], {}), "no longer here"),
        ((photo, ["/etc/passwd"], {}), "no longer here"),
        ((photo, [photo], {"size": 9999}), "this page paints at most 512 px"),
        ((photo, [photo], {"colour": "red"}), "There is no setting 'colour'"),
        ((photo, [photo], {"memory_limit": 10**15, "history": 1000}), "this page remembers at most 50 pairs"),
        ((photo, [photo], {"size": 10**400}), "it must be a whole number of pixels"),
        ((photo, [photo], {"memory_limit": "9" * 400 + "GB"}), "memory_limit"),
    ]:
        with pytest.raises(AppError, match=re.escape(sentence)) as caught:
            client.predict(*arguments, api_name="/paint")
        assert "Traceback" not in str(caught.value)
    client.close()


def test_bad_uploads_are_refused_and_the_server_goes_on(served: Served) -> None:
    for data, status, sentence in [
        (b"", 400, "is empty"),
        (b"#!/bin/sh\nrm -rf /", 400, "is not a picture"),
        (encoded(60, 40)[:80], 400, "is damaged or cut short"),
        (encoded(10_000, 10), 400, "has 10000 × 10 pixels"),
        (encoded(1000, 1000), 400, "has 1000 × 1000 pixels"),
        (b"x" * 200_001, 413, "this page takes at most 0.2"),
    ]:
        answer = httpx.post(f"{served.url}/pictures", params={"name": "../../x.png"}, content=data)
        assert answer.status_code == status
        assert sentence in answer.text
        assert str(served.folder) not in answer.text
        assert "Traceback" not in answer.text
    assert served.send()


@pytest.mark.parametrize("path", ["/pictures", "/gradio_api/call/paint", "/gradio_api/queue/join"])
def test_a_short_content_length_does_not_let_a_long_body_in(served: Served, path: str) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    part = bytes(50_000)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode() + (b"%x\r\n%b\r\n" % (len(part), part)) * 5 + b"0\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 411")


def test_the_guard_knows_how_many_values_each_call_takes(served: Served) -> None:
    named = httpx.get(f"{served.url}/gradio_api/info").json()["named_endpoints"]
    assert {f"/gradio_api/call{name}": len(each["parameters"]) for name, each in named.items()} == CALLS
    for path, count in CALLS.items():
        answer = httpx.post(served.url + path, json={"data": ["x"] * (count - 1)})
        assert answer.status_code == 400
        assert answer.text.endswith(f"not {count - 1}. Give them all.")


@pytest.mark.parametrize(
    "path",
    [
        "/pictures/" + quote("../../etc/passwd", safe=""),
        "/pictures/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/results/" + quote("../..", safe="") + "/png",
        "/results/x/..%2f..%2fpng",
        "/assets/" + quote("../../../../../../../etc/passwd", safe=""),
        "/static/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        *("/gradio_api/file=/etc/passwd", "/gradio_api/file=http://127.0.0.1:1/x", "/gradio_api/proxy=http://x"),
        *("/gradio_api/upload", "/monitoring", "/docs", "/openapi.json"),
    ],
)
def test_no_file_but_the_sessions_own_can_be_read(served: Served, path: str) -> None:
    answer = httpx.get(served.url + path)
    assert answer.status_code in (403, 404)
    assert "root:" not in answer.text


@pytest.mark.parametrize("place", ["/etc/passwd", "http://127.0.0.1:1/x"])
def test_files_that_gradio_would_copy_or_fetch_are_not_taken(served: Served, place: str) -> None:
    """A mounted Gradio copies any file that a visitor names into its folder, and fetches any address."""
    wicked = {"path": place, "url": place, "meta": {"_type": "gradio.FileData"}}
    for data in ([wicked, [wicked], {"size": 64}], ["red_panda", ["starry_night"], {"size": 64, "init": wicked}]):
        for route in ("call/paint", "run/predict", "queue/join"):
            body = {"data": data, "fn_index": 0, "session_hash": "x"}
            answer = httpx.post(f"{served.url}/gradio_api/{route}", json=body)
            assert (answer.status_code, answer.text[:26]) == (400, "Pictures are named by thei")


def test_gradio_itself_would_not_copy_a_file_that_was_not_sent(served: Served, gradios_folder: Path) -> None:
    wicked = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stylize.web.guard.names_a_file", lambda body: False)
        body = {"data": [wicked, [], {"size": 64}]}
        event = httpx.post(f"{served.url}/gradio_api/call/paint", json=body).json()["event_id"]
        assert "event: error" in httpx.get(f"{served.url}/gradio_api/call/paint/{event}").text
    assert [path for path in gradios_folder.rglob("*") if path.is_file()] == []


def test_the_page_names_no_other_host(served: Served) -> None:
    page = httpx.get(served.url).raise_for_status()
    own = re.sub(r"<meta[^>]*>", "", page.text).replace(served.url, "")  # a browser fetches nothing of a meta
    hosts = set(re.findall(r"https?://([a-z0-9.-]+)", own)) - {"www.w3.org"}
    assert hosts == set()
    assert "googleapis" not in httpx.get(f"{served.url}/theme.css").text
    assert "connect-src" not in page.headers["content-security-policy"]  # default-src 'self' holds for it


def test_nothing_comes_out_without_the_password(locked: Served) -> None:
    for path in ("/", "/config", "/theme.css", "/pictures/starry_night", "/gradio_api/info"):
        assert httpx.get(locked.url + path).status_code == 401
    assert httpx.post(f"{locked.url}/pictures", content=encoded(9, 9)).status_code == 401
    assert httpx.get(locked.url, auth=("anna", "secret")).status_code == 200
    with httpx.Client() as browser:  # one that keeps cookies
        assert browser.get(locked.url, params={"token": "open-sesame"}, follow_redirects=True).status_code == 200
        assert browser.get(f"{locked.url}/config").status_code == 200


def test_a_client_with_the_token_paints(locked: Served) -> None:
    client = client_of(locked, headers={"Authorization": "Bearer open-sesame"})
    assert client.predict("red_panda", ["starry_night"], {"iterations": 2, "size": 64}, api_name="/paint")
    client.close()


def test_twenty_orders_of_four_clients_are_done_or_cancelled_as_asked_and_leave_nothing(served: Served) -> None:
    before = set(served.folder.iterdir())
    clients = [client_of(served) for _ in range(4)]
    jobs: dict[int, Any] = {}
    for k in range(20):
        settings = {"iterations": 2000 if k in TO_BE_CANCELLED else 5, "size": 64}
        photo, style = served.send(), served.send(name="style.png")
        jobs[k] = clients[k % 4].submit(photo, [style], settings, api_name="/paint")
    for k in TO_BE_CANCELLED:
        key = next(jobs[k])["job"]
        assert clients[(k + 1) % 4].predict(key, api_name="/cancel") == 0  # a stranger's
        assert clients[k % 4].predict(key, api_name="/cancel") == 1
    for k, job in jobs.items():
        *_, last = job
        assert last["phase"] == ("cancelled" if k in TO_BE_CANCELLED else "done")
    assert len(list(served.folder.rglob("photo_style.png"))) == 16
    for client in clients:
        client.close()
    wait_for_nothing_new_in(served.folder, before)


def test_a_visitor_that_goes_away_frees_the_device(served: Served) -> None:
    visitor, other = Visitor(served), Visitor(served)
    assert any(state["phase"] == "painting" for state in visitor.follow(visitor.order(2000)))
    [job] = served.studio.queue.find(visitor.session)
    event = other.order(2)
    visitor.close()
    *_, last = other.follow(event)
    assert last["phase"] == "done"
    assert job.phase == "cancelled"
    other.close()


def test_a_taken_port_is_said_before_anything_is_loaded(served: Served, tmp_path: Path) -> None:
    port = int(served.url.rpartition(":")[2])
    common: dict[str, Any] = {"auth": None, "token": None, "devices": ["cpu"], "limits": LIMITS}
    with pytest.raises(OutputError, match="Choose another --port"):
        serve(host="127.0.0.1", port=port, folder=tmp_path, tell=pytest.fail, **common)


def test_the_command_refuses_an_open_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    answer = CliRunner().invoke(cli.program, ["serve", "--host", "0.0.0.0"])
    assert answer.exit_code == 2
    assert "--auth user:password" in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_to_install_when_gradio_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stylize.cli.find_spec", lambda name: None)
    answer = CliRunner().invoke(cli.program, ["serve"])
    assert answer.exit_code == 2
    assert answer.stderr.strip().endswith("Run: pip install 'stylize-nst[web]'")
    assert answer.stderr.count("\n") == 1
