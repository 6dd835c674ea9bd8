"""What users of DistributedDataParallel rely on holds under every class of synchroniser."""

from typing import Any

import pytest
from cases import mostly_slow
from harness import Pools

EXACT = 1e-10

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "all_reduce": ("overlap", {"bucket": 600, "slice_bytes": 1024}),
    "partitioned_all_reduce": ("partitioned_all_reduce", {"threshold": 300}),
    "server": ("ps_load_balanced", {"servers": "ranks"}),
    "partitioned_server": ("partitioned_ps", {"threshold": 200, "servers": "ranks"}),
    "sharded": ("sharded", {"bucket": 900}),
    "factors": ("poseidon", {"threshold": 200, "servers": "ranks"}),
}
"""One builder for each way an update is applied."""
NAMES = ("overlap", "partitioned_all_reduce", "ps", "sharded")
"""Builders used by name where no sizes matter."""
by_class = pytest.mark.parametrize("kind", mostly_slow(CLASSES, ["all_reduce", "partitioned_server"]))
by_strategy = pytest.mark.parametrize("strategy", mostly_slow(NAMES, ["overlap", "ps"]))


def check(answers: list[dict[str, Any]], mode: str = "deferred") -> None:
    assert [answer["mode"] for answer in answers] == [mode] * len(answers)
    assert max(answer["error"] for answer in answers) <= EXACT


@by_strategy
def test_state_dict_has_the_single_device_names(pools: Pools, strategy: str) -> None:
    for answer in pools(2).call("names", strategy=strategy):
        assert answer == {"names": True, "same": True, "type": True}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_slices_are_applied_as_they_arrive(pools: Pools, optimizer: str) -> None:
    builder, options = CLASSES["all_reduce"]
    answers = pools(2).call("in_portions", optimizer=optimizer, builder=builder, options=options)
    check(answers)
    assert all(len(answer["reached"]) > 6 and len(set(answer["reached"])) > 1 for answer in answers)


@by_strategy
def test_no_sync_accumulates(pools: Pools, strategy: str) -> None:
    check(pools(2).call("no_sync", strategy=strategy))


def test_no_sync_keeps_gradients_local(pools: Pools) -> None:
    for answer in pools(2).call("no_sync_keeps_gradients_local"):
        assert answer["error"] == 0


@pytest.mark.parametrize("forwards_first", [False, True])
@by_strategy
def test_two_backward_passes_before_a_step(pools: Pools, strategy: str, forwards_first: bool) -> None:
    answers = pools(2).call("two_backwards", strategy=strategy, forwards_first=forwards_first)
    assert max(answer["error"] for answer in answers) <= EXACT


@pytest.mark.parametrize("mode", ["auto", "barrier"])
@pytest.mark.parametrize(("imported", "optimizer"), [("function", "sgd"), ("module", "adamw")])
@by_class
def test_clipping_by_global_norm(pools: Pools, kind: str, imported: str, optimizer: str, mode: str) -> None:
    builder, options = CLASSES[kind]
    answers = pools(2).call("clip", builder=builder, options=options, imported=imported, optimizer=optimizer, mode=mode)
    check(answers, "barrier")
    assert max(answer["norm_error"] for answer in answers) <= EXACT


@by_class
def test_clipping_with_a_late_rank(pools: Pools, kind: str) -> None:
    builder, options = CLASSES[kind]
    check(pools(4).call("slow_peer_clip", builder=builder, options=options), "barrier")


@by_class
def test_clipping_that_starts_later_ends_deferral(pools: Pools, kind: str) -> None:
    builder, options = CLASSES[kind]
    check(pools(2).call("clip_later", builder=builder, options=options), "barrier")


@by_class
def test_gradients_that_the_loop_replaces(pools: Pools, kind: str) -> None:
    builder, options = CLASSES[kind]
    check(pools(2).call("replaced_gradients", builder=builder, options=options), "barrier")


@by_class
def test_grad_scaler_skips_an_overflow_everywhere(pools: Pools, kind: str) -> None:
    builder, options = CLASSES[kind]
    answers = pools(2).call("scaler", builder=builder, options=options)
    check(answers, "barrier")
    for answer in answers:
        assert answer["scales"] == [2048.0, 2048.0]


def test_gradients_read_as_the_average(pools: Pools) -> None:
    check(pools(2).call("local_gradients"), "barrier")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@by_strategy
@pytest.mark.parametrize("world", mostly_slow([2, 4], [2]))
def test_unused_parameters(pools: Pools, world: int, strategy: str, optimizer: str) -> None:
    check(pools(world).call("unused", strategy=strategy, kind=optimizer))


def test_parameter_that_the_captured_step_did_not_use(pools: Pools) -> None:
    """It is either trained as in one process or refused with one sentence, never left out in silence."""
    answers = pools(2).answers("used_only_later")
    for answer in answers:
        if "error" in answer:
            assert "parameter 'odd." in answer["message"]
        else:
            assert answer["result"]["error"] <= EXACT


