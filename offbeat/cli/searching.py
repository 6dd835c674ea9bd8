"""offbeat optimize and run: find the best strategy for a recorded or captured job, and run a script with it."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from offbeat.cli.app import (
    CLUSTER,
    MODEL,
    SCRIPT_SETTINGS,
    STRATEGY,
    Json,
    Ranks,
    SavedStrategy,
    Scale,
    Script,
    Servers,
    Timeout,
    app,
)
from offbeat.cli.planning import build_model, capture_model, load_cluster, read_strategy
from offbeat.cli.show import exit_if_failed, print_json, progress, refuse_servers, require_script, stdout_to_stderr
from offbeat.errors import OffbeatError
from offbeat.launch import inside_job, run_python, servers_environment


@app.command(epilog="Example: offbeat optimize trace/ -o strategy.json")
def optimize(
    source: Annotated[
        str,
        Argument(
            help="A recording, a folder of torch.profiler traces of DDP, a zoo model, or pkg.mod:function.", **MODEL
        ),
    ],
    output: SavedStrategy = None,
    cluster: Annotated[str | None, Option(help="A preset or a file; default: as recorded.", **CLUSTER)] = None,
    memory_limit: Annotated[str | None, Option(metavar="BYTES", help="Per device, such as 16GiB; or auto.")] = None,
    time_limit: Annotated[float, Option(min=0.1, help="Seconds to search.")] = 30.0,
    workers: Annotated[
        int | None, Option(min=1, help="Number of ranks, if it differs from the number of traces.")
    ] = None,
    model: Annotated[
        str | None,
        Option(
            metavar="NAME|pkg.mod:function",
            help="The recorded model: names the gradients of torch.profiler traces; needed by --measure.",
            **MODEL,
        ),
    ] = None,
    scale: Scale = None,
    allow: Annotated[
        list[str] | None,
        Option(
            metavar="ENCODER",
            help="Allow lossy encoding: bf16, fp16, int8, topk:0.01, powersgd:4; or autocast: amp. Repeatable.",
        ),
    ] = None,
    measure: Annotated[
        bool, Option("--measure", help="Time the model's blocks here, plain, compiled and recomputed.")
    ] = False,
    *,
    as_json: Json = False,
) -> None:
    """Search for the strategy with the shortest replayed step, and show its gain and the reasons."""
    graph, spec, costs, named, notes, measured = _job(source, cluster, scale, workers, model, measure)
    if measure:
        graph, costs = _measured(graph, spec, costs, model or source, scale, allow or (), notes)
    with progress("searching", time_limit):
        from offbeat.search.explain import explain
        from offbeat.search.optimize import optimize as search
        from offbeat.search.optimize import recommend
        from offbeat.strategy.code import torch_code

        recipe = None
        if named:
            limits: dict[str, Any] = {"memory_limit": memory_limit, "time_limit": time_limit}
            best = search(graph, spec, costs=costs, allow=allow or (), **limits)
        else:
            recipe, best = recommend(graph, spec, costs, memory_limit)
            options = [f"{option}={value}" for option, value in recipe.options.items()]
            notes.append(
                "the traces do not contain parameter names, so only a builder is recommended: "
                f"{' '.join((recipe.builder, *options))}; --model adds the names"
            )
        explanation = explain(best, graph, spec, costs, **measured)
        code = "" if best.fsdp is None else torch_code(best)
    if output is not None:
        (recipe or best).save(output)
        if explanation.interval is not None and "trust" in measured:
            _expect(best, graph, spec.world_size, explanation, measured["trust"])
    if as_json:
        facts = {"output": None if output is None else str(output), "notes": notes} | ({"code": code} if code else {})
        print_json(explanation.to_dict() | facts | ({"recipe": recipe.model_dump()} if recipe else {}))
    else:
        print(explanation.text())
        for note in notes:
            print(f"Note: {note}.")
        if code:
            print(f"\nThe equivalent torch code, to run before creating the optimizer:\n\n{code}")


@app.command(
    epilog="Example: offbeat run --strategy strategy.json -n 4 train.py -- --epochs 1", context_settings=SCRIPT_SETTINGS
)
def run(
    script: Script,
    strategy: Annotated[str, Option(help="Strategy to use instead of 'auto'.", **STRATEGY)] = "auto",
    ranks: Ranks = 1,
    servers: Servers = 0,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Run a script that calls distribute(), here or as a rank under torchrun, with the given strategy."""
    require_script(script[0])
    if strategy != "auto":
        read_strategy(strategy)
        from offbeat.strategy import builders

        strategy = strategy if strategy in builders() else os.path.abspath(strategy)
    with tempfile.TemporaryDirectory(prefix="offbeat-run-") as folder:
        called = Path(folder) / "called"
        variables = {"OFFBEAT_STRATEGY": strategy, "OFFBEAT_CALLED": str(called)}
        variables |= servers_environment(range(ranks, ranks + servers))
        if inside_job():
            refuse_servers(servers)
            from offbeat.profile.attach import run_script

            os.environ.update(variables)
            run_script(script[0], script[1:])
        else:
            with stdout_to_stderr(as_json):
                code = run_python(script, ranks + servers, variables, timeout)
            if as_json:
                facts = {"script": script[0], "strategy": strategy, "ranks": ranks, "servers": servers}
                print_json(facts | {"exit_code": code, "distributed": called.exists()})
            exit_if_failed(code, timeout)
        if not called.exists():
            raise OffbeatError(
                f"{script[0]}: ended without calling offbeat.distribute, so the strategy {strategy!r} was not used"
            )


