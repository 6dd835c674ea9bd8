"""offbeat models, clusters, builders, plan and explain: what there is to choose from, and what a choice would do."""

import importlib
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from offbeat import units
from offbeat.cli.app import CLUSTER, MODEL, STRATEGY, Cluster, Json, Model, SavedStrategy, Scale, app
from offbeat.cli.show import print_facts, print_json, print_paragraphs, print_rows, progress, with_intervals
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.cluster import ClusterSpec
    from offbeat.graph import ModelGraph
    from offbeat.plan import Plan, Task
    from offbeat.strategy import Recipe, Strategy


@app.command(epilog="Example: offbeat models")
def models(as_json: Json = False) -> None:
    """List the models of the zoo with their parameters, trained tensors, and FLOPs per step for one rank's batch."""
    from offbeat import zoo

    rows = [
        {"model": name, "parameters": size.parameters, "tensors": size.tensors, "batch": size.batch, "step": size.flops}
        for name, size in zoo.MODELS.items()
    ]
    print_rows(rows, as_json, parameters="{:,}".format, step=lambda flops: units.format_flops(flops).removesuffix("/s"))


@app.command(epilog="Example: offbeat clusters B7 --yaml > cluster.yaml")
def clusters(
    cluster: Annotated[
        str | None, Argument(help="A preset or a cluster file.", **CLUSTER | {"metavar": "[NAME|FILE]"})
    ] = None,
    as_yaml: Annotated[bool, Option("--yaml", help="Print the cluster as a file.")] = False,
    as_json: Json = False,
) -> None:
    """List the cluster presets, or check and show one cluster."""
    from offbeat.cluster import ClusterSpec

    if cluster is None:
        if as_yaml:
            raise OffbeatError("--yaml prints one cluster: name a preset or a file")
        print_rows([_summary(ClusterSpec.preset(name)) for name in ClusterSpec.presets()], as_json)
        return
    spec = load_cluster(cluster)
    summary = _summary(spec) | {"digest": spec.digest}
    nodes = [
        {
            "node": node.name,
            "ranks": "-".join(map(str, sorted({ranks[0], ranks[-1]}))),
            "device": node.device,
            "memory": units.format_bytes(node.memory),
            "peak": units.format_flops(node.peak_flops),
            "bandwidth": units.format_bandwidth(node.bandwidth),
            "latency": units.format_seconds(node.latency),
            "inside": units.format_bandwidth(node.intra_bandwidth),
        }
        for node, ranks in zip(spec.nodes, map(spec.ranks_of, range(len(spec.nodes))), strict=True)
    ]
    if as_yaml:
        print(spec.to_yaml(), end="")
    elif as_json:
        print_json(summary | {"node_list": nodes})
    else:
        print_facts(summary)
        print()
        print_rows(nodes, as_json=False)


@app.command(epilog="Example: offbeat builders")
def builders(as_json: Json = False) -> None:
    """List the strategy builders, when to use each, and their options."""
    from offbeat.strategy import builders as names

    found = [{"builder": name, **builder_words(name)} for name in names()]
    if as_json:
        print_json(found)
        return
    for each in found:
        options = " ".join(f"{name}={value}" for name, value in each["options"].items())
        lines = [f"Use it {each['use']}.", each["summary"], *([f"Options: {options}"] if options else [])]
        print_paragraphs(each["builder"], lines)


