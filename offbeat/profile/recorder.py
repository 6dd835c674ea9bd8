"""A running job → one trace file per rank: what it computed, sent and waited for, step by step.

    with offbeat.Recorder("trace/") as recorder:
        for batch in loader:
            step(batch); recorder.step()

The recorder finds the model by itself: it looks at the first forward. From then on hooks note when each module with
parameters of its own begins, when each gradient is complete, and when each collective could go, went and had ended.
Every step is written as one line of JSON, so that a crash loses at most the last one.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import orjson
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offbeat.errors import OffbeatError
from offbeat.plan import Task
from offbeat.profile.calibrate import calibrate_job
from offbeat.profile.listen import CollectiveListener, listen_to_buckets
from offbeat.timeline import Kind

FORMAT = 1
TICKS = 32
SWITCH_SECONDS = 5e-4
"""The backend's threads report the ends of collectives and must not wait long for the interpreter."""


class Recorder:
    """Records every step of a job between `with` and the end of the block, on every rank."""

    def __init__(self, folder: str | os.PathLike[str], *, calibrate: bool = True) -> None:
        self.folder = Path(folder)
        self.calibrate = calibrate
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        self.file: BinaryIO | None = None
        self.recording = False
        self.handles: list[Any] = []
        self.steps = 0
        self.kind = ""
        self.spent_seconds = 0.0
        """Time this recorder itself has taken on this rank since it was attached."""
        self.listener: CollectiveListener | None = None
        self.communications: list[tuple[Any, ...]] = []
        self.begin, self.complete, self.optimizer_began = 0.0, True, 0.0
        self._clear()

    # The job's side

    def __enter__(self) -> "Recorder":
        self._open()
        self.recording = True
        self.handles.append(register_module_forward_pre_hook(self._first_forward))
        self.switch = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        return self

    def step(self) -> None:
        """Ends a step: what was noted since the last call is written."""
        now = time.perf_counter()
        if not self.recording:
            raise OffbeatError("recorder.step() is called outside the recorder's 'with' block")
        if not self.kind:
            return
        line = {
            "step": self.steps,
            "begin": self.begin,
            "end": now,
            "forward": self.forward,
            "forward_end": self.forward_end,
            "backward": self.backward,
            "local": self.local_spans,
            # Collectives that end during a later step are written with it; each says which step it belongs to.
            "communication": self._take_communication(),
            "complete": self.complete,
        }
        self._write(line)
        self.steps += 1
        self._clear()
        if self.listener is not None:
            self.listener.count = 0
        self.complete = True
        self.begin = time.perf_counter()
        self.spent_seconds += self.begin - now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setswitchinterval(self.switch)
        for handle in self.handles:
            handle.remove()
        if self.kind == "offbeat":
            self.root._offbeat.engine.observer = None
        try:
            if self.kind and self.recording:
                self._write({"late": self._take_communication()})
                if error is None:
                    self._write({"clock": self._tick()})
        except OffbeatError:
            # The file may be what failed before, and that error is the one to be told.
            if error is None:
                raise
        finally:
            self.recording = False
            self._close()
        if error is None and not self.kind:
            raise OffbeatError(f"{self.folder}: nothing was recorded, because no model was trained inside the block")

    # Attaching

    def _first_forward(self, module: torch.nn.Module, _: Any) -> None:
        if not is_trained(module):
            return
        self.handles.pop().remove()
        self.root = module
        sharded = isinstance(module, _sharded_modules())
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self.modules: list[str] = []
        self.parameters: list[str] = []
        self.numbers: dict[str, int] = {}
        for name, part in inner.named_modules():
            if any(True for _ in part.parameters(recurse=False)):
                self._listen_to_module(name, part, sharded)
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                self._listen_to_parameter(name, parameter, sharded)
        self.handles.append(module.register_forward_pre_hook(self._forward_begins, prepend=True))
        self.handles.append(module.register_forward_hook(self._forward_ends, always_call=True))
        ticks = self._tick()
        self._listen_to_communication(module)
        if self.calibrate and dist.is_initialized() and dist.get_world_size() > 1:
            calibrate_job(self.folder)
        self._write(self._header(inner))
        self._write({"clock": ticks})
        # The step under way began before anybody listened.
        self.complete = False
        self.begin = time.perf_counter()

    def _listen_to_module(self, name: str, module: torch.nn.Module, sharded: bool) -> None:
        number = len(self.modules)
        self.modules.append(name)
        unknown = sharded

        def reached(*_: Any) -> None:
            self.forward.append([number, time.perf_counter(), 0.0])

        def begins(*_: Any) -> None:
            nonlocal unknown
            if unknown:
                # Gradients go to the whole parameters, which are here from the first forward on.
                unknown = False
                for part, parameter in module.named_parameters(recurse=False):
                    full = f"{name}.{part}" if name else part
                    if full in self.numbers and parameter.is_leaf:
                        self.handles.append(parameter.register_post_accumulate_grad_hook(self._ready(full)))
            self.forward[-1][2] = time.perf_counter()

        # Offbeat's runtime waits for a module's variables between the two.
        self.handles.append(module.register_forward_pre_hook(reached, prepend=True))
        self.handles.append(module.register_forward_pre_hook(begins))

    def _listen_to_parameter(self, name: str, parameter: torch.nn.Parameter, sharded: bool) -> None:
        self.numbers[name] = len(self.parameters)
        self.parameters.append(name)
        if not sharded:
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._ready(name)))

    def _ready(self, name: str) -> Callable[[torch.Tensor], None]:
        number = self.numbers[name]

        def ready(_: torch.Tensor) -> None:
            self.backward.append((number, time.perf_counter()))

        return ready

    def _listen_to_communication(self, module: torch.nn.Module) -> None:
        if hasattr(module, "_offbeat"):
            self.kind = "offbeat"
            runtime = module._offbeat
            runtime.engine.observer = self
            if self.rank == 0 and self.file is not None:
                runtime.plan.strategy.save(self.folder / "strategy.json")
            return
        self.handles.append(register_optimizer_step_pre_hook(self._optimizer_begins))
        self.handles.append(register_optimizer_step_post_hook(self._optimizer_ends))
        plain = "fsdp2" if isinstance(module, _sharded_modules()) else "other"
        self.kind = "ddp" if isinstance(module, DistributedDataParallel) else plain
        if isinstance(module, DistributedDataParallel):
            buckets = listen_to_buckets(module, self)
            if buckets is not None:
                self.handles.append(buckets)
                return
        self.listener = CollectiveListener(self)
        self.handles.append(self.listener)

    def _header(self, model: torch.nn.Module) -> dict[str, Any]:
        return {
            "offbeat_trace": FORMAT,
            "rank": self.rank,
            "world": dist.get_world_size() if dist.is_initialized() else 1,
            "backend": dist.get_backend() if dist.is_initialized() else "",
            "job": self.kind,
            "machine": machine_name(),
            "unix_seconds": time.time(),
            "clock_seconds": time.perf_counter(),
            "modules": self.modules,
            "parameters": [
                [n, list(p.shape), str(p.dtype).removeprefix("torch.")] for n, p in model.named_parameters()
            ],
            "gradients": self.parameters,
        }

    def _tick(self) -> list[tuple[int, float, float]]:
        """Tiny messages to and fro between rank 0 and each other rank, by which their clocks can be compared: the other
        rank, when one left and when its answer came; on the other rank twice the time between."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return []
        tensor = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        times = []
        for peer in range(1, dist.get_world_size()) if self.rank == 0 else (self.rank,):
            for _ in range(TICKS):
                begin = time.perf_counter()
                if self.rank == 0:
                    dist.send(tensor, peer)
                    dist.recv(tensor, peer)
                else:
                    dist.recv(tensor, 0)
                if tensor.is_cuda:
                    torch.cuda.synchronize()
                end = time.perf_counter()
                times.append((peer, begin if self.rank == 0 else end, end))
                if self.rank != 0:
                    dist.send(tensor, 0)
        return times

    # What the hooks note

    def _clear(self) -> None:
        self.forward: list[list[float]] = []
        self.forward_end = 0.0
        self.backward: list[tuple[int, float]] = []
        self.local_spans: list[tuple[str, list[int], float, float]] = []

    def _take_communication(self) -> list[tuple[Any, ...]]:
        taken, self.communications = self.communications, []
        return taken

    def _forward_begins(self, *_: Any) -> None:
        self.local_spans.append(("forward", [], time.perf_counter(), 0.0))

    def _forward_ends(self, *_: Any) -> None:
        self.forward_end = time.perf_counter()

    def _optimizer_begins(self, *_: Any) -> None:
        self.optimizer_began = time.perf_counter()

    def _optimizer_ends(self, *_: Any) -> None:
        self.local_spans.append(("optimizer", [], self.optimizer_began, time.perf_counter()))

    def communication(self, step: int, task: Task, queued: float, issued: float, finished: float) -> None:
        """A collective of Offbeat's runtime; see `offbeat.timeline.observer`."""
        self.collective(task.index, task.kind, task.name, task.wire_bytes, len(task.ranks), queued, issued, finished)

    def local(self, kind: Kind, messages: tuple[int, ...], start: float, end: float) -> None:
        """A wait or an update of Offbeat's runtime."""
        self.local_spans.append((kind, list(messages), start, end))

    def collective(
        self, task: int, kind: str, name: str, size: int, ranks: int, queued: float, issued: float, finished: float
    ) -> None:
        """Any collective of the job."""
        self.communications.append((task, kind, name, size, ranks, queued, issued, finished))

    # The file

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = (self.folder / f"rank{self.rank}.jsonl").open("wb")
        except OSError as error:
            raise OffbeatError(f"{self.folder}: a trace cannot be written there: {error.strerror}") from None

    def _close(self) -> None:
        if self.file is not None:
            # Every line was flushed when it was written; only what a full disk had refused can be left.
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None

    def _write(self, line: dict[str, Any]) -> None:
        assert self.file is not None
        try:
            self.file.write(orjson.dumps(line) + b"\n")
            self.file.flush()
        except OSError as error:
            raise OffbeatError(f"{self.file.name}: the trace cannot be written: {error.strerror}") from None


def is_trained(module: torch.nn.Module) -> bool:
    """Whether a forward of this module is part of a training step."""
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def _sharded_modules() -> type | tuple[type, ...]:
    """FSDP2's mark on a module; it exists only where torch has distributed support."""
    if not dist.is_available():
        return ()
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


class MemoryRecorder(Recorder):
    """Keeps what it records of an Offbeat job instead of writing it; made for looking at a job from within."""

    def __init__(self) -> None:
        super().__init__("", calibrate=False)
        self.lines: list[dict[str, Any]] = []

    def _open(self) -> None:
        pass

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


def machine_name() -> str:
    """Names the machine whose clock this process reads."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()
