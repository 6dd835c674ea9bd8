"""Training scripts whose forward, backward and step are not one of each."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from guest_job import STEPS, Job, Net, pattern
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@pattern()
def _evaluation(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        job.model.eval()
        with torch.no_grad():
            job.see(
                job.model(job.batch(50)[0]), job.model.head(torch.ones(1, 12, dtype=torch.float64, device=job.device))
            )
        job.model.train()


@pattern()
def _generation(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        tokens = job.batch(60)[0]
        with torch.inference_mode():
            for _ in range(3):
                tokens = torch.cat([tokens[:, 3:], job.model(tokens)], dim=1)
        job.see(tokens)


@pattern()
def _unwrapped_calls(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        if dist.get_rank() == 0:
            with torch.no_grad():
                job.see(getattr(job.model, "module", job.model)(job.batch(50)[0]))


@pattern()
def _accumulation(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        for part in range(3):
            job.backward(job.loss(10 * step + part) / 3, sync=part == 2)
        job.optimizer.step()


@pattern()
def _plain_accumulation(job: Job) -> None:
    for step in range(STEPS):
        for part in range(3):
            job.backward(job.loss(10 * step + part) / 3)
        job.optimizer.step()
        job.optimizer.zero_grad()


@pattern()
def _parts_called_alone(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch(step)
        for scale in (1.0, 0.5):
            hidden = job.model.middle(torch.tanh(job.model.first(x * scale)))
            job.backward(F.cross_entropy(job.model.head(hidden), y))
        job.optimizer.step()


@pattern()
def _backward_passes_for_parts(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch(step)
        hidden = job.model.middle(torch.tanh(job.model.first(x)))
        job.backward(F.cross_entropy(job.model.head(hidden.detach()), y))
        job.backward(hidden.pow(2).mean())
        job.optimizer.step()


@pattern()
def _several_forwards(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward(job.loss(step) + job.loss(step + 100))
        job.optimizer.step()


@pattern()
def _skipped_steps(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward(job.loss(step))
        if step % 3:
            job.optimizer.step()


@pattern()
def _model_zero_grad(job: Job) -> None:
    for step in range(STEPS):
        job.model.zero_grad(set_to_none=step % 2 == 0)
        job.backward(job.loss(step))
        job.optimizer.step()


@pattern()
def _clipping_by_value(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward(job.loss(step))
        nn.utils.clip_grad_value_(job.model.parameters(), 0.02)
        job.optimizer.step()


@pattern()
def _gradient_penalty(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.loss(step)
        weights = [job.model.first.weight, job.model.head.weight]
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        job.backward(loss + sum(slope.pow(2).sum() for slope in slopes))
        job.optimizer.step()


@pattern()
def _uneven_batches(job: Job) -> None:
    for step in range(STEPS):
        job.step(step, size=3 + dist.get_rank() + step % 2)


class Checkpointed(Net):
    """Recomputes its middle, in both of torch's ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for reentrant in (True, False):
            hidden = checkpoint(self.middle, hidden, use_reentrant=reentrant)
        return self.head(hidden)


