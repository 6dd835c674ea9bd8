"""Profiler traces and Flight Recorder dumps: real ones of two gloo processes, hand-made CUDA ones, broken ones."""

import gzip
import json
import os
import pickle
import socket
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import OffbeatError
from offbeat.profile.align import apply, clock_offsets, communication_events
from offbeat.profile.kineto import combine, join, load_folder, read_dump
from offbeat.profile.tracefile import load
from offbeat.timeline import Span, Timeline, stream

JOB = """
import os, sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
save = lambda profiler: profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
plan = schedule(wait=2, warmup=1, active=4, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save, record_shapes=True) as profiler:
    for _ in range(7):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            dist.send(torch.zeros(5), 1)
        else:
            dist.recv(torch.zeros(5), 0)
        dist.barrier()
        dist.barrier()
        profiler.step()
text = torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
with open(f"{folder}/flight/rank{rank}.json", "wb") as file:
    file.write(text if isinstance(text, bytes) else text.encode())
dist.destroy_process_group()
os._exit(0)  # torch's gloo threads can abort a process whose interpreter ends while they let go of tensors
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_job(tmp_path_factory.mktemp("job"))


def record_job(folder: Path) -> Path:
    """Fills the folder with the traces of two real ranks, and their Flight Recorder dumps in flight/."""
    (folder / "flight").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "1000"}
        command = [sys.executable, "-c", JOB, str(rank), str(folder)]
        ranks.append(subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE))
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()[-2000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return folder


def spans(timeline: Timeline, **wanted: Any) -> list[Span]:
    return [span for span in timeline.spans if all(getattr(span, field) == value for field, value in wanted.items())]


def read_folder(folder: Path) -> tuple[Timeline, list[str]]:
    """The timeline of all ranks on their own clocks, and what was left out."""
    traces, notes = load_folder(folder)
    timeline = combine(traces)
    return timeline, [*notes, *timeline.notes]


def test_real_traces_give_steps_computation_and_communication(job: Path) -> None:
    timeline, notes = read_folder(job)
    assert notes == []
    assert timeline.ranks == (0, 1)
    assert timeline.marks.shape == (2, 5)
    assert (np.diff(timeline.marks) > 0).all()
    for rank in (0, 1):
        for step in range(4):
            reduces = spans(timeline, rank=rank, step=step, name="all_reduce")
            assert sorted(span.bytes for span in reduces) == [4 * 520, 4 * 4160]
            assert all(span.queued is not None and span.queued <= span.start for span in reduces)
            assert len(spans(timeline, rank=rank, step=step, name="barrier")) == 2
            kinds = {span.kind for span in spans(timeline, rank=rank, step=step, track="compute")}
            assert {"forward", "backward", "optimizer"} <= kinds
    busy = sorted((span.start, span.end) for span in spans(timeline, rank=0, track="compute"))
    assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(busy))


def test_both_ranks_give_a_collective_the_same_task(job: Path) -> None:
    timeline, _ = read_folder(job)
    sides = [
        {(span.step, span.task): span.bytes for span in spans(timeline, rank=rank, kind="communication")}
        for rank in (0, 1)
    ]
    assert sides[0] == sides[1]
    assert len(sides[0]) == 4 * 5
    sent = {span.task for span in spans(timeline, rank=0, name="send")}
    assert sent == {span.task for span in spans(timeline, rank=1, name="recv")}
    assert len(sent) == 1


@pytest.mark.timing
def test_ranks_of_one_machine_are_found_to_be_in_step(tmp_path: Path) -> None:
    alignment = clock_offsets(communication_events(read_folder(record_job(tmp_path))[0]))
    assert alignment.offset_seconds[1] == pytest.approx(0, abs=2e-3), "they share a clock"


def test_an_artificial_skew_is_found(job: Path, tmp_path: Path) -> None:
    timeline, _ = read_folder(job)
    known = clock_offsets(communication_events(timeline))
    document = json.loads((job / "rank1.json").read_bytes())
    document["baseTimeNanoseconds"] += 50_000_000
    (tmp_path / "rank1.json").write_text(json.dumps(document))
    (tmp_path / "rank0.json").write_bytes((job / "rank0.json").read_bytes())
    skewed, _ = read_folder(tmp_path)
    alignment = clock_offsets(communication_events(skewed))
    assert alignment.offset_seconds[1] - known.offset_seconds[1] == pytest.approx(0.05, abs=2e-4)
    moved, unmoved = apply(skewed, alignment).end, apply(timeline, known).end
    assert moved - moved[0] == pytest.approx(unmoved - unmoved[0], abs=2e-4)


def test_flight_recorder_adds_sequence_numbers_and_groups(job: Path) -> None:
    traces = [join(trace, read_dump(job / "flight" / trace.path.name)) for trace in load_folder(job)[0]]
    for trace in traces:
        numbers = [event.sequence for event in trace.collectives if event.kind in ("all_reduce", "barrier")]
        assert len(numbers) == len(set(numbers)) == 4 * 4
        assert sorted(numbers) == list(range(min(numbers), min(numbers) + 16))
        assert {event.group for event in trace.collectives if event.sequence >= 0} == {"0"}
    first, second = ({(e.kind, e.elements, e.sequence) for e in t.collectives if e.sequence >= 0} for t in traces)
    assert first == second
    joined = combine(traces)
    assert "4 of 20 communications are not in the Flight Recorder dump" in joined.notes[0]
    assert len(communication_events(joined).rank) == 2 * 20


def test_sequence_numbers_match_ranks_of_which_one_missed_a_collective(job: Path) -> None:
    traces = [join(trace, read_dump(job / "flight" / trace.path.name)) for trace in load_folder(job)[0]]
    barriers = [event for event in traces[0].collectives if event.kind == "barrier"]
    traces[0].collectives.remove(barriers[0])
    timeline = combine(traces)
    first, second = ([span.task for span in spans(timeline, rank=r, name="barrier", step=0)] for r in (0, 1))
    assert (len(first), len(second)) == (1, 2)
    assert first == second[1:]


def test_dumps_that_are_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(OffbeatError, match=r"is a pickle.*_dump_fr_trace_json"):
        read_dump(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a Flight Recorder dump: it must be a mapping"),
        ('{"entries": [3]}', r"entries\[0\]: it must be a mapping, got 3"),
        ('{"entries": [{"profiling_name": "gloo:barrier"}]}', r"entries\[0\].collective_seq_id: it is required"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_dumps_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(content)
    with pytest.raises(OffbeatError, match=message):
        read_dump(path)


def event(category: str, name: str, start: float, duration: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 9, "tid": tid, "args": args}


def cuda_trace(rank: int, late: float = 0.0) -> dict[str, Any]:
    """Two steps as Kineto writes them on a GPU: forward, backward, an all-reduce of a group of two, a copy."""
    events = []
    for step in range(2):
        begin = 1e6 + 1000.0 * step
        first = 100 * step
        events += [
            event("user_annotation", f"ProfilerStep#{step + 7}", begin, 1000),
            event("cpu_op", "aten::mm", begin + 10, 30, **{"External id": first + 1}),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 50, 50, tid=2),
            event("cpu_op", "aten::mm", begin + 60, 30, tid=2, **{"External id": first + 2}),
            event("cpu_op", "record_param_comms", begin + 70, 5, tid=2, **{"External id": first + 3}),
            event("kernel", "gemm", begin + 100, 200, tid=7, stream=7, **{"External id": first + 1}),
            event("kernel", "gemm", begin + 300, 300, tid=7, stream=7, **{"External id": first + 2}),
            event("gpu_memcpy", "Memcpy HtoD", begin + 20, 40, tid=8, stream=8),
            event(
                "kernel",
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                begin + 400 + late,
                300 - late,
                tid=20,
                **{"stream": 20, "External id": first + 3, "Collective name": "allreduce", "In msg nelems": 1000},
                **{"dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"},
            ),
        ]
    info = {"backend": "nccl", "rank": rank, "world_size": 2}
    return {"distributedInfo": info, "host_name": f"node{rank}", "baseTimeNanoseconds": 10**18, "traceEvents": events}


def test_cuda_kernels_are_the_computation_and_nccl_the_communication(tmp_path: Path) -> None:
    for rank in (0, 1):
        content = json.dumps(cuda_trace(rank, 50.0 * rank)).encode()
        (tmp_path / f"trace{rank}.json.gz").write_bytes(gzip.compress(content))
    timeline, notes = read_folder(tmp_path)
    assert notes == []
    assert [(span.kind, span.step) for span in spans(timeline, rank=0, track="compute")] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
    ]
    reduces = spans(timeline, name="all_reduce")
    assert [(span.rank, span.step, span.task, span.bytes) for span in reduces] == [
        (rank, step, 0, 2000) for rank in (0, 1) for step in (0, 1)
    ]
    assert reduces[0].queued == pytest.approx(70e-6, abs=1e-9)
    assert reduces[0].start == pytest.approx(400e-6, abs=1e-9)
    assert timeline.iteration_time == pytest.approx(1e-3)
    assert [load(path).host for path in sorted(tmp_path.iterdir())] == ["node0", "node1"]


def test_steps_not_recorded_by_all_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps(cuda_trace(0)))
    (tmp_path / "rank1.json").write_text(json.dumps(cuda_trace(1)).replace("ProfilerStep#8", "ProfilerStep#9"))
    timeline, notes = read_folder(tmp_path)
    assert timeline.marks.shape == (2, 2)
    assert notes == ["2 steps were left out, because not all ranks recorded them consecutively"]


def test_a_job_without_communication_says_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        document = cuda_trace(rank)
        document["traceEvents"] = [e for e in document["traceEvents"] if "nccl" not in e["name"]]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))
    assert "its traces show no communication" in read_folder(tmp_path)[1][0]


def test_the_rank_comes_from_the_file_else_its_name_else_the_caller(tmp_path: Path) -> None:
    document = cuda_trace(3)
    named, other = tmp_path / "worker5.pt.trace.json", tmp_path / "trace.json"
    named.write_text(json.dumps(document))
    assert combine([load(named)]).ranks == (3,)
    del document["distributedInfo"]
    for path in (named, other):
        path.write_text(json.dumps(document))
    assert combine([load(named)]).ranks == (5,)
    assert combine([load(other, rank=2)]).ranks == (2,)
    with pytest.raises(OffbeatError, match=r"trace.json: the trace's rank is unknown"):
        combine([load(other)])


def test_faulty_times_are_left_out_and_counted(tmp_path: Path) -> None:
    document = cuda_trace(0)
    count = len(read_events(tmp_path, document))
    document["traceEvents"] += [
        event("kernel", "a", float("nan"), 1),
        event("kernel", "b", 1e6, -5),
        event("kernel", "c", 1e6, float("inf")),
        {**event("kernel", "d", 1e6, 1), "ts": "soon"},
        {**event("kernel", "e", 1e6, 1), "name": 5},
        None,
        [],
    ]
    timeline = read_events(tmp_path, document)
    assert len(timeline) == count
    assert "5 events with negative or non-finite times were left out" in timeline.notes[0]


def read_events(folder: Path, document: dict[str, Any]) -> Timeline:
    path = folder / "rank0.json"
    path.write_text(json.dumps(document))
    return combine([load(path)])


GOOD = json.dumps(cuda_trace(0)).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"   \n", "it is empty"),
        (b"hello", "it is not JSON"),
        (b"PK\x03\x04rest", "it is a zip archive"),
        (b"\x89PNG\r\n", "it is a PNG picture"),
        (pickle.dumps({}), "it is a pickle"),
        (b'{"a": 1}', "no field 'traceEvents'"),
        (b'{"traceEvents": 5}', "'traceEvents' is not a list"),
        (b'{"traceEvents": []}', "no event has a start"),
        (b"[1, 2, 3]", "no event has a start"),
        (GOOD[: len(GOOD) // 2], "it is cut off"),
        (GOOD[:-1], "it is cut off"),
        (GOOD[:40], "it is cut off"),
        (b'{"traceEvents": [{"a": "b}', "it is cut off"),
        (b'{"traceEvents": [' + b"[" * 5000, "nested deeper"),
        (b'{"x": ' + b'{"a":' * 5000, "nested deeper"),
        (b'{"traceEvents": [{"a": tru}]}', "not valid JSON near"),
        (b'{"traceEvents" 5}', "not valid JSON"),
        (b"{5 5}", "not valid JSON"),
        (gzip.compress(GOOD, mtime=0)[:-20], "damaged or cut off"),
        (b"\x1f\x8b\x08\x00 nothing of the kind", "damaged or cut off"),
    ],
)
def test_files_that_are_no_trace_are_named_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(OffbeatError, match=rf"rank0.json: cannot read the trace: .*{message}"):
        combine([load(path)])


def test_damaged_traces_give_a_sentence_or_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    rng = np.random.default_rng(0)
    for number in range(400):
        content = bytearray(GOOD)
        for place in rng.integers(0, len(content), 3):
            content[place] = rng.integers(0, 256)
        path.write_bytes(content[: rng.integers(1, len(content))] if number % 4 == 0 else content)
        refusal = ""
        try:
            assert np.isfinite(combine([load(path)]).start).all()
        except OffbeatError as error:
            refusal = str(error)
        assert refusal == "" or (refusal.startswith(str(path)) and "\n" not in refusal)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (80 * 2**20) + b"]}"))
    with pytest.raises(OffbeatError, match="it unpacks to more than 400 times"):
        combine([load(path)])


def test_one_bad_file_does_not_stop_the_others(tmp_path: Path) -> None:
    for name in ("rank0.json", "rank1.json"):
        (tmp_path / name).write_text(json.dumps(cuda_trace(int(name[4]))))
    (tmp_path / "rank2.json").write_bytes(GOOD[:-100])
    (tmp_path / "rank3.json").write_bytes(GOOD)
    timeline, notes = read_folder(tmp_path)
    assert timeline.ranks == (0, 1)
    assert "rank2.json: cannot read the trace: it is cut off" in notes[0]
    assert "rank3.json: left out, because rank0.json is also a trace of rank 0" in notes[1]


def test_a_folder_without_a_usable_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="contains no traces"):
        read_folder(tmp_path)
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text("{}")
    with pytest.raises(OffbeatError, match=r"contains no usable trace: .*rank0.json.*\(and 1 more\)"):
        read_folder(tmp_path)


@pytest.mark.parametrize("chunk", [64, 1000, 2**20])
def test_where_the_file_is_cut_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Strings with brackets, quotes and '},{' inside, nested objects, and text that is not UTF-8."""
    deep = {"a": [{"b": 1}, {"c": "}]"}]}
    events = [event("kernel", f'k}},{{"{number}[]\\', 1.0 * number, 0.5, stream=7, deep=deep) for number in range(60)]
    document = {"host_name": 'a"},{"b\\', "traceEvents": events}
    content = json.dumps(document, indent=1).encode().replace(b"k}", b"\xffk}", 5)
    path = tmp_path / "rank4.json"
    path.write_bytes(content)
    monkeypatch.setattr(stream, "_CHUNK", chunk)
    trace = load(path)
    assert trace.host == 'a"},{"b\\'
    assert trace.work.start == pytest.approx(np.arange(60) * 1e-6)
    assert trace.work.names[-1] == 'k},{"59[]\\'


def test_large_traces_need_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    events = [event("kernel", f"k{number % 50}", number, 0.5, stream=7, text="x" * 300) for number in range(1000)]
    lines = [json.dumps(event) for event in events]
    with path.open("w") as file:
        file.write('{"traceEvents": [' + ",\n".join(lines))
        for _ in range(79):
            file.write(",\n" + ",\n".join(lines))
        file.write("]}")
    tracemalloc.start()
    try:
        assert len(load(path).work.start) == 80_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 30e6
    assert peak < 25e6
