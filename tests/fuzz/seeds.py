"""Valid files of every format that Offbeat reads: what the fuzzer starts from.

Everything is made here, so that no binary file lies in the repository and every seed is valid by construction.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import CollectiveFit, Costs
from offbeat.graph import ModelGraph, Operator, TensorSpec, Variable
from offbeat.graph.model import update_operators
from offbeat.plan import lower
from offbeat.profile.plans import PlanWriter
from offbeat.search.auto.store import Trial, TrialStore
from offbeat.strategy import (
    Encoder,
    OperatorConfig,
    Schedule,
    Shard,
    Slice,
    Strategy,
    VariableConfig,
    build_strategy,
)
from offbeat.timeline import COMPUTE, NETWORK, Builder, Timeline

MODULES = ("embed", "layers.0", "layers.1")
PARAMETERS = (
    ("embed.weight", (40, 8)),
    ("layers.0.weight", (8, 8)),
    ("layers.0.bias", (8,)),
    ("layers.1.weight", (4, 8)),
)


@cache
def graph() -> ModelGraph:
    """A chain of three layers."""
    operators, variables = [], []
    for phase, order in (("forward", MODULES), ("backward", MODULES[::-1])):
        for name in order:
            owned = tuple(parameter for parameter, _ in PARAMETERS if parameter.rpartition(".")[0] == name)
            before = (operators[-1].name,) if operators else ()
            output = TensorSpec((4, 8), "float32")
            operators.append(
                Operator(
                    f"{phase}.{name}",
                    "matmul",
                    "aten.mm.default",
                    phase,
                    name,
                    before,
                    owned,
                    (output,),
                    9,
                    9,
                    9,
                    9,
                    1e-3,
                )
            )
    for name, shape in PARAMETERS:
        module = name.rpartition(".")[0]
        variables.append(Variable(name, shape, "float32", f"forward.{module}", f"backward.{module}"))
    updates = update_operators(variables, "SGD", 1)
    return ModelGraph("small", (*operators, *updates), tuple(variables), optimizer_slots=1)


@cache
def cluster() -> ClusterSpec:
    return ClusterSpec.homogeneous(nodes=2, devices_per_node=2, bandwidth="1Gbit/s", latency="50us", memory="1GiB")


@cache
def strategies() -> tuple[bytes, ...]:
    """Some of builders, and one that uses every field."""
    names = ("all_reduce", "ps_load_balanced", "overlap", "sharded", "partitioned_ps", "ddp")
    built = [build_strategy(name, graph(), cluster()).to_json().encode() for name in names]
    full = Strategy(
        name="all",
        model="small",
        replicas=(0, 1, 2, 3),
        weights=(1.0, 1.0, 2.0, 0.5),
        accumulation=2,
        recompute=("layers.0",),
        fusion=(("layers.0", "layers.1"),),
        schedule=Schedule(
            policy="explicit",
            in_flight=3,
            credit_bytes=4096,
            order=(Slice(group=0, start=0, stop=100), Slice(group=0, start=100, stop=320)),
        ),
        variables={
            "embed.weight": VariableConfig(shards=(Shard(group=0),)),
            "layers.0.weight": VariableConfig(
                partition=(2, 1),
                cuts=((3,), ()),
                shards=(
                    Shard(synchronizer="parameter_server", placement=(1,), stations=(0, 2)),
                    Shard(encoder=Encoder(name="topk", ratio=0.1), reduction_order=(3, 2, 1, 0)),
                ),
            ),
            "layers.1.weight": VariableConfig(shards=(Shard(encoder=Encoder(name="powersgd", rank=2)),)),
        },
        operators={"forward.layers.0": OperatorConfig(mesh=(2, 2), inputs=((0, -1),), outputs=((0, 1),), keep="after")},
    )
    return (*built, full.to_json().encode())


@cache
def clusters() -> tuple[bytes, ...]:
    """YAML and JSON, presets, links and tables."""
    made = ClusterSpec.from_yaml(
        "name: mixed\n"
        "nodes:\n"
        "- {name: a, count: 2, devices: 2, device: V100, memory: 16GiB, bandwidth: 10Gbit/s, latency: 50us}\n"
        "- {name: b, address: 10.0.0.9, devices: 1, bandwidth: 1.25GB/s, peak_flops: 65TFLOP/s, price_per_hour: 2.5}\n"
        "links:\n"
        "- {a: a-0, b: b, bandwidth: 1Gbit/s, latency: 1ms}\n"
        "tables:\n"
        "- {collective: all_reduce, groups: [[0, 1], [2, 3]], sizes_bytes: [1KiB, 1MiB], seconds: [50us, 2ms]}\n"
    )
    listed = [ClusterSpec.preset(name) for name in ClusterSpec.presets()[:3]]
    return tuple(text for spec in (made, cluster(), *listed) for text in (spec.to_yaml().encode(), spec.to_json()))


@cache
def recording() -> dict[str, list[Any]]:
    """The lines of two ranks' traces as the recorder writes them, on two machines, and the files beside them."""
    costs = Costs(collectives={("all_reduce", 2): CollectiveFit(1e-4, 5e-5, 1e-9)}, gap_seconds=1e-3)
    return {
        **{f"rank{rank}.jsonl": _rank_lines(rank, 100.0 + 5.0 * rank) for rank in (0, 1)},
        "calibration.json": [{"costs": costs.to_dict(), "samples": {"all_reduce": [[1024, 1e-4]]}}],
        "cluster.yaml": [json.loads(cluster().subset(2).to_json())],
    }


