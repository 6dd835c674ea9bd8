"""Print a status line every few steps: step time, exposed communication, predicted against measured, strategy.

    monitor = offbeat.Monitor(model, every=20, tensorboard="runs/")

A step lasts from one training forward to the first one after an optimizer's step, so work between two steps counts as
well. Communication is exposed while this rank waits for it. Offbeat's engine reports its waits in the last steps of
each period only, because reporting every collective has a cost; DDP's own counters are read once per period. For other
jobs only the step time is known. Only rank 0 measures and prints.
"""

import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, TextIO

import orjson
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from offbeat.arguments import checked
from offbeat.errors import OffbeatError
from offbeat.plan import Task
from offbeat.timeline import Kind, Timeline
from offbeat.timeline.observer import covered
from offbeat.torch_private import ddp_counters, sample_ddp
from offbeat.units import format_seconds, quote

log = logging.getLogger("offbeat")

SAMPLED_STEPS = 2
"""Steps of each period in which the engine reports to the monitor."""
STEADY_STEPS = 10
"""Steps with one plan before a recording begins: the engine rebuilds its order after steps 4 and 8."""
RECORDED_STEPS = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurements over one period of steps; None where unknown."""

    step: int
    """Steps since the monitor started."""
    step_seconds: float
    """Median over the period."""
    exposed_seconds: float | None = None
    """Time per step this rank waited for communication."""
    network_seconds: float | None = None
    """Time per step a collective of this rank was in flight."""
    predicted_seconds: float | None = None
    strategy: str = ""

    @property
    def prediction_error(self) -> float | None:
        """How much longer measured steps are than predicted: 0.03 is 3%."""
        return self.step_seconds / self.predicted_seconds - 1 if self.predicted_seconds else None


def describe(reading: Reading) -> str:
    """The reading as one line."""
    parts = [f"step {reading.step}: {format_seconds(reading.step_seconds)}"]
    if reading.exposed_seconds is not None:
        share = reading.exposed_seconds / reading.step_seconds
        parts.append(f"exposed communication {format_seconds(reading.exposed_seconds)} ({share:.0%})")
    if reading.network_seconds is not None:
        parts.append(f"network busy {format_seconds(reading.network_seconds)}")
    if reading.prediction_error is not None:
        parts.append(f"predicted {format_seconds(reading.predicted_seconds or 0)} ({reading.prediction_error:+.1%})")
    if reading.strategy:
        parts.append(reading.strategy)
    return "offbeat  " + ", ".join(parts)


class Monitor(AbstractContextManager["Monitor"]):
    """Watches `model` until `close()`; construct it on every rank, after `distribute` or DDP and before training.

    `predicted` is the expected step time: seconds, a Timeline from `offbeat.simulate`, or "measure": rank 0 then
    records a few steps of Offbeat's engine and replays them, once per plan, which takes seconds. `readings` keeps all
    readings.
    """

    @checked
    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 20,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        predicted: float | Timeline | Literal["measure"] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        if every < 1:
            raise OffbeatError(f"every: {quote(every)} is not a number of steps, 1 or more")
        self.model = model
        self.every = every
        self.measures = predicted == "measure"
        if isinstance(predicted, Timeline):
            predicted = predicted.iteration_time
        elif isinstance(predicted, float | int) and not predicted > 0:
            raise OffbeatError(f"predicted: {quote(predicted)} is not a number of seconds above 0")
        self.predicted_seconds = None if predicted is None or predicted == "measure" else float(predicted)
        self.readings: list[Reading] = []
        self.steps = 0
        self.spent_seconds = 0.0
        """Total time spent by the monitor itself."""
        self._seconds: list[float] = []
        self._since = 0.0
        self._made = 0
        """Optimizer steps of jobs without Offbeat's engine, which counts its own."""
        self._counted: tuple[int, int] | None = None
        self._sample = _Sample()
        self._measured: Any = None
        """The engine whose step is predicted."""
        self._measuring: Generator[None, None, None] | None = None
        self._handles: list[Any] = []
        self._writer: Any = None
        self._stream = stream or sys.stderr
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise OffbeatError("tensorboard is not installed: run pip install 'offbeat[tensorboard]'") from None
            self._writer = SummaryWriter(str(tensorboard))
        self._handles = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]
        if isinstance(model, DistributedDataParallel):
            sample_ddp(model, every)

    def close(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._engine is not None:
            self._sample.end(self._engine, 0.0)
        if self._measuring is not None:
            self._measuring.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _engine(self) -> Any:
        return getattr(getattr(self.model, "_offbeat", None), "engine", None)

    def _optimizer_stepped(self, *_: Any) -> None:
        self._made += 1

    def _forward_begins(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        now = time.perf_counter()
        engine = self._engine
        count = (0, self._made) if engine is None else (id(engine), engine.steps)
        if count == self._counted:
            return
        first, self._counted = self._counted is None, count
        if not first:
            self._seconds.append(now - self._since)
            self._step_ended(engine)
        after = time.perf_counter()
        self.spent_seconds += after - now
        # A report must not look like a longer step.
        self._since = after

    def _step_ended(self, engine: Any) -> None:
        self.steps += 1
        place = self.steps % self.every
        if engine is not None:
            self._sample.end(engine, self._seconds[-1])
        if place == 0:
            self._show(self._reading(engine))
            self._seconds.clear()
        if engine is None:
            return
        if self.measures and engine is not self._measured:
            if self._measuring is not None:
                self._measuring.close()
            self._measured, self.predicted_seconds = engine, None
            self._measuring = self._measure(self.model._offbeat)
            engine.step_hooks.append(partial(next, self._measuring, None))
        if place >= self.every - SAMPLED_STEPS:
            self._sample.begin(engine)

    def _reading(self, engine: Any) -> Reading:
        exposed, network, strategy = None, None, ""
        seconds = median(self._seconds)
        if engine is not None:
            exposed, network = self._sample.per_step(seconds)
            self._sample = _Sample()
            strategy = f"{engine.plan.strategy.name} in {engine.mode} mode"
        elif isinstance(self.model, DistributedDataParallel):
            # Seconds per step by the nanosecond counters of DDP's reducer, averaged since its slower first steps.
            data, strategy = ddp_counters(self.model), "DDP"
            sent, hidden = (data.get(f"avg_backward_{name}_time", 0) for name in ("comm", "compute_comm_overlap"))
            if sent:
                exposed, network = (min(each / 1e9, seconds) for each in (max(0, sent - hidden), sent))
        return Reading(self.steps, seconds, exposed, network, self.predicted_seconds, strategy)

    def _measure(self, runtime: Any) -> Generator[None, None, None]:
        """Records steps of this rank once its plan has settled, resumed after each step, and predicts from them."""
        from offbeat.profile.recorder import MemoryRecorder

        for _ in range(STEADY_STEPS):
            yield
        while runtime.engine.reports.observer is not None:
            yield
        recorder = MemoryRecorder(runtime)
        # A single rank has no other clock to compare with.
        recorder._tick = list  # type: ignore[method-assign]
        with recorder:
            while recorder.steps <= RECORDED_STEPS:
                yield
                recorder.step()
            yield
        self.predicted_seconds = _predict(runtime, recorder.lines)

    def _show(self, reading: Reading) -> None:
        self.readings.append(reading)
        print(describe(reading), file=self._stream, flush=True)
        if self._writer is not None:
            for name in ("step_seconds", "exposed_seconds", "network_seconds", "predicted_seconds", "prediction_error"):
                value = getattr(reading, name)
                if value is not None:
                    self._writer.add_scalar(f"offbeat/{name}", value, reading.step)


class _Sample:
    """Observes the engine in the sampled steps (`offbeat.timeline.observer`)."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.sent: list[tuple[float, float]] = []
        self.seconds = 0.0
        """Total length of the observed steps."""

    def begin(self, engine: Any) -> None:
        """Observes the current step, unless a recorder does."""
        if engine.reports.observer is None:
            engine.reports.observer = self

    def end(self, engine: Any, seconds: float) -> None:
        """Stops observing; the observed step took `seconds`."""
        if engine.reports.observer is self:
            engine.reports.observer = None
            self.seconds += seconds

    def per_step(self, step_seconds: float) -> tuple[float | None, float | None]:
        """Seconds of waiting and of traffic in a step of `step_seconds` (observed ones may be longer)."""
        if not self.seconds:
            return None, None
        # A collective may still be in flight after the observed steps.
        sent = min(covered(self.sent), self.seconds)
        return self.waited / self.seconds * step_seconds, sent / self.seconds * step_seconds

    def communication(self, step: int, task: Task, queued: float, issued: float, finished: float) -> None:
        self.sent.append((issued, finished))

    def local(self, kind: Kind, messages: tuple[int, ...], start: float, end: float) -> None:
        if kind == "wait":
            self.waited += end - start


def _predict(runtime: Any, lines: list[dict[str, Any]]) -> float | None:
    """Predicted seconds of a step with the current plan, by replaying the recording; None if it cannot be replayed."""
    # Imported here because replay loads a compiler.
    from offbeat.profile.measure import profile_in_place
    from offbeat.simulate import step_seconds

    retimer = runtime.retimer
    link = None if retimer is None else (retimer.latency, retimer.per_byte)
    try:
        recorded = [orjson.loads(orjson.dumps(lines))]
        profile = profile_in_place(recorded, link, len(runtime.plan.replicas), runtime.plan.graph)
        return step_seconds(profile.plan, profile.costs)
    except Exception as error:
        # A job must not end because it could not be predicted.
        log.warning("offbeat shows no prediction, because the recorded steps cannot be replayed: %s", error)
        return None
