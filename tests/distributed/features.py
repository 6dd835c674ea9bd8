"""What users of DistributedDataParallel rely on, each as one function that says how far it is from one process.

Runs on every rank. `_run` trains a distributed model and a reference side by side with the same loop; the reference
computes every rank's part of the batch itself.
"""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import small_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import flat_parameters, graph_of, make_strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from training import _cluster, _distributed

from offbeat.runtime.engine.components import Portions

Make = Callable[[], nn.Module]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]
Losses = Callable[[nn.Module, int], list[torch.Tensor]]
"""A model and a step → this rank's losses, or in the reference all ranks' losses already averaged."""


def _batches(step: int) -> list[small_models.Batch]:
    return [small_models.batch("mlp", step, rank) for rank in range(dist.get_world_size())]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return small_models.make_optimizer("sgd", model.parameters())


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return small_models.make_optimizer("adamw", model.parameters())


def _mlp() -> nn.Module:
    return small_models.make("mlp")


def _everybodys_loss(model: nn.Module, step: int) -> torch.Tensor:
    losses = [model(*batch) for batch in _batches(step)]
    return sum(losses) / len(losses)  # type: ignore[return-value]


def _own_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(*_batches(step)[dist.get_rank()])


Step = Callable[[nn.Module, torch.optim.Optimizer, Callable[[nn.Module, int], torch.Tensor], int], None]


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, step: int) -> None:
    optimizer.zero_grad()
    loss(model, step).backward()
    optimizer.step()


def _compare(
    step: Step,
    *,
    strategy: Any = "overlap",
    make: Make = _mlp,
    optimize: Optimize = _sgd,
    steps: int = 4,
    example: Any = None,
    own_loss: Any = _own_loss,
    everybodys_loss: Any = _everybodys_loss,
) -> dict[str, Any]:
    """Both models after `steps` calls of `step`."""
    reference = make()
    trainer = optimize(reference)
    for number in range(steps):
        step(reference, trainer, everybodys_loss, number)
    model = make()
    optimizer = optimize(model)
    with _distributed(model, optimizer, strategy, example):
        for number in range(steps):
            step(model, optimizer, own_loss, number)
        error = (flat_parameters(model) - flat_parameters(reference)).abs().max().item()
        return {"error": error, "mode": model.offbeat.mode}


def names(strategy: str) -> dict[str, Any]:
    """State dicts before and after, and a round trip into a model that never was distributed."""
    plain = _mlp()
    model = _mlp()
    optimizer = _sgd(model)
    with _distributed(model, optimizer, strategy):
        _plain(model, optimizer, _own_loss, 0)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        plain.load_state_dict(saved)
        same = bool((flat_parameters(plain) == flat_parameters(model)).all())
        return {
            "names": list(saved) == list(_mlp().state_dict()),
            "same": same,
            "type": isinstance(model, small_models.Mlp) and isinstance(optimizer, torch.optim.SGD),
        }


