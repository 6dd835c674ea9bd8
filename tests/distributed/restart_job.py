"""A training script as a user writes it: saves every step, resumes from what it finds, and may be killed once.

restart_job.py DIRECTORY BUILDER STEPS KILL_AT
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))
import small_models

import offbeat


def main(directory: Path, builder: str, steps: int, kill_at: int) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    model = small_models.make("everything", seed=rank)
    optimizer = small_models.make_optimizer("sgd", model.parameters())
    model, optimizer = offbeat.distribute(model, optimizer, builder, timeout=timedelta(seconds=20))
    saved = directory / "state.pt"
    first, losses = 0, []
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses = state["step"], json.loads((directory / f"losses{rank}.{state['step']}.json").read_text())
    for step in range(first, steps):
        optimizer.zero_grad()
        loss = model(*small_models.batch("everything", step, rank))
        loss.backward()
        if step == kill_at and rank == 1 and not saved.with_name("killed").exists():
            saved.with_name("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        losses.append(loss.item())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        (directory / f"losses{rank}.{step + 1}.json").write_text(json.dumps(losses))
        dist.barrier()
        if rank == 0:
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
