"""Training scripts with optimizers of their own, and with a model or an optimizer that changes."""

import copy
import pickle
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from guest_job import STEPS, Job, Net, pattern
from torch import nn

import offbeat


@pattern(optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
def _fused_optimizer(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


def _capturable(model: nn.Module) -> torch.optim.Optimizer:
    # Torch takes such an optimizer on GPUs only.
    return torch.optim.AdamW(model.parameters(), lr=0.01, capturable=next(model.parameters()).is_cuda)


@pattern(optimize=_capturable)
def _capturable_optimizer(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


@pattern(optimize=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
def _fused_optimizer_with_scaler(job: Job) -> None:
    """The scaler leaves it to the optimizer to unscale gradients, and to skip a step that overflows."""
    scaler = torch.amp.GradScaler(job.device.type, init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward(scaler.scale(job.loss(step) * (torch.inf if step == 4 else 1.0)))
        if step % 3 == 2:
            scaler.unscale_(job.optimizer)
            nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        scaler.step(job.optimizer)
        scaler.update()
        job.see(torch.tensor(scaler.get_scale()))


@pattern(single=True)
def _mixed_precision(job: Job) -> None:
    for step in range(STEPS):
        x, y = job.batch(step)
        job.optimizer.zero_grad()
        with torch.autocast(job.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(job.model(x.float()), y)
        job.see(loss)
        job.backward(loss)
        job.optimizer.step()


@pattern()
def _step_hooks(job: Job) -> None:
    """Hooks on step(), put on and taken off while training goes on."""
    calls: list[str] = []

    def after(optimizer: Any, *_: Any) -> None:
        calls.append("after")
        job.see(*(p for group in optimizer.param_groups for p in group["params"]))

    before = job.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    for step in range(STEPS):
        if step == 2:
            job.optimizer.register_step_post_hook(after)
            job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        if step == 5:
            before.remove()
        job.step(step)
    job.see(torch.tensor([calls.count("before"), calls.count("after")]))


@pattern()
def _optimizer_state_changed(job: Job) -> None:
    """Looks at momenta, resets them, and puts an empty dictionary in their place."""
    for step in range(STEPS):
        job.step(step)
        job.see(*(job.optimizer.state[p]["momentum_buffer"] for p in job.model.parameters()))
        if step == 2:
            for state in job.optimizer.state.values():
                state["momentum_buffer"].zero_()
        if step == 4:
            job.optimizer.state = defaultdict(dict)


@pattern()
def _parameters_out_of_a_group_for_a_while(job: Job) -> None:
    held = job.optimizer.param_groups[0]["params"]
    for step in range(STEPS):
        if step == 2:
            out = held.pop(0)
        if step == 5:
            held.insert(0, out)
        job.step(step)


@pattern()
def _memory_shared(job: Job) -> None:
    """Two parameters in one memory, each with a gradient of its own."""
    for step in range(STEPS):
        if step == 2:
            job.model.middle[2].weight.data = job.model.middle[0].weight.data
        job.step(step)
        job.see(job.model.middle[2].weight)


@pattern()
def _converted_for_good(job: Job) -> None:
    """Momenta stay in double precision."""
    for step in range(STEPS):
        if step == 3:
            job.model.float()
        x, y = job.batch(step)
        job.optimizer.zero_grad()
        job.backward(F.cross_entropy(job.model(x.to(job.model.head.weight.dtype)), y))
        job.optimizer.step()


@pattern()
def _one_pickle(job: Job) -> None:
    """Of the model and its optimizer, which goes on training there."""
    for step in range(STEPS):
        job.step(step)
    model, optimizer = pickle.loads(pickle.dumps((job.model, job.optimizer)))
    x, y = job.batch(0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    job.see(*model.parameters())


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    for parameter in (model.first.bias, model.middle[0].bias, model.middle[2].bias, model.head.bias):
        parameter.requires_grad_(False)
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pattern(optimize=_muon)
def _muon_optimizer(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


class Coupled(torch.optim.SGD):
    """An optimizer of somebody's own that looks at all gradients at once."""

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm + 1.0)
        super().step(closure)


@pattern(optimize=lambda model: Coupled(model.parameters(), lr=0.1))
def _own_optimizer(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


OWNERS_REFUSE = ("own_optimizer", "muon_optimizer", "optimizer_state_changed", "memory_shared")
"""Patterns that need whole variables, or all of them or all of the optimizer's state on every rank."""


def _freeze_middle(model: nn.Module) -> None:
    model.middle.requires_grad_(False)


def _sgd_of_all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pattern(prepare=_freeze_middle, optimize=_sgd_of_all)
def _unfrozen_later(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.model.middle.requires_grad_(True)
        job.step(step)


@pattern(optimize=_sgd_of_all)
def _frozen_later(job: Job) -> None:
    for step in range(STEPS):
        if step in (2, 5):
            for parameter in job.model.first.parameters():
                parameter.requires_grad = step == 5
        job.step(step)


@pattern(prepare=_freeze_middle)
def _group_added_later(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.model.middle.requires_grad_(True)
            job.optimizer.add_param_group({"params": list(job.model.middle.parameters()), "lr": 0.01})
        job.step(step)


@pattern(optimize=lambda model: torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9))
def _group_of_known_parameters(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.optimizer.add_param_group({"params": list(job.model.first.parameters())})
        job.step(step)


@pattern()
def _layer_replaced(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            # Ranks draw different weights; the first rank's count.
            torch.manual_seed(dist.get_rank())
            job.model.head = nn.Linear(12, 3).double().to(job.device)
            if not job.ours:
                for parameter in job.model.head.parameters():
                    dist.broadcast(parameter.data, 0)
            job.optimizer.param_groups[0]["params"] = [p for p in job.model.parameters() if p.requires_grad]
        job.step(step)


@pattern()
def _new_optimizer(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01)
        job.step(step)


@pattern()
def _distributed_again(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01)
            if job.ours:
                offbeat.distribute(job.model, job.optimizer, job.strategy)
        job.step(step)


@pattern(optimize=lambda model: torch.optim.SGD([*model.first.parameters(), *model.middle.parameters()], lr=0.1))
def _two_optimizers(job: Job) -> None:
    second = torch.optim.AdamW(job.model.head.parameters(), lr=0.01)
    for step in range(STEPS):
        second.zero_grad()
        job.step(step)
        second.step()


@pattern()
def _converted(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.model.float()
            job.model.double()
        job.step(step)


@pattern()
def _saved_on_one_rank(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        if dist.get_rank() == 0:
            state = job.model.state_dict()
            assert list(state) == list(Net().state_dict())


@pattern()
def _discriminator_frozen_in_turns(job: Job) -> None:
    """A GAN with two models: in every step the discriminator is frozen while the generator trains."""
    other = Job(job.strategy, make=lambda: Net(14))
    kept = other.model.offbeat.plan if job.ours else None
    for step in range(STEPS):
        x, y = job.batch(step)
        other.model.requires_grad_(True)
        other.optimizer.zero_grad()
        fake = F.pad(job.model(x), (0, 6))
        other.backward(F.cross_entropy(other.model(fake.detach()), y))
        other.optimizer.step()
        other.model.requires_grad_(False)
        job.optimizer.zero_grad()
        job.backward(F.cross_entropy(other.model(fake), y))
        job.optimizer.step()
    job.see(*other.model.parameters())
    assert kept is None or kept.graph is other.model.offbeat.plan.graph


@pattern(make=lambda: nn.ModuleDict({"generator": Net(), "discriminator": Net(14)}), optimize=_sgd_of_all)
def _two_players_in_one_model(job: Job) -> None:
    generator, discriminator = job.model["generator"], job.model["discriminator"]
    for step in range(STEPS):
        x, y = job.batch(step)
        fake = F.pad(generator(x), (0, 6))
        for player, opponent, given in ((discriminator, generator, fake.detach()), (generator, discriminator, fake)):
            opponent.requires_grad_(False)
            job.optimizer.zero_grad()
            job.backward(F.cross_entropy(discriminator(given), y))
            job.optimizer.step()
            opponent.requires_grad_(True)
            player.requires_grad_(True)


@pattern()
def _tied_at_run_time(job: Job) -> None:
    for step in range(STEPS):
        if step == 3:
            job.model.middle[2].weight = job.model.middle[0].weight
        job.step(step)
        job.see(job.model.middle[2].weight)


@pattern()
def _quantised_copy(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        plain = copy.deepcopy(job.model).cpu().float()
        quantised = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
        assert type(quantised) is Net
        job.see(quantised(torch.ones(2, 9)))
