"""What training loops do between any two lines: each action is run by Offbeat and by the reference alike.

An action is given the rank's job and a source of random choices, the same on every rank.
"""

import copy
import io
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from random import Random

import loop_models
import pytest
import torch
from loop_job import Job, Way
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from offbeat.errors import StrategyError

Action = Callable[[Job, Random], None]
ACTIONS: dict[str, tuple[Action, int]] = {}
"""By name, with how often each is drawn."""
PARTS = ("first", "middle", "head")
"""Of every model, in the order of forward."""


def action(weight: int) -> Callable[[Action], Action]:
    def register(function: Action) -> Action:
        ACTIONS[function.__name__] = (function, weight)
        return function

    return register


# Steps


@action(14)
def ordinary_step(job: Job, draw: Random) -> None:
    job.optimizer.zero_grad()
    job.backward(job.forward())
    job.optimizer.step()


@action(3)
def uneven_step(job: Job, draw: Random) -> None:
    sizes = [draw.randint(2, 6) for _ in range(job.world.size)]
    job.optimizer.zero_grad()
    job.backward(job.forward(sizes[job.world.rank]))
    job.optimizer.step()


@action(3)
def plain_accumulation(job: Job, draw: Random) -> None:
    parts = draw.randint(2, 3)
    for _ in range(parts):
        job.backward(job.forward() / parts)
    job.optimizer.step()
    job.optimizer.zero_grad()


@action(3)
def accumulation_with_no_sync(job: Job, draw: Random) -> None:
    parts = draw.randint(2, 3)
    job.optimizer.zero_grad()
    whole = draw.random() < 0.7
    for part in range(parts):
        with job.no_sync() if whole and part < parts - 1 else nullcontext():
            loss = job.forward() / parts
        with job.no_sync() if part < parts - 1 else nullcontext():
            job.backward(loss)
    job.optimizer.step()


@action(2)
def two_forwards_one_backward(job: Job, draw: Random) -> None:
    job.optimizer.zero_grad()
    job.backward(job.forward() + job.forward())
    job.optimizer.step()


@action(3)
def only_forward(job: Job, draw: Random) -> None:
    job.forward()


@action(3)
def only_backward(job: Job, draw: Random) -> None:
    job.backward(job.forward())


@action(2)
def only_step(job: Job, draw: Random) -> None:
    job.optimizer.step()


@action(3)
def zero_grad(job: Job, draw: Random) -> None:
    target = draw.choice((job.model, job.optimizer, job.model.middle))
    target.zero_grad(set_to_none=draw.random() < 0.5)


@action(2)
def local_gradients_forgotten(job: Job, draw: Random) -> None:
    with job.no_sync():
        job.backward(job.forward())
    job.model.zero_grad()


@action(3)
def other_heads(job: Job, draw: Random) -> None:
    """Every rank may use another one."""
    heads = [draw.randrange(2) for _ in range(job.world.size)]
    job.model.chosen = heads[job.world.rank]


@action(2)
def backward_through_a_part(job: Job, draw: Random) -> None:
    if not trains(job, PARTS[:2]):
        return
    job.optimizer.zero_grad()
    job.backward(job.hidden().pow(2).mean())
    job.optimizer.step()


@action(1)
def scaled_step(job: Job, draw: Random) -> None:
    """By a gradient scaler; some gradients of one rank overflow."""
    factor = torch.inf if draw.random() < 0.3 and job.world.rank == 0 else 1.0
    if not any(parameter.requires_grad for group in job.optimizer.param_groups for parameter in group["params"]):
        return
    job.optimizer.zero_grad()
    job.backward(job.scaler.scale(job.forward()) * factor)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.see("scale", torch.tensor(job.scaler.get_scale()))


@action(1)
def closure(job: Job, draw: Random) -> None:
    """Refused where owners update, which can only be asked for without one."""

    def work() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.forward()
        job.backward(loss)
        return loss

    if job.runtime is None or job.runtime.engine.all_replicated:
        job.see("loss", job.optimizer.step(work))
        return
    with pytest.raises(StrategyError, match="every replica updates"):
        job.optimizer.step(work)
    job.see("loss", work())
    job.optimizer.step()


@action(2)
def penalty_on_gradients(job: Job, draw: Random) -> None:
    """A double backward, by hand or through an inner step."""
    weight = job.model.head.weight
    if not weight.requires_grad or job.name == "heads":
        return
    job.optimizer.zero_grad()
    (slope,) = torch.autograd.grad(loss := job.forward(), weight, create_graph=True)
    if draw.random() < 0.5:
        job.backward(loss + slope.pow(2).sum())
    else:
        job.backward(job.forward(weights={"head.weight": weight - 0.1 * slope}))
    job.optimizer.step()


