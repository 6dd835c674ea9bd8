"""Give torch's DistributedDataParallel a strategy's buckets and encoders, for jobs that keep DDP.

    model = DistributedDataParallel(model, **ddp_kwargs("strategy.json", model))
    add_encoders(model, "strategy.json")

DDP sends whole gradients in buckets that follow each other in the order in which backward completes them, and `step()`
waits for all of them. A strategy's messages become such buckets: variables that are next to each other in that order
and travel together share one. A schedule says nothing to DDP; servers, staleness and the like are refused. Overlap into
the next forward needs `offbeat.distribute`.
"""

import inspect
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offbeat.api import Wanted, resolve_strategy
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError, StrategyError
from offbeat.graph import ModelGraph
from offbeat.graph.skeleton import skeleton
from offbeat.plan import Plan, lower
from offbeat.runtime.lifetime import callbacks
from offbeat.runtime.sync.encoders import MessageEncoder, make_encoder
from offbeat.strategy import Encoder
from offbeat.torch_private import has_communication_hook

_MEBIBYTE = 2**20
_SYNCHRONIZERS = ("all_reduce", "sparse_all_gather")


def ddp_kwargs(
    strategy: Wanted, model: torch.nn.Module, *, graph: ModelGraph | None = None, cluster: ClusterSpec | None = None
) -> dict[str, Any]:
    """Keywords for DistributedDataParallel that give it the strategy's buckets.

    `graph` is a captured or measured step of the model; without one, gradients are assumed to be ready in reverse
    registration order, as DDP itself assumes. If torch has no `bucket_cap_mb_list`, or the model has several dtypes
    (each of which would start the list again), all buckets get the strategy's median size.
    """
    plan = _plan(strategy, model, graph, cluster)
    sizes = bucket_bytes(plan)
    found: dict[str, Any] = {"gradient_as_bucket_view": True}
    if not sizes:
        return found
    dtypes = {variable.dtype for variable in plan.graph.variables if not variable.sparse}
    listed = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters
    if listed and len(dtypes) == 1:
        # Mebibytes as exact fractions: DDP multiplies them back to these bytes.
        return {**found, "bucket_cap_mb_list": [size / _MEBIBYTE for size in sizes]}
    return {**found, "bucket_cap_mb": median(sizes) / _MEBIBYTE}


def bucket_bytes(plan: Plan) -> list[int]:
    """Bytes of each bucket of dense gradients, in the order in which backward completes them.

    The variables of one module share a bucket: autograd may complete a weight and its bias in either order.
    """
    messages_of: dict[str, set[int]] = {}
    for message in plan.messages:
        for name in message.variables:
            messages_of.setdefault(name, set()).add(message.index)
    sizes: list[int] = []
    last: set[int] = set()
    owner = None
    for variable in plan.graph.gradient_order:
        if variable.sparse or variable.name not in messages_of:
            continue
        mine, module = messages_of[variable.name], variable.name.rpartition(".")[0]
        if module != owner and not mine & last:
            sizes.append(0)
        sizes[-1] += variable.bytes
        last, owner = mine, module
    return sizes


def add_encoders(
    model: DistributedDataParallel,
    strategy: Wanted,
    *,
    graph: ModelGraph | None = None,
    cluster: ClusterSpec | None = None,
) -> bool:
    """Registers a communication hook that encodes buckets as the strategy defines; False if it encodes nothing.

    Buckets are sent unencoded in the first step, in which they are provisional, and where their variables have
    different encoders. Error feedback is kept where the encoder has it.
    """
    if has_communication_hook(model):
        raise OffbeatError("the DistributedDataParallel model already has a communication hook; it takes only one")
    plan = _plan(strategy, model.module, graph, cluster)
    encoders: dict[str, Encoder] = {}
    for message in plan.messages:
        for name in message.variables:
            known = encoders.setdefault(name, message.encoder)
            if known != message.encoder:
                encoders[name] = Encoder()
    if all(encoder.name == "none" for encoder in encoders.values()):
        return False
    model.register_comm_hook(_EncodedBuckets(model, encoders), _exchange)
    return True


