"""Run trials on several machines: node 0 leads, the others follow its orders.

Every node runs the same command, as with torchrun; they meet at node 0's address and port, in a `TCPStore`. The leader
(`LeadNode`) writes an order for each job: the program, its variables and its task file. Each follower (`follow`) starts
its own ranks for it and reports how they ended. When a rank fails anywhere or time is up, the leader calls the job
over and every node ends its ranks. The program and whatever it imports must be on every node, under the same path.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.files import one_line
from offbeat.launch import GRACE_SECONDS, POLL_SECONDS, LocalJob, RankEnd, free_port
from offbeat.search.auto.trials import TASK, require_success

if TYPE_CHECKING:
    from torch.distributed import Store

ANSWER_SECONDS = 4 * GRACE_SECONDS + 20.0
"""Seconds in which a node must report a finished job: its ranks are asked to end, then killed."""
_FOLLOW_SECONDS = 0.1


@dataclass(frozen=True)
class Meeting:
    """The command's description of the nodes."""

    nodes: int
    node_rank: int
    address: str
    port: int = 29500
    """torchrun's default."""
    join_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.nodes:
            raise OffbeatError(f"node_rank: {self.node_rank} is not from 0 to {self.nodes - 1}")
        if not 0 < self.port < 2**16:
            raise OffbeatError(f"master_port: {self.port} is not a port from 1 to 65535")

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


class LeadNode(AbstractContextManager["LeadNode"]):
    """Node 0's view of all nodes: a place to run trials. Use it in a `with` block, or close it."""

    def __init__(self, meeting: Meeting, ranks: int) -> None:
        self.meeting = meeting
        self.store = _meet(meeting)
        self.jobs = 0
        self.ranks = [ranks]
        try:
            for node in range(1, meeting.nodes):
                if not self._comes(f"joined/{node}", meeting.join_seconds):
                    late = f"did not come to {meeting.place} within {meeting.join_seconds:g} s"
                    raise OffbeatError(f"node {node} of {meeting.nodes} {late}")
                self.ranks.append(int(self.store.get(f"joined/{node}")))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        return sum(self.ranks)

    def cluster_spec(self) -> ClusterSpec:
        """The nodes before anything is measured: their number and their ranks."""
        if len(set(self.ranks)) > 1:
            counts = ", ".join(map(str, self.ranks))
            raise OffbeatError(f"the nodes have {counts} ranks; pass a cluster file that describes them")
        return ClusterSpec.homogeneous(nodes=self.meeting.nodes, devices_per_node=self.ranks[0])

    def close(self) -> None:
        """Ends the followers; those still connected get a moment to hear it."""
        # The store is this process's own; where it is gone there is nobody to tell.
        with suppress(RuntimeError):
            self.store.set("home", "1")
            for node in range(1, self.meeting.nodes):
                if self.store.check([f"joined/{node}"]):
                    self._comes(f"left/{node}", 2 * GRACE_SECONDS)

    def run(
        self, program: Sequence[str], *, timeout: float | None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> list[RankEnd]:
        """Runs a Python program on every rank of every node; a file named by the variable TASK is sent along."""
        number, self.jobs = self.jobs, self.jobs + 1
        master = (self.meeting.address, free_port())
        task = (env or {}).get(TASK)
        order = {
            "program": list(program),
            "env": dict(env or {}),
            "master": master,
            "world": self.world_size,
            "first": [sum(self.ranks[:node]) for node in range(self.meeting.nodes)],
            "task": None if task is None else Path(task).read_text(),
        }
        self.store.set(f"order/{number}", json.dumps(order))
        try:
            with LocalJob(program, range(self.ranks[0]), self.world_size, master, env) as job:
                late = self._watch(job, number, timeout)
                self.store.set(f"over/{number}", "late" if late else "1")
                ends = job.finish(timed_out=late)
        except BaseException:
            self.store.set(f"over/{number}", "1")
            raise
        for node in range(1, self.meeting.nodes):
            if not self._comes(f"report/{number}/{node}", ANSWER_SECONDS):
                raise OffbeatError(f"node {node} has not answered for {ANSWER_SECONDS:g} s")
            ends += [RankEnd(**end) for end in json.loads(self.store.get(f"report/{number}/{node}"))]
        if check:
            require_success(ends)
        return ends

    def _comes(self, key: str, seconds: float) -> bool:
        """Waits for a key for at most this long."""
        until = time.monotonic() + seconds
        while not (there := self.store.check([key])) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return bool(there)

    def _watch(self, job: LocalJob, number: int, timeout: float | None) -> bool:
        """Waits until all nodes' ranks have ended or one has failed; True on timeout."""
        waiting = set(range(1, self.meeting.nodes))
        while True:
            waits = job.poll()
            for node in sorted(waiting):
                if self.store.check([f"report/{number}/{node}"]):
                    waiting.remove(node)
                    if any(end["returncode"] for end in json.loads(self.store.get(f"report/{number}/{node}"))):
                        return False
                elif self.store.check([f"left/{node}"]):
                    raise OffbeatError(f"node {node} has left the search")
            if job.failed or not (waits or waiting):
                return False
            if timeout is not None and job.age_seconds > timeout:
                return True
            time.sleep(POLL_SECONDS)


def follow(meeting: Meeting, ranks: int) -> int:
    """Follows the leader's search until it ends; returns the number of jobs it took part in."""
    store, node = _meet(meeting), meeting.node_rank
    jobs = 0
    try:
        store.set(f"joined/{node}", str(ranks))
        try:
            while (ordered := store.check([f"order/{jobs}"])) or not store.check(["home"]):
                if not ordered:
                    time.sleep(_FOLLOW_SECONDS)
                    continue
                ends = _take_part(store, json.loads(store.get(f"order/{jobs}")), jobs, node, ranks)
                store.set(f"report/{jobs}/{node}", json.dumps([asdict(end) for end in ends]))
                jobs += 1
        finally:
            store.set(f"left/{node}", "1")
    except RuntimeError as error:
        raise OffbeatError(f"node {node}: node 0 at {meeting.place} is gone ({one_line(error)})") from None
    return jobs


def _take_part(store: "Store", order: dict[str, Any], number: int, node: int, ranks: int) -> list[RankEnd]:
    """This node's ranks of one job."""
    with tempfile.TemporaryDirectory(prefix="offbeat-node-") as folder:
        env = dict(order["env"])
        if order["task"] is not None:
            path = Path(folder) / "task.json"
            path.write_text(order["task"])
            env[TASK] = str(path)
        mine = range(order["first"][node], order["first"][node] + ranks)
        with LocalJob(order["program"], mine, order["world"], tuple(order["master"]), env) as job:
            while job.poll() and not store.check([f"over/{number}"]):
                time.sleep(_FOLLOW_SECONDS)
            late = store.check([f"over/{number}"]) and store.get(f"over/{number}") == b"late"
            return job.finish(timed_out=late)


def _meet(meeting: Meeting) -> "Store":
    from torch.distributed import TCPStore

    leads = meeting.node_rank == 0
    try:
        wait = timedelta(seconds=meeting.join_seconds)
        return TCPStore(meeting.address, meeting.port, is_master=leads, timeout=wait, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        what = "cannot open the meeting point" if leads else "node 0 cannot be reached at"
        raise OffbeatError(f"node {meeting.node_rank}: {what} {meeting.place} ({one_line(error)})") from None
