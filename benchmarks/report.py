"""benchmarks/results/*.json → docs/benchmarks.md, and the measured figures of README.md.

    python benchmarks/report.py [--check]

The same files give the same bytes; nothing comes from the clock. `SECTIONS` has one function per benchmark. Targets
stand in `TARGETS`; whether one was reached is computed, never written by hand. Files that no section knows get a
generic table. `README_FIGURES` makes the lines between README's `measured` marks. `--check` writes nothing and fails
where the documents say something else than the results.
"""

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
MARKS = ("<!-- measured: written by benchmarks/report.py -->", "<!-- end of measured -->")
Result = dict[str, Any]
Lines = list[str]


@dataclass(frozen=True)
class Target:
    """A figure to reach, and whose it is."""

    value: float
    source: str


TARGETS = {
    "step_bound": Target(1.06, "Offbeat: times max(compute, network), network-bound or with paced compute"),
    "step_default": Target(1.25, "Offbeat: times as fast as DDP's default, balanced"),
    "step_best": Target(1.12, "Offbeat: times as fast as DDP with its best bucket size, balanced"),
    "step_compute": Target(0.98, "Offbeat: times as fast as DDP with its best bucket size, compute-bound"),
    "auto_strategy": Target(1.03, "Offbeat: times the best of all builders and bucket sizes"),
    "peers": Target(1.0, "Offbeat: no slower than the best exact peer"),
    "gpu_overhead": Target(1.02, "Offbeat: times DDP's step where nothing can be gained"),
    "same": Target(0.03, "Offbeat: median error of predicting a run from its own profile (dPRO: under 5%)"),
    "same_worst": Target(0.08, "Offbeat: the worst such error (dPRO: 5.6%)"),
    "cross": Target(0.06, "Offbeat: median error of predicting another strategy at another bandwidth"),
    "cross_worst": Target(0.15, "Offbeat: the worst such error"),
    "recorder": Target(0.05, "Offbeat: what recording costs (dPRO: 5.86%)"),
    "memory": Target(0.06, "Offbeat: error of estimated memory (dPRO: 5.25%)"),
    "tune": Target(1.2, "AutoDist: 1.2 to 1.6 times as fast as hand-tuned builders"),
}


def table(headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> Lines:
    heads = list(headers)
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows),
        "",
    ]


def percent(value: float, digits: int = 1) -> str:
    return f"{value * 100:.{digits}f}%"


def at_most(value: float, target: float) -> str:
    """Whether a figure that should be small is."""
    return "reached" if value <= target else f"missed by {percent(value / target - 1, 0)}"


def at_least(value: float, target: float) -> str:
    """Whether a figure that should be large is."""
    return "reached" if value >= target else f"missed by {percent(1 - value / target, 1)}"


def step_time(result: Result) -> Lines:
    rows = [
        (
            f"{row['hosts']}, {'paced' if row['paced'] else 'real'}",
            row["model"],
            row["regime"],
            f"{row['offbeat_over_bound']:.3f}",
            f"{row['offbeat_over_both_bounds']:.3f}",
            f"{row['best_ddp_over_bound']:.3f}",
            f"{row['ddp_default_over_offbeat']:.3f}",
            f"{row['best_ddp_over_offbeat']:.3f}",
            percent(row["spread_ms"]["offbeat"] / row["median_ms"]["offbeat"]),
            _step_verdict(row),
        )
        for row in result["rows"]
    ]
    heads = ("hosts, compute", "model", "regime", "Offbeat / bound", "Offbeat / both bounds", "best DDP / bound")
    ratios = [row["best_ddp_over_offbeat"] for row in result["rows"]]
    return [
        f"Median over {len(ratios)} cases: Offbeat is {statistics.median(ratios):.3f} times as fast as the best DDP; "
        f"the least is {min(ratios):.3f}, the most {max(ratios):.3f}.",
        "",
        *table((*heads, "DDP / Offbeat", "best DDP / Offbeat", "Offbeat's spread", "target"), rows),
    ]


