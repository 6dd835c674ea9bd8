"""What-ifs on a recorded job: how they are written, and that they follow the closed forms of rings."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from offbeat.cli import main
from offbeat.cluster import ClusterSpec, CollectiveTable, Node
from offbeat.cost.measured import CollectiveFit, Costs
from offbeat.errors import OffbeatError
from offbeat.plan import lower
from offbeat.plan.model import sent_per_byte
from offbeat.profile.calibrate import SURVEYED, cluster_of, device_figures, link_of, partitionings, slowest
from offbeat.profile.measure import Profile, _with_own_servers, load_profile
from offbeat.profile.whatif import costs_of_workers, parse_what_if, resized, scaled_fit, what_if, with_workers
from offbeat.report.advice import what_would_help
from offbeat.sharding.rescheduling import FineMesh
from offbeat.simulate import simulate, step_seconds
from offbeat.strategy import Encoder, Shard, Strategy, VariableConfig, build_strategy
from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import diagnose

LAYERS, ELEMENTS = 3, 500_000
BYTES = 4 * ELEMENTS
OVERHEAD, PER_BYTE = 2e-4, 1e-8
COMPUTE = 1e-3
STEPS = 9
LISTS = ("calls", "forward", "backward", "local", "communication")


def write_job(
    folder: Path,
    ranks: int = 2,
    job: str = "ddp",
    seconds: float = COMPUTE,
    syncs: Sequence[bool] = (True,),
    *,
    line_per_pass: bool = False,
    nodes: Sequence[str] = (),
) -> Path:
    """Traces as the recorder writes them: a chain of layers, an all-reduce of each gradient, one update.

    `syncs` has an entry for each pass of a step: whether its gradients are sent. With `line_per_pass` the training loop
    has called the recorder's step() after each of them. `nodes` names the node of each rank.
    """
    folder.mkdir(exist_ok=True)
    names = [f"{layer}.weight" for layer in range(LAYERS)]
    header = {
        "offbeat_trace": 2,
        "world": ranks,
        "backend": "gloo",
        "job": job,
        "machine": "one",
        "unix_seconds": 0.0,
        "clock_seconds": 0.0,
        "modules": [str(layer) for layer in range(LAYERS)],
        "parameters": [[name, [ELEMENTS], "float32"] for name in names],
        "gradients": names,
    }
    for rank in range(ranks):
        lines, now = [{**header, "rank": rank, "node": nodes[rank] if nodes else ""}], 0.0
        for step in range(STEPS):
            for place, sync in enumerate(syncs):
                last = place == len(syncs) - 1
                line, now = _pass(step * len(syncs) + place, now, seconds, names, ranks, sync=sync, update=last)
                if place and not line_per_pass:
                    lists = {key: [*lines[-1][key], *line[key]] for key in LISTS}
                    line = {**line, **lists, "begin": lines.pop()["begin"]}
                lines.append(line)
        (folder / f"rank{rank}.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    fit = CollectiveFit(OVERHEAD, 0.0, PER_BYTE)
    costs = Costs(collectives={("all_reduce", ranks): fit})
    (folder / "calibration.json").write_bytes(orjson.dumps({"costs": costs.to_dict()}))
    return folder


def _pass(
    number: int, begin: float, seconds: float, names: Sequence[str], ranks: int, *, sync: bool, update: bool
) -> tuple[dict[str, Any], float]:
    at = begin
    forward, backward, sent = [], [], []
    for layer in range(LAYERS):
        forward.append([layer, at, at])
        at += seconds
    forward_end, link = at, at
    for layer in reversed(range(LAYERS)):
        at += seconds
        backward.append([layer, at])
        if not sync:
            continue
        issued = max(at, link)
        # What precedes the bytes of the later ones passes while those before them are on the wire.
        link = issued + (0.0 if sent else OVERHEAD) + PER_BYTE * BYTES
        sent.append([LAYERS - 1 - layer, "all_reduce", names[layer], BYTES, ranks, at, issued, link])
    done = link if sync else at
    end = done + 1e-4 if update else done
    local = [["optimizer", [], done, end]] if update else []
    line = {"step": number, "begin": begin, "end": end, "calls": [[begin, forward_end]], "forward": forward}
    line |= {"backward": backward, "local": local, "communication": sent}
    return {**line, "complete": True, "updated": update}, end


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Two nodes of two ranks, whose links are ten times as fast within a node as between them."""
    profile = load_profile(write_job(tmp_path_factory.mktemp("nodes"), ranks=4, nodes=("a", "a", "b", "b")))
    kinds = ("all_reduce", "reduce", "broadcast")
    costs = replace(
        profile.costs,
        collectives={(kind, size): CollectiveFit(0.0, 0.0, PER_BYTE) for kind in kinds for size in (2, 4)},
        within={(kind, 2): CollectiveFit(0.0, 0.0, PER_BYTE / 10) for kind in kinds},
    )
    nodes = tuple(
        node.model_copy(update={"bandwidth": 1 / PER_BYTE, "intra_bandwidth": 10 / PER_BYTE})
        for node in profile.cluster.nodes
    )
    return replace(profile, costs=costs, cluster=profile.cluster.replace(nodes=nodes))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return load_profile(write_job(tmp_path_factory.mktemp("job")))


