"""Time calls on a device, apart from what the host takes to launch them.

A step on a GPU is as long as the slower of the two takes, and which one that is depends on all of the step, not on the
calls of one block. So each is timed while the other cannot delay it: launching while the device has nothing else to do,
and the device's work from when all of it has been launched (the device is held until then). Work on processors is done
as it is called: both are the same.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from offbeat.torch_private import hold_device

WARM_UP, LEAST_ROUNDS, MOST_ROUNDS = 2, 5, 40
ROUNDS_SECONDS = 0.5
"""How long calls are timed, once they have run so often."""
HELD = 1.5
"""How long a device is held, relative to what launching takes."""
CALIBRATION_CYCLES = 10_000_000

Result = TypeVar("Result")
Timer = Callable[[Callable[[], Any]], Any]
"""Calls a function, returns what it returns, and notes what that takes."""


class Lap(NamedTuple):
    """Seconds of one call."""

    host: float
    device: float


def time_laps(run: Callable[[Timer], Any], device: torch.device) -> list[Lap]:
    """What each of the calls takes that `run` makes through the timer it is given, always the same ones; medians."""
    for _ in range(WARM_UP):
        run(lambda call: call())
    began, rounds = time.perf_counter(), list[list[Lap]]()
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() - began < ROUNDS_SECONDS):
        host = _host_round(run, device)
        on_device = _device_round(run, device, host) if device.type == "cuda" else host
        rounds.append(list(map(Lap, host, on_device)))
    return [Lap(*(median(each) for each in zip(*laps, strict=True))) for laps in zip(*rounds, strict=True)]


def _host_round(run: Callable[[Timer], Any], device: torch.device) -> list[float]:
    spent: list[float] = []

    def lap(call: Callable[[], Any]) -> Any:
        wait_for(device)
        begin = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - begin)
        return result

    run(lap)
    return spent


def _device_round(run: Callable[[Timer], Any], device: torch.device, launching: Sequence[float]) -> list[float]:
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def lap(call: Callable[[], Any]) -> Any:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        hold_device(round(HELD * launching[len(marks)] * _cycles_per_second(device)))
        begin.record()
        result = call()
        end.record()
        marks.append((begin, end))
        wait_for(device)
        return result

    run(lap)
    return [begin.elapsed_time(end) * 1e-3 for begin, end in marks]


@cache
def _cycles_per_second(device: torch.device) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    hold_device(CALIBRATION_CYCLES)
    end.record()
    wait_for(device)
    return CALIBRATION_CYCLES / (begin.elapsed_time(end) * 1e-3)


def wait_for(device: torch.device) -> None:
    """Blocks the host until the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
