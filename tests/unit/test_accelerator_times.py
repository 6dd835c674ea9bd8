"""Times measured on one accelerator, carried over to graphs, batches and devices."""

import json
from pathlib import Path

import pytest
from accelerator_times import (
    PHASES,
    AcceleratorTimes,
    choose_marks,
    on_cluster,
    on_device,
    precision_of,
    roofline_seconds,
    split,
)

from offbeat import OffbeatError, lower, simulate, zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.graph import ModelGraph
from offbeat.strategy import build_strategy

SECONDS = {"forward": 0.010, "backward": 0.020, "optimizer": 0.004}
H200 = ClusterSpec.homogeneous(nodes=1, device="H200")


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return zoo.capture("mlp", batch=64).with_optimizer("AdamW", 2)


def file_of(graph: ModelGraph, busy: float = 1.0, host: float = 0.0) -> dict:
    """What the benchmark would write had each part taken as long as the one before it and a bit."""
    node = H200.nodes[0]
    phases = {}
    for phase in PHASES:
        row = {
            "seconds": SECONDS[phase],
            "roofline_seconds": roofline_seconds(graph.phase(phase), node),
            "busy_seconds": SECONDS[phase] * busy,
            "host_seconds": SECONDS[phase] * host,
        }
        if phase != "optimizer":
            names = choose_marks(graph, phase, node, 4)
            # Marked, the phase took 10% longer.
            shares = [2 * (i + 1) / len(names) / (len(names) + 1) for i in range(len(names))]
            row["parts"] = [
                {
                    "variable": name,
                    "seconds": 1.1 * SECONDS[phase] * share,
                    "roofline_seconds": roofline_seconds(run, node),
                }
                for name, share, run in zip(names, shares, split(graph, phase, names), strict=True)
            ]
        phases[phase] = row
    step = {"batch": 64, "step_seconds": sum(SECONDS.values()), "phases": phases, "memory": {"measured_bytes": 1}}
    return {"device": "H200", "scale": 1.0, "models": {"mlp": {"bf16": step, "fp32": step}}}


def phase_seconds(graph: ModelGraph) -> dict[str, float]:
    return {phase: sum(op.seconds or 0.0 for op in graph.phase(phase)) for phase in PHASES}


@pytest.mark.parametrize(("busy", "host"), [(1.0, 0.2), (0.4, 0.95)])
def test_on_the_accelerator_itself_every_part_takes_what_was_measured(graph: ModelGraph, busy: float, host: float):
    step = AcceleratorTimes.from_dict(file_of(graph, busy, host)).step("mlp", "bf16")
    timed = on_device(graph, H200.nodes[0], step)
    assert phase_seconds(timed) == pytest.approx(SECONDS)
    for phase in ("forward", "backward"):
        parts = step.phases[phase].parts
        assert len(parts) > 1
        runs = split(timed, phase, [part.variable for part in parts])
        found = [sum(op.seconds or 0.0 for op in run) for run in runs]
        assert found == pytest.approx([part.seconds / 1.1 for part in parts])
    assert all(op.seconds is not None for op in timed.operators)


def test_a_device_with_half_the_throughput_takes_twice_as_long(graph: ModelGraph):
    node = H200.nodes[0]
    half = node.model_copy(
        update={"peak_flops": node.peak_flops / 2, "memory_bandwidth": node.memory_bandwidth / 2, "device": "generic"}
    )
    step = AcceleratorTimes.from_dict(file_of(graph)).step("mlp", "bf16")
    timed = on_device(graph, half, step)
    assert phase_seconds(timed) == pytest.approx({phase: 2 * seconds for phase, seconds in SECONDS.items()})


def test_a_faster_device_does_not_launch_faster(graph: ModelGraph):
    node = H200.nodes[0]
    fast = node.model_copy(
        update={"peak_flops": node.peak_flops * 10, "memory_bandwidth": node.memory_bandwidth * 10, "device": "generic"}
    )
    step = AcceleratorTimes.from_dict(file_of(graph, busy=1.0, host=0.7)).step("mlp", "bf16")
    timed = on_device(graph, fast, step)
    assert phase_seconds(timed) == pytest.approx({phase: 0.7 * seconds for phase, seconds in SECONDS.items()})


