"""Models whose operators are split over ranks train with the numbers of a single device, within less memory."""

import math
from pathlib import Path

import pytest
from cases import mostly_slow
from harness import Pool, Pools


def check_splits(pool: Pool, model: str, style: str, seeds: range) -> None:
    # Adam turns the rounding of gradients that should be zero, as of a bias before BatchNorm, into steps of 1e-10.
    kind = "adamw" if model == "mlp" else "sgd"
    ranks = pool.call("random_splits", name=model, kind=kind, style=style, seeds=list(seeds), timeout=180)
    assert max(answer["losses"] for rank in ranks for answer in rank) < 1e-10
    assert max(answer["weights"] for rank in ranks for answer in rank) < 1e-10
    # Variables really are held in parts, or the test would prove nothing.
    assert min(answer["held"] for answer in ranks[0]) < 0.9


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 10), marks=pytest.mark.slow)], ids=["seeds 0-4", "seeds 5-9"]
)
@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("world", mostly_slow([2, 4], [2]))
def test_splits_along_an_operators_axes_equal_a_single_device(pools: Pools, world: int, model: str, seeds: range):
    check_splits(pools(world), model, "fitting", seeds)


@pytest.mark.parametrize("model", mostly_slow(["mlp", "cnn", "transformer"], ["cnn"]))
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_any_maps_at_all_equal_a_single_device(pools: Pools, world: int, model: str):
    check_splits(pools(world), model, "arbitrary", range(3))


@pytest.mark.parametrize(("model", "kind"), [("cnn", "sgd"), ("mlp", "adamw")])
def test_a_checkpoint_passes_through_a_single_device(pools: Pools, tmp_path: Path, model: str, kind: str):
    for answer in pools(4).call("checkpointed", name=model, kind=kind, seed=3, directory=str(tmp_path)):
        assert answer["losses"] < 1e-10
        assert answer["weights"] < 1e-10


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_dropout_and_a_loss_outside_the_model_change_nothing(pools: Pools, rate: float):
    ranks = pools(4).call("with_a_loss_outside", rate=rate)
    # Rank 0 draws for all, so its single-device run drops the same elements.
    assert ranks[0]["weights"] < 1e-10
    assert ranks[0]["evaluated"] < 1e-10
    assert all(rank["mine"] == ranks[0]["mine"] for rank in ranks)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_weights_on_the_meta_device_are_drawn_in_parts(pools: Pools, model: str):
    for answer in pools(2).call("drawn_on_meta", name=model):
        assert answer["losses"] < 1e-10
        assert answer["weights"] < 1e-10


@pytest.mark.slow
def test_a_model_too_large_for_data_parallelism_trains_in_parts():
    """75 MiB of weights, as much of gradients and twice that of Adam's state, in 200 MiB a rank."""
    pool = Pool(4)
    try:
        # The first run lets libraries allocate what they keep.
        pool.call("within_a_limit", how="sharded", extra_bytes=2**31, width=64, depth=3)
        sizes = {"extra_bytes": 200 * 2**20, "width": 2560, "depth": 3}
        for answer in pool.call("within_a_limit", how="sharded", **sizes):
            assert answer["died"] == ""
            assert 4 * answer["weights"] > 1.4 * sizes["extra_bytes"]
            assert all(math.isfinite(loss) for loss in answer["losses"])
            assert answer["losses"][2] < answer["losses"][0]
        answers = pool.answers("within_a_limit", how="replicated", **sizes)
        assert all("memory" in answer["result"]["died"] for answer in answers)
    finally:
        pool.close()


def test_the_copies_of_a_tensor_that_a_strategy_names_are_kept(pools: Pools):
    """As TensorOpt's tensor reuse has it: less memory for one exchange more, or none if the new copy has all of it."""
    before, after, both = (pools(2).call("kept", copies=copies)[0] for copies in ("before", "after", "both"))
    assert max(answer["error"] for answer in (before, after, both)) < 1e-6
    old, new = 2 * 32 * 4, 4 * 32 * 4
    assert before["saved"] == both["saved"] - new
    assert after["saved"] == both["saved"] - old
    assert before["exchanges"] == both["exchanges"] + 1
    assert after["exchanges"] == both["exchanges"]


def test_recomputation_and_accumulation_combine_with_splits(pools: Pools):
    kept = {}
    for how in ("nothing", "checkpoint", "strategy"):
        answer = pools(2).call("recomputed_and_accumulated", how=how)[0]
        assert answer["weights"] < 1e-10
        kept[how] = answer["kept"]
    assert kept["checkpoint"] == kept["strategy"] < 0.8 * kept["nothing"]


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("mesh", [[4], [2, 2]])
def test_each_rank_loads_its_own_part_of_the_batch(pools: Pools, mesh: list[int], where: str):
    for answer in pools(4).call("parts_of_the_batch", mesh=mesh, where=where):
        assert answer["weights"] < 1e-10
        assert answer["losses"] < 1e-10
        assert answer["part"] == answer["expected"]


def test_a_group_runs_one_collective_after_another():
    """The two threads of a group that torch opens free each other's memory (`offbeat.runtime.sharded.grid`)."""
    pool = Pool(1)
    try:
        assert pool.call("threads_of_a_group") == [1]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("unknown", "operators: the model has no operator 'nothing'"),
        ("mesh", "operator 'addmm': mesh [7] has 7 devices, the job has 2 ranks"),
        ("accumulation", "accumulation: a strategy that splits operators cannot have it, got 2"),
        ("optimizer", "optimizer Adafactor cannot update pieces of 'layers.0.bias' separately"),
        ("meta", "'positions' is on the meta device, and Transformer has no reset_parameters() to draw it"),
        ("differs", "rank 1 has another strategy than rank 0"),
    ],
)
def test_what_cannot_be_run_is_refused(pools: Pools, case: str, sentence: str):
    for answer in pools(2).call("refused", case=case):
        assert sentence in answer