@pattern(make=Checkpointed)
def _activation_checkpointing(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


def _normalise(model: nn.Module) -> None:
    parametrizations.weight_norm(model.first)
    parametrizations.spectral_norm(model.head)


@pattern(prepare=_normalise)
def _parametrizations(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        job.see(job.model.first.weight, job.model.head.weight)


def _with_hooks(model: nn.Module) -> None:
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    model.first.register_full_backward_hook(lambda module, inputs, outputs: None)


@pattern(prepare=_with_hooks)
def _gradient_hooks(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


@pattern()
def _clipping_by_norm(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward(job.loss(step))
        job.see(nn.utils.clip_grad_norm_(job.model.parameters(), 0.5))
        job.optimizer.step()


@pattern()
def _gradient_scaler(job: Job) -> None:
    scaler = torch.amp.GradScaler(job.device.type, init_scale=8.0)
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.backward(scaler.scale(job.loss(step)))
        scaler.step(job.optimizer)
        scaler.update()


class Twice(Net):
    """Runs one layer twice, and one of its weights by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.middle(torch.tanh(self.first(x))))
        return self.head(hidden) + 0.1 * F.linear(hidden, self.head.weight)


@pattern(make=Twice)
def _shared_submodules(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


class Mixed(Net):
    """Parameters of three element types."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.phase.abs() + self.shift

    def double(self) -> "Mixed":
        super().double()
        self.shift.data = self.shift.data.float()
        return self


@pattern(make=Mixed)
def _mixed_and_complex_types(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


@pattern()
def _inner_steps_by_functional_calls(job: Job) -> None:
    for step in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch(step)
        weights = dict(job.model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(job.model, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        job.backward(F.cross_entropy(torch.func.functional_call(job.model, moved, (x.flip(0),)), y))
        job.optimizer.step()


@pattern()
def _a_discriminator_beside_it(job: Job) -> None:
    other = Job(job.strategy, make=lambda: Net(14))
    for step in range(STEPS):
        x, y = job.batch(step)
        other.optimizer.zero_grad()
        other.backward(F.cross_entropy(other.model(x + job.model(x).detach().mean()), y))
        other.optimizer.step()
        job.optimizer.zero_grad()
        job.backward(F.cross_entropy(job.model(x) * other.model(x), y))
        job.optimizer.step()
    job.see(*other.model.parameters())


@pattern()
def _learning_rate_schedule(job: Job) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, T_max=STEPS)
    for step in range(STEPS):
        job.step(step)
        schedule.step()


@pattern()
def _checkpoint_and_resume(job: Job) -> None:
    kept: dict[str, Any] = {}
    for step in (0, 1, 2, 3, 1, 2, 3, 4):
        if step == 1 and kept:
            job.model.load_state_dict(kept["model"])
            # Torch's optimizers go on with the tensors that they are given.
            job.optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
        job.step(step)
        if step == 0:
            kept = copy.deepcopy({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()})


@pattern(prepare=lambda model: setattr(model, "middle", torch.compile(model.middle, backend="eager")))
def _compiled_part(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)


@pattern()
def _compiled_later(job: Job) -> None:
    compiled = torch.compile(job.model, backend="eager")
    for step in range(STEPS):
        job.optimizer.zero_grad()
        x, y = job.batch(step)
        job.backward(F.cross_entropy(compiled(x), y))
        job.optimizer.step()
        job.see(job.model.head.weight)


@pattern()
def _uneven_data(job: Job) -> None:
    steps = 4 + 2 * dist.get_rank()
    if job.ours:
        with job.model.join(divide_by_initial_world_size=True), job.model.join(enable=False):
            for step in range(steps):
                job.step(step)
        return
    for step in range(6):
        job.optimizer.zero_grad()
        if step < steps:
            job.loss(step).backward()
        job.average()
        job.optimizer.step()


@pattern()
def _compiled_step(job: Job) -> None:
    def work(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(job.model(x), y)
        job.backward(loss)
        job.optimizer.step()
        return loss

    compiled = torch.compile(work, backend="eager")
    for step in range(STEPS):
        job.optimizer.zero_grad()
        job.see(compiled(*job.batch(step)))


class Dropped(Net):
    """Draws random numbers in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.3))


@pattern(make=Dropped)
def _random_states(job: Job) -> None:
    torch.manual_seed(70 + dist.get_rank())
    for step in range(STEPS):
        job.step(step)
        if step == 2:
            kept = torch.get_rng_state()
        if step == 4:
            torch.set_rng_state(kept)
    job.see(torch.get_rng_state())


def _add_batch_norm(model: nn.Module) -> None:
    model.middle.insert(1, nn.BatchNorm1d(12).double())


@pattern(prepare=_add_batch_norm)
def _batch_norm(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
    # Running statistics are shared when the next forward begins, as with DDP.
    job.loss(STEPS)
    job.see(*(buffer for buffer in job.model.buffers() if dist.get_rank() == 0))


class Embedded(Net):
    """Begins with a table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 9, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, :5].abs() * 6).long().clamp(max=19)).sum(1))


@pattern(make=Embedded, optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
def _sparse_embeddings(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
