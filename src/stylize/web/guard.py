"""Who may come in and what they may ask: a wrapper around the whole server.

Gradio offers far more addresses than this page needs, among them some that read files and fetch from other hosts.
Only those listed here are let through; nothing is let through to somebody who may not come in.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from stylize.errors import SettingsError
from stylize.web.limits import MEGABYTE, Limits

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "stylize_token"
WRONG_S = 0.5  # that a wrong password waits for its answer
MOST_JSON = MEGABYTE  # bytes that anything but a picture may have
MOST_DRAINED = 4  # times the limit of an upload that are read and thrown away, so that the refusal can be read

# What programs may call, and how many values each takes. Gradio answers a call of too few with no word of why.
CALLS = {"/gradio_api/call/paint": 3, "/gradio_api/call/stop": 1, "/gradio_api/call/cancel": 1}

# Whole addresses, and beginnings of addresses that end in a slash.
READ = (
    *("/", "/config", "/theme.css", "/assets/", "/static/", "/favicon.ico", "/manifest.json", "/pwa_icon/"),
    *("/gradio_api/info", "/gradio_api/app_id", "/gradio_api/startup-events", "/gradio_api/theme.css"),
    *("/gradio_api/queue/data", "/gradio_api/heartbeat/", "/gradio_api/call/"),
    *("/pictures/", "/results/"),
)
WRITE = (
    *("/pictures", "/gradio_api/queue/join", "/gradio_api/run/predict", *CALLS),
    *("/gradio_api/cancel", "/gradio_api/reset"),
)

# The browser itself keeps the page from asking any other host. What script-src allows, Gradio's own code needs.
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; font-src 'self' data:; "
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'; worker-src 'self' blob:; object-src 'none'; "
        "base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """Who may come in: everybody, those with a password, or those with a token."""

    user_and_password: str | None = None  # "user:password"
    token: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether nothing is asked."""
        return self.user_and_password is None and self.token is None

    def admits(self, headers: dict[str, str]) -> bool:
        """Whether a request says the password or the token."""
        if self.is_open:
            return True
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            return _same(_decoded(credentials), self.user_and_password)
        if scheme.lower() == "bearer":
            return _same(credentials.strip(), self.token)
        return _same(_cookie(headers.get("cookie", "")), self.token)


