"""offbeat emulate, demo and doctor: a cluster on one machine, and what this machine can do."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.app import Json, app
from offbeat.cli.show import print_facts, print_json, print_rows, progress, say, stdout_to_stderr
from offbeat.errors import OffbeatError


@app.command(epilog="Example: offbeat emulate --hosts 4 --bandwidth 1Gbit/s -- train.py --steps 10")
def emulate(
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The training script.")],
    hosts: Annotated[int, typer.Option(min=1, help="Emulated hosts.")] = 2,
    bandwidth: Annotated[str, typer.Option(help="Of every host's link, or one per host with commas.")] = "1Gbit/s",
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Processes on each host.")] = 1,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds after which the job is ended.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Run a script on an emulated cluster: hosts joined by links of limited bandwidth."""
    from offbeat.emulate.command import TIMED_OUT, emulate_command

    is_script = script[0].endswith(".py")
    if not (Path(script[0]).is_file() if is_script else script[0].startswith("-") or shutil.which(script[0])):
        raise OffbeatError(f"{script[0]}: there is no such {'script' if is_script else 'program'}")
    with stdout_to_stderr(as_json):
        code = emulate_command(_links(bandwidth, hosts), bandwidth, ranks_per_host, script, timeout)
    if code:
        say(f"the job ended with exit code {code}" + (f": the {timeout:g} s were up" if code == TIMED_OUT else ""))
    if as_json:
        print_json({"hosts": hosts, "ranks": hosts * ranks_per_host, "exit_code": code})
    raise typer.Exit(code)


@app.command(epilog="Example: offbeat demo --bandwidth 200Mbit/s")
def demo(
    model: Annotated[str, typer.Option(help="A zoo model.")] = "vgg16",
    scale: Annotated[float, typer.Option(help="Its size, above 0 and at most 1.")] = 0.15,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank.")] = 32,
    bandwidth: Annotated[str, typer.Option(help="Of each host's link.")] = "500Mbit/s",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps in each round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of DDP and Offbeat in turn.")] = 5,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds after which the demo is ended.")] = 240.0,
    as_json: Json = False,
) -> None:
    """Train one model on two emulated hosts with plain DDP and with Offbeat, and compare."""
    from offbeat.cli.demo import run_demo

    with progress("training on two emulated hosts, for about a minute"), stdout_to_stderr():
        result = run_demo(model, scale, batch, bandwidth, steps, rounds, timeout)
    if as_json:
        print_json(result)
    else:
        rows = result.pop("jobs")
        print_rows(rows, as_json=False)
        print()
        print_facts(result)
    if not result["losses_agree"]:
        raise OffbeatError(f"the losses of DDP and Offbeat differ by {result['largest_loss_difference']:.3g}")


@app.command(epilog="Example: offbeat doctor")
def doctor(as_json: Json = False) -> None:
    """Say what works on this machine."""
    from offbeat.cli.machine import examine

    with progress("looking around"):
        findings = examine()
    print_rows([{"what": f.what, "works": f.works, "verdict": f.verdict} for f in findings], as_json)
    raise typer.Exit(0 if all(finding.works for finding in findings if finding.required) else 1)


def _links(text: str, hosts: int) -> int | list[str]:
    """The hosts as the emulation takes them: their number, or the bandwidth of each."""
    rates = text.split(",")
    if len(rates) == 1:
        return hosts
    if len(rates) != hosts:
        raise OffbeatError(f"bandwidth: {len(rates)} are given for {hosts} hosts")
    return rates
