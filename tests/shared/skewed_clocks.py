"""Recorded traces → the same as if ranks had read other clocks."""

import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import orjson


def skewed_copy(
    source: str | PathLike[str], target: str | PathLike[str], clock: Callable[[int], tuple[float, float]]
) -> None:
    """Copies traces as if each rank had read a clock of its own: `clock(rank)` is its (offset, drift) in seconds.

    Calibration and cluster are copied as they are.
    """
    shutil.copytree(source, target)
    for path in Path(target).glob("rank*.jsonl"):
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        header = lines[0]
        offset, drift = clock(int(header["rank"]))
        origin = float(header["clock_seconds"])
        header["machine"] += f" clock {header['rank']}"

        def read(at: float, origin: float = origin, offset: float = offset, drift: float = drift) -> float:
            return at + offset + drift * (at - origin)

        for line in lines[1:]:
            if "clock" in line:
                line["clock"] = [[peer, read(begin), read(end)] for peer, begin, end in line["clock"]]
                continue
            if "begin" not in line and "late" not in line:
                # Plans and footprints tell no times.
                continue
            for row in line.get("late", line.get("communication", ())):
                row[5:8] = map(read, row[5:8])
            if "late" in line:
                continue
            for key in ("begin", "end"):
                line[key] = read(line[key])
            line["calls"] = [[read(start), read(end)] for start, end in line["calls"]]
            line["forward"] = [[module, read(reached), read(begun)] for module, reached, begun in line["forward"]]
            line["backward"] = [[parameter, read(at)] for parameter, at in line["backward"]]
            line["local"] = [[kind, m, read(start), read(end)] for kind, m, start, end in line["local"]]
        path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
