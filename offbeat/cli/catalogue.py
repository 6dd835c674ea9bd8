"""offbeat models, clusters and builders: lists to choose from."""

import importlib
import inspect
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from offbeat import units
from offbeat.cli.app import Json, app, complete_cluster
from offbeat.cli.show import print_facts, print_json, print_paragraphs, print_rows
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.cluster import ClusterSpec


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
        str | None, Argument(metavar="[NAME|FILE]", help="A preset or a cluster file.", autocompletion=complete_cluster)
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


def count_parameters(name: str, scale: float, batch: int | None = None, **options: Any) -> dict[str, Any]:
    """The size of a zoo model, which is not allocated."""
    import torch

    from offbeat import zoo

    with torch.device("meta"):
        model, example_inputs = zoo.build(name, scale, batch, **options)
    parameters = list(model.parameters())
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "variables": sum(parameter.requires_grad for parameter in parameters),
        "parameter_bytes": sum(parameter.numel() * parameter.itemsize for parameter in parameters),
        "batch": example_inputs[0].shape[0],
    }


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