def _rank_lines(rank: int, zero: float) -> list[Any]:
    names = [name for name, _ in PARAMETERS]
    header = {"offbeat_trace": 2, "rank": rank, "world": 2, "backend": "gloo", "job": "offbeat", "machine": f"m{rank}"}
    header |= {"unix_seconds": 1.7e9, "clock_seconds": zero, "modules": list(MODULES), "gradients": names}
    header["parameters"] = [[name, list(shape), "float32"] for name, shape in PARAMETERS]
    plan = lower(graph(), cluster().subset(2), build_strategy("overlap", graph(), cluster().subset(2)))
    followed = json.loads(json.dumps(PlanWriter().changes(plan, "deferred")))
    lines: list[Any] = [header, {"clock": _ticks(rank, zero)}, {"plan": followed}]
    for step in range(5):
        at = zero + 1 + 0.1 * step
        forward = [[module, at + 0.01 * module, at + 0.01 * module + 1e-4] for module in range(3)]
        backward = [[parameter, at + 0.04 + 0.01 * place] for place, parameter in enumerate((3, 2, 1, 0))]
        rows = [
            [
                task,
                "all_reduce",
                f"m{task}.all_reduce",
                256 * (task + 1),
                2,
                at + 0.05,
                at + 0.051,
                at + 0.06 + 0.01 * task,
            ]
            for task in range(2)
        ]
        local = [
            ["wait", [0], at + 0.081, at + 0.082],
            ["update", [1], at + 0.09, at + 0.091],
        ]
        line = {"step": step, "begin": at, "end": at + 0.1, "calls": [[at, at + 0.035]]}
        line |= {"forward": forward, "backward": backward, "local": local, "communication": rows}
        line |= {"complete": step > 0, "updated": True}
        lines.append(line)
    return [
        *lines,
        {"late": [[2, "all_reduce", "m2.all_reduce", 64, 2, zero + 1.4, zero + 1.41, zero + 1.42]]},
        lines[1],
    ]


def _ticks(rank: int, zero: float) -> list[Any]:
    times = [zero + 0.5 + 0.001 * number for number in range(4)]
    return [[1, at, at + 2e-4] if rank == 0 else [1, at + 1e-4, at + 1e-4] for at in times]


@cache
def profiler_traces() -> dict[str, Any]:
    """torch.profiler's traces: two ranks on GPUs, and two on gloo with their Flight Recorder dumps."""
    return {
        **{f"cuda/rank{rank}.json": _cuda_trace(rank) for rank in (0, 1)},
        **{f"gloo/rank{rank}.json": _gloo_trace(rank) for rank in (0, 1)},
        **{f"gloo/dump_rank{rank}.json": _dump(rank) for rank in (0, 1)},
    }


def _event(category: str, name: str, start: float, duration: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 9, "tid": tid, "args": args}


def _cuda_trace(rank: int) -> dict[str, Any]:
    events = []
    for step in range(2):
        begin, first = 1e6 + 1000.0 * step, 100 * step
        kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        about = {"stream": 20, "External id": first + 3, "Collective name": "allreduce", "In msg nelems": 1000}
        about |= {"dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        sent = {"stream": 21, "Collective name": "send" if rank == 0 else "recv", "In msg nelems": 64}
        sent |= {"Dst Rank": 1, "Src Rank": 0, "Process Group Name": "0"}
        events += [
            _event("user_annotation", f"ProfilerStep#{step + 7}", begin, 1000),
            _event("cpu_op", "aten::mm", begin + 10, 30, **{"External id": first + 1}),
            _event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 50, 50, tid=2),
            _event("cpu_op", "record_param_comms", begin + 70, 5, tid=2, **{"External id": first + 3}),
            _event("user_annotation", "Optimizer.step#SGD.step", begin + 800, 100),
            _event("kernel", "gemm", begin + 100, 200, tid=7, stream=7, **{"External id": first + 1}),
            _event("gpu_memcpy", "Memcpy HtoD", begin + 20, 40, tid=8, stream=8),
            _event("kernel", kernel, begin + 400, 300, tid=20, **about),
            _event("kernel", "ncclDevKernel_SendRecv", begin + 720, 50, tid=21, **sent),
        ]
    info = {"backend": "nccl", "rank": rank, "world_size": 2}
    return {"distributedInfo": info, "host_name": f"node{rank}", "baseTimeNanoseconds": 10**18, "traceEvents": events}


