"""The live page without a browser: its numbers follow replay, and its server answers nobody it should not."""

import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import serving
from strategies import Layer, Weight, make_graph
from test_whatif import write_job

from offbeat.cli import main
from offbeat.cli.report import opening_page
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.profile.measure import load_profile
from offbeat.profile.whatif import what_if
from offbeat.report.live import Session, State
from offbeat.report.server import ASSETS, HEADERS, HOST, Handler, LiveServer
from offbeat.strategy import builders
from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import name_ranks

LAYERS = 6


def small_session(workers: int = 4, bandwidth: str = "1Gbit/s", memory: str = "16GiB") -> Session:
    layers = [Layer((Weight(f"layers.{i}.weight", (256, 1024)),), flops=2 * 10**9) for i in range(LAYERS)]
    cluster = ClusterSpec.homogeneous(nodes=workers, bandwidth=bandwidth, memory=memory)
    return Session.of_model(make_graph(layers, name="chain"), cluster)


@pytest.fixture(scope="module")
def session() -> Session:
    return small_session()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("live") / "job")


@pytest.fixture(scope="module")
def live(session: Session) -> Iterator[LiveServer]:
    with serving(session) as running:
        yield running


def with_token(live: LiveServer, path: str) -> str:
    return f"{path}?token={live.token}"