@app.command(epilog="Example: offbeat plan bert_large --cluster B7 --strategy all_reduce --option chunk=32")
def plan(
    model: Model,
    cluster: Cluster,
    strategy: Annotated[str, Option(help="A builder or a strategy file.", **STRATEGY)] = "overlap",
    option: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help="An option of the builder.")] = None,
    scale: Scale = None,
    rank: Annotated[int | None, Option(min=0, help="Derive only this rank's part.")] = None,
    output: SavedStrategy = None,
    as_json: Json = False,
) -> None:
    """Show the predicted step time, traffic and memory of a strategy for a model on a cluster."""
    spec = load_cluster(cluster)
    options = _parse_options(option or ())
    loaded = read_strategy(strategy, options)
    graph = capture_model(model, scale)
    with progress("lowering"):
        from offbeat.plan import lower
        from offbeat.strategy import Recipe

        chosen = loaded.build(graph, spec) if isinstance(loaded, Recipe) else loaded
        lowered = lower(graph, spec, chosen, rank=rank)
    predicted: dict[str, Any] = {}
    if rank is None:
        with progress("replaying"):
            from offbeat.simulate import simulate

            timeline = simulate(lowered)
        from offbeat.cost.interval import UNMEASURED, Trust

        made = Trust.here(spec.device_of(0).device).interval(timeline.iteration_time, "model")
        predicted |= {"predicted_step_seconds": made.seconds, **made.fields("predicted_step"), "note": UNMEASURED}
        predicted["predicted_peak_memory_bytes"] = max(timeline.peak_memory)
    if output is not None:
        chosen.save(output)
    facts = predicted | summarise(lowered)
    print_facts(facts if as_json else with_intervals(facts), as_json, parameters="{:,}".format)


@app.command(epilog="Example: offbeat explain strategy.json --model resnet50 --cluster B7")
def explain(
    strategy: Annotated[str, Argument(help="A strategy file or a builder.", **STRATEGY)],
    model: Annotated[str | None, Option(help="A zoo model or pkg.mod:function, to predict the gain.", **MODEL)] = None,
    cluster: Annotated[str | None, Option(help="The cluster for that model.", **CLUSTER)] = None,
    scale: Scale = None,
    as_json: Json = False,
) -> None:
    """Describe a strategy in words and, with a model and a cluster, its gain and the decisions that matter."""
    from offbeat.strategy import Recipe, describe

    found = read_strategy(strategy)
    if (model is None) != (cluster is None):
        raise OffbeatError(f"--{'cluster' if cluster is None else 'model'}: needed to predict the gain")
    if model is None or cluster is None:
        words = (builder_words(found.builder)["summary"],) if isinstance(found, Recipe) else describe(found)
        name, made_for = (found.builder, "") if isinstance(found, Recipe) else (found.name, found.model)
        if as_json:
            print_json({"strategy": name, "model": made_for, "words": list(words)})
        else:
            print("\n".join([f"{name}, made for {made_for or 'any model'}:", *(f"- {each}" for each in words)]))
        return
    spec, graph = load_cluster(cluster), capture_model(model, scale)
    with progress("replaying the strategy, and without each of its decisions"):
        from offbeat.search.explain import explain as explained

        made = found.build(graph, spec) if isinstance(found, Recipe) else found
        gains, words = explained(made, graph, spec), describe(made)
    if as_json:
        print_json(gains.to_dict() | {"words": list(words)})
    else:
        print("\n".join([gains.text(), "What it does:", *(f"- {each}" for each in words)]))


def builder_words(name: str) -> dict[str, Any]:
    """What a builder makes, when to use it, and its options with their defaults."""
    # Each builder has a file named after it.
    build = importlib.import_module(f"offbeat.strategy.builders.{name}").build
    summary, _, rest = (inspect.getdoc(build) or "").partition("\n\n")
    use = next(
        (line.removeprefix("Use it ").rstrip(".") for line in rest.split("\n") if line.startswith("Use it ")), ""
    )
    options = {each.name: each.default for each in list(inspect.signature(build).parameters.values())[2:]}
    return {"use": use, "summary": " ".join(summary.split()), "options": options}


def load_cluster(text: str) -> "ClusterSpec":
    """Loads a cluster file if the text is a file or looks like a path, else a preset."""
    from offbeat.cluster import ClusterSpec

    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".json") or os.sep in text or path.is_file():
        return ClusterSpec.load(path)
    return ClusterSpec.preset(text)


