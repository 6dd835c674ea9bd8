"""What the zoo's training steps take on one accelerator → JSON: times, memory, and what three decisions really gain.

    python benchmarks/accelerator.py --output results.json
    python benchmarks/accelerator.py --device cpu --quick       everything at a small scale, to see that it works

Sections, the most important first: `models` (each in bf16 autocast and in fp32 without TF32: step, phases and parts of
them, kinds of operators, peak memory beside the estimate; `accelerator_times` says how the parts are used),
`recompute` (every block recomputed, measured and replayed), `recorder` (steps with offbeat.Recorder and without),
`op_fusion` (every block compiled). AdamW, plain torch, one device. The output is written after each piece; what fails
has its reason under `failed`, what there was no time for is under `skipped`.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from accelerator_times import (
    PHASES,
    PRECISIONS,
    AcceleratorTimes,
    choose_marks,
    on_device,
    roofline_seconds,
    split,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import offbeat
from offbeat import files, zoo
from offbeat.cluster import ClusterSpec, Node, find_device
from offbeat.cost.memory import peak_memory
from offbeat.graph import ModelGraph, kinds
from offbeat.runtime.memory import apply_memory_strategy
from offbeat.strategy import Strategy

BATCH = {
    "resnet50": 64,
    "bert_base": 32,
    "gpt2": 8,
    "vgg16": 64,
    "transformer": 80,
    "bert_large": 32,
    "inception_v3": 64,
    "seq2seq": 128,
    "gpt2_xl": 8,
}
LAST = "gpt2_xl"
"""Large: measured after all else, and in bf16 only."""
BLOCKS = {"gpt2": "blocks", "bert_base": "layers"}
RECORDED = ("resnet50", "bert_base")
PARTS = 20
"""Of forward and of backward, at most."""
QUICK_SCALE = 0.1
QUICK_MODELS = ("vgg16", "bert_base", "gpt2")
CAPTURE_SECONDS = 60
"""For which measuring waits at first, so that capturing does not disturb it."""
COMPILE_SECONDS = 60
"""Less than this left, compiling is not begun."""


class Bench:
    """The device, the time that is left, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.options = options
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.scale, self.counts = (QUICK_SCALE, (1, 3)) if options.quick else (1.0, (4, 12))
        self.kind = device_kind(self.device)
        self.result: dict[str, Any] = {
            "benchmark": "accelerator",
            "device": self.kind,
            "device_name": torch.cuda.get_device_name() if self.cuda else "cpu",
            "torch": torch.__version__,
            "scale": self.scale,
            "tf32": False,
            "optimizer": "AdamW",
            "models": {},
            "recompute": {},
            "recorder": {},
            "op_fusion": {},
            "failed": {},
            "skipped": [],
        }

    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.began)

    def node(self, precision: str) -> Node:
        """The device with the peak of a precision."""
        kind = find_device(self.kind)
        peak = None if kind is None else kind.fp32_flops if precision == "fp32" else kind.training_flops
        return ClusterSpec.homogeneous(nodes=1, device=self.kind, peak_flops=peak).nodes[0]

    def piece(
        self, section: str, name: str, work: Callable[[], dict[str, Any]], least_seconds: float = 15, label: str = ""
    ) -> None:
        """Runs one piece if there is time, keeps its result or the reason why there is none, and writes all."""
        label = f"{section}.{label or name}"
        if self.left() < least_seconds:
            self.result["skipped"].append(label)
            self.write()
            return
        begin = time.monotonic()
        self.release()
        try:
            row = rounded(work())
            self.result[section].setdefault(name, {}).update(row)
            print(label, json.dumps(summary(row)), flush=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.result["failed"][label] = reason
            print(f"{label} failed: {reason}", flush=True)
        self.result.setdefault("piece_seconds", {})[label] = round(time.monotonic() - begin, 1)
        self.release()
        self.write()

    def release(self) -> None:
        """Frees what models that are gone have left."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def write(self) -> None:
        if self.options.output:
            files.write_atomic(self.options.output, json.dumps(self.result).encode() + b"\n", "results")


class Graphs:
    """Captured graphs, made in other processes meanwhile where there are processors for it."""

    def __init__(self, bench: Bench, names: list[str]) -> None:
        self.bench = bench
        self.waiting: dict[tuple[str, bool], Future[bytes]] = {}
        self.known: dict[tuple[str, bool], ModelGraph] = {}
        workers = 0 if bench.options.quick else min(8, (os.cpu_count() or 1) - 2) // 2
        # The slowest first. One pool each, since a process that dies takes its pool with it.
        order = sorted(names, key=lambda name: name not in ("seq2seq", LAST))
        for autocast in (False, True) if workers > 0 else ():
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,))
            for name in order:
                if not (autocast and name == "seq2seq"):
                    self.waiting[name, autocast] = pool.submit(captured, *self._call(name, autocast))
            pool.shutdown(wait=False)

    def settle(self) -> None:
        """Waits until all are made, or for as long as measuring can be put off."""
        wait(self.waiting.values(), timeout=CAPTURE_SECONDS)

    def get(self, name: str, autocast: bool = False) -> ModelGraph:
        """With `autocast` as the device sees it in bf16, else as `offbeat.zoo.capture` makes it."""
        key = (name, autocast)
        if key not in self.known:
            self.known[key] = ModelGraph.from_json(self._content(key)).with_optimizer("AdamW", 2)
        return self.known[key]

    def _content(self, key: tuple[str, bool]) -> bytes:
        if key not in self.waiting:
            return captured(*self._call(*key))
        try:
            return self.waiting[key].result(timeout=CAPTURE_SECONDS / 2)
        except Exception as error:
            print(f"{key[0]}: captured again, as on a CPU: {type(error).__name__}: {error}"[:300], flush=True)
            name, scale, batch, device = self._call(*key)
            return captured(name, scale, batch, None if device is None else "cpu")

    def _call(self, name: str, autocast: bool) -> tuple[str, float, int | None, str | None]:
        batch = batch_of(name, self.bench.scale)
        return name, self.bench.scale, batch, self.bench.device.type if autocast else None


def captured(name: str, scale: float, batch: int | None, autocast_device: str | None) -> bytes:
    """A model's graph in JSON; with a device, of its bf16 step there, else of the fp32 step on the meta device."""
    if autocast_device is None:
        return zoo.capture(name, scale, batch).to_json()
    model, inputs = fake_model(name, scale, batch, autocast_device)
    with torch.autocast(autocast_device, dtype=torch.bfloat16):
        return offbeat.capture(model, inputs, name=f"{name} in bf16 on {autocast_device}").to_json()


def fake_model(name: str, scale: float, batch: int | None, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model that seems to be on a device and has no memory there; tied weights stay tied."""
    with torch.device("meta"):
        model, inputs = zoo.build(name, scale, batch)
    # The originals are kept as well, so that no identity is used twice.
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None and id(tensor) not in fakes:
                        fake = torch.empty_like(tensor, device=device)
                        fakes[id(tensor)] = (tensor, nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake)
                    if tensor is not None:
                        held[key] = fakes[id(tensor)][1]
        return model, tuple(torch.empty_like(tensor, device=device) for tensor in inputs)


class Job:
    """A model in training."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.cuda = bench.cuda
        self.precision = "fp32"
        self.bytes_before = torch.cuda.memory_allocated() if bench.cuda else 0
        torch.manual_seed(0)
        with bench.device:
            self.model, self.inputs = zoo.build(name, bench.scale, batch_of(name, bench.scale))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self, now: Callable[[], Any]) -> list[Any]:
        """Trains; returns the moments at which forward, backward and update begin and the last one ends."""
        self.optimizer.zero_grad()
        moments = [now()]
        loss = self.forward()
        moments.append(now())
        loss.backward()
        moments.append(now())
        self.optimizer.step()
        moments.append(now())
        return moments

    def forward(self) -> torch.Tensor:
        if self.precision == "fp32":
            return self.model(*self.inputs)
        with torch.autocast("cuda" if self.cuda else "cpu", dtype=torch.bfloat16):
            return self.model(*self.inputs)

    def now(self) -> Any:
        """A moment on the device."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two moments that have passed."""
        return begin.elapsed_time(end) / 1e3 if self.cuda else end - begin

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def warm_up(self, count: int) -> None:
        for _ in range(count):
            self.step(lambda: None)
        self.wait()


def measure_model(bench: Bench, graphs: Graphs, job: Job, name: str, precision: str) -> dict[str, Any]:
    """All that is known of a model in one precision."""
    job.precision = precision
    node, graph = bench.node(precision), graphs.get(name)
    warm, count = bench.counts
    job.warm_up(warm)
    timed = time_phases(job, count)
    row: dict[str, Any] = {
        "batch": job.inputs[0].shape[0],
        "step_seconds": timed["step_seconds"],
        "phases": {phase: {"seconds": seconds} for phase, seconds in timed["phases"].items()},
        "memory": {"measured_bytes": timed["peak_bytes"], "bytes_before": job.bytes_before},
    }
    for phase, times in row["phases"].items():
        times["roofline_seconds"] = roofline_seconds(graph.phase(phase), node)
    for phase in ("forward", "backward"):
        row["phases"][phase]["parts"] = time_parts(job, graph, node, phase, max(3, count // 2))
    try:
        for phase, by_kind in time_kinds(job).items():
            row["phases"][phase]["busy_seconds"] = sum(by_kind.values()) or None
            row.setdefault("kinds", {})[phase] = by_kind
    except Exception as error:
        row["kinds_failed"] = f"{type(error).__name__}: {error}"[:200]
    if job.cuda:
        for phase, seconds in time_host(job, max(3, count // 2)).items():
            row["phases"][phase]["host_seconds"] = seconds
    try:
        seen = graphs.get(name, precision == "bf16" and name != "seq2seq")
        row["memory"] |= {"graph": seen.name} | against(estimated_bytes(bench, seen), timed["peak_bytes"])
    except Exception as error:
        row["memory"]["estimate_failed"] = f"{type(error).__name__}: {error}"[:200]
    return {precision: row}


def time_phases(job: Job, count: int) -> dict[str, Any]:
    """Medians over steps that follow each other without waiting, and the most bytes allocated meanwhile."""
    job.wait()
    if job.cuda:
        torch.cuda.reset_peak_memory_stats()
    rows = [job.step(job.now) for _ in range(count + 1)]
    job.wait()
    spans = [[job.between(a, b) for a, b in itertools.pairwise(row)] for row in rows[1:]]
    steps = [job.between(before[0], after[0]) for before, after in itertools.pairwise(rows)]
    return {
        "step_seconds": statistics.median(steps),
        "phases": {phase: statistics.median(span[i] for span in spans) for i, phase in enumerate(PHASES)},
        "peak_bytes": torch.cuda.max_memory_allocated() if job.cuda else None,
    }


def time_host(job: Job, count: int) -> dict[str, float]:
    """What the host takes to launch each phase while the device has nothing else to do."""
    spent: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(count):
        for phase, call in phase_calls(job):
            job.wait()
            begin = time.perf_counter()
            call()
            spent[phase].append(time.perf_counter() - begin)
    job.wait()
    return {phase: statistics.median(seconds) for phase, seconds in spent.items()}


def phase_calls(job: Job) -> list[tuple[str, Callable[[], Any]]]:
    """The phases of one step, to be called one after another."""
    held: list[torch.Tensor] = []
    job.optimizer.zero_grad()
    calls = (lambda: held.append(job.forward()), lambda: held.pop().backward(), job.optimizer.step)
    return list(zip(PHASES, calls, strict=True))


def time_parts(job: Job, graph: ModelGraph, node: Node, phase: str, count: int) -> list[dict[str, Any]]:
    """Median seconds between the moments at which a module begins (forward) or a gradient is complete (backward)."""
    chosen = choose_marks(graph, phase, node, PARTS)
    wanted = chosen[1:] if phase == "forward" else chosen[:-1]
    rows = []
    with marked(job, phase, wanted) as seen:
        for _ in range(count):
            seen.clear()
            moments = job.step(job.now)
            rows.append((moments[PHASES.index(phase)], dict(seen), moments[PHASES.index(phase) + 1]))
        job.wait()
    kept: list[str] = []
    for name in wanted:
        # What the device runs in another order than the graph, or not at all, is no border.
        if all(name in seen and (not kept or job.between(seen[kept[-1]], seen[name]) >= 0) for _, seen, _ in rows):
            kept.append(name)
    names = [chosen[0], *kept] if phase == "forward" else [*kept, chosen[-1]]
    borders = [[begin, *(seen[name] for name in kept), end] for begin, seen, end in rows]
    return [
        {
            "variable": name,
            "seconds": statistics.median(job.between(row[i], row[i + 1]) for row in borders),
            "roofline_seconds": roofline_seconds(run, node),
        }
        for i, (name, run) in enumerate(zip(names, split(graph, phase, names), strict=True))
    ]


@contextmanager
def marked(job: Job, phase: str, variables: list[str]) -> Iterator[dict[str, Any]]:
    """A dictionary that fills with the moments at which the variables are reached."""
    seen: dict[str, Any] = {}
    handles = []
    parameters = dict(job.model.named_parameters())

    def noting(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if name not in seen:
                seen[name] = job.now()

        return note

    for name in variables:
        if phase == "forward":
            owner = job.model.get_submodule(name.rpartition(".")[0])
            handles.append(owner.register_forward_pre_hook(noting(name)))
        else:
            handles.append(parameters[name].register_post_accumulate_grad_hook(noting(name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def time_kinds(job: Job) -> dict[str, dict[str, float]]:
    """Seconds for which kernels of each kind of operator ran in each phase of one step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.cuda else [])]
    with profile(activities=activities) as profiler:
        for phase, call in phase_calls(job):
            with record_function(f"offbeat.{phase}"):
                call()
                job.wait()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CPU]
    ranges = {event.name: event.time_range for event in events if event.name.startswith("offbeat.")}
    found: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
    for phase in PHASES:
        inside = ranges[f"offbeat.{phase}"]
        for event in events:
            spent = event.self_device_time_total if job.cuda else event.self_cpu_time_total
            if spent > 0 and event.name not in ranges and inside.start <= event.time_range.start < inside.end:
                kind = "optimizer" if phase == "optimizer" else kind_of(event.name)
                found[phase][kind] = found[phase].get(kind, 0.0) + spent / 1e6
    return found


def warm_up_profiler(bench: Bench) -> None:
    """The first use sets up the device's tracing, which takes seconds."""
    matrix = torch.ones(64, 64, device=bench.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.cuda else [])]
    try:
        with profile(activities=activities):
            (matrix @ matrix).sum().item()
    except RuntimeError as error:
        bench.result["failed"]["profiler"] = str(error)[:200]


def kind_of(name: str) -> str:
    """The kind of what the profiler calls 'aten::mm', as a graph's operators have it."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None) if name.startswith("aten::") else None
    return "other" if packet is None else kinds.kind_of(getattr(packet, packet.overloads()[0]))


def plan_for(bench: Bench, graph: ModelGraph, **changes: Any) -> Any:
    """The plan of one device for a graph, with changes of the plain strategy."""
    cluster = ClusterSpec.homogeneous(nodes=1, device=bench.kind)
    strategy = offbeat.build_strategy("all_reduce", graph, cluster).model_copy(update=changes)
    return offbeat.lower(graph, cluster, strategy)


def estimated_bytes(bench: Bench, graph: ModelGraph, **changes: Any) -> int:
    return peak_memory(plan_for(bench, graph, **changes), 0, runtime="torch").total


def predicted_seconds(bench: Bench, graph: ModelGraph, **changes: Any) -> float:
    return offbeat.simulate(plan_for(bench, graph, **changes), memory=False).iteration_time


def against(estimated: int, measured: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"estimated_bytes": estimated}
    return row | ({"relative_error": estimated / measured - 1} if measured else {})


def measure_recompute(bench: Bench, graphs: Graphs, name: str) -> dict[str, Any]:
    """A step in bf16 without and with every block recomputed, and what replay says of both."""
    job = Job(bench, name)
    job.precision = "bf16"
    paths = block_paths(job, name)
    warm, count = bench.counts
    job.warm_up(warm)
    plain = time_phases(job, count)
    apply_memory_strategy(job.model, Strategy(recompute=paths), None)
    job.warm_up(warm)
    recomputed = time_phases(job, count)
    row: dict[str, Any] = {"precision": "bf16", "blocks": len(paths), "plain": plain, "recomputed": recomputed}
    row["seconds_ratio"] = recomputed["step_seconds"] / plain["step_seconds"]
    if bench.cuda:
        row["bytes_ratio"] = recomputed["peak_bytes"] / plain["peak_bytes"]
    times = AcceleratorTimes.from_dict(bench.result).step(name, "bf16")
    timed = on_device(graphs.get(name), bench.node("bf16"), times)
    seconds = [predicted_seconds(bench, timed, recompute=changed) for changed in ((), paths)]
    held = [estimated_bytes(bench, graphs.get(name, True), recompute=changed) for changed in ((), paths)]
    row["predicted"] = {
        "plain_seconds": seconds[0],
        "recomputed_seconds": seconds[1],
        "seconds_ratio": seconds[1] / seconds[0],
        "plain_bytes": held[0],
        "recomputed_bytes": held[1],
        "bytes_ratio": held[1] / held[0],
    }
    return row


def measure_fusion(bench: Bench, graphs: Graphs, name: str) -> dict[str, Any]:
    """A step in bf16 without and with every block compiled, and the gain that fewer bytes moved would give."""
    job = Job(bench, name)
    job.precision = "bf16"
    regions = tuple((path,) for path in block_paths(job, name))
    warm, count = bench.counts
    job.warm_up(warm)
    plain = time_phases(job, count)
    torch.compiler.reset()
    apply_memory_strategy(job.model, Strategy(fusion=regions), None)
    begin = time.monotonic()
    job.warm_up(warm)
    compiling = time.monotonic() - begin
    fused = time_phases(job, count)
    graph = graphs.get(name)
    rooflines = [predicted_seconds(bench, graph, fusion=changed) for changed in ((), regions)]
    return {
        "precision": "bf16",
        "plain": plain,
        "compiled": fused,
        "compile_seconds": compiling,
        "seconds_ratio": fused["step_seconds"] / plain["step_seconds"],
        "predicted_seconds_ratio": rooflines[1] / rooflines[0],
    }


def measure_recorder(bench: Bench, name: str) -> dict[str, Any]:
    """Steps in bf16 with a recorder and without, in turns."""
    job = Job(bench, name)
    job.precision = "bf16"
    rounds, steps = (3, 3) if bench.options.quick else (7, 15)
    job.warm_up(bench.counts[0])
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(rounds):
        seconds["off"].append(timed_run(job, steps, lambda: None))
        with tempfile.TemporaryDirectory() as folder, offbeat.Recorder(folder) as recorder:
            seconds["on"].append(timed_run(job, steps, recorder.step))
    off, on = (statistics.median(seconds[key]) for key in ("off", "on"))
    return {"precision": "bf16", "off_seconds": off, "on_seconds": on, "overhead": on / off - 1, "rounds": seconds}


def timed_run(job: Job, steps: int, after: Callable[[], None]) -> float:
    """Seconds of a step, after two that do not count."""
    for number in range(steps + 2):
        if number == 2:
            job.wait()
            begin = time.perf_counter()
        job.step(lambda: None)
        after()
    job.wait()
    return (time.perf_counter() - begin) / steps


def block_paths(job: Job, name: str) -> tuple[str, ...]:
    listing = BLOCKS[name]
    return tuple(f"{listing}.{index}" for index in range(len(job.model.get_submodule(listing))))


def batch_of(name: str, scale: float) -> int | None:
    return BATCH[name] if scale == 1 else None


def device_kind(device: torch.device) -> str:
    """The catalogue's name of the device, such as 'H200'."""
    if device.type == "cpu":
        return "cpu"
    words = torch.cuda.get_device_name().replace("-", " ").split()
    return next((word for word in words if find_device(word) is not None), words[-1])


def rounded(value: Any) -> Any:
    """Floats to four digits, so that the file stays small."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def summary(value: Any) -> Any:
    """A result without its long lists."""
    if isinstance(value, dict):
        return {key: summary(each) for key, each in value.items() if key not in ("parts", "kinds", "rounds")}
    return value


def measure_models(bench: Bench, graphs: Graphs, name: str, precisions: tuple[str, ...]) -> None:
    jobs: list[Job] = []
    for precision in precisions:

        def work(precision: str = precision) -> dict[str, Any]:
            if not jobs:
                jobs.append(Job(bench, name))
            return measure_model(bench, graphs, jobs[0], name, precision)

        bench.piece("models", name, work, label=f"{name}.{precision}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="file for the results, written after each piece")
    parser.add_argument("--seconds", type=float, default=330, help="after which no further piece is begun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a small scale, few models and few steps")
    parser.add_argument("--models", nargs="+", choices=list(BATCH))
    options = parser.parse_args()
    options.models = options.models or list(QUICK_MODELS if options.quick else BATCH)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench = Bench(options)
    graphs = Graphs(bench, options.models)
    warm_up_profiler(bench)
    graphs.settle()
    bench.result["started_after_seconds"] = round(time.monotonic() - bench.began, 1)
    for name in (name for name in options.models if name != LAST):
        measure_models(bench, graphs, name, PRECISIONS)
    blocked = [name for name in BLOCKS if name in options.models]
    for name in blocked:
        bench.piece("recompute", name, lambda name=name: measure_recompute(bench, graphs, name))
    for name in (name for name in RECORDED if name in options.models):
        bench.piece("recorder", name, lambda name=name: measure_recorder(bench, name))
    for name in blocked[: 1 if options.quick else None]:
        bench.piece("op_fusion", name, lambda name=name: measure_fusion(bench, graphs, name), COMPILE_SECONDS)
    if LAST in options.models:
        measure_models(bench, graphs, LAST, ("bf16",))
    bench.result["total_seconds"] = round(time.monotonic() - bench.began, 1)
    bench.write()
    print(json.dumps({key: bench.result[key] for key in ("failed", "skipped", "total_seconds")}))


if __name__ == "__main__":
    main()
