"""Training loops that once went wrong, each against averaging by hand on ranks in memory."""

import ctypes
import pickle
from collections.abc import Callable

import loop_models
import pytest
import torch
from loop_job import Job, Way
from random_loops import Loop, compare
from torch import nn

SERVERS: Way = ("ps_load_balanced", 0, "auto", True)
SHARDED: Way = ("sharded", 0, "auto", True)
PARTS: Way = ("partitioned_ps", 0, "auto", True)
OVERLAP: Way = ("overlap", 0, "auto", True)
FACTORS: Way = ("random", 814694, "auto", True)
"""Sends the factors of the head's weight in the model "tied"."""


def assert_same(
    body: Callable[[Job], None],
    way: Way,
    model: str = "dense",
    optimizer: str = "sgd",
    *,
    held_back: bool = False,
    find_unused: bool = False,
) -> None:
    loop = Loop(0, 3, model, optimizer, way, find_unused, held_back, ())
    assert compare(loop, body, tolerance=1e-12) == ""


def step(job: Job) -> None:
    job.optimizer.zero_grad()
    job.backward(job.forward())
    job.optimizer.step()


@pytest.mark.parametrize("way", [SERVERS, SHARDED, PARTS])
def test_a_step_without_a_backward_pass_applies_the_same_gradients_again(way: Way) -> None:
    def body(job: Job) -> None:
        step(job)
        step(job)
        job.optimizer.step()

    assert_same(body, way)


@pytest.mark.parametrize("way", [SERVERS, OVERLAP])
def test_a_plan_may_change_between_backward_and_step(way: Way) -> None:
    def body(job: Job) -> None:
        step(job)
        job.optimizer.zero_grad()
        job.backward(job.forward())
        job.switch(SHARDED)
        job.optimizer.step()

    assert_same(body, way)


def test_gradients_that_owners_keep_survive_a_change_of_plan() -> None:
    def body(job: Job) -> None:
        step(job)
        job.switch(OVERLAP)
        for parameter in job.model.parameters():
            job.see("gradient", parameter.grad)

    assert_same(body, SERVERS)


def test_views_kept_from_before_a_change_of_plan_see_later_updates() -> None:
    def body(job: Job) -> None:
        views = [parameter.data for parameter in job.model.parameters()]
        step(job)
        job.switch(SERVERS)
        step(job)
        for view in views:
            job.see("view", view)

    assert_same(body, OVERLAP)


def test_a_gradient_read_after_the_step_leaves_outstanding_updates_right() -> None:
    def body(job: Job) -> None:
        step(job)
        step(job)
        job.see("gradient", job.model.head.bias.grad)

    # Only some of its variables have owners.
    assert_same(body, ("random", 260860, "auto", True), optimizer="rmsprop")


def test_factors_add_to_gradients_of_earlier_passes() -> None:
    def body(job: Job) -> None:
        step(job)
        for _ in range(2):
            job.backward(job.forward())
        job.optimizer.step()

    assert_same(body, FACTORS, "tied")


def test_factors_of_passes_that_were_forgotten_are_not_sent() -> None:
    def body(job: Job) -> None:
        with job.no_sync():
            job.backward(job.forward())
        job.model.zero_grad()
        step(job)

    assert_same(body, FACTORS, "tied")


def test_gradients_of_a_sparse_server_can_be_read_and_kept() -> None:
    def body(job: Job) -> None:
        for _ in range(2):
            job.backward(job.forward())
            job.see("gradient", job.model.first.weight.grad)
            job.optimizer.step()

    assert_same(body, ("parallax", 0, "auto", True), "sparse")


def test_gradients_of_a_table_with_sparse_and_dense_shards_can_be_read() -> None:
    def body(job: Job) -> None:
        step(job)
        job.backward(job.forward())
        job.see("gradient", job.model.first.weight.grad)

    assert_same(body, ("random", 377026, "auto", True), "sparse")