def in_portions(optimizer: str, builder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Also how many elements were updated at a time, where messages are applied slice by slice."""
    chosen = make_strategy(
        {"builder": builder, "options": options}, graph_of("mlp", torch.float64, optimizer), _cluster(None), None
    )
    optimize = _sgd if optimizer == "sgd" else _adamw
    reached: list[int] = []
    apply = Portions.apply

    def watched(self: Portions, stop: int, unused: frozenset[int]) -> None:
        reached.append(stop)
        apply(self, stop, unused)

    Portions.apply = watched  # type: ignore[method-assign]
    try:
        found = _compare(_plain, strategy=chosen, optimize=optimize, example=_batches(0)[dist.get_rank()], steps=6)
        return {**found, "reached": reached}
    finally:
        Portions.apply = apply  # type: ignore[method-assign]


def no_sync(strategy: str) -> dict[str, Any]:
    """Two micro-steps of which only the second synchronises equal one big batch."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        optimizer.zero_grad()
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            (loss(model, 2 * number) / 2).backward()
        (loss(model, 2 * number + 1) / 2).backward()
        optimizer.step()

    return _compare(step, strategy=strategy)


def no_sync_keeps_gradients_local() -> dict[str, Any]:
    """What a no_sync backward leaves is this rank's own gradient."""
    alone = _mlp()
    _own_loss(alone, 0).backward()
    model = _mlp()
    optimizer = _sgd(model)
    with _distributed(model, optimizer, "overlap"):
        with model.no_sync():
            _own_loss(model, 0).backward()
        pairs = zip(alone.parameters(), model.parameters(), strict=True)
        return {"error": max((a.grad - b.grad).abs().max().item() for a, b in pairs)}


def two_backwards(strategy: str, forwards_first: bool) -> dict[str, Any]:
    """Two synchronised backward passes before one step, with both forward passes before them or one before each."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        optimizer.zero_grad()
        first = loss(model, 2 * number)
        if forwards_first:
            second = loss(model, 2 * number + 1)
            first.backward()
        else:
            first.backward()
            second = loss(model, 2 * number + 1)
        second.backward()
        optimizer.step()

    return _compare(step, strategy=strategy)


def groups_and_schedule(strategy: str, each_step: bool, before: bool = False) -> dict[str, Any]:
    """Parameter groups with their own rates, and a scheduler that changes them, made before distribute() or after."""
    schedulers: dict[int, StepLR] = {}

    def optimize(model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "lr": 0.2, "weight_decay": 0.01}, {"params": others, "lr": 0.03}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if before:
            schedule(optimizer)
        return optimizer

    def schedule(optimizer: torch.optim.Optimizer) -> None:
        schedulers[id(optimizer)] = StepLR(optimizer, step_size=1 if each_step else 2, gamma=0.5)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        if id(optimizer) not in schedulers:
            schedule(optimizer)
        _plain(model, optimizer, loss, number)
        schedulers[id(optimizer)].step()

    return _compare(step, strategy=strategy, optimize=optimize, steps=6)


def zeroing(order: str, strategy: str) -> dict[str, Any]:
    """Every way to forget gradients, before forward, after step, by the model, to zeros instead of None."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        forget: dict[str, Callable[[], None]] = {
            "optimizer": optimizer.zero_grad,
            "zeros": lambda: optimizer.zero_grad(set_to_none=False),
            "model": model.zero_grad,
            "model_zeros": lambda: model.zero_grad(set_to_none=False),
            "by_hand": lambda: [setattr(p, "grad", None) for p in model.parameters()] and None,
        }
        where, _, how = order.partition(":")
        if where == "before":
            forget[how]()
        value = loss(model, number)
        if where == "between":
            forget[how]()
        value.backward()
        optimizer.step()
        if where == "after":
            forget[how]()

    return _compare(step, strategy=strategy)


def skipped_batches(strategy: str) -> dict[str, Any]:
    """A loop that forgets every other batch's gradients instead of applying them."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        optimizer.zero_grad()
        loss(model, number).backward()
        if number % 2:
            optimizer.zero_grad()
            return
        optimizer.step()

    return _compare(step, strategy=strategy, steps=7)


def cleared_by_hand(strategy: str) -> dict[str, Any]:
    """Gradients set to None through parameters that the script collected before distribute()."""
    collected: dict[int, list[nn.Parameter]] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        parameters = collected.setdefault(id(model), list(model.parameters()))
        loss(model, number).backward()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    return _compare(step, strategy=strategy)


def empty_module() -> dict[str, Any]:
    """An nn.Sequential without modules, as residual networks have for shortcuts."""

    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shortcut, self.head = nn.Linear(23, 23), nn.Sequential(), nn.Linear(23, 5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(torch.relu(self.body(x)) + self.shortcut(x)), y)

    def make() -> nn.Module:
        torch.manual_seed(5)
        return Shortcut().double()

    return _compare(_plain, make=make)


def never_zeroed(strategy: str) -> dict[str, Any]:
    """A loop that lets gradients accumulate over steps."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        loss(model, number).backward()
        optimizer.step()

    return _compare(step, strategy=strategy)


