"""Measured timelines replayed without a plan: unchanged they come back, changed they follow the closed forms."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.profile.replay_trace import replay_trace
from offbeat.profile.source import load_recording
from offbeat.timeline import COMPUTE, NETWORK, Builder, Timeline
from offbeat.timeline.model import collective_kind

FORWARD, BACKWARD, UPDATE = 0.010, 0.020, 0.002
LATENCY, PER_BYTE = 0.001, 1e-8
SIZES = (400_000, 800_000)


def job(ranks: int = 2, steps: int = 4, slow: Mapping[int, float] | None = None, gap: float = 0.0) -> Timeline:
    """Two layers, DDP-like: an all-reduce per layer, issued as its backward ends; the update waits for both."""
    builder, marks = Builder(), [[0.0] for _ in range(ranks)]
    now = [0.0] * ranks
    for step in range(steps):
        ends = {}
        issued: list[list[float]] = [[], []]
        for rank in range(ranks):
            factor = (slow or {}).get(rank, 1.0)
            at = now[rank] + gap
            for kind, seconds in (("forward", FORWARD), ("backward", BACKWARD / 2), ("backward", BACKWARD / 2)):
                end = at + seconds * factor
                builder.add(rank, COMPUTE, kind, kind, at, end, step=step)  # type: ignore[arg-type]
                at = end
                if kind == "backward":
                    issued[len([1 for row in issued if len(row) > rank])].append(end)
        link = 0.0
        for task, size in enumerate(SIZES):
            begin = max(*issued[task], link)
            link = begin + LATENCY + PER_BYTE * size
            ends[task] = link
            for rank in range(ranks):
                at = issued[task][rank]
                builder.add(
                    rank,
                    NETWORK,
                    "communication",
                    f"m{task}.all_reduce",
                    begin,
                    link,
                    step=step,
                    queued=at,
                    bytes=size,
                    task=task,
                )
        for rank in range(ranks):
            end = ends[1] + UPDATE * (slow or {}).get(rank, 1.0)
            builder.add(rank, COMPUTE, "optimizer", "update", ends[1], end, step=step)
            now[rank] = end
            marks[rank].append(end)
    return builder.build(np.array(marks))


def step_seconds(scale: float = 1.0, latency: float = 1.0, bandwidth: float = 1.0) -> float:
    first, second = (LATENCY * latency + PER_BYTE * size / bandwidth for size in SIZES)
    backward = (FORWARD + BACKWARD) * scale
    return max(backward, (FORWARD + BACKWARD / 2) * scale + first) + second + UPDATE * scale


def test_the_hand_made_job_is_what_it_seems() -> None:
    assert job().iteration_time == pytest.approx(step_seconds())


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_unchanged_it_comes_back(ranks: int) -> None:
    timeline = job(ranks, slow={0: 1.3}, gap=0.003)
    again = replay_trace(timeline)
    assert again.source == "predicted"
    np.testing.assert_allclose(again.start, timeline.start, atol=1e-12)
    np.testing.assert_allclose(again.end, timeline.end, atol=1e-12)
    np.testing.assert_allclose(again.marks, timeline.marks, atol=1e-12)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 10.0])
def test_other_links(factor: float) -> None:
    faster = replay_trace(job(), bandwidth=factor)
    assert faster.iteration_time == pytest.approx(step_seconds(bandwidth=factor))
    later = replay_trace(job(), latency=factor)
    assert later.iteration_time == pytest.approx(step_seconds(latency=factor))


def test_faster_computing() -> None:
    assert replay_trace(job(), compute=2.0).iteration_time == pytest.approx(step_seconds(scale=0.5))


def test_a_straggler_holds_up_everybody() -> None:
    slowed = replay_trace(job(4), stragglers={3: 2.0})
    # The others wait in the all-reduce, and rank 3's own update is slower too.
    assert slowed.iteration_time == pytest.approx(job(4, slow={3: 2.0}).iteration_time, rel=1e-6)


def test_gaps_of_the_interpreter_stay() -> None:
    gap = 0.004
    faster = replay_trace(job(gap=gap), compute=2.0, bandwidth=2.0)
    assert faster.iteration_time == pytest.approx(gap + step_seconds(scale=0.5, bandwidth=2.0))


def test_waits_inside_computation_are_not_computing() -> None:
    """As FSDP2's forward: the span of a module contains the wait for its all-gather."""
    builder = Builder()
    for rank in (0, 1):
        builder.add(rank, COMPUTE, "forward", "layer", 0.0, 0.030, step=0)
        builder.add(rank, COMPUTE, "wait", "everything", 0.005, 0.025, step=0)
        builder.add(
            rank, NETWORK, "communication", "all_gather.0", 0.005, 0.025, step=0, queued=0.005, bytes=1000, task=0
        )
    timeline = builder.build(np.array([[0.0, 0.030]] * 2))
    assert replay_trace(timeline).iteration_time == pytest.approx(0.030)
    assert replay_trace(timeline, bandwidth=2.0).iteration_time == pytest.approx(0.020)
    assert replay_trace(timeline, compute=2.0).iteration_time == pytest.approx(0.025)


