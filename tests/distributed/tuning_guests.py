"""strategy="auto" in scripts that are not one model in one loop on one job → what they end with and what it decided."""

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import guest_changes
import guest_loops
import guest_parameters
import torch
import torch.distributed as dist
import torch.nn.functional as F
from guest_job import Job, Net
from guests import guest
from training import TIMEOUT, untimed_links
from tuning_online import favouring

import offbeat
from offbeat.errors import OffbeatError
from offbeat.online import searcher, tuner
from offbeat.runtime.distribute import Runtime
from offbeat.torch_private import hooks_of

SHORT = {
    "WARM_UP_STEPS": 1,
    "UNRECORDED_STEPS": 1,
    "RECORDED_STEPS": 2,
    "ASKED_STEPS": 1,
    "SETTLING_STEPS": 1,
    "BLOCK_STEPS": 1,
    "PAIR_STEPS": 4,
}


@contextmanager
def hasty(builder: str = "partitioned_all_reduce") -> Generator[None, None, None]:
    """Tuners go through all of their phases within a few steps, and find a plan that is said to be faster."""

    def known_link(*_: Any) -> Generator[None, None, tuple[float, float]]:
        yield
        return 1e-4, 1e-9

    with mock.patch.multiple(tuner, start_search=favouring(builder), link_fit=known_link, **SHORT), untimed_links():
        yield


GUEST_STEPS = 20


def noted_switches(runtime: Runtime) -> list[str]:
    """Gets the name of each strategy that the runtime switches to."""
    names: list[str] = []
    switch = runtime.switch

    def noted(plan: Any) -> None:
        switch(plan)
        names.append(plan.strategy.name)

    runtime.switch = noted  # type: ignore[method-assign]
    return names


def said_of(model: torch.nn.Module) -> list[str]:
    return [decision.what for decision in model.offbeat.history]


def farthest(ours: torch.nn.Module, reference: torch.nn.Module) -> float:
    """The largest difference of two models' parameters."""
    pairs = zip(ours.parameters(), reference.parameters(), strict=True)
    return max(float((mine.detach() - theirs.detach()).abs().max()) for mine, theirs in pairs)


def adversaries(steps: int, calls: int) -> dict[str, Any]:
    """Two models that train against each other, both under "auto"; one is called so many times in its own pass."""
    interval = sys.getswitchinterval()
    with hasty():
        ours, reference = ([Job(kind), Job(kind, make=lambda: Net(14))] for kind in ("auto", None))
        tried = [noted_switches(job.model._offbeat) for job in ours]
        for step in range(steps):
            for maker, critic in (ours, reference):
                x, y = critic.batch(step)
                critic.optimizer.zero_grad()
                made = maker.model(x).detach().mean()
                critic.backward(sum(F.cross_entropy(critic.model(x + turn * made), y) for turn in range(1, calls + 1)))
                critic.optimizer.step()
                maker.optimizer.zero_grad()
                maker.backward(F.cross_entropy(critic.model(x + maker.model(x).mean()), y))
                maker.optimizer.step()
        error = max(farthest(a.model, b.model) for a, b in zip(ours, reference, strict=True))
        said = [said_of(job.model) for job in ours]
        for job in ours:
            job.model._offbeat.release()
    return {"error": error, "tried": tried, "said": said, "hurried": sys.getswitchinterval() != interval}


def guest_under_auto(name: str) -> dict[str, Any]:
    """How far a pattern, over more steps than usual, ends up from the reference, and what "auto" did meanwhile."""
    tried: list[str] = []
    switch = Runtime.switch

    def noted(runtime: Runtime, plan: Any) -> None:
        switch(runtime, plan)
        tried.append(plan.strategy.name)

    with ExitStack() as more:
        for module in (guest_changes, guest_loops, guest_parameters):
            more.enter_context(mock.patch.object(module, "STEPS", GUEST_STEPS))
        more.enter_context(mock.patch.object(Runtime, "switch", noted))
        more.enter_context(hasty())
        answer = guest(name, "auto")
    return answer | {"tried": tried}


