"""Joins a job, trains under "auto" and leaves it, several times in one process, as cells of a notebook are run again.

again_job.py MODEL(same|new) PORT...
"""

import gc
import os
import sys

import torch
import torch.distributed as dist

import offbeat
from offbeat.runtime.lifetime import _gloo_threads


def main(which: str, *ports: str) -> None:
    torch.set_num_threads(1)
    rank, threads, model = int(os.environ["RANK"]), [], None
    for port in ports:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        if model is None or which == "new":
            torch.manual_seed(rank)
            model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        offbeat.distribute(model, optimizer, quiet=True)
        losses = []
        # The search process is at work by then.
        for step in range(12):
            optimizer.zero_grad()
            loss = model(torch.full((4, 5), 0.1 * step, dtype=torch.float64)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means = torch.tensor([losses[-1]], dtype=torch.float64)
        dist.all_reduce(means)
        assert means.item() == 2 * losses[-1], "ranks with the same batches have the same model"
        gc.collect()
        threads.append(len(_gloo_threads()))
        dist.destroy_process_group()
    # Torch itself keeps one thread of every group that was destroyed.
    assert which == "new" or threads[-1] <= threads[0] + len(ports) - 1, threads


if __name__ == "__main__":
    main(*sys.argv[1:])