def _summary(spec: "ClusterSpec") -> dict[str, Any]:
    kinds = Counter(node.device for node in spec.nodes for _ in range(node.devices))
    rates = sorted({node.bandwidth for node in spec.nodes})
    return {
        "cluster": spec.name,
        "nodes": len(spec.nodes),
        "ranks": spec.world_size,
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "bandwidth": ", ".join(units.format_bandwidth(rate) for rate in rates),
        "dollars_per_hour": spec.total_price_per_hour,
    }


def capture_model(text: str, scale: float | None) -> "ModelGraph":
    """The graph of a zoo model, or of the model that the named function returns; shows progress."""
    with progress(f"capturing {text}"):
        if ":" not in text:
            from offbeat import zoo

            return zoo.capture(text, 1.0 if scale is None else scale)
        if scale is not None:
            raise OffbeatError(f"--scale: {scale} applies to models of the zoo, not to {text!r}")
        from offbeat.graph import capture

        return capture(*_call(text))


def build_model(text: str, scale: float | None) -> tuple[Any, Any]:
    """(model, example inputs), allocated: a zoo model on this machine's device, or the named function's result."""
    if ":" in text:
        return _call(text)
    import torch

    from offbeat import zoo

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return zoo.build(text, 1.0 if scale is None else scale)


def summarise(plan: "Plan") -> dict[str, Any]:
    """A plan's traffic and memory as plain values; for one rank's part, only that rank's tasks."""
    graph, strategy = plan.graph, plan.strategy
    largest = max(plan.messages, key=lambda message: message.bytes)
    held, more = largest.variables[:3], len(largest.variables) - 3
    return {
        "model": graph.name,
        "captured_by": graph.source,
        "parameters": graph.parameter_count,
        "variables": len(graph.variables),
        "operators": len(graph.operators),
        "step_gigaflop": graph.flops / 1e9,
        "cluster": plan.cluster.name,
        "ranks": plan.cluster.world_size,
        "rank": plan.rank,
        "strategy": strategy.name,
        "digest": strategy.digest,
        "schedule": strategy.schedule.policy,
        "mode": plan.mode,
        "segments": len(plan.segments),
        "messages": dict(Counter(message.synchronizer for message in plan.messages)),
        "collectives": dict(Counter(task.kind for task in plan.communication)),
        "largest_message_bytes": largest.bytes,
        "largest_message_holds": ", ".join(held) + (f" and {more} more" if more > 0 else ""),
        "wire_bytes": sum(map(_received_bytes, plan.communication)),
        "busiest_ranks_send_bytes": round(plan.link_bytes),
        "parameter_bytes": graph.parameter_bytes,
        "gradient_bytes": sum(variable.bytes for variable in graph.gradient_order),
        "activation_bytes": round(sum(segment.activation_bytes for segment in plan.segments)),
    }


def _received_bytes(task: "Task") -> int:
    """Bytes that all participants of a collective receive together, by a ring or from rank to rank."""
    size = len(task.ranks)
    return round(task.link_bytes * size) if task.root is None else task.wire_bytes * (size - 1)


def _call(text: str) -> tuple[Any, Any]:
    # Like `python -m`: the installed command starts without the working directory.
    sys.path.insert(0, os.getcwd())
    module, _, function = text.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except OffbeatError:
        raise
    except Exception as error:
        raise OffbeatError(f"{text}: cannot build the model: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise OffbeatError(f"{text}: returned {type(made).__name__}, not a pair (model, example_inputs)")
    return made


def read_strategy(text: str, options: Mapping[str, Any] | None = None) -> "Strategy | Recipe":
    """The strategy in a file, or the recipe of a named builder; only builders take options."""
    from offbeat.strategy import builders, find_strategy

    if options and text not in builders():
        raise OffbeatError(f"--option {next(iter(options))}: {text!r} is not a builder, and only builders take options")
    if text == "auto":
        raise OffbeatError("--strategy: 'auto' measures the network of a running job; name a builder instead")
    return find_strategy(text, "--strategy", **(options or {}))


def _parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Values are parsed as JSON if they are valid JSON (64, true), otherwise kept as text (4MiB)."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise OffbeatError(f"--option: {pair!r} is not of the form KEY=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
