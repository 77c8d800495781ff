"""Who may come in to the web page, and what is refused before anybody looks at it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stylize.errors import SettingsError
from stylize.web.guard import (
    MOST_DRAINED,
    MOST_JSON,
    READ,
    WRITE,
    Access,
    Guard,
    choose_access,
    is_loopback,
    names_a_file,
)
from stylize.web.limits import Limits

LIMITS = Limits(upload_bytes=1000)
JSON_PATHS = sorted({*WRITE} - {"/pictures"})
OPEN = Access()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong password waits for its answer; here it does not."""
    monkeypatch.setattr("stylize.web.guard.WRONG_S", 0.0)


class Answer:
    """What came back."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]


async def inner(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """The application that is guarded; it answers with the body that it got."""
    body, more = b"let in ", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


class Body:
    """What a visitor sends after the headers; it is over after its parts, or breaks off there."""

    def __init__(self, parts: Iterable[bytes] = (), *, breaks_off: bool = False) -> None:
        self._parts: Iterator[bytes] = iter(parts)
        self._breaks_off = breaks_off
        self.read = 0  # bytes

    async def receive(self) -> MutableMapping[str, Any]:
        part = next(self._parts, None)
        if part is None and self._breaks_off:
            return {"type": "http.disconnect"}
        self.read += len(part or b"")
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}


def ask(
    path: str = "/",
    method: str = "GET",
    *,
    access: Access = OPEN,
    query: str = "",
    body: Body | None = None,
    **headers: str,
) -> Answer:
    """One request; host is this machine's unless said otherwise."""
    lines = {"host": "127.0.0.1:7860"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in lines.items()],
    }
    answer = Answer()
    asyncio.run(Guard(inner, access, LIMITS)(scope, (body or Body()).receive, answer.send))
    return answer


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_loopback_needs_no_password_and_every_other_host_does() -> None:
    assert choose_access("127.0.0.1", None, None).is_open
    assert choose_access("::1", None, None).is_open
    assert choose_access("localhost", None, None).is_open
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org", ""):
        with pytest.raises(SettingsError, match="--auth user:password or --token auto"):
            choose_access(host, None, None)
        assert not choose_access(host, "anna:secret", None).is_open
        assert not choose_access(host, None, "auto").is_open


@pytest.mark.parametrize("auth", ["", "anna", "anna:", ":secret"])
def test_a_password_that_cannot_be_is_refused(auth: str) -> None:
    with pytest.raises(SettingsError, match="user:password"):
        choose_access("127.0.0.1", auth, None)


def test_a_token_that_is_made_up_is_new_and_long() -> None:
    tokens = {choose_access("127.0.0.1", None, "auto").token for _ in range(10)}
    assert len(tokens) == 10
    assert all(token is not None and len(token) >= 20 for token in tokens)
    with pytest.raises(SettingsError, match="too short"):
        choose_access("127.0.0.1", None, "abc")


def test_127_0_0_0_8_is_loopback_and_names_that_look_like_it_are_not() -> None:
    assert is_loopback("127.3.2.1")
    assert not is_loopback("127.0.0.1.example.org")
    assert not is_loopback("localhost.example.org")


@pytest.mark.parametrize("path", ["/", "/config", "/assets/x.js", "/pictures/abc", "/gradio_api/queue/data"])
def test_with_a_password_nothing_is_shown_without_it(path: str) -> None:
    access = Access("anna:sécret:2")
    refused = ask(path, access=access)
    assert refused.status == 401
    assert refused.headers["www-authenticate"].startswith("Basic")
    assert ask(path, access=access, authorization=basic("anna:sécret:2")).status == 200


@pytest.mark.parametrize("given_", ["anna:wrong", "ANNA:secret", "anna:", "", "anna:secret "])
def test_a_wrong_password_is_refused(given_: str) -> None:
    assert ask(access=Access("anna:secret"), authorization=basic(given_)).status == 401


@pytest.mark.parametrize("line", ["Basic", "Basic ====", "Bearer anna:secret", "Digest x", "Basic " + "A" * 999])
def test_credentials_that_are_none_are_refused(line: str) -> None:
    assert ask(access=Access("anna:secret"), authorization=line).status == 401


def test_a_token_lets_in_once_from_the_address_and_then_by_its_cookie() -> None:
    access = Access(token="open-sesame")
    assert ask(access=access).status == 401
    first = ask(access=access, query="token=open-sesame")
    assert first.status == 303
    assert first.headers["location"] == "./"  # the token does not stay in the address
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask("/config", access=access, cookie=cookie.split(";")[0]).status == 200
    assert ask("/config", access=access, authorization="Bearer open-sesame").status == 200
    assert ask("/config", access=access, cookie="stylize_token=wrong").status == 401
    assert ask(access=access, query="token=wrong").status == 401


def test_without_a_password_only_names_of_this_machine_are_answered() -> None:
    for host in ("127.0.0.1:7860", "localhost:1", "[::1]:7860", "localhost"):
        assert ask(host=host).status == 200
    for host in ("evil.example:7860", "127.0.0.1.evil.example", "", "[", "192.168.1.7:7860"):
        assert ask(host=host).status == 403


def test_another_site_cannot_post() -> None:
    assert ask("/pictures", "POST", content_length="5", origin="http://127.0.0.1:7860").status == 200
    for origin in ("http://evil.example", "http://127.0.0.1:9999", "null"):
        assert ask("/pictures", "POST", content_length="5", origin=origin).status == 403