class _Branches(nn.Module):
    """A trunk, one branch per parity of its input, and a branch that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(23, 7)
        self.even = nn.Linear(7, 5)
        self.odd = nn.Linear(7, 5)
        self.never = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, branch: int = 0) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return F.cross_entropy((self.odd if branch else self.even)(hidden), y)


def unused(strategy: str, kind: str) -> dict[str, Any]:
    """Branches used by some ranks only are averaged with zeros; one that nobody uses does not change at all."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return _Branches().double()

    def own(model: nn.Module, step: int) -> torch.Tensor:
        rank = dist.get_rank()
        return model(*_batches(step)[rank], branch=rank % 2)

    def all_of_them(model: nn.Module, step: int) -> torch.Tensor:
        losses = [model(*batch, branch=rank % 2) for rank, batch in enumerate(_batches(step))]
        return sum(losses) / len(losses)  # type: ignore[return-value]

    optimize = _sgd if kind == "sgd" else _adamw
    return _compare(_plain, strategy=strategy, make=make, optimize=optimize, own_loss=own, everybodys_loss=all_of_them)


def used_only_later() -> dict[str, Any]:
    """A branch that neither the captured step nor the first steps use gets gradients from the third step on."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return _Branches().double()

    def own(model: nn.Module, step: int) -> torch.Tensor:
        return model(*_batches(step)[dist.get_rank()], branch=int(step >= 2))

    def all_of_them(model: nn.Module, step: int) -> torch.Tensor:
        losses = [model(*batch, branch=int(step >= 2)) for batch in _batches(step)]
        return sum(losses) / len(losses)  # type: ignore[return-value]

    return _compare(_plain, make=make, own_loss=own, everybodys_loss=all_of_them, example=_batches(0)[0])


def frozen(strategy: str) -> dict[str, Any]:
    """Parameters that need no gradient stay as they are, on every rank."""

    def make() -> nn.Module:
        model = _mlp()
        model.layers[0].weight.requires_grad_(False)
        model.layers[4].bias.requires_grad_(False)
        return model

    return _compare(_plain, strategy=strategy, make=make)


def readers(strategy: str) -> dict[str, Any]:
    """Whoever looks at the parameters right after step() sees the new ones: saving, evaluation, a moving average."""
    found: dict[str, list[float]] = {"state_dict": [], "evaluation": [], "average": []}
    reference = _mlp()
    trainer = _sgd(reference)
    model = _mlp()
    optimizer = _sgd(model)
    probe = _batches(99)[0]
    smooth, expected = torch.zeros_like(flat_parameters(model)), torch.zeros_like(flat_parameters(model))
    with _distributed(model, optimizer, strategy):
        for number in range(5):
            _plain(reference, trainer, _everybodys_loss, number)
            _plain(model, optimizer, _own_loss, number)
            look = ("state_dict", "evaluation", "average")[number % 3]
            if look == "state_dict":
                pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
                found[look].append(max((a - b).abs().max().item() for a, b in pairs))
            elif look == "evaluation":
                model.eval()
                with torch.no_grad():
                    found[look].append(abs((model(*probe) - reference(*probe)).item()))
                model.train()
            else:
                smooth.mul_(0.9).add_(flat_parameters(model), alpha=0.1)
                expected.mul_(0.9).add_(flat_parameters(reference), alpha=0.1)
                found[look].append((smooth - expected).abs().max().item())
        error = (flat_parameters(model) - flat_parameters(reference)).abs().max().item()
        return {"error": max(error, *(max(each) for each in found.values())), "mode": model.offbeat.mode}


def one_rank_saves(strategy: dict[str, Any] | str, encoder: dict[str, Any] | None = None) -> dict[str, Any]:
    """Only rank 0 saves and evaluates after each step, as training scripts do; nobody may wait for it in vain."""
    options = {"chunk": 1, **({"encoder": encoder} if encoder else {})}
    chosen = make_strategy(
        {"builder": strategy, "options": options if strategy == "all_reduce" else {}},
        graph_of("mlp", torch.float64, "sgd"),
        _cluster(None),
        "auto",
    )
    model = _mlp()
    optimizer = _sgd(model)
    with _distributed(model, optimizer, chosen, _batches(0)[dist.get_rank()], _cluster(None)):
        for number in range(6):
            _plain(model, optimizer, _own_loss, number)
            if dist.get_rank() == 0:
                model.state_dict()
                with torch.no_grad():
                    _own_loss(model, 50)
        mode = model.offbeat.mode
        mine = flat_parameters(model)
        theirs = mine.clone()
        dist.broadcast(theirs, src=0)
        return {"error": (mine - theirs).abs().max().item(), "mode": mode}


def deep_copy() -> dict[str, Any]:
    """A copy of a distributed model is a plain model with the newest values, independent of the original."""
    model = _mlp()
    optimizer = _sgd(model)
    with _distributed(model, optimizer, "overlap"):
        for number in range(3):
            _plain(model, optimizer, _own_loss, number)
        duplicate = copy.deepcopy(model)
        equal = bool((flat_parameters(duplicate) == flat_parameters(model)).all())
        before = flat_parameters(duplicate).clone()
        _plain(model, optimizer, _own_loss, 3)
        kept = bool((flat_parameters(duplicate) == before).all())
        loss = duplicate(*_batches(0)[0])
        loss.backward()
        trained = all(parameter.grad is not None for parameter in duplicate.parameters())
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        return {"equal": equal, "kept": kept, "trained": trained, "mode": model.offbeat.mode}


def lbfgs() -> dict[str, Any]:
    """A closure is called as often as the optimizer likes; each call synchronises."""

    def optimize(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model, 0)
            value.backward()
            total = value.detach().clone()
            if loss is _own_loss:
                dist.all_reduce(total)
                total /= dist.get_world_size()
            return total

        optimizer.step(closure)

    return _compare(step, optimize=optimize, steps=3)


def sgd_closure(strategy: str) -> dict[str, Any]:
    """A closure given to an optimizer that does not need one."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model, number)
            value.backward()
            return value

        optimizer.step(closure)

    return _compare(step, strategy=strategy)


