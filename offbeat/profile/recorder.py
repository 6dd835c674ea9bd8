"""Record a running job into one trace file per rank: what it computed, sent and waited for, step by step.

    with offbeat.Recorder("trace/") as recorder:
        for batch in loader:
            step(batch); recorder.step()

The recorder finds the model by itself: it looks at the first forward. One that a job makes for itself knows its model,
and records that one alone, on the ranks that train it. From then on hooks note when each module with parameters of its
own begins, when each gradient is complete, and when each collective could go, went and had ended.
A loop that accumulates gradients has several forward and backward passes in a step; calls of `step()` between two steps
of the optimizer belong to one step.
Every step is written as one line of JSON, so that a crash loses at most the last one. On a GPU times are the GPU's own
(`offbeat.timeline.clock`), and some steps are written together once the GPU has come to their ends.
"""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offbeat.arguments import checked
from offbeat.cpu_steal import ProcessorTime
from offbeat.errors import OffbeatError
from offbeat.graph.capture import is_capturing
from offbeat.launch import machine_name, this_place
from offbeat.plan import Plan, Task
from offbeat.profile.calibrate import calibrate_job
from offbeat.profile.footprint import Footprint
from offbeat.profile.lines import FORMAT
from offbeat.profile.listen import CollectiveListener, TransactionListener, listen_to_buckets, wrap
from offbeat.profile.plans import PlanWriter
from offbeat.runtime.comm import World, torch_world
from offbeat.runtime.distribute import Runtime
from offbeat.runtime.faults import explain
from offbeat.runtime.memory import MicroBatches
from offbeat.timeline import Kind
from offbeat.timeline.clock import Clock, HostClock, Moment, clock_of, host_late_seconds, in_seconds
from offbeat.torch_private import uncompiled

SWITCH_SECONDS = 5e-4
"""The backend's threads report the ends of collectives and must not wait long for the interpreter."""

WAITING_STEPS = 16
"""Steps of a GPU that are written together: reading their times costs the host some milliseconds each."""


_intervals: list[float] = []
"""The process's own switch interval, and one for each recorder at work."""


