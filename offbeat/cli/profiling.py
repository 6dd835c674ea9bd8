"""offbeat profile, replay and calibrate: record a job, predict changes, and measure a cluster."""

import os
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from offbeat import units
from offbeat.cli.app import SCRIPT_SETTINGS, Json, Ranks, Script, Servers, Timeout, Trace, app
from offbeat.cli.show import (
    exit_if_failed,
    print_facts,
    print_json,
    progress,
    refuse_servers,
    require_folder,
    require_script,
    say,
    stdout_to_stderr,
    with_intervals,
)
from offbeat.errors import OffbeatError
from offbeat.launch import inside_job, run_python, servers_environment

RECORDED_FILES = ("rank*.jsonl", "calibration.json", "overhead.json")
"""The files of a recording, which a new one replaces."""


@app.command(epilog="Example: offbeat profile train.py -o trace/ -n 4 -- --epochs 1", context_settings=SCRIPT_SETTINGS)
def profile(
    script: Script,
    output: Annotated[Path, Option("-o", "--output", help="Folder for the traces.")] = Path("trace"),
    ranks: Ranks = 1,
    servers: Servers = 0,
    steps: Annotated[int, Option(min=1, help="Steps to record.")] = 20,
    plain_steps: Annotated[int, Option(min=0, help="Unrecorded steps before them, for warm-up and comparison.")] = 8,
    run_on: Annotated[bool, Option("--run-on", help="Let the script run to its end afterwards.")] = False,
    transactions: Annotated[bool, Option("--transactions", help="Also record every point-to-point message.")] = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Run a training script, here or as a rank under torchrun, and record what every rank does."""
    require_script(script[0])
    if inside_job():
        refuse_servers(servers)
        from offbeat.profile.attach import record_script

        if os.environ["RANK"] == "0":
            # The other ranks start recording only after they have connected to this one.
            clear_folder(output)
        record_script(script, output, steps, plain_steps, run_on, transactions)
        if os.environ["RANK"] == "0":
            print(f"recorded to {output}; run offbeat replay {output} to analyse it")
        return
    clear_folder(output)
    options = [str(output), str(steps), str(plain_steps), str(int(run_on)), str(int(transactions))]
    with stdout_to_stderr(as_json):
        named = servers_environment(range(ranks, ranks + servers))
        code = run_python(["-m", "offbeat.profile.attach", *options, *script], ranks + servers, named, timeout)
    exit_if_failed(code, timeout)
    print_facts(_recorded(output, ranks + servers), as_json, recorder_overhead="{:+.1%}".format)


@app.command(epilog="Example: offbeat replay trace/ --what-if bandwidth=2x --what-if workers=64")
def replay(
    trace: Trace,
    what_if: Annotated[
        list[str] | None,
        Option(
            metavar="CHANGE",
            help="bandwidth=2x, latency=0.5x (with inter_… or intra_…: only between or within nodes), compute=1.5x, "
            "workers=64, strategy=overlap, straggler=3:2x or wire=fp16; can be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None, Option("-o", "--output", help="Save the predicted timeline (.json, .json.gz) for Perfetto.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a recorded job, unchanged or with changes, and show where its time goes."""
    from offbeat.profile.whatif import parse_what_if
    from offbeat.timeline import Timeline
    from offbeat.timeline.diagnosis import diagnose

    changes = [parse_what_if(text) for text in what_if or ()]
    with progress("reading the traces"):
        from offbeat.profile.source import load_recording
        from offbeat.profile.whatif import kind_of, trust_in
        from offbeat.profile.whatif import what_if as predict

        recorded = load_recording(trace)
    with progress("replaying"):
        measured = recorded if isinstance(recorded, Timeline) else recorded.timeline
        same, _ = predict(recorded, ())
        result, words = predict(recorded, changes) if changes else (same, "")
        diagnosis = diagnose(measured if measured.marks.size else same)
        measured_seconds = diagnosis.step_seconds
        # Predictions are relative to the step that was measured, as on the pages.
        scale = measured_seconds / same.iteration_time
        predicted = diagnose(result.scaled(scale)) if changes else None
        trust = trust_in(recorded)
        replayed = trust.interval(same.iteration_time, "same")
        if measured.marks.size and measured.source != "predicted":
            trust.remember("same", same.iteration_time, measured_seconds)
    if output is not None:
        result.save(output)
    facts: dict[str, Any] = {
        "trace": str(trace),
        "ranks": len(measured.ranks),
        "measured_step_seconds": measured_seconds,
        "replayed_step_seconds": same.iteration_time,
        **replayed.fields("replayed_step"),
        "replay_error": same.iteration_time / measured_seconds - 1,
    }
    doubt = ""
    if changes:
        promised = trust.interval(scale * result.iteration_time, kind_of(changes))
        doubt = promised.doubt(measured_seconds)
        facts |= {
            "what_if": words,
            "predicted_step_seconds": promised.seconds,
            **promised.fields("predicted_step"),
            "speedup": same.iteration_time / result.iteration_time,
            "gain_inside_interval": promised.may_gain_nothing(measured_seconds),
        }
    if as_json:
        content = facts | {"notes": list(measured.notes), "diagnosis": diagnosis.to_dict()}
        print_json(content | ({"predicted_diagnosis": predicted.to_dict()} if predicted else {}))
        return
    print_facts(with_intervals(facts), replay_error="{:+.1%}".format, speedup=lambda times: f"{times:.2f}×{doubt}")
    print()
    print((predicted or diagnosis).text())


@app.command(epilog="Example: offbeat calibrate -o cluster.yaml -n 4")
def calibrate(
    output: Annotated[Path, Option("-o", "--output", help="The cluster file to write.")] = Path("cluster.yaml"),
    ranks: Annotated[int, Option("-n", "--ranks", min=2, help="Processes to start on this machine.")] = 2,
    timeout: Annotated[float, Option(min=0, help="Give up after this many seconds.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Measure the cost of collectives, on this machine or among the ranks of a torchrun job."""
    require_folder(output, "cluster")
    if inside_job():
        from offbeat.profile.calibrate import main as measure_here

        measure_here(str(output))
        if os.environ["RANK"] != "0":
            return
    else:
        with progress(f"measuring collectives among {ranks} ranks"), stdout_to_stderr(as_json):
            code = run_python(["-m", "offbeat.profile.calibrate", str(output)], ranks, timeout=timeout)
        if code:
            raise OffbeatError(f"{output}: not written, because a rank ended with exit code {code}")
    from offbeat.cluster import ClusterSpec

    spec = ClusterSpec.load(output)
    node, several = spec.nodes[0], len(spec.nodes) > 1
    facts = {
        "cluster": str(output),
        "nodes": len(spec.nodes),
        "ranks": spec.world_size,
        "bandwidth": units.format_bandwidth(node.bandwidth) if several else None,
        "latency_seconds": node.latency if several else None,
        "bandwidth_inside": units.format_bandwidth(node.intra_bandwidth) if node.devices > 1 else None,
        "latency_inside_seconds": node.intra_latency if node.devices > 1 else None,
        "tables": len(spec.tables),
    }
    print_facts(facts, as_json)


def clear_folder(folder: Path) -> None:
    """Makes the folder and removes what an earlier recording left in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in RECORDED_FILES:
            for path in folder.glob(pattern):
                path.unlink()
    except OSError as error:
        raise OffbeatError(f"{folder}: cannot write a trace there: {error.strerror}") from None


def _recorded(folder: Path, ranks: int) -> dict[str, Any]:
    """A summary of a recording, which also checks that it can be read."""
    from offbeat import files
    from offbeat.profile.attach import OVERHEAD_FILE
    from offbeat.profile.measure import load_profile
    from offbeat.profile.traces import read_traces

    traces, _ = read_traces(folder)
    loaded = load_profile(folder)
    overhead = None
    if (folder / OVERHEAD_FILE).exists():
        seconds = files.read_json(folder / OVERHEAD_FILE, "overhead")
        if seconds["plain_step_seconds"] and seconds["recorded_step_seconds"]:
            overhead = seconds["recorded_step_seconds"] / seconds["plain_step_seconds"] - 1
    for note in loaded.timeline.notes:
        say(f"warning: {note}")
    world, middle = traces[0].world, traces[0].steps[len(traces[0].steps) // 2]
    if world != ranks:
        say(f"warning: {ranks} processes were started, but the script's world size is {world}")
    return {
        "trace": str(folder),
        "job": loaded.job,
        "ranks": world,
        "steps": min(len(trace.steps) for trace in traces),
        "step_seconds": loaded.step_seconds,
        "passes_per_step": loaded.graph.passes,
        "recorder_overhead": overhead,
        "collectives_per_step": len(middle.communication),
        "communication_bytes": sum(row.bytes for row in middle.communication),
    }
