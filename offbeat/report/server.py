"""A Session → its live page on 127.0.0.1: a page, its styles and scripts, and replays in JSON.

Only this machine's browser is meant to come here, and other pages in that browser must not: the Host header must name
this address (or a foreign name that resolves to it could read the page), the Origin must be the page's own, and every
request for numbers carries the token that the page was given. Nothing of a request reaches the file system. Clients
that are slow, silent or talk nonsense lose their connection and hold up nobody.
"""

import errno
import io
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, TypeVar

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.report.live import Session, State
from offbeat.report.page import asset

HOST = "127.0.0.1"
MOST_REQUEST_BYTES = 32 * 2**10
"""Of a request with its headers and its body."""
MOST_BODY_BYTES = 4 * 2**10
MOST_CONNECTIONS = 64
REQUEST_SECONDS = 10.0
"""In which a client must have sent its whole request, and taken the whole reply."""
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
ASSETS = {
    "/style.css": "text/css",
    "/live.css": "text/css",
    "/charts.js": "text/javascript",
    "/timeline.js": "text/javascript",
    "/live.js": "text/javascript",
}
ABOUT = "/api/about"
_TOKEN_PLACE = "@TOKEN@"
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Superseded(Exception):
    """A newer call has taken the place of one that waited."""


class Lane:
    """Runs one call at a time; of those that wait only the newest gets its turn, the others are superseded."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._newest = 0

    def run(self, call: Callable[[], Result]) -> Result:
        with self._changed:
            self._newest += 1
            mine = self._newest
            self._changed.notify_all()
            self._changed.wait_for(lambda: mine != self._newest or not self._busy)
            if mine != self._newest:
                raise Superseded
            self._busy = True
        try:
            return call()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class LiveServer(ThreadingHTTPServer):
    """Serves one session until it is shut down."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, session: Session, port: int = 0) -> None:
        """`port` 0 takes a free one."""
        self.session = session
        self.token = secrets.token_urlsafe(24)
        # Replays come first; what they are drawn with afterwards may wait, and a search takes seconds.
        calls: dict[str, tuple[Callable[[State], Any], Lane]] = {
            "replay": (session.replay, Lane()),
            "memory": (session.memory, Lane()),
            "rank": (session.rank, Lane()),
            "search": (session.search, Lane()),
        }
        self.calls = {f"/api/{name}": call for name, call in calls.items()}
        self._reading: dict[socket.socket, float] = {}
        """Connections whose request has not come in whole, with the moment by which it must."""
        self._open = 0
        self._lock = threading.Lock()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise OffbeatError(_cannot_listen(port, error)) from None
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def server_bind(self) -> None:
        # HTTPServer's own looks up the machine's full name, which takes seconds where no name server answers.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            crowded = self._open >= MOST_CONNECTIONS
            oldest = min(self._reading, key=self._reading.__getitem__, default=None) if crowded else None
            self._open += 1
            self._reading[request] = time.monotonic() + REQUEST_SECONDS
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def request_read(self, request: Any) -> None:
        """The request has come in whole; it may now take as long as it takes."""
        with self._lock:
            self._reading.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open -= 1
            self._reading.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._reading.items() if until < now]
        for request in late:
            _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that left in mid-sentence is no news.
        _log.debug("the live page lost a client", exc_info=True)


