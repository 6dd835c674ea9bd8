"""What both pages let a reader do, at the widths of a telephone, a tablet and a desk, in light and dark."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import serving

from offbeat import zoo
from offbeat.cluster import ClusterSpec
from offbeat.cost.measured import Costs
from offbeat.plan import lower
from offbeat.profile.measure import Profile
from offbeat.report import write_report
from offbeat.report.live import Session, State
from offbeat.report.server import LiveServer
from offbeat.simulate import simulate
from offbeat.strategy import Strategy, build_strategy
from offbeat.timeline import Timeline

WIDTHS = (390, 768, 1280)
CLIPPED = """
const wide = document.documentElement.scrollWidth - innerWidth;
const cut = [...document.querySelectorAll('.fact dd, .bar-value, .ranked-value, td.number')].filter((element) =>
  element.offsetParent && !element.closest('.table-scroll') && (element.scrollWidth > element.clientWidth + 1
    || element.getBoundingClientRect().right > innerWidth + 1));
return [wide > 0 ? `page ${wide}` : '', ...cut.map((element) => element.textContent.trim())].filter(Boolean);
"""
BLANK = """
return [...document.querySelectorAll('main .card')].filter((card) => card.offsetParent)
  .filter((card) => card.innerText.replace(card.querySelector('h2').innerText, '').trim() === ''
    && !card.querySelector('canvas')).map((card) => card.innerText);