@action(1)
def uneven_data(job: Job, draw: Random) -> None:
    steps = [draw.randint(1, 3) for _ in range(job.world.size)]
    passes, forgets = draw.randint(1, 2), draw.random() < 0.7

    def optimize() -> None:
        job.optimizer.step()
        if forgets:
            job.optimizer.zero_grad()

    job.join(steps, passes, optimize)
    if forgets:
        # A rank that was without data still has the last average.
        job.optimizer.zero_grad()


# Evaluation


@action(4)
def evaluation(job: Job, draw: Random) -> None:
    job.model.eval()
    with torch.inference_mode() if draw.random() < 0.5 else torch.no_grad():
        job.see("loss", job.forward())
    job.model.train()


@action(2)
def a_part_alone(job: Job, draw: Random) -> None:
    with torch.no_grad():
        job.see("hidden", job.hidden() if draw.random() < 0.5 else job.model.head(torch.ones(2, 7).double()))


@action(2)
def rank_0_alone(job: Job, draw: Random) -> None:
    """Evaluates `model.module`, as scripts written for DDP do."""
    if job.world.rank:
        return
    model = job.model.module if job.ours else job.model
    model.eval()
    with torch.no_grad():
        job.see("loss", model(*loop_models.batch(job.name, draw.randrange(1000), 0)))
    model.train()


# Parameters


@action(5)
def read_parameter(job: Job, draw: Random) -> None:
    name, parameter = job.parameter(draw.choice)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "detach": parameter.detach,
        "data": lambda: parameter.data,
        "norm": parameter.norm,
        "item": lambda: torch.tensor(parameter.sum().item()),
        "numpy": lambda: torch.from_numpy(parameter.detach().numpy().copy()),
        "tolist": lambda: torch.tensor(parameter.tolist(), dtype=torch.float64),
        "foreach": lambda: torch._foreach_mul([parameter.detach(), parameter], 2.0)[1],
        "index": lambda: parameter[0],
    }
    way = draw.choice(sorted(ways))
    with torch.inference_mode(draw.random() < 0.3):
        job.see(f"{name} by {way}", ways[way]())


@action(3)
def read_model(job: Job, draw: Random) -> None:
    # Torch saves no module whose weights are computed.
    ways = ("copy", "state_dict", "vector", "file")[: 3 if job.name == "parametrized" else 4]
    match draw.choice(ways):
        case "copy":
            values = list(copy.deepcopy(job.model).parameters())
        case "state_dict":
            values = [job.model.state_dict()[name] for name, _ in job.model.named_parameters()]
        case "vector":
            values = [parameters_to_vector(job.model.parameters())]
        case _:
            file = io.BytesIO()
            torch.save(job.model, file)
            file.seek(0)
            values = list(torch.load(file, weights_only=False).parameters())
    for value in values:
        job.see("model", value)


@action(3)
def moving_average(job: Job, draw: Random) -> None:
    if job.average is None:
        job.average = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    job.average.update_parameters(job.model)
    for parameter in job.average.parameters():
        job.see("average", parameter)


@action(1)
def teacher(job: Job, draw: Random) -> None:
    """A copy is evaluated, and does not change with the model."""
    copied = copy.deepcopy(job.model).eval()
    with torch.no_grad():
        job.see("loss", copied(*loop_models.batch(job.name, draw.randrange(1000), job.world.rank)))


@action(2)
def view_kept(job: Job, draw: Random) -> None:
    _, parameter = job.parameter(draw.choice)
    job.kept.append(parameter.detach().view(-1) if draw.random() < 0.5 else parameter.data)


@action(2)
def view_read(job: Job, draw: Random) -> None:
    for view in job.kept:
        job.see("view", view)


@action(4)
def write_parameter(job: Job, draw: Random) -> None:
    _, parameter = job.parameter(draw.choice)
    value = torch.full_like(parameter, draw.uniform(-0.1, 0.1), requires_grad=False)
    match draw.choice(("clamp", "copy", "data", "scale", "load", "add")):
        case "clamp":
            with torch.no_grad():
                parameter.clamp_(-0.3, 0.3)
        case "copy":
            with torch.no_grad():
                parameter[0].copy_(value[0])
        case "data":
            job.kept.clear()  # another memory
            parameter.data = parameter.data * 0.9 + value
        case "scale":
            parameter.data.mul_(0.95)
        case "load":
            job.model.load_state_dict({n: v.clone() * 0.97 for n, v in _float_state(job).items()}, strict=False)
        case _:
            nn.init.constant_(parameter, 0.05)


