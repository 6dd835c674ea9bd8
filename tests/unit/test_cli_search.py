"""offbeat optimize and run, as a user calls them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.strategy import Strategy


def test_optimize_writes_a_strategy_and_says_what_it_gains(tmp_path: Path) -> None:
    chosen = tmp_path / "strategy.json"
    arguments = ["optimize", "mlp", "--cluster", "pace_10g", "--time-limit", "1", "-o", str(chosen), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["step_seconds"] <= told["ddp_seconds"]
    assert told["bound_seconds"] <= told["step_seconds"] * (1 + 1e-9)
    Strategy.load(chosen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimize", "mlp"], "--cluster: it is needed"),
        (["optimize", "mlp", "--cluster", "nowhere"], "nowhere"),
        (["run", "missing.py"], "missing.py: there is no such script"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert words in str(result.exception or "") + result.output


def test_run_puts_a_strategy_in_the_place_of_auto(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, offbeat\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = offbeat.distribute(model, optimizer)\n"
        "model(torch.ones(3, 4)).sum().backward()\n"
        "optimizer.step()\n"
        f"open({str(tmp_path / 'name')!r}, 'w').write(model._offbeat.plan.strategy.name)\n"
    )
    result = CliRunner().invoke(app, ["run", "--strategy", "horovod", "--timeout", "100", str(script)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "name").read_text() == "horovod"
