"""Channels on gloo, whose ranks are threads of this process here, close in time and leave no thread."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat.runtime import lifetime
from offbeat.runtime.comm import CommunicationFailed, TorchWorld
from offbeat.runtime.comm.connections import open_sockets
from offbeat.runtime.comm.torch_channel import TorchChannel
from offbeat.torch_private import open_group

LONG = timedelta(seconds=60)
LATE_SECONDS = 0.3


def both(function: Callable[[int], Any]) -> list[Any]:
    """What two ranks return."""
    with ThreadPoolExecutor(2) as ranks:
        return [future.result(timeout=30) for future in [ranks.submit(function, rank) for rank in range(2)]]


def open_channels() -> list[TorchChannel]:
    store = dist.HashStore()
    before = open_sockets()
    groups = both(lambda rank: open_group("gloo", store, rank, 2, 2, LONG))
    # The ranks share this process, and so their sockets cannot be told apart.
    sockets = open_sockets() - before
    return [TorchChannel(group, (0, 1), rank, list, sockets) for rank, group in enumerate(groups)]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_channel_that_closes_waits_for_others_to_do_their_part() -> None:
    first, second = open_channels()
    first.all_reduce(torch.ones(1))  # nobody keeps the work
    late = torch.ones(1)

    def body(rank: int) -> None:
        if rank == 0:
            first.close(time.monotonic() + 20)
        else:
            time.sleep(LATE_SECONDS)
            second.all_reduce(late).wait()

    both(body)
    second.close()
    assert late.item() == 2.0


def test_a_channel_breaks_off_what_does_not_end_in_time() -> None:
    before = threads()
    first, second = open_channels()
    work = first.all_reduce(torch.ones(1))
    reported = threading.Event()
    work.report_end(lambda _: reported.set())
    began = time.monotonic()
    first.close(began + LATE_SECONDS)
    assert LATE_SECONDS < time.monotonic() - began < 10
    assert reported.is_set()
    with pytest.raises(CommunicationFailed):
        work.wait()
    with pytest.raises(CommunicationFailed):
        second.all_reduce(torch.ones(1)).wait()
    second.close()
    del work  # it holds a part of the group
    assert threads() == before


def test_a_message_that_nobody_sends_is_broken_off_too() -> None:
    first, second = open_channels()

    def body(rank: int) -> None:
        if rank == 0:
            with pytest.raises(CommunicationFailed):
                first.recv(torch.ones(1), 1, 1)
            with pytest.raises(CommunicationFailed, match="the channel is closed"):
                first.recv(torch.ones(1), 1, 1)
        else:
            time.sleep(LATE_SECONDS)
            first.close(time.monotonic())

    both(body)
    second.close()


class LostStore:
    """A store whose process has ended."""

    timeout = timedelta(seconds=1)

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError(f"failed to recv {keys[0]}")


def test_a_store_that_is_gone_is_a_failure_of_communication() -> None:
    world = TorchWorld.__new__(TorchWorld)
    world.store, world.liveness = LostStore(), None
    with pytest.raises(CommunicationFailed, match="failed to recv answer"):
        world.get("answer")


class Unended:
    """A work that ends after some looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_the_interpreter_waits_for_callbacks_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(lifetime, "close_at_exit", asked.append)
    reports = lifetime.Callbacks()
    works = [Unended(0), Unended(5), Unended(3)]
    for work in works:
        reports.add(work)
    assert asked == [reports]
    reports.close(time.monotonic() + 10)
    assert max(work.looks for work in works[1:]) < 0
    reports.add(Unended(10**9))
    reports.close(time.monotonic())


class Runtime:
    """Something to be closed."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.deadlines: list[float] = []

    def close(self, deadline: float) -> None:
        self.deadlines.append(deadline)
        if self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize("errors", [[], [OSError("no route")], [KeyboardInterrupt()], [KeyboardInterrupt()] * 3])
def test_every_runtime_is_closed_at_the_end(monkeypatch: pytest.MonkeyPatch, errors: list[BaseException]) -> None:
    runtimes = [Runtime(*errors), Runtime(*errors)]
    monkeypatch.setattr(lifetime, "_alive", runtimes)
    lifetime._close_all()
    interrupted = KeyboardInterrupt in map(type, errors)
    for runtime in runtimes:
        # One that was interrupted is closed again.
        assert len(runtime.deadlines) == (len(errors) if interrupted else 0) + 1
        # Who presses Ctrl-C once more does not wait any longer.
        assert (runtime.deadlines[-1] < time.monotonic()) is interrupted


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads do")
def test_the_interpreter_waits_for_a_thread_of_gloo_that_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has woken whoever waited for its collective, and is about to let go of its tensors."""
    monkeypatch.setattr(lifetime, "_alive", [])
    working, ended = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        working.set()
        until = time.monotonic() + LATE_SECONDS
        while time.monotonic() < until:
            # Outside the interpreter, as gloo is.
            torch.ones(1 << 16).cumsum(0)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    working.wait()
    lifetime._close_all()
    assert ended.is_set()
    thread.join()


def test_a_forked_process_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(lifetime, "_alive", [runtime])
    lifetime._at_exit(os.getpid() + 1)
    assert not runtime.deadlines


def test_a_script_that_failed_does_not_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(lifetime, "_alive", [runtime])
    monkeypatch.setattr("sys.last_type", ValueError, raising=False)
    lifetime._close_all()
    assert runtime.deadlines[0] < time.monotonic() + lifetime.FAILED_GRACE_SECONDS


@pytest.mark.parametrize("last", ["", "raise ValueError"])
def test_an_exit_that_hangs_is_ended(tmp_path: Path, last: str) -> None:
    script = tmp_path / "hangs.py"
    limits = "FAILED_GRACE_SECONDS = lifetime.OWN_SECONDS" if last else "GRACE_SECONDS = lifetime.LAST_RESORT_SECONDS"
    script.write_text(
        "import time\n"
        "from offbeat.runtime import lifetime\n"
        f"lifetime.{limits} = 0.3\n"
        "class Hangs:\n"
        "    def close(self, deadline):\n"
        "        time.sleep(600)\n"
        "hangs = Hangs()\n"
        "lifetime.close_at_exit(hangs)\n"
        f"{last}\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 1
    assert "in close" in ended.stderr
