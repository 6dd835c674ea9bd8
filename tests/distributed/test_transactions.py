"""Ranks that send to each other: recorded message by message, aligned by dPRO's variance of receives, replayed."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from offbeat.profile.align import communication_events
from offbeat.profile.clockfit import RECEIVE, SEND
from offbeat.profile.lines import RankTrace
from offbeat.profile.measure import load_profile
from offbeat.profile.traces import _moved, align, read_traces, to_timeline
from offbeat.profile.whatif import what_if

SCRIPT = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(14):
    if rank == 0:
        time.sleep(0.002 * (step % 3))
        hidden = model(torch.ones(64, 512))
        dist.send(hidden.detach(), 1)
        gradient = torch.empty(64, 512)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, gradient, 1)])[0].wait()
        hidden.backward(gradient)
    else:
        received = torch.empty(64, 512)
        dist.recv(received, 0)
        received.requires_grad_()
        model(received).square().mean().backward()
        dist.isend(received.grad, 0).wait()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded from outside. The second rank's first forward waits for the first rank's."""
    folder = tmp_path_factory.mktemp("transactions")
    (folder / "job.py").write_text(SCRIPT)
    options = ["-n", "2", "--transactions", "--steps", "10", "--plain-steps", "2", "--timeout", "60", "-o", "trace"]
    command = [sys.executable, "-m", "offbeat", "profile", "job.py", *options]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "trace"


def test_every_message_is_recorded_on_both_sides(trace: Path) -> None:
    traces, notes = read_traces(trace)
    assert not notes
    for number, kinds in enumerate((["send", "recv"], ["recv", "send"])):
        for step in traces[number].steps:
            assert [row.kind for row in step.transactions] == kinds
            assert {(row.peer, row.bytes) for row in step.transactions} == {(1 - number, 64 * 512 * 4)}
            assert all(row.queued < row.finished for row in step.transactions)
    events = communication_events(to_timeline(traces, []))
    assert sorted(set(events.role.tolist())) == [SEND, RECEIVE]
    assert len(events.role) == 4 * len(traces[0].steps)


def test_replay_takes_the_messages_with_it(trace: Path) -> None:
    profile = load_profile(trace)
    predicted, _ = what_if(profile, ())
    assert predicted.iteration_time == pytest.approx(profile.step_seconds, rel=0.05)
    slower, _ = what_if(profile, ["bandwidth=0.01x"])
    assert slower.iteration_time > 1.5 * profile.step_seconds
    late, _ = what_if(profile, ["straggler=0:20x"])
    ends = {span.rank: span.end for span in late.spans if span.name == "recv 0>1"}
    starts = [span.start for span in late.spans if span.name == "send 0>1"]
    assert late.iteration_time > profile.step_seconds
    assert ends[1] > max(starts)


def test_clocks_of_two_machines_are_aligned_by_transactions(trace: Path) -> None:
    """No clocks were compared, so that the variance of receives has to find what the second machine is ahead."""
    lines = [orjson.loads(line) for line in (trace / "rank1.jsonl").read_bytes().splitlines()]
    assert not any("clock" in line for line in lines)
    traces, _ = read_traces(trace)
    ahead = 3.25
    moved: RankTrace = _moved(traces[1], lambda at: at + ahead)
    _, alignment = align([traces[0], replace(moved, machine="another")])
    assert alignment is not None
    assert alignment.offset_seconds[1] == pytest.approx(ahead, abs=2e-3)
