"""A training job → a line every so many steps: step time, exposed communication, predicted against measured, strategy.

    monitor = offbeat.Monitor(model, every=20, tensorboard="runs/")

A step lasts from one training forward to the first one after an optimizer's step, so whatever is between two steps
counts as well. Communication is exposed while this rank stands still for it. Offbeat's engine tells of its waits in
the last steps of each period only, because being told of every collective costs something; DDP's own counters are read
once per period. Of other jobs the step time alone is known. Only rank 0 looks and speaks.
"""

import logging
import os
import time
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Literal, TextIO

import orjson
import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from offbeat.errors import OffbeatError
from offbeat.plan import Task
from offbeat.timeline import Kind, Timeline
from offbeat.timeline.observer import covered
from offbeat.units import format_seconds, quote

log = logging.getLogger("offbeat")

SAMPLED_STEPS = 2
"""Steps of each period in which the engine reports to the monitor."""
STEADY_STEPS = 10
"""The engine rebuilds its order after steps 4 and 8; a recording begins after so many steps with one plan."""
RECORDED_STEPS = 5
MUCH_EXPOSED = 0.2
"""Share of a step from which exposed communication is shown in colour."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one period of steps showed; None where it is not known."""

    step: int
    """Steps since the monitor began."""
    step_seconds: float
    """Median over the period."""
    exposed_seconds: float | None = None
    """Per step, in which this rank waited for communication."""
    network_seconds: float | None = None
    """Per step, in which a collective of this rank was under way."""
    predicted_seconds: float | None = None
    strategy: str = ""

    @property
    def prediction_error(self) -> float | None:
        """By how much measured steps are longer than predicted: 0.03 is 3%."""
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