def test_what_is_written_to_a_parameter_without_an_optimizer_stays() -> None:
    def body(job: Job) -> None:
        job.model.head.weight.data = torch.ones_like(job.model.head.weight.data)
        step(job)

    assert_same(body, SERVERS, held_back=True)


def test_a_variable_in_parts_may_get_another_memory() -> None:
    def body(job: Job) -> None:
        step(job)
        for parameter in job.model.parameters():
            parameter.data = parameter.data * 0.5
        step(job)

    assert_same(body, ("random", 86838, "auto", True), "tied")


@pytest.mark.parametrize("seed", [293744])
def test_state_that_is_kept_apart_is_saved(seed: int) -> None:
    def body(job: Job) -> None:
        step(job)
        for number, state in sorted(job.optimizer.state_dict()["state"].items()):
            job.see(f"momentum of {number}", state["momentum_buffer"])

    assert_same(body, ("random", seed, "auto", False), "normed", "decay")


def evaluate(job: Job) -> None:
    job.model.eval()
    with torch.no_grad():
        job.see("loss", job.forward())
    job.model.train()


def a_part_alone(job: Job) -> None:
    with torch.no_grad():
        job.hidden()


def other_buffers(job: Job) -> None:
    for buffer in job.model.buffers():
        buffer.fill_(2 + job.world.rank)


def replaced_buffers(job: Job) -> None:
    job.model.middle[1].running_mean = torch.full((13,), 0.2 * job.world.rank).double()


def forward_only(job: Job) -> None:
    job.forward()


@pytest.mark.parametrize("change", [a_part_alone, other_buffers, replaced_buffers, forward_only])
def test_a_forward_sees_the_present_buffers_of_rank_0(change: Callable[[Job], None]) -> None:
    def body(job: Job) -> None:
        for _ in range(2):
            step(job)
            change(job)
            evaluate(job)

    assert_same(body, OVERLAP, "normed")


def test_buffers_stay_as_they_are_after_a_forward_without_gradients() -> None:
    def body(job: Job) -> None:
        step(job)
        with torch.no_grad():
            job.forward()
        evaluate(job)

    assert_same(body, OVERLAP, "normed")


def test_buffers_stay_as_they_are_inside_no_sync() -> None:
    def body(job: Job) -> None:
        step(job)
        with job.no_sync():
            job.backward(job.forward())
            evaluate(job)
        step(job)
        evaluate(job)

    assert_same(body, OVERLAP, "normed")


def test_a_change_of_plan_changes_no_buffers() -> None:
    def body(job: Job) -> None:
        step(job)
        job.switch(SERVERS)
        for name, buffer in job.model.named_buffers():
            job.see(name, buffer)
        evaluate(job)

    assert_same(body, OVERLAP, "normed")


def test_running_statistics_may_arrive_between_two_forwards_of_one_backward_pass() -> None:
    def body(job: Job) -> None:
        for _ in range(2):
            job.optimizer.zero_grad()
            job.backward(job.forward() + job.forward())
            job.optimizer.step()

    assert_same(body, OVERLAP, "normed")


def test_one_rank_alone_may_call_the_module_that_has_other_running_statistics() -> None:
    def body(job: Job) -> None:
        step(job)
        job.forward()
        if job.world.rank == 0:
            with torch.no_grad():
                model = job.model.module if job.ours else job.model
                job.see("loss", model.eval()(*loop_models.batch(job.name, 100, 0)))
                model.train()
        step(job)
        evaluate(job)

    assert_same(body, OVERLAP, "normed")


@pytest.mark.parametrize("way", [SERVERS, OVERLAP])
def test_a_gradient_that_was_forgotten_is_not_filled_with_zeros(way: Way) -> None:
    def body(job: Job) -> None:
        step(job)
        step(job)
        job.optimizer.zero_grad(set_to_none=True)
        job.model.zero_grad(set_to_none=False)
        for parameter in job.model.parameters():
            job.see("gradient", parameter.grad)

    assert_same(body, way)


