"""Serve a Session's live page on 127.0.0.1: the page, its styles and scripts, and replays in JSON.

The page is for the user who started the server. Other users of the machine can reach the port, so the address holds a
random token, and a request without it is refused: the page and its assets carry it in their query, requests for numbers
in a header. Other pages in the user's browser are kept out as well: the Host header must name this address (or a
foreign name that resolves to it could read the page), and the Origin must be the page's own. Nothing of a request
reaches the file system. Each client has a thread of its own, so that slow and silent ones hold up no other.

A page that cancels a replay, or is closed, closes its connection, and the call ends. Replays are plain Python around
short compiled kernels, so the thread that replays is interrupted between two of its instructions; a kernel ends first.
"""

import ctypes
import errno
import json
import logging
import secrets
import select
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock
from typing import Any, TypeVar

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.report.live import Session, State
from offbeat.report.page import asset

HOST = "127.0.0.1"
MOST_BODY_BYTES = 4 * 2**10
MOST_UNREAD_BYTES = 256 * 2**10
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ASSETS = dict.fromkeys(("/style.css", "/live.css"), "text/css")
ASSETS |= dict.fromkeys(("/charts.js", "/timeline.js", "/live.js"), "text/javascript")
CALLS = ("about", "replay", "memory", "rank", "search", "strategy")
_TOKEN_PLACE = "@TOKEN@"
_CHECKED = ("Host", "Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode", "Sec-Fetch-Dest")
_CANNOT_LISTEN = {
    errno.EADDRINUSE: "is taken by another program; name another, or 0 for any that is free",
    errno.EACCES: "needs rights that you do not have; name one above 1023, or 0 for any that is free",
}
WATCH_SECONDS = 0.05
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class LiveServer(ThreadingHTTPServer):
    """Serves one session until it is shut down."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, session: Session, port: int = 0) -> None:
        """`port` 0 takes a free one."""
        self.session = session
        self.token = secrets.token_urlsafe(24)
        """Known to the user who started the server alone; it is in `url`, and in no reply but the page."""
        # One call of each kind at a time; a search, which takes seconds, holds up no replay.
        self.calls: dict[str, tuple[Callable[[State], Any], Lock]] = {
            f"/api/{name}": (getattr(session, name), Lock()) for name in CALLS
        }
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            known = _CANNOT_LISTEN.get(getattr(error, "errno", 0))
            raise OffbeatError(f"--port: {port} {known or f'is refused: {error}'}") from None
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        """The page's address, for the user alone."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def server_bind(self) -> None:
        # HTTPServer's own looks up the machine's full name, which takes seconds where no name server answers.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients may leave at any time.
        _log.debug("the live page lost a client", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it."""

    server: LiveServer
    server_version, sys_version = "offbeat", ""
    timeout = 10.0
    """Seconds for which a client may be silent before it loses its connection."""

    def finish(self) -> None:
        """Reads what a refused client has sent: closing with unread bytes resets the connection and loses the reply."""
        super().finish()
        self.connection.setblocking(False)
        with suppress(OSError):
            self.connection.recv(MOST_UNREAD_BYTES)

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        path, _, query = self.path.partition("?")
        name, _, given = query.partition("=")
        if name != "token" or not self._is_token(given):
            self._refuse(HTTPStatus.FORBIDDEN, "token: open the whole address that offbeat view has printed")
        elif path == "/":
            page = asset("live.html").replace(_TOKEN_PLACE, self.server.token)
            self._reply(HTTPStatus.OK, "text/html", page.encode())
        elif path in ASSETS:
            self._reply(HTTPStatus.OK, ASSETS[path], asset(path[1:]).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        if not self._is_token(self.headers.get("X-Offbeat-Token", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "token: it is not this page's; load the page again")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type: it must be application/json")
        elif self.path not in self.server.calls:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer()

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode())

    def _is_ours(self) -> bool:
        """Whether the request names this address and comes from this page or from no page."""
        given = {name: [value.strip().lower() for value in self.headers.get_all(name, [])] for name in _CHECKED}
        origins = {f"http://{host}" for host in self.server.hosts}
        # Anyone who knows the token may link to the page, which the browser then opens in a window of its own.
        opened = given["Sec-Fetch-Mode"] == ["navigate"] and given["Sec-Fetch-Dest"] == ["document"]
        opened = opened and self.command == "GET"
        if len(given["Host"]) != 1 or given["Host"][0] not in self.server.hosts:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"Host: this page is at {HOST}:{self.server.server_port}")
        elif any(origin not in origins for origin in given["Origin"]):
            self._refuse(HTTPStatus.FORBIDDEN, "Origin: another site's requests are not answered")
        elif not ({"same-origin", "none"}.issuperset(given["Sec-Fetch-Site"]) or opened):
            self._refuse(HTTPStatus.FORBIDDEN, "Sec-Fetch-Site: another site's requests are not answered")
        else:
            return True
        return False

    def _answer(self) -> None:
        """Replies with the session's answer; a state that it refuses is an answer, not a failed request."""
        try:
            state = State.read(self._body())
        except OffbeatError as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        call, lock = self.server.calls[self.path]
        try:
            with waiting_turn(lock, self.connection):
                content = json.dumps(while_connected(self.connection, lambda: call(state)), allow_nan=False)
        except Abandoned:
            return
        except OffbeatError as error:
            content = json.dumps({"refused": str(error)})
        except Exception:
            _log.exception("the live page could not answer %s", self.path)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "this could not be replayed; see the terminal")
            return
        self._reply(HTTPStatus.OK, "application/json", content.encode())

    def _body(self) -> Any:
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            raise OffbeatError("Content-Length: must be given once")
        length = lengths[0].strip()
        if not (length.isascii() and length.isdecimal() and int(length[:9]) <= MOST_BODY_BYTES):
            raise OffbeatError(f"Content-Length: must be a number of at most {MOST_BODY_BYTES}")
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            raise ConnectionError("the client disconnected before the end of its request")
        return files.parse_json(content, "request", "state")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        # Nothing of what the client sent is sent back.
        status = HTTPStatus(code)
        self._refuse(status, status.phrase)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._reply(status, "application/json", json.dumps({"error": why}).encode())

    def _reply(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        # A client that asks in HTTP/0.9 gets a reply with headers all the same.
        self.request_version = self.protocol_version
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Abandoned(BaseException):
    """The client has left: no `except Exception` on the way may keep the call going."""


def client_has_left(connection: socket.socket, wait_seconds: float = 0.0) -> bool:
    """Whether the other end has closed the connection, told after at most `wait_seconds`."""
    try:
        readable, _, _ = select.select([connection], [], [], wait_seconds)
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


@contextmanager
def waiting_turn(lock: threading.Lock, connection: socket.socket) -> Generator[None, None, None]:
    """Holds the lock for the block; Abandoned if the client leaves before it is free."""
    while not lock.acquire(timeout=WATCH_SECONDS):
        if client_has_left(connection):
            raise Abandoned
    try:
        yield
    finally:
        lock.release()


def while_connected(connection: socket.socket, call: Callable[[], _Result]) -> _Result:
    """The result of `call`; raises Abandoned inside it when the client leaves."""
    thread, ended, ending = threading.get_ident(), threading.Event(), threading.Lock()

    def watch() -> None:
        while not ended.is_set():
            if client_has_left(connection, WATCH_SECONDS):
                with ending:
                    if not ended.is_set():
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Abandoned))
                return
            # A client that has sent more than its request makes the connection readable for good.
            ended.wait(WATCH_SECONDS)

    threading.Thread(target=watch, name="offbeat-client", daemon=True).start()
    try:
        return call()
    finally:
        with ending:
            ended.set()
