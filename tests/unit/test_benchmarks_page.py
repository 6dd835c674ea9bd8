"""docs/benchmarks.md and README say what benchmarks/results/ says, and the runner keeps its promises."""

import copy
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
QUANTITY = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?=%| ms\b| times as fast\b)")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


report, runner, tables = load("report"), load("run"), load("tables")


def test_the_page_is_what_the_results_give() -> None:
    assert report.PAGE.read_text() == report.page(report.load(RESULTS)), "run make bench-page"


def test_measured_lines_of_readme_are_what_the_results_give() -> None:
    text = report.README.read_text()
    assert text == report.readme(text, report.load(RESULTS)), "run make bench-page"


def test_other_measurements_of_readme_are_the_tutorials() -> None:
    text = report.README.read_text()
    before, _, rest = text.partition(report.MARKS[0])
    others = before + rest.partition(report.MARKS[1])[2]
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    found = QUANTITY.findall(others)
    assert found
    assert [each for each in found if not re.search(rf"(?<![\w.]){re.escape(each)}(?!\d)", tutorial)] == []


def test_every_figure_of_readme_links_to_its_section() -> None:
    block = report.README.read_text().partition(report.MARKS[0])[2].partition(report.MARKS[1])[0]
    lines = [line for line in block.split("\n- ") if line.strip()]
    headings = {report.anchor(line[3:]) for line in report.PAGE.read_text().splitlines() if line.startswith("## ")}
    links = [re.search(r"docs/benchmarks\.md#([\w-]+)", line) for line in lines]
    assert lines
    assert all(link is not None and link[1] in headings for link in links)


def test_another_result_gives_another_page_and_readme() -> None:
    results = report.load(RESULTS)
    changed = copy.deepcopy(results)
    changed["replay_accuracy"]["summary"]["same"]["median"] *= 2
    assert report.page(changed) != report.page(results)
    text = report.README.read_text()
    assert report.readme(text, changed) != report.readme(text, results)


@pytest.mark.parametrize(
    ("figure", "target", "small", "large"),
    [
        (0.95, 1.0, "reached", "missed by 5.0%"),
        (1.0, 1.0, "reached", "reached"),
        (1.5, 1.0, "missed by 50%", "reached"),
    ],
)
def test_a_target_is_reached_or_missed(figure: float, target: float, small: str, large: str) -> None:
    assert tables.at_most(figure, target) == small
    assert tables.at_least(figure, target) == large


def test_a_result_that_is_missing_or_unknown_is_shown_as_such() -> None:
    text = report.page({"novelty": {"benchmark": "novelty", "speed": {"ratio": 1.25}}})
    assert "## novelty" in text
    assert "| speed.ratio | 1.25 |" in text
    assert text.count("It has not been run here.") == len(report.SECTIONS)


def test_every_benchmark_that_is_run_has_a_section() -> None:
    sections = {section.name for section in report.SECTIONS}
    assert {benchmark.name for benchmark in runner.BENCHMARKS} <= sections
    assert all((ROOT / benchmark.command[0]).exists() for benchmark in runner.BENCHMARKS)
    assert sum(benchmark.limit_seconds for benchmark in runner.BENCHMARKS) <= 3600


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks of its own."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(runner, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    return tmp_path


def test_a_result_is_kept_with_where_it_comes_from(programs: Path) -> None:
    (programs / "benchmarks" / "good.py").write_text("print('{\"ratio\": 2}')")
    assert runner.run_and_keep(runner.Benchmark("good", "--fast", 30))["ok"]
    kept = json.loads((programs / "results" / "good.json").read_text())
    assert kept["ratio"] == 2
    assert kept["made"]["command"] == "python benchmarks/good.py --json --fast"
    assert kept["made"]["machine"]["cores"] >= 1
    assert set(kept["made"]["versions"]) == {"python", "torch", "offbeat", "numba"}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('{\"ratio\": 2}'); raise SystemExit('no link')", "exit status 1: no link"),
        ("print('{\"ratio\": ')", "not valid JSON"),
        ("print('[]')", "no JSON object"),
        ("import time; time.sleep(30)", "stopped after 1 s"),
    ],
)
def test_a_failure_keeps_the_old_file(programs: Path, program: str, reason: str) -> None:
    (programs / "benchmarks" / "bad.py").write_text(program)
    old = programs / "results" / "bad.json"
    old.write_text('{"ratio": 1}')
    outcome = runner.run_and_keep(runner.Benchmark("bad", "", 1 if "sleep" in program else 30))
    assert not outcome["ok"]
    assert reason in outcome["reason"]
    assert old.read_text() == '{"ratio": 1}'


def test_time_that_one_leaves_is_for_those_after_it(programs: Path) -> None:
    (programs / "benchmarks" / "quick.py").write_text("print('{\"ratio\": 2}')")
    (programs / "benchmarks" / "slow.py").write_text("import time; time.sleep(1.5); print('{\"ratio\": 2}')")
    quick, slow = runner.Benchmark("quick", "", 30), runner.Benchmark("slow", "", 1)
    assert not runner.run_all([slow])["slow"]["ok"]
    assert runner.run_all([quick, slow])["slow"]["ok"]


def test_a_failure_is_named_and_makes_the_status_non_zero(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (programs / "benchmarks" / "good.py").write_text("print('{\"ratio\": 2}')")
    (programs / "benchmarks" / "bad.py").write_text("raise SystemExit(3)")
    chosen = (runner.Benchmark("bad", "", 30), runner.Benchmark("good", "", 30))
    monkeypatch.setattr(runner, "BENCHMARKS", chosen)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert runner.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("as before: bad")
    summary = json.loads((programs / "results" / "bench_run.json").read_text())
    assert {name: outcome["ok"] for name, outcome in summary["benchmarks"].items()} == {"bad": False, "good": True}
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "good"])
    assert runner.main() == 0
