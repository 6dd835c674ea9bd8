"""docs/benchmarks.md and README say what benchmarks/results/ says, and the runner keeps its promises."""

import copy
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"
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
picture, auto_strategy = load("picture"), load("auto_strategy")


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


def gpu_row(name: str, default: float, best: float, auto: float, clip: bool = False) -> dict[str, Any]:
    """A case as gpu_step_time.py writes it; `name` is as `--cases` takes it."""
    ranks, gbit, model, regime = name.split("-", 3)
    median = {"compute": 50.0, "network": 40.0, "ddp_2": best, "ddp_default": default, "auto": auto}
    return {
        "name": name,
        "ranks": int(ranks[:-1]),
        "gbit": int(gbit[:-1]),
        "model": model,
        "regime": regime,
        "clip": clip,
        "precision": "autocast",
        "device": "NVIDIA H200",
        "median_ms": {**median, "fsdp2": 71.0, "fp16_hook": 61.0},
        "blocks_ms": {variant: [ms * 0.98, ms, ms * 1.02] for variant, ms in median.items()},
        "best": "ddp_2",
        "bound_ms": 50.0,
        "default_over_auto": default / auto,
        "best_over_auto": best / auto,
        "auto_over_bound": auto / 50.0,
        "decided": True,
        "plan": "overlap",
        "mode": "deferred",
        "settled": True,
    }


@pytest.fixture
def gpu_results(tmp_path: Path) -> dict[str, Any]:
    """The results of this repository, with made-up ones of a GPU: a win, a loss, a tie and a failure."""
    failed = {**gpu_row("4r-5G-vgg-balanced", 1, 1, 1), "error": "rank 0 ended with 1"}
    rows = [
        gpu_row("2r-10G-vgg-balanced", 90, 80, 60),
        gpu_row("2r-10G-resnet-compute-bound", 80, 72, 80, clip=True),
        gpu_row("4r-5G-transformer-network-bound", 66, 60.6, 60),
        {key: failed[key] for key in ("name", "ranks", "gbit", "model", "regime", "clip", "precision", "error")},
    ]
    error = {"median": 0.015, "worst": 0.07, "predictions": 2}
    replay = {
        "machine": {"cores": 16, "gpu": "NVIDIA H200"},
        "summary": {
            "runs": 2,
            **dict.fromkeys(("same", "cross"), error),
            "daydream": {"median": 0.25, "worst": 0.5, "predictions": 2},
            "recorder_overhead": {"median": 0.004, "worst": 0.01},
        },
        "rows": [{"hosts": 2, "model": "vgg", "strategy": strategy} for strategy in ("ddp 2MiB", "overlap")],
    }
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "gpu_step_time.json").write_text(json.dumps({"machine": {"cores": 16}, "rows": rows}))
    (tmp_path / "gpu_replay_accuracy.json").write_text(json.dumps(replay))
    return report.load(tmp_path)


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_shows_wins_losses_ties_and_failures_on_a_gpu(gpu_results: dict[str, Any]) -> None:
    text = section(report.page(gpu_results), "Step time on a GPU")
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert (
        "80.0 (2 MiB) | 71.0 | 61.0 | 60.0 (overlap, deferred) | 1.200 | 1.500 | 1.333 | decided |"
        in (rows["2r-10G-vgg-balanced"])
    )
    assert "0.900 | decided | best DDP / auto 0.99: missed by 9.1% |" in rows["2r-10G-resnet-compute-bound, clipped"]
    assert "1.010 | noisy |" in rows["4r-5G-transformer-network-bound"]
    assert "Failed: 4r-5G-vgg-balanced." in text
    assert "2 cases: DDP's default / auto 1.30 (1.10 to 1.50), target of the median 1.25: reached" in unwrapped(text)
    assert "faster in 0, slower in 1, noisy in 0." in unwrapped(text)
    replay = section(report.page(gpu_results), "Replay on a GPU")
    assert "Run with 2 ranks: vgg, each by ddp 2MiB and overlap." in replay
    assert "| its own run | 2 | 1.5% | 2%: reached | 7.0% | 6%: missed by 17% |" in replay
    assert "| all other runs, as Daydream | 2 | 25.0% | a baseline | 50.0% | a baseline |" in replay
    assert "| recorder's overhead | 2 | 0.4% | 3%: reached | 1.0% |  |" in replay