def ask(live: LiveServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and content of one request, with the headers a browser sends unless others are given."""
    connection = http.client.HTTPConnection(HOST, live.server_port, timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def post(live: LiveServer, name: str, content: Any, **headers: str) -> tuple[int, Any]:
    given = {"Content_Type": "application/json", "X_Offbeat_Token": live.token} | headers
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    status, reply = ask(live, "POST", f"/api/{name}", body, **given)
    return status, json.loads(reply)


def raw(live: LiveServer, content: bytes, *, seconds: float = 20.0) -> bytes:
    """Whatever comes back for these bytes; nothing where the connection is cut."""
    with socket.create_connection((HOST, live.server_port), timeout=seconds) as connection:
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except TimeoutError:
            raise
        except OSError:
            return b""


def test_numbers_are_those_of_replay(recording: Path) -> None:
    profile, session = load_profile(recording), Session.of_recording(recording)
    cases = [
        ({}, ()),
        ({"bandwidth": 2.0, "latency": 0.5}, ("bandwidth=2x", "latency=0.5x")),
        ({"workers": 8, "wire": "fp16"}, ("workers=8", "wire=fp16")),
        ({"strategy": "wfbp", "compute": 2.0}, ("strategy=wfbp", "compute=2x")),
        ({"straggler": 2.0, "straggler_rank": 1}, ("straggler=1:2x",)),
    ]
    for fields, changes in cases:
        expected = session.scale * what_if(profile, changes)[0].iteration_time
        answer = session.replay(State.read(fields))
        assert answer["step_seconds"] == pytest.approx(expected, rel=1e-9), changes
        assert sum(answer["mean"].values()) == pytest.approx(expected, rel=1e-6)
        assert answer["speedup"] == pytest.approx(session.base_seconds / expected)
    assert session.measured_seconds == session.base_seconds
    assert session.scale == pytest.approx(1.0, rel=0.01)
    assert session.about()["title"] == "job"


def test_what_is_replayed_quickly_is_ranked_first(session: Session) -> None:
    about = session.about()
    order = about["quick_first"]
    assert sorted(order) == sorted(about["strategies"])
    assert order.index("overlap") < order.index("byteps")
    assert order[-1].endswith("ps")


def test_the_bound_is_never_beaten(session: Session) -> None:
    for strategy in ("recorded", *builders()):
        for bandwidth in (0.25, 1.0, 16.0):
            answer = session.replay(State(strategy=strategy, bandwidth=bandwidth))
            assert answer["bound"]["seconds"] <= answer["step_seconds"] * 1.001, strategy
            assert answer["step_seconds"] == pytest.approx(
                session.rank(State(strategy=strategy, bandwidth=bandwidth))["step_seconds"], rel=0.01
            )


def test_equal_ranks_share_a_row_and_a_straggler_has_its_own(session: Session) -> None:
    assert [row["label"] for row in session.replay(State())["ranks"]] == ["ranks 0–3"]
    answer = session.replay(State(straggler=2.0, straggler_rank=1))
    assert sorted(row["label"] for row in answer["ranks"]) == ["rank 1", "ranks 0, 2–3"]
    assert answer["straggler"] == 1
    assert name_ranks([9, 1, 3, 5, 7, 8]) == "ranks 1, 3, 5 and 3 more"


def test_memory_by_rank(session: Session) -> None:
    rows = session.memory(State())["rows"]
    assert [row["label"] for row in rows] == ["ranks 0–3"]
    assert rows[0]["bytes"]["weights"] == LAYERS * 256 * 1024 * 4
    assert rows[0]["total_bytes"] == sum(rows[0]["bytes"].values())
    served = session.memory(State(strategy="ps"))["rows"]
    assert len(served) > 1
    assert sum(row["total_bytes"] > rows[0]["bytes"]["weights"] for row in served) == len(served)


def test_a_search_is_never_worse_than_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.report.live.SEARCH_SECONDS", 1.0)
    session = small_session()
    with pytest.raises(OffbeatError, match="'optimised' is not known before a search"):
        session.replay(State(strategy="optimised"))
    found = session.search(State(bandwidth=0.5))
    assert found["for"] == "0.5x bandwidth"
    assert session.about()["found"] == found, "a page that is loaded again need not search again"
    best = session.rank(State(strategy="optimised", bandwidth=0.5))["step_seconds"]
    assert best == pytest.approx(found["step_seconds"], rel=1e-6)
    for builder in ("ddp", "overlap", "horovod"):
        assert best <= session.rank(State(strategy=builder, bandwidth=0.5))["step_seconds"] * 1.0001
    assert session.replay(State(strategy="optimised", workers=8))["step_seconds"] > 0


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"bandwidth": -1}, "bandwidth"),
        ({"bandwidth": 1e300}, "bandwidth"),
        ({"latency": 0}, "latency"),
        ({"compute": "fast"}, "compute"),
        ({"compute": True}, "compute"),
        ({"workers": 0}, "workers"),
        ({"workers": 10**9}, "workers"),
        ({"workers": 2.5}, "workers"),
        ({"straggler_rank": -1}, "straggler_rank"),
        ({"wire": "fp8"}, "wire"),
        ({"strategy": "x" * 1000}, "strategy"),
        ({"path": "/etc/passwd"}, "path: no such field"),
        ([], "must be a mapping"),
        (None, "must be a mapping"),
    ],
)
def test_a_state_outside_its_limits(fields: Any, part: str) -> None:
    with pytest.raises(OffbeatError, match=part) as refusal:
        State.read(fields)
    assert "\n" not in str(refusal.value)


def test_states_that_cannot_be_replayed(session: Session, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.replay(State(workers=4096, strategy="byteps"))["step_seconds"] > 0
    monkeypatch.setattr("offbeat.report.live.MOST_SERVER_PARTS", 20_000)
    for state, part in [
        (State(strategy="no_such"), "unknown strategy 'no_such'"),
        (State(strategy=str(recording / "rank0.jsonl")), "unknown strategy '"),
        (State(straggler=2.0, straggler_rank=9), "rank 9 is outside the job's ranks 0 to 3"),
        (State(workers=4096, strategy="partitioned_ps"), "take too long for this page"),
    ]:
        with pytest.raises(OffbeatError, match=part):
            session.replay(state)
    one_node = Session.of_model(make_graph([Layer((Weight("w", (64, 64)),))]), ClusterSpec.local(2))
    with pytest.raises(OffbeatError, match="bandwidth: all ranks are on one node"):
        one_node.replay(State(bandwidth=2.0))


def test_a_trace_without_a_plan(recording: Path, tmp_path: Path) -> None:
    load_profile(recording).timeline.save(tmp_path / "t.json")
    session = Session.of_recording(tmp_path / "t.json")
    assert session.replay(State(bandwidth=0.5))["step_seconds"] > session.base_seconds
    assert session.replay(State())["step_seconds"] == pytest.approx(Timeline.load(tmp_path / "t.json").iteration_time)
    assert session.memory(State())["rows"] == []
    about = session.about()
    assert about["strategies"] == ["recorded"]
    assert about["workers"] == [2]
    for state in (State(workers=8), State(strategy="ddp"), State(wire="fp16")):
        with pytest.raises(OffbeatError, match="the trace does not tell the job's plan"):
            session.replay(state)
    with pytest.raises(OffbeatError, match="search: the trace does not tell"):
        session.search(State())
    unknown = Session(load_profile(write_job(tmp_path / "other", job="fsdp2")), "other")
    assert unknown.replay(State(workers=4, strategy="ddp"))["step_seconds"] > 0
    with pytest.raises(OffbeatError, match="workers: the recording does not tell the job's plan"):
        unknown.replay(State(workers=4))


def test_a_long_trace_is_replayed_in_its_last_steps(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = load_profile(recording).timeline
    monkeypatch.setattr("offbeat.report.live.MOST_REPLAYED_SPANS", len(timeline) // 2)
    session = Session(timeline, "long")
    assert len(session.timeline) <= len(timeline) // 2
    assert any(re.match(r"of \d+ steps the last \d+ are replayed", note) for note in session.notes)
    assert session.base_seconds == pytest.approx(timeline.iteration_time, rel=0.01)


def test_the_page_and_its_assets(live: LiveServer) -> None:
    assert live.url == f"http://127.0.0.1:{live.server_port}/?token={live.token}"
    assert live.server_address[0] == "127.0.0.1"
    status, page = ask(live, "GET", with_token(live, "/"))
    assert status == 200
    used = set(re.findall(rb'(?:href|src)="([^"]+)"', page)) - {b"data:,", b"#results"}
    assert used == {with_token(live, path).encode() for path in ASSETS}
    for path in ASSETS:
        status, content = ask(live, "GET", with_token(live, path))
        assert status == 200
        assert live.token.encode() not in content
        assert not re.search(rb"https?://", content), f"{path} names another address"
    connection = http.client.HTTPConnection(HOST, live.server_port, timeout=30)
    connection.request("GET", with_token(live, "/"))
    headers = dict(connection.getresponse().getheaders())
    connection.close()
    assert HEADERS.items() <= headers.items()
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_asking_for_numbers(live: LiveServer, session: Session) -> None:
    assert post(live, "about", {})[1] == json.loads(json.dumps(session.about()))
    status, answer = post(live, "replay", {"bandwidth": 2.0})
    assert status == 200
    assert answer["step_seconds"] == session.replay(State(bandwidth=2.0))["step_seconds"]
    assert post(live, "memory", {})[1] == session.memory(State())
    assert post(live, "rank", {"strategy": "ddp"})[1]["step_seconds"] > 0
    assert "unknown strategy 'no_such'" in post(live, "replay", {"strategy": "no_such"})[1]["refused"]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/../server.py",
        "/%2e%2e/x",
        "/live.html",
        "/report.js",
        "//style.css/",
        "/api/replay",
        "*",
        "/\x7f",
    ],
)
def test_unknown_paths(live: LiveServer, path: str) -> None:
    for known, status in ((with_token(live, path), b"404"), (path, b"403")):
        request = f"GET {known} HTTP/1.1\r\nHost: localhost:{live.server_port}\r\n\r\n"
        assert raw(live, request.encode("latin-1")).split()[1] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:{port}"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": "localhost:{port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "none"}, 200),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_foreign_pages_get_nothing(live: LiveServer, headers: dict[str, str], status: int) -> None:
    given = {name: value.format(port=live.server_port) for name, value in headers.items()}
    got, content = ask(live, "GET", with_token(live, "/"), **given)
    assert got == status
    assert (live.token.encode() in content) == (status == 200)
    assert post(live, "memory", {}, **given)[0] == status


def test_other_users_see_nothing(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """Without the token in the address there is neither the page nor anything it is made of."""
    caplog.set_level("DEBUG")
    known = [*ASSETS, "/", "/no_such", "/api/replay"]
    wrong = [
        "",
        "?token=",
        "?token=wrong",
        f"?token={live.token[:-1]}",
        f"?token={live.token}x",
        f"?{live.token}",
        "?a=b",
    ]
    for path in known:
        for query in wrong:
            status, content = ask(live, "GET", path + query)
            assert status == 403, path + query
            assert json.loads(content)["error"].startswith("token: ")
            assert live.token.encode() not in content
        assert ask(live, "GET", path, X_Offbeat_Token=live.token)[0] == 403
        status, content = ask(live, "GET", path, Host="evil.example")
        assert (status, live.token.encode() in content) == (421, False)
    assert live.token not in caplog.text
    with LiveServer(live.session) as another:
        assert another.token != live.token


def test_the_address_reaches_nobody_else(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Referer carries it, and a browser that is started to show the page does not have it among its arguments."""
    assert HEADERS["Referrer-Policy"] == "no-referrer"
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    with opening_page(live.url):
        file = Path(opened[0].removeprefix("file://"))
        assert live.token not in opened[0]
        assert f"url={live.url}" in file.read_text()
        assert file.stat().st_mode & 0o077 == 0
    assert not file.exists()
    # What the file leads to is a window of its own, of another site.
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert ask(live, "GET", with_token(live, "/"), **followed)[0] == 200
    assert ask(live, "GET", "/", **followed)[0] == 403
    assert ask(live, "GET", with_token(live, "/"), **followed | {"Sec_Fetch_Dest": "iframe"})[0] == 403
    assert post(live, "about", {}, **followed)[0] == 403


def test_numbers_need_the_token_and_json(live: LiveServer) -> None:
    assert post(live, "replay", {}, X_Offbeat_Token="")[0] == 403
    assert post(live, "replay", {}, X_Offbeat_Token="wrong")[0] == 403
    assert post(live, "replay", {}, Content_Type="text/plain")[0] == 415
    assert post(live, "nothing", {})[0] == 404
    assert ask(live, "PUT", "/api/replay", b"{}")[0] == 501
    assert ask(live, "DELETE", "/")[0] == 501


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 4000, "not valid JSON"),
        (b'{"bandwidth": NaN}', "NaN"),
        (b'{"bandwidth": Infinity}', "Infinity"),
        (b'{"bandwidth": 1e999}', "1e999"),
        (b'{"bandwidth": -2}', "bandwidth"),
        (b'{"workers": 1000000000000000000000000}', "workers"),
        (b" " * 5000, "at most 4096"),
    ],
)
def test_bad_bodies(live: LiveServer, body: bytes, part: str) -> None:
    status, answer = post(live, "replay", body)
    assert status == 422
    assert part in answer["error"]
    assert "\n" not in answer["error"]