def choose_access(host: str, auth: str | None, token: str | None) -> Access:
    """Who may come in when the server listens on `host`; the token "auto" is made up here.

    Raises:
        SettingsError: when others could come in without being asked, or the password cannot be.
    """
    if auth is not None and not all(auth.partition(":")[::2]):
        raise SettingsError("--auth is not of the form user:password. Give both, with a colon between.")
    if token is not None and len(token) < 4:
        raise SettingsError("--token is too short to keep anybody out. Give a longer one, or 'auto'.")
    if auth is None and token is None and not is_loopback(host):
        raise SettingsError(
            f"--host {host} lets other machines in. Say who may come with --auth user:password or --token auto."
        )
    return Access(auth, secrets.token_urlsafe(16) if token == "auto" else token)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """An ASGI application around another one.

    Args:
        app: what it guards.
        access: who may come in.
        limits: how large a picture may be.
    """

    def __init__(self, app: App, access: Access, limits: Limits) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the open streams, as if their visitors had left: each open page has one."""
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = _Answer(send)
            await self._take(scope, self._until_closing(receive), answer.send)
            if self._closing.is_set():
                await answer.end()

    def _until_closing(self, receive: Receive) -> Receive:
        async def receiving() -> MutableMapping[str, Any]:
            received = asyncio.ensure_future(receive())
            closing = asyncio.ensure_future(self._closing.wait())
            try:
                await asyncio.wait([received, closing], return_when=asyncio.FIRST_COMPLETED)
                return await received if received.done() else {"type": "http.disconnect"}
            finally:
                received.cancel()
                closing.cancel()

        return receiving

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and token and _same(token, self._access.token):
            await _answer(send, 303, "", {"location": "./", "set-cookie": _set_cookie(token)})
        elif not self._access.admits(headers):
            if "authorization" in headers:
                await asyncio.sleep(WRONG_S)
            await _answer(send, 401, *self._invitation())
        elif trouble := self._trouble(scope, headers):
            await self._drain(headers, receive)
            await _answer(send, *trouble)
        elif scope["method"] == "POST":
            await self._take_body(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _take_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on with its body, which is counted: its headers may say less."""
        path = scope["path"]
        most = self._most_bytes(path)
        body = await _whole_body(receive, most)
        if body is None:
            await _answer(send, 400, "The request ended before all of it had come. Send it again.")
        elif len(body) > most:
            await _answer(send, 413, f"The request goes on after {most:,} bytes; no more are read. Send less.")
        elif path != "/pictures" and (fault := _fault(path, body)):
            await _answer(send, 400, fault)
        else:
            await self._app(scope, _repeating(body, receive), send)

    def _most_bytes(self, path: str) -> int:
        return self._limits.upload_bytes if path == "/pictures" else MOST_JSON

    def _invitation(self) -> tuple[str, dict[str, str]]:
        if self._access.user_and_password is None:
            return "This page needs its token. Open the address that the server printed, token and all.", {}
        return "This page needs a user and a password.", {"www-authenticate": 'Basic realm="stylize"'}

    def _trouble(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """What is wrong with a request: the status and a sentence."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._access.is_open and not is_loopback(_hostname(host)):
            # Another site's name can be made to mean this machine; without a password that would let it in.
            return 403, f"This page answers to localhost, not to {_hostname(host)!r}. To change that, use --auth."
        if "transfer-encoding" in headers:  # then the body is as long as it likes, whatever Content-Length says
            return 411, "The request comes in chunks. Send it whole, with a Content-Length."
        path, method = scope["path"], scope["method"]
        if method in ("GET", "HEAD"):
            return None if _listed(path, READ) else (404, "There is no such page.")
        if method != "POST" or not _listed(path, WRITE):
            return 404, "There is no such page."
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "Another site may not use this page."
        return self._too_large(path, headers)

    def _too_large(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        length, most = _length(headers), self._most_bytes(path)
        if length is None:
            return 411, "The request does not say how long it is. Send it with a Content-Length."
        if length <= most:
            return None
        if path == "/pictures":
            return 413, too_many_bytes(length, self._limits)
        return 413, f"The request has {length:,} bytes; at most {most:,} are read. Send less."

    async def _drain(self, headers: dict[str, str], receive: Receive) -> None:
        """Read what is refused, up to a bound: a browser that is still sending does not look at the answer."""
        left = MOST_DRAINED * self._limits.upload_bytes
        if (_length(headers) or 0) > left:
            return
        while left >= 0 and (message := await receive())["type"] == "http.request" and message.get("more_body"):
            left -= len(message.get("body", b""))


def _fault(path: str, body: bytes) -> str | None:
    """What is wrong with what a request says, in a sentence."""
    if names_a_file(body):
        return "Pictures are named by their keys, not by a path or an address."
    request = json.loads(body) if body and path in CALLS else None
    values = request.get("data") if isinstance(request, dict) else None
    if isinstance(values, list) and len(values) < CALLS[path]:
        return f'{path} takes {CALLS[path]} values in "data", not {len(values)}. Give them all.'
    return None


def names_a_file(body: bytes) -> bool:
    """Whether Gradio would take something in a request's JSON for a file, and copy or fetch what it names.

    What cannot be read as JSON is as bad.
    """
    try:
        return _has_file(json.loads(body)) if body else False
    except (ValueError, RecursionError):
        return True


def _has_file(value: Any) -> bool:
    if isinstance(value, dict):
        return bool({"path", "url", "meta"} & value.keys()) or any(map(_has_file, value.values()))
    return isinstance(value, list) and any(map(_has_file, value))


def too_many_bytes(count: int, limits: Limits) -> str:
    """What is said of a file that is too large."""
    has, most = count / MEGABYTE, limits.upload_bytes / MEGABYTE
    return f"The file has {has:.1f} MB; this page takes at most {most:g}. Make the picture smaller first."


def _length(headers: dict[str, str]) -> int | None:
    """How long a request says its body is, if it does."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 19 else None


def _listed(path: str, known: tuple[str, ...]) -> bool:
    if ".." in path or "//" in path or "\\" in path:
        return False
    return any(path == each or (len(each) > 1 and each.endswith("/") and path.startswith(each)) for each in known)


def _hostname(host: str) -> str:
    """Without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _same(given: str, wanted: str | None) -> bool:
    """Compared in a time that tells nothing of where they differ."""
    return wanted is not None and hmac.compare_digest(given.encode(), wanted.encode())


def _decoded(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode("utf-8")
    except ValueError:
        return ""


def _cookie(header: str) -> str:
    try:
        cookies = SimpleCookie(header)
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


def _set_cookie(token: str) -> str:
    return f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict"


async def _whole_body(receive: Receive, most: int) -> bytes | None:
    """A request's body; no more is read once it exceeds `most` bytes; None when its visitor left before its end."""
    parts: list[bytes] = []
    count, more = 0, True
    while more and count <= most:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        count += len(parts[-1])
        more = message.get("more_body", False)
    return b"".join(parts)


def _repeating(body: bytes, receive: Receive) -> Receive:
    """Says the body once more, and then what comes after it."""
    said = False

    async def receiving() -> MutableMapping[str, Any]:
        nonlocal said
        if said:
            return await receive()
        said = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving


class _Answer:
    """An answer on its way, with the guard's own headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open = False  # begun and not ended

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass a part of it on."""
        if message["type"] == "http.response.start":
            known = {name for name, _ in message.get("headers", [])}
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in known]
            message["headers"] = [*message.get("headers", []), *own]
        self._open = message["type"] == "http.response.start" or bool(message.get("more_body"))
        await self._send(message)

    async def end(self) -> None:
        """End it where it stands."""
        if self._open:
            await self.send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, status: int, text: str, headers: dict[str, str] | None = None) -> None:
    body = text.encode()
    more = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body))} | (headers or {})
    lines = [(name.encode(), value.encode()) for name, value in more.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