def seconds(profile: Profile, *changes: str) -> float:
    return what_if(profile, changes)[0].iteration_time


def network(participants: int = 2, bandwidth: float = 1.0, latency: float = 1.0) -> float:
    """Seconds of all collectives, by a ring's formulas from what two ranks measured."""
    steps, share = participants - 1, 2 * (participants - 1) / participants
    return OVERHEAD * steps * latency + LAYERS * PER_BYTE * BYTES * share / bandwidth


def test_unchanged_it_is_as_measured(profile: Profile) -> None:
    predicted, words = what_if(profile, ())
    assert words == "as measured"
    assert predicted.iteration_time == pytest.approx(profile.step_seconds, rel=0.01)
    assert predicted.source == "predicted"


@pytest.mark.parametrize("line_per_pass", [False, True], ids=["a line a step", "a line a pass"])
def test_a_step_that_accumulates_gradients(profile: Profile, tmp_path: Path, line_per_pass: bool) -> None:
    """Four passes of which only the last synchronises: what comes before it hides nothing and waits for nothing."""
    folder = write_job(tmp_path / "job", syncs=(False, False, False, True), line_per_pass=line_per_pass)
    found = load_profile(folder)
    assert (found.graph.passes, found.synchronisations) == (4, 1)
    assert len(found.graph.operators) == len(profile.graph.operators)
    assert found.step_seconds == pytest.approx(profile.step_seconds + 3 * 2 * LAYERS * COMPUTE, rel=1e-6)
    assert seconds(found) == pytest.approx(found.step_seconds, rel=0.01)
    for change in ("bandwidth=0.5x", "workers=8"):
        gained = seconds(found, change) - seconds(found)
        assert gained == pytest.approx(seconds(profile, change) - seconds(profile), rel=0.01)
    # Only the last backward pass hides what is sent, and only the first forward waits for it.
    overlapped = seconds(found, "strategy=wfbp", "bandwidth=0.1x")
    assert overlapped == pytest.approx(
        6 * LAYERS * COMPUTE + seconds(profile, "strategy=wfbp", "bandwidth=0.1x"), rel=0.01
    )
    fast = build_strategy("overlap", found.graph, found.cluster)
    plan = lower(found.graph, found.cluster, fast)
    assert step_seconds(plan, found.costs) == pytest.approx(simulate(plan, found.costs).iteration_time, rel=1e-6)


