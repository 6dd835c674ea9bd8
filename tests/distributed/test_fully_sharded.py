"""Training by torch's `fully_shard` with a strategy's choices ends with the numbers of one process."""

import pytest
from cases import mostly_slow
from harness import Pools
from small_strategies import fsdp_points

MODELS = [("mlp", "adamw"), ("cnn", "sgd"), ("transformer", "adamw"), ("gpt2", "adamw")]
CASES = [(world, *model) for world in (2, 4) for model in MODELS]
OFTEN = [(2, *MODELS[2]), *((4, *model) for model in MODELS[:2])]


@pytest.mark.parametrize(("world", "model", "kind"), mostly_slow(CASES, OFTEN))
def test_every_choice_equals_one_process(pools: Pools, world: int, model: str, kind: str):
    points = fsdp_points(world)
    if model == "cnn":
        # BatchNorm sees a micro-batch alone.
        points = [{key: value for key, value in point.items() if key != "accumulation"} for point in points]
    ranks = pools(world).call("fsdp_points", model=model, kind=kind, points=points, timeout=240)
    for point, *answers in zip(points, *ranks, strict=True):
        assert max(answer["error"] for answer in answers) < 1e-10, point
        # Variables really are held in parts, or the test would prove nothing.
        assert min(answer["held"] for answer in answers) < 0.9 or point.get("replicas") == world
        assert f"strategy 'fsdp' in barrier mode on {world} ranks" in answers[0]["summary"]


@pytest.mark.parametrize(("model", "kind"), [("gpt2", "adamw"), ("cnn", "sgd")])
def test_a_checkpoint_passes_from_engine_to_engine(pools: Pools, model: str, kind: str):
    for errors in pools(2).call("fsdp_checkpoints", model=model, kind=kind):
        assert max(errors) < 1e-10


def test_a_loop_may_accumulate_clip_and_evaluate(pools: Pools):
    for answer in pools(2).call("fsdp_loop"):
        assert answer["error"] < 1e-10


def test_the_torch_code_of_a_strategy_trains_alike(pools: Pools):
    points = [{}, {"replicas": 2, "reshard": False}, {"reshard": 2, "recompute": True, "root": True, "prefetch": 2}]
    for errors in pools(4).call("fsdp_pasted", model="gpt2", kind="adamw", points=points):
        assert max(errors) < 1e-10


def test_a_memory_limit_chooses_what_fits(pools: Pools):
    for answer in pools(2).call("fsdp_limited", timeout=180):
        assert answer["ddp"] > 1 >= answer["peak"]
        assert answer["sharded"]
        assert answer["seconds"] > 0
        assert answer["bytes"] == pytest.approx(answer["peak"])
        assert "the job is fully sharded; predicted: " in answer["told"]
        assert answer["error"] < 1e-10
        assert "memory_limit: 100 B is not enough for 'Gpt2': the smallest peak found is" in answer["refusal"]