class _EncodedBuckets:
    """State of the hook."""

    def __init__(self, model: DistributedDataParallel, encoders: dict[str, Encoder]) -> None:
        self.group = model.process_group
        self.world = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.wanted = encoders
        self.made: dict[tuple[str, ...], tuple[MessageEncoder | None, bool]] = {}
        self.step = 0

    def encoder(self, bucket: dist.GradBucket) -> tuple[MessageEncoder | None, bool]:
        """The bucket's encoder, and whether it needs a second round."""
        buffer = bucket.buffer()
        if self.step == 0 or buffer.is_sparse:
            return None, False
        parameters = bucket.parameters()
        names = tuple(self.names[id(parameter)] for parameter in parameters)
        if names not in self.made:
            kinds = {self.wanted.get(name, Encoder()) for name in names}
            shapes = [tuple(parameter.shape) for parameter in parameters]
            place = (buffer.dtype, buffer.device, bucket.index(), self.world, self.rank)
            kind = kinds.pop() if len(kinds) == 1 else Encoder()
            self.made[names] = make_encoder(kind, shapes, *place), kind.name == "powersgd"
        return self.made[names]


def _exchange(state: _EncodedBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook: the average of one bucket over all ranks."""
    (encoder, twice), step = state.encoder(bucket), state.step
    if bucket.is_last():
        state.step += 1
    buffer = bucket.buffer().div_(state.world)
    if encoder is None:
        sent = dist.all_reduce(buffer, group=state.group, async_op=True)
        callbacks.add(sent)
        return sent.get_future().then(lambda done: done.value()[0])
    rounds = encoder.exchange(buffer, step)
    payload = next(rounds)
    work, received = _send(encoder, payload, state)
    if not twice:
        callbacks.add(work)
        return work.get_future().then(lambda _: _decode(rounds, received, buffer))
    # A second round that began when the first ended would meet other buckets in an order of each rank's own.
    while True:
        work.wait()
        try:
            payload = rounds.send(received)
        except StopIteration:
            break
        work, received = _send(encoder, payload, state)
    done = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


def _send(encoder: MessageEncoder, payload: torch.Tensor, state: _EncodedBuckets) -> tuple[dist.Work, torch.Tensor]:
    if encoder.summed:
        return dist.all_reduce(payload, group=state.group, async_op=True), payload
    received = payload.new_empty((state.world, payload.numel()))
    work = dist.all_gather_into_tensor(received.view(-1), payload.view(-1), group=state.group, async_op=True)
    return work, received


def _decode(rounds: Any, received: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    try:
        rounds.send(received)
    except StopIteration:
        return buffer
    raise AssertionError("an encoder of one round asked for a second")


def _plan(strategy: Wanted, model: torch.nn.Module, graph: ModelGraph | None, cluster: ClusterSpec | None) -> Plan:
    """The lowered strategy; StrategyError if DDP cannot run it."""
    joined = dist.is_available() and dist.is_initialized()
    if isinstance(strategy, str) and strategy == "auto" and not joined:
        raise OffbeatError("strategy 'auto' measures the link: call torch.distributed.init_process_group first")
    cluster = cluster or ClusterSpec.local(dist.get_world_size() if joined else 1)
    graph = graph or skeleton(model)
    chosen = resolve_strategy(strategy, graph, cluster)
    for field in ("operators", "weights", "accumulation", "recompute", "fusion", "precision"):
        value = getattr(chosen, field)
        if value and value != 1:
            raise StrategyError(f"DDP cannot run the strategy's {field} ({value!r}); use offbeat.distribute")
    plan = lower(graph, cluster, chosen)
    for message in plan.messages:
        kind = "asynchronous" if message.asynchronous else "stale" if message.staleness else message.synchronizer
        if kind not in _SYNCHRONIZERS:
            raise StrategyError(f"DDP cannot synchronise {message.variables[0]!r} by {kind}; use offbeat.distribute")
    return plan