def test_a_job_that_synchronises_in_every_pass(profile: Profile, tmp_path: Path) -> None:
    """It is replayed as it was recorded; another strategy is predicted as if it had used no_sync()."""
    found = load_profile(write_job(tmp_path / "job", syncs=(True, True, True)))
    assert (found.graph.passes, found.synchronisations) == (3, 3)
    assert found.step_seconds == pytest.approx(3 * profile.step_seconds - 2e-4, rel=1e-6)
    assert seconds(found) == pytest.approx(found.step_seconds, rel=0.01)
    assert seconds(found, "bandwidth=0.5x") > 1.3 * found.step_seconds
    once = load_profile(write_job(tmp_path / "once", syncs=(False, False, True)))
    assert seconds(found, "strategy=ddp") == pytest.approx(seconds(once, "strategy=ddp"), rel=0.01)
    assert any("3 times a step; with model.no_sync()" in note for note in found.timeline.notes)
    with pytest.raises(OffbeatError, match="synchronises 3 times a step, which no plan does; add strategy=BUILDER"):
        what_if(found, ["workers=8"])


@pytest.mark.parametrize("job", ["ddp", "offbeat", "other"])
def test_one_rank_is_replayed_without_links(tmp_path: Path, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """DDP and Offbeat issue all-reduces among one rank, too, which say nothing of any link."""
    folder = write_job(tmp_path / "job", ranks=1, job=job)
    assert main(["replay", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 1
    assert abs(facts["replay_error"]) < 0.01
    assert not facts["diagnosis"]["communication_seen"]
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["optimize", str(folder), "--time-limit", "1"]) == 0


def base(profile: Profile) -> float:
    """What a step takes beside its collectives, which begin with the end of the first backward span."""
    return seconds(profile) - network()


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_bandwidth(profile: Profile, factor: float) -> None:
    expected = base(profile) + network(bandwidth=factor)
    assert seconds(profile, f"bandwidth={factor}x") == pytest.approx(expected, rel=0.01)


def test_latency(profile: Profile) -> None:
    assert seconds(profile, "latency=3x") == pytest.approx(base(profile) + network(latency=3.0), rel=0.01)


@pytest.mark.parametrize("workers", [2, 4, 64])
def test_workers(profile: Profile, workers: int) -> None:
    expected = base(profile) + network(workers)
    timeline, words = what_if(profile, [f"workers={workers}"])
    assert words == f"{workers} workers"
    assert timeline.iteration_time == pytest.approx(expected, rel=0.01)


def test_one_worker_sends_nothing(profile: Profile) -> None:
    assert seconds(profile, "workers=1") == pytest.approx(2 * LAYERS * COMPUTE + 1e-4, rel=0.05)


def test_half_the_bytes_on_the_wire(profile: Profile) -> None:
    expected = base(profile) + OVERHEAD + (network() - OVERHEAD) / 2
    assert seconds(profile, "wire=fp16") == pytest.approx(expected, rel=0.01)


def test_faster_and_slower_computing(profile: Profile) -> None:
    faster, slower = seconds(profile, "compute=2x"), seconds(profile, "straggler=1:2x")
    assert faster == pytest.approx(network() + (base(profile)) / 2, rel=0.02)
    # Rank 1's whole forward and the first of its backward come before the link has work.
    assert slower == pytest.approx(seconds(profile) + (LAYERS + 1) * COMPUTE, rel=0.02)


def test_another_strategy(profile: Profile, tmp_path: Path) -> None:
    assert seconds(profile, "strategy=wfbp") <= seconds(profile) * 1.001
    merged = Strategy(variables={f"{i}.weight": VariableConfig(shards=(Shard(group=0),)) for i in range(LAYERS)})
    merged.save(tmp_path / "s.json")
    assert seconds(profile, f"strategy={tmp_path}/s.json") > seconds(profile)


@pytest.mark.parametrize(
    ("nodes", "devices"),
    [(("a", "a", "b"), [2, 1]), (("a", "a", "a"), [3]), (("a", "b", "a"), [1, 1, 1]), (("", "", ""), [1, 1, 1])],
)
def test_ranks_that_share_a_node_are_known(nodes: tuple[str, ...], devices: list[int], tmp_path: Path) -> None:
    """Unless they do not follow each other, which no cluster file can say, or the trace is of an older version."""
    cluster = load_profile(write_job(tmp_path, ranks=3, nodes=nodes)).cluster
    assert [node.devices for node in cluster.nodes] == devices
    reached = cluster.ring_bandwidth(range(3))
    assert reached == pytest.approx(2 * (2 / 3) / PER_BYTE, rel=0.2)


def test_a_rank_without_a_trace_is_where_the_launcher_put_it(tmp_path: Path) -> None:
    folder = write_job(tmp_path, ranks=4)
    for rank, node in enumerate("aabb"):
        path = folder / f"rank{rank}.jsonl"
        first, rest = path.read_bytes().split(b"\n", 1)
        place = {"node": node, "local_rank": rank % 2, "local_world": 2}
        path.write_bytes(orjson.dumps(orjson.loads(first) | place) + b"\n" + rest)
    (folder / "rank3.jsonl").unlink()
    assert [node.devices for node in load_profile(folder).cluster.nodes] == [2, 2]


def test_links_within_and_between_nodes_change_apart(two_nodes: Profile) -> None:
    """Stations first add up what the ranks of their node send, and then exchange it with the servers."""
    stations = "strategy=hierarchical_ps"
    as_is = seconds(two_nodes, stations)
    both = seconds(two_nodes, stations, "bandwidth=2x")
    between = seconds(two_nodes, stations, "inter_bandwidth=2x")
    within = seconds(two_nodes, stations, "intra_bandwidth=2x")
    assert both < between < within < as_is
    assert as_is - within < 0.3 * (as_is - between)
    # DDP's ring is as slow as its slowest hop, whatever the others are.
    assert seconds(two_nodes, "intra_bandwidth=2x") == pytest.approx(seconds(two_nodes))
    assert seconds(two_nodes, "inter_bandwidth=2x") == pytest.approx(seconds(two_nodes, "bandwidth=2x"))
    both_faster = seconds(two_nodes, "inter_bandwidth=1000x", "intra_bandwidth=4x")
    assert seconds(two_nodes, "inter_bandwidth=1000x") > both_faster
    assert Costs.from_dict(two_nodes.costs.to_dict()) == two_nodes.costs
    advised = {row.about for row in what_would_help(two_nodes, diagnose(two_nodes.timeline)).rows}
    assert {"inter_bandwidth=2x", "intra_bandwidth=2x"} < advised


def test_ranks_of_one_node_that_are_left_talk_within_it(two_nodes: Profile) -> None:
    cluster, costs = resized(two_nodes.cluster, two_nodes.costs, 2)
    assert [node.devices for node in cluster.nodes] == [2]
    assert costs.collectives["all_reduce", 2].seconds_per_byte == PER_BYTE / 10
    assert [node.devices for node in resized(two_nodes.cluster, two_nodes.costs, 8)[0].nodes] == [2] * 4


def test_changes_add_up(profile: Profile) -> None:
    timeline, words = what_if(profile, ["bandwidth=2x", "workers=8", "straggler=0:1x"])
    assert words == "2x bandwidth, 8 workers, rank 0 computes 1x as long"
    assert timeline.iteration_time == pytest.approx(base(profile) + network(8, bandwidth=2.0), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "share", "steps"),
    [("all_reduce", 1.75 / 1.0, 7), ("reduce_scatter", 0.875 / 0.5, 7), ("all_gather", 7, 7), ("broadcast", 1, 7)],
)
def test_fits_scale_as_rings_do(kind: str, share: float, steps: int) -> None:
    scaled = scaled_fit(kind, CollectiveFit(1.0, 2.0, 4.0), 2, 8)
    assert scaled.seconds_per_byte == pytest.approx(4.0 * share)
    assert (scaled.overhead_seconds, scaled.latency_seconds) == pytest.approx((steps, 2.0 * steps))
    assert scaled_fit(kind, scaled, 8, 2).seconds_per_byte == pytest.approx(4.0)


def test_costs_of_more_workers_keep_what_was_measured() -> None:
    known = {("all_reduce", 4): CollectiveFit(1, 1, 1), ("all_reduce", 8): CollectiveFit(5, 5, 5)}
    costs = costs_of_workers(Costs(collectives=known, compute_scale={0: 2.0, 3: 3.0}), 4, 8)
    assert costs.collectives["all_reduce", 8] == CollectiveFit(5, 5, 5)
    fewer = costs_of_workers(costs, 8, 2)
    assert fewer.compute_scale == {0: 2.0}
    assert fewer.collectives["all_reduce", 2].seconds_per_byte == pytest.approx(
        5 * sent_per_byte("all_reduce", 2) / 1.75
    )


def test_clusters_of_more_and_fewer_workers() -> None:
    cluster = ClusterSpec.homogeneous(nodes=2, devices_per_node=4)
    assert len(with_workers(cluster, 16).nodes) == 4
    assert with_workers(cluster, 3).world_size == 3
    assert with_workers(ClusterSpec.local(4), 6).nodes[0].devices == 6
    with pytest.raises(OffbeatError, match="18 is not a multiple of the 4 ranks"):
        with_workers(cluster, 18)
    unequal = ClusterSpec(nodes=(Node(), Node(bandwidth="1Gbit/s")))
    with pytest.raises(OffbeatError, match="whose nodes differ"):
        with_workers(unequal, 3)


def test_a_job_without_a_plan_is_replayed_from_its_trace(tmp_path: Path) -> None:
    other = load_profile(write_job(tmp_path / "other", job="fsdp2"))
    assert seconds(other) == pytest.approx(other.step_seconds, rel=1e-6)
    assert seconds(other, "bandwidth=2x") < seconds(other)
    for change in ("workers=4", "wire=fp16"):
        with pytest.raises(OffbeatError, match="the plan of a job of kind 'fsdp2' is unknown; add strategy=BUILDER"):
            what_if(other, [change])
    assert seconds(other, "workers=4", "strategy=ddp") > 0
    with pytest.raises(OffbeatError, match="the trace does not tell the job's plan"):
        what_if(other.timeline, ["strategy=ddp"])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("bandwidth", "not one of bandwidth=2x"),
        ("speed=2x", "not one of"),
        ("bandwidth=", "not one of"),
        ("bandwidth=fast", "'fast' is not a factor above 0"),
        ("bandwidth=-2x", "'-2x' is not a factor above 0"),
        ("bandwidth=nanx", "'nanx' is not a factor above 0"),
        ("latency=infx", "'infx' is not a factor"),
        ("workers=0", "workers must be a number from 1"),
        ("workers=1e3", "workers must be a number"),
        ("workers=99999999999999999999", "workers must be a number"),
        ("straggler=2", "written RANK:FACTOR"),
        ("straggler=x:2", "written RANK:FACTOR"),
        ("straggler=1:0", "'0' is not a factor"),
        ("wire=fp8", "wire must be fp16, bf16, none"),
    ],
)
def test_badly_written_changes(text: str, part: str) -> None:
    with pytest.raises(OffbeatError, match=part):
        parse_what_if(text)


