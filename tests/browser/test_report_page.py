"""The report in a real browser: it draws, zooms and shows texts as texts, also with a million spans."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.plan import lower
from offbeat.profile.measure import Profile
from offbeat.report import make_report, render, write_report
from offbeat.simulate import simulate
from offbeat.strategy import build_strategy
from offbeat.timeline import COMPUTE, NETWORK, Builder, Timeline

HOSTILE = "</script><img src=x onerror=window.hacked=1><b>"
MOST_OPEN_SECONDS = 5.0
MOST_PAGE_BYTES = 20e6


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a job of four ranks on two nodes, as if its prediction had been measured."""
    cluster = ClusterSpec.homogeneous(nodes=2, devices_per_node=2, bandwidth="1Gbit/s")
    graph = zoo.capture("mlp", 0.5)
    plan = lower(graph, cluster, build_strategy("ddp", graph, cluster))
    measured = replace(simulate(plan), source="measured", critical=None)
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(path, Profile(measured, graph, cluster, plan.strategy, Costs(), "offbeat"), title="Four ranks")
    return path


def open_report(browser: Any, path: Path) -> float:
    """Seconds from asking for the page to its timeline being drawn."""
    begin = time.perf_counter()
    browser.get(path.as_uri())
    while not browser.execute_script("return document.body.dataset.readyMilliseconds"):
        assert time.perf_counter() - begin < 30, complaints(browser)
        time.sleep(0.02)
    return time.perf_counter() - begin


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def window(browser: Any) -> tuple[float, float]:
    return tuple(browser.execute_script("return [timelineView.start, timelineView.end]"))


def colours(browser: Any) -> int:
    """Different colours among points of the timeline's canvas: 1 if nothing is drawn."""
    return browser.execute_script(
        "const c = document.querySelector('.timeline-canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();"
        "for (let i = 0; i < d.length; i += 4 * 7) seen.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]);"
        "return seen.size;"
    )


def press(browser: Any, key: str) -> None:
    browser.execute_script(
        "const event = new KeyboardEvent('keydown', {key: arguments[0]});"
        "document.querySelector('.timeline-scroll').dispatchEvent(event);",
        key,
    )


def test_everything_is_drawn_and_nothing_is_loaded(browser: Any, page: Path) -> None:
    open_report(browser, page)
    assert colours(browser) > 5
    assert int(browser.execute_script("return document.getElementById('timeline').dataset.rectangles")) > 20
    for chart, parts in (("rank-bars", 1), ("step-columns", 2), ("what-ifs", 6)):
        found = browser.execute_script(
            "return document.querySelectorAll(`#${arguments[0]} :is(.bar-row, .column, .ranked-row)`).length", chart
        )
        assert found >= parts, chart
    text = browser.find_element("tag name", "main").text
    for wanted in ("Where the step goes", "What would help most", "Predicted and measured", "Strategies explained"):
        assert wanted in text
    assert "node0" in browser.execute_script("return JSON.stringify(timelineView.scene.rows)")
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert complaints(browser) == []


def test_timeline_zooms_pans_and_steps_by_keyboard(browser: Any, page: Path) -> None:
    open_report(browser, page)
    press(browser, "f")
    start, end = window(browser)
    assert start == 0
    press(browser, "+")
    closer = window(browser)
    assert closer[1] - closer[0] == pytest.approx((end - start) / 2)
    press(browser, "ArrowLeft")
    assert window(browser)[0] < closer[0]
    press(browser, "-")
    press(browser, "f")
    assert window(browser) == (start, end)

    press(browser, ".")
    said = browser.find_element("css selector", ".timeline-status").text
    assert "rank 0 compute" in said
    assert "duration" in said or "extent" in said, "a span, or short ones that share a pixel"

    assert browser.find_element("id", "step").get_attribute("value") == "-1"
    browser.find_element("css selector", "#step option[value='1']").click()
    step = browser.execute_script("return timelineView.scene.steps[1]")
    shown = window(browser)
    assert shown[0] <= step[0] < step[1] <= shown[1] + 1e-9
    assert shown[1] - shown[0] < (end - start) * 0.8
    assert complaints(browser) == []


def test_controls_change_what_is_shown(browser: Any, page: Path) -> None:
    open_report(browser, page)
    with_path = browser.execute_script("return document.querySelector('.timeline-canvas').toDataURL()")
    browser.find_element("id", "critical").click()
    assert browser.find_element("id", "critical").get_attribute("aria-pressed") == "false"
    assert browser.execute_script("return document.querySelector('.timeline-canvas').toDataURL()") != with_path

    paper = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(paper)
    browser.find_element("id", "theme").click()
    assert browser.execute_script(paper) != light

    assert browser.execute_script("return timelineView.scene.source") == "measured"
    browser.find_element("css selector", "[data-scene='1']").click()
    deadline = time.monotonic() + 10
    while browser.execute_script("return timelineView.scene.source") != "predicted":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert colours(browser) > 5
    assert complaints(browser) == []