@by_strategy
def test_frozen_parameters(pools: Pools, strategy: str) -> None:
    check(pools(2).call("frozen", strategy=strategy))


@pytest.mark.parametrize("each_step", [True, False])
@by_strategy
def test_parameter_groups_and_schedulers(pools: Pools, strategy: str, each_step: bool) -> None:
    check(pools(2).call("groups_and_schedule", strategy=strategy, each_step=each_step))


@by_strategy
def test_schedulers_that_are_older_than_the_job(pools: Pools, strategy: str) -> None:
    check(pools(2).call("groups_and_schedule", strategy=strategy, each_step=True, before=True))


@pytest.mark.parametrize("how", ["optimizer", "zeros", "model", "model_zeros", "by_hand"])
@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("strategy", mostly_slow(["overlap", "ps", "sharded"], ["overlap"]))
def test_every_way_to_forget_gradients(pools: Pools, strategy: str, where: str, how: str) -> None:
    answers = pools(2).call("zeroing", order=f"{where}:{how}", strategy=strategy)
    assert max(answer["error"] for answer in answers) <= EXACT


@by_strategy
def test_gradients_that_are_never_forgotten(pools: Pools, strategy: str) -> None:
    answers = pools(2).call("never_zeroed", strategy=strategy)
    assert max(answer["error"] for answer in answers) <= EXACT


@by_strategy
def test_batches_that_the_loop_skips(pools: Pools, strategy: str) -> None:
    check(pools(2).call("skipped_batches", strategy=strategy))


@by_strategy
def test_gradients_cleared_through_old_references(pools: Pools, strategy: str) -> None:
    check(pools(2).call("cleared_by_hand", strategy=strategy))


def test_module_without_children(pools: Pools) -> None:
    check(pools(2).call("empty_module"))


@by_strategy
def test_whoever_looks_after_step_sees_new_parameters(pools: Pools, strategy: str) -> None:
    check(pools(2).call("readers", strategy=strategy))


@pytest.mark.parametrize("encoder", [None, {"name": "powersgd", "rank": 2}, {"name": "topk", "ratio": 0.3}])
def test_one_rank_alone_saves_and_evaluates(pools: Pools, encoder: dict[str, Any] | None) -> None:
    answers = pools(4).call("one_rank_saves", strategy="all_reduce", encoder=encoder)
    assert [answer["mode"] for answer in answers] == ["deferred"] * 4
    assert max(answer["error"] for answer in answers) == 0


def test_one_rank_alone_saves_with_servers(pools: Pools) -> None:
    answers = pools(4).call("one_rank_saves", strategy="ps")
    assert max(answer["error"] for answer in answers) == 0


def test_deep_copy_is_a_plain_model(pools: Pools) -> None:
    for answer in pools(2).call("deep_copy"):
        assert answer == {"equal": True, "kept": True, "trained": True, "mode": "deferred"}


def test_lbfgs_with_a_closure(pools: Pools) -> None:
    check(pools(2).call("lbfgs"), "barrier")


def test_closure_for_an_optimizer_that_needs_none(pools: Pools) -> None:
    check(pools(2).call("sgd_closure", strategy="overlap"), "barrier")


def test_closure_with_servers_is_refused(pools: Pools) -> None:
    for answer in pools(2).answers("sgd_closure", strategy="ps"):
        assert answer["kind"] == "StrategyError"
        assert "closure" in answer["message"]


@by_strategy
def test_tied_weights_and_weights_read_early(pools: Pools, strategy: str) -> None:
    check(pools(2).call("tied", strategy=strategy))


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_model(pools: Pools, when: str) -> None:
    """It trains right, or is refused with a sentence that says so."""
    for answer in pools(2).answers("compiled", when=when, timeout=120):
        if "error" in answer:
            assert answer["kind"] in ("OffbeatError", "StrategyError"), answer["error"]
            assert "compile" in answer["message"]
        else:
            assert answer["result"]["error"] <= EXACT


def test_batch_norm_buffers_are_those_of_rank_0(pools: Pools) -> None:
    for answer in pools(2).call("buffers"):
        assert answer["error"] <= EXACT


@pytest.mark.parametrize("seed", range(3))
def test_buffers_are_ddps_at_every_moment(pools: Pools, seed: int) -> None:
    for answer in pools(2).call("buffers_as_with_ddp", seed=seed):
        assert max(error for _, error in answer["done"]) <= EXACT, str(answer["done"])


@pytest.mark.parametrize("steps", [[5, 3], [2, 4]])
def test_uneven_data_ends_with_ddps_parameters_and_buffers(pools: Pools, steps: list[int]) -> None:
    for answer in pools(2).call("join_as_with_ddp", steps=steps):
        assert answer["error"] <= EXACT


@pytest.mark.parametrize("strategy", ["overlap", "ps"])
def test_optimizer_with_a_parameter_outside_the_model(pools: Pools, strategy: str) -> None:
    for answer in pools(2).call("outside_parameter", strategy=strategy):
        assert answer["error"] <= EXACT
