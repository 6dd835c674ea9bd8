"""Times measured on a device: of a block in several ways, of calls one by one."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph, capture
from offbeat.graph.model import BlockTimes
from offbeat.profile import stopwatch
from offbeat.profile.stopwatch import time_laps

CPU = torch.device("cpu")
LAUNCHED = BlockTimes(
    ("layers.0",),
    seconds={"eager": (1e-3, 2e-3), "recomputed": (1e-3, 3e-3), "compiled": (0.5e-3, 1e-3)},
    host={"eager": (2e-3, 2e-3), "recomputed": (4e-3, 5e-3), "compiled": (0.2e-3, 0.5e-3)},
)


def test_a_block_alone_takes_what_its_slower_part_takes() -> None:
    assert LAUNCHED.taken("eager") == (2e-3, 2e-3)
    assert LAUNCHED.taken("compiled") == (0.5e-3, 1e-3)
    assert LAUNCHED.taken("bf16") == LAUNCHED.taken("eager")
    assert LAUNCHED.factor("compiled", "backward") == pytest.approx(0.5)
    assert LAUNCHED.recomputing() == pytest.approx(2.5)
    # A part of the batch is launched like the whole.
    assert LAUNCHED.share(4).taken("eager") == (2e-3, 2e-3)
    assert LAUNCHED.share(4).seconds["eager"] == (0.25e-3, 0.5e-3)
    graph = capture(nn.Linear(4, 4), torch.zeros(2, 4)).with_blocks([LAUNCHED])
    assert ModelGraph.from_json(graph.to_json()) == graph
    with pytest.raises(OffbeatError, match=r"block 'layers\.0' has no comparable seconds"):
        BlockTimes(("layers.0",), LAUNCHED.seconds, {"eager": (1.0, 1.0)})


def test_calls_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rounds in (("WARM_UP", 1), ("LEAST_ROUNDS", 3), ("MOST_ROUNDS", 3)):
        monkeypatch.setattr(stopwatch, name, rounds)

    def step(timed: Any) -> None:
        assert timed(lambda: time.sleep(0.01) or "returned") == "returned"
        time.sleep(0.02)
        timed(lambda: time.sleep(0.03))

    first, second = time_laps(step, CPU)
    assert 0.01 <= first.device == first.host < 0.02
    assert 0.03 <= second.device == second.host
