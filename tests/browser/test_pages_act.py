"""What both pages and the frontier's picture let a reader do, each at the widths of a telephone, a tablet and a desk,
in light and dark. A page is opened once for each size; a test leaves it as it was.

`make test` opens each width in one scheme, and looks at the letters of both; `make test-slow` opens the others.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from offbeat.search.frontier.find import ModelFrontier, find_frontier
from offbeat.simulate import simulate
from offbeat.strategy import Strategy, build_strategy
from offbeat.timeline import NETWORK, Timeline
from offbeat.timeline.diagnosis import diagnose
from offbeat.units import format_seconds

SIZES = [
    *((390, "dark"), (768, "light"), (1280, "dark")),
    *(pytest.param(size, marks=pytest.mark.slow) for size in ((390, "light"), (768, "dark"), (1280, "light"))),
]
CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=2, bandwidth="1Gbit/s", peak_flops="100GFLOP/s")
CLIPPED = """
const wide = document.documentElement.scrollWidth - innerWidth, cut = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !element.checkVisibility() || element.closest('.skip, svg, script, select')) continue;
  for (let box = element; box && box !== document.body; box = box.parentElement) {
    const hides = getComputedStyle(box).overflowX !== 'visible';
    if (hides && element.getBoundingClientRect().right > box.getBoundingClientRect().right + 1) cut.push(element);
  }
  const range = document.createRange();
  range.selectNodeContents(element);
  if (range.getBoundingClientRect().right > innerWidth + 1) cut.push(element);
}
return [wide > 0 ? `page ${wide}` : '', ...cut.map((element) => element.textContent.trim())].filter(Boolean);
"""
BLANK = """
const empty = [...document.querySelectorAll('main .card')].filter((card) => card.checkVisibility())
  .filter((card) => card.innerText.replace(card.querySelector('h2').innerText, '').trim() === ''
    && !card.querySelector('canvas')).map((card) => card.innerText);
for (const facts of document.querySelectorAll('.facts')) {
  const area = (box) => box.width * box.height, whole = area(facts.getBoundingClientRect());
  const filled = [...facts.children].reduce((sum, fact) => sum + area(fact.getBoundingClientRect()), 0);
  if (filled < 0.97 * whole) empty.push(`facts fill ${filled / whole}`);
}
return empty;
"""
FAINT = """
const bent = (share) => (share <= 0.04 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * bent(r / 255) + 0.7152 * bent(g / 255) + 0.0722 * bent(b / 255);
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const faint = [];
const read = 'dd, dd small, dt, td, th, p, li, h1, h2, h3, output, .bar-value, .ranked-value';
for (const element of document.querySelectorAll(read)) {
  if (!element.checkVisibility() || !element.textContent.trim()) continue;
  let box = element;
  while (box.parentElement && numbers(getComputedStyle(box).backgroundColor)[3] === 0) box = box.parentElement;
  const colours = [getComputedStyle(element).color, getComputedStyle(box).backgroundColor];
  const [front, back] = colours.map((colour) => light(numbers(colour)));
  if ((Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05) < 4.5) faint.push(element.textContent.trim());
}
return faint;
"""
LINKS_BUSY = """
const { scene } = timelineView, { bins, network } = timelineView.overviewBins, links = new Map();
scene.rows.forEach((row, number) => {
  if (row.kind !== 'network') return;
  if (!links.has(row.rank)) links.set(row.rank, []);
  const { offsets, start, end } = scene.spans;
  for (let i = offsets[number]; i < offsets[number + 1]; i += 1) links.get(row.rank).push([start[i], end[i]]);
});
const shown = [...network].reduce((sum, share) => sum + share, 0) / bins;
return { shown, seconds: scene.seconds, spans: [...links.values()] };
"""


class Tab:
    """One tab of the browser, for the tests of one page at one size."""

    def __init__(self, driver: Any, handle: str) -> None:
        self.driver, self.handle = driver, handle

    def js(self, script: str, *arguments: object) -> Any:
        self.driver.switch_to.window(self.handle)
        return self.driver.execute_script(script, *arguments)

    def cdp(self, command: str, **options: Any) -> Any:
        self.driver.switch_to.window(self.handle)
        return self.driver.execute_cdp_cmd(command, options)

    def open(self, address: str, ready: str) -> None:
        self.driver.switch_to.window(self.handle)
        self.driver.get("about:blank")
        self.driver.get(address)
        self.wait(lambda: self.js(f"return {ready}"))

    def wait(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, self.js("return document.body.innerText")[:3000]
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        return self.js("return document.querySelector(arguments[0]).innerText", selector)

    def texts(self, selector: str) -> list[str]:
        return self.js("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector)

    def click(self, selector: str) -> None:
        """As a person does: it must be visible and on top."""
        self.js("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        self.driver.find_element("css selector", selector).click()

    def put(self, control: str, value: object) -> None:
        self.js(
            "const control = document.getElementById(arguments[0]); control.value = arguments[1];"
            "control.dispatchEvent(new Event('input', {bubbles: true}));",
            control,
            str(value),
        )

    def state(self) -> dict[str, Any]:
        """What the live page's drawn numbers belong to."""
        return json.loads(self.js("return document.body.dataset.state || '{}'"))


def profile_of(builder: str) -> Profile:
    graph = zoo.capture("mlp", 0.5)
    plan = lower(graph, CLUSTER, build_strategy(builder, graph, CLUSTER))
    measured = replace(simulate(plan), source="measured", critical=None)
    # Every other message on a second stream, as torch.profiler's traces have them.
    second = (measured.track == measured.tracks.index(NETWORK)) & (measured.task % 2 == 1)
    tracks = (*measured.tracks, f"{NETWORK} 2")
    measured = replace(measured, tracks=tracks, track=np.where(second, len(tracks) - 1, measured.track).astype("i4"))
    return Profile(measured, graph, CLUSTER, plan.strategy, Costs(), "offbeat")


@pytest.fixture(scope="module")
def recorded() -> Profile:
    return profile_of("wfbp")


@pytest.fixture(scope="module")
def found() -> ModelFrontier:
    return find_frontier(zoo.capture("mlp", 0.2), CLUSTER)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, recorded: Profile, found: ModelFrontier) -> Path:
    path = tmp_path_factory.mktemp("act") / "report.html"
    compare = ("tuned", profile_of("overlap"))
    write_report(path, recorded, title="slow", trace="my traces/", compare=compare, frontier=found)
    return path