def test_lengths_that_lie(live: LiveServer) -> None:
    head = (
        f"POST /api/replay HTTP/1.1\r\nHost: {HOST}:{live.server_port}\r\nContent-Type: application/json\r\n"
        f"X-Offbeat-Token: {live.token}\r\n"
    )
    for more, body in [
        ("", "{}"),
        ("Content-Length: -1\r\n", "{}"),
        ("Content-Length: 99999999999999999999\r\n", "{}"),
        ("Content-Length: 2\r\nContent-Length: 2\r\n", "{}"),
        ("Transfer-Encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
    ]:
        assert b"Content-Length" in raw(live, f"{head}{more}\r\n{body}".encode()).partition(b"\r\n\r\n")[2]
    assert raw(live, f"{head}Content-Length: 9\r\n\r\n{{}}".encode()) == b""


def test_requests_that_are_too_long(live: LiveServer) -> None:
    head = f"GET / HTTP/1.1\r\nHost: {HOST}:{live.server_port}\r\n".encode()
    for request in (
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        head + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        head + b"X: 1\r\n" * 200 + b"\r\n",
        head + b"X: 1\r\n" * 50_000,
    ):
        assert raw(live, request)[:12] in (b"", b"HTTP/1.0 431", b"HTTP/1.0 414")
    assert ask(live, "GET", with_token(live, "/"))[0] == 200


def test_slow_and_silent_clients_hold_up_nobody(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.6)
    with serving(session) as live:
        silent = [socket.create_connection((HOST, live.server_port), timeout=20) for _ in range(100)]
        silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: ")
        try:
            begun = time.monotonic()
            assert ask(live, "GET", with_token(live, "/"))[0] == 200
            assert time.monotonic() - begun < 5
            # They are told by the end of the connection.
            assert silent[0].recv(1) == b""
            assert silent[-1].recv(1) == b""
        finally:
            for connection in silent:
                connection.close()


def test_a_client_that_leaves_ends_its_replay(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), []

    def endless(state: State) -> None:
        begun.set()
        try:
            for _ in range(6000):
                time.sleep(0.01)
            ended.append("done")
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    monkeypatch.setattr(session, "replay", endless)
    with serving(session) as live:
        body = b"{}"
        head = f"POST /api/replay HTTP/1.1\r\nHost: {HOST}:{live.server_port}\r\nX-Offbeat-Token: {live.token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((HOST, live.server_port), timeout=20) as first:
            first.sendall(head.encode() + body)
            assert begun.wait(10)
            # One that waits for its turn and leaves never has it.
            with socket.create_connection((HOST, live.server_port), timeout=20) as second:
                second.sendall(head.encode() + body)
            time.sleep(0.3)
            begun.clear()
        deadline = time.monotonic() + 10
        while not ended:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ended == ["Abandoned"]
        assert not begun.wait(0.3)
        assert post(live, "about", {})[0] == 200


def random_request(draw: random.Random, port: int, token: str) -> bytes:
    """Something like a request, with anything in it."""
    junk = lambda most: bytes(draw.randrange(256) for _ in range(draw.randrange(most)))  # noqa: E731
    method = draw.choice([b"GET", b"POST", b"HEAD", b"OPTIONS", b"", b"G\x00T", b"__init__", junk(9)])
    path = draw.choice(
        [
            b"/",
            b"/?token=" + token.encode(),
            b"/api/replay",
            b"/api/about",
            b"/../../x",
            b"http://evil/",
            b"//",
            b"/live.js?a=b#c",
            junk(60),
        ]
    )
    version = draw.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"HTTP/x", b"HTTP/1.1.1", b"", junk(9)])
    lines = [b" ".join((method, path, version))]
    known = [
        f"Host: {draw.choice([HOST, 'localhost', 'evil', ''])}:{draw.choice([port, 1, ''])}".encode(),
        f"X-Offbeat-Token: {draw.choice([token, '', 'ä'])}".encode("latin-1"),
        b"Content-Type: " + draw.choice([b"application/json", b"text/html", b";;;", junk(20)]),
        b"Content-Length: " + draw.choice([b"0", b"2", b"17", b"-1", b"1e3", b"99999999", junk(5)]),
        b"Origin: " + junk(20),
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Connection: keep-alive",
        junk(30) + b":" + junk(30),
        b" folded " + junk(10),
    ]
    lines += draw.sample(known, draw.randrange(len(known)))
    body = draw.choice([b"", b"{}", b'{"workers": 2}', b'{"bandwidth": NaN}', b"[[[[", junk(200)])
    request = draw.choice([b"\r\n", b"\n"]).join(lines) + draw.choice([b"\r\n\r\n", b"\n\n", b"\r\n", b""]) + body
    return request[: draw.randrange(len(request) + 1)] if draw.random() < 0.2 else request


