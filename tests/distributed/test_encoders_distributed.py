"""Lossy encoders between real ranks: replicas stay equal, nothing is lost, and models still learn."""

from typing import Any

import pytest
from harness import Pools

ENCODERS: tuple[dict[str, Any], ...] = (
    {"name": "fp16"},
    {"name": "bf16"},
    {"name": "topk", "ratio": 0.25},
    {"name": "randomk", "ratio": 0.25},
    {"name": "sign"},
    {"name": "int8"},
    {"name": "powersgd", "rank": 2},
)
CASES = [("all_reduce", encoder) for encoder in ENCODERS]
CASES += [("parameter_server", encoder) for encoder in ENCODERS if encoder["name"] != "powersgd"]
"""PowerSGD takes two rounds, so a server's shard refuses it."""
STEPS = 250
SUMMED_IN_16_BITS = {"fp16": 2e-4, "bf16": 2e-3}
"""How far the sum on the wire, which is rounded at every hop, may be from the sum of what was sent."""


def _name(encoder: object) -> str:
    return encoder["name"] if isinstance(encoder, dict) else str(encoder)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("synchronizer", "encoder"), CASES, ids=_name)
def test_replicas_stay_equal_and_runs_repeat(
    pools: Pools, synchronizer: str, encoder: dict[str, Any], world: int
) -> None:
    answers = pools(world).call("lossy", synchronizer=synchronizer, encoder=encoder)
    assert len({digest for answer in answers for digest in answer["digests"]}) == 1
    assert answers[0]["mode"] == "deferred"
    # The encoding was really used, and what it changed is no more than a fraction of what training does.
    assert 0 < answers[0]["off"] < answers[0]["moved"]


@pytest.mark.parametrize("synchronizer", ["all_reduce", "parameter_server"])
@pytest.mark.parametrize("encoder", ENCODERS[:2], ids=_name)
def test_slices_change_nothing(pools: Pools, encoder: dict[str, Any], synchronizer: str) -> None:
    whole = pools(2).call("lossy", synchronizer=synchronizer, encoder=encoder)[0]
    cut = pools(2).call("lossy", synchronizer=synchronizer, encoder=encoder, slice_bytes=1024)[0]
    assert cut["tasks"] > whole["tasks"]
    assert cut["digests"] == whole["digests"]


@pytest.mark.parametrize(
    "encoder", [ENCODERS[0], pytest.param(ENCODERS[1], marks=pytest.mark.slow)], ids=["fp16", "bf16"]
)
def test_sharded_messages_in_16_bits(pools: Pools, encoder: dict[str, Any]) -> None:
    answers = pools(4).call("lossy", synchronizer="sharded", encoder=encoder)
    assert len({digest for answer in answers for digest in answer["digests"]}) == 1
    assert 0 < answers[0]["off"] < 0.05


@pytest.mark.parametrize("encoder", ENCODERS[:-1], ids=_name)
def test_encoded_messages_through_transfer_stations(pools: Pools, encoder: dict[str, Any]) -> None:
    """They arrive right, or the strategy is refused before the first step."""
    answers = pools(4).answers(
        "lossy", synchronizer="parameter_server", encoder=encoder, nodes=2, stations=[0, 2], keep=True
    )
    for answer in answers:
        if "error" in answer:
            assert answer["kind"] == "StrategyError", answer["error"]
            assert "station" in answer["message"]
        else:
            assert 0 < answer["result"]["off"] < answer["result"]["moved"]


@pytest.mark.parametrize("encoder", ENCODERS, ids=_name)
def test_error_feedback_loses_nothing(pools: Pools, encoder: dict[str, Any]) -> None:
    for answer in pools(4).call("residuals", encoder=encoder, steps=5):
        assert answer["error"] <= SUMMED_IN_16_BITS.get(encoder["name"], 1e-12)
        assert answer["kept_back"] > 0


@pytest.mark.parametrize(
    ("synchronizer", "encoder"),
    [case if case[1]["name"] == "topk" else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=_name,
)
def test_model_trains_to_the_uncompressed_loss(pools: Pools, synchronizer: str, encoder: dict[str, Any]) -> None:
    plain = pools(2).call("final_loss", synchronizer=synchronizer, encoder={"name": "none"}, steps=STEPS)
    answers = pools(2).call("final_loss", synchronizer=synchronizer, encoder=encoder, steps=STEPS)
    for answer, expected in zip(answers, plain, strict=True):
        assert answer["loss"] == pytest.approx(expected["loss"], rel=0.02)