@pytest.fixture(scope="module")
def server(recorded: Profile) -> Iterator[LiveServer]:
    with serving(Session(recorded, "slow")) as served:
        yield served


@pytest.fixture(scope="module")
def bare_server(recorded: Profile) -> Iterator[LiveServer]:
    with serving(Session(recorded.timeline, "bare")) as served:
        yield served


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}-{size[1]}")
def size(request: pytest.FixtureRequest) -> tuple[int, str]:
    return request.param


def tab_of(driver: Any, new_tab: Any, size: tuple[int, str], address: str, ready: str) -> Iterator[Tab]:
    with new_tab() as handle:
        tab, (width, scheme) = Tab(driver, handle), size
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        tab.cdp("Emulation.setDeviceMetricsOverride", **metrics)
        tab.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.open(address, ready)
        yield tab


@pytest.fixture(scope="module")
def report(driver: Any, new_tab: Any, size: tuple[int, str], page: Path) -> Iterator[Tab]:
    yield from tab_of(driver, new_tab, size, page.as_uri(), "document.body.dataset.readyMilliseconds")


@pytest.fixture(scope="module")
def live(driver: Any, new_tab: Any, size: tuple[int, str], server: LiveServer) -> Iterator[Tab]:
    yield from tab_of(driver, new_tab, size, server.url, "document.body.dataset.ranked")


@pytest.fixture(scope="module")
def picture(
    driver: Any, new_tab: Any, size: tuple[int, str], found: ModelFrontier, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tab]:
    path = tmp_path_factory.mktemp("picture") / "frontier.html"
    found.plot(path)
    yield from tab_of(driver, new_tab, size, path.as_uri(), "document.querySelector('svg')")


@pytest.fixture(params=["report", "live"])
def either(request: pytest.FixtureRequest, size: tuple[int, str]) -> Tab:
    return request.getfixturevalue(request.param)


def as_it_was(tab: Tab) -> None:
    tab.click("#reset")
    tab.wait(lambda: tab.state()["strategy"] == "recorded" and tab.state()["bandwidth"] == 1)


def test_no_number_is_clipped_and_no_card_is_blank(either: Tab, size: tuple[int, str]) -> None:
    assert either.js(CLIPPED) == []
    assert either.js(BLANK) == []
    assert either.js(FAINT) == []
    assert either.js("return document.documentElement.dataset.theme") == size[1]
    either.click("#theme")
    assert either.js("return document.documentElement.dataset.theme") != size[1]
    assert either.js(FAINT) == []
    either.click("#theme")


def test_links_busy_counts_every_lane(either: Tab) -> None:
    busy = either.js(LINKS_BUSY)
    seconds = 0.0
    for spans in busy["spans"]:
        until = 0.0
        for start, end in sorted(spans):
            seconds += max(0.0, end - max(start, until))
            until = max(until, end)
    assert len(busy["spans"]) == 4
    assert busy["shown"] == pytest.approx(seconds / (4 * busy["seconds"]), rel=0.02)


