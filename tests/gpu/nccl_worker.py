"""One rank: all that the runtime can do, case by case, in float64 → one line of JSON per case, in a folder.

    nccl_worker.py cases FOLDER [KIND]         every case, or those of a kind; a rank that fails alone ends the job
    nccl_worker.py forever FOLDER [split]      trains until it is ended, and counts its steps in FOLDER/steps

On a machine without a GPU it runs on gloo, so that the cases themselves can be tried.
"""

import hashlib
import io
import itertools
import json
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import guests
import small_models
import split_points
from reference import flat_parameters, graph_of, make_strategy, reference_run
from small_strategies import ENGINE_BUILDERS, EXPECTED_MODE, OPTIONS, every_synchronizer, fsdp_points, server

import offbeat
from offbeat import api
from offbeat.cluster import ClusterSpec
from offbeat.errors import StrategyError
from offbeat.runtime import distribute
from offbeat.runtime.sharded.groups import groups
from offbeat.strategy import Encoder, OperatorConfig, Schedule, Shard, Strategy, VariableConfig, build_strategy
from offbeat.torch_private import default_store

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
STEPS = 5
LIMIT = 1e-10
TIMEOUT = timedelta(seconds=60)
AGREE_SECONDS = 60.0
SEARCH = timedelta(minutes=2)
"""By when rank 0 has found a model's frontier; the first time it compiles the search."""
POINTS = 20
"""Of each model's frontier."""
ENCODERS: tuple[dict[str, Any], ...] = (
    {"name": "fp16"},
    {"name": "bf16"},
    {"name": "topk", "ratio": 0.25},
    {"name": "randomk", "ratio": 0.25},
    {"name": "sign"},
    {"name": "int8"},
    {"name": "powersgd", "rank": 2},
)
Row = dict[str, Any]
Case = tuple[str, str, Callable[[], Row]]
"""A kind, a name and what to do; the row says at least whether it is `good`."""