@pytest.mark.parametrize(
    "path",
    [
        *("/gradio_api/file=/etc/passwd", "/file=/etc/passwd", "/gradio_api/proxy=http://example.org/x"),
        *("/gradio_api/upload", "/gradio_api/upload_progress", "/monitoring", "/gradio_api/vibe-code/"),
        *("/assets/../../../../etc/passwd", "/static//etc/passwd", "/pictures/..\\x", "/gradio_api/dev/reload"),
        *("/docs", "/openapi.json", "/login", "/gradio_api/component_server", "/gradio_api/custom_component/x"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_the_page_does_not_need_is_not_there(path: str, method: str) -> None:
    assert ask(path, method, content_length="5").status == 404


@pytest.mark.parametrize("name", ["", "press_paint", "nothing", "v2/paint", "paint/", "paint/x"])
def test_programs_call_only_what_is_meant_for_them(name: str) -> None:
    assert ask(f"/gradio_api/call/{name}", "POST", content_length="5").status == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(method: str) -> None:
    assert ask("/pictures", method, content_length="5").status == 404


def test_what_is_too_large_is_refused_with_a_sentence() -> None:
    assert ask("/pictures", "POST", content_length="1000").status == 200
    refused = ask("/pictures", "POST", content_length="2500")
    assert refused.status == 413
    assert refused.body == b"The file has 0.0 MB; this page takes at most 0.001. Make the picture smaller first."
    assert ask("/gradio_api/queue/join", "POST", content_length="1000001").status == 413


@pytest.mark.parametrize("length", ["", "-1", "x", "1e3", "9" * 5000])
def test_a_length_that_is_none_is_refused(length: str) -> None:
    assert ask("/pictures", "POST", content_length=length).status == 411


@pytest.mark.parametrize(("path", "most"), [("/pictures", 1000), *((path, MOST_JSON) for path in JSON_PATHS)])
def test_a_body_is_counted_whatever_its_headers_say_of_it(path: str, most: int) -> None:
    body = Body(repeat(bytes(most // 10), 50))
    answer = ask(path, "POST", content_length="5", body=body)
    assert answer.status == 413
    assert answer.body == f"The request goes on after {most:,} bytes; no more are read. Send less.".encode()
    assert body.read == most + most // 10  # the first part beyond the limit is the last one


@pytest.mark.parametrize("path", WRITE)
@pytest.mark.parametrize("coding", ["chunked", "gzip, chunked", "identity", ""])
def test_a_body_in_chunks_is_refused_and_not_all_of_it_is_read(path: str, coding: str) -> None:
    body = Body(repeat(bytes(100), 100))
    answer = ask(path, "POST", content_length="5", transfer_encoding=coding, body=body)
    assert answer.status == 411
    assert answer.body == b"The request comes in chunks. Send it whole, with a Content-Length."
    assert body.read <= MOST_DRAINED * LIMITS.upload_bytes + 100


def test_a_refused_body_is_read_to_its_end_so_that_the_answer_is_seen() -> None:
    body = Body([bytes(500)] * 5)
    assert ask("/pictures", "POST", content_length="2500", body=body).status == 413
    assert body.read == 2500


@given(st.lists(st.binary(max_size=250), max_size=4))
def test_a_picture_within_the_limit_arrives_as_it_was_sent(parts: list[bytes]) -> None:
    answer = ask("/pictures", "POST", content_length="5", body=Body(parts))
    assert (answer.status, answer.body) == (200, b"let in " + b"".join(parts))


@pytest.mark.parametrize("path", WRITE)
def test_of_a_request_that_breaks_off_nothing_is_handed_on(path: str) -> None:
    answer = ask(path, "POST", content_length="5", body=Body([b"{}"], breaks_off=True))
    assert (answer.status, answer.body[:17]) == (400, b"The request ended")


@pytest.mark.parametrize(("name", "count"), [("paint", 3), ("stop", 1), ("cancel", 1)])
def test_a_call_with_too_few_values_is_refused_with_a_sentence(name: str, count: int) -> None:
    def called(values: int) -> Answer:
        data = json.dumps({"data": ["x"] * values}).encode()
        return ask(f"/gradio_api/call/{name}", "POST", content_length="5", body=Body([data]))

    assert called(count).status == 200
    refused = called(count - 1)
    assert refused.status == 400
    assert f'takes {count} values in "data", not {count - 1}.' in refused.body.decode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}]}',
        b'{"data": [[[{"a": {"url": "http://example.org"}}]]]}',
        b'{"data": [{"p\\u0061th": "x"}]}',
        '{"data": [{"path": "x"}]}'.encode("utf-16"),
        b"[" * 100_000,
        b"data=x",
        b"\xff\xfe\xfd",
    ],
)
def test_what_gradio_would_take_for_a_file_is_refused(body: bytes) -> None:
    assert names_a_file(body)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"data": ["/path", [{"key": "x", "name": "url"}], {"size": 6}]}'])
def test_what_the_page_sends_is_no_file(body: bytes) -> None:
    assert not names_a_file(body)


def test_the_browser_is_told_to_ask_no_other_host() -> None:
    policy = ask().headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy


@given(st.text(alphabet="/.\\%abgradio_api=:", max_size=40))
def test_only_listed_addresses_are_let_through(rest: str) -> None:
    path = "/" + rest
    listed = any(path == each or (each != "/" and each.endswith("/") and path.startswith(each)) for each in READ)
    if ask(path).status == 200:
        assert listed
        assert ".." not in path
    if ask(path, "POST", content_length="1").status == 200:
        assert any(path == each or (each.endswith("/") and path.startswith(each)) for each in WRITE)