def test_nothing_that_clients_send_harms_the_server(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    draw, until, count = random.Random(7), time.monotonic() + 60, 0
    while count < 3000 and time.monotonic() < until:
        reply = raw(live, random_request(draw, live.server_port, live.token))
        assert not reply or re.match(rb"HTTP/1\.0 (200|400|403|404|414|415|421|422|431|501|505) ", reply), reply[:100]
        count += 1
    assert count == 3000, "the server has become slow"
    assert post(live, "replay", {})[0] == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_fails_inside_is_told_without_details(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(state: State) -> dict[str, Any]:
        raise KeyError("secret detail")

    monkeypatch.setattr(session, "replay", broken)
    with serving(session) as live:
        status, answer = post(live, "replay", {})
        assert status == 500
        assert "secret" not in answer["error"]
        assert post(live, "memory", {})[0] == 200
    assert "secret detail" in caplog.text


def test_a_port_that_is_taken(session: Session) -> None:
    with LiveServer(session) as first, pytest.raises(OffbeatError) as refusal:
        LiveServer(session, first.server_port)
    assert f"--port: {first.server_port} is taken by another program" in str(refusal.value)
    assert "0 for any that is free" in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("view",), "give either a trace or --model"),
        (("view", "job", "--model", "mlp"), "not both"),
        (("view", "job", "--cluster", "B7"), "--cluster: needs --model"),
        (("view", "--model", "mlp"), "--cluster: required"),
        (("view", "--model", "no_such", "--cluster", "B7"), "no_such"),
        (("view", "missing"), "missing: no such trace"),
        (("view", "job", "--port", "70000"), "--port"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...], part: str, recording: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(recording.parent)
    assert main(arguments) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_serves_until_it_is_interrupted(recording: Path) -> None:
    code = "import sys; from offbeat.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "view", str(recording), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            connection = http.client.HTTPConnection(HOST, started["port"], timeout=30)
            address, _, query = started["url"].partition("?")
            connection.request("GET", f"/?{query}")
            assert connection.getresponse().status == 200
            connection.close()
            assert address == f"http://127.0.0.1:{started['port']}/"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert process.stderr.read() == "offbeat: stopped\n"
        finally:
            if process.poll() is None:
                process.kill()