def test_changes_that_do_not_fit(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="what-if intra_latency: no two ranks share a node"):
        what_if(profile, ["intra_latency=2x"])
    with pytest.raises(OffbeatError, match="what-if inter_bandwidth: all ranks share one node"):
        what_if(load_profile(write_job(tmp_path, nodes=("a", "a"))), ["inter_bandwidth=2x"])
    with pytest.raises(OffbeatError, match="rank 5 is outside the job's ranks 0 to 1"):
        what_if(profile, ["straggler=5:2x"])
    with pytest.raises(OffbeatError, match="neither a builder"):
        what_if(profile, ["strategy=no_such"])
    with pytest.raises(OffbeatError, match="bandwidth is given twice"):
        what_if(profile, ["bandwidth=2x", "bandwidth=3x"])


def test_wire_leaves_what_takes_no_encoder(profile: Profile) -> None:
    from offbeat.profile.whatif import with_wire

    configs = {"0.weight": VariableConfig(shards=(Shard(staleness=1),))}
    changed = with_wire(Strategy(variables=configs), profile.graph, "bf16")
    assert changed.variables["0.weight"].shards[0].encoder == Encoder()
    assert changed.variables["1.weight"].shards[0].encoder == Encoder(name="bf16")


def test_replay_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_job(tmp_path / "job")
    target = tmp_path / "t.json.gz"
    assert main(["replay", str(folder), "--what-if", "bandwidth=2x", "-o", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert abs(facts["replay_error"]) < 0.01
    assert facts["speedup"] == pytest.approx(facts["replayed_step_seconds"] / facts["predicted_step_seconds"])
    assert facts["diagnosis"]["communication_seen"]
    assert Timeline.load(target).iteration_time == pytest.approx(facts["predicted_step_seconds"], rel=1e-6)
    assert main(["replay", str(folder)]) == 0
    assert "measured step of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("replay", "missing"), "missing: no such trace"),
        (("replay", "job", "--what-if", "bandwidth=0"), "is not a factor above 0"),
        (("replay", "job", "-o", "missing/t.json"), "missing/t.json"),
        (("replay", "empty"), "contains no traces"),
        (("profile", "missing.py", "-o", "trace"), "missing.py: no such script"),
        (("calibrate", "-o", "missing/c.yaml"), "no folder missing"),
        (("calibrate", "-n", "1"), "-n"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path / "job")
    (tmp_path / "empty").mkdir()
    assert main(arguments) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"job", "empty"}


def test_surveyed_clusters_tell_links_and_tables() -> None:
    rate, latency = 1e9, 1e-4
    measured = {}
    for groups in (((0, 1), (2, 3)), ((0, 1, 2, 3),), ((0, 2), (1, 3))):
        size = len(groups[0])
        steps, share = 2 * (size - 1), 2 * (size - 1) / size
        rows = [(b, steps * latency + share * b / rate, share * b / rate) for b in (2**12, 2**16, 2**20, 2**22)]
        measured["all_reduce", groups] = rows
    pairs, whole = measured["all_reduce", ((0, 1), (2, 3))], measured["all_reduce", ((0, 1, 2, 3),)]
    assert link_of(whole, 4) == pytest.approx((rate, latency), rel=0.01)
    spec = cluster_of(measured, (2, 2), {}, {})
    assert len(spec.nodes) == 2
    assert spec.nodes[0].bandwidth == pytest.approx(rate, rel=0.01)
    assert spec.nodes[1].intra_latency == pytest.approx(latency, rel=0.01)
    table = spec.table("all_reduce", ((0, 1), (2, 3)))
    assert table is not None
    assert table.seconds[-1] == pytest.approx(2 * latency + 2**22 / rate)
    assert ClusterSpec.from_yaml(spec.to_yaml()) == spec
    level = {("all_reduce", 2): whole}
    unequal = cluster_of(measured, (1, 3), {("all_reduce", 3): pairs}, level)
    assert [node.devices for node in unequal.nodes] == [1, 3]
    assert unequal.nodes[0].bandwidth == link_of(level["all_reduce", 2], 2)[0]
    assert slowest([[(1, 2.0, 3.0), (2, 2.0, 2.0)], [(1, 4.0, 1.0)]]) == [(1, 4.0, 3.0)]
    assert np.isfinite(spec.nodes[0].intra_bandwidth)
    fast = {"device": "NVIDIA H200", "memory": 150_000_000_000, "peak_flops": 8e14, "memory_bandwidth": 4e12}
    slow = {"device": "Unheard of", "memory": 2**30, "peak_flops": 1e12, "memory_bandwidth": 1e11}
    unequal = cluster_of(measured, (2, 2), {}, {}, [fast, fast | {"peak_flops": 7e14}, slow, slow])
    assert [(node.device, node.peak_flops) for node in unequal.nodes] == [("NVIDIA H200", 7e14), ("Unheard of", 1e12)]
    assert [node.memory for node in unequal.nodes] == [150_000_000_000, 2**30]
    assert unequal.nodes[0].bandwidth == spec.nodes[0].bandwidth
    assert ClusterSpec.from_yaml(unequal.to_yaml()) == unequal


def test_a_device_is_described_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(name="X", total_memory=2**30))
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    figures = device_figures(torch.device("cpu"), size=64, copied=2**16)
    assert (figures["device"], figures["memory"]) == ("X", 2**30)
    assert 1e6 < figures["peak_flops"] < 1e15
    assert 1e6 < figures["memory_bandwidth"] < 1e15


