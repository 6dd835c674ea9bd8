"""Disks that are full or may not be written, and clocks that jump: one sentence, nothing half-written, nothing lost.

A file system of 256 KiB stands in for the full disk; making one needs root.
"""

import ast
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import mostly_slow

import offbeat
from offbeat.errors import OffbeatError
from offbeat.profile.traces import read_rank
from offbeat.search.auto.store import Trial, TrialStore
from offbeat.strategy import Schedule, Strategy, VariableConfig
from offbeat.timeline import COMPUTE, Builder, Timeline

DISK_BYTES = 256 * 1024
UNIT_TESTS = Path(__file__).parents[1] / "unit"
sys.path.append(str(UNIT_TESTS))

from test_store import CLUSTER, GRAPH, start_writer, trial  # noqa: E402 - the path must be known first


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path, None, None]:
    """A folder on a disk of its own, which holds 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave_bytes: int = 0) -> Path:
    """Fills a disk but for `leave_bytes`; the file that does."""
    ballast = place / "ballast"
    free = os.statvfs(place)
    ballast.write_bytes(b"x" * max(0, free.f_bavail * free.f_bsize - leave_bytes))
    return ballast


def long_strategy(count: int) -> Strategy:
    return Strategy(variables={f"layers.{number}.weight": VariableConfig(partition=(2,)) for number in range(count)})


def long_timeline(count: int) -> Timeline:
    builder = Builder()
    for number in range(count):
        builder.add(0, COMPUTE, "forward", f"operator {number}", number * 1e-3, number * 1e-3 + 1e-4, step=0)
    return builder.build(np.array([[0.0, count * 1e-3]]))


def test_a_strategy_and_a_chrome_trace_are_written_whole_or_not_at_all(disk: Path) -> None:
    small, large = long_strategy(1), long_strategy(2000)
    saves: list[tuple[str, Callable[[Path], None], Callable[[Path], None], str]] = [
        ("strategy.json", small.save, large.save, "strategy"),
        ("timeline.json", long_timeline(1).save, long_timeline(5000).save, "trace"),
    ]
    for name, save_small, save_large, what in saves:
        path = disk / name
        save_small(path)
        before = path.read_bytes()
        ballast = fill(disk, leave_bytes=8192)
        with pytest.raises(OffbeatError) as caught:
            save_large(path)
        assert str(caught.value) == f"{path}: cannot write the {what}: No space left on device"
        assert path.read_bytes() == before
        assert sorted(os.listdir(disk)) == sorted(["ballast", name])
        ballast.unlink()
        path.unlink()


def test_a_trial_store_on_a_full_disk_keeps_what_it_has_and_goes_on_later(disk: Path) -> None:
    path, stored = disk / "t.sqlite", 0
    with TrialStore(path) as store:
        ballast = fill(disk, leave_bytes=64 * 1024)
        refusal = ""
        while not refusal and stored < 10_000:
            try:
                store.add(GRAPH, CLUSTER, trial(stored))
                stored += 1
            except OffbeatError as error:
                refusal = str(error)
        assert refusal in (
            f"{path}: cannot write to the trial store: database or disk is full",
            f"{path}: cannot write to the trial store: disk I/O error",
        )
        assert stored > 0
        assert len(store.trials()) == stored
        ballast.unlink()
        assert store.add(GRAPH, CLUSTER, trial(stored)) == 1
    with TrialStore(path) as store:
        assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert [round(kept.seconds or 0) for kept in store.trials()] == list(range(stored + 1))


def train(steps: int, recorder: "offbeat.Recorder", after_step: Callable[[int], None] = lambda _: None) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        after_step(step)
        recorder.step()


def test_a_recording_on_a_full_disk_ends_with_one_sentence_and_can_be_read(disk: Path) -> None:
    interval = sys.getswitchinterval()

    def fill_after_some_steps(step: int) -> None:
        if step == 5:
            fill(disk, leave_bytes=4096)

    with pytest.raises(OffbeatError) as caught, offbeat.Recorder(disk / "trace") as recorder:
        train(10_000, recorder, fill_after_some_steps)
    path = disk / "trace" / "rank0.jsonl"
    assert str(caught.value) == f"{path}: cannot write the trace: No space left on device"
    assert sys.getswitchinterval() == interval
    trace = read_rank(path)
    assert len(trace.steps) >= 4
    assert trace.notes in ((), (f"{path}: the last line is cut off; its step is left out",))


@pytest.fixture
def unwritable(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """A folder that may be read only, also by root's tests."""
    place = tmp_path_factory.mktemp("read_only", numbered=True)
    user = os.geteuid()
    # Modules are loaded while everything may be read.
    assert offbeat.Recorder
    for folder in (place, *place.parents):
        if any(part.startswith("pytest-of-") for part in folder.parts):
            folder.chmod(0o755)
    place.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    try:
        yield place
    finally:
        os.seteuid(user)
        place.chmod(0o755)


