"""`offbeat tour` goes the whole way: trace, report, strategy, before and after."""

import json
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.strategy import Strategy


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_tour_ends_with_before_and_after(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ("--model", "mlp", "--scale", "0.3", "--batch", "8", "--steps", "3", "--rounds", "1")
    assert main(["tour", *small, "-o", str(tmp_path), "--json"]) == 0
    told = capfd.readouterr()
    result = json.loads(told.out)
    assert result["before_seconds"] > 0 < result["after_seconds"]
    assert Strategy.load(result["strategy"]).variables
    assert Path(result["report"]).read_text().startswith("<!doctype html>")
    assert [f"{number} of 4" in told.err for number in range(1, 5)] == [True] * 4