def _step_verdict(row: Result) -> str:
    """Which targets a case has, and whether it reached them."""
    if row["paced"] or row["regime"] == "network-bound":
        return at_most(row["offbeat_over_bound"], TARGETS["step_bound"].value)
    if row["regime"] == "compute-bound":
        return at_least(row["best_ddp_over_offbeat"], TARGETS["step_compute"].value)
    default = at_least(row["ddp_default_over_offbeat"], TARGETS["step_default"].value)
    best = at_least(row["best_ddp_over_offbeat"], TARGETS["step_best"].value)
    return "reached" if default == best == "reached" else f"default DDP: {default}, best DDP: {best}"


def auto_strategy(result: Result) -> Lines:
    target = TARGETS["auto_strategy"].value
    rows = [
        (
            row["model"],
            row["regime"],
            row["auto_plan"],
            row["best_other"],
            f"{row['auto_over_best_other']:.3f}",
            at_most(row["auto_over_best_other"], target),
        )
        for row in result["rows"]
    ]
    heads = ("model", "regime", "plan of auto", "best of the others", "auto / best", f"target {target:.2f}")
    return table(heads, rows)


def peers(result: Result) -> Lines:
    lines: Lines = []
    for row in result["rows"]:
        exact = row["variants"].get("offbeat_auto", {}).get("over_best_exact_peer")
        target = TARGETS["peers"].value
        said = "" if exact is None else f"; Offbeat's target of {target:.2f}: {at_most(exact, target)}"
        lines += [f"{row['model']}, {row['regime']}, best exact peer {row['best_exact_peer']}{said}.", ""]
        variants = sorted(row["variants"].items(), key=lambda each: each[1]["median_ms"])
        lines += table(
            ("variant", "over best exact peer", "spread", "same numbers as DDP", "largest difference"),
            (
                (
                    name,
                    f"{of['over_best_exact_peer']:.3f}",
                    percent(of["spread_ms"] / of["median_ms"]),
                    "yes" if of["exact"] else "no, lossy",
                    "not finite" if of["max_difference"] is None else f"{of['max_difference']:.1e}",
                )
                for name, of in variants
            ),
        )
        refused = [f"{name} ({reason})" for name, reason in row["refused"].items()]
        lines += [f"Not run: {'; '.join(refused)}.", ""] if refused else []
    return lines


def replay_accuracy(result: Result) -> Lines:
    lines: Lines = []
    titles = {"summary": "Paced compute", "summary_real_compute": "Real compute, on cores shared with TCP"}
    for key, title in titles.items():
        if key in result:
            lines += [f"{title}:", "", *table(_ACCURACY_HEADS, _accuracy_rows(result[key]))]
    return lines


_ACCURACY_HEADS = ("prediction of", "runs", "median error", "target of the median", "worst", "target of the worst")
_PREDICTIONS = {
    "same": "its own run",
    "cross": "all other runs",
    "daydream": "all other runs, as Daydream",
    "unaligned": "its own run, unaligned",
}


def _accuracy_rows(summary: Result) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for kind, shown in _PREDICTIONS.items():
        if kind in summary:
            of = summary[kind]
            verdicts = ["a baseline", "a baseline"]
            if kind in TARGETS:
                goals = {"median": TARGETS[kind].value, "worst": TARGETS[f"{kind}_worst"].value}
                verdicts = [f"{percent(goal, 0)}: {at_most(of[which], goal)}" for which, goal in goals.items()]
            rows.append(
                (shown, of["predictions"], percent(of["median"]), verdicts[0], percent(of["worst"]), verdicts[1])
            )
    of, overhead = summary["recorder_overhead"], TARGETS["recorder"].value
    verdict = f"{percent(overhead, 0)}: {at_most(of['median'], overhead)}"
    rows.append(("recorder's overhead", summary["runs"], percent(of["median"]), verdict, percent(of["worst"]), ""))
    return rows