class Monitor:
    """Watches `model` until `close()`; make it on every rank, after `distribute` or DDP, before training.

    `predicted` is what a step should take: seconds, a Timeline of `offbeat.simulate`, or "measure", with which rank 0
    records a few steps in place and replays them, once per plan (that takes seconds, and Offbeat's engine).
    `readings` keeps what was shown.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int = 20,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        predicted: float | Timeline | Literal["measure"] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise OffbeatError(f"every: {quote(every)} is not a number of steps, 1 or more")
        self.model = model
        self.every = every
        self.measures = predicted == "measure"
        self.predicted_seconds = _seconds(predicted)
        self.readings: list[Reading] = []
        self.steps = 0
        self.spent_seconds = 0.0
        """Time that the monitor itself took in all."""
        self._seconds: list[float] = []
        self._since = 0.0
        self._made = 0
        """Steps of optimizers, where Offbeat's engine does not count them."""
        self._counted: tuple[int, int] | None = None
        self._sample = _Sample()
        self._prediction: _Prediction | None = None
        self._handles: list[Any] = []
        self._writer = None
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        self._writer = None if tensorboard is None else _tensorboard(tensorboard)
        self._console = Console(file=stream, stderr=stream is None, highlight=False, soft_wrap=True)
        self._handles = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]
        if isinstance(model, DistributedDataParallel):
            model._set_ddp_runtime_logging_sample_rate(every)

    def close(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._detach()
        if self._prediction is not None:
            self._prediction.stop()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The ends of steps

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
        if self.measures:
            self._keep_prediction(engine)
        if place >= self.every - SAMPLED_STEPS:
            self._sample.begin(engine)

    def _detach(self) -> None:
        engine = self._engine
        if engine is not None:
            self._sample.end(engine, 0.0)

    # What is known of them

    def _reading(self, engine: Any) -> Reading:
        exposed, network, strategy = None, None, ""
        seconds = median(self._seconds)
        if engine is not None:
            exposed, network = self._sample.take(seconds)
            strategy = f"{engine.plan.strategy.name} in {engine.mode} mode"
        elif isinstance(self.model, DistributedDataParallel):
            exposed, network = _ddp_counters(self.model)
            strategy = "DDP"
        return Reading(self.steps, seconds, exposed, network, self.predicted_seconds, strategy)

    def _keep_prediction(self, engine: Any) -> None:
        """Starts a recording for every plan that has run for a while, and takes over what comes of it."""
        prediction = self._prediction
        if prediction is None or prediction.engine is not engine:
            if prediction is not None:
                prediction.stop()
            self.predicted_seconds = None
            self._prediction = _Prediction(self.model._offbeat)
        elif prediction.seconds is not None:
            self.predicted_seconds = prediction.seconds

    def _show(self, reading: Reading) -> None:
        self.readings.append(reading)
        line = Text(describe(reading))
        if reading.exposed_seconds is not None and reading.exposed_seconds > MUCH_EXPOSED * reading.step_seconds:
            line.highlight_regex(r"exposed communication [^,]*", "yellow")
        line.highlight_regex(r"step \d+: [^,]*", "bold")
        self._console.print(line)
        if self._writer is not None:
            for name in ("step_seconds", "exposed_seconds", "network_seconds", "predicted_seconds", "prediction_error"):
                value = getattr(reading, name)
                if value is not None:
                    self._writer.add_scalar(f"offbeat/{name}", value, reading.step)


class _Sample:
    """The engine's observer in the sampled steps: see `offbeat.timeline.observer`."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.sent: list[tuple[float, float]] = []
        self.seconds = 0.0
        """Of the observed steps together."""

    def begin(self, engine: Any) -> None:
        """The step that begins is observed, unless a recorder observes it."""
        if engine.observer is None:
            engine.observer = self

    def end(self, engine: Any, seconds: float) -> None:
        """The step has ended, after so long."""
        if engine.observer is self:
            engine.observer = None
            self.seconds += seconds

    def take(self, step_seconds: float) -> tuple[float | None, float | None]:
        """Seconds of a usual step in which this rank waited, and in which something was under way; starts over.

        Observed steps may have been longer than the usual one, so their shares count.
        """
        waited, sent, seconds = self.waited, self.sent, self.seconds
        self.waited, self.sent, self.seconds = 0.0, [], 0.0
        if not seconds:
            return None, None
        return waited / seconds * step_seconds, covered(sent) / seconds * step_seconds

    def communication(self, step: int, task: Task, queued: float, issued: float, finished: float) -> None:
        self.sent.append((issued, finished))

    def local(self, kind: Kind, messages: tuple[int, ...], start: float, end: float) -> None:
        if kind == "wait":
            self.waited += end - start


class _Prediction:
    """Records some steps of this rank in place, once the plan has settled, and replays them."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.engine = runtime.engine
        self.seconds: float | None = None
        self.recorder: Any = None
        self.waiting = STEADY_STEPS
        self.engine.step_hooks.append(self._after_step)

    def _after_step(self) -> None:
        if self.waiting > 0:
            self.waiting -= 1
        elif self.recorder is None:
            if self.engine.observer is None:
                self.recorder = _local_recorder()
                self.recorder.__enter__()
        elif self.recorder.steps <= RECORDED_STEPS:
            self.recorder.step()
        else:
            lines = self.stop()
            self.seconds = _predict(self.runtime, lines)

    def stop(self) -> list[dict[str, Any]]:
        """Ends the recording; returns its lines."""
        if self._after_step in self.engine.step_hooks:
            self.engine.step_hooks.remove(self._after_step)
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return []
        # As after an error: a recording that is cut short says nothing, and asks no other rank for its clock.
        recorder.__exit__(InterruptedError, InterruptedError(), None)
        return recorder.lines


def _local_recorder() -> Any:
    """A recorder that takes no part of other ranks: only this one records."""
    from offbeat.profile.recorder import MemoryRecorder

    class LocalRecorder(MemoryRecorder):
        def _tick(self) -> list[tuple[int, float, float]]:
            return []

    return LocalRecorder()


def _predict(runtime: Any, lines: list[dict[str, Any]]) -> float | None:
    """Seconds of a step with the present plan, by replay of what was recorded; None if it cannot be replayed."""
    # Replay loads a compiler, which a job that asks for no prediction need not wait for.
    from offbeat.profile.measure import profile_in_place
    from offbeat.search.candidates import predict

    strategy, retimer = runtime.plan.strategy, runtime.retimer
    link = None if retimer is None else (retimer.latency, retimer.per_byte)
    try:
        recorded = [orjson.loads(orjson.dumps(lines))]
        profile = profile_in_place(recorded, link, len(runtime.plan.replicas), strategy, runtime.plan.graph)
        mode = runtime.engine.wanted_mode
        fixed = profile.strategy.model_copy(update={"schedule": strategy.schedule.model_copy(update={"mode": mode})})
        return predict(profile.graph, profile.cluster, profile.costs, fixed)
    except Exception as error:
        # A job must not end because it could not be predicted.
        log.warning("offbeat shows no prediction, because the recorded steps cannot be replayed: %s", error)
        return None


def _seconds(predicted: float | Timeline | str | None) -> float | None:
    if predicted is None or predicted == "measure":
        return None
    if isinstance(predicted, Timeline):
        return predicted.iteration_time
    if isinstance(predicted, bool) or not isinstance(predicted, (int, float)) or not predicted > 0:
        raise OffbeatError(f"predicted: {quote(predicted)} is neither seconds, a Timeline nor 'measure'")
    return float(predicted)


def _ddp_counters(model: DistributedDataParallel) -> tuple[float | None, float | None]:
    """(exposed, under way) seconds per step, as DDP's reducer has timed some steps; it counts nanoseconds."""
    data = model._get_ddp_logging_data()
    sent, hidden = (data.get(f"avg_backward_{name}_time", 0) for name in ("comm", "compute_comm_overlap"))
    return (max(0, sent - hidden) / 1e9, sent / 1e9) if sent else (None, None)


def _tensorboard(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise OffbeatError("tensorboard is not installed: run pip install 'offbeat[tensorboard]'") from None
    return SummaryWriter(str(folder))
