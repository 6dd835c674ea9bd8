"""offbeat plan and explain: the predicted time, traffic and memory of a strategy, and its description in words."""

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from offbeat.cli.app import (
    Cluster,
    Json,
    Model,
    SavedStrategy,
    Scale,
    app,
    complete_cluster,
    complete_model,
    complete_strategy,
)
from offbeat.cli.catalogue import builder_words, load_cluster
from offbeat.cli.show import print_facts, print_json, progress, with_intervals
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.graph import ModelGraph
    from offbeat.plan import Plan, Task
    from offbeat.strategy import Recipe, Strategy


@app.command(epilog="Example: offbeat plan bert_large --cluster B7 --strategy all_reduce --option chunk=32")
def plan(
    model: Model,
    cluster: Cluster,
    strategy: Annotated[
        str, Option(metavar="BUILDER|FILE", help="A builder or a strategy file.", autocompletion=complete_strategy)
    ] = "overlap",
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
    strategy: Annotated[
        str, Argument(metavar="BUILDER|FILE", help="A strategy file or a builder.", autocompletion=complete_strategy)
    ],
    model: Annotated[
        str | None, Option(help="A zoo model or pkg.mod:function, to predict the gain.", autocompletion=complete_model)
    ] = None,
    cluster: Annotated[
        str | None, Option(metavar="NAME|FILE", help="The cluster for that model.", autocompletion=complete_cluster)
    ] = None,
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
