"""offbeat optimize and run, as a user calls them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.launch import LOOPBACK, free_port, job_environment
from offbeat.runtime import fusion
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


def test_optimize_encodes_gradients_only_with_leave(tmp_path: Path) -> None:
    def encoders(*more: str) -> set[str]:
        chosen = tmp_path / "strategy.json"
        job = ["optimize", "mlp", "--cluster", "pace_10g", "--time-limit", "2", "-o", str(chosen)]
        result = CliRunner().invoke(app, [*job, *more])
        assert result.exit_code == 0, result.output
        return {shard.encoder.name for c in Strategy.load(chosen).variables.values() for shard in c.shards}

    assert encoders() == {"none"}
    assert "bf16" in encoders("--allow", "bf16")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_optimize_times_the_model_s_blocks_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fusion, "backend", lambda graph, _: graph.forward)
    job = ["optimize", "mlp", "--scale", "0.25", "--cluster", "pace_10g", "--time-limit", "2", "--json"]
    result = CliRunner().invoke(app, [*job, "--measure", "--allow", "amp", "--allow", "bf16"])
    assert result.exit_code == 0, result.output
    assert any("blocks were timed on cpu" in note for note in json.loads(result.stdout)["notes"])
    assert [*tmp_path.glob("offbeat/blocks/*.json")]
    refused = CliRunner().invoke(app, [*job, "--allow", "amp"])
    assert refused.exit_code != 0
    assert "--measure" in str(refused.exception)


def test_optimize_prints_fully_sharded_strategies_as_torch_code() -> None:
    job = ["gpt2", "--scale", "0.25", "--cluster", "B7"]
    result = CliRunner().invoke(app, ["optimize", *job, "--time-limit", "2", "--memory-limit", "70MiB"])
    assert result.exit_code == 0, result.output
    before, _, code = result.stdout.partition("The equivalent torch code")
    assert before.startswith("A step of 'optimize' is predicted to take")
    compile(code.partition("\n\n")[2], "pasted", "exec")
    assert "fully_shard(model, reshard_after_forward=" in code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimize", "mlp"], "--cluster: required"),
        (["optimize", "mlp", "--cluster", "nowhere"], "nowhere"),
        (["run", "missing.py"], "missing.py: no such script"),
        (["run", "--strategy", "nope.json", __file__], "'nope.json' is neither a builder ("),
        (["run", "--strategy", __file__, __file__], "not valid JSON"),
        (["run", "--strategy", "/", __file__], "/: cannot read the strategy: Is a directory"),
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


CALLS = """
import torch, offbeat
model = torch.nn.Linear(4, 2)
offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


NEVER = "train.py: ended without calling offbeat.distribute, so the strategy 'ddp' was not used"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CALLS!r}], check=True)"


@pytest.mark.parametrize(
    ("script", "ranks", "code", "said"),
    [
        pytest.param("import sys; sys.exit(0)", 2, 1, NEVER, id="never"),
        pytest.param(
            "import sys; sys.exit(3)", 2, 3, "the job ended with exit code 3", id="fails first", marks=pytest.mark.slow
        ),
        pytest.param(CALLS + "import sys; sys.exit(4)", 1, 4, "the job ended with exit code 4", id="calls and fails"),
        pytest.param("print('trained')", 0, 1, NEVER, id="never in a job", marks=pytest.mark.slow),
        pytest.param("import sys; sys.exit(0)", 0, 1, NEVER, id="exits in a job"),
        pytest.param(IN_A_CHILD, 0, 0, "", id="in a job's child"),
    ],
)
def test_run_tells_whether_the_script_calls_distribute(
    script: str, ranks: int, code: int, said: str, tmp_path: Path
) -> None:
    """Started here on so many ranks, or (0) as a rank of a job that another launcher has started."""
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not ranks:
        environment |= job_environment(1, 1, (LOOPBACK, free_port(LOOPBACK))) | {"RANK": "0"}
    command = [sys.executable, "-m", "offbeat", "run", "--strategy", "ddp", "-n", str(max(1, ranks)), "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == code, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("offbeat: ")]
    assert told == ([f"offbeat: {said}"] if said else [])