def search_speed(result: Result) -> Lines:
    rows = [
        (
            name,
            row["tensors"],
            f"{row['gain_over_ddp']:+.1%}",
            f"{row['optimize']['wall_seconds']:.1f}",
            f"{row['paper_hours'][-1] * 3600:,.0f}",
            f"{row['paper_hours'][-1] * 3600 / row['optimize']['wall_seconds']:,.0f}",
        )
        for name, row in result["models"].items()
    ]
    heads = ("model", "tensors", "predicted gain over DDP", "search, s", "dPRO's search, s", "dPRO's / Offbeat's")
    return table(heads, rows)


def pace_speed(result: Result) -> Lines:
    rows = [
        (name, row["tensors"], f"{row['lp_over_offbeat']:,.0f}", f"{row['lp_makespan_over_optimum']:.2f}")
        for name, row in result["models"].items()
    ]
    return table(("model", "tensors", "programme's time / Offbeat's", "programme's makespan / optimum"), rows)


def pace_testbed(result: Result) -> Lines:
    rows = []
    for name, row in result["models"].items():
        for baseline, gain in row["pace_speedup"].items():
            low, high = gain["paper"]
            inside = "reached" if gain["engine"] >= low else f"missed by {percent(low - gain['engine'])} of the step"
            rows.append(
                (name, baseline, f"{gain['step']:+.1%}", f"{gain['engine']:+.1%}", f"{low:+.0%} to {high:+.0%}", inside)
            )
    heads = ("model", "against", "waits in step()", "reaches into forward", "paper", "paper's least")
    return table(heads, rows)


def frontier_speed(result: Result) -> Lines:
    rows = [
        (
            row["model"],
            row["units"],
            row["points"],
            f"{row['search_seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
            "none" if row["paper_seconds"] is None else f"{row['paper_seconds']:g}",
            f"{row['target_seconds']:g}",
            at_most(row["search_seconds"], row["target_seconds"]),
        )
        for row in result["models"]
    ]
    heads = ("model", "units", "points", "search, s", "of processor, s", "paper (48 cores), s", "target, s", "")
    return table(heads, rows)


def frontier_accuracy(result: Result) -> Lines:
    rows = [
        (
            row["model"],
            len(row["rows"]),
            percent(row["estimate_seconds_error"]),
            at_most(row["estimate_seconds_error"], result["time_target"]),
            percent(row["estimate_bytes_error"]),
            at_most(row["estimate_bytes_error"], result["memory_target"]),
            percent(row["search_seconds_error"]),
        )
        for row in result["models"]
    ]
    targets = (f"target {percent(result['time_target'], 0)}", f"target {percent(result['memory_target'], 0)}")
    heads = ("model", "strategies", "error of time", targets[0], "error of memory", targets[1], "error of FT's own sum")
    return table(heads, rows)


def frontier_findings(result: Result) -> Lines:
    names = list(result["models"][0]["findings"])
    rows = [
        (
            name.replace("_", " "),
            *("holds" if model["findings"][name] else "does not hold" for model in result["models"]),
        )
        for name in names
    ]
    return table(("the paper's statement", *(model["model"] for model in result["models"])), rows)


def foundation(result: Result) -> Lines:
    lines: Lines = []
    if "capture" in result:
        found = result["capture"]
        grown = (found["peak_rss_bytes"] - found["rss_before_bytes"]) / 2**30
        size = f"{found['parameters'] / 1e6:.0f}M parameters"
        lines += [f"Capture of {found['model']} ({size}): {found['seconds']:.1f} s, {grown:.2f} GiB of memory.", ""]
    if "lowering" in result:
        found = result["lowering"]
        slowest = found["builders"][found["slowest"]]["lower_seconds"]
        lines += [f"Lowering for one of {found['ranks']} ranks: {slowest:.2f} s for the slowest of "
                  f"{len(found['builders'])} builders ({found['slowest']}).", ""]  # fmt: skip
    if "all_reduce" in result:
        found = result["all_reduce"]
        lines += [
            f"All-reduce between {found['hosts']} emulated hosts at {found['bandwidth']}: "
            f"{percent(found['median_link_share'])} of the link (median).",
            "",
        ]
    return lines


