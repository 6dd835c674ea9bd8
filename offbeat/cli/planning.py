"""offbeat plan: model + cluster + strategy → what one step sends and keeps."""

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from offbeat.cli.app import Cluster, Json, Model, SavedStrategy, Scale, app
from offbeat.cli.catalogue import load_cluster
from offbeat.cli.show import print_facts, progress
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.graph import ModelGraph
    from offbeat.plan import Plan, Task
    from offbeat.strategy import Recipe, Strategy


@app.command(epilog="Example: offbeat plan bert_large --cluster B7 --strategy all_reduce --option chunk=32")
def plan(
    model: Model,
    cluster: Cluster,
    strategy: Annotated[str, Option(metavar="BUILDER|FILE", help="A builder or a strategy file.")] = "overlap",
    option: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help="An option of the builder.")] = None,
    scale: Scale = None,
    rank: Annotated[int | None, Option(min=0, help="Derive this rank's part alone.")] = None,
    output: SavedStrategy = None,
    as_json: Json = False,
) -> None:
    """Lower a strategy for a model on a cluster and show what it sends."""
    spec = load_cluster(cluster)
    options = _parse_options(option or ())
    loaded = read_strategy(strategy, options)
    graph = capture_model(model, scale)
    with progress("lowering"):
        from offbeat.plan import lower
        from offbeat.strategy import Recipe

        chosen = loaded.build(graph, spec) if isinstance(loaded, Recipe) else loaded
        lowered = lower(graph, spec, chosen, rank=rank)
    if output is not None:
        chosen.save(output)
    print_facts(summarise(lowered), as_json, parameters="{:,}".format)


def capture_model(text: str, scale: float | None) -> "ModelGraph":
    """The graph of a zoo model, or of what the named function returns; shows that it is under way."""
    with progress(f"capturing {text}"):
        if ":" not in text:
            from offbeat import zoo

            return zoo.capture(text, 1.0 if scale is None else scale)
        if scale is not None:
            raise OffbeatError(f"--scale: {scale} applies to models of the zoo, not to {text!r}")
        from offbeat.graph import capture

        return capture(*_call(text))


def summarise(plan: "Plan") -> dict[str, Any]:
    """A plan's traffic and memory as plain values; for one rank's part, only what that rank takes part in."""
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
    # As `python -m` has it; the installed command starts without the working directory.
    sys.path.insert(0, os.getcwd())
    module, _, function = text.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except OffbeatError:
        raise
    except Exception as error:
        raise OffbeatError(f"{text}: cannot build the model: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise OffbeatError(f"{text}: it returned {type(made).__name__}, not a pair (model, example_inputs)")
    return made


def read_strategy(text: str, options: Mapping[str, Any] | None = None) -> "Strategy | Recipe":
    """What a file holds, or the recipe of a builder's name, which alone takes options; anything else is refused."""
    from offbeat.strategy import builders, find_strategy

    if options and text not in builders():
        raise OffbeatError(f"--option {next(iter(options))}: {text!r} is no builder, and only builders take options")
    if text == "auto":
        raise OffbeatError("--strategy: 'auto' measures the network of a running job; name a builder instead")
    return find_strategy(text, "--strategy", **(options or {}))


def _parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Values are read as JSON where they are valid JSON (64, true), else as text (4MiB)."""
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
