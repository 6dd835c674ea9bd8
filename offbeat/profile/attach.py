"""Run and record an unmodified training script; `offbeat profile` starts this as every rank.

    python -m offbeat.profile.attach FOLDER STEPS PLAIN_STEPS RUN_ON(0|1) TRANSACTIONS(0|1) SCRIPT [ARGUMENTS]

The first steps run without a recorder, so that what it costs can be told; then some are recorded. A step is a call of
the optimizer that trains the model of the first forward. After the last recorded step the script is ended, as if it had
called `sys.exit()`, unless it shall run on.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.profile.recorder import Recorder, is_trained, runtime_of
from offbeat.runtime.server import Served
from offbeat.timeline.clock import Moment, clock_of

WARM_UP_STEPS = 3
"""The first plain steps, which are not timed: memory is allocated, DDP rebuilds its buckets."""
OVERHEAD_FILE = "overhead.json"


class ScriptRecorder(Recorder):
    """Finds the model and its optimizer from outside, counts steps, and records some of them."""

    def __init__(
        self, folder: str | os.PathLike[str], steps: int, plain_steps: int, run_on: bool, transactions: bool = False
    ) -> None:
        super().__init__(folder, transactions=transactions)
        self.wanted, self.plain_steps, self.run_on = steps, plain_steps, run_on
        self.ends: list[Moment] = []
        """When each step ended, recorded or not."""
        self.root: torch.nn.Module | None = None
        self.optimizer: Any = None
        self.done = False
        self.handle = register_module_forward_pre_hook(self._find_model)

    def __enter__(self) -> Recorder:
        if dist.is_initialized():
            # The script has joined its job since this recorder was made.
            self.rank = dist.get_rank()
        return super().__enter__()

    def _find_model(self, module: torch.nn.Module, _: Any) -> None:
        if not is_trained(module):
            return
        self.handle.remove()
        self.root = module
        self.clock = clock_of(next(module.parameters()).device)
        runtime = runtime_of(module)
        if runtime is not None:
            # Its optimizer takes many small steps; the engine knows when a whole one has ended.
            runtime.step_hooks.append(self.stepped)
        else:
            register_optimizer_step_post_hook(self._plain_step)
        if not self.plain_steps:
            self.__enter__()

    def _plain_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Torch iterates over its hooks now, so this one cannot be removed; once recording, it does nothing.
        if not self.recording:
            self._optimizer_stepped(optimizer)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        super()._optimizer_ends(optimizer)
        self._optimizer_stepped(optimizer)

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts the steps of the first optimizer with a parameter of the model."""
        if self.optimizer is None and self.root is not None:
            mine = {id(parameter) for parameter in self.root.parameters()}
            if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
                self.optimizer = optimizer
        if optimizer is self.optimizer:
            self.stepped()

    def stepped(self) -> None:
        """A step has ended."""
        if self.done:
            return
        self.ends.append(self.clock.now())
        if not self.recording:
            if len(self.ends) >= self.plain_steps:
                self.__enter__()
            return
        self.step()
        # The first step recorded is cut, because the model is found in its forward.
        if self.steps > self.wanted:
            if self.run_on:
                self.close()
            else:
                self._end_together()

    def _end_together(self) -> None:
        runtime = None if self.root is None else runtime_of(self.root)
        if runtime is not None:
            # What the last step left on the wire belongs to it.
            runtime.model.flush()
        self.close()
        if dist.is_initialized():
            if runtime is not None and runtime.plan.apart:
                # Servers end with the replicas, and come to no barrier.
                runtime.engine.channels.control.all_reduce(torch.zeros(1, device=runtime.world.device)).wait()
            else:
                dist.barrier()
            # At exit the interpreter and the backend's threads would wait for each other.
            dist.destroy_process_group()
        sys.exit(0)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the recording and keeps what was recorded, whatever ended the script."""
        if self.done:
            return
        self.done = True
        if not self.recording:
            if error is None:
                raise OffbeatError(
                    f"{self.folder}: nothing was recorded, because the script ran {len(self.ends)} steps "
                    f"and recording starts after {self.plain_steps}; see --plain-steps"
                )
            return
        self.__exit__(type(error) if error else None, error, None)
        if self.rank == 0 and self.kind:
            self.clock.wait(self.ends[-1])
            seconds = [end - before for before, end in pairwise(map(self.clock.seconds, self.ends))]
            # The step in which the recorder was attached counts for neither.
            plain, recorded = seconds[WARM_UP_STEPS : max(0, self.plain_steps - 1)], seconds[max(1, self.plain_steps) :]
            content = {
                "plain_step_seconds": median(plain) if plain else None,
                "recorded_step_seconds": median(recorded) if recorded else None,
            }
            files.write_atomic(self.folder / OVERHEAD_FILE, orjson.dumps(content), "overhead")


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a script as `python script arguments` would, and returns when it has ended well."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code or isinstance(ended, Served):
            raise


def record_script(
    script: Sequence[str],
    folder: str | os.PathLike[str],
    steps: int,
    plain_steps: int,
    run_on: bool,
    transactions: bool,
) -> None:
    """Runs a script in this process and records some of its steps."""
    recorder = ScriptRecorder(folder, steps, plain_steps, run_on, transactions)
    try:
        run_script(script[0], script[1:])
    except Served:
        # The replicas have recorded the job.
        return
    except BaseException as error:
        recorder.close(error)
        raise
    recorder.close()


if __name__ == "__main__":
    folder, steps, plain_steps, run_on, transactions, *script = sys.argv[1:]
    try:
        record_script(script, folder, int(steps), int(plain_steps), run_on == "1", transactions == "1")
    except OffbeatError as problem:
        print(f"offbeat: rank {os.environ.get('RANK', '0')}: {problem}", file=sys.stderr)
        sys.exit(1)