def memory_accuracy(result: Result) -> Lines:
    target = TARGETS["memory"].value
    rows = [
        (run["model"], run["optimizer"], f"{run['relative_error']:+.1%}", at_most(abs(run["relative_error"]), target))
        for run in result["runs"]
    ]
    return table(("model", "optimizer", "estimate against measured peak", f"target {percent(target, 2)}"), rows)


def replay_speed(result: Result) -> Lines:
    rates = [
        (name.replace("_", " "), f"{result[name]['tasks']:,}", f"{result[name]['tasks_per_wall_seconds'] / 1e6:.1f}")
        for name in ("layered", "layered_priorities", "training")
    ]
    folded, detailed = result["folded_10000"], result["bert_base_128"]
    return [
        *table(("graph", "tasks", "million tasks a second"), rates),
        f"BERT-base on {folded['ranks']:,} folded ranks: {folded['wall_seconds']:.2f} s. On {detailed['ranks']} ranks "
        f"with every message of every collective ({detailed['tasks']:,} tasks): {detailed['wall_seconds']:.2f} s.",
        "",
    ]


def scaling(result: Result) -> Lines:
    sources = sorted({f"{of['file']}, {of['device']}" for of in result["compute"].values()})
    lines = [f"Simulated: nothing ran on so many devices. Compute times from {'; '.join(sources)}.", ""]
    for kind in ("weak", "strong"):
        rows = [
            (
                row["cluster"],
                row["model"],
                f"{row['devices']:,}",
                f"{row['samples_per_device']:g}",
                percent(row["ddp_efficiency"], 0),
                percent(row["offbeat_efficiency"], 0),
                f"{row['speedup']:.2f}",
                f"{row['search_seconds'] + row['simulation_seconds']:.1f}",
            )
            for row in result["rows"]
            if row["scaling"] == kind
        ]
        heads = (
            "cluster",
            "model",
            "devices",
            "samples each",
            "DDP",
            "Offbeat",
            "DDP / Offbeat",
            "search and replay, s",
        )
        lines += [f"{kind.capitalize()} scaling, efficiency (compute over step):", "", *table(heads, rows)]
    for found in result["full_search"]:
        lines.append(
            f"- The whole optimiser on {found['model']}, {found['devices']:,} devices of {found['cluster']}: "
            f"{found['gain_over_pace']:+.1%} over PACE's schedule in {found['seconds']:.1f} s."
        )
    return [*lines, ""]


def tune(result: Result) -> Lines:
    target = TARGETS["tune"].value
    rows = []
    for row in result["rows"]:
        if row["search"] == "random":
            said = "a baseline"
        else:
            said = "no winner" if row["speedup"] is None else at_least(row["speedup"], target)
        shown = "none" if row["speedup"] is None else f"{row['speedup']:.3f}"
        rows.append(
            (row["model"], row["cluster"], row["search"], row["baseline"], shown, percent(row["hit_rate"], 0), said)
        )
    heads = ("model", "cluster", "search", "best builder", "builder / winner", "hit rate", f"target {target:.1f}")
    return [f"{result['trials']} trials for each search.", "", *table(heads, rows)]


def ranking(result: Result) -> Lines:
    lines: Lines = []
    for source in ("measured", "replayed"):
        found = result[source]
        shown = ", ".join(f"{name} ({count})" for name, count in found["domains"].items())
        rows = [
            (name, percent(value), percent(found["transfer"][name]) if name in found["transfer"] else "none")
            for name, value in found["within"].items()
        ]
        lines += [
            f"Trials {source}: {shown}.",
            "",
            *table(("predictor", "within a domain", "from other domains"), rows),
        ]
    return lines