def _expect(best: Any, graph: Any, ranks: int, explanation: Any, trust: Any) -> None:
    """Notes what a saved strategy is predicted to take; a job that runs it adds what it took (`offbeat.online`)."""
    from offbeat.cost.outcomes import Expectation, job_of, name_of, remember

    predicted = explanation.kind, trust.device, job_of(graph), explanation.step_seconds, trust.noise
    remember(Expectation(name_of(best), ranks, *predicted))


def _measured(
    graph: Any, spec: Any, costs: Any, model: str, scale: float | None, allow: Sequence[str], notes: list[str]
) -> tuple[Any, Any]:
    """(graph, costs) with the times of the model's blocks and the allowed encoders on this machine."""
    with progress(f"timing the blocks of {model}"):
        import torch

        from offbeat.api import measure
        from offbeat.cost.measured import Costs

        built, inputs = build_model(model, scale)
        timed, known, problems = measure(graph, spec, costs or Costs(), built, inputs, allow)
        place = next(built.parameters()).device
    here = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    there = spec.device_of(spec.workers[0]).device
    notes += problems
    if here.lower() not in there.lower() and there.lower() not in here.lower():
        notes.append(f"blocks were timed on {here}; their gain on the cluster's {there} is an estimate")
    return timed, known


def _job(
    source: str, cluster: str | None, scale: float | None, workers: int | None, model: str | None, measure: bool
) -> tuple[Any, Any, Any, bool, list[str], dict[str, Any]]:
    """(graph, cluster, costs, whether variables have the model's names, notes, what was measured) of a recording or of
    a model."""
    if not Path(source).is_dir():
        if cluster is None:
            raise OffbeatError(f"--cluster: required, because {source!r} is not a recording")
        if workers is not None or model is not None:
            raise OffbeatError(f"--{'model' if workers is None else 'workers'}: {source!r} is not a recording")
        spec = load_cluster(cluster)
        return capture_model(source, scale), spec, None, True, [], {}
    recorded = any(Path(source).glob("rank*.jsonl"))
    if recorded and model is not None and not measure:
        raise OffbeatError(f"--model: the recording {source!r} has parameter names; --model is only for --measure")
    if measure and model is None:
        raise OffbeatError(f"--measure: {source!r} does not contain the model to time; name it with --model")
    graph = None if model is None or recorded else capture_model(model, scale)
    with progress("reading the traces"):
        from offbeat.profile.ddp_trace import load_ddp_profile
        from offbeat.profile.measure import load_profile
        from offbeat.profile.whatif import plan_known, replay_scale, resized, trust_in

        profile, named = (load_profile(source), True) if recorded else load_ddp_profile(Path(source), workers, graph)
    spec, costs = load_cluster(cluster) if cluster else profile.cluster, profile.costs
    notes = list(profile.timeline.notes)
    if workers is not None and cluster is None:
        before, (spec, costs) = spec.world_size, resized(spec, costs, workers)
        if workers != before:
            notes.append(
                f"the job had {before} ranks; the times of collectives of {workers} ranks come from ring formulas"
            )
    measured: dict[str, Any] = {"scale": replay_scale(profile)} if plan_known(profile) else {}
    measured |= {"trust": trust_in(profile), "changed": "link" if cluster else "same"}
    if spec.world_size != profile.cluster.world_size:
        measured["changed"] = "ranks"
    if "scale" in measured and spec is profile.cluster:
        measured["ran"] = profile.strategy, profile.step_seconds
    return profile.graph, spec, costs, named, notes, measured
