"""Which candidates "auto" runs against the present plan of a job under way."""

from typing import Any, cast

import pytest

from offbeat.online.searcher import DDP
from offbeat.online.tuner import Runner, contenders, finalists
from offbeat.plan import Plan

PRESENT = ("present", "many messages", 0.100)


def found(*candidates: tuple[str, str, float]) -> dict[str, Any]:
    """The answer of a search: candidates as (name, kind, predicted seconds), the quickest first."""
    rows = [{"name": name, "kind": kind, "seconds": seconds} for name, kind, seconds in candidates]
    return {"graph": "{}", "candidates": sorted(rows, key=lambda row: row["seconds"])}


def trials(answer: dict[str, Any], usual: float = 0.100, way: Runner | None = None) -> list[str]:
    """The names of the plans that run against the present one."""
    return [chosen["name"] for chosen in contenders(answer, usual, way)]


def ddp(name: str, *heats: float) -> Runner:
    return Runner(name, cast(Plan, None), heats=list(heats))


def test_the_quickest_of_each_kind_is_tried() -> None:
    answer = found(PRESENT, ("a", "many messages", 0.08), ("b", "many messages", 0.09), ("c", "few messages", 0.11))
    assert trials(answer) == ["a", "c"]


@pytest.mark.parametrize("way", ["small", "large"])
def test_the_way_of_ddp_is_tried_with_the_buckets_that_were_measured_best(way: str) -> None:
    answer = found(PRESENT, ("small", DDP, 0.09), ("large", DDP, 0.3))
    assert trials(answer, way=ddp(way, 0.1)) == [way]


def test_the_way_of_ddp_is_not_tried_where_it_was_measured_to_be_slow() -> None:
    assert trials(found(PRESENT, ("small", DDP, 0.09), ("large", DDP, 0.08))) == []


@pytest.mark.parametrize(("seconds", "names"), [(0.099, ["ddp"]), (0.15, ["ddp"]), (0.19, ["ddp"]), (0.21, [])])
def test_untimed_the_way_of_ddp_is_tried_unless_it_should_take_twice_as_long(seconds: float, names: list[str]) -> None:
    assert trials(found(PRESENT, ("ddp", DDP, seconds)), way=ddp("ddp")) == names


def test_the_way_of_ddp_is_among_the_few_that_run() -> None:
    kinds = [(f"plan {number}", f"kind {number}", 0.08 + number / 1000) for number in range(4)]
    answer = found(PRESENT, *kinds, ("ddp", DDP, 0.12))
    assert trials(answer, way=ddp("ddp", 0.1)) == ["plan 0", "plan 1", "ddp"]


@pytest.mark.parametrize(("usual", "names"), [(0.10, []), (0.14, ["few"])])
def test_where_prediction_fails_more_kinds_are_tried(usual: float, names: list[str]) -> None:
    assert trials(found(PRESENT, ("few", "few messages", 0.18)), usual) == names


def test_a_prediction_that_is_too_long_for_all_plans_excludes_none() -> None:
    assert trials(found(PRESENT, ("few", "few messages", 0.11)), usual=0.06) == ["few"]


def test_nothing_is_tried_for_a_gain_below_noise() -> None:
    assert trials(found(PRESENT, ("a", "many messages", 0.0995))) == []


def runner(kind: str, *heats: float) -> Runner:
    return Runner(kind, cast(Plan, None), {"kind": kind}, list(heats))


@pytest.mark.parametrize(("proven", "ddp"), [(False, True), (True, False)])
def test_finals_are_for_the_way_of_ddp_and_the_quickest_other_plan_in_the_order_of_their_heats(
    proven: bool, ddp: bool
) -> None:
    others = [runner("many messages", 0.104), runner(DDP, 0.109), runner("few messages", 0.09, 0.1)]
    found = finalists(runner("present", 0.1), others, proven)
    assert found == [(2, True), (0, False), (1, ddp)]


def test_plans_that_are_slow_in_their_heats_go_to_no_final() -> None:
    assert finalists(runner("present", 0.1), [runner("few messages", 0.11), runner(DDP, 0.12)], False) == [
        (0, False),
        (1, False),
    ]