def test_both_pages_write_the_same_numbers(report: Tab, live: Tab, recorded: Profile) -> None:
    diagnosis = diagnose(recorded.timeline)
    assert diagnosis.ideal_seconds is not None
    assert report.js("return document.getElementById('step-time').firstChild.data.trim()") == live.text("#step")
    assert live.text("#step") == format_seconds(diagnosis.step_seconds)
    assert report.js("return document.getElementById('bound').firstChild.data.trim()") == live.text("#bound")
    assert live.text("#bound") == format_seconds(diagnosis.ideal_seconds)
    assert report.texts("#rank-bars .bar-value") == live.texts("#rank-bars .bar-value")
    reasons = [f"idle {line}" for line in report.texts("#idle li")]
    assert reasons == live.texts("#idle li")


def test_the_report_leads_with_a_free_change_to_copy(report: Tab) -> None:
    first = report.text("main .card")
    assert first.startswith("Do this first: another strategy (")
    command = "offbeat optimize 'my traces/' -o strategy.json"
    assert command in first
    assert "distribute(model, optimizer, strategy=" in first
    report.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    report.click("main .card [data-copy]")
    report.wait(lambda: report.text("main .card [data-copy]") == "Copied")
    assert report.js("return navigator.clipboard.readText()") == command


def test_two_recordings_side_by_side(report: Tab) -> None:
    rows = report.js(
        "return [...document.querySelectorAll('#versus tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert rows[0][1:3] == ["slow", "tuned"]
    assert [row[0] for row in rows[1:3]] == ["step", "bound"]
    assert rows[1][1] == report.js("return document.getElementById('step-time').firstChild.data.trim()")
    assert "all_reduce" in report.js("return otherView.scene.names.join(' ')")
    views = "return [timelineView, otherView].map((view) => view.end - view.start)"
    report.click("#zoom-in")
    here, there = report.js(views)
    assert here == pytest.approx(there), "both are drawn on one scale"
    assert int(report.js("return document.getElementById('other-timeline').dataset.rectangles")) > 4
    report.click("#zoom-fit")


def test_equal_rows_are_merged(either: Tab, live: Tab) -> None:
    assert either.texts("#rank-bars .bar-label") == ["ranks 0–3"]
    numbers = live.texts("#ranking .ranked-about")
    assert len(numbers) == len(set(numbers)) > 3
    listed = live.js("return [...document.querySelectorAll('.ranked-row')].map((row) => row.dataset.strategies)")
    assert any(" " in names for names in listed), "strategies that come to the same share a row"


def test_predicted_spans_have_the_names_of_tensors(report: Tab, live: Tab) -> None:
    report.click("[data-scene='1']")
    report.wait(lambda: report.js("return timelineView.scene.source") == "predicted")
    live.put("strategy", "overlap")
    live.wait(lambda: live.state()["strategy"] == "overlap")
    for tab in (report, live):
        names = tab.js("return timelineView.scene.names.join('|')")
        assert "body.3.weight" in names
        assert "m0" not in names
    assert "update of " in live.js("return timelineView.scene.names.join('|')")
    report.click("[data-scene='0']")
    as_it_was(live)


def test_the_address_keeps_the_state(live: Tab, server: LiveServer) -> None:
    live.put("bandwidth", 1)
    live.put("strategy", "overlap")
    live.wait(lambda: live.state()["strategy"] == "overlap")
    address, step, state = live.js("return location.href"), live.text("#step"), live.state()
    assert "strategy=overlap" in address
    live.open(address, "document.querySelector('.ranked-row.chosen')")
    assert live.state() == state
    assert live.text("#step") == step
    # The chosen row of the ranking has the step, the interval and the speed-up of the headline.
    bounds = live.text("#bounds").strip()
    assert "9 of 10" in bounds
    assert live.text(".ranked-row.chosen .ranked-about") == f"{step} per step {bounds}"
    assert live.text(".ranked-row.chosen .ranked-value") in live.text("#change")
    as_it_was(live)
    assert live.js("return location.href") == server.url


def test_a_found_strategy_is_kept_and_downloaded(
    live: Tab, server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.report.live.SEARCH_SECONDS", 0.3)
    live.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    live.put("strategy", "overlap")
    live.wait(lambda: live.state()["strategy"] == "overlap")
    for name in ("overlap", "optimised"):
        if name == "optimised":
            live.click("#search")
            live.wait(lambda: live.state()["strategy"] == "optimised")
        live.click("#download")
        live.wait((tmp_path / f"{name}.json").exists)
        expected = server.session.strategy(State(strategy=name))["content"]
        assert Strategy.load(tmp_path / f"{name}.json") == Strategy.from_json(expected)
        assert f"Saved as {name}.json" in live.text("#saved")
        assert "optimised" not in " ".join(live.texts("#ranking .pending"))
    step = live.text("#step")
    live.open(live.js("return location.href"), "document.body.dataset.state")
    assert live.text("#step") == step, "the page is loaded again without another search"
    as_it_was(live)


def test_refused_input_says_so(live: Tab, server: LiveServer) -> None:
    live.put("straggler-rank", 7)
    assert live.text("#error") == "straggler: rank 7 is outside the job's ranks 0 to 3"
    assert live.js(CLIPPED) == []
    live.put("straggler-rank", 1)
    live.wait(lambda: not live.js("return document.getElementById('error').textContent"))
    live.open(f"{server.url}#strategy=unheard_of&bandwidth=3", "document.body.dataset.state")
    assert "The address asks for strategy=unheard_of, bandwidth=3, which this page does not have" in live.text("#notes")
    as_it_was(live)
    live.wait(lambda: "The address" not in live.js("return document.getElementById('notes').textContent"))


def test_a_slow_replay_says_so_and_can_be_cancelled(live: Tab, server: LiveServer, size: tuple[int, str]) -> None:
    before, quick = live.text("#step"), server.session._timeline
    ended: list[str] = []

    def slow(state: State) -> Timeline:
        try:
            for _ in range(3000 if state.bandwidth != 1 else 0):
                time.sleep(0.01)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise
        return quick(state)

    server.session._timeline = slow  # type: ignore[method-assign]
    try:
        live.put("bandwidth", 2)
        live.wait(lambda: live.js("return document.getElementById('progress').checkVisibility()"))
        assert "Replaying for" in live.text("#progress-words")
        assert live.js(CLIPPED) == []
        live.click("#cancel")
        live.wait(lambda: live.js("return document.getElementById('progress').hidden"))
        live.wait(lambda: live.js("return document.getElementById('bandwidth').value") == "0")
        assert live.text("#step") == before
        live.wait(lambda: ended == ["Abandoned"], seconds=5)
        if size != (1280, "dark"):
            return
        # A later change ends a slow replay as well.
        live.put("bandwidth", 2)
        live.wait(lambda: live.js("return document.getElementById('progress').checkVisibility()"))
        live.put("bandwidth", 0)
        live.wait(lambda: ended == ["Abandoned"] * 2, seconds=5)
        live.wait(lambda: live.js("return document.getElementById('progress').hidden"))
    finally:
        server.session._timeline = quick  # type: ignore[method-assign]


def test_the_frontier_is_a_picture_that_tells_strategies(picture: Tab, report: Tab, found: ModelFrontier) -> None:
    assert picture.js(CLIPPED) == []
    assert picture.js("return document.title") == found.title
    graph, batch = found.graph.name, found.about["batch"]
    assert f"{graph}, batch {batch}, float32, on 4 devices of {CLUSTER.name}" in found.title
    for tab in (picture, report):
        drawn = "return document.querySelector('svg').{}"
        box = tab.js(drawn.format("getBoundingClientRect().toJSON()"))
        assert box["right"] <= tab.js("return innerWidth")
        outside = tab.js(
            "const svg = document.querySelector('svg'), whole = svg.getBoundingClientRect();"
            "return [...svg.querySelectorAll('text')].filter((text) => { const box = text.getBoundingClientRect();"
            "  return box.left < whole.left - 1 || box.right > whole.right + 1 || box.height < 8; })"
            "  .map((text) => text.textContent)"
        )
        assert outside == [], "all letters are inside and can be read"
        apart = tab.js(
            "const boxes = [...document.querySelectorAll('svg text[text-anchor=middle]:not([transform])')]"
            "  .map((text) => text.getBoundingClientRect());"
            "const clear = (one, other) => one.right < other.left || one.bottom < other.top || one.top > other.bottom;"
            "return boxes.every((one, i) => boxes.slice(i + 1).every((two) => clear(one, two) || clear(two, one)))"
        )
        assert apart, "no label lies on another"
        assert found.title in tab.js(drawn.format("textContent")).replace("\n", " ")
        hints = tab.js("return [...document.querySelectorAll('svg title')].map((title) => title.textContent)")
        assert len(hints) > len(found.points)
        assert all(" a step\n" in hint for hint in hints)
        assert all(any(hint.startswith(f"{point.name}: ") for hint in hints) for point in found.points)
    rows = picture.js("return document.querySelectorAll('tbody tr').length")
    assert rows == len(found.points)
    ink, paper = (
        picture.js("return getComputedStyle(document.querySelector(arguments[0])).fill", name)
        for name in ("text.ink", ".paper")
    )
    assert ink != paper


def test_a_trace_without_a_plan_leaves_no_blank_card(
    driver: Any, new_tab: Any, size: tuple[int, str], bare_server: LiveServer
) -> None:
    for tab in tab_of(driver, new_tab, size, bare_server.url, "document.body.dataset.state"):
        tab.wait(lambda tab=tab: tab.text("#memory") == "unknown")
        assert tab.js(BLANK) == []
        assert tab.js(CLIPPED) == []