@pytest.mark.parametrize("world", [2, 4, 6, 8, 12])
def test_every_partitioning_that_the_frontier_asks_for_is_surveyed(world: int) -> None:
    found = partitionings(world)
    assert len(set(found)) == len(found)
    for groups in found:
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert len({len(group) for group in groups}) == 1
    if world == 4:
        assert found == [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)]
    # With a table for each, no time comes from the links: neither strided groups' nor all-to-all's.
    tables = tuple(
        CollectiveTable(collective=kind, groups=groups, sizes_bytes=(1024,), seconds=(1000.0 * (1 + place),))
        for kind in SURVEYED
        for place, groups in enumerate(found)
    )
    mesh = FineMesh(ClusterSpec.homogeneous(nodes=world).replace(tables=tables))
    axes = range(len(mesh.factors))
    for some in (some for count in axes for some in combinations(axes, count + 1)):
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            assert mesh.seconds(kind, some, 1024.0) >= 1000.0


def test_a_server_receives_from_as_many_as_there_are() -> None:
    """Straight to it among up to eight ranks; beyond that along a chain, whose links each carry a message once."""
    fit = CollectiveFit(OVERHEAD, 0.0, PER_BYTE)
    costs = Costs(collectives={("reduce", 3): fit, ("all_reduce", 3): fit}, straight=True)
    more = costs_of_workers(costs, 3, 5)
    assert more.straight
    assert more.collectives["reduce", 5] == CollectiveFit(OVERHEAD, 0.0, 2 * PER_BYTE)
    assert more.collectives["all_reduce", 5] == scaled_fit("all_reduce", fit, 3, 5)
    many = costs_of_workers(costs, 3, 33)
    assert not many.straight
    assert many.collectives["reduce", 33] == CollectiveFit(32 * OVERHEAD, 0.0, PER_BYTE / 2)


