"""An unmodified training script → the same script, recorded: what `offbeat profile` starts as every rank.

    python -m offbeat.profile.attach --folder trace/ --steps 20 train.py --epochs 3

The first steps run without a recorder, so that what it costs can be told; then some are recorded. A step is a call of
the optimizer that trains the model of the first forward. After the last recorded step the script is ended, as if it had
called `sys.exit()`, unless it shall run on.
"""

import argparse
import os
import runpy
import sys
import time
from collections.abc import Sequence
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
from offbeat.profile.recorder import Recorder, is_trained

PLAIN_STEPS = 8
WARM_UP_STEPS = 3
"""Of the plain steps, those that say nothing: memory is allocated, DDP rebuilds its buckets."""
OVERHEAD_FILE = "overhead.json"


class Attachment:
    """Finds the model and its optimizer from outside, counts steps, and records some of them."""

    def __init__(self, folder: str | os.PathLike[str], steps: int, plain_steps: int, run_on: bool) -> None:
        self.folder = Path(folder)
        self.steps, self.plain_steps, self.run_on = steps, plain_steps, run_on
        self.plain: list[float] = []
        self.recorded: list[float] = []
        self.before: float | None = None
        self.count = 0
        self.root: torch.nn.Module | None = None
        self.optimizer: Any = None
        self.recorder: Recorder | None = None
        self.done = False
        self.handle = register_module_forward_pre_hook(self._find_model)

    def _find_model(self, module: torch.nn.Module, _: Any) -> None:
        if not is_trained(module):
            return
        self.handle.remove()
        self.root = module
        if hasattr(module, "_offbeat"):
            # Its optimizer takes many small steps; the engine knows when a whole one has ended.
            module._offbeat.engine.step_hooks.append(self.stepped)
        else:
            register_optimizer_step_post_hook(self._plain_step)
        if not self.plain_steps:
            self._record()

    def _plain_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Torch walks over its hooks while this one runs, so that it cannot be removed here; later it does nothing.
        if self.recorder is None and self.trains_root(optimizer):
            self.stepped()

    def trains_root(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer is the one whose steps count: the first that holds a parameter of the model."""
        if self.optimizer is None and self.root is not None:
            mine = {id(parameter) for parameter in self.root.parameters()}
            if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
                self.optimizer = optimizer
        return optimizer is self.optimizer

    def stepped(self) -> None:
        """A step has ended."""
        if self.done:
            return
        now = time.perf_counter()
        if self.before is not None:
            (self.plain if self.recorder is None else self.recorded).append(now - self.before)
        self.before = now
        if self.recorder is None:
            self.count += 1
            if self.count >= self.plain_steps:
                self._record()
            return
        self.recorder.step()
        # The first step recorded is cut, because the model is found in its forward.
        if self.recorder.steps > self.steps:
            if self.run_on:
                self.close()
            else:
                self._end_together()

    def _record(self) -> None:
        self.recorder = _CountingRecorder(self.folder, self)
        self.recorder.__enter__()

    def _end_together(self) -> None:
        if hasattr(self.root, "_offbeat"):
            # What the last step left on the wire belongs to it.
            self.root.flush()  # type: ignore[union-attr] # Offbeat's models have it
        self.close()
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
            # The interpreter would wait at its end for the backend's threads, and those for the interpreter.
            dist.destroy_process_group()
        sys.exit(0)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the recording; whatever ended the script, what was recorded until then is kept."""
        if self.done:
            return
        self.done = True
        if self.recorder is None:
            if error is None:
                raise OffbeatError(
                    f"{self.folder}: nothing was recorded, because the script made {self.count} steps "
                    f"and recording begins after {self.plain_steps}; --plain-steps changes that"
                )
            return
        self.recorder.__exit__(type(error) if error else None, error, None)
        if self.recorder.rank == 0 and self.recorder.kind:
            plain, recorded = self.plain[WARM_UP_STEPS:], self.recorded[1:]
            content = {
                "plain_step_seconds": median(plain) if plain else None,
                "recorded_step_seconds": median(recorded) if recorded else None,
            }
            files.write_atomic(self.folder / OVERHEAD_FILE, orjson.dumps(content), "overhead")


class _CountingRecorder(Recorder):
    """Ends a step with the optimizer's, after it has noted how long that took."""

    def __init__(self, folder: Path, attachment: Attachment) -> None:
        super().__init__(folder)
        self.attachment = attachment

    def _optimizer_ends(self, *arguments: Any) -> None:
        super()._optimizer_ends(*arguments)
        if self.attachment.trains_root(arguments[0]):
            self.attachment.stepped()


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a script as `python script arguments` would."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m offbeat.profile.attach", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plain-steps", type=int, default=PLAIN_STEPS)
    parser.add_argument("--run-on", action="store_true", help="let the script run to its own end")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    record_script(
        [options.script, *options.arguments],
        options.folder,
        steps=options.steps,
        plain_steps=options.plain_steps,
        run_on=options.run_on,
    )


def record_script(
    script: Sequence[str], folder: str | os.PathLike[str], *, steps: int, plain_steps: int, run_on: bool
) -> None:
    """Runs a script in this process and records some of its steps."""
    attachment = Attachment(folder, steps, plain_steps, run_on)
    try:
        run_script(script[0], script[1:])
    except BaseException as error:
        clean = isinstance(error, SystemExit) and error.code in (None, 0)
        attachment.close(None if clean else error)
        raise
    attachment.close()


if __name__ == "__main__":
    try:
        main()
    except OffbeatError as problem:
        print(f"offbeat: rank {os.environ.get('RANK', '0')}: {problem}", file=sys.stderr)
        sys.exit(1)
