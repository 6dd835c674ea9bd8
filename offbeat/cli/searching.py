"""offbeat optimize and run: a recorded or captured job → the best strategy, and a script run by it."""

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from offbeat.cli.app import Json, Ranks, SavedStrategy, Scale, Timeout, app
from offbeat.cli.catalogue import load_cluster
from offbeat.cli.planning import capture_model, read_strategy
from offbeat.cli.show import exit_if_failed, print_json, progress, stdout_to_stderr
from offbeat.errors import OffbeatError


@app.command(epilog="Example: offbeat optimize trace/ -o strategy.json")
def optimize(
    source: Annotated[str, Argument(help="A recorded folder, a zoo model, or pkg.mod:function.")],
    output: SavedStrategy = None,
    cluster: Annotated[str | None, Option(metavar="NAME|FILE", help="A preset or a file; a recording has one.")] = None,
    memory_limit: Annotated[str | None, Option(metavar="BYTES", help="Per device, such as 16GiB.")] = None,
    time_limit: Annotated[float, Option(min=0.1, help="Seconds to search.")] = 30.0,
    scale: Scale = None,
    as_json: Json = False,
) -> None:
    """Search by replay for the strategy with the shortest step, and say what it gains and why."""
    graph, spec, costs = _job(source, cluster, scale)
    with progress("searching"):
        from offbeat.search.explain import explain
        from offbeat.search.optimize import optimize as search

        best = search(graph, spec, costs=costs, memory_limit=memory_limit, time_limit=time_limit)
        explanation = explain(best, graph, spec, costs)
    if output is not None:
        best.save(output)
    if as_json:
        print_json(explanation.to_dict() | {"output": None if output is None else str(output)})
    else:
        print(explanation.text())


@app.command(
    epilog="Example: offbeat run --strategy strategy.json -n 4 train.py -- --epochs 1",
    context_settings={"ignore_unknown_options": True},
)
def run(
    script: Annotated[list[str], Argument(metavar="SCRIPT [ARGS]...", help="A script that calls distribute().")],
    strategy: Annotated[str, Option(metavar="BUILDER|FILE", help="What 'auto' stands for.")] = "auto",
    ranks: Ranks = 1,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Run a training script, here or (under torchrun) as a rank of a job, with a strategy in the place of 'auto'."""
    from offbeat.profile.launch import inside_job, require_script, run_script

    require_script(script[0])
    if strategy != "auto" and read_strategy(strategy) is not None:
        strategy = os.path.abspath(strategy)
    with tempfile.TemporaryDirectory(prefix="offbeat-run-") as folder:
        called = Path(folder) / "called"
        variables = {"OFFBEAT_STRATEGY": strategy, "OFFBEAT_CALLED": str(called)}
        if inside_job():
            from offbeat.profile.attach import run_script as run_here

            os.environ.update(variables)
            run_here(script[0], script[1:])
        else:
            with stdout_to_stderr(as_json):
                code = run_script(script, ranks, variables, timeout)
            if as_json:
                facts = {"script": script[0], "strategy": strategy, "ranks": ranks, "exit_code": code}
                print_json(facts | {"distributed": called.exists()})
            exit_if_failed(code, timeout)
        if not called.exists():
            raise OffbeatError(
                f"{script[0]}: it ended without a call of offbeat.distribute, so the strategy {strategy!r} was not used"
            )


def _job(source: str, cluster: str | None, scale: float | None) -> tuple[Any, Any, Any]:
    """(graph, cluster, costs) of a recording or of a model."""
    if Path(source).is_dir():
        with progress("reading the traces"):
            from offbeat.profile.measure import load_profile

            profile = load_profile(source)
        return profile.graph, load_cluster(cluster) if cluster else profile.cluster, profile.costs
    if cluster is None:
        raise OffbeatError(f"--cluster: it is needed, because {source!r} is no recorded folder")
    spec = load_cluster(cluster)
    return capture_model(source, scale), spec, None