def tied(strategy: str) -> dict[str, Any]:
    """A weight used twice, and one that a sibling reads before its owner runs."""

    def losses(model: nn.Module, step: int) -> list[torch.Tensor]:
        return [model(*small_models.batch("everything", step, rank)) for rank in range(dist.get_world_size())]

    def own(model: nn.Module, step: int) -> torch.Tensor:
        return model(*small_models.batch("everything", step, dist.get_rank()))

    return _compare(
        _plain,
        strategy=strategy,
        make=lambda: small_models.make("everything"),
        own_loss=own,
        everybodys_loss=lambda model, step: sum(losses(model, step)) / dist.get_world_size(),
        steps=5,
    )


def compiled(when: str) -> dict[str, Any]:
    """torch.compile before or after distribute()."""
    reference = _mlp()
    trainer = _sgd(reference)
    for number in range(4):
        _plain(reference, trainer, _everybodys_loss, number)
    model = _mlp()
    optimizer = _sgd(model)
    given = torch.compile(model, backend="eager") if when == "before" else model
    with _distributed(given, optimizer, "overlap"):
        called = torch.compile(given, backend="eager") if when == "after" else given
        for number in range(4):
            _plain(called, optimizer, _own_loss, number)
        error = (flat_parameters(model) - flat_parameters(reference)).abs().max().item()
        return {"error": error, "mode": given.offbeat.mode}


