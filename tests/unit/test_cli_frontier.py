"""offbeat frontier, as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.search.frontier.model import Frontier
from offbeat.strategy import Strategy

COMMAND = ["frontier", "mlp", "--cluster", "tensoropt", "--devices", "4"]
SPLIT = ("--engine", "split")


def called(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*COMMAND, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_shows_points_from_least_memory_to_least_time():
    text = called(*SPLIT)
    assert all(word in text for word in ("memory", "time", "compute", "network", "turning"))
    rows = [line for line in text.splitlines() if "iB" in line]
    assert 3 <= len(rows) <= 14


def test_the_frontier_is_told_saved_and_drawn(tmp_path: Path):
    saved, drawn = tmp_path / "frontier.json", tmp_path / "frontier.svg"
    told = json.loads(called(*SPLIT, "--json", "-o", str(saved), "--plot", str(drawn)))
    assert told["devices"] == 4
    assert sum(point["turning_point"] for point in told["points"]) == 1
    points = Frontier.load(saved).points
    assert [point["time_seconds"] for point in told["points"]] == [point.time_seconds for point in points]
    assert [point["memory_bytes"] for point in told["points"]] == [round(point.memory_bytes) for point in points]
    assert all(point.strategy is not None and point.strategy.operators for point in points)
    assert ">turning point<" in drawn.read_text()


def test_mini_time_saves_the_fastest_strategy_that_fits(tmp_path: Path):
    everything = json.loads(called("--json"))["points"]
    limit = round(everything[len(everything) // 2]["memory_bytes"] / 0.9)
    chosen = tmp_path / "strategy.json"
    told = json.loads(called("--mini-time", "--memory", str(limit), "--margin", "0.1", "-o", str(chosen), "--json"))
    assert told["memory_bytes"] <= 0.9 * limit + 1
    assert told["time_seconds"] == min(p["time_seconds"] for p in everything if p["memory_bytes"] <= 0.9 * limit)
    assert told["engine"].startswith(Strategy.load(chosen).engine)


def test_engines_can_be_chosen():
    points = json.loads(called("--engine", "fsdp", "--engine", "replicated", "--json"))["points"]
    assert {point["engine"].split(" + ")[0] for point in points} == {"fsdp", "replicated"}


def test_fewest_devices_and_a_row_for_each_number(tmp_path: Path):
    rows = json.loads(called("--profile", "1,4", "--price", "2", "--json"))
    assert [row["devices"] for row in rows] == [1, 4]
    assert rows[1]["dollars_per_step"] == pytest.approx(4 * 2 * rows[1]["time_seconds"] / 3600)
    assert json.loads(called("--mini-parallelism", "--memory", "16GiB", "--json"))["devices"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mlp", "--cluster", "tensoropt", "--memory", "12parsecs"], "--memory: '12parsecs' has the unknown unit"),
        (["mlp", "--cluster", "nowhere"], "nowhere"),
        (["nothing", "--cluster", "tensoropt"], "nothing"),
        (["missing.module:build", "--cluster", "tensoropt"], "missing.module"),
        (["mlp", "--cluster", "tensoropt", "--profile", "2,x"], "--profile: '2,x'"),
        (["mlp", "--cluster", "tensoropt", "--mini-time", "--mini-parallelism"], "exclude each other"),
        (["mlp", "--cluster", "tensoropt", "--devices", "999"], "devices must be 1 to"),
        (["mlp", "--cluster", "tensoropt", "--devices", "2", "--margin", "1.5"], "margin must be"),
        (["mlp", "--cluster", "tensoropt", "--mini-time", "--memory", "1KiB", "--devices", "2"], "memory='1KiB'"),
        (["mlp", "--cluster", "tensoropt", "--engine", "magic"], "engines must be some of replicated, sharded, fsdp"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], words: str):
    result = CliRunner().invoke(app, ["frontier", *arguments])
    assert result.exit_code != 0
    sentence = str(result.exception or "") + result.output
    assert words in sentence
    assert "Traceback" not in sentence


def test_nothing_is_written_for_a_mistake(tmp_path: Path):
    path = tmp_path / "strategy.json"
    result = CliRunner().invoke(app, [*COMMAND, "--mini-time", "--memory", "1KiB", "-o", str(path)])
    assert result.exit_code != 0
    assert not path.exists()
