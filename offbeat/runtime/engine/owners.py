"""The work of owners after the first collective of a message: the program's tail, in the plan's order.

Further reductions, the owners' updates, and the parameters' way back. Where the training loop reads gradients before
`step()`, the reductions run then and owners send the averages to everybody.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from offbeat.plan import Task
from offbeat.runtime.engine.training import Training
from offbeat.runtime.faults import explain
from offbeat.runtime.lazy import raw_gradient
from offbeat.runtime.sync import Synchroniser
from offbeat.runtime.unit_optimizer import UnitOptimizer, scaling_of
from offbeat.torch_private import version_of

Apply = Callable[[UnitOptimizer, Synchroniser], None]
"""Steps an optimizer with the averaged gradients of a message."""


class Owners:
    """This rank's part in messages with owners."""

    def __init__(self, training: Training, aliased: frozenset[int]) -> None:
        """`aliased` are parameters (by id) that must stay where they are in memory."""
        self.training = training
        self.tail = training.plan.program.tail_of("synchronous")
        self.stale_tail = training.plan.program.tail_of("stale")
        self.served = [training.synchronisers[index] for index in dict.fromkeys(task.message for task in self.tail)]
        """Messages whose averaged gradient is not on every replica."""
        self.prepared = self.reduced = False
        """Whether `prepare` and `reduce` have run since the last backward pass began."""
        self.optimizers: dict[int, UnitOptimizer] = {}
        """For messages that this rank owns, with its own optimizer state."""
        self.commands = training.channels.commands
        """Sends commands to servers without a replica; None elsewhere."""
        self.versions: dict[int, list[int]] = {}
        """Of the parameters of each message that a server without a replica owns, as it sent them."""
        for synchroniser in training.synchronisers:
            if not synchroniser.replicated:
                synchroniser.hold_values(aliased)
                optimizer = training.optimizer_of(synchroniser.units())
                if optimizer is not None:
                    self.optimizers[synchroniser.message.index] = optimizer
        self.received(each for each in training.synchronisers if not each.replicated)

    def tell(self, command: str, **facts: Any) -> None:
        """Tells servers without a replica to do their part of what follows."""
        if self.commands is not None and self.commands.leads:
            with explain(self.training.plan, what="the servers"):
                self.commands.tell(command, **facts)

    def call_servers(self, function: str) -> None:
        """Lets servers call 'package.module:function', in which all ranks take part, as this one does next."""
        self.tell("meet", function=function)

    def tell_step(self, unused: Collection[int], published: bool) -> None:
        """Tells servers to apply this step, with the current hyperparameters and the training loop's changes."""
        if self.commands is None or not self.commands.leads or not self._apart():
            return
        names = {id(parameter): name for name, parameter in self.training.parameters.items()}
        served = {name for each in self._apart() for name in each.message.variables}
        changed = {
            names[id(parameter)]: parameter.detach()
            for each in self._apart()
            for parameter, version in zip(each.parameters, self.versions.get(each.message.index, ()), strict=False)
            if version_of(parameter) != version
        }
        gradients = {name: raw_gradient(self.training.parameters[name]) for name in sorted(served)}
        self.tell(
            "step",
            groups=[{k: v for k, v in g.items() if k != "params"} for g in self.training.optimizer.param_groups],
            unused=[names[each] for each in unused],
            values=changed,
            gradients=gradients if published else None,
            scaling=scaling_of(self.training.optimizer),
        )

    def _apart(self) -> list[Synchroniser]:
        """Messages owned by a server without a replica."""
        replicas = self.training.plan.replicas
        owned = (each for each in self.training.synchronisers if each.message.owner is not None)
        return [each for each in owned if each.message.owner not in replicas]

    def received(self, synchronisers: Iterable[Synchroniser]) -> None:
        """Records the parameters of these messages, all of which have returned, to detect changes by the training loop.

        Messages with parts of one variable must be given together: each changes the version of the whole."""
        if self.commands is not None:
            for each in synchronisers:
                self.versions[each.message.index] = [version_of(p) for p in each.parameters]

    def prepare(self) -> None:
        """Runs the rounds that updates need, in one order on all ranks and before any rank waits for an owner."""
        if not self.prepared:
            self.prepared = True
            for synchroniser in self.served:
                with explain(self.training.plan, synchroniser):
                    synchroniser.prepare()

    def reduce(self) -> None:
        """Runs the reductions of the tail, without the updates."""
        if not self.reduced:
            self.tell("reduce")
        self.prepare()
        if not self.reduced:
            self.reduced = True
            for task in self.tail:
                if not _returning(task):
                    self._run(task, None)

    def run(self, apply: Apply) -> None:
        """Runs the tail: reductions that have not run yet, updates, and the return of parameters."""
        self.prepare()
        for task in self.tail:
            if _returning(task) or not self.reduced:
                self._run(task, apply)

    def run_stale(self, message: int, apply: Apply) -> None:
        """Runs the tail of one stale message that has arrived."""
        for task in self.stale_tail:
            if task.message == message:
                self._do(task, apply)

    def update_alone(self, message: int) -> None:
        """Applies the content of an asynchronous message's inbox; runs in the server's threads."""
        optimizer = self.optimizers.get(message)
        if optimizer is not None:
            optimizer.refresh()
            optimizer.take_gradients({}, frozenset())
            optimizer.step()

    def publish(self, synchroniser: Synchroniser) -> None:
        """Sends a message's averaged gradient to every replica."""
        self.tell("publish", message=synchroniser.message.index)
        delivering = [t for t in self.tail if t.message == synchroniser.message.index and t.delivers]
        with explain(self.training.plan, synchroniser):
            synchroniser.publish(delivering)

    def _run(self, task: Task, apply: Apply | None) -> None:
        synchroniser = self.training.synchronisers[task.message]
        with explain(self.training.plan, synchroniser, task):
            with self.training.reports.local("wait", (task.message,)):
                for before in task.after:
                    synchroniser.wait(before)
            self._do(task, apply)

    def _do(self, task: Task, apply: Apply | None) -> None:
        synchroniser = self.training.synchronisers[task.message]
        queued = self.training.reports.now()
        if task.kind == "update":
            assert apply is not None
            with self.training.reports.local("update", (task.message,)):
                synchroniser.pack_values()
                synchroniser.collect(published=self.reduced)
                optimizer = self.optimizers.get(task.message)
                if optimizer is not None:
                    apply(optimizer, synchroniser)
            return
        if task.delivers:
            synchroniser.start_return(task)
        else:
            synchroniser.start(task)
        self.training.reports.collective(synchroniser, task, queued)


def _returning(task: Task) -> bool:
    return task.kind == "update" or bool(task.delivers)
