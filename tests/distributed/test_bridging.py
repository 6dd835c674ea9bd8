"""Staleness is bounded, asynchronous servers keep nobody waiting, and memory strategies change no number."""

import pytest
from cases import mostly_slow
from harness import Pools

STALE = (("all_reduce", 1), ("all_reduce", 3), ("parameter_server", 2))


@pytest.mark.parametrize(("synchronizer", "staleness"), mostly_slow(STALE, STALE[1:2]))
def test_no_replica_is_more_than_k_steps_ahead(pools: Pools, synchronizer: str, staleness: int):
    steps = 200
    ranks = pools(4).call(
        "clocks", synchronizer=synchronizer, staleness=staleness, steps=steps, longest_nap=0.004, timeout=120
    )
    leads = []
    for rank in ranks:
        for step in range(steps):
            begun = rank["began"][step]
            slowest = min(sum(ended <= begun for ended in other["ended"]) for other in ranks)
            leads.append(step - slowest)
    assert max(leads) <= staleness
    # The bound is used, or the test would prove nothing.
    assert max(leads) >= 1
    # Every replica has applied the same sums once all have arrived.
    assert all(rank["parameters"] == ranks[0]["parameters"] for rank in ranks)
    assert sum(ranks[0]["losses"][-8:]) < 0.8 * sum(ranks[0]["losses"][:8])


@pytest.mark.slow
@pytest.mark.parametrize("synchronizer", ["all_reduce", "parameter_server"])
def test_staleness_zero_is_synchronous_bit_for_bit(pools: Pools, synchronizer: str):
    answers = pools(2).call("without_staleness", synchronizer=synchronizer)
    assert [difference for difference, _ in answers] == [0.0, 0.0]
    assert answers[0] == answers[1]


def test_an_asynchronous_server_keeps_nobody_waiting_for_the_slowest(pools: Pools):
    ranks = pools(4).call("asynchronous", steps=40)
    assert ranks[0]["seconds"] > 3.2
    assert all(rank["seconds"] < 0.75 * ranks[0]["seconds"] for rank in ranks[1:])
    assert all(rank["last"] < 0.9 * rank["first"] for rank in ranks)


@pytest.mark.parametrize(("parts", "scale"), [(2, 1.0), (4, 1.0), (2, 128.0)])
def test_micro_batches_sum_to_the_whole_batch(pools: Pools, parts: int, scale: float):
    assert max(pools(2).call("accumulated", parts=parts, scale=scale)) < 1e-10


WHOLE = ["body.0", "body.1", "body.2"], ["body.3", "body.4", "body.5"]


@pytest.mark.parametrize(
    ("mode", "recompute"),
    [("deferred", []), pytest.param("barrier", [], marks=pytest.mark.slow), ("deferred", ["body"])],
)
def test_a_region_is_one_compiled_function_and_changes_no_number(pools: Pools, mode: str, recompute: list[str]):
    for answer in pools(2).call("fused", regions=WHOLE, mode=mode, recompute=recompute, timeout=120):
        assert answer["error"] < 1e-10
        assert answer["mode"] == mode
        # Convolution, normalisation (which counts its batches) and activation of each region, in one piece.
        assert len(answer["graphs"]) == 2
        assert all({"batch_norm", "conv2d", "relu"} <= set(graph) for graph in answer["graphs"])


@pytest.mark.slow
def test_a_region_is_compiled_by_inductor(pools: Pools):
    for answer in pools(2).call("fused", regions=WHOLE[:1], mode="deferred", backend="inductor", timeout=400):
        assert answer["error"] < 1e-10
        assert len(answer["graphs"]) == 1


def test_recomputation_runs_forward_twice_and_changes_nothing(pools: Pools):
    for answer in pools(2).call("recomputed", module="feed"):
        assert answer["runs"] == 6
        assert answer["error"] < 1e-10