def _gloo_trace(rank: int) -> dict[str, Any]:
    events: list[Any] = [{"ph": "M", "name": "process_name", "pid": 9, "tid": 1, "args": {"name": "python"}}]
    for step in range(2):
        begin = 1e6 + 1000.0 * step + 3.0 * rank
        shape = {"Input Dims": [[16, 8]], "Input type": ["float"]}
        issued = {"Input Dims": [[[16, 8]], [], []], "Input type": ["TensorList", "", ""]}
        peer = {"Input Dims": [[[5]]], "Concrete Inputs": ["", "", str(1 - rank), "0"]}
        verb, operator = ("send", "c10d::send") if rank == 0 else ("recv", "c10d::recv_")
        events += [
            _event("user_annotation", f"ProfilerStep#{step}", begin, 990),
            _event("cpu_op", "aten::addmm", begin + 10, 100),
            _event("cpu_op", "c10d::allreduce_", begin + 200, 5, **issued),
            _event("user_annotation", "gloo:all_reduce", begin + 210, 150, tid=5, **shape),
            _event("cpu_op", operator, begin + 400, 5, **peer),
            _event("cpu_op", f"gloo:{verb}", begin + 401, 40, **{"Input Dims": [[5]], "Input type": ["float"]}),
            _event("cpu_op", "c10d::barrier", begin + 500, 5, **{"Input Dims": [[1]]}),
            _event("user_annotation", "gloo:barrier", begin + 505, 60, tid=5),
        ]
    info = {"backend": "gloo", "rank": rank, "world_size": 2}
    return {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 0, "traceEvents": events}


def _dump(rank: int) -> dict[str, Any]:
    entries = []
    for step in range(2):
        begin = int(1e9 + 1e6 * step + 3e3 * rank)
        for place, (name, sizes) in enumerate((("gloo:all_reduce", [[16, 8]]), ("gloo:barrier", [[1]]))):
            entries.append(
                {
                    "process_group": ["0", "default_pg"],
                    "collective_seq_id": 2 * step + place,
                    "p2p_seq_id": 0,
                    "profiling_name": name,
                    "input_sizes": sizes,
                    "time_created_ns": begin + 200_000 + 300_000 * place,
                    "is_p2p": False,
                    "state": "completed",
                }
            )
    return {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg"}}, "entries": entries}


@cache
def timelines() -> tuple[bytes, ...]:
    """What `Timeline.save` writes."""
    builder = Builder()
    for rank in (0, 1):
        for step in range(3):
            at = 0.1 * step
            builder.add(rank, COMPUTE, "forward", "a", at, at + 0.03, step=step)
            builder.add(rank, COMPUTE, "backward", "a", at + 0.03, at + 0.08, step=step)
            builder.add(
                rank, NETWORK, "communication", "m0", at + 0.05, at + 0.09, step=step, queued=at + 0.04, bytes=9, task=0
            )
    import numpy as np

    made: Timeline = builder.build(np.array([[0.0, 0.1, 0.2, 0.3]] * 2), notes=("made by hand",))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("t.json", "t.json.gz")]
        for path in paths:
            made.save(path)
        return tuple(path.read_bytes() for path in paths)


def trials() -> list[Trial]:
    """One of each kind."""
    found = [Strategy.from_json(content) for content in strategies()]
    return [
        Trial(found[0], "done", 0.1, search="a", predicted_seconds=0.2, steps=(0.1, 0.11), created=1.7e9),
        Trial(found[1], "stopped", 0.3, source="replayed", search="a", created=1.7e9),
        Trial(found[2], "crashed", error="rank 1 exited with code 3", search="b", created=1.7e9),
    ]


@cache
def store() -> bytes:
    """A trial store as one file, without a write-ahead log beside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.sqlite"
        with TrialStore(path) as made:
            made.add(graph(), cluster(), *trials())
            made._connection.execute("PRAGMA journal_mode = DELETE")
        return path.read_bytes()


@cache
def exported() -> dict[str, list[Any]]:
    """The documents of each file that `TrialStore.export` writes for a domain."""
    with tempfile.TemporaryDirectory() as folder:
        with TrialStore(Path(folder) / "t.sqlite") as made:
            made.add(graph(), cluster(), *trials())
            made.export(Path(folder) / "out")
        (domain,) = (Path(folder) / "out").iterdir()
        return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in domain.iterdir()}
