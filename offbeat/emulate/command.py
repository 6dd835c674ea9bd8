"""Command line of `offbeat emulate` → ranks on an emulated cluster, their output prefixed by rank, an exit code."""

import os
import selectors
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, TextIO

from offbeat.emulate.control import Worker
from offbeat.emulate.emulation import Bandwidth, Emulation
from offbeat.emulate.launch import Program, stop

TIMED_OUT = 124
_SIGNALLED = 128
_READ_BYTES = 65_536


def emulate_command(
    hosts: int | Sequence[Bandwidth],
    bandwidth: Bandwidth,
    ranks_per_host: int,
    script_argv: Program,
    timeout: float | None,
) -> int:
    """Runs a script on every rank and shows each line as '[rank] line'.

    Returns 0, the exit code of the rank that failed first (128 + n if signal n ended it), or 124 when time was up. The
    other ranks are then stopped.
    """
    with Emulation(hosts, bandwidth, ranks_per_host=ranks_per_host) as emulation, ExitStack() as stack:
        port = emulation.new_port()
        workers: list[Worker] = []
        pipes: list[_Lines] = []
        try:
            for rank in range(emulation.world_size):
                ends = []
                for shown_on in (sys.stdout, sys.stderr):
                    read, write = os.pipe()
                    pipes.append(_Lines(stack.enter_context(os.fdopen(read, "rb", 0)), f"[{rank}] ", shown_on))
                    ends.append(stack.enter_context(os.fdopen(write, "wb", 0)))
                try:
                    workers.append(emulation.popen(rank, script_argv, stdout=ends[0], stderr=ends[1], master_port=port))
                finally:
                    # Whoever reads the other ends waits for all of these to close.
                    for end in ends:
                        end.close()
            until = None if timeout is None else time.monotonic() + timeout
            return _follow(workers, pipes, until)
        finally:
            stop(workers)
            for lines in pipes:
                lines.drain()


class _Lines:
    """One stream of one rank, shown line by line."""

    def __init__(self, stream: IO[bytes], prefix: str, shown_on: TextIO) -> None:
        self.stream = stream
        self._prefix = prefix
        self._shown_on = shown_on
        self._rest = b""

    def advance(self) -> bool:
        """Shows what has arrived; False at the stream's end."""
        arrived = os.read(self.stream.fileno(), _READ_BYTES)
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        if not arrived and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            self._shown_on.write(f"{self._prefix}{line.decode(errors='replace')}\n")
        self._shown_on.flush()
        return bool(arrived)

    def drain(self) -> None:
        """Shows all that is left once the rank has ended."""
        while self.advance():
            pass


def _follow(workers: list[Worker], pipes: list[_Lines], until: float | None) -> int:
    """Shows output until all ranks have ended, one has failed, or time is up; the exit code."""
    with selectors.DefaultSelector() as selector:
        for lines in pipes:
            selector.register(lines.stream, selectors.EVENT_READ, lines)
        for worker in workers:
            selector.register(worker.fileno(), selectors.EVENT_READ, worker)
        running = len(workers)
        while running:
            events = selector.select(None if until is None else max(0.0, until - time.monotonic()))
            ended = []
            for key, _ in events:
                if isinstance(key.data, Worker):
                    selector.unregister(key.fd)
                    key.data.poll()
                    ended.append(key.data)
                elif not key.data.advance():
                    selector.unregister(key.fileobj)
            running -= len(ended)
            failed = [worker for worker in ended if worker.returncode]
            if failed:
                code = min(failed, key=lambda worker: worker.ended_at or 0.0).returncode or 0
                return code if code > 0 else _SIGNALLED - code
            if until is not None and time.monotonic() >= until:
                return TIMED_OUT
    return 0
