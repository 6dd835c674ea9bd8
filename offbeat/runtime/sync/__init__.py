"""Create one synchroniser per message of a plan."""

from typing import TYPE_CHECKING

import torch

from offbeat.errors import StrategyError
from offbeat.plan import Message
from offbeat.runtime.sync.dense import (
    EncodedAllReduce,
    EncodedServer,
    ServerSynchroniser,
    ShardedSynchroniser,
    Synchroniser,
    box_slices,
)
from offbeat.runtime.sync.encoders import make_encoder
from offbeat.runtime.sync.relaxed import AsyncMessage, AsyncServer, StaleAllReduce, StaleServer
from offbeat.runtime.sync.sparse import FactorBroadcast, SparseGather, SparseServer

if TYPE_CHECKING:
    from offbeat.runtime.engine import Training

__all__ = ["AsyncServer", "StaleAllReduce", "Synchroniser", "box_slices", "make_synchroniser"]

_SPARSE_OPTIMIZERS = ("SGD", "SparseAdam", "Adagrad")


def make_synchroniser(message: Message, training: "Training") -> Synchroniser:
    """The message's, on the plan's rank; a rank with neither a replica nor the message takes no part in it."""
    plan, parameters, rank = training.plan, training.parameters, training.plan.rank
    assert rank is not None
    me, share = 0, 0.0
    if rank in plan.replicas:
        me = plan.replicas.index(rank)
        share = plan.weights[me]
    common = (message, parameters, training.channels, rank, share)
    if rank not in plan.replicas and rank not in message.servers:
        return Synchroniser(*common)
    first = parameters[message.pieces[0].variable]
    variable = plan.graph.variable(message.pieces[0].variable)
    shapes = [piece.shape for piece in message.pieces]
    place = (first.dtype, first.device, message.index, len(plan.replicas), me)
    encoder = make_encoder(message.encoder, shapes, *place)
    densify = training.optimizer_class.__name__ not in _SPARSE_OPTIMIZERS
    if message.asynchronous or message.staleness:
        stale = StaleAllReduce if message.synchronizer == "all_reduce" else StaleServer
        return (AsyncMessage if message.asynchronous else stale)(*common)
    match message.synchronizer:
        case "sparse_all_gather":
            return SparseGather(variable, densify, *common)
        case "sparse_parameter_server":
            return SparseServer(variable, densify, *common)
        case "factor_broadcast":
            return FactorBroadcast(_linear(training.model, variable.name), variable.factor_rows, *common)
        case "sharded":
            tasks = [send.task for send in plan.program.sends if send.task.message == message.index]
            slices = sorted({(task.start, task.stop) for task in tasks})
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(message.encoder.name)
            return ShardedSynchroniser(dtype, slices, tasks[0].ranks, *common)
        case "parameter_server":
            return ServerSynchroniser(*common) if encoder is None else EncodedServer(encoder, *common)
        case _:
            return Synchroniser(*common) if encoder is None else EncodedAllReduce(encoder, *common)


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(module, torch.nn.Linear) or attribute != "weight":
        raise StrategyError(
            f"factor_broadcast needs the weight of an nn.Linear, {name!r} belongs to {type(module).__name__}"
        )
    return module
