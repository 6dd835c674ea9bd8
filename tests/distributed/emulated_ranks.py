"""What ranks of an emulated cluster do. It imports next to nothing, because every rank of every call imports it."""

import os
import socket
import time

MEBIBYTE = 2**20


def all_reduce_seconds(size_bytes: int, repeats: int) -> list[float]:
    """Runs on every rank: the time of each all-reduce after a warm-up."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(size_bytes // 4)
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    return seconds[2:]


def record_on_nodes(folder: str) -> None:
    """Runs on every rank: records some steps of DDP, with few measurements of the links."""
    import torch
    import torch.distributed as dist

    import offbeat
    from offbeat.profile import calibrate

    dist.init_process_group("gloo")
    calibrate.KINDS, calibrate.SIZES, calibrate.ATTEMPTS = ("all_reduce",), calibrate.SIZES[:4], 1
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.Recorder(folder) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            recorder.step()
    dist.destroy_process_group()


def transfer_rate(sender: int, receiver: int, size_bytes: int) -> float:
    """Runs on every rank: bytes per second that the receiver gets from the sender; 0 elsewhere."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if rank == receiver:
        with socket.create_server(("", port)) as server:
            connection, _ = server.accept()
            with connection:
                skipped = received = 0
                began = 0.0
                while part := connection.recv(MEBIBYTE):
                    if not began and skipped > size_bytes // 10:
                        began = time.perf_counter()
                    skipped, received = skipped + len(part), received + (len(part) if began else 0)
                return received / (time.perf_counter() - began)
    if rank == sender:
        with _connected(f"host{receiver}", port) as connection:
            connection.sendall(bytes(size_bytes))
    return 0.0


def stream_for(seconds: float) -> None:
    """Runs on two ranks: rank 1 sends to rank 0 without pause."""
    port, until = int(os.environ["MASTER_PORT"]), time.monotonic() + seconds
    if os.environ["RANK"] == "0":
        with socket.create_server(("", port)) as server:
            connection, _ = server.accept()
            while connection.recv(MEBIBYTE):
                pass
        return
    with _connected("host0", port) as connection:
        while time.monotonic() < until:
            connection.sendall(bytes(65_536))


def environment(names: list[str]) -> list[str]:
    return [os.environ[name] for name in names]


def addresses() -> list[str]:
    return [socket.gethostname(), *(socket.gethostbyname(name) for name in ("host0", "host1", "localhost"))]


def refused_after(host: str) -> float:
    """Runs on every rank: the time in which a host answers that nobody listens."""
    began = time.perf_counter()
    with socket.socket() as connection:
        connection.connect_ex((host, 9))
    return time.perf_counter() - began


def not_json() -> object:
    return {1, 2}


def _connected(host: str, port: int) -> socket.socket:
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, port), timeout=10)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
