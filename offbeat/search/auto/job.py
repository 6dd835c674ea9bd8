"""Run one rank of a trial: `python -m offbeat.search.auto.job` reads a task file and writes lines of results.

Runs in a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), like any script of a user. The target is
a training script, whose call of `offbeat.distribute` gets the strategy under trial and which ends once enough steps
are timed; or 'package.module:function' that returns (model, example_inputs), which one process can train with several
strategies in turn. Without strategies nothing is distributed: each rank trains alone, and the result is the step's
graph and its compute times. Ranks that the launcher has named as servers serve the others until a trial ends; without
strategies they have nothing to do.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from offbeat.cluster import ClusterSpec
from offbeat.cpu_steal import CpuSteal
from offbeat.errors import CaptureError, OffbeatError
from offbeat.graph import ModelGraph, capture
from offbeat.graph.skeleton import skeleton
from offbeat.launch import named_servers
from offbeat.plan import lower
from offbeat.runtime.comm import torch_world
from offbeat.runtime.distribute import Runtime, serve
from offbeat.search.auto.trials import TASK
from offbeat.strategy import Strategy
from offbeat.torch_private import remove_forward_hooks

LEARNING_RATE = 1e-4
DISTURBED, MOST_BLOCKS = 0.05, 3
"""Share of CPU time that other processes may take before steps are timed again, and the most repetitions."""
_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""


class _Ended(BaseException):
    """Enough steps were timed. Not an Exception, so that a training loop does not catch it by accident."""


class Stopwatch:
    """Counts the steps of one trial and ends it on all ranks after the same step."""

    def __init__(self, task: dict[str, Any], strategy: Strategy | None = None) -> None:
        self.task, self.strategy = task, strategy
        self.warm_up, self.timed = int(task["warm_up"]), int(task["timed"])
        self.early, self.limit = int(task["early_steps"]), task.get("stop_above_seconds")
        self.marks: list[float] = []
        self.steal = CpuSteal()
        self.blocks: list[tuple[float, list[float]]] = []
        """Of the timed steps, each as often as neighbours took processors meanwhile: what they took, and the steps."""
        self.stopped = False
        self.close: Callable[[], None] = lambda: None
        """Completes the last step's communication, and releases the groups and threads of this trial."""

    @property
    def steps(self) -> list[float]:
        """Seconds of the timed steps, as they were when neighbours took least."""
        return min(self.blocks)[1] if self.blocks else self._present()

    @property
    def later(self) -> int:
        """Steps that were timed after these."""
        if not self.blocks:
            return 0
        return self.timed * (len(self.blocks) - 1 - self.blocks.index(min(self.blocks))) + len(self._present())

    def attach(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Distributes the model with the strategy under trial, and starts counting its steps; serves on a server."""
        assert self.strategy is not None
        workers()
        graph = ModelGraph.from_json(json.dumps(self.task["graph"]), origin=TASK)
        cluster = ClusterSpec.model_validate_json(self.task["cluster"])
        plan = lower(graph, cluster, self.strategy, rank=dist.get_rank())
        timeout = timedelta(seconds=self.task["timeout_seconds"])
        if dist.get_rank() not in plan.replicas:
            serve(model.cpu(), optimizer, plan, timeout, torch_world(device=torch.device("cpu")))
            raise _Ended
        engine = Runtime(model, optimizer, plan, timeout).engine
        self.close = engine.detach
        engine.step_hooks.append(self.after_step)

    def after_step(self) -> None:
        if self.warm_up > 0:
            self.warm_up -= 1
            if self.warm_up:
                return
            self.steal = CpuSteal()
        self.marks.append(time.perf_counter())
        done = len(self.marks) - 1
        if self.limit is not None and done == self.early and done < self.timed:
            slowest, stolen = self._agreed()
            self.stopped = slowest > self.limit and stolen < DISTURBED
            if self.stopped:
                raise _Ended
        if done >= self.timed:
            stolen = self._agreed()[1]
            self.blocks.append((stolen, self._present()))
            self.marks, self.steal = self.marks[-1:], CpuSteal()
            if stolen < DISTURBED or len(self.blocks) == MOST_BLOCKS:
                raise _Ended

    def result(self) -> dict[str, Any]:
        return {"status": "stopped" if self.stopped else "done", "steps": self.steps}

    def _present(self) -> list[float]:
        return [after - before for before, after in pairwise(self.marks)]

    def _agreed(self) -> tuple[float, float]:
        """The slowest rank's median step and the largest share of its processors stolen meanwhile: ranks must agree,
        since one that stopped alone would leave the others waiting."""
        mine = statistics.median(self._present()), self.steal.share()
        if not dist.is_initialized():
            return mine
        worst = torch.tensor(mine, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=workers()[1])
        slowest, stolen = worst.tolist()
        return slowest, stolen


def main() -> None:
    if sys.platform == "linux":
        # A search that is killed cannot end its ranks, which would then slow down the one that resumes it.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    with open(os.environ[TASK], encoding="utf-8") as stream:
        task = json.load(stream)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.path[:0] = [folder for folder in task["path"] if folder not in sys.path]
    train = _train_script if task["target"].endswith(".py") else _train_function
    for text in task["strategies"] or [None]:
        _try(task, train, None if text is None else Strategy.from_json(json.dumps(text), origin=TASK))
    # A script under trial was left in the middle of its loop: its threads and loaders need not be waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _try(task: dict[str, Any], train: Callable[..., None], strategy: Strategy | None) -> None:
    """One trial, from a model to a line of results."""
    watch = _Alone(task) if strategy is None else Stopwatch(task, strategy)
    error = ""
    try:
        train(task, watch.attach)
    except _Ended:
        pass
    except OffbeatError as refusal:
        # Every rank checks the same strategy in the same way, so all of them come here.
        error = str(refusal)
    else:
        _join(task)
        if not watch.blocks:
            error = f"the script ended after {max(0, len(watch.marks) - 1)} of {watch.timed} timed steps"
    lead, _ = workers()
    result = None
    if dist.get_rank() == lead:
        result = {"status": "refused", "error": error, "steps": []} if error else watch.result()
    # What a trial leaves open would slow the next one in these processes down, and servers serve until it is closed.
    watch.close()
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        # The file is the only thing a trial hands back, so that a script may print what it likes.
        with open(task["results"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps(results[lead]) + "\n")


def trial_backend() -> str:
    """The backend of a trial's ranks."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _join(task: dict[str, Any]) -> None:
    """Joins the job, unless the script has."""
    if not dist.is_initialized():
        backend = trial_backend()
        if backend == "nccl" and named_servers():
            # Servers compute on processors.
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=task["timeout_seconds"]))


