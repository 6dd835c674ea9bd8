"""A number of ranks and calls as JSON → what each rank answered.

A pool is a set of worker processes that joined one gloo job on the loopback device. It takes many calls one after
another, because starting torch takes seconds. A call that fails or takes too long ends its pool, so that no later call
inherits a broken job; the next call starts a new one.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zygote import Forked, zygote

WORKERS: Final = Path(__file__).with_name("workers.py")
START_SECONDS: Final = 90.0
"""Importing torch and joining the job, on a machine that does other things as well."""


class RankFailed(AssertionError):
    """One or more ranks raised, died or did not answer."""


def start_ranks(
    world: int,
    *arguments: str,
    directory: Path,
    script: Path = WORKERS,
    pipes: bool = True,
    whole_end: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[Forked]:
    """Starts one process per rank; what rank r prints to stderr is in `directory`/rank{r}.log."""
    job = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(variables or {})}
    how = {"pipes": pipes, "whole_end": whole_end}
    return [
        zygote().start(script, arguments, directory / f"rank{rank}.log", {**job, "RANK": str(rank)}, **how)
        for rank in range(world)
    ]


def run_script(script: Path, world: int, *arguments: str, seconds: float = 120.0) -> list[int]:
    """Runs a script on so many ranks, in its folder; their exit codes."""
    ranks = start_ranks(world, *arguments, directory=script.parent, script=script, pipes=False)
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in ranks):
            assert time.monotonic() < deadline, f"{script} has not ended within {seconds:.0f} s"
            time.sleep(0.03)
    finally:
        stop_ranks(ranks)
    return [process.wait() for process in ranks]


def stop_ranks(ranks: Sequence[Forked | subprocess.Popen[bytes]]) -> None:
    """Ends what still runs, at once."""
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    for process in ranks:
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue


def wait_for_steps(process: Forked | subprocess.Popen[bytes], steps: int, seconds: float) -> None:
    """Waits until a rank has printed so many lines."""
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    seen = 0
    os.set_blocking(process.stdout.fileno(), False)
    while seen < steps:
        assert time.monotonic() < deadline, f"only {seen} steps within {seconds:.0f} s"
        assert process.poll() is None, f"ended with {process.returncode} before step {steps}"
        seen += (process.stdout.read() or b"").count(b"\n")
        time.sleep(0.05)


def drain_and_wait(process: Forked | subprocess.Popen[bytes], deadline: float) -> int | None:
    """A rank's exit code, None if it has not ended by `deadline` (time.monotonic); what it prints is not kept."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    while process.poll() is None and time.monotonic() < deadline:
        process.stdout.read()
        time.sleep(0.05)
    return process.returncode


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pool:
    """Workers that answer calls until one goes wrong."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.ranks: list[Forked] = []
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    def call(self, function: str, *, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Runs `function` of workers.py on every rank with these arguments; one answer per rank, in rank order."""
        failures = {
            rank: answer["error"]
            for rank, answer in enumerate(self.answers(function, timeout=timeout, **arguments))
            if "error" in answer
        }
        if failures:
            first, *others = failures
            also = "".join(f"\nrank {rank} as well: {failures[rank].splitlines()[-1]}" for rank in others)
            raise RankFailed(f"rank {first}: {failures[first]}{also}")
        return [answer["result"] for answer in self._last]

    def answers(
        self, function: str, *, timeout: float = 60.0, keep: bool = False, **arguments: Any
    ) -> list[dict[str, Any]]:
        """As `call`, but an exception on a rank is an answer too: {"error": traceback, "kind": …, "message": …}.

        `keep` keeps the pool after exceptions, for refusals that come before any communication.
        """
        if not self.ranks:
            self._start()
        request = json.dumps({"function": function, "arguments": arguments}).encode() + b"\n"
        try:
            for process in self.ranks:
                process.stdin.write(request)
                process.stdin.flush()
            self._last = self._collect(timeout, f"{function}({json.dumps(arguments)[:300]})")
        except (RankFailed, BrokenPipeError) as error:
            logs = self._log_tails()
            self.close()
            raise RankFailed(f"{error}\n{logs}") from None
        if not keep and any("error" in answer for answer in self._last):
            self.close()
        return self._last

    def _start(self) -> None:
        self._logs = tempfile.TemporaryDirectory()
        self.ranks = start_ranks(self.world, directory=Path(self._logs.name))
        try:
            self._collect(START_SECONDS, "joining the job")
        except RankFailed as error:
            logs = self._log_tails()
            self.close()
            raise RankFailed(f"{error}\n{logs}") from None

    def _collect(self, timeout: float, what: str) -> list[dict[str, Any]]:
        """One line of JSON from every rank, or RankFailed naming the ranks that gave none."""
        answers: dict[int, dict[str, Any]] = {}
        partial = dict.fromkeys(range(self.world), b"")
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.ranks):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.world:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    silent = sorted(set(range(self.world)) - set(answers))
                    said = "".join(f"\nrank {rank}: {answer.get('error', 'done')}" for rank, answer in answers.items())
                    raise RankFailed(f"{what}: ranks {silent} gave no answer within {timeout:.0f} s{said}")
                for key, _ in events:
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        code = self.ranks[key.data].wait()
                        raise RankFailed(f"{what}: rank {key.data} ended with exit code {code}")
                    partial[key.data] += data
                    if partial[key.data].endswith(b"\n"):
                        answers[key.data] = json.loads(partial[key.data])
                        selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.world)]

    def _log_tails(self) -> str:
        if self._logs is None:
            return ""
        tails = []
        for rank in range(self.world):
            path = Path(self._logs.name) / f"rank{rank}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            tails.append(f"--- rank {rank}\n{text[-2000:]}")
        return "\n".join(tails)

    def close(self) -> None:
        stop_ranks(self.ranks)
        self.ranks = []
        if self._logs is not None:
            self._logs.cleanup()
            self._logs = None


class Pools:
    """Pools by number of ranks, each started when it is first needed."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        return self._pools.setdefault(world, Pool(world))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