def test_a_gradient_that_nobody_has_is_not_filled_with_zeros() -> None:
    def body(job: Job) -> None:
        step(job)
        job.model.zero_grad(set_to_none=False)
        for parameter in job.model.second.parameters():
            job.see("gradient", parameter.grad)

    assert_same(body, SERVERS, "heads")


@pytest.mark.parametrize("way", [SHARDED, OVERLAP])
def test_a_parameter_group_may_be_added_between_backward_and_step(way: Way) -> None:
    def body(job: Job) -> None:
        step(job)
        job.optimizer.zero_grad()
        job.backward(job.forward())
        job.optimizer.add_param_group({"params": list(job.model.head.parameters()), "lr": 0.02})
        job.optimizer.step()

    assert_same(body, way, held_back=True)


def test_gradients_stay_local_inside_no_sync_where_the_plan_is_made_anew() -> None:
    def body(job: Job) -> None:
        step(job)
        job.model.first.requires_grad_(False)
        job.optimizer.zero_grad()
        with job.no_sync():
            job.backward(job.forward())
            job.see("gradient", job.model.head.weight.grad)

    assert_same(body, OVERLAP)


def test_weights_for_one_forward_are_no_change_of_the_model() -> None:
    def body(job: Job) -> None:
        step(job)
        job.model.first.requires_grad_(False)
        job.optimizer.zero_grad()
        weight = job.model.head.weight
        job.backward(job.forward(weights={"head.weight": weight * 0.5}))
        job.optimizer.step()
        step(job)

    assert_same(body, OVERLAP)


def test_a_layer_that_is_replaced_before_an_evaluation_trains() -> None:
    def body(job: Job) -> None:
        step(job)
        job.model.head = loop_models.make("dense", seed=7).head
        job.optimizer.param_groups[0]["params"] = list(job.model.parameters())
        evaluate(job)
        step(job)

    assert_same(body, OVERLAP)


@pytest.mark.parametrize(("steps", "passes"), [([1, 2, 3], 1), ([3, 1, 2], 2), ([0, 2, 1], 1)])
@pytest.mark.parametrize(("way", "model"), [(SERVERS, "dense"), (OVERLAP, "normed"), (OVERLAP, "moving")])
def test_ranks_that_run_out_of_data(steps: list[int], passes: int, way: Way, model: str) -> None:
    def optimize(job: Job) -> None:
        job.optimizer.step()
        job.optimizer.zero_grad()

    def body(job: Job) -> None:
        step(job)
        # The optimizer does not hold all parameters, so that some gradients are never forgotten.
        job.join(steps, passes, lambda: optimize(job))
        for name, buffer in job.model.named_buffers():
            job.see(name, buffer)
        step(job)

    assert_same(body, way, model, held_back=True)


@pytest.mark.parametrize("way", [OVERLAP, ("partitioned_all_reduce", 0, "auto", True), PARTS])
@pytest.mark.parametrize("model", ["dense", "heads"])
def test_an_update_may_be_needed_inside_inference_mode(way: Way, model: str) -> None:
    def body(job: Job) -> None:
        for number in range(4):
            if model == "heads":
                # The other head's momentum begins there.
                job.model.chosen = number // 2
            job.optimizer.zero_grad(set_to_none=False)
            job.backward(job.forward())
            job.optimizer.step()
            with torch.inference_mode():
                job.see("loss", job.forward())

    assert_same(body, way, model, find_unused=model == "heads")


def test_a_model_that_changes_before_its_first_step_is_watched_in_that_step_only() -> None:
    def body(job: Job) -> None:
        job.model.first.requires_grad_(False)
        for _ in range(2):
            step(job)
            for parameter in pickle.loads(pickle.dumps(job.model)).parameters():
                job.see("parameter", parameter)
        assert not torch.overrides._get_current_function_mode_stack()

    assert_same(body, OVERLAP)