def buffers() -> dict[str, Any]:
    """BatchNorm statistics are rank 0's everywhere, as DDP broadcasts them."""
    rank = dist.get_rank()
    model = small_models.make("cnn", seed=rank)
    optimizer = _sgd(model)
    alone = small_models.make("cnn")
    with _distributed(model, optimizer, "overlap"):
        for number in range(4):
            optimizer.zero_grad()
            # The reference's statistics see the distributed model's weights, and rank 0's batches only.
            for theirs, ours in zip(alone.parameters(), model.parameters(), strict=True):
                theirs.data.copy_(ours)
            alone(*small_models.batch("cnn", number, 0))
            model(*small_models.batch("cnn", number, rank)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(*small_models.batch("cnn", 9, 0))
        pairs = zip(alone.buffers(), model.buffers(), strict=True)
        return {"error": max((a.double() - b.double()).abs().max().item() for a, b in pairs)}


BUFFER_ACTIONS = (
    *("backward step", "backward step", "backward", "backward step write", "twice backward step", "forward"),
    *("no_sync backward", "no_grad", "no_grad evaluate", "evaluate", "module no_grad", "write"),
)


def buffers_as_with_ddp(seed: int) -> dict[str, Any]:
    """A random loop's losses and buffers on this rank, which DDP and Offbeat must have alike at every moment."""
    rank = dist.get_rank()
    ours, theirs = small_models.make("cnn"), small_models.make("cnn")
    wrapped = DistributedDataParallel(theirs)
    optimizers = [_sgd(ours), _sgd(theirs)]
    draw, done = random.Random(seed), []

    def act(model: Any, plain: nn.Module, optimizer: torch.optim.Optimizer, action: str, number: int) -> torch.Tensor:
        batch = small_models.batch("cnn", number, rank)
        with model.no_sync() if "no_sync" in action else nullcontext():
            with torch.no_grad() if "no_grad" in action else nullcontext():
                model.train("evaluate" not in action)
                loss = (model.module if "module" in action else model)(*batch)
                if "twice" in action:
                    loss = loss + model(*batch)
            if "backward" in action:
                loss.backward()
        if "step" in action:
            optimizer.step()
            optimizer.zero_grad()
        if "write" in action:
            for buffer in plain.buffers():
                buffer.copy_(torch.full_like(buffer, number + rank))
        return loss.detach()

    with _distributed(ours, optimizers[0], "overlap"):
        for number in range(30):
            action = draw.choice(BUFFER_ACTIONS)
            mine = act(ours, ours, optimizers[0], action, number)
            other = act(wrapped, theirs, optimizers[1], action, number)
            pairs = [(mine, other), *zip(ours.buffers(), theirs.buffers(), strict=True)]
            done.append((action, max((a.double() - b.double()).abs().max().item() for a, b in pairs)))
    return {"done": done}


def join_as_with_ddp(steps: list[int]) -> dict[str, Any]:
    """How far parameters and buffers are from DDP's after ranks have run out of data at different times."""
    rank = dist.get_rank()
    ours, theirs = small_models.make("cnn"), small_models.make("cnn")
    wrapped = DistributedDataParallel(theirs)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        with model.join():
            for number in range(steps[rank]):
                optimizer.zero_grad()
                model(*small_models.batch("cnn", number, rank)).backward()
                optimizer.step()

    with _distributed(ours, optimizer, "overlap"):
        train(ours, optimizer)
    train(wrapped, torch.optim.SGD(theirs.parameters(), lr=0.1))
    pairs = zip([*ours.parameters(), *ours.buffers()], [*theirs.parameters(), *theirs.buffers()], strict=True)
    return {"error": max((a.double() - b.double()).abs().max().item() for a, b in pairs)}


def outside_parameter(strategy: str) -> dict[str, Any]:
    """The optimizer also holds a parameter that is not the model's; it is stepped with this rank's gradient."""
    outside = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    model = _mlp()
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    expected = 1.0
    with _distributed(model, optimizer, strategy):
        for number in range(4):
            optimizer.zero_grad()
            (_own_loss(model, number) + outside * outside).backward()
            optimizer.step()
            expected -= 0.1 * 2 * expected
        return {"error": abs(outside.item() - expected)}
