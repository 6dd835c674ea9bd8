"""Compare the ranks' clocks by small messages between rank 0 and each other rank."""

import time

import torch
import torch.distributed as dist


def exchange_ticks(count: int) -> list[tuple[int, float, float]]:
    """This rank's part of so many round trips with each peer: `lines.Tick`s. Every rank must call it."""
    rank = dist.get_rank()
    tensor = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    times = []
    for peer in range(1, dist.get_world_size()) if rank == 0 else (rank,):
        for _ in range(count):
            begin = time.perf_counter()
            if rank == 0:
                dist.send(tensor, peer)
                dist.recv(tensor, peer)
            else:
                dist.recv(tensor, 0)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            end = time.perf_counter()
            times.append((peer, begin if rank == 0 else end, end))
            if rank != 0:
                dist.send(tensor, 0)
    return times