"""


def wait(browser: Any, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, browser.execute_script("return document.body.innerText")[:1000]
        time.sleep(0.02)
    return found


def shown_as(browser: Any, width: int, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def profile_of(builder: str) -> Profile:
    cluster = ClusterSpec.homogeneous(nodes=2, devices_per_node=2, bandwidth="1Gbit/s", peak_flops="100GFLOP/s")
    graph = zoo.capture("mlp", 0.5)
    plan = lower(graph, cluster, build_strategy(builder, graph, cluster))
    measured = replace(simulate(plan), source="measured", critical=None)
    return Profile(measured, graph, cluster, plan.strategy, Costs(), "offbeat")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("act") / "report.html"
    compare = ("tuned", profile_of("overlap"))
    write_report(path, profile_of("wfbp"), title="slow", trace="my traces/", compare=compare)
    return path


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(Session(profile_of("wfbp"), "slow")) as server:
        yield server


def open_live(browser: Any, address: str) -> None:
    browser.get("about:blank")
    browser.get(address)
    wait(browser, lambda: drawn(browser))


def drawn(browser: Any) -> dict[str, Any]:
    return json.loads(browser.execute_script("return document.body.dataset.state || '{}'"))


def text(browser: Any, element: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", element)


def put(browser: Any, control: str, value: object) -> None:
    browser.execute_script(
        "const control = document.getElementById(arguments[0]); control.value = arguments[1];"
        "control.dispatchEvent(new Event('input', {bubbles: true}));",
        control,
        str(value),
    )


def test_no_number_is_clipped_and_no_card_is_blank(browser: Any, page: Path, live: LiveServer) -> None:
    papers = set()
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            shown_as(browser, width, scheme)
            browser.get(page.as_uri())
            wait(browser, lambda: browser.execute_script("return document.body.dataset.readyMilliseconds"))
            assert browser.execute_script(CLIPPED) == [], (width, scheme)
            assert browser.execute_script(BLANK) == []
            papers.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
            open_live(browser, live.url)
            wait(browser, lambda: browser.execute_script("return document.body.dataset.ranked"))
            assert browser.execute_script(CLIPPED) == [], (width, scheme)
            assert browser.execute_script(BLANK) == []
    assert len(papers) == 2


def test_the_report_leads_with_a_free_change_to_copy(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    wait(browser, lambda: browser.execute_script("return document.body.dataset.readyMilliseconds"))
    first = browser.find_element("css selector", "main .card")
    assert first.text.startswith("Do this first: strategy: ")
    assert "offbeat optimize 'my traces/' -o strategy.json" in first.text
    first.find_element("css selector", "[data-copy]").click()
    wait(browser, lambda: first.find_element("css selector", "[data-copy]").text == "Copied")


def test_two_recordings_side_by_side(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    wait(browser, lambda: browser.execute_script("return document.body.dataset.readyMilliseconds"))
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#versus tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert rows[0][1:3] == ["slow", "tuned"]
    assert [row[0] for row in rows[1:3]] == ["step", "bound"]
    assert rows[1][1] == browser.execute_script("return document.getElementById('step-time').firstChild.data.trim()")
    browser.find_element("css selector", "[data-scene='2']").click()
    names = "return timelineView.scene.names.join(' ')"
    wait(browser, lambda: "all_reduce" in browser.execute_script(names))


def test_predicted_spans_have_the_names_of_tensors(browser: Any, live: LiveServer) -> None:
    open_live(browser, live.url)
    put(browser, "strategy", "overlap")
    wait(browser, lambda: drawn(browser)["strategy"] == "overlap")
    names = browser.execute_script("return timelineView.scene.names.join('|')")
    assert "body.3.weight" in names
    assert "update of " in names
    assert "m0" not in names


def test_the_address_keeps_the_state(browser: Any, live: LiveServer) -> None:
    open_live(browser, live.url)
    put(browser, "bandwidth", 1)
    put(browser, "strategy", "overlap")
    wait(browser, lambda: drawn(browser)["strategy"] == "overlap")
    address, step, state = browser.current_url, text(browser, "step"), drawn(browser)
    assert "strategy=overlap" in address
    open_live(browser, address)
    wait(browser, lambda: drawn(browser) == state)
    assert text(browser, "step") == step
    browser.find_element("id", "reset").click()
    wait(browser, lambda: drawn(browser)["strategy"] == "recorded")
    assert browser.current_url == live.url


def test_a_strategy_is_downloaded(browser: Any, live: LiveServer, tmp_path: Path) -> None:
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    open_live(browser, live.url)
    put(browser, "strategy", "overlap")
    wait(browser, lambda: drawn(browser)["strategy"] == "overlap")
    browser.execute_script("document.getElementById('download').click()")
    wait(browser, (tmp_path / "overlap.json").exists)
    expected = live.session.strategy(State(strategy="overlap"))["content"]
    assert Strategy.load(tmp_path / "overlap.json") == Strategy.from_json(expected)


def test_a_rank_that_does_not_exist_is_refused(browser: Any, live: LiveServer) -> None:
    open_live(browser, live.url)
    put(browser, "straggler-rank", 7)
    assert text(browser, "error") == "straggler: rank 7 is outside the job's ranks 0 to 3"
    put(browser, "straggler-rank", 1)
    wait(browser, lambda: not text(browser, "error"))


def test_a_slow_replay_says_so_and_can_be_cancelled(browser: Any, live: LiveServer) -> None:
    open_live(browser, live.url)
    before, quick = text(browser, "step"), live.session._timeline

    ended: list[str] = []

    def slow(state: State) -> Timeline:
        try:
            for _ in range(3000):
                time.sleep(0.01)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise
        return quick(state)

    live.session._timeline = slow  # type: ignore[method-assign]
    try:
        put(browser, "bandwidth", 2)
        wait(browser, lambda: "Replaying for" in text(browser, "progress-words"))
        browser.find_element("id", "cancel").click()
        wait(browser, lambda: browser.execute_script("return document.getElementById('progress').hidden"))
        wait(browser, lambda: browser.execute_script("return document.getElementById('bandwidth').value") == "0")
        assert text(browser, "step") == before
        wait(browser, lambda: ended == ["Abandoned"], seconds=5)
    finally:
        live.session._timeline = quick  # type: ignore[method-assign]


def test_a_trace_without_a_plan_leaves_no_blank_card(browser: Any) -> None:
    with serving(Session(profile_of("ddp").timeline, "bare")) as server:
        open_live(browser, server.url)
        wait(browser, lambda: text(browser, "memory") == "unknown")
        assert browser.execute_script(BLANK) == []