def test_a_read_only_folder_is_named(unwritable: Path) -> None:
    path = unwritable / "file"
    if not os.access(unwritable, os.R_OK | os.X_OK, effective_ids=True):
        pytest.skip("another user cannot reach the folder of temporary files")
    with pytest.raises(OffbeatError, match=f"^{path}: cannot write the strategy: Permission denied$"):
        long_strategy(1).save(path)
    with pytest.raises(OffbeatError, match=f"^{path}: cannot write the trace: Permission denied$"):
        long_timeline(1).save(path)
    with pytest.raises(OffbeatError, match=f"^{path}: cannot open the trial store: unable to open database file$"):
        TrialStore(path)
    with pytest.raises(OffbeatError, match=f"^{path}: cannot write a trace there: Permission denied$"):
        offbeat.Recorder(path).__enter__()
    assert os.listdir(unwritable) == []


def test_a_clock_that_jumps_does_not_show_in_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([0.0, -86_400.0, 3.2e7, -1e9, 5.0] * 100)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    with offbeat.Recorder(tmp_path) as recorder:
        train(12, recorder, lambda _: time.time())
    trace = read_rank(tmp_path / "rank0.jsonl")
    assert [step.number for step in trace.steps] == list(range(1, 12))
    for before, after in zip(trace.steps, trace.steps[1:], strict=False):
        assert before.begin < before.end <= after.begin
    assert max(step.end - step.begin for step in trace.steps) < 60
    with TrialStore(tmp_path / "t.sqlite") as store:
        for number in range(6):
            store.add(GRAPH, CLUSTER, trial(number))
        assert [round(kept.seconds or 0) for kept in store.trials()] == list(range(6)), "in the order of their making"


def test_the_wall_clock_is_only_noted_never_measured_with() -> None:
    """`time.time` may jump; durations come from `perf_counter` and `monotonic`."""
    package = Path(offbeat.__file__).parent
    users = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "time" and getattr(node.value, "id", "") == "time":
                users.add(path.relative_to(package).as_posix())
    assert users <= {"profile/recorder.py", "search/auto/store.py"}, "both only note when something was made"


@pytest.mark.timeout(200)
def test_eight_writers_of_which_five_are_killed_lose_nothing(tmp_path: Path) -> None:
    path, chance = tmp_path / "t.sqlite", random.Random(3)
    # Those that are killed would write for longer than it takes to start the others.
    first = [10**6 * index for index in range(8)]
    writers = [start_writer(path, start, start + (60 if index >= 5 else 10**6)) for index, start in enumerate(first)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
    for writer in writers[:5]:
        time.sleep(chance.uniform(0.0, 0.1))
        writer.send_signal(signal.SIGKILL)
    promised: set[int] = set()
    for index, writer in enumerate(writers):
        assert writer.stdout is not None
        lines = writer.stdout.read().splitlines(keepends=True)
        writer.stdout.close()
        writer.wait(timeout=150)
        # The last line of a killed writer may be cut off.
        promised |= {int(line) for line in lines if line.endswith(b"\n")}
        assert writer.returncode == (-signal.SIGKILL if index < 5 else 0)
    with TrialStore(path) as store:
        assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = {round((kept.seconds or 0) - 0.1): kept for kept in store.trials()}
        assert store.add(
            GRAPH, CLUSTER, Trial(Strategy(schedule=Schedule(slice_bytes=99_999)), "done", 1.0, search="s")
        )
    assert promised <= found.keys()
    assert len(found.keys() - promised) <= 5, "each killed writer may have stored one trial without saying so"
    assert {number for number in found if number >= first[5]} == {start + n for start in first[5:] for n in range(60)}


SCHEDULE = """
import numpy
from offbeat.search.pace import preemptive_schedule

print(preemptive_schedule(numpy.zeros(2), numpy.ones(2), numpy.zeros(2)).makespan)
"""


@pytest.mark.parametrize("where", mostly_slow(["full", "absent", "read-only"], ["read-only"]))
def test_kernels_are_compiled_where_nothing_can_be_kept(disk: Path, where: str) -> None:
    fill(disk)
    kept = {"full": disk / "cache", "absent": Path("/nowhere/at/all"), "read-only": Path("/proc/cache")}[where]
    done = subprocess.run(
        [sys.executable, "-c", SCHEDULE],
        env={**os.environ, "NUMBA_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