def test_a_rooted_collective_need_not_wait_for_late_receivers() -> None:
    builder = Builder()
    builder.add(0, COMPUTE, "forward", "root", 0.0, 0.010, step=0)
    builder.add(0, NETWORK, "communication", "broadcast", 0.0, 0.002, step=0, queued=0.0, bytes=8, task=0)
    builder.add(1, COMPUTE, "forward", "late", 0.0, 0.008, step=0)
    builder.add(1, NETWORK, "communication", "broadcast", 0.008, 0.009, step=0, queued=0.008, bytes=8, task=0)
    timeline = builder.build(np.array([[0.0, 0.010]] * 2))
    again = replay_trace(timeline, stragglers={1: 3.0})
    assert again.end[1] == pytest.approx(0.002)
    assert again.end[3] == pytest.approx(0.025)


def test_parts_of_a_collective_that_follow_each_other_come_back() -> None:
    """Nothing says when each part was issued, and the rank waits for the first as the second begins."""
    builder = Builder()
    for rank in (0, 1):
        builder.add(rank, COMPUTE, "forward", "work", 0.0, 0.010, step=0)
        for start, end in ((0.010, 0.020), (0.020, 0.030), (0.030, 0.030)):
            builder.add(rank, NETWORK, "communication", "all_reduce", start, end, step=0, bytes=8, task=0)
        # Asked for long before, but listed behind another part of the same moment.
        builder.add(rank, NETWORK, "communication", "all_reduce", 0.030, 0.030, step=0, queued=0.010, bytes=8, task=1)
    timeline = builder.build(np.array([[0.0, 0.040]] * 2))
    again = replay_trace(timeline)
    np.testing.assert_allclose(again.end, timeline.end, atol=1e-9)
    assert replay_trace(timeline, stragglers={1: 2.0}).iteration_time == pytest.approx(0.050)


def test_a_timeline_without_steps_is_one_step() -> None:
    timeline = replace(job(steps=1), marks=np.empty((0, 0)))
    assert replay_trace(timeline).iteration_time == pytest.approx(step_seconds())


@given(st.integers(0, 2**32 - 1))
def test_random_traces_come_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, builder = int(rng.integers(1, 4)), Builder()
    for rank in range(ranks):
        at = float(rng.uniform(0, 1e-3))
        for _ in range(int(rng.integers(1, 12))):
            at += float(rng.choice([0.0, 1e-5, 1e-3])) * rng.uniform()
            end = at + float(rng.uniform(0, 2e-3))
            builder.add(rank, COMPUTE, "forward", "work", at, end, step=0)
            at = end
    for task in range(int(rng.integers(0, 8))):
        issued = rng.uniform(0, 1e-2, ranks)
        for rank in range(ranks):
            end = float(issued.max() + rng.uniform(0, 4e-3))
            start = float(rng.uniform(issued[rank], end))
            builder.add(
                rank,
                NETWORK,
                "communication",
                "all_reduce",
                start,
                end,
                step=0,
                queued=issued[rank],
                bytes=9,
                task=task,
            )
    timeline = builder.build(np.array([[0.0, 0.05]] * ranks))
    again = replay_trace(timeline)
    np.testing.assert_allclose(again.end, timeline.end, atol=1e-9)
    np.testing.assert_allclose(again.marks, timeline.marks, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("m3.all_reduce[0:64]", "all_reduce"),
        ("gloo:all_gather", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum", "reduce_scatter"),
        ("layer.weight", "collective"),
    ],
)
def test_collectives_are_known_by_their_names(name: str, verb: str) -> None:
    assert collective_kind(name) == verb


def test_an_unknown_straggler_is_refused() -> None:
    with pytest.raises(OffbeatError, match="rank 7 is not among"):
        replay_trace(job(), stragglers={7: 2.0})


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_saved_timeline_is_a_recording(name: str, tmp_path: Path) -> None:
    job().save(tmp_path / name)
    loaded = load_recording(tmp_path / name)
    assert isinstance(loaded, Timeline)
    assert replay_trace(loaded).iteration_time == pytest.approx(step_seconds(), rel=1e-6)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "contains no traces"),
        ({"rank0.json": b""}, "rank0.json"),
        ({"rank0.json": b'{"traceEvents": [{"ph": "X", "ts'}, "rank0.json"),
        ({"rank0.json": b"\x1f\x8b\x08\x00broken"}, "rank0.json"),
        ({"notes.json": b"[1, 2, 3]"}, "notes.json"),
        ({"deep.json": b"[" * 100_000}, "deep.json"),
        ({"rank0.jsonl": b""}, "its first line lacks"),
        ({"rank0.jsonl": b'{"offbeat_trace": 2}\n'}, "not a trace of Offbeat's recorder: rank: it is required"),
        ({"rank0.jsonl": b'{"offbeat_trace": 1}\n'}, "its first line lacks 'offbeat_trace': 2"),
        ({"rank0.jsonl": b"\x00\xff\n"}, "not a trace"),
    ],
)
def test_bad_folders_are_one_sentence(files: dict[str, bytes], part: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OffbeatError, match=part) as error:
        load_recording(tmp_path)
    assert "\n" not in str(error.value)


def test_a_bad_file_does_not_hide_the_good_ones(tmp_path: Path) -> None:
    events = b'{"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": [%s]}' % b",".join(
        b'{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": %d, "dur": 50}' % (100 * i)
        for i in range(4)
    )
    (tmp_path / "rank0.json").write_bytes(events)
    (tmp_path / "rank1.json").write_bytes(events[:90])
    timeline = load_recording(tmp_path)
    assert isinstance(timeline, Timeline)
    assert timeline.ranks == (0,)
    assert any("rank1.json" in note for note in timeline.notes)
    assert any("no communication" in note for note in timeline.notes)