class Recorder:
    """Records every step of a job inside its `with` block, on every rank."""

    ticks = 32
    """Messages by which a rank compares its clock with rank 0's, before and after the steps."""
    footprints = True
    """Whether to record what a step keeps in memory."""

    @checked
    def __init__(self, folder: str | os.PathLike[str], *, calibrate: bool = True, transactions: bool = False) -> None:
        self.folder = Path(folder)
        self.calibrate = calibrate
        self.transactions: TransactionListener | None = None
        self.noting_transactions = transactions
        """Whether to note messages between ranks, which need not meet then: their own messages align their clocks."""
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        self.file: BinaryIO | None = None
        self.recording = False
        self.undo = contextlib.ExitStack()
        """Removes the hooks in torch, the model and the runtime."""
        self.clock: Clock = HostClock()
        self.unwritten: deque[dict[str, Any]] = deque()
        """Lines of steps that the GPU has not finished."""
        self.steps = 0
        self.kind = ""
        self.runtime: Runtime | None = None
        """None unless this is an Offbeat job."""
        self.plans = PlanWriter()
        self.followed: tuple[Plan, Literal["deferred", "barrier"]] | None = None
        self.collectives: list[tuple[Any, ...]] = []
        self.messages: list[tuple[Any, ...]] = []
        """Completed transactions, as `lines.Transaction`s."""
        self.optimizer_began: Moment = 0.0
        self.footprint: Footprint | None = None
        self._begin_step()

    def __enter__(self) -> "Recorder":
        self._open()
        self.recording = True
        self._seek_model()
        if self.noting_transactions:
            self.transactions = TransactionListener(self)
        self.undo.enter_context(_quick_switches())
        return self

    def step(self) -> None:
        """Ends a step and writes everything recorded since the last call."""
        now = self.clock.now()
        if not self.recording:
            raise OffbeatError("recorder.step() was called outside the recorder's 'with' block")
        if not self.kind:
            return
        if self.followed is not None and (changed := self.plans.changes(*self.followed)):
            self.unwritten.append({"plan": changed})
        ended, self.collectives = self.collectives, []
        self.line |= {"end": now, "processor": ProcessorTime.now().since(self.processor)}
        # Collectives that end during a later step are written with it; each says which step it belongs to.
        self.unwritten.append(self.line | {"communication": ended, **self._messages_ended()})
        if isinstance(self.clock, HostClock) or len(self.unwritten) >= WAITING_STEPS:
            self._write_known()
        self.steps += 1
        self._begin_step()

    def _write_known(self) -> None:
        """Writes the steps whose times are known."""
        while self.unwritten and all(map(self.clock.reached, _last_moments(self.unwritten[0]))):
            line = self.unwritten.popleft()
            marks = [row[-1] for name in ("forward", "backward") for row in line.get(name, ())]
            written = in_seconds(line, self.clock)
            if late := host_late_seconds(marks, self.clock):
                written["host_late_ns"] = round(late * 1e9)
            self._write(written)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.undo.close()
        try:
            if self.kind and self.recording:
                for moment in (moment for line in self.unwritten for moment in _last_moments(line)):
                    self.clock.wait(moment)
                self._write_known()
                ended, self.collectives = self.collectives, []
                self._write({"late": in_seconds(ended, self.clock), **in_seconds(self._messages_ended(), self.clock)})
                if error is None and self._meets():
                    self._write({"clock": self._tick()})
        except OffbeatError:
            # The file itself may have failed before; that first error is the one to report.
            if error is None:
                raise
        finally:
            self.recording = False
            if self.file is not None:
                # Lines are flushed as they are written; only one that a full disk refused can be left.
                with contextlib.suppress(OSError):
                    self.file.close()
        if error is None and not self.kind:
            raise OffbeatError(f"{self.folder}: nothing was recorded, because no model was trained inside the block")

    def _seek_model(self) -> None:
        """The model is the first module that is called to be trained."""
        self.undo.callback(_when_training(self._attach).remove)

    def _attach(self, module: torch.nn.Module) -> None:
        """Begins to record this model; the present step began before."""
        self.runtime = runtime_of(module)
        self.clock = clock_of(next(module.parameters()).device)
        sharded = isinstance(module, FSDPModule)
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self.modules: list[str] = []
        self.numbers: dict[str, int] = {}
        """Of the parameters with a gradient."""
        for name, part in inner.named_modules():
            if any(True for _ in part.parameters(recurse=False)):
                self._listen_to_module(name, part, sharded)
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                self.numbers[name] = len(self.numbers)
                if not sharded:
                    self._listen_to_gradient(name, parameter)
        _listen_to_calls(self, module)
        if self.footprints and not sharded and uncompiled(module) is module:
            self.footprint = Footprint(inner)
        ticks = self._tick() if self._meets() else []
        self._listen_to_communication(module)
        if self.calibrate and self._meets() and dist.is_initialized() and dist.get_world_size() > 1:
            self._call_servers("offbeat.profile.calibrate:measure_all")
            calibrate_job(self.folder, 0 if self.runtime is None else self.runtime.plan.replicas[0])
        facts = {"rank": self.rank, "job": self.kind, "modules": self.modules, "gradients": list(self.numbers)}
        facts["servers"] = [] if self.runtime is None else list(self.runtime.plan.apart)
        self._write(_header(inner, self._world()) | facts)
        if self._meets():
            self._write({"clock": ticks})
        self.line |= {"complete": False, "updated": False, "begin": self.clock.now()}

    def _meets(self) -> bool:
        """Whether all ranks reach their first forward and the recorder's end together, servers included."""
        if self.runtime is None:
            return not self.noting_transactions
        # Servers on processors take no part in the collectives of GPUs.
        return not (self.runtime.plan.apart and self.runtime.world.staged)

    def _call_servers(self, function: str) -> None:
        if self.runtime is not None:
            self.runtime.engine.owners.call_servers(function)

    def _messages_ended(self) -> dict[str, Any]:
        ended, self.messages = self.messages, []
        return {"transactions": ended} if self.noting_transactions else {}

    def _listen_to_module(self, name: str, module: torch.nn.Module, sharded: bool) -> None:
        number = len(self.modules)
        self.modules.append(name)
        unknown = sharded

        def reached(_: Any, given: Any) -> None:
            if self.footprint is not None:
                self.footprint.reached(given)
            self.line["forward"].append([number, self.clock.about_now(), 0.0])
            self.waits = len(self.line["local"])

        def begins(*_: Any) -> None:
            nonlocal unknown
            if unknown:
                # Gradients go to the whole parameters, which are here from the first forward on.
                unknown = False
                for part, parameter in module.named_parameters(recurse=False):
                    full = f"{name}.{part}" if name else part
                    if full in self.numbers and parameter.is_leaf:
                        self._listen_to_gradient(full, parameter)
            row = self.line["forward"][-1]
            row[2] = self.clock.about_now() if len(self.line["local"]) > self.waits else row[1]

        # Offbeat's runtime waits for a module's variables between the two; where it need not, one mark serves for both.
        self.keep(module.register_forward_pre_hook(reached, prepend=True))
        self.keep(module.register_forward_pre_hook(begins))

    def keep(self, handle: RemovableHandle) -> None:
        """A hook in the model, until the recording ends; copies of the model go without."""
        self.undo.callback(handle.remove)
        if self.runtime is not None:
            self.runtime.visitors.add(handle.id)
            self.undo.callback(self.runtime.visitors.discard, handle.id)

    def _listen_to_gradient(self, name: str, parameter: torch.nn.Parameter) -> None:
        number = self.numbers[name]

        def ready(_: torch.Tensor) -> None:
            self.line["backward"].append((number, self.clock.about_now()))

        self.undo.callback(parameter.register_post_accumulate_grad_hook(ready).remove)

    def _listen_to_communication(self, module: torch.nn.Module) -> None:
        if self.runtime is not None:
            self.kind = "offbeat"
            runtime = self.runtime
            runtime.engine.reports.observer = self
            # By then the runtime may have switched to another engine, which takes over the observer.
            self.undo.callback(lambda: setattr(runtime.engine.reports, "observer", None))
            # Before any hook that may end the recorder's step.
            runtime.step_hooks.insert(0, self._engine_stepped)
            self.undo.callback(runtime.step_hooks.remove, self._engine_stepped)
            # The recorder's own, which compare clocks.
            self.messages.clear()
            if self.transactions is not None and runtime.engine.server is not None:
                self.transactions.listen_to_channel(runtime.engine.server.channel)
            return
        self.undo.callback(register_optimizer_step_pre_hook(self._optimizer_begins).remove)
        self.undo.callback(register_optimizer_step_post_hook(self._optimizer_ends).remove)
        self.kind = "fsdp2" if isinstance(module, FSDPModule) else "other"
        if isinstance(module, DistributedDataParallel):
            self.kind = "ddp"
            if listen_to_buckets(module, self):
                return
        CollectiveListener(self)

    def _world(self) -> World | None:
        """The ranks among which this one is numbered."""
        return torch_world(device=torch.device("cpu")) if dist.is_initialized() else None

    def _tick(self) -> list[tuple[int, float, float]]:
        """Compares clocks."""
        world, runtime = self._world(), self.runtime
        if world is None or world.size == 1:
            return []
        self._call_servers("offbeat.profile.recorder:answer_ticks")
        with (
            explain(runtime.plan, what="the comparison of clocks") if runtime is not None else contextlib.nullcontext()
        ):
            return exchange_ticks(world, self.ticks)

    def _begin_step(self) -> None:
        self.issued = 0
        """Number of torch.distributed's collectives in this step."""
        noted: dict[str, Any] = {name: [] for name in ("calls", "forward", "backward", "local")}
        self.processor = ProcessorTime.now()
        self.line = {**noted, "step": self.steps, "complete": True, "updated": False, "begin": self.clock.now()}
        """The line of the current step; see `offbeat.profile.lines`."""

    def forward_begins(self, *call: Any) -> None:
        if self.footprint is not None:
            self.footprint.forward_begins(*call[1:])
        self.line["calls"].append([self.clock.now(), 0.0])

    def forward_ends(self, *_: Any) -> None:
        if self.footprint is not None:
            self.footprint.forward_ends()
        # The forward in which the recorder found the model has no beginning.
        if self.line["calls"]:
            self.line["calls"][-1][1] = self.clock.now()
        if self.runtime is not None:
            # Not when the step ends: by then the engine may follow another plan.
            self.followed = self.runtime.plan, self.runtime.engine.mode

    def _optimizer_begins(self, *_: Any) -> None:
        self.optimizer_began = self.clock.now()

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.line["updated"] = True
        self.local("optimizer", (), self.optimizer_began, self.clock.now())
        self._note_memory(optimizer)

    def _engine_stepped(self) -> None:
        self.line["updated"] = True
        if self.runtime is not None:
            # The model itself is not called where the loop calls its parts.
            self.followed = self.followed or (self.runtime.plan, self.runtime.engine.mode)
            self._note_memory(self.runtime.optimizer)

    def _note_memory(self, optimizer: torch.optim.Optimizer) -> None:
        found = self.footprint.updated(optimizer) if self.footprint is not None else None
        if found is None:
            return
        if self.runtime is not None:
            variables = self.runtime.plan.graph.variables
            found["sparse"] = [(each.name, each.sparse_rows) for each in variables if each.sparse]
        self._write({"memory": found})

    def communication(self, step: int, task: Task, queued: Moment, issued: Moment, finished: Moment) -> None:
        """A collective of Offbeat's runtime; see `offbeat.timeline.observer`."""
        self.collective(task.index, task.kind, task.name, task.wire_bytes, len(task.ranks), queued, issued, finished)

    def local(self, kind: Kind, messages: tuple[int, ...], start: Moment, end: Moment) -> None:
        """A wait or an update of the job."""
        self.line["local"].append((kind, messages, start, end))

    def collective(
        self, task: int, kind: str, name: str, size: int, ranks: int, queued: Moment, issued: Moment, finished: Moment
    ) -> None:
        """Any collective of the job."""
        self.collectives.append((task, kind, name, size, ranks, queued, issued, finished))

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = (self.folder / f"rank{self.rank}.jsonl").open("wb")
        except OSError as error:
            raise OffbeatError(f"{self.folder}: cannot write a trace there: {error.strerror}") from None

    def _write(self, line: dict[str, Any]) -> None:
        assert self.file is not None
        try:
            self.file.write(orjson.dumps(line) + b"\n")
            self.file.flush()
        except OSError as error:
            raise OffbeatError(f"{self.file.name}: cannot write the trace: {error.strerror}") from None