@cache
def workers() -> tuple[int, dist.ProcessGroup | None]:
    """The first rank that trains, and the group of all that do; all ranks must call it first at the same point."""
    servers = named_servers()
    if not servers:
        return 0, None
    training = [rank for rank in range(dist.get_world_size()) if rank not in servers]
    return training[0], dist.new_group(training)


class _Alone(Stopwatch):
    """A replica trained without the others, for its graph and compute times."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self.inputs: tuple[Any, ...] = ()
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.began = self.ended = 0.0

    def attach(self, model: torch.nn.Module, optimizer: Any) -> None:
        workers()
        if dist.get_rank() in named_servers():
            raise _Ended
        self.model, self.optimizer = model, optimizer
        model.no_sync = nullcontext
        model.flush = lambda: None
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)
        optimizer.register_step_pre_hook(lambda *_: self.backward.append(time.perf_counter() - self.ended))
        optimizer.register_step_post_hook(lambda *_: self.after_step())

    def result(self) -> dict[str, Any]:
        """The graph with measured totals; only the timed steps count, as the first ones allocate and compile."""
        last = len(self.forward) - self.later
        first = last - max(1, len(self.steps))
        remove_forward_hooks(self.model)
        try:
            graph = capture(self.model, self.inputs, _first_scalar, optimizer=type(self.optimizer))
        except CaptureError:
            graph = skeleton(self.model)
        return super().result() | {
            "graph": json.loads(graph.to_json()),
            "forward_seconds": statistics.median(self.forward[first:last]),
            "backward_seconds": statistics.median(self.backward[first:last]),
        }

    def _before_forward(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self.inputs:
            self.inputs = inputs
        self.began = time.perf_counter()

    def _after_forward(self, *_: Any) -> None:
        self.ended = time.perf_counter()
        self.forward.append(self.ended - self.began)


def _first_scalar(outputs: Any, *_: Any) -> torch.Tensor:
    """A value to differentiate: the sum of the outputs, which is the loss itself if the model returns it."""
    tensor = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
    if tensor is None:
        tensor = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return tensor.float().sum()


def _train_script(task: dict[str, Any], attach: Callable[..., None]) -> None:
    """Runs the script with an `offbeat.distribute` that applies the strategy under trial, whatever it is given."""

    def distribute(model: torch.nn.Module, optimizer: Any, *_: Any, **__: Any) -> tuple[torch.nn.Module, Any]:
        _join(task)
        attach(model, optimizer)
        return model, optimizer

    for name in ("offbeat", "offbeat.api"):
        vars(importlib.import_module(name))["distribute"] = distribute
    sys.argv = [task["target"], *task["arguments"]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(task["target"])))
    try:
        runpy.run_path(task["target"], run_name="__main__")
    except SystemExit as ending:
        if ending.code:
            raise


def _train_function(task: dict[str, Any], attach: Callable[..., None]) -> NoReturn:
    """Trains the model that the function returns on its example batch until the trial ends."""
    module, _, name = task["target"].partition(":")
    _join(task)
    torch.manual_seed(0)
    made = getattr(importlib.import_module(module), name)(*task["arguments"])
    model, inputs = made[:2]
    optimizer = made[2] if len(made) > 2 else torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    attach(model, optimizer)
    while True:
        optimizer.zero_grad()
        outputs = model(*inputs)
        loss = outputs if isinstance(outputs, torch.Tensor) and not outputs.dim() else _first_scalar(outputs)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
