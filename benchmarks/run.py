"""Every benchmark that gives evidence, one after another → benchmarks/results/<name>.json and bench_run.json.

    python benchmarks/run.py [--only NAME ...] [--list]

`BENCHMARKS` says what runs, how, and for how long at the most. What a benchmark prints is checked and written whole or
not at all, with a `made` field that says when, where and with which command. One that fails or overruns keeps its old
file, is named at the end, and makes the exit status 1. `make bench` then writes docs/benchmarks.md.

Nothing else should run meanwhile. Benchmarks that need a GPU or hours are not run here; report.py says how they are
made. Where a short form of such a one runs here, its file has another name, so that the long form's stays.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any, cast

from offbeat import files
from offbeat.errors import OffbeatError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SUMMARY = "bench_run"
GRACE_SECONDS = 20.0
"""For a benchmark to take down its emulated hosts after it was told to stop."""
SHOWN_LINES = 3


@dataclass(frozen=True)
class Benchmark:
    """A program of this folder, as it is run."""

    name: str
    """Of its file under results/."""
    arguments: str
    limit_seconds: float
    """After which it is stopped, unless those before it left some of their time."""
    program: str = ""
    """Where it is not called like the file."""

    @property
    def command(self) -> list[str]:
        return [f"benchmarks/{self.program or self.name}.py", "--json", *self.arguments.split()]


BENCHMARKS = (
    Benchmark("search_speed", "--limit 10", 160),
    Benchmark("frontier_speed", "--growth", 90),
    Benchmark("pace_speed", "", 30),
    Benchmark("pace_testbed", "", 40),
    Benchmark("frontier_findings", "", 110),
    Benchmark("foundation", "", 60),
    Benchmark("memory_accuracy", "--device cpu", 50),
    Benchmark("replay_speed", "", 60),
    Benchmark("scaling", "", 80),
    Benchmark("peers", "", 460),
    Benchmark("frontier_accuracy", "", 330),
    Benchmark(
        "replay_accuracy_2_hosts",
        "--hosts 2 --strategy ddp --strategy overlap --strategy wfbp --strategy ps_load_balanced",
        660,
        "replay_accuracy",
    ),
    Benchmark("step_time", "--blocks 3 --regime balanced --model resnet --model transformer", 580),
    Benchmark(
        "auto_strategy",
        "--hosts 2 --compute real --model vgg --model transformer --regime network-bound --regime balanced",
        870,
    ),
)
"""The limits add up to an hour at the most. Last come those that measure anew what the machine's neighbours disturbed:
they get what the others have left."""


class Failed(Exception):
    """Why a benchmark gave no result."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--only", choices=names, action="append", help="only this benchmark; may be repeated")
    parser.add_argument("--list", action="store_true", help="show the commands and their limits, run nothing")
    options = parser.parse_args()
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in (options.only or names)]
    if options.list:
        for benchmark in chosen:
            print(f"{shown_command(benchmark):<120} at most {benchmark.limit_seconds:.0f} s")
        return 0
    RESULTS.mkdir(exist_ok=True)
    outcomes = run_all(chosen)
    keep_summary(outcomes)
    failed = [name for name, outcome in outcomes.items() if not outcome["ok"]]
    print(f"total {sum(outcome['seconds'] for outcome in outcomes.values()):.0f} s")
    if failed:
        print(f"failed, so that their files are as before: {', '.join(failed)}")
    return 1 if failed else 0


def run_all(benchmarks: list[Benchmark]) -> dict[str, dict[str, Any]]:
    """How each went. What one leaves of its time is for those after it."""
    outcomes: dict[str, dict[str, Any]] = {}
    left = 0.0
    for benchmark in benchmarks:
        left += benchmark.limit_seconds
        outcomes[benchmark.name] = run_and_keep(replace(benchmark, limit_seconds=left))
        left -= outcomes[benchmark.name]["seconds"]
    return outcomes


def run_and_keep(benchmark: Benchmark) -> dict[str, Any]:
    """Runs one, writes its file, and says how it went."""
    begin = time.perf_counter()
    reason = ""
    try:
        result = parsed(benchmark, run(benchmark))
        result["made"] = {**made(), "command": shown_command(benchmark)}
        result["made"]["seconds"] = round(time.perf_counter() - begin, 1)
        content = json.dumps(result, indent=1) + "\n"
        files.write_atomic(RESULTS / f"{benchmark.name}.json", content.encode(), "result")
    except (Failed, OffbeatError) as error:
        reason = str(error)
    seconds = round(time.perf_counter() - begin, 1)
    print(f"{benchmark.name:<20}{seconds:>7.1f} s  {'ok' if not reason else 'FAILED: ' + reason}", flush=True)
    return {"seconds": seconds, "ok": not reason, "arguments": benchmark.arguments, "reason": reason}


def run(benchmark: Benchmark) -> str:
    """What the program printed; what it says of its progress is passed on."""
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own: the whole of it is stopped when the time is up.
        with subprocess.Popen(
            [sys.executable, *benchmark.command],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE.parent,
            start_new_session=True,
        ) as started:
            late = threading.Event()
            alarm = threading.Timer(benchmark.limit_seconds, lambda: (late.set(), stop(started)))
            alarm.start()
            last: deque[str] = deque(maxlen=SHOWN_LINES)
            try:
                for line in cast(IO[str], started.stderr):
                    last.append(line.strip())
                    print(f"  {line}", end="", file=sys.stderr, flush=True)
            except BaseException:
                stop(started)
                raise
            finally:
                alarm.cancel()
        if late.is_set():
            raise Failed(f"it was stopped after {benchmark.limit_seconds:.0f} s")
        if started.returncode:
            raise Failed(f"exit status {started.returncode}: {' | '.join(last)}")
        output.seek(0)
        return output.read()


def stop(started: "subprocess.Popen[str]") -> None:
    """First politely, so that emulated hosts are taken down."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(started.pid, order)
        except ProcessLookupError:
            break
        try:
            started.wait(timeout=GRACE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue


def parsed(benchmark: Benchmark, output: str) -> dict[str, Any]:
    """The JSON object that a benchmark printed."""
    result = files.parse_json(output, benchmark.command[0], "result")
    if not isinstance(result, dict) or not result:
        raise Failed("it printed no JSON object")
    return result


def shown_command(benchmark: Benchmark) -> str:
    return " ".join(["python", *benchmark.command])


def keep_summary(outcomes: dict[str, dict[str, Any]]) -> None:
    """Adds these runs to what is known of earlier ones."""
    path = RESULTS / f"{SUMMARY}.json"
    earlier = files.read_json(path, "summary")["benchmarks"] if path.exists() else {}
    # Reasons are for whoever runs it; they may name folders of the machine.
    shown = {name: {key: of[key] for key in ("seconds", "ok", "arguments")} for name, of in outcomes.items()}
    benchmarks = {**earlier, **{name: {**of, "date": made()["date"]} for name, of in shown.items()}}
    order = [benchmark.name for benchmark in BENCHMARKS if benchmark.name in benchmarks]
    summary = {
        "benchmark": SUMMARY,
        **made(),
        "total_seconds": round(sum(benchmarks[name]["seconds"] for name in order), 1),
        "benchmarks": {name: benchmarks[name] for name in order},
    }
    files.write_atomic(path, (json.dumps(summary, indent=1) + "\n").encode(), "summary")


def made() -> dict[str, Any]:
    """When, on what machine and with which versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            "kernel": f"{platform.system()} {platform.release()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "offbeat", "numba")},
        },
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the benchmark under way ends too
    sys.exit(main())
