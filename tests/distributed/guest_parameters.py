"""Training scripts that read and write parameters themselves."""

import copy
import io
import pickle

import torch
from guest_job import STEPS, Job, Net, pattern
from torch import nn
from torch.optim.swa_utils import AveragedModel


@pattern()
def _ema_over_a_list(job: Job) -> None:
    parameters = list(job.model.parameters())
    shadow = [parameter.detach().clone() for parameter in parameters]
    for step in range(STEPS):
        job.step(step)
        for mean, parameter in zip(shadow, parameters, strict=True):
            mean.mul_(0.9).add_(parameter.detach(), alpha=0.1)
    job.see(*shadow)


@pattern()
def _ema_over_one_weight(job: Job) -> None:
    weight, shadow = job.model.head.weight, job.model.head.weight.detach().clone()
    for step in range(STEPS):
        job.step(step)
        shadow.lerp_(weight.data, 0.2)
    job.see(shadow)


@pattern()
def _foreach_ema(job: Job) -> None:
    parameters = list(job.model.parameters())
    shadow = [parameter.detach().clone() for parameter in parameters]
    for step in range(STEPS):
        job.step(step)
        with torch.no_grad():
            torch._foreach_lerp_(shadow, parameters, 0.1)
    job.see(*shadow)


@pattern()
def _averaged_model(job: Job) -> None:
    averaged = AveragedModel(job.model)
    assert not hasattr(averaged.module, "_offbeat")
    for step in range(STEPS):
        job.step(step)
        averaged.update_parameters(job.model)
    job.see(*averaged.module.parameters())


@pattern()
def _copies(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        plain = copy.deepcopy(job.model)
        assert type(plain) is Net
        assert all(type(p) is nn.Parameter for p in plain.parameters())
        job.see(*plain.parameters(), plain(job.batch(0)[0]))


@pattern()
def _logging(job: Job) -> None:
    weight = job.model.first.weight
    for step in range(STEPS):
        job.step(step)
        norm = torch.linalg.vector_norm(weight)
        job.see(
            norm, weight[0, 0], torch.tensor(weight[1].tolist()), torch.from_numpy(weight.detach().cpu().numpy().copy())
        )
        assert str(weight.sum().item()) in str(float(weight.sum()))


@pattern()
def _kept_views(job: Job) -> None:
    row, flat, data = job.model.first.weight[2], job.model.middle[0].weight.detach().view(-1), job.model.head.bias.data
    for step in range(STEPS):
        job.step(step)
        job.see(row, flat, data)


@pattern()
def _views_made_between_steps(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        if step == 2:
            data = job.model.head.weight.data
        if step > 3:
            job.see(data)


@pattern()
def _clamping(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        with torch.no_grad():
            job.model.first.weight.clamp_(-0.2, 0.2)
        job.model.head.weight.data.mul_(0.99)
        job.model.head.bias.data = job.model.head.bias.data + 0.01


@pattern()
def _swapping_values(job: Job) -> None:
    kept = {name: value.clone() for name, value in job.model.state_dict().items()}
    for step in range(STEPS):
        job.step(step)
        if step == 3:
            now = {name: value.clone() for name, value in job.model.state_dict().items()}
            job.model.load_state_dict(kept)
            job.see(job.model(job.batch(9)[0]))
            job.model.load_state_dict(now)


@pattern()
def _saving(job: Job) -> None:
    for step in range(STEPS):
        job.step(step)
        for value in (job.model, getattr(job.model, "module", job.model)):
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
            assert type(loaded) is Net
            job.see(*loaded.parameters(), *pickle.loads(pickle.dumps(value)).parameters())
        job.see(*(s["momentum_buffer"] for s in pickle.loads(pickle.dumps(job.optimizer)).state.values()))