def _listen_to_calls(recorder: Recorder, module: torch.nn.Module) -> None:
    """Notes when the model's forward begins and ends."""
    split = vars(module).get("forward")
    if not isinstance(split, MicroBatches):
        recorder.keep(module.register_forward_pre_hook(recorder.forward_begins, prepend=True))
        recorder.keep(module.register_forward_hook(recorder.forward_ends, always_call=True))
        return

    def noted(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of one of the micro-batches into which Offbeat's runtime cuts a call of the model."""
        recorder.forward_begins(split, args)
        try:
            return forward(*args, **kwargs)
        finally:
            recorder.forward_ends()

    wrap(recorder.undo, split, "forward", noted)


def _last_moments(line: dict[str, Any]) -> list[Moment]:
    """The moments of a line after which all of its times are known."""
    ended = (row[-1] for name in ("communication", "transactions") for row in line.get(name, ()))
    return [line.get("end", 0.0), *ended]


def runtime_of(module: torch.nn.Module) -> Runtime | None:
    """The runtime that distribute() attached to a model, if an engine trains it."""
    attached = getattr(module, "_offbeat", None)
    return attached if isinstance(attached, Runtime) else None


def is_trained(module: torch.nn.Module) -> bool:
    """Whether a forward of this module is part of a training step."""
    trains = any(parameter.requires_grad for parameter in module.parameters())
    return trains and torch.is_grad_enabled() and not is_capturing()


def _when_training(attach: Callable[[torch.nn.Module], None]) -> RemovableHandle:
    """Calls `attach` with the first module that is called to be trained; the handle gives up waiting for it."""

    def called(module: torch.nn.Module, _: Any) -> None:
        if is_trained(module):
            handle.remove()
            attach(module)

    handle = register_module_forward_pre_hook(called)
    return handle


@contextlib.contextmanager
def _quick_switches() -> Generator[None, None, None]:
    """Threads wait for the interpreter no longer than `SWITCH_SECONDS`. Recorders of several models may overlap."""
    if not _intervals:
        _intervals.append(sys.getswitchinterval())
    _intervals.append(SWITCH_SECONDS)
    sys.setswitchinterval(_intervals[-1])
    try:
        yield
    finally:
        _intervals.pop()
        sys.setswitchinterval(_intervals[-1])
        if len(_intervals) == 1:
            _intervals.clear()


def _header(model: torch.nn.Module, world: World | None) -> dict[str, Any]:
    """What a trace says first of a model, and of where it is trained."""
    device = next(model.parameters()).device
    return {
        "offbeat_trace": FORMAT,
        "world": 1 if world is None else world.size,
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "machine": machine_name(),
        **this_place()._asdict(),
        "unix_seconds": time.time(),
        "clock_seconds": time.perf_counter(),
        "parameters": [(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in model.named_parameters()],
    }


def exchange_ticks(world: World, count: int) -> list[tuple[int, float, float]]:
    """This rank's part of so many round trips with each peer: `lines.Tick`s. Every rank of the job must call it."""
    channel, rank = world.default_channel(), world.rank
    tensor = torch.zeros(1, device=world.device)
    times = []
    for peer in range(1, world.size) if rank == 0 else (rank,):
        for _ in range(count):
            begin = time.perf_counter()
            if rank == 0:
                channel.send(tensor, peer, 0)
                channel.recv(tensor, peer, 0)
            else:
                channel.recv(tensor, 0, 0)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            end = time.perf_counter()
            times.append((peer, begin if rank == 0 else end, end))
            if rank != 0:
                channel.send(tensor, 0, 0)
    return times


def answer_ticks() -> None:
    """The part in a comparison of clocks of a rank that records nothing."""
    exchange_ticks(torch_world(device=torch.device("cpu")), Recorder.ticks)


class MemoryRecorder(Recorder):
    """Keeps the lines in memory, for a job that analyses itself while it runs."""

    ticks = 6
    """Few, because a training step waits for them."""
    footprints = False

    def __init__(self, runtime: Runtime | None = None) -> None:
        """With `runtime`, only the model that it trains is recorded, from the beginning of the block on. All its ranks
        must come there together, between two steps."""
        super().__init__("", calibrate=False)
        self.lines: list[dict[str, Any]] = []
        self.subject = runtime
        if runtime is not None:
            self.rank = runtime.world.rank

    def _open(self) -> None:
        pass

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def _seek_model(self) -> None:
        if self.subject is None:
            super()._seek_model()
        else:
            self._attach(self.subject.model)

    def _world(self) -> World | None:
        return super()._world() if self.subject is None else self.subject.world
