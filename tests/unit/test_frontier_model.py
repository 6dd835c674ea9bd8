"""Frontier: the strategy that fits a memory budget, the knee, and files that come back as they were saved."""

import orjson
import pytest

from offbeat.errors import OffbeatError
from offbeat.search.frontier.model import Frontier, FrontierPoint
from offbeat.strategy.model import Strategy

GIB = 2**30


def strategy(name):
    return Strategy(name=name, accumulation=2)


def point(memory, time, made=None):
    return FrontierPoint(time, memory, 0.75 * time, 0.25 * time, made, (1, 0, 2))


@pytest.fixture
def frontier():
    return Frontier((point(4 * GIB, 8.0, strategy("a")), point(8 * GIB, 2.0, strategy("b")), point(32 * GIB, 1.5)))


def test_min_time_is_the_fastest_that_fits(frontier):
    assert frontier.min_time("4GiB").name == "a"
    assert frontier.min_time(8 * GIB - 1).name == "a"
    assert frontier.min_time("31.5 GiB").name == "b"
    assert frontier.point_within("1TiB").time_seconds == 1.5


def test_too_little_memory_names_the_least(frontier):
    with pytest.raises(OffbeatError, match=r"no strategy fits in memory='3GiB': the least that one needs is 4 GiB"):
        frontier.min_time("3GiB")
    with pytest.raises(OffbeatError, match="has no points"):
        Frontier(()).min_time("3GiB")
    with pytest.raises(OffbeatError, match="memory"):
        frontier.min_time("much")
    with pytest.raises(OffbeatError, match="point of 32 GiB has no strategy"):
        frontier.min_time("32GiB")


def test_turning_point_is_the_knee(frontier):
    assert frontier.turning_point.memory_bytes == 8 * GIB
    assert Frontier(frontier.points[:1]).turning_point is frontier.points[0]
    bulging = Frontier((point(1, 8.0), point(4, 7.9), point(5, 1.0)))
    assert bulging.turning_point is bulging.points[-1]
    with pytest.raises(OffbeatError, match="has no points"):
        _ = Frontier(()).turning_point


def test_json_round_trip(frontier, tmp_path):
    assert Frontier.from_json(frontier.to_json()) == frontier
    frontier.save(tmp_path / "f.json")
    assert Frontier.load(tmp_path / "f.json") == frontier


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format: .* got 2"),
        ({"points": 3}, "points"),
        ({"other": 1}, "other"),
    ],
)
def test_faulty_files_are_named(frontier, change, message):
    content = orjson.dumps(orjson.loads(frontier.to_json()) | change)
    with pytest.raises(OffbeatError, match=f"f.json.*{message}"):
        Frontier.from_json(content, origin="f.json")


def test_faulty_points_are_named(frontier):
    data = orjson.loads(frontier.to_json())
    data["points"].reverse()
    with pytest.raises(OffbeatError, match=r"f.json: points\[1\] must need more memory"):
        Frontier.from_json(orjson.dumps(data), origin="f.json")
    data["points"][0]["time_seconds"] = -1
    with pytest.raises(OffbeatError, match=r"f.json: not a frontier: points\[0\].time_seconds: .* got -1"):
        Frontier.from_json(orjson.dumps(data), origin="f.json")