@pytest.mark.parametrize("factor", [1.7, 2.0])
def test_a_jobs_own_servers_correct_what_was_calibrated(tmp_path: Path, factor: float) -> None:
    """Its links are slower than calibration found them, which its own reduces and broadcasts show."""
    names = [f"{layer}.weight" for layer in range(LAYERS)]
    folder = write_job(tmp_path, job="offbeat")
    config = VariableConfig(shards=(Shard(synchronizer="parameter_server", placement=(0,)),))
    strategy = Strategy(variables=dict.fromkeys(names, config))
    profile = load_profile(folder)
    plan = lower(profile.graph, profile.cluster, strategy)
    fits = {(kind, 2): CollectiveFit(OVERHEAD, 0.0, PER_BYTE) for kind in ("reduce", "broadcast")}
    calibrated = Costs(collectives=fits, straight=True)
    slower = replace(
        calibrated, collectives={key: replace(fit, seconds_per_byte=factor * PER_BYTE) for key, fit in fits.items()}
    )
    ran = simulate(plan, slower, memory=False)
    assert ran.iteration_time > 0.75 * factor * simulate(plan, calibrated, memory=False).iteration_time
    found = _with_own_servers(replace(profile, timeline=ran, strategy=strategy, costs=calibrated))
    # One pass ends at 0.999 of it: what is spent before the first byte does not grow with the factor.
    assert found.costs.collectives["reduce", 2].seconds_per_byte == pytest.approx(factor * PER_BYTE, rel=1e-5)
    assert found.costs.collectives["broadcast", 2].overhead_seconds == OVERHEAD