def distributed_twice(when: str) -> dict[str, Any]:
    """What the first "auto" leaves behind if the model is distributed again while it records or searches."""
    processes: list[searcher.Searcher] = []

    class Noted(searcher.Searcher):
        def __init__(self) -> None:
            super().__init__()
            processes.append(self)

    interval = sys.getswitchinterval()
    until = {"records": lambda tuned: tuned.engine.reports.observer is not None, "searches": lambda _: bool(asked)}
    asked: list[Any] = []
    ask = searcher.Searcher.ask

    def noted_ask(self: searcher.Searcher, request: dict[str, Any]) -> None:
        ask(self, request)
        asked.append(request)

    with hasty(), mock.patch.object(tuner, "start_search", Noted), mock.patch.object(Noted, "ask", noted_ask):
        job, reference = Job("auto"), Job(None)
        first, step = job.model._offbeat, 0
        going_on = torch.ones(1)
        while going_on.item():
            job.step(step)
            reference.step(step)
            step += 1
            if dist.get_rank() == 0:
                going_on.fill_(step < 40 and not until[when](first))
            dist.broadcast(going_on, 0)
        offbeat.distribute(job.model, job.optimizer, "overlap")
        ended = [each.process.poll() is not None for each in processes]
        observed = first.engine.reports.observer is not None or bool(first.visitors)
        for later in range(step, step + 2):
            job.step(later)
            reference.step(later)
    answer = {"error": farthest(job.model, reference.model), "ended": ended, "observed": observed}
    answer["hurried"] = sys.getswitchinterval() != interval
    job.model._offbeat.release()
    return answer | {"hooks": sum(len(each) for module in job.model.modules() for each in hooks_of(module))}


def by_hand(how: str, steps: int) -> dict[str, Any]:
    """A model under "auto" that the loop never calls: only its parts, or its weights."""
    with hasty():
        ours, reference = Job("auto"), Job(None)
        tried = noted_switches(ours.model._offbeat)
        for job in (ours, reference):
            for step in range(steps):
                job.optimizer.zero_grad()
                x, y = job.batch(step)
                if how == "parts":
                    out = job.model.head(job.model.middle(torch.tanh(job.model.first(x))))
                else:
                    out = F.linear(x[:, :3], job.model.head.weight.T) @ job.model.head.weight.T
                job.backward(F.cross_entropy(out, y))
                job.optimizer.step()
        error, said = farthest(ours.model, reference.model), said_of(ours.model)
        ours.model._offbeat.release()
    return {"error": error, "tried": tried, "said": said}


def part_of_a_job(steps: int, mesh: bool) -> dict[str, Any]:
    """The first half of the ranks trains one model under "auto", the other half another one without Offbeat."""
    size = dist.get_world_size() // 2
    groups = [dist.new_group(list(range(first, first + size))) for first in (0, size)]
    whole = torch.distributed.device_mesh.init_device_mesh("cpu", (2, size), mesh_dim_names=("job", "data"))
    mine, first = groups[dist.get_rank() // size], dist.get_rank() < size
    refused = []
    for given in ({"process_group": mine, "device_mesh": whole["data"]}, {"device_mesh": whole}):
        net = Net()
        try:
            offbeat.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), **given)
        except OffbeatError as error:
            refused.append(str(error))
    nets = [Net(12 if first else 14).double() for _ in range(2)]
    for net in nets:
        torch.manual_seed(3)
        for module in (net.first, net.middle[0], net.middle[2], net.head):
            module.reset_parameters()
    trainers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in nets]
    tried: list[str] = []
    said: list[str] = []
    with hasty():
        if first:
            where: dict[str, Any] = {"device_mesh": whole["data"]} if mesh else {"process_group": mine}
            offbeat.distribute(nets[0], trainers[0], timeout=TIMEOUT, quiet=True, **where)
            tried = noted_switches(nets[0]._offbeat)
        for step in range(steps):
            x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(step + dist.get_rank()))
            for net, trainer in zip(nets, trainers, strict=True):
                trainer.zero_grad()
                net(x).square().mean().backward()
                if not (first and net is nets[0]):
                    for parameter in net.parameters():
                        parameter.grad /= size
                        dist.all_reduce(parameter.grad, group=mine)
                trainer.step()
        error = farthest(*nets)
        if first:
            said = said_of(nets[0])
            nets[0]._offbeat.release()
    for group in groups:
        if group is mine:
            dist.destroy_process_group(group)
    return {"error": error, "tried": tried, "said": said, "refused": refused}
