"""Decisions of "auto": kept for `model.offbeat`, told once on rank 0's terminal, silenced in two ways."""

from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.handle import Decision, Handle, tell


def runtime(rank: int = 0, quiet: bool = False) -> Any:
    return SimpleNamespace(history=[], world=SimpleNamespace(rank=rank), quiet=quiet, predict=None)


@pytest.mark.parametrize(
    ("rank", "quiet", "variable", "told"),
    [(0, False, "", 1), (1, False, "", 0), (0, True, "", 0), (0, False, "1", 0)],
)
def test_a_decision_is_told_on_rank_0_unless_silenced(
    rank: int,
    quiet: bool,
    variable: str,
    told: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFBEAT_QUIET", variable)
    job = runtime(rank, quiet)
    tell(job, Decision(40, "keeps 'pace'", "pace", kept=True))
    assert capsys.readouterr().err == "offbeat, step 40: keeps 'pace'\n" * told
    assert [decision.strategy for decision in Handle(job).history] == ["pace"]


def test_nothing_is_predicted_before_steps_were_recorded() -> None:
    with pytest.raises(OffbeatError, match="no step has been recorded here"):
        Handle(runtime()).timeline()