def test_readme_says_how_often_a_gpu_step_was_slower(gpu_results: dict[str, Any]) -> None:
    text = unwrapped(report.readme(report.README.read_text(), gpu_results))
    assert "1.10 (1.00 to 1.50) times as fast as DDP with default buckets and 1.01 (0.90 to 1.33) times" in text
    assert "3 cases, 1 of them clipped. Against the best DDP it is faster in 1, slower in 1, noisy in 1; 1 more" in text
    assert "1.5% for a recorded job's step (worst 7.0%)" in text


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_without_gpu_results_readme_has_no_figures_of_them() -> None:
    results = {name: of for name, of in report.load(RESULTS).items() if not name.startswith("gpu_")}
    assert "#step-time-on-a-gpu" not in report.readme(report.README.read_text(), results)
    assert "GPU" not in report.picture(results)


def test_the_picture_is_what_the_results_give() -> None:
    assert report.PICTURE.read_text() == report.picture(report.load(RESULTS)), "run make bench-page"
    assert "(docs/images/step_times.svg)" in report.README.read_text()


def test_the_picture_has_every_case_to_scale(gpu_results: dict[str, Any]) -> None:
    root = ElementTree.fromstring(report.picture(gpu_results))
    words = [element.text for element in root.iter(f"{SVG}text")]
    cases = [row for name in ("auto_strategy", "gpu_step_time") for row in gpu_results[name]["rows"]]
    ended = [row for row in cases if "error" not in row]
    assert all(words.count(f"{row['model']}, {row['regime']}") >= 1 for row in ended)
    assert any("failed: 4r-5G-vgg-balanced" in (text or "") for text in words)
    assert any("NVIDIA H200; python benchmarks/gpu_step_time.py" in (text or "") for text in words)
    bars = [element for element in root.iter(f"{SVG}rect") if element.find(f"{SVG}title") is not None]
    over_bound = [
        row["median_ms"][variant] / row["bound_ms"] for row in ended for variant in ("ddp_default", row["best"], "auto")
    ]
    widths = sorted(float(bar.attrib["width"]) for bar in bars)
    scale = widths[-1] / max(over_bound)
    assert widths == pytest.approx([ratio * scale for ratio in sorted(over_bound)], abs=0.2)


@pytest.mark.parametrize("count", [4, 40, 76])
def test_the_picture_stays_within_its_frame(count: int) -> None:
    case = picture.Case("transformer, network-bound", 200, 150, 120, 100, True)
    groups = {f"group {number}": [case] * 4 for number in range(count // 4)}
    root = ElementTree.fromstring(report.draw([picture.Panel("a machine; a command", groups)]))
    height = float(root.attrib["height"])
    places = [element.attrib for element in root.iter() if "x" in element.attrib]
    assert all(0 <= float(at["x"]) + float(at.get("width", 0)) <= 800 for at in places)
    assert all(0 <= float(at["y"]) <= height for at in places)
    assert len(list(root.iter(f"{SVG}title"))) == 3 * count


def test_few_blocks_decide_only_where_they_lie_apart() -> None:
    assert auto_strategy.apart([1.0, 1.1, 1.2], [1.3, 1.4, 1.5])
    assert not auto_strategy.apart([1.0, 1.1, 1.4], [1.3, 1.4, 1.5])
    assert auto_strategy.apart([1.0, 1.0, 1.1, 1.1, 1.9], [1.3, 1.4, 1.4, 1.5, 0.9])


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


def test_the_page_shows_choices_under_a_memory_limit() -> None:
    good = {
        "plan": "12 modules are sharded",
        "peak_bytes": 2 * 2**30,
        "memory_error": -0.06,
        "measured_ms": 500.0,
        "time_error": 0.03,
        "best": "each block, kept",
        "over_best": 1.1,
        "default_over": 1.4,
        "first_step_seconds": 70.0,
    }
    none = {**good, "peak_bytes": 4 * 2**30}
    for key in ("best", "over_best", "default_over"):
        del none[key]
    row = {
        "name": "2r-10G-gpt2",
        "limit_bytes": 3 * 2**30,
        "replicated_bytes": 4 * 2**30,
        "tried": {"each block, kept": {"fits": True}, "model, kept": {"fits": False}, "other": {"skipped": "no time"}},
        "chosen": {"offbeat": good, "offbeat, bf16 allowed": none},
    }
    result = {"rows": [row, {"name": "4r-10G-gpt2", "error": "rank 0 ended"}]}
    text = section(report.page({"gpu_memory_limit": result}), "Memory limit on a GPU")
    assert "| 3.00 (4.00) | 2.00 | -6.0%: missed by 20% | 500.0 | +3.0%: reached |" in text
    assert "| 1.100 (each block, kept): missed by 5% | 1.400: reached | 70.0: missed by 17% |" in text
    assert "| 4.00, above the limit |" in text
    assert "| none fits | does not fit |" in text
    assert "2 settings tried by hand, of which 1 fit." in text
    assert "Failed: 4r-10G-gpt2." in text
