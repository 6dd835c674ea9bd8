"""offbeat emulate: run a script on a cluster emulated on this machine."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from offbeat.cli.app import SCRIPT_SETTINGS, Json, Script, app
from offbeat.cli.show import exit_if_failed, print_json, stdout_to_stderr
from offbeat.errors import OffbeatError
from offbeat.launch import Job, Shown, job_exit_code

if TYPE_CHECKING:
    from offbeat.emulate import Emulation


@app.command(
    epilog="Example: offbeat emulate --hosts 4 --bandwidth 1Gbit/s train.py --steps 10; put other programs after '--'",
    context_settings=SCRIPT_SETTINGS,
)
def emulate(
    script: Script,
    hosts: Annotated[int, Option(min=1, help="Emulated hosts.")] = 2,
    bandwidth: Annotated[str, Option(help="Bandwidth of every link, or one per host, comma-separated.")] = "1Gbit/s",
    ranks_per_host: Annotated[int, Option(min=1, help="Processes on each host.")] = 1,
    gpu: Annotated[
        bool,
        Option(
            "--gpu",
            help="All ranks share this machine's GPU (MPS) as device 0, and NCCL uses the emulated links; ranks "
            "share the GPU's speed and memory, and NVLink within a host is not emulated.",
        ),
    ] = False,
    timeout: Annotated[float, Option(min=0, help="End the job after this many seconds.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Run a script on an emulated cluster: hosts connected by links of limited bandwidth."""
    from offbeat.emulate import Emulation

    is_script = script[0].endswith(".py")
    if not (Path(script[0]).is_file() if is_script else script[0].startswith("-") or shutil.which(script[0])):
        raise OffbeatError(f"{script[0]}: no such {'script' if is_script else 'program'}")
    with stdout_to_stderr(as_json):
        emulation = Emulation(link_rates(bandwidth, hosts), bandwidth, ranks_per_host=ranks_per_host, gpu=gpu)
        code = run_shown(emulation, script, timeout)
    if as_json:
        print_json({"hosts": hosts, "ranks": hosts * ranks_per_host, "exit_code": code})
    exit_if_failed(code, timeout)


def run_shown(emulation: "Emulation", program: Sequence[str], timeout: float | None) -> int:
    """Starts an emulated cluster, runs a program on every rank, and prints each line as '[rank] line'.

    Returns 0, the exit code of the rank that failed first (128 + n if signal n ended it), or 124 on timeout. The
    other ranks are then stopped.
    """
    shown = Shown()
    try:
        with emulation:
            start = shown.started(partial(emulation.popen, program=program, master_port=emulation.new_port()))
            ends = Job(start, range(emulation.world_size), captured=False).run(timeout)
    finally:
        # Every process that could still write has ended with the emulation.
        shown.join()
    return job_exit_code(ends)


def link_rates(text: str, hosts: int) -> int | list[str]:
    """The `hosts` argument of `Emulation`: their number, or a list of bandwidths if the text has commas."""
    rates = text.split(",")
    if len(rates) == 1:
        return hosts
    if len(rates) != hosts:
        raise OffbeatError(f"bandwidth: {len(rates)} values for {hosts} hosts")
    return rates