def test_what_only_waits_for_launches_does_not_grow_with_the_batch(graph: ModelGraph):
    larger = zoo.capture("mlp", batch=4096).with_optimizer("AdamW", 2)
    ratio = roofline_seconds(larger.phase("backward"), H200.nodes[0]) / roofline_seconds(
        graph.phase("backward"), H200.nodes[0]
    )
    computing = AcceleratorTimes.from_dict(file_of(graph, busy=1.0, host=0.1)).step("mlp", "bf16")
    launching = AcceleratorTimes.from_dict(file_of(graph, busy=0.01, host=1.0)).step("mlp", "bf16")
    grown = phase_seconds(on_device(larger, H200.nodes[0], computing))
    assert ratio > 2
    assert grown["backward"] > 1.5 * SECONDS["backward"]
    assert grown["optimizer"] == pytest.approx(SECONDS["optimizer"])
    idle = phase_seconds(on_device(larger, H200.nodes[0], launching))
    assert idle["backward"] < 1.05 * SECONDS["backward"] * max(1, 0.01 * ratio)


def test_replay_of_one_device_takes_the_measured_step(graph: ModelGraph):
    timed, scale = on_cluster(graph, H200, AcceleratorTimes.from_dict(file_of(graph)))
    plan = lower(timed, H200, build_strategy("all_reduce", timed, H200))
    assert scale == {}
    assert simulate(plan).iteration_time == pytest.approx(sum(SECONDS.values()), rel=1e-6)


def test_ranks_on_other_devices_have_a_factor(graph: ModelGraph):
    cluster = ClusterSpec.preset("B11")
    timed, scale = on_cluster(graph, cluster, AcceleratorTimes.from_dict(file_of(graph)))
    other = next(rank for rank in range(cluster.world_size) if cluster.device_of(rank).device == "T4")
    assert set(scale) == {r for r in range(cluster.world_size) if cluster.device_of(r).device == "T4"}
    # A T4 has 1.68 times an M60's fp32 peak and twice its memory bandwidth.
    assert 1 / 2.0 <= scale[other] <= 1 / 1.67
    plan = lower(timed, cluster, build_strategy("all_reduce", timed, cluster))
    slowest = sum(phase_seconds(timed)[phase] for phase in ("forward", "backward"))
    assert simulate(plan, Costs(compute_scale=scale)).iteration_time >= slowest


def test_presets_say_in_which_precision_their_peak_is():
    assert precision_of(ClusterSpec.preset("pace_10g").nodes[0]) == "fp32"
    assert precision_of(ClusterSpec.preset("dpro").nodes[0]) == "fp32"
    assert precision_of(ClusterSpec.preset("h100").nodes[0]) == "bf16"


@pytest.mark.parametrize("name", ["mlp", "vgg16", "gpt2", "seq2seq"])
def test_marks_cut_a_phase_into_a_few_runs_that_cover_it(name: str):
    graph = zoo.capture(name, scale=0.05)
    for phase in ("forward", "backward"):
        names = choose_marks(graph, phase, H200.nodes[0], 20)
        runs = split(graph, phase, names)
        assert 2 <= len(names) == len(set(names)) <= 20
        assert [op.name for run in runs for op in run] == [op.name for op in graph.phase(phase)]
        assert all(runs)


def test_a_file_round_trips_and_names_what_is_wrong(graph: ModelGraph, tmp_path: Path):
    path = tmp_path / "times.json"
    raw = file_of(graph)
    path.write_text(json.dumps(raw))
    assert AcceleratorTimes.load(path).step("mlp", "fp32").batch == 64
    with pytest.raises(OffbeatError, match="'vgg16' was not measured in bf16; measured were mlp in bf16"):
        AcceleratorTimes.load(path).step("vgg16", "bf16")
    raw["models"]["mlp"]["bf16"]["phases"]["forward"]["seconds"] = -1
    path.write_text(json.dumps(raw))
    with pytest.raises(OffbeatError, match=r"models\.mlp\.bf16: phases\.forward\.seconds"):
        AcceleratorTimes.load(path)
    del raw["models"]["mlp"]["bf16"]["phases"]["forward"]
    path.write_text(json.dumps(raw))
    with pytest.raises(OffbeatError, match="forward is missing"):
        AcceleratorTimes.load(path)
    path.write_text(json.dumps(raw | {"scale": 0.1}))
    with pytest.raises(OffbeatError, match=r"scale 0\.1, not at full size"):
        AcceleratorTimes.load(path)
    path.write_text("[]")
    with pytest.raises(OffbeatError, match="no 'device' and 'models'"):
        AcceleratorTimes.load(path)


def test_times_of_another_model_are_refused(graph: ModelGraph):
    times = AcceleratorTimes.from_dict(file_of(graph))
    other = zoo.capture("vgg16", scale=0.1)
    with pytest.raises(OffbeatError, match="is not of the measured model"):
        on_cluster(other, H200, times, model="mlp")