def dataset_summary(result: Result) -> Lines:
    return [
        f"{result['points']:,} trials of {result['models']} models on {result['clusters']} clusters: "
        f"{result['replayed']:,} replayed, {result['measured']} measured, {result['failed']} failed.",
        "",
    ]


def gpu_overhead(result: Result) -> Lines:
    target = TARGETS["gpu_overhead"].value
    rows = [
        (
            row["model"],
            row["batch"],
            *(f"{row['median_ms'][name]:.2f}" for name in ("plain", "ddp", "ddp_view", "offbeat")),
            f"{row['offbeat_over_ddp']:.3f}",
            f"{over_faster_ddp(row):.3f}",
            at_most(over_faster_ddp(row), target),
        )
        for row in result["rows"]
    ]
    heads = ("model", "batch", "plain, ms", "DDP, ms", "DDP with bucket views, ms", "Offbeat, ms", "Offbeat / DDP")
    device = f"{result['device']}, torch {result['torch']}, world size 1 over NCCL."
    return [device, "", *table((*heads, "Offbeat / faster DDP", f"target {target:.2f}"), rows)]


def over_faster_ddp(row: Result) -> float:
    return row["median_ms"]["offbeat"] / min(row["median_ms"]["ddp"], row["median_ms"]["ddp_view"])


def accelerator(result: Result) -> Lines:
    target = TARGETS["memory"].value
    rows = []
    for name, of in result["models"].items():
        for precision in (each for each in ("bf16", "fp32") if each in of):
            step = of[precision]
            phases = (f"{step['phases'][phase]['seconds'] * 1e3:.1f}" for phase in ("forward", "backward", "optimizer"))
            error = step.get("memory", {}).get("relative_error")
            memory = ("none", "") if error is None else (f"{error:+.1%}", at_most(abs(error), target))
            rows.append((name, precision, step["batch"], f"{step['step_seconds'] * 1e3:.1f}", *phases, *memory))
    heads = ("model", "precision", "batch", "step, ms", "forward", "backward", "update", "memory estimate")
    lines = [f"{result['device_name']}, torch {result['torch']}, {result['optimizer']}.", ""]
    lines += table((*heads, f"target {percent(target, 2)}"), rows)
    changes = [
        (f"{name}: blocks recomputed", f"{of['seconds_ratio']:.3f}", f"{of['predicted']['seconds_ratio']:.3f}")
        for name, of in result.get("recompute", {}).items()
    ]
    changes += [
        (f"{name}: blocks compiled", f"{of['seconds_ratio']:.3f}", f"{of['predicted_seconds_ratio']:.3f}")
        for name, of in result.get("op_fusion", {}).items()
    ]
    changes += [
        (f"{name}: recorder on", f"{1 + of['overhead']:.3f}", "none") for name, of in result.get("recorder", {}).items()
    ]
    lines += table(("change", "step with / without", "predicted"), changes) if changes else []
    left_out = [
        *(f"{name} ({reason})" for name, reason in result.get("failed", {}).items()),
        *result.get("skipped", []),
    ]
    return [*lines, *([f"Not measured: {'; '.join(left_out)}.", ""] if left_out else [])]


def generic(result: Result) -> Lines:
    """A file that no section knows: its plain values."""
    rows = [(key, value) for key, value in flat(result) if key.split(".")[0] not in ("made", "machine", "benchmark")]
    return table(("field", "value"), rows[:60])


def flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every plain value below a value, with the path to it."""
    if isinstance(value, dict):
        return [each for key, below in value.items() for each in flat(below, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list):
        return [each for number, below in enumerate(value) for each in flat(below, f"{path}.{number}")]
    return [(path, f"{value:.6g}" if isinstance(value, float) else value)]


@dataclass(frozen=True)
class Section:
    """How a results file is shown."""

    name: str
    """Of the file under results/."""
    title: str
    about: str
    show: Callable[[Result], Lines]
    command: str = ""
    """Where `make bench` does not run it: the command that does."""
    needs: str = ""
    """What that command needs."""
    date: str = ""
    """When the file was made, where it does not say so itself."""


_STEP = (
    "Step time against DDP with default buckets and with the best of eight bucket sizes, in alternating blocks on "
    "emulated hosts with shaped links. The bound is max(compute, network); the second one is also the processor time of both, over the cores. Ratios of medians; spread is (slowest - "
    "fastest block) / median."
)
SECTIONS = (
    Section("step_time", "Step time", _STEP, step_time),
    Section(
        "auto_strategy",
        "Automatic strategy",
        'strategy="auto", started cold, against every builder and eight bucket sizes of DDP on two hosts with paced '
        "compute.",
        auto_strategy,
    ),
    Section(
        "peers",
        "Peers",
        "Other ways to synchronise a PyTorch job, in the same run on two hosts with real compute.",
        peers,
    ),
    Section(
        "replay_accuracy",
        "Replay accuracy",
        "Error of predicted step times, |predicted / measured - 1|, over models, links and strategies on two and four "
        "hosts.",
        replay_accuracy,
        "python benchmarks/replay_accuracy.py --json [--real]",
        "16 cores for four hosts",
        "2026-11-15",
    ),
    Section("replay_accuracy_2_hosts", "Replay accuracy on two hosts", "The same, two hosts only.", replay_accuracy),
    Section("search_speed", "Search speed", "dPRO's models on 16 workers with a V100 each, 10 Gbit/s.", search_speed),
    Section(
        "pace_speed",
        "Schedule speed",
        "PACE's optimal schedule by Offbeat's exact algorithm against the paper's linear programme (HiGHS).",
        pace_speed,
    ),
    Section(
        "pace_testbed",
        "PACE's testbed",
        "Simulated: speed-up of PACE's schedule on 12 GTX 1080 Ti at 10 Gbit/s, beside the paper's range.",
        pace_testbed,
    ),
    Section("frontier_speed", "Frontier speed", "Time of TensorOpt's search at 16 devices.", frontier_speed),
    Section(
        "frontier_accuracy",
        "Frontier accuracy",
        "Random sharded strategies run on emulated hosts; mean |estimated / measured - 1|.",
        frontier_accuracy,
    ),
    Section(
        "frontier_findings",
        "Frontier findings",
        "Simulated: which statements of TensorOpt's section 5.1 hold on its testbed.",
        frontier_findings,
    ),
    Section("foundation", "Foundation", "Capture, lowering, and the emulated link.", foundation),
    Section(
        "memory_accuracy",
        "Memory accuracy",
        "Estimated against measured peak memory of a training step on the CPU.",
        memory_accuracy,
    ),
    Section("replay_speed", "Replay speed", "Tasks replayed per second on one core, warm.", replay_speed),
    Section("scaling", "Scale on paper", "DDP's plan against Offbeat's from 8 to 10,000 devices.", scaling),
    Section("tune_short", "Tuning, short", "Search with few, short trials on unequal emulated hosts.", tune),
    Section(
        "tune",
        "Tuning",
        "Search with real trials on unequal emulated hosts; the winner and the best hand-made builder are measured "
        "again in turn.",
        tune,
        "python benchmarks/tune.py --json",
        "an hour",
        "2026-11-15",
    ),
    Section(
        "ranking",
        "Ranking",
        "Share of pairs of held-out trials that a predictor puts in the right order.",
        ranking,
        "python benchmarks/make_dataset.py --real 40 && python benchmarks/ranking.py --json",
        "hours",
        "2026-11-15",
    ),
    Section(
        "dataset_summary",
        "Dataset of trials",
        "What the predictors were trained and tested on.",
        dataset_summary,
        "python benchmarks/make_dataset.py --json --real 40",
        "an hour",
        "2026-11-15",
    ),
    Section(
        "gpu_overhead",
        "Overhead on a GPU",
        "One GPU, so that nothing is gained by communicating better; bf16, AdamW.",
        gpu_overhead,
        "python benchmarks/gpu_overhead.py --json",
        "a GPU",
        "2026-11-15",
    ),
    Section(
        "accelerator",
        "Accelerator",
        "Training steps of the zoo on one accelerator, and what three decisions really gain.",
        accelerator,
        "python benchmarks/accelerator.py --output benchmarks/results/accelerator.json",
        "a GPU",
        "2026-11-15",
    ),
)
SUMMARY = "bench_run"


def load(folder: Path) -> dict[str, Result]:
    """All results by the name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def page(results: dict[str, Result]) -> str:
    """The text of docs/benchmarks.md."""
    lines = ["# Benchmarks", "", *opening(results.get(SUMMARY)), *targets()]
    for section in SECTIONS:
        lines += [f"## {section.title}", "", section.about, "", *body(section, results.get(section.name))]
    known = {SUMMARY, *(section.name for section in SECTIONS)}
    for name in (each for each in results if each not in known):
        lines += [f"## {name}", "", *origin(results[name], Section(name, name, "", generic)), *generic(results[name])]
    return "\n".join(map(wrapped, lines)).rstrip() + "\n"


