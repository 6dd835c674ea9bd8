"""A job that cannot go on says why and ends; it never hangs."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Pools, drain_and_wait, start_ranks, stop_ranks, wait_for_steps

from offbeat.strategy import Shard, Strategy, VariableConfig

STEPS_BEFORE = 25
"""By then the ranks have agreed on their order, and wait for gradients only."""
"""Not at the end of step 8 or 20, when ranks wait for each other to agree on the issue order."""
TIMEOUT = 8.0
"""Seconds the job's process groups wait for a rank that does not answer."""


def _run_and_hit(directory: Path, builder: str, options: dict[str, Any], victim: int, blow: int) -> dict[int, str]:
    """Trains on 4 ranks, sends `blow` to one of them in mid-training; what the others said when they ended."""
    arguments = json.dumps({"builder": builder, "timeout": TIMEOUT, "options": options})
    ranks = start_ranks(4, "train_forever", arguments, directory=directory)
    try:
        wait_for_steps(ranks[0], STEPS_BEFORE, 120)
        os.kill(ranks[victim].pid, blow)
        hit = time.monotonic()
        survivors = [rank for rank in range(4) if rank != victim]
        for rank in survivors:
            # Nobody reads their steps any more; a full pipe would block them.
            code = drain_and_wait(ranks[rank], hit + 60)
            assert code not in (None, 0), f"rank {rank} ended with {code}"
        return {rank: (directory / f"rank{rank}.log").read_text() for rank in survivors}
    finally:
        stop_ranks(ranks)


@pytest.mark.parametrize(
    ("builder", "options", "victim", "blow"),
    [
        ("overlap", {}, 2, signal.SIGKILL),
        pytest.param("wfbp", {}, 3, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("ps_load_balanced", {"servers": "ranks"}, 1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("sharded", {}, 0, signal.SIGKILL, marks=pytest.mark.slow),
        ("overlap", {}, 2, signal.SIGSTOP),
        pytest.param("overlap", {}, 0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=["all_reduce", "barrier", "servers", "first_rank", "stopped", "stopped_first_rank"],
)
def test_survivors_name_the_lost_rank_and_what_they_waited_for(
    tmp_path: Path, builder: str, options: dict[str, Any], victim: int, blow: int
) -> None:
    said = _run_and_hit(tmp_path, builder, options, victim, blow)
    for rank, text in said.items():
        last = text.strip().splitlines()[-1]
        assert "WorkerLost" in last, text[-1500:]
        assert f"rank {rank} was waiting for" in last
        assert re.search(rf": rank {victim} gave no sign of life", last), last
    assert any(re.search(r"task m\d+\.\w+\[\d+:\d+\] \([\w., …]+\)", text) for text in said.values())


def _refused(answers: list[dict[str, Any]], sentence: str) -> None:
    for answer in answers:
        assert answer.get("kind") == "StrategyError", answer
        assert re.fullmatch(sentence, answer["message"]), answer["message"]


def test_strategy_of_another_model_is_refused(pools: Pools) -> None:
    answers = pools(2).answers("strategy_of_another_model", keep=True)
    _refused(answers, r"the strategy was made for model 'Cnn' \(graph \w+\), not for 'Mlp' \(graph \w+\); .*")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"layers.9.weight": VariableConfig()}, r"variables: the model 'Mlp' has no trainable variable 'layers\.9.*"),
        (
            {"layers.0.weight": VariableConfig(partition=(2, 2, 2))},
            r"variable 'layers\.0\.weight': partition \[2, 2, 2\] has 3 axes, the variable has shape \[37, 23\]",
        ),
        (
            {"layers.0.weight": VariableConfig(shards=(Shard(synchronizer="parameter_server", placement=(7,)),))},
            r"variable 'layers\.0\.weight': placement: rank 7 is outside the cluster of 2 ranks",
        ),
        (
            {"layers.0.weight": VariableConfig(shards=(Shard(synchronizer="sparse_all_gather"),))},
            r"variable 'layers\.0\.weight': sparse_all_gather needs a sparse gradient, this one is dense",
        ),
    ],
    ids=["unknown variable", "axes", "rank", "dense"],
)
def test_strategy_that_does_not_fit_is_refused(
    pools: Pools, variables: dict[str, VariableConfig], sentence: str
) -> None:
    content = Strategy(variables=variables).to_json()
    _refused(pools(2).answers("apply_strategy", content=content, keep=True), sentence)


def test_optimizer_that_couples_variables_is_refused(pools: Pools) -> None:
    answers = pools(2).answers("coupled_optimizer", builder="sharded", keep=True)
    _refused(answers, r"optimizer LBFGS may read several variables at once, but 'layers\.\d\.\w+' .*")


@pytest.mark.parametrize("about", [pytest.param("model", marks=pytest.mark.slow), "strategy"])
def test_ranks_that_disagree_are_refused_everywhere(pools: Pools, about: str) -> None:
    answers = pools(4).answers("ranks_disagree", about=about, timeout=30)
    _refused(answers, f"rank 3 has a different {about} than rank 0")