def test_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    builder = Builder((COMPUTE, NETWORK, HOSTILE))
    for rank in range(2):
        builder.add(rank, COMPUTE, "forward", HOSTILE, 0.0, 0.5, step=0)
        builder.add(rank, NETWORK, "communication", HOSTILE, 0.5, 0.9, step=0, bytes=1024, task=0)
        builder.add(rank, HOSTILE, "other", HOSTILE, 0.2, 0.3, step=0)
    timeline = builder.build(np.array([[0.0, 1.0], [0.0, 1.0]]), notes=(HOSTILE,))
    path = tmp_path / "hostile.html"
    path.write_text(render(replace(make_report(timeline, title=HOSTILE), nodes={0: HOSTILE, 1: "b"})), "utf-8")
    open_report(browser, path)
    assert browser.find_element("tag name", "h1").text == HOSTILE
    box = browser.execute_script(
        "const box = document.querySelector('.timeline-scroll').getBoundingClientRect();"
        "const place = timelineView.places[timelineView.scene.rows.findIndex((row) => row.kind === 'network')];"
        "return [box.left + timelineView.toX(0.7), box.top + place.y + 5];"
    )
    browser.execute_script(
        "document.querySelector('.timeline-scroll').dispatchEvent("
        "new PointerEvent('pointermove', {clientX: arguments[0], clientY: arguments[1]}))",
        *box,
    )
    tooltip = browser.find_element("css selector", ".timeline-tooltip")
    assert tooltip.is_displayed()
    assert HOSTILE in tooltip.text
    assert "1 KiB" in tooltip.text
    assert "400 ms" in tooltip.text
    assert browser.execute_script("return window.hacked") is None
    assert browser.find_elements("tag name", "img") == []
    assert complaints(browser) == []


def million_spans() -> Timeline:
    """Sixteen ranks, ten steps: computing in small pieces, an all-reduce after every fourth."""
    ranks, steps, pieces = 16, 10, 5000
    random = np.random.default_rng(7)
    builder = Builder()
    marks = np.zeros((ranks, steps + 1))
    sizes = (2 ** random.integers(10, 24, pieces // 4)).tolist()
    for rank in range(ranks):
        now = link = 0.0
        for step in range(steps):
            marks[rank, step] = now
            lengths = random.exponential(4e-5, pieces).tolist()
            sends = random.exponential(9e-5, pieces // 4).tolist()
            for piece, length in enumerate(lengths):
                kind = "forward" if piece < pieces // 3 else "backward"
                builder.add(rank, COMPUTE, kind, f"layers.{piece % 400}.{kind}", now, now + length, step=step)
                now += length
                if piece % 4 == 3:
                    task = piece // 4
                    begin = max(now, link)
                    link = begin + sends[task]
                    builder.add(
                        rank,
                        NETWORK,
                        "communication",
                        f"bucket{task}.all_reduce",
                        begin,
                        link,
                        step=step,
                        queued=now,
                        bytes=sizes[task],
                        task=task,
                    )
            now = max(now, link)
        marks[rank, steps] = now
    return builder.build(marks)


@pytest.mark.timing
def test_a_million_spans_open_within_seconds(browser: Any, tmp_path: Path) -> None:
    timeline = million_spans()
    assert len(timeline) == 1_000_000
    path = tmp_path / "million.html"
    begin = time.perf_counter()
    write_report(path, timeline)
    written = time.perf_counter() - begin
    assert path.stat().st_size < MOST_PAGE_BYTES
    seconds = open_report(browser, path)
    assert seconds < MOST_OPEN_SECONDS
    milliseconds = {}
    for name, script in (
        ("all", "timelineView.fit()"),
        ("a step", "timelineView.show(...timelineView.scene.steps[3])"),
        ("a hundredth of it", "timelineView.zoom(0.01)"),
    ):
        browser.execute_script(f"{script}; timelineView.draw()")
        stats = browser.execute_script("return timelineView.stats")
        assert 100 < stats["rectangles"] <= browser.execute_script("return Timeline.MOST_RECTANGLES"), name
        milliseconds[name] = stats["milliseconds"]
    assert max(milliseconds.values()) < 500
    assert colours(browser) > 5
    assert complaints(browser) == []
    print(f"written {written:.1f} s, {path.stat().st_size / 1e6:.1f} MB, opened {seconds:.2f} s, drawn {milliseconds}")
