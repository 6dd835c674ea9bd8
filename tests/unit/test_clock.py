"""Moments of a GPU, with events that a pretended GPU reaches when it is told to."""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch

from offbeat.profile import recorder as recorder_module
from offbeat.profile.recorder import MemoryRecorder
from offbeat.timeline import clock as clocks
from offbeat.timeline.clock import DeviceClock, HostClock, clock_of, host_late_seconds, in_seconds


class PretendedGpu:
    """How many seconds it is behind the host."""

    def __init__(self) -> None:
        self.behind = 0.0

    def event(self, enable_timing: bool) -> "PretendedEvent":
        assert enable_timing
        return PretendedEvent(self)


class PretendedEvent:
    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = time.perf_counter() + self.gpu.behind

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(1e-4)

    def elapsed_time(self, other: "PretendedEvent") -> float:
        assert self.query()
        assert other.query()
        return (other.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    made = PretendedGpu()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(clocks.DeviceMoment, "unused", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    return made


def test_work_on_processors_is_timed_by_the_host() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)


def test_a_moment_is_when_the_gpu_comes_to_it(gpu: PretendedGpu) -> None:
    clock = DeviceClock(torch.device("cuda"))
    gpu.behind = 0.05
    moment = clock.now()
    assert not clock.reached(moment)
    clock.wait(moment)
    assert clock.reached(moment)
    assert clock.seconds(moment) == pytest.approx(moment.host + gpu.behind, abs=2e-3)


def test_moments_between_two_marks_are_placed_by_the_host(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "FINE_SECONDS", 1.0)
    clock = DeviceClock(torch.device("cuda"))
    first = clock.now()
    time.sleep(0.02)
    between = clock.about_now()
    assert isinstance(between, clocks.BetweenMarks)
    assert not clock.reached(between)
    time.sleep(0.02)
    # What the GPU did meanwhile took it three times as long as it took the host to ask for it.
    gpu.behind = 0.08
    last = clock.now()
    clock.wait(between)
    assert clock.reached(between)
    times = [clock.seconds(moment) for moment in (first, between, last)]
    assert times[1] - times[0] == pytest.approx((times[2] - times[0]) / 2, abs=0.02)
    assert in_seconds([between], clock) == [times[1]]


def test_waiting_for_a_moment_behind_the_last_mark_makes_another(gpu: PretendedGpu) -> None:
    clock = DeviceClock(torch.device("cuda"))
    clock.now()
    waited, asked = clock.about_now(), clock.about_now()
    clock.wait(waited)
    assert clock.reached(waited)
    clock.now()
    gpu.behind = 0.05
    assert clock.seconds(clock.about_now()) == pytest.approx(time.perf_counter(), abs=0.05)
    assert clock.seconds(asked) == pytest.approx(clock.seconds(waited), abs=0.05)


def test_marks_are_few_where_the_gpu_waits_for_its_host(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "FINE_SECONDS", 2e-3)
    monkeypatch.setattr(clocks, "COARSE_SECONDS", 10.0)
    clock = DeviceClock(torch.device("cuda"))

    def marked(behind: float) -> bool:
        gpu.behind = behind
        clock.now()
        time.sleep(4e-3)
        return isinstance(clock.about_now(), clocks.DeviceMoment)

    assert marked(behind=1.0)
    assert not marked(behind=0.0)


def test_times_stay_exact_far_from_the_first_moment(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events tell time in single precision, so a clock must not count from its first one for hours."""
    clock = DeviceClock(torch.device("cuda"))
    monkeypatch.setattr(clocks, "BASE_MILLISECONDS", 1.0)
    moments = []
    for _ in range(5):
        moments.append(clock.now())
        time.sleep(2e-3)
    seconds = [clock.seconds(moment) for moment in moments]
    assert clock.base is moments[-1]
    assert seconds == pytest.approx([moment.event.at for moment in moments], abs=1e-3)
    assert all(after > before for before, after in pairwise(seconds))


def test_a_gpu_that_has_caught_up_waits_for_its_host(gpu: PretendedGpu) -> None:
    clock = DeviceClock(torch.device("cuda"))
    marks: list[Any] = []
    for behind in (0.0, 0.0, 0.03):
        gpu.behind = behind
        marks.append(clock.now())
        time.sleep(0.01)
    clock.wait(marks[-1])
    # Of the two spans only the first ended with nothing left to do.
    assert host_late_seconds(marks, clock) == pytest.approx(marks[1].event.at - marks[0].event.at, abs=1e-3)
    assert in_seconds({"at": [marks[0], 1.0]}, clock)["at"][1] == 1.0


def test_a_recorder_writes_a_step_once_the_gpu_has_come_to_its_end(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "WAITING_STEPS", 1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = MemoryRecorder()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    with recorder:
        step()
        recorder.clock = DeviceClock(torch.device("cuda"))
        recorder.step()
        gpu.behind = 0.2
        began = time.perf_counter()
        step()
        recorder.step()
        assert [line["step"] for line in recorder.lines if "step" in line] == [0]
    lines = [line for line in recorder.lines if "step" in line]
    assert [line["step"] for line in lines] == [0, 1]
    assert all(at > began + 0.15 for _, at in lines[1]["backward"])


def test_the_event_of_a_forgotten_moment_marks_another(gpu: PretendedGpu) -> None:
    kept, forgotten = clocks.DeviceMoment(), clocks.DeviceMoment()
    event = forgotten.event
    del forgotten
    again, new = clocks.DeviceMoment(), clocks.DeviceMoment()
    assert again.event is event
    assert new.event not in (kept.event, event)
