"""What Jupyter shows of results: short, self-contained, and without script."""

from types import SimpleNamespace
from typing import Any

import pytest

from offbeat import simulate, zoo
from offbeat.cluster import ClusterSpec
from offbeat.plan import lower
from offbeat.runtime.handle import Decision, Handle
from offbeat.search.frontier.model import Frontier, FrontierPoint
from offbeat.strategy import Strategy, build_strategy

CLUSTER = ClusterSpec.homogeneous(nodes=2, bandwidth="1Gbit/s")


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    graph = zoo.capture("mlp", 0.2)
    strategy = build_strategy("overlap", graph, CLUSTER)
    points = (FrontierPoint(2.0, 2**20, 1.5, 0.5, strategy), FrontierPoint(1.0, 2**24, 0.8, 0.2, strategy))
    plan = lower(graph, CLUSTER, strategy)
    runtime = SimpleNamespace(plan=plan, mode="deferred", history=[Decision(40, "keeps <pace>")])
    handle = Handle(runtime)  # type: ignore[arg-type]
    return {"strategy": strategy, "timeline": simulate(plan), "frontier": Frontier(points), "handle": handle}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("strategy", "messages needed first by the next forward are sent first"),
        ("timeline", "predicted step"),
        ("frontier", "turning point"),
        ("handle", "<li>step 40: keeps &lt;pace&gt;</li>"),
    ],
)
def test_results_are_tables_and_pictures(shown: dict[str, Any], name: str, part: str) -> None:
    html = shown[name]._repr_html_()
    assert part in html
    assert len(html) < 20_000
    assert "<script" not in html
    assert "src=" not in html
    assert len(repr(shown[name])) < 160
    assert "\n" not in repr(shown[name])


def test_a_cell_shows_the_picture_in_its_own_size(shown: dict[str, Any]) -> None:
    """Without a size of its own, an SVG is as wide as the cell, and its letters are giants."""
    assert '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="' in shown["frontier"]._repr_html_()


def test_names_stay_text() -> None:
    assert "<b>x</b>" not in Strategy(name="<b>x</b>")._repr_html_()