@contextmanager
def serving(session: Session, port: int = 0) -> Generator[LiveServer, None, None]:
    """The page in the background, for as long as the block runs."""
    with LiveServer(session, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(REQUEST_SECONDS)


class Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it."""

    server: LiveServer
    server_version, sys_version = "offbeat", ""
    timeout = REQUEST_SECONDS
    request_version, requestline, command, close_connection = "HTTP/1.0", "", "", True

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Limited(self.connection, MOST_REQUEST_BYTES))

    def handle(self) -> None:
        try:
            self.handle_one_request()
        except _TooLongError:
            self._reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "text/plain", b"the request is too long\n")
        except (OSError, ValueError):
            # The client is gone, or its headers cannot be decoded.
            return
        finally:
            _drain(self.connection)

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        self.server.request_read(self.request)
        path = self.path.partition("?")[0]
        if path == "/":
            page = asset("live.html").replace(_TOKEN_PLACE, self.server.token)
            self._reply(HTTPStatus.OK, "text/html", page.encode())
        elif path in ASSETS:
            self._reply(HTTPStatus.OK, ASSETS[path], asset(path[1:]).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        token = self.headers.get("X-Offbeat-Token", "")
        if not secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "token: it is not this page's; load the page again")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type: it must be application/json")
        elif self.path != ABOUT and self.path not in self.server.calls:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer()

    def _is_ours(self) -> bool:
        """Whether the request was meant for this address and comes from this page or from nobody's."""
        given = {name: [value.strip().lower() for value in self.headers.get_all(name, [])] for name in _CHECKED}
        origins = {f"http://{host}" for host in self.server.hosts}
        if len(given["Host"]) != 1 or given["Host"][0] not in self.server.hosts:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"Host: this page is at {self.server.url}")
        elif any(origin not in origins for origin in given["Origin"]):
            self._refuse(HTTPStatus.FORBIDDEN, "Origin: another site's requests are not answered")
        elif any(site not in ("same-origin", "none") for site in given["Sec-Fetch-Site"]):
            self._refuse(HTTPStatus.FORBIDDEN, f"this page is opened by its address, {self.server.url}, not by a link")
        else:
            return True
        return False

    def _answer(self) -> None:
        """Replies with what the session says; a state that it refuses is an answer, not a failed request."""
        try:
            raw = self._body()
            state = State.read(raw)
        except OffbeatError as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        try:
            content = json.dumps(self._asked(state), allow_nan=False).encode()
        except Exception:
            _log.exception("the live page could not answer %s", self.path)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "this could not be replayed; the terminal tells why")
        else:
            self._reply(HTTPStatus.OK, "application/json", content)

    def _asked(self, state: State) -> dict[str, Any]:
        if self.path == ABOUT:
            return self.server.session.about()
        call, lane = self.server.calls[self.path]
        try:
            return lane.run(lambda: call(state))
        except Superseded:
            return {"superseded": True}
        except OffbeatError as error:
            return {"refused": str(error)}

    def _body(self) -> Any:
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            raise OffbeatError("Content-Length: it must be given once")
        length = lengths[0].strip()
        if not (length.isascii() and length.isdecimal() and int(length[:9]) <= MOST_BODY_BYTES):
            raise OffbeatError(f"Content-Length: it must be a number of at most {MOST_BODY_BYTES}")
        content = self.rfile.read(int(length))
        self.server.request_read(self.request)
        if len(content) < int(length):
            raise ConnectionError("the client left before the end of its request")
        return files.parse_json(content, "request", "state")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        # Nothing of what the client sent is sent back.
        status = HTTPStatus(code)
        self._refuse(status, status.phrase)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._reply(status, "application/json", json.dumps({"error": why}).encode())

    def _reply(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.server.request_read(self.request)
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


class _TooLongError(Exception):
    """A request has more bytes than any of this page's has."""


class _Limited(io.RawIOBase):
    """A socket that can be read so many bytes."""

    def __init__(self, connection: socket.socket, most_bytes: int) -> None:
        self._connection = connection
        self._left = most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise _TooLongError
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


_CHECKED = ("Host", "Origin", "Sec-Fetch-Site")


def _drain(connection: socket.socket) -> None:
    """Takes what a refused client has sent: a socket closed with bytes unread resets, and the client misses why."""
    try:
        connection.settimeout(0.0)
        for _ in range(8):
            if not connection.recv(MOST_REQUEST_BYTES):
                break
    except OSError:
        return
    finally:
        connection.settimeout(REQUEST_SECONDS)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It was closed in the meantime.
        return


def _cannot_listen(port: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"--port: {port} is taken by another program; name another, or 0 for any that is free"
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return f"--port: {port} needs rights that you do not have; name one above 1023, or 0 for any that is free"
    return f"--port: cannot listen on {port}: {error}"
