"""The emulated cluster: its links have the bandwidth asked for, and it leaves nothing behind."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from emulated_ranks import (
    MEBIBYTE,
    addresses,
    all_reduce_seconds,
    environment,
    not_json,
    record_on_nodes,
    refused_after,
    stream_for,
    transfer_rate,
)

from offbeat.cli.hosts import run_shown
from offbeat.emulate import Emulation, RankError
from offbeat.errors import EmulationError, OffbeatError
from offbeat.profile.measure import load_profile

pytestmark = pytest.mark.timeout(120)

ATTEMPTS = 5
ROOT = str(Path(__file__).parents[2])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes rights away from root")


@pytest.mark.timing
def test_all_reduce_of_16_mib_fills_the_links_of_four_hosts(emulated_cluster):
    cluster = emulated_cluster(4, "1Gbit/s")
    size = 16 * MEBIBYTE
    ideal = 2 * 3 / 4 * size / 125e6
    medians = []
    for attempt in range(1, ATTEMPTS + 1):
        seconds = cluster.run_function(all_reduce_seconds, size, 10, timeout=40)
        slowest = [max(step) for step in zip(*seconds, strict=True)]
        assert ideal / min(slowest) <= 1.02, "faster than the links allow"
        for counts in cluster.traffic():
            assert counts == pytest.approx([attempt * 12 * 1.5 * size] * 2, rel=0.05)
        medians.append(ideal / statistics.median(slowest))
        if medians[-1] >= 0.9:
            return
    pytest.fail(f"the medians of {ATTEMPTS} runs reach {medians} of the link")


@pytest.mark.timing
def test_each_host_has_its_own_bandwidth_in_both_directions(emulated_cluster):
    cluster = emulated_cluster(["1Gbit/s", "100Mbit/s", "400Mbit/s"])
    assert [host.bandwidth_bytes_per_second for host in cluster.hosts] == [125e6, 12.5e6, 50e6]
    for sender, receiver, expected in ((1, 0, 12.5e6), (0, 1, 12.5e6), (2, 0, 50e6), (0, 2, 50e6), (2, 1, 12.5e6)):
        _assert_rate(cluster, sender, receiver, expected)


@pytest.mark.timing
def test_bandwidth_changes_while_ranks_run(emulated_cluster):
    cluster = emulated_cluster(2, "400Mbit/s")
    job = threading.Thread(target=cluster.run_function, args=(stream_for, 4.0), kwargs={"timeout": 20})
    job.start()
    _until(lambda: cluster.traffic()[0][1] > MEBIBYTE, "no traffic")
    before = [_received_rate(cluster, 0, 0.4) for _ in range(ATTEMPTS)]
    cluster.set_bandwidth(0, "80Mbit/s")
    time.sleep(0.2)
    after = [_received_rate(cluster, 0, 0.4) for _ in range(ATTEMPTS)]
    job.join()
    assert statistics.median(before) == pytest.approx(50e6, rel=0.2)
    assert statistics.median(after) == pytest.approx(10e6, rel=0.2)
    assert cluster.hosts[0].bandwidth_bytes_per_second == 10e6


@pytest.mark.timing
def test_unlimited_links_are_not_shaped(emulated_cluster):
    cluster = emulated_cluster([None, "80Mbit/s"])
    cluster.set_bandwidth(1, None)
    assert [host.bandwidth_bytes_per_second for host in cluster.hosts] == [None, None]
    assert max(cluster.run_function(transfer_rate, 0, 1, 64 * MEBIBYTE, timeout=20)) > 60e6


@pytest.mark.timing
def test_two_emulations_side_by_side_do_not_meet(emulated_cluster):
    first, second = emulated_cluster(2, "200Mbit/s"), emulated_cluster(2, "16Mbit/s")
    assert {host.address for host in first.hosts} == {host.address for host in second.hosts}
    with ThreadPoolExecutor(2) as pool:
        fast = pool.submit(_rates, first, 8 * MEBIBYTE)
        slow = pool.submit(_rates, second, MEBIBYTE)
    assert 2 * max(slow.result()) < max(fast.result()) < 1.15 * 25e6
    assert max(slow.result()) < 1.15 * 2e6


def test_ranks_get_the_environment_of_torchrun(emulated_cluster):
    cluster = emulated_cluster(2, ranks_per_host=2)
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    assert cluster.world_size == 4
    assert cluster.run_function(environment, names, timeout=20) == [
        ["0", "0", "0", "0", "4", "2"],
        ["1", "1", "0", "0", "4", "2"],
        ["2", "0", "1", "1", "4", "2"],
        ["3", "1", "1", "1", "4", "2"],
    ]
    fixed = cluster.run_function(environment, ["MASTER_ADDR", "GLOO_SOCKET_IFNAME"], timeout=20)
    assert fixed == [[cluster.hosts[0].address, "eth0"]] * 4


def test_hosts_know_each_other_by_name(emulated_cluster):
    cluster = emulated_cluster(2)
    known = [host.address for host in cluster.hosts]
    assert cluster.run_function(addresses, timeout=20) == [
        ["host0", *known, "127.0.0.1"],
        ["host1", *known, "127.0.0.1"],
    ]


def test_failed_rank_stops_the_others_and_is_named(emulated_cluster):
    cluster = emulated_cluster(3)
    program = ["-c", "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('out of luck'); time.sleep(60)"]
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 on host1 exited with code 1: out of luck") as caught:
        cluster.run(program, timeout=30)
    assert time.monotonic() - began < 10
    assert [result.outcome for result in caught.value.results] == ["stopped", "exited", "stopped"]
    assert [r.returncode for r in cluster.run(program, timeout=30, check=False)] == [-15, 1, -15]


@pytest.mark.timing
def test_time_limit_stops_ranks_that_ignore_being_asked(emulated_cluster):
    cluster = emulated_cluster(2)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    with pytest.raises(RankError, match="ranks still running after 1 s: 0, 1") as caught:
        cluster.run(["-c", stubborn], timeout=1)
    assert [result.returncode for result in caught.value.results] == [-9, -9]
    assert caught.value.results[0].stdout == "up\n"


def test_what_cannot_run_is_one_sentence(emulated_cluster):
    cluster = emulated_cluster(1)
    with pytest.raises(EmulationError, match="rank 0: cannot start '/no/such/program': No such file"):
        cluster.run(["/no/such/program"], timeout=5)
    with pytest.raises(EmulationError, match="host 7 is outside"):
        cluster.set_bandwidth(7, "1Gbit/s")
    with pytest.raises(RankError, match="not JSON serializable"):
        cluster.run_function(not_json, timeout=20)
    with pytest.raises(EmulationError, match="is not a function at the top"):
        cluster.run_function(lambda: 1, timeout=5)
    cluster.close()
    with pytest.raises(EmulationError, match="not running"):
        cluster.run(["true"], timeout=5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "hosts: 0"),
        (([],), {}, r"hosts: \[\]"),
        ((2, "fast"), {}, "bandwidth: 'fast'"),
        ((2, "1kbit/s"), {}, "bandwidth: '1kbit/s' is outside"),
        ((2, "100Gbit/s"), {}, "bandwidth: '100Gbit/s' is outside"),
        ((2,), {"latency": "soon"}, "latency: 'soon'"),
        ((2,), {"ranks_per_host": 0}, "ranks_per_host: 0"),
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises(OffbeatError, match=message):
        Emulation(*arguments, **options)


@pytest.mark.timing
def test_latency_is_refused_where_the_kernel_cannot_delay(emulated_cluster):
    emulated_cluster(1)
    try:
        with Emulation(2, latency="50ms") as cluster:
            [seconds, _] = cluster.run_function(refused_after, "host1", timeout=20)
    except EmulationError as error:
        refusal = str(error)
        seconds = None
    if seconds is None:
        assert refusal.startswith("latency: 0.05 s cannot be emulated here (namespaces: this kernel lacks the netem")
    else:
        assert seconds >= 0.1, "there and back takes twice the latency"


def test_cluster_outlives_the_thread_that_made_it(emulated_cluster):
    made: list[Emulation] = []
    maker = threading.Thread(target=lambda: made.append(emulated_cluster(1)))
    maker.start()
    maker.join()
    started = []
    starter = threading.Thread(target=lambda: started.append(made[0].popen(0, ["sleep", "60"])))
    starter.start()
    starter.join()
    time.sleep(0.3)
    assert started[0].poll() is None
    assert made[0].run(["true"], timeout=10)[0].returncode == 0
    started[0].kill()
    assert started[0].wait(5) == -9


@pytest.mark.timing
def test_a_recording_tells_links_within_hosts_from_those_between(emulated_cluster, tmp_path):
    emulated_cluster(2, "200Mbit/s", ranks_per_host=2).run_function(record_on_nodes, str(tmp_path), timeout=60)
    profile = load_profile(tmp_path)
    assert [node.devices for node in profile.cluster.nodes] == [2, 2]
    assert profile.costs.collectives.keys() == {("all_reduce", 2), ("all_reduce", 4)}
    assert profile.costs.within.keys() == {("all_reduce", 2)}
    node = profile.cluster.nodes[0]
    assert node.bandwidth < 50e6 < 2 * node.intra_bandwidth
    assert node.intra_bandwidth > 3 * node.bandwidth


def test_cluster_spec_describes_the_hosts(emulated_cluster):
    cluster = emulated_cluster(["1Gbit/s", "10Gbit/s"], ranks_per_host=2)
    spec = cluster.cluster_spec()
    assert spec.world_size == 4
    assert [node.bandwidth for node in spec.nodes] == [125e6, 1.25e9]
    assert [node.address for node in spec.nodes] == [host.address for host in cluster.hosts]


def test_command_prefixes_output_and_returns_the_first_failure(emulated_cluster, tmp_path, capsys):
    emulated_cluster(1)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\nprint('hello', *sys.argv[1:], end='')\nprint('oh', file=sys.stderr, flush=True)\n"
        "if os.environ['RANK'] == sys.argv[1]:\n    sys.exit(3)\ntime.sleep(0 if sys.argv[1] == 'none' else 60)\n"
    )
    assert run_shown(Emulation(2), [str(script), "none"], 30) == 0
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] hello none", "[1] hello none"]
    assert sorted(shown.err.splitlines()) == ["[0] oh", "[1] oh"]
    assert run_shown(Emulation(2, None), [str(script), "1"], 30) == 3
    assert "[1] hello 1" in capsys.readouterr().out
    assert run_shown(Emulation(1, None), ["sleep", "60"], 0.2) == 124


EMULATE_AND_WAIT = """
import json, signal, sys, threading
from offbeat.emulate import Emulation
signal.signal(signal.SIGINT, signal.default_int_handler)
rank = "import subprocess, os; c = subprocess.Popen(['sleep', '600'], start_new_session=True); print(c.pid, flush=True)"
with Emulation(2, "1Gbit/s") as cluster:
    workers = [cluster.popen(r, ["-c", rank + "; os.dup2(0, 1); os.wait()"]) for r in range(2)]
    pids = [worker.pid for worker in workers] + [host.pid for host in cluster.hosts]
    print(json.dumps({"kind": cluster.kind, "pids": pids}), flush=True)
    try:
        cluster.run(["sleep", "600"], timeout=600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


class _Emulating:
    """Another process that emulates two hosts and waits, with everything that exists because of it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EMULATE_AND_WAIT],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(3)]
        facts = next(json.loads(line) for line in lines if line.startswith("{"))
        if facts["kind"] == "loopback":
            self.process.kill()
            self.process.communicate()
            pytest.skip("no network namespaces here")
        # Two more processes come from run(); wait until both run, so that they are seen too.
        _until(lambda: len(_descendants(self.process.pid)) >= 1 + 2 + 4 + 2, "ranks did not start")
        self.pids = _descendants(self.process.pid)
        assert set(facts["pids"]) < self.pids
        self.namespaces = {_namespace(pid) for pid in self.pids} - {_namespace(os.getpid()), None}
        assert len(self.namespaces) == 3

    def assert_nothing_left(self) -> None:
        _until(lambda: not any(_alive(pid) for pid in self.pids), "processes are left")
        everywhere = {_namespace(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
        assert not self.namespaces & everywhere


@needs_root
def test_killed_emulation_leaves_nothing_behind_and_starts_again(emulated_cluster):
    interfaces = set(os.listdir("/sys/class/net"))
    emulating = _Emulating()
    emulating.process.kill()
    emulating.process.communicate()
    emulating.assert_nothing_left()
    assert set(os.listdir("/sys/class/net")) == interfaces
    assert emulated_cluster(2).run(["true"], timeout=10)[1].returncode == 0


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_emulation_ends_its_ranks(number):
    emulating = _Emulating()
    emulating.process.send_signal(number)
    output, _ = emulating.process.communicate(timeout=15)
    assert ("interrupted" in output) == (number == signal.SIGINT)
    emulating.assert_nothing_left()


REPORT_KIND = """
import ctypes, os, sys, warnings
from offbeat.emulate import Emulation, linux
if sys.argv[1] == "loopback":
    linux.enter_user_namespace()
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21
assert ctypes.CDLL(None).prctl(CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0) == 0
report = '''
import warnings
from offbeat.emulate import Emulation
with warnings.catch_warnings(record=True) as caught, Emulation(2, "80Mbit/s") as cluster:
    ranks = cluster.run(["-c", "import os; print(os.environ['MASTER_ADDR'])"], timeout=20)
    print(cluster.kind, len(caught), *{rank.stdout.strip() for rank in ranks})
    print(*[warning.message for warning in caught])
'''
os.execv(sys.executable, [sys.executable, "-c", report])
"""


@needs_root
@pytest.mark.parametrize(
    ("kind", "expected"), [("user namespaces", "user namespaces 0 10.77.0.1"), ("loopback", "loopback 1 127.0.0.1")]
)
def test_without_rights_it_falls_back(kind, expected):
    settings = {**os.environ, "PYTHONPATH": ROOT}
    probe = "from offbeat.emulate import linux; linux.enter_user_namespace()"
    if subprocess.run([sys.executable, "-c", probe], env=settings, capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are switched off here")
    done = subprocess.run(
        [sys.executable, "-c", REPORT_KIND, kind],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        env=settings,
    )
    assert done.returncode == 0, done.stderr
    summary, warning = done.stdout.splitlines()
    assert summary == expected
    assert ("runs on plain loopback with unshaped links" in warning) == (kind == "loopback")


def _until(holds: Callable[[], bool], otherwise: str, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, otherwise
        time.sleep(0.02)


def _assert_rate(cluster: Emulation, sender: int, receiver: int, expected: float) -> None:
    """The link's rate is seen at least once; a machine busy with other things spoils single measurements."""
    rates = []
    for _ in range(ATTEMPTS):
        rates.append(max(cluster.run_function(transfer_rate, sender, receiver, int(expected / 2), timeout=20)))
        if rates[-1] == pytest.approx(expected, rel=0.12):
            return
    pytest.fail(f"from {sender} to {receiver}: {rates} instead of {expected} bytes per second")


def _rates(cluster: Emulation, size_bytes: int) -> list[float]:
    return [max(cluster.run_function(transfer_rate, 0, 1, size_bytes, timeout=20)) for _ in range(ATTEMPTS)]


def _received_rate(cluster: Emulation, host: int, seconds: float) -> float:
    began, first = time.perf_counter(), cluster.traffic()[host][1]
    time.sleep(seconds)
    return (cluster.traffic()[host][1] - first) / (time.perf_counter() - began)


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _alive(pid: int) -> bool:
    return _state(pid)[0] not in "ZX"


def _state(pid: int) -> tuple[str, int]:
    """State and parent of a process; X if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


def _descendants(pid: int) -> set[int]:
    parents = {int(entry): _state(int(entry))[1] for entry in os.listdir("/proc") if entry.isdigit()}
    found, added = set(), {pid}
    while added:
        added = {child for child, parent in parents.items() if parent in added}
        found |= added
    return found