def _float_state(job: Job) -> dict[str, torch.Tensor]:
    """Parameters and, as they are equal only there before a forward, no buffers."""
    named = dict(job.model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in job.model.state_dict().items() if name in named}


@action(1)
def write_buffers(job: Job, draw: Random) -> None:
    value = draw.uniform(0.5, 1.5)
    job.model.load_state_dict(
        {name: torch.full_like(buffer, value) for name, buffer in job.model.named_buffers()}, strict=False
    )


# Gradients


@action(4)
def change_gradients(job: Job, draw: Random) -> None:
    """Whatever they are now."""
    dense = [p for p in job.model.parameters() if p is not job.model.first.weight or job.name != "sparse"]
    match draw.choice(("value", "norm", "none", "scale", "noise", "read")):
        case "value":
            clip_grad_value_([p for p in dense if p.grad is not None] or [_with_gradient()], 0.02)
        case "norm":
            job.see("norm", clip_grad_norm_(dense, 0.5))
        case "none":
            draw.choice(dense).grad = None
        case "scale":
            for parameter in dense:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        case "noise":
            parameter = draw.choice(dense)
            parameter.grad = torch.full_like(parameter, 0.01, requires_grad=False)
        case _:
            for parameter in dense:
                job.see("gradient", parameter.grad)


def _with_gradient() -> nn.Parameter:
    """torch does not clip nothing."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return parameter


@action(4)
def step_with_clipping(job: Job, draw: Random) -> None:
    job.optimizer.zero_grad()
    job.backward(job.forward())
    change_gradients(job, draw)
    job.optimizer.step()


# The model and the optimizer change


@action(2)
def freeze(job: Job, draw: Random) -> None:
    part = draw.choice(PARTS)
    job.model.get_submodule(part).requires_grad_(draw.random() < 0.6)
    if not trains(job, PARTS):
        job.model.head.requires_grad_(True)


def trains(job: Job, parts: Iterable[str]) -> bool:
    """Whether a backward pass through these parts of the model is possible."""
    return any(parameter.requires_grad for part in parts for parameter in job.model.get_submodule(part).parameters())


@action(1)
def add_param_group(job: Job, draw: Random) -> None:
    held = {id(parameter) for group in job.optimizer.param_groups for parameter in group["params"]}
    left_out = [parameter for parameter in job.model.parameters() if id(parameter) not in held]
    if left_out:
        job.optimizer.add_param_group({"params": left_out, "lr": 0.02})


@action(2)
def learning_rate(job: Job, draw: Random) -> None:
    factor = draw.uniform(0.5, 1.4)
    for group in job.optimizer.param_groups:
        group["lr"] *= factor


@action(2)
def see_optimizer(job: Job, draw: Random) -> None:
    for number, state in sorted(job.optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            if value is not None:
                job.see(f"{key} of {number}", torch.as_tensor(value))


@action(2)
def save(job: Job, draw: Random) -> None:
    job.saved = (copy.deepcopy(job.model.state_dict()), copy.deepcopy(job.optimizer.state_dict()))


@action(2)
def restore(job: Job, draw: Random) -> None:
    if job.saved is None:
        return
    model, optimizer = copy.deepcopy(job.saved)
    # Only rank 0's running statistics count.
    job.model.load_state_dict({name: value for name, value in model.items() if name in _float_state(job)}, strict=False)
    if [len(g["params"]) for g in optimizer["param_groups"]] == [len(g["params"]) for g in job.optimizer.param_groups]:
        job.optimizer.load_state_dict(optimizer)


WAYS = (
    *("all_reduce", "byteps", "ddp", "fast_servers", "hierarchical_ps", "horovod", "overlap", "overlap", "parallax"),
    *("partitioned_all_reduce", "partitioned_ps", "poseidon", "ps", "ps_load_balanced", "sharded", "tictac"),
    *("uneven_partitioned_ps", "wfbp", "random_axis_all_reduce", "random", "random", "random", "random"),
)


def draw_way(draw: Random) -> Way:
    mode = draw.choice(("auto", "auto", "barrier"))
    return draw.choice(WAYS), draw.randrange(10**6), mode, draw.random() < 0.7


def draw_optimizer(model: str, draw: Random) -> str:
    return draw.choice(loop_models.TAKES_SPARSE if model == "sparse" else sorted(loop_models.OPTIMIZERS))


@action(4)
def switch(job: Job, draw: Random) -> None:
    job.switch(draw_way(draw))


@action(1)
def distribute_again(job: Job, draw: Random) -> None:
    job.optimizer = loop_models.OPTIMIZERS[draw_optimizer(job.name, draw)](job.model.parameters())
    job.distribute(draw_way(draw))
    job.saved = None