def frozen(job: Job, *parts: str, kept: bool = False) -> None:
    """A step in which these parts of the model are frozen."""
    for part in parts:
        job.model.get_submodule(part).requires_grad_(False)
    if not kept:
        job.optimizer.zero_grad()
    job.backward(job.forward())
    job.optimizer.step()
    for part in parts:
        job.model.get_submodule(part).requires_grad_(True)


def plans_of(body: Callable[[Job], None], way: Way, optimizer: str = "sgd") -> int:
    """How many plans a loop that equals the reference needs."""
    plans = [None]

    def counting(job: Job) -> None:
        step(job)
        if job.runtime is not None and job.world.rank == 0:
            switch = job.runtime.switch
            job.runtime.switch = lambda plan: (plans.append(plan), switch(plan))  # type: ignore[method-assign]
        body(job)

    assert_same(counting, way, optimizer=optimizer)
    return len(plans)


@pytest.mark.parametrize("optimizer", ["decay", "adamw"])
@pytest.mark.parametrize("kept", [False, True])
def test_parts_that_take_turns_are_frozen_without_another_plan(optimizer: str, kept: bool) -> None:
    """As the generator and the discriminator of one model; the gradients of the other part may be kept meanwhile."""

    def body(job: Job) -> None:
        for _ in range(3):
            frozen(job, "head", kept=kept)
            frozen(job, "first", "middle", kept=kept)
            for parameter in job.model.parameters():
                job.see("gradient", parameter.grad)
        step(job)

    assert plans_of(body, OVERLAP, optimizer) == 1


def test_a_part_that_is_unfrozen_before_the_backward_pass_keeps_its_values() -> None:
    def body(job: Job) -> None:
        for _ in range(2):
            job.model.first.requires_grad_(False)
            job.optimizer.zero_grad()
            loss = job.forward()
            job.model.first.requires_grad_(True)
            job.backward(loss)
            job.optimizer.step()
        step(job)

    assert plans_of(body, OVERLAP) == 1


def test_a_whole_model_may_be_frozen_for_a_while_with_servers() -> None:
    def body(job: Job) -> None:
        for _ in range(2):
            job.model.requires_grad_(False)
            x = loop_models.batch(job.name, 7, job.world.rank)[0].requires_grad_()
            job.model.head(job.model.hidden(x)).sum().backward()
            job.forward()
            job.model.requires_grad_(True)
            step(job)

    assert plans_of(body, SERVERS) == 1


def test_what_stays_frozen_gets_a_plan_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.runtime.engine.frozen.LONG_STEPS", 3)

    def body(job: Job) -> None:
        job.model.first.requires_grad_(False)
        for _ in range(5):
            step(job)

    assert plans_of(body, OVERLAP) == 2


@pytest.mark.parametrize("way", [SERVERS, OVERLAP])
@pytest.mark.parametrize("late", [False, True])
def test_parameters_may_change_their_groups(way: Way, late: bool) -> None:
    """As many as before in each, between two steps or between backward() and step()."""

    def body(job: Job) -> None:
        job.optimizer.add_param_group({"params": list(job.model.head.parameters()), "lr": 0.5})
        step(job)
        step(job)
        job.optimizer.zero_grad()
        if late:
            job.backward(job.forward())
        first, second = job.optimizer.param_groups
        first["params"][:2], second["params"][:] = second["params"][:], first["params"][:2]
        if not late:
            job.backward(job.forward())
        job.optimizer.step()
        step(job)

    assert_same(body, way, held_back=True)


@pytest.mark.parametrize("way", [SERVERS, OVERLAP, ("ddp", 0, "barrier", True)])
@pytest.mark.parametrize("early", [False, True])
def test_a_hook_after_accumulation_sees_and_changes_this_ranks_own_gradient(way: Way, early: bool) -> None:
    """As with DDP; registered before distribute() or after it."""

    def hook(job: Job) -> Callable[[torch.Tensor], None]:
        def see(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            job.see("own gradient", parameter.grad)
            parameter.grad.mul_(0.5)

        return see

    def body(job: Job) -> None:
        if early and job.runtime is not None:
            job.runtime.release()
        for parameter in job.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook(job))
        job.model.head.weight.register_hook(lambda gradient: gradient * 3)
        if early:
            job.distribute(way)
        for _ in range(3):
            step(job)
        job.backward(job.forward())
        job.optimizer.step()

    assert_same(body, way)


