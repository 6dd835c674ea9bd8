"""offbeat frontier: model + cluster → the time/memory frontier over all engines, or the point asked for."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from offbeat import units
from offbeat.cli.app import Cluster, Json, Model, Scale, app
from offbeat.cli.planning import capture_model, load_cluster
from offbeat.cli.show import print_facts, print_json, print_rows, progress, with_intervals
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.cost.interval import Trust
    from offbeat.search.frontier.find import ModelFrontier
    from offbeat.search.frontier.model import FrontierPoint

_SHOWN = 12


@app.command(epilog="Example: offbeat frontier bert_large --cluster tensoropt --mini-time --memory 16GiB -o s.json")
def frontier(  # noqa: PLR0917 - Typer makes one option of each
    model: Model,
    cluster: Cluster,
    mini_time: Annotated[bool, Option("--mini-time", help="The fastest that fits in the memory.")] = False,
    mini_parallelism: Annotated[bool, Option("--mini-parallelism", help="The fewest devices where it fits.")] = False,
    profile: Annotated[str | None, Option(metavar="N,N,…", help="The fastest for each number of devices.")] = None,
    engine: Annotated[
        list[str] | None, Option(help="Only replicated, sharded, fsdp or split; can be repeated.")
    ] = None,
    memory: Annotated[str | None, Option(help="Memory of each device, such as 16GiB; default: its own.")] = None,
    margin: Annotated[float, Option(help="Share of the memory to leave free.")] = 0.05,
    price: Annotated[float | None, Option(min=0, help="Dollars per device and hour.")] = None,
    devices: Annotated[int | None, Option(min=1, help="Use only this many devices, the first ones.")] = None,
    scale: Scale = None,
    plot: Annotated[Path | None, Option(help="Draw the frontier here, as .svg or .html.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="Save the frontier or the strategy here.")] = None,
    as_json: Json = False,
) -> None:
    """Find the frontier of time and memory over all ways to run a training step: replicas, sharded updates, FSDP2,
    recomputation, micro-batches, operators that are split over devices."""
    if mini_time + mini_parallelism + (profile is not None) > 1:
        raise OffbeatError("--mini-time, --mini-parallelism and --profile exclude each other")
    counts = _counts(profile) if profile is not None else ()
    spec = load_cluster(cluster)
    limit = memory if memory is not None else min(node.memory for node in spec.nodes)
    units.parse_bytes(limit, "--memory")
    graph = capture_model(model, scale)
    from offbeat.cost.interval import UNMEASURED, Trust
    from offbeat.search.frontier.find import find_frontier, profile_devices

    trust = Trust.here(spec.device_of(0).device)
    if profile is not None:
        with progress("tracking a frontier for each number of devices"):
            options: Any = {"engines": engine or None, "margin": margin, "price_per_device_hour": price}
            rows = profile_devices(graph, spec, counts, limit, **options)
        shown: list[dict[str, Any]] = []
        for row in rows:
            used = round(row.point.memory_bytes) if row.point else None
            name = row.point.name if row.point else None
            best = {"devices": row.devices, **_time(trust, row.point), "memory_bytes": used, "engine": name}
            shown.append(best | {"dollars_per_step": row.dollars_per_step})
        print_rows(shown if as_json else list(map(with_intervals, shown)), as_json)
        if not as_json:
            print(UNMEASURED)
        return
    with progress("tracking the frontier"):
        chosen: Any = engine or None
        found = find_frontier(graph, spec, engines=chosen, devices=devices, margin=margin)
    if plot is not None:
        with progress("drawing"):
            found.plot(plot)
    if mini_time or mini_parallelism:
        _one(found, trust, mini_parallelism, limit, output, as_json)
        return
    if output is not None:
        found.save(output)
    _all(found, trust, as_json)


def _one(
    found: "ModelFrontier", trust: "Trust", fewest: bool, limit: str | int, output: Path | None, as_json: bool
) -> None:
    from offbeat.cost.interval import UNMEASURED

    devices = found.devices
    if fewest:
        with progress("searching for the fewest devices"):
            chosen = found.min_devices(limit)
        devices, point = chosen.devices, chosen.point
    else:
        point = found.point_within(limit)
    if output is not None and point.strategy is not None:
        point.strategy.save(output)
    facts = {**found.about, "devices": devices, **_facts(trust, point), "note": UNMEASURED}
    print_facts(facts if as_json else with_intervals(facts), as_json)


def _all(found: "ModelFrontier", trust: "Trust", as_json: bool) -> None:
    from offbeat.cost.interval import UNMEASURED

    turning = found.turning_point
    rows = [{**_facts(trust, point), "turning_point": point is turning} for point in found.points]
    notes = [*dict.fromkeys(found.notes), UNMEASURED]
    if as_json:
        print_json({**found.about, "points": rows, "notes": notes})
        return
    step = max(1, math.ceil(len(rows) / _SHOWN))
    shown = [row for index, row in enumerate(rows) if index % step == 0 or row["turning_point"] or row is rows[-1]]
    print_facts(found.about)
    print()
    print_rows(list(map(with_intervals, shown)), as_json=False)
    print("\n".join(notes))


def _time(trust: "Trust", point: "FrontierPoint | None") -> dict[str, float | None]:
    """The predicted step and its interval."""
    if point is None:
        return dict.fromkeys(("time_seconds", "time_low_seconds", "time_high_seconds"))
    made = trust.interval(point.time_seconds, "model")
    return {"time_seconds": made.seconds, **made.fields("time")}


def _facts(trust: "Trust", point: "FrontierPoint") -> dict[str, Any]:
    return {
        "memory_bytes": round(point.memory_bytes),
        **_time(trust, point),
        "compute_seconds": point.compute_seconds,
        "network_seconds": point.network_seconds,
        "engine": point.name,
    }


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise OffbeatError(f"--profile: {text!r} is not a list of device counts such as 2,4,8,16")
    return tuple(int(part) for part in parts)
