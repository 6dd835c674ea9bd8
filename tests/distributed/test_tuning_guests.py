"""strategy="auto" is a guest: what it does never gets in a script's way, whatever the script does."""

import shutil
from pathlib import Path

import pytest
from cases import mostly_slow
from guests import PATTERNS
from harness import Pools, free_port, run_script

FOUND = "partitioned_all_reduce"
"""What the search of these jobs favours."""

EVERYDAY = ["accumulation", "checkpoint_and_resume", "layer_replaced", "saving"]


@pytest.mark.parametrize("calls", [1, 2])
def test_two_models_that_train_against_each_other_are_both_tuned(pools: Pools, calls: int) -> None:
    for answer in pools(2).call("adversaries", steps=24, calls=calls, timeout=60):
        assert answer["error"] <= 1e-12
        maker, critic = answer["tried"]
        assert FOUND in maker, answer["said"]
        # A step in which the critic is called once in one pass and twice in the other cannot be replayed.
        assert FOUND in critic if calls == 1 else not critic, answer["said"]
        assert all(map(any, zip(answer["tried"], answer["said"], strict=True))), (
            "a plan is tried, or it is told why none is"
        )
        assert not answer["hurried"], "threads take turns as they did before"


@pytest.mark.parametrize(("how", "tuned"), [("parts", True), ("weights", False)])
def test_a_model_that_is_never_called_itself_is_tuned_or_keeps_its_plan(pools: Pools, how: str, tuned: bool) -> None:
    for answer in pools(2).call("by_hand", how=how, steps=20, timeout=60):
        assert answer["error"] <= 1e-12
        assert (FOUND in answer["tried"]) == tuned, answer["said"]
        if not tuned:
            assert answer["said"] == ["keeps 'ddp': no part of the model was seen at work in the recorded steps"]


@pytest.mark.parametrize("mesh", mostly_slow([False, True], [False]), ids=["group", "mesh"])
def test_some_ranks_of_a_job_are_tuned_while_others_know_nothing_of_it(pools: Pools, mesh: bool) -> None:
    answers = pools(4).call("part_of_a_job", steps=20, mesh=mesh, timeout=60)
    for rank, answer in enumerate(answers):
        assert answer["error"] <= 1e-12
        assert (FOUND in answer["tried"]) == (rank < 2), answer["said"]
        both, whole = answer["refused"]
        assert both == "distribute: pass process_group or device_mesh, not both"
        assert "device_mesh has 2 dimensions ['job', 'data']; pass the data-parallel one, such as mesh['job']" in whole


@pytest.mark.parametrize("pattern", mostly_slow(PATTERNS, EVERYDAY))
def test_a_pattern_under_auto_equals_averaging_by_hand(pools: Pools, pattern: str) -> None:
    for answer in pools(2).call("guest_under_auto", name=pattern):
        # Rows of an embedding that occur several times are summed in another order than by hand.
        assert answer["equal"] or (pattern == "sparse_embeddings" and answer["error"] < 1e-15), answer
        assert answer["trained"]


@pytest.mark.parametrize("when", ["records", "searches"])
def test_distributing_again_ends_what_auto_has_begun(pools: Pools, when: str) -> None:
    for rank, answer in enumerate(pools(2).call("distributed_twice", when=when)):
        assert answer["error"] <= 1e-12
        # The search is not started before the steps have been recorded.
        assert answer["ended"] == ([True] if rank == 0 and when == "searches" else []), "the search process has ended"
        assert not answer["observed"]
        assert not answer["hurried"]
        assert not answer["hooks"]


@pytest.mark.parametrize("model", mostly_slow(["same", "new"], ["same"]))
def test_a_job_can_be_left_and_joined_again_in_one_process(tmp_path: Path, model: str) -> None:
    """As in a notebook; the script itself checks what it trains."""
    ports = [str(free_port()) for _ in range(3)]
    script = shutil.copy(Path(__file__).with_name("again_job.py"), tmp_path)
    assert run_script(Path(script), 2, model, *ports, seconds=60) == [0, 0]
