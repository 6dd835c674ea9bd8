"""Many hostile inputs of one kind → what became of them: python -m tests.fuzz.run --target strategy --count 100000

Input n of a seed is always the same, so a failure is repeated with `--first n --count 1`. It passes if every input is
accepted or refused with an OffbeatError of one line, none takes over 2 seconds of the processor or 10 on the clock
(other programs may hold the processor), and reading needs less than 1 GiB of memory beyond what the imported program
takes. One JSON object is printed; the exit code is 1 if anything failed.
"""

import argparse
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.targets import TARGETS, attempt

MOST_SECONDS = 2.0
HANG_SECONDS = 10.0
MOST_BYTES = 2**30


class Hang(BaseException):
    """An input took so long that it was given up."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="all of them if not given")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, for work in pieces")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = [
        fuzz(target, options.first, options.count, options.seed, options.seconds)
        for target in options.target or TARGETS
    ]
    print(json.dumps(results, indent=1))
    return 1 if any(result["failures"] for result in results) else 0


def fuzz(
    target: str, first: int, count: int, seed: int, seconds: float = float("inf"), memory: bool = True
) -> dict[str, Any]:
    """Reads `count` inputs; what became of them. `memory` limits this process's for good."""
    read, failures, slowest, slowest_input = Counter(), {}, 0.0, -1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        # The first inputs import and compile what reading needs; that is no input's fault.
        for number in range(3):
            _one(target, seed, -1 - number, Path(place))
        if memory:
            _limit_memory()
        for number in range(first, first + count):
            took, failure, said = _one(target, seed, number, Path(place))
            accepted = not said
            if not failure and took > MOST_SECONDS:
                failure, said = "too slow", f"took {took:.1f} s"
            read["failed" if failure else "accepted" if accepted else "refused"] += 1
            if failure:
                known = failures.setdefault(failure, {"times": 0, "first": number, "said": said})
                known["times"] += 1
            if took > slowest:
                slowest, slowest_input = took, number
            if time.perf_counter() - began > seconds:
                break
    return {
        "target": target,
        "seed": seed,
        "first": first,
        "inputs": sum(read.values()),
        "accepted": read["accepted"],
        "refused": read["refused"],
        "failed": read["failed"],
        "failures": failures,
        "slowest_seconds": round(slowest, 3),
        "slowest_input": slowest_input,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _one(target: str, seed: int, number: int, place: Path) -> tuple[float, str, str]:
    """Processor seconds, where something went wrong ('' if nothing did), and the text of the refusal or the error."""
    folder = place / "input"
    folder.mkdir()
    failure, said = "", ""
    began = time.process_time()
    signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        said = attempt(TARGETS[target], Random(f"{target}/{seed}/{number}"), folder)
    except (Exception, Hang) as error:
        failure, said = _where(error), " ".join(str(error).split())[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - began
    shutil.rmtree(folder)
    return took, failure, said


def _where(error: BaseException) -> str:
    """The exception's kind and the last lines of the package that it passed through: equal for equal bugs."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/offbeat/" in frame.filename]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:])]
    return " < ".join([type(error).__name__, *places])


def _hangs(*_: object) -> None:
    raise Hang


def _limit_memory() -> None:
    """Makes allocations fail that would take the process more than 1 GiB beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    sys.exit(main())