def wrapped(line: str) -> str:
    """Prose in lines of the documents' length; tables and headings as they are."""
    if line.startswith(("|", "#")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def opening(summary: Result | None) -> Lines:
    lines = [
        "Written by `make bench-page` from `benchmarks/results/`, which `make bench` fills. Steps on emulated hosts "
        "are given as ratios, because their absolute times say nothing about other machines.",
        "",
    ]
    if summary is None:
        return [*lines, "`make bench` has not been run here; each section says where its figures come from.", ""]
    machine, versions = summary["machine"], summary["versions"]
    failed = [name for name, outcome in summary["benchmarks"].items() if not outcome["ok"]]
    return [
        *lines,
        f"- Machine: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine['kernel']}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- Last run: {summary['date']}; benchmarks: {len(summary['benchmarks'])}, minutes: "
        f"{summary['total_seconds'] / 60:.0f}",
        f"- Failed in their last run: {', '.join(failed) or 'none'}",
        "",
    ]


def targets() -> Lines:
    rows = [(name.replace("_", " "), f"{of.value:g}", of.source) for name, of in TARGETS.items()]
    said = (
        '"Reached" and "missed" compare a figure with its target. Where that is a paper\'s, it was reached there on '
        "other hardware. Targets of the frontier stand in its own tables."
    )
    return [said, "", *table(("target of", "value", "whose"), rows)]


def body(section: Section, result: Result | None) -> Lines:
    if result is None:
        how = f"`{section.command}` does, with {section.needs}." if section.command else "`make bench` runs it."
        return [f"It has not been run here. {how}", ""]
    try:
        shown = section.show(result)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise SystemExit(f"results/{section.name}.json lacks what its section shows: {error!r}") from None
    return [*origin(result, section), *shown]


def origin(result: Result, section: Section) -> Lines:
    """Which command made a file, when and on what, as far as that is known."""
    made = result.get("made", {})
    command, machine = made.get("command", section.command), result.get("machine")
    said = [f"`{command}`"] if command else []
    if made:
        said.append(f"{made['date']}, {made['machine']['processor']}, {made['machine']['cores']} cores")
    else:
        facts = ", ".join(f"{key} {value}" for key, value in machine.items()) if isinstance(machine, dict) else ""
        said += [part for part in (f"Not part of `make bench`: needs {section.needs}" if section.needs else "",
                                   ", ".join(each for each in (section.date, facts) if each)) if part]  # fmt: skip
    note = result.get("note")
    return [*([f"{'. '.join(said)}.", ""] if said else []), *([f"Note: {note}.", ""] if note else [])]


@dataclass(frozen=True)
class Figure:
    """A sentence of README made of a results file."""

    section: str
    write: Callable[[Result], str]


def _step_figure(result: Result) -> str:
    ratios = [row["best_ddp_over_offbeat"] for row in result["rows"]]
    return (
        f"A step on emulated hosts is {statistics.median(ratios):.2f} times as fast as DDP's at its best bucket size "
        f"(median of {len(ratios)} cases; least {min(ratios):.2f}, most {max(ratios):.2f})"
    )


def _replay_figure(result: Result) -> str:
    own, cross = result["summary"]["same"], result["summary"]["cross"]
    said = (
        f"Replay predicts a recorded job's step with a median error of {percent(own['median'])} (worst "
        f"{percent(own['worst'])}), and other strategies and links with {percent(cross['median'])} (worst "
        f"{percent(cross['worst'])}), where compute takes no processor time from the network"
    )
    real = result.get("summary_real_compute")
    if real is None:
        return said
    return (
        f"{said}; where they share two cores, {percent(real['same']['median'])} and {percent(real['cross']['median'])}"
    )


def _speed_figure(result: Result) -> str:
    folded = result["folded_10000"]
    return f"It takes {folded['wall_seconds']:.2f} s to replay BERT-base on {folded['ranks']:,} ranks"


def _gpu_figure(result: Result) -> str:
    plain = [row["offbeat_over_ddp"] for row in result["rows"]]
    faster = [over_faster_ddp(row) for row in result["rows"]]
    return (
        f"On one {result['device']}, where nothing can be gained, steps take {min(plain):.2f} to {max(plain):.2f} of "
        f"DDP's time, and {min(faster):.2f} to {max(faster):.2f} of DDP's with its faster way to keep gradients"
    )


def _tune_figure(result: Result) -> str:
    guided = [row for row in result["rows"] if row["speedup"] and row["search"] != "random"]
    best = max(guided, key=lambda row: row["speedup"])
    return (
        f"`offbeat tune` found a strategy {best['speedup']:.2f} times as fast as the best builder in "
        f"{result['trials']} trials ({best['model']}, unequal hosts)"
    )


README_FIGURES = (
    Figure("step_time", _step_figure),
    Figure("replay_accuracy", _replay_figure),
    Figure("replay_speed", _speed_figure),
    Figure("gpu_overhead", _gpu_figure),
    Figure("tune", _tune_figure),
)


def readme(text: str, results: dict[str, Result]) -> str:
    """README with the lines between its marks written anew."""
    before, found, rest = text.partition(MARKS[0])
    _, ended, after = rest.partition(MARKS[1])
    if not (found and ended):
        raise SystemExit(f"README.md lacks the lines {MARKS[0]!r} and {MARKS[1]!r}")
    titles = {section.name: section.title for section in SECTIONS}
    lines = [
        wrapped(f"- {figure.write(results[figure.section])} ([source]({link_to(titles[figure.section])})).")
        for figure in README_FIGURES
        if figure.section in results
    ]
    return f"{before}{MARKS[0]}\n" + "\n".join(lines) + f"\n{MARKS[1]}{after}"


def link_to(title: str) -> str:
    return f"docs/benchmarks.md#{anchor(title)}"


def anchor(title: str) -> str:
    """What a page's heading is linked by."""
    kept = "".join(sign for sign in title.lower() if sign.isalnum() or sign in " -")
    return kept.replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the documents are not current")
    options = parser.parse_args()
    results = load(RESULTS)
    wanted = {PAGE: page(results), README: readme(README.read_text(), results)}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if options.check:
        sys.exit(f"not current, run make bench-page: {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
