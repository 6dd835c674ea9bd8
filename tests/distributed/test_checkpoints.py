"""A checkpoint restores bit for bit, and fits a single-process model both ways."""

from pathlib import Path

import pytest
from cases import mostly_slow
from harness import Pools

BUILDERS = ["overlap", "ps_load_balanced", "partitioned_ps", "uneven_partitioned_ps", "sharded", "parallax"]


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.parametrize("builder", mostly_slow(BUILDERS, ["partitioned_ps", "sharded"]))
def test_a_restored_run_repeats_the_unbroken_one(pools: Pools, tmp_path: Path, builder: str, kind: str):
    for answer in pools(2).call("resumed", builder=builder, kind=kind, through="file", directory=str(tmp_path)):
        assert answer == {"difference": 0.0, "losses": True}


@pytest.mark.parametrize("builder", mostly_slow(["overlap", "partitioned_ps", "sharded"], ["sharded"]))
def test_distributed_checkpoints_work_too(pools: Pools, tmp_path: Path, builder: str):
    for answer in pools(2).call("resumed", builder=builder, kind="adamw", through="dcp", directory=str(tmp_path)):
        assert answer == {"difference": 0.0, "losses": True}


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.parametrize("builder", mostly_slow(BUILDERS, ["uneven_partitioned_ps"]))
def test_a_single_process_can_take_over_and_hand_back(pools: Pools, builder: str, kind: str):
    assert max(pools(2).call("single_process_round_trip", builder=builder, kind=kind)) < 1e-10


@pytest.mark.parametrize("builder", mostly_slow(["sharded", "ps_load_balanced", "overlap"], ["sharded"]))
def test_one_rank_that_saves_an_optimizer_alone_is_told_what_to_do(pools: Pools, builder: str) -> None:
    first, other = pools(2).call("saved_alone", builder=builder)
    assert ("call state_dict() on every rank, and save what it returns on one" in first["refused"]) == (
        builder != "overlap"
    )
    assert first["seconds"] < 10
    assert first["kept"] == other["kept"] > 0, "the job can go on"
