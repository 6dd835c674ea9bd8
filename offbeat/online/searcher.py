"""Search for better plans in a background process while training continues.

Replay and search compile code and use a processor for seconds; in the training process a step would stand still
meanwhile. Where ranks compute on processors the searching process is started once steps have been recorded, which it
would disturb. It has one thread and yields the processors. Whatever happens to it, the job goes on.

    python -m offbeat.online.searcher    reads one request from stdin, writes two answers to stdout, a line each

The first answer, DDP's own way with several sizes of buckets, needs no replay, so that the job can time them while code
is being compiled.
"""

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import orjson

from offbeat.runtime.lifetime import close_at_exit

DDP = "ddp"
"""The kind of plan that does what DDP does."""
NICENESS = 10
ISSUE_SECONDS = 1e-4
"""Seconds a host needs to issue an NCCL collective and apply its result, as recorded on one H200."""
MOST_SECONDS = 300.0
"""Seconds after which a search without an answer is ended."""


class SearchFailed(Exception):
    """The search process died, hung, or could not replay the recording."""


class Searcher:
    """A search process, seen from its parent."""

    def __init__(self) -> None:
        alone = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.online.searcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **alone},
        )
        self.answers: SimpleQueue[bytes] = SimpleQueue()
        # An answer may be larger than the pipe: the process must not wait for a step's end to go on.
        self.reader = Thread(target=self._receive, daemon=True)
        self.reader.start()
        close_at_exit(self)
        self.asked_at = time.monotonic()

    def ask(self, request: dict[str, Any]) -> None:
        """Sends the request without waiting for the process to read it."""
        self.asked_at = time.monotonic()
        # A process that is still loading does not read: the pipe takes little, and a step must not wait for it.
        Thread(target=self._send, args=(orjson.dumps(request),), daemon=True).start()

    def _send(self, request: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(OSError), self.process.stdin as stream:
            stream.write(request)

    def _receive(self) -> None:
        assert self.process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self.process.stdout:
                self.answers.put(line)

    def answer(self) -> dict[str, Any] | None:
        """The next answer, or None while there is none; SearchFailed if there will be none."""
        ended = self.process.poll() is not None
        if ended:
            self.reader.join()
        if not self.answers.empty():
            answer = orjson.loads(self.answers.get())
            if "error" in answer:
                raise SearchFailed(answer["error"])
            return answer
        if ended:
            raise SearchFailed(f"the searching process ended with {self.process.returncode}")
        if time.monotonic() - self.asked_at > MOST_SECONDS:
            raise SearchFailed(f"the search has not answered for {MOST_SECONDS:.0f} s")
        return None

    def close(self, deadline: float | None = None) -> None:
        """Ends the process, if it still runs, and closes its pipes."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def search(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers of the search process: the recorded graph and DDP's own way; then the profile's costs and notes, and
    candidates, fastest first.
    """
    from offbeat.graph import ModelGraph
    from offbeat.profile.measure import profile_in_place
    from offbeat.profile.whatif import trust_in
    from offbeat.search.optimize import TIMED_BUCKETS, candidates, ddp_sizes

    recorded = [orjson.loads(zlib.decompress(bytes.fromhex(packed))) for packed in request["traces"]]
    graph = ModelGraph.from_json(request["graph"])
    profile = profile_in_place(recorded, tuple(request["link"]), request["world"], graph)
    sizes = dict(ddp_sizes(profile.graph, profile.cluster, TIMED_BUCKETS))
    yield {
        "graph": profile.graph.to_json().decode(),
        "sizes": [{"name": name, "strategy": strategy.to_json()} for name, strategy in sizes.items()],
    }
    issue_seconds = profile.host_late * ISSUE_SECONDS
    costs = replace(profile.costs, encoding_seconds_per_byte=request["encoding"])
    job = (profile.graph, profile.cluster, costs, profile.strategy)
    limits = {"barrier": request["barrier"], "issue_seconds": issue_seconds, "allow": request["allow"]}
    # A script may save the optimizer on one rank, as with DDP. Jobs with servers or a memory limit do not come here.
    found = candidates(*job, **limits, whole_state=True)
    trust = trust_in(profile)
    yield {
        "costs": costs.to_dict(),
        "notes": list(profile.timeline.notes),
        "candidates": [
            {
                "name": each.name,
                "kind": DDP if each.name.startswith("ddp ") else each.kind,
                "seconds": each.seconds,
                "strategy": each.strategy.to_json(),
            }
            | {
                "bounds": trust.interval(each.seconds, "trial").fields(),
                "trust": [trust.device, trust.job, trust.noise],
            }
            for each in found
        ],
    }


def main() -> None:
    """Loads, then waits for the request; the parent's end closes the pipe."""
    os.nice(NICENESS)
    import torch

    import offbeat.profile.measure
    import offbeat.search.optimize  # noqa: F401 - loaded before it is known what to search

    torch.set_num_threads(1)
    request = sys.stdin.buffer.read()
    if not request:
        return
    try:
        for answer in search(orjson.loads(request)):
            print(json.dumps(answer), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"the recorded steps cannot be replayed: {error}"}), flush=True)


if __name__ == "__main__":
    main()