@pytest.mark.parametrize("way", [SERVERS, OVERLAP])
def test_a_graph_may_be_used_by_two_backward_passes(way: Way) -> None:
    def body(job: Job) -> None:
        for _ in range(3):
            job.optimizer.zero_grad()
            loss = job.forward()
            job.backward(loss, retain_graph=True)
            job.backward(loss)
            job.optimizer.step()

    assert_same(body, way)


def test_factors_of_a_graph_that_is_used_twice_are_sent_twice() -> None:
    def body(job: Job) -> None:
        step(job)
        loss = job.forward()
        job.backward(loss, retain_graph=True)
        job.backward(loss)
        job.optimizer.step()

    assert_same(body, FACTORS, "tied")


def without_a_name(pointer: int, count: int) -> torch.Tensor:
    """Copies memory that nobody knows to belong to a tensor."""
    return torch.tensor((ctypes.c_double * count).from_address(pointer)[:], dtype=torch.float64)


READING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data_ptr": lambda p: without_a_name(p.data_ptr(), p.numel()),
    "untyped_storage": lambda p: without_a_name(p.untyped_storage().data_ptr(), p.numel()),
    "repr": lambda p: torch.tensor(bytearray(repr(p).encode())),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "capsule": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).clone(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()).clone(),
}


@pytest.mark.parametrize("way", sorted(READING))
def test_an_update_that_is_outstanding_is_applied_before_it_is_read(way: str) -> None:
    def body(job: Job) -> None:
        step(job)
        for _ in range(2):
            step(job)
            if job.runtime is not None:
                assert job.runtime.engine.updates.outstanding
            for parameter in job.model.parameters():
                job.see(way, READING[way](parameter))

    assert_same(body, OVERLAP)


class Marked(nn.Parameter):
    """A parameter of a user's class."""


def test_a_parameter_of_a_class_of_its_own_may_be_frozen_and_unfrozen() -> None:
    def body(job: Job) -> None:
        bias = job.model.head.bias = Marked(job.model.head.bias.detach())
        job.optimizer.param_groups[0]["params"][-1] = bias
        for trains in (False, True, True, False, True):
            bias.requires_grad_(trains)
            step(job)

    assert_same(body, OVERLAP)


def test_gradients_of_frozen_parts_stay_where_ranks_run_out_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.runtime.engine.frozen.LONG_STEPS", 2)

    def optimize(job: Job) -> None:
        job.optimizer.step()
        job.model.head.zero_grad()

    def body(job: Job) -> None:
        step(job)
        job.model.first.requires_grad_(False)
        job.join([1, 2, 4], 1, lambda: optimize(job))
        step(job)

    assert_same(body, OVERLAP)


def test_a_part_that_is_frozen_before_the_backward_pass_gets_no_gradient() -> None:
    def body(job: Job) -> None:
        step(job)
        for _ in range(3):
            job.optimizer.zero_grad()
            loss = job.forward()
            job.model.first.requires_grad_(False)
            job.backward(loss)
            job.optimizer.step()
            job.model.first.requires_grad_(True)
        step(job)

    assert_same(body, OVERLAP)


def test_ranks_keep_one_plan_though_only_one_of_them_registers_modules() -> None:
    """Ids of modules are used again, so that registrations elsewhere may count on one rank alone."""

    def body(job: Job) -> None:
        step(job)
        job.model.first.requires_grad_(False)
        if job.world.rank == 1:
            job.model.head.weight = job.model.head.weight
        step(job)

    assert plans_of(body, OVERLAP) == 1