def main() -> None:
    todo, folder, only = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if CUDA:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if CUDA else "gloo", timeout=TIMEOUT)
    if todo == "forever":
        train_forever(folder, *only)
    with (folder / f"rank{dist.get_rank()}.jsonl").open("w", buffering=1) as rows:
        for number, (kind, name, run) in enumerate(cases()):
            if only and kind not in only:
                continue
            began = time.monotonic()
            try:
                row = run()
            except Exception as error:
                row = {"good": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            row = {"kind": kind, "name": name, **row, "seconds": round(time.monotonic() - began, 3)}
            rows.write(json.dumps(row) + "\n")
            agree(number, row.get("error", ""))
    # A rank that ends with kernels in flight may break the GPU for the others.
    if CUDA:
        torch.cuda.synchronize()
    dist.barrier()
    while shared_channels:
        shared_channels.popitem()[1].close()
    groups.close(time.monotonic() + AGREE_SECONDS)
    dist.destroy_process_group()


def agree(number: int, error: str) -> None:
    """Goes on if every rank has failed in this case, or none: a rank alone would wait for the others for ever."""
    store, world = default_store(), dist.get_world_size()
    store.set(f"case{number}/{dist.get_rank()}", b"failed" if error else b"passed")
    keys = [f"case{number}/{rank}" for rank in range(world)]
    store.wait(keys, timedelta(seconds=AGREE_SECONDS))
    if len({store.get(key) for key in keys}) > 1:
        print(f"case {number} failed on some ranks only: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


# Jobs

shared_channels: dict[Any, Any] = {}
"""Of all cases: to open a communicator takes longer than five steps of a small model."""


@contextmanager
def quick_to_start() -> Generator[None, None, None]:
    """Without what takes longest in a run of a few steps: timing the link, opening channels."""
    open_channels, fit_link = distribute.Channels, distribute.fit_link
    distribute.fit_link = lambda *_: (1e-4, 1e-9)
    distribute.Channels = lambda plan, world, timeout, _: open_channels(plan, world, timeout, shared_channels)
    try:
        yield
    finally:
        distribute.fit_link, distribute.Channels = fit_link, open_channels


@contextmanager
def distributed(
    name: str, optimizer: str, strategy: Strategy | str, nodes: int | None = None, seed: int | None = None
) -> Generator[tuple[Any, Any], None, None]:
    """A model and its optimizer under a strategy, which are released afterwards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = nodes or world
    cluster = ClusterSpec.homogeneous(nodes=nodes, devices_per_node=world // nodes)
    # Only rank 0 has the reference's weights: distribute() must share them.
    model = small_models.make(name, seed=rank if seed is None else seed).to(DEVICE)
    trainer = small_models.make_optimizer(optimizer, model.parameters())
    example = small_models.batch(name, 0, rank)
    kept = api.capture
    # It takes long too.
    api.capture = lambda *_, **__: graph_of(name, torch.float64, optimizer)
    try:
        with quick_to_start():
            offbeat.distribute(model, trainer, strategy, example_inputs=example, cluster=cluster, timeout=TIMEOUT)
            yield model, trainer
            model._offbeat._detach()
    finally:
        api.capture = kept


def steps(model: Any, optimizer: Any, name: str, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        optimizer.zero_grad()
        batch = small_models.batch(name, step, dist.get_rank())
        loss = model(*(tensor.to(DEVICE) for tensor in batch))
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def flat(model: Any) -> torch.Tensor:
    return flat_parameters(model).cpu()


def expected(name: str, optimizer: str, count: int = STEPS) -> torch.Tensor:
    world = dist.get_world_size()
    return reference_run(name, optimizer, torch.float64, count, world, (1.0,) * world, (4,) * world)


def everywhere(value: Any) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# Cases


def cases() -> Iterator[Case]:
    world = dist.get_world_size()
    for optimizer in ("sgd", "adamw"):
        for builder in ENGINE_BUILDERS:
            given = {"builder": builder, "options": OPTIONS.get(builder, {})}
            for mode in EXPECTED_MODE:
                yield "builder", f"{builder} {optimizer} {mode}", partial(exact, given, optimizer, mode)
        for mode in EXPECTED_MODE:
            given = {"json": every_synchronizer(world).to_json()}
            yield "synchronizers", f"{optimizer} {mode}", partial(exact, given, optimizer, mode)
    for owner, stations in ((1, (0,)), (0, (1,))) if world == 2 else ((1, (0, 2)), (3, (2,)), (0, (1, 3))):
        yield "stations", f"{owner} behind {stations}", partial(behind_stations, owner, stations)
    for synchronizer in ("all_reduce", "parameter_server", "sharded"):
        for encoder in ENCODERS:
            if synchronizer == "all_reduce" or (synchronizer, encoder["name"]) in SERVED:
                yield "encoder", f"{synchronizer} {encoder['name']}", partial(encoded, synchronizer, encoder)
    for staleness in (1, 3):
        yield "staleness", f"parameter_server {staleness}", partial(stale_server, staleness)
        yield "staleness", f"all_reduce {staleness}", partial(stale_all_reduce, staleness)
    for builder in ("overlap", "sharded", "ps_load_balanced", "parallax"):
        for optimizer in ("sgd", "adamw"):
            yield "checkpoint", f"{builder} {optimizer}", partial(resumed, builder, optimizer)
    for optimizer in ("sgd", "adamw"):
        for options in fsdp_points(world):
            yield "fully sharded", f"{options} {optimizer}", partial(fully_sharded, options, optimizer)
    for name, number in itertools.product(split_points.MODELS, range(POINTS)):
        yield "split", f"{name} {number}", partial(split, name, number)
    yield from guest_cases()
    yield "refusal", "asynchronous servers", refused
    yield "batch norm", "SyncBatchNorm", synchronised_statistics
    yield "auto", "measured link", auto


SERVED = {("parameter_server", each["name"]) for each in ENCODERS if each["name"] != "powersgd"} | {
    ("sharded", "fp16"),
    ("sharded", "bf16"),
}
"""PowerSGD takes two rounds, which servers refuse; sharded messages travel in 16 bits at least."""


GUESTS = {
    "fused_optimizer": LIMIT,
    "capturable_optimizer": LIMIT,
    "fused_optimizer_with_scaler": LIMIT,
    "gradient_scaler": LIMIT,
    "clipping_by_norm": LIMIT,
    "mixed_precision": 1e-3,
    "muon_optimizer": 1e-6,
    "own_optimizer": LIMIT,
    "step_hooks": LIMIT,
    "optimizer_state_changed": LIMIT,
    "accumulation": LIMIT,
    "ema_over_a_list": LIMIT,
    "generation": LIMIT,
    "unfrozen_later": LIMIT,
}
"""Ways of training that GPUs treat otherwise than processors do, and how far each may end from averaging by hand: two
of them compute in single precision or bfloat16, where the order of the ring's sums shows."""


def guest_cases() -> Iterator[Case]:
    for pattern, strategy in itertools.product(GUESTS, ("overlap", "sharded", "ddp")):
        if strategy != "sharded" or pattern not in guests.guest_changes.OWNERS_REFUSE:
            yield "guest", f"{pattern} {strategy}", partial(guest, pattern, strategy)


def guest(pattern: str, strategy: str) -> Row:
    """A training script as it is (tests/distributed/guests.py)."""
    with quick_to_start():
        row = guests.guest(pattern, strategy)
    return {"good": row["trained"] and row["error"] <= GUESTS[pattern], "distance": row["error"], **row}


def exact(given: dict[str, Any], optimizer: str, mode: str) -> Row:
    nodes = min(2, dist.get_world_size())
    world = dist.get_world_size()
    cluster = ClusterSpec.homogeneous(nodes=nodes, devices_per_node=world // nodes)
    graph = graph_of("everything", torch.float64, optimizer)
    strategy = make_strategy(given, graph, cluster, mode)
    with distributed("everything", optimizer, strategy, nodes) as (model, trainer):
        steps(model, trainer, "everything", range(STEPS))
        ended = model.offbeat.mode
        distance = float((flat(model) - expected("everything", optimizer)).abs().max())
    return {"good": distance <= LIMIT and ended == EXPECTED_MODE[mode], "distance": distance, "mode": ended}


def fully_sharded(options: dict[str, Any], optimizer: str) -> Row:
    """By torch's own `fully_shard`, with the choices of a strategy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cluster = ClusterSpec.homogeneous(nodes=world)
    parts = options.pop("accumulation", 1)
    strategy = build_strategy("fsdp", graph_of("gpt2", torch.float64, optimizer), cluster, **options)
    model = small_models.make("gpt2", seed=rank).to(DEVICE)
    trainer = small_models.make_optimizer(optimizer, model.parameters())
    offbeat.distribute(model, trainer, strategy.model_copy(update={"accumulation": parts}), cluster=cluster)
    steps(model, trainer, "gpt2", range(STEPS))
    whole = model.state_dict()
    ended = torch.cat([whole[name].reshape(-1) for name, _ in model.named_parameters()])
    distance = float((ended - expected("gpt2", optimizer)).abs().max())
    return {"good": distance <= LIMIT, "distance": distance}


@cache
def frontier_points(name: str) -> list[Strategy]:
    """Strategies that split a model's operators, for which rank 0 searches."""
    store, key = default_store(), f"frontier/{name}"
    if dist.get_rank() == 0:
        _, found = split_points.chosen_strategies(name, dist.get_world_size(), POINTS, DEVICE.type)
        store.set(key, json.dumps([strategy.to_json() for strategy in found]))
    store.wait([key], SEARCH)
    return [Strategy.from_json(content) for content in json.loads(store.get(key))]


def split(name: str, number: int) -> Row:
    """A point of the frontier, whose groups all others use too."""
    row = split_points.run_point(name, frontier_points(name)[number], DEVICE.type)
    distance = max(row["losses"], row["weights"])
    return {"good": distance <= LIMIT, "distance": distance, "held": row["held"]}


def behind_stations(owner: int, stations: tuple[int, ...]) -> Row:
    shard = server(owner, stations=stations)
    names = [name for name, _ in small_models.make("mlp").named_parameters()]
    strategy = Strategy(variables={name: VariableConfig(shards=(shard,)) for name in names})
    with distributed("mlp", "sgd", strategy, nodes=2) as (model, trainer):
        steps(model, trainer, "mlp", range(STEPS))
        distance = float((flat(model) - expected("mlp", "sgd")).abs().max())
    return {"good": distance <= LIMIT, "distance": distance}


def encoded(synchronizer: str, encoder: dict[str, Any]) -> Row:
    """Replicas stay equal, the encoding is really used, and it changes less than training does."""
    world, ends = dist.get_world_size(), []
    for used in (encoder, {"name": "none"}):
        configs = {}
        for number, (name, _) in enumerate(small_models.make("mlp").named_parameters()):
            fields = {"placement": (number % world,)} if synchronizer == "parameter_server" else {"group": number % 2}
            shard = Shard(synchronizer=synchronizer, encoder=Encoder(**used), **fields)
            configs[name] = VariableConfig(shards=(shard,))
        strategy = Strategy(variables=configs, schedule=Schedule(policy="priority", slice_bytes=1024))
        with distributed("mlp", "sgd", strategy) as (model, trainer):
            steps(model, trainer, "mlp", range(STEPS))
            ends.append(flat(model).clone())
    digests = everywhere(hashlib.sha256(ends[0].numpy().tobytes()).hexdigest())
    off = float((ends[0] - ends[1]).abs().max())
    moved = float((ends[1] - flat(small_models.make("mlp"))).abs().max())
    plain = float((ends[1] - expected("mlp", "sgd")).abs().max())
    good = len(set(digests)) == 1 and 0 < off < moved and plain <= LIMIT
    return {"good": good, "off": off, "moved": moved, "plain": plain, "digests": len(set(digests))}


def relaxed(synchronizer: str, **fields: Any) -> Strategy:
    """Every variable of the MLP synchronised this way, servers in turn."""
    configs = {}
    for number, (name, _) in enumerate(small_models.make("mlp").named_parameters()):
        placement = (number % dist.get_world_size(),) if synchronizer == "parameter_server" else ()
        configs[name] = VariableConfig(shards=(Shard(synchronizer=synchronizer, placement=placement, **fields),))
    return Strategy(variables=configs)


def stale_server(staleness: int) -> Row:
    """Servers apply gradients exactly so many steps late."""
    world, count = dist.get_world_size(), 8
    alone = small_models.make("mlp")
    optimizer = small_models.make_optimizer("sgd", alone.parameters())
    flying: deque[list[torch.Tensor]] = deque()

    def apply() -> None:
        for parameter, gradient in zip(alone.parameters(), flying.popleft(), strict=True):
            parameter.grad = gradient
        optimizer.step()

    for step in range(count):
        optimizer.zero_grad()
        for each in range(world):
            (alone(*small_models.batch("mlp", step, each)) / world).backward()
        flying.append([parameter.grad for parameter in alone.parameters() if parameter.grad is not None])
        if len(flying) > staleness:
            apply()
    while flying:
        apply()
    with distributed("mlp", "sgd", relaxed("parameter_server", staleness=staleness)) as (model, trainer):
        steps(model, trainer, "mlp", range(count))
        model.flush()
        distance = float((flat(model) - flat_parameters(alone)).abs().max())
    return {"good": distance <= LIMIT, "distance": distance}


def stale_all_reduce(staleness: int) -> Row:
    """After a flush all replicas are equal, and have learnt."""
    with distributed("mlp", "sgd", relaxed("all_reduce", staleness=staleness)) as (model, trainer):
        losses = steps(model, trainer, "mlp", range(8))
        model.flush()
        mine = flat(model).clone()
    far = max(float((mine - torch.tensor(each, dtype=mine.dtype)).abs().max()) for each in everywhere(mine.tolist()))
    return {"good": far <= LIMIT and all(map(math.isfinite, losses)), "distance": far}


def resumed(builder: str, optimizer: str) -> Row:
    """Six steps at once, and three, a checkpoint in memory, and three in new objects."""
    with distributed("everything", optimizer, builder) as (model, trainer):
        steps(model, trainer, "everything", range(3))
        states = {"model": model.state_dict(), "optimizer": trainer.state_dict()}
        states = from_file(states)
        unbroken = steps(model, trainer, "everything", range(3, 6))
        whole = flat(model).clone()
    with distributed("everything", optimizer, builder, seed=7 + dist.get_rank()) as (model, trainer):
        model.load_state_dict(states["model"])
        trainer.load_state_dict(states["optimizer"])
        losses = steps(model, trainer, "everything", range(3, 6))
        distance = float((flat(model) - whole).abs().max())
    losses_off = max(abs(a - b) for a, b in zip(losses, unbroken, strict=True))
    right = float((whole - expected("everything", optimizer, 6)).abs().max())
    good = max(distance, losses_off, right) <= LIMIT
    return {"good": good, "distance": distance, "losses_off": losses_off, "unbroken": right}


def from_file(states: Any) -> Any:
    """As it would come back from a file."""
    buffer = io.BytesIO()
    torch.save(states, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, map_location=DEVICE)


def refused() -> Row:
    """What NCCL cannot do is refused before the first step; gloo can."""
    try:
        with distributed("mlp", "sgd", relaxed("parameter_server", asynchronous=True)):
            pass
    except StrategyError as error:
        return {"good": CUDA and "\n" not in str(error), "said": str(error)}
    return {"good": not CUDA, "said": ""}


def synchronised_statistics() -> Row:
    """SyncBatchNorm, whose collectives run between the engine's, against the whole batch in one process."""
    if not CUDA:
        return {"good": True, "skipped": "torch's SyncBatchNorm refuses CPU tensors"}
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = small_models.make("cnn")
    optimizer = small_models.make_optimizer("sgd", alone.parameters())
    for step in range(STEPS):
        parts = [small_models.batch("cnn", step, each) for each in range(world)]
        optimizer.zero_grad()
        alone(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))).backward()
        optimizer.step()
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(small_models.make("cnn", seed=rank)).to(DEVICE)
    trainer = small_models.make_optimizer("sgd", model.parameters())
    offbeat.distribute(model, trainer, "overlap", timeout=TIMEOUT)
    steps(model, trainer, "cnn", range(STEPS))
    distance = float((flat(model) - flat_parameters(alone)).abs().max())
    model._offbeat.release()
    return {"good": distance <= 1e-8, "distance": distance}


def auto() -> Row:
    """The strategy that a user gets who names none, with all that it measures."""
    model = small_models.make("mlp", seed=dist.get_rank()).to(DEVICE)
    trainer = small_models.make_optimizer("adamw", model.parameters())
    offbeat.distribute(model, trainer, "auto", timeout=TIMEOUT, quiet=True)
    steps(model, trainer, "mlp", range(12))
    distance = float((flat(model) - expected("mlp", "adamw", 12)).abs().max())
    plan = model.offbeat.plan.strategy.name
    model._offbeat.release()
    return {"good": distance <= LIMIT, "distance": distance, "plan": plan}


def train_forever(folder: Path, how: str = "overlap") -> None:
    """Steps of a plan that overlaps, or that splits operators, until somebody ends this process."""
    model = small_models.make("mlp", seed=dist.get_rank()).to(DEVICE)
    trainer = small_models.make_optimizer("sgd", model.parameters())
    strategy: Strategy | str = how
    if how == "split":
        halves = OperatorConfig(mesh=(dist.get_world_size(),), outputs=((-1, 0),))
        graph = graph_of("mlp", torch.float64, "sgd")
        strategy = Strategy(operators={op.name: halves for op in graph.operators if op.name.startswith("addmm")})
    offbeat.distribute(model, trainer, strategy, timeout=TIMEOUT)
    for step in range(10**9):
        steps(model, trainer, "mlp", range(step % 4, step % 4 + 1))
        if dist.get_rank() == 0:
            (folder / "steps").write_text(str(step + 1))


if __name__ == "__main__":
    main()
