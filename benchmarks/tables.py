"""One function per benchmark that writes the section of docs/benchmarks.md from its results.

`TARGETS` holds the targets; whether one was reached is computed, never written by hand.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from auto_strategy import apart

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
    "auto_strategy": Target(0.99, "Offbeat: the best DDP's step over its own"),
    "peers": Target(1.0, "Offbeat: no slower than the best exact peer"),
    "gpu_overhead": Target(1.02, "Offbeat: times DDP's step when there is nothing to gain"),
    "gpu_default": Target(1.25, "Offbeat: times as fast as DDP's default on GPU ranks, median of the cases"),
    "gpu_bound": Target(1.05, "Offbeat: times max(compute, network) on GPU ranks, balanced; or the next"),
    "gpu_best": Target(1.15, "Offbeat: times as fast as DDP with its best bucket size on GPU ranks, balanced"),
    "same": Target(0.03, "Offbeat: median error of predicting a run from its own profile (dPRO: under 5%)"),
    "same_worst": Target(0.08, "Offbeat: the worst such error (dPRO: 5.6%)"),
    "cross": Target(0.06, "Offbeat: median error of predicting another strategy at another bandwidth"),
    "cross_worst": Target(0.15, "Offbeat: the worst such error"),
    "recorder": Target(0.05, "Offbeat: overhead of recording (dPRO: 5.86%)"),
    "coverage": Target(0.85, "Offbeat: share of held-back measurements inside the 90% interval, and at most 0.95"),
    "width": Target(0.12, "Offbeat: mean width of these intervals"),
    "limit_time": Target(0.08, "Offbeat: error of the step predicted by memory_limit on GPU ranks"),
    "limit_memory": Target(0.05, "Offbeat: error of the peak memory predicted by memory_limit on GPU ranks"),
    "limit_best": Target(1.05, "Offbeat: times the step of the best hand-tried FSDP2 setting under a memory limit"),
    "limit_default": Target(1.15, "Offbeat: times as fast as FSDP2's default wrapping under a memory limit"),
    "limit_start": Target(60.0, "Offbeat: seconds from distribute() with a memory limit to the end of the first step"),
    "gpu_same": Target(0.02, "Offbeat: median error of predicting a run on GPU ranks from its own profile"),
    "gpu_same_worst": Target(0.06, "Offbeat: the worst such error"),
    "gpu_cross": Target(0.04, "Offbeat: median error of predicting another strategy or bandwidth on GPU ranks"),
    "gpu_cross_worst": Target(0.12, "Offbeat: the worst such error"),
    "gpu_recorder": Target(0.03, "Offbeat: overhead of recording on GPU ranks"),
    "memory": Target(0.06, "Offbeat: error of estimated memory (dPRO: 5.25%)"),
    "servers": Target(1.3, "Offbeat: the best all-reduce builder's step over that with servers, on unequal links"),
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
            f"{row['median_ms']['offbeat'] / row['schedule_ms']:.3f}" if "schedule_ms" in row else "",
            f"{row['best_ddp_over_bound']:.3f}",
            f"{row['ddp_default_over_offbeat']:.3f}",
            f"{row['best_ddp_over_offbeat']:.3f}",
            percent(row["spread_ms"]["offbeat"] / row["median_ms"]["offbeat"]) if "spread_ms" in row else "",
            _step_verdict(row),
        )
        for row in result["rows"]
    ]
    bounds = ("Offbeat / bound", "Offbeat / both bounds", "Offbeat / best schedule", "best DDP / bound")
    heads = ("hosts, compute", "model", "regime", *bounds)
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
    target, whole = TARGETS["auto_strategy"].value, result["summary"]
    rows = [
        (
            f"{row['hosts']} {row['compute']}{', clipped' if row['clip'] else ''}",
            row["model"],
            row["regime"],
            row["plan"],
            f"{row['auto_over_bound']:.2f}",
            f"{row['default_over_auto']:.2f}",
            f"{row['best_over_auto']:.3f}",
            at_least(row["best_over_auto"], target) if row["decided"] else "too noisy to tell",
        )
        for row in result["rows"]
    ]
    heads = (
        "hosts",
        "model",
        "regime",
        "plan",
        "auto / bound",
        "DDP / auto",
        "best DDP / auto",
        f"target {target:.2f}",
    )
    said = (
        f"Best DDP / auto over {whole['cases']} cases: median {whole['median_best_over_auto']:.2f}, least "
        f"{whole['least_best_over_auto']:.2f}; DDP's default / auto: median {whole['median_default_over_auto']:.2f}."
    )
    return [said, "", *table(heads, rows)]


def gpu_cases(result: Result) -> list[Result]:
    """The cases that ended, those of one setting together, whatever the order in which they were run."""
    ended = [row for row in result["rows"] if "error" not in row]
    regimes = ("network-bound", "balanced", "compute-bound")
    return sorted(ended, key=lambda row: (
        row["precision"], row["clip"], row["ranks"], -row["gbit"], row["model"], regimes.index(row["regime"])
    ))  # fmt: skip


def gpu_failed(result: Result) -> list[str]:
    """The names of the cases that did not end."""
    return [f"{row['name']}{gpu_setting(row)}" for row in result["rows"] if "error" in row]


def gpu_decided(row: Result) -> bool:
    """Whether Offbeat's blocks and the best DDP's lie apart."""
    return apart(row["blocks_ms"]["auto"], row["blocks_ms"][row["best"]])


def gpu_setting(row: Result) -> str:
    """What a case has besides its name."""
    return f"{', clipped' if row['clip'] else ''}{', bf16 weights' if row['precision'] == 'bf16' else ''}"


GPU_CASES = 36
"""That `gpu_step_time.py --list` names."""


def gpu_step_time(result: Result) -> Lines:
    cases = gpu_cases(result)
    plain = sum(not row["clip"] for row in cases)
    device = listed(sorted({row["device"] for row in cases}))
    lines = [f"{device}. Of the {GPU_CASES} cases {plain} were run, and {len(cases) - plain} with clipping.", ""]
    for setting in dict.fromkeys(map(gpu_setting, cases)):
        of = [row for row in cases if gpu_setting(row) == setting]
        default, goal = statistics.median(row["default_over_auto"] for row in of), TARGETS["gpu_default"].value
        target = "" if of[0]["clip"] else f", target of the median {goal:.2f}: {at_least(default, goal)}"
        lines.append(
            f"- {len(of)} cases{setting}: DDP's default / auto {ratios(of, 'default_over_auto')}{target}; best DDP / "
            f"auto {ratios(of, 'best_over_auto')}; auto against the best DDP: {gpu_verdicts(of)}."
        )
    lines += [f"- Failed: {'; '.join(gpu_failed(result))}."] if gpu_failed(result) else []
    ms = ("compute", "network", "bound", "DDP default", "best DDP (its bucket)", "FSDP2", "fp16 hook")
    verdicts = ("auto / bound", "DDP / auto", "best DDP / auto", "auto against the best", "target")
    heads = ("case", *ms, "Offbeat auto (its plan)", *verdicts)
    return [*lines, "", "Times in milliseconds:", "", *table(heads, map(_gpu_row, cases))]


def _gpu_row(row: Result) -> tuple[Any, ...]:
    median, bucket = row["median_ms"], row["best"].removeprefix("ddp_")
    plan = f"{row['plan']}, {row['mode']}{'' if row['settled'] else ', not settled'}"
    return (
        f"{row['name']}{gpu_setting(row)}",
        *(f"{ms:.1f}" for ms in (median["compute"], median["network"], row["bound_ms"], median["ddp_default"])),
        f"{median[row['best']]:.1f} ({bucket if bucket == 'default' else f'{bucket} MiB'})",
        f"{median['fsdp2']:.1f}",
        f"{median['fp16_hook']:.1f}",
        f"{median['auto']:.1f} ({plan})",
        *(f"{row[name]:.3f}" for name in ("auto_over_bound", "default_over_auto", "best_over_auto")),
        "decided" if gpu_decided(row) else "noisy",
        _gpu_verdict(row),
    )


def _gpu_verdict(row: Result) -> str:
    """Which target a case has, and whether it reached it."""
    balanced = row["regime"] == "balanced" and not row["clip"]
    if balanced and row["auto_over_bound"] <= TARGETS["gpu_bound"].value:
        return f"auto / bound {TARGETS['gpu_bound'].value:.2f}: reached"
    target = TARGETS["gpu_best" if balanced else "auto_strategy"].value
    return f"best DDP / auto {target:.2f}: {at_least(row['best_over_auto'], target)}"


def gpu_verdicts(rows: list[Result]) -> str:
    """How many cases Offbeat wins and loses against the best DDP."""
    decided = [row["best_over_auto"] for row in rows if gpu_decided(row)]
    faster = sum(ratio > 1 for ratio in decided)
    return f"faster in {faster}, slower in {len(decided) - faster}, noisy in {len(rows) - len(decided)}"


def ratios(rows: list[Result], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def listed(words: Iterable[Any]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def gpu_memory_limit(result: Result) -> Lines:
    rows, lines = [], []
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"- Failed: {row['name']}.")
            continue
        rows += [_limit_row(row, name, of) for name, of in row["chosen"].items()]
        tried = [each for each in row["tried"].values() if "skipped" not in each]
        fits = sum(each["fits"] for each in tried)
        lines.append(f"- {row['name']}: {len(tried)} settings tried by hand, of which {fits} fit.")
    heads = ("case", "choice", "limit (DDP's peak), GiB", "peak, GiB", "predicted peak", "step, ms", "predicted step")
    more = ("step / best by hand", "default wrapping / step", "start, s")
    return [*table((*heads, *more), rows), *lines, ""]


def _limit_row(row: Result, name: str, of: Result) -> tuple[str, ...]:
    goals = {key: target.value for key, target in TARGETS.items()}
    best, default, start = of.get("over_best"), of.get("default_over"), of["first_step_seconds"]
    above = ", above the limit" if (of["peak_bytes"] or 0) > row["limit_bytes"] else ""
    return (
        row["name"],
        f"{name}: {of['plan']}",
        f"{gib(row['limit_bytes'])} ({gib(row['replicated_bytes'])})",
        f"{gib(of['peak_bytes'])}{above}",
        _judged(of["memory_error"], goals["limit_memory"]),
        f"{of['measured_ms']:.1f}",
        _judged(of["time_error"], goals["limit_time"]),
        "none fits" if best is None else f"{best:.3f} ({of['best']}): {at_most(best, goals['limit_best'])}",
        "does not fit" if default is None else f"{default:.3f}: {at_least(default, goals['limit_default'])}",
        f"{start:.1f}: {at_most(start, goals['limit_start'])}",
    )


def gib(size: int | None) -> str:
    return "not measured" if size is None else f"{size / 2**30:.2f}"


def _judged(error: float | None, target: float) -> str:
    return "not measured" if error is None else f"{error:+.1%}: {at_most(abs(error), target)}"


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


def intervals(result: Result) -> Lines:
    """Coverage and width, whole and by setting."""
    names = {
        "all": "everything below",
        "replay": "replay of recorded jobs",
        "replay_without_shared_processors": "the same, where compute and network share no processors",
    }
    least, most = TARGETS["coverage"].value, TARGETS["width"].value

    def row(name: str, found: Result, judged: bool = True) -> tuple[str, ...]:
        inside, width = found["coverage"], found["mean_width"]
        reached = "reached" if least <= inside <= 0.95 else "missed"
        verdicts = (reached, "reached" if width <= most else "missed") if judged else ("", "")
        alone = f"{percent(found['prior_coverage'])}, {percent(found['prior_mean_width'])}"
        figures = (percent(inside), verdicts[0], percent(width), verdicts[1], alone)
        return (name, str(found["measurements"]), *figures)

    rows = [row(words, result["summary"][key]) for key, words in names.items()]
    rows += [row(f"{each['setting']}: {each['kind']}", each, judged=False) for each in result["rows"]]
    heads = ("predictions", "number", "inside", "target", "mean width", "target", "by the prior alone")
    return table(heads, rows)


def gpu_replay_accuracy(result: Result) -> Lines:
    ranks, models, strategies = (
        listed(dict.fromkeys(row[kind] for row in result["rows"])) for kind in ("hosts", "model", "strategy")
    )
    said = f"Run with {ranks} ranks: {models}, each by {strategies}."
    return [said, "", *table(_ACCURACY_HEADS, _accuracy_rows(result["summary"], "gpu_"))]


_ACCURACY_HEADS = ("prediction of", "runs", "median error", "target of the median", "worst", "target of the worst")
_PREDICTIONS = {
    "same": "its own run",
    "cross": "all other runs",
    "daydream": "all other runs, as Daydream",
    "unaligned": "its own run, unaligned",
}


def _accuracy_rows(summary: Result, whose: str = "") -> list[tuple[Any, ...]]:
    """The table of a summary; `whose` begins the names of its targets."""
    rows: list[tuple[Any, ...]] = []
    for kind, shown in _PREDICTIONS.items():
        if kind in summary:
            of = summary[kind]
            verdicts = ["a baseline", "a baseline"]
            if whose + kind in TARGETS:
                goals = {"median": TARGETS[whose + kind].value, "worst": TARGETS[f"{whose}{kind}_worst"].value}
                verdicts = [f"{percent(goal, 0)}: {at_most(of[which], goal)}" for which, goal in goals.items()]
            rows.append(
                (shown, of["predictions"], percent(of["median"]), verdicts[0], percent(of["worst"]), verdicts[1])
            )
    of, overhead = summary["recorder_overhead"], TARGETS[f"{whose}recorder"].value
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
    return [*table(heads, rows), *_ablation(result)]


def _ablation(result: Result) -> Lines:
    """What each speed-up of the search buys."""
    ablated = {name: row["ablation"] for name, row in result["models"].items() if "ablation" in row}
    if not ablated:
        return []
    steps = list(next(iter(ablated.values())))
    rows = [
        (
            name,
            *(f"{of[step]['wall_seconds']:.1f}{' (stopped)' if of[step]['reached_limit'] else ''}" for step in steps),
        )
        for name, of in ablated.items()
    ]
    return [
        "Seconds with the speed-ups of the search switched on one after another:",
        "",
        *table(("model", *steps), rows),
    ]


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
    compared = [
        (row["model"], f"{row['compared']['elimination_seconds'] / row['compared']['ldp_seconds']:,.0f}")
        for row in result["models"]
    ]
    grown = [
        (row["model"], row["units"], row["devices"], f"{row['search_seconds']:.2f}") for row in result.get("growth", ())
    ]
    return [
        *table(heads, rows),
        *table(("first units of", "FT-Elimination's time / FT-LDP's"), compared),
        *(table(("growth: model", "units", "devices", "search, s"), grown) if grown else []),
    ]


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
            percent(row["search_bytes_error"]),
        )
        for row in result["models"]
    ]
    targets = (f"target {percent(result['time_target'], 0)}", f"target {percent(result['memory_target'], 0)}")
    heads = ("model", "strategies", "error of time", targets[0], "error of memory", targets[1])
    return table((*heads, "FT's own sum of time", "FT's own sum of memory"), rows)


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
    lines = [f"Simulated, not run on real devices. Compute times from {'; '.join(sources)}.", ""]
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


def servers(result: Result) -> Lines:
    target = TARGETS["servers"].value
    rows, lines = [], []
    for row in result["rows"]:
        around = row["best"]["all_reduce"]
        for name, job in row["jobs"].items():
            over = row["jobs"][around]["median_ms"] / job["median_ms"]
            rows.append(
                (
                    row["model"],
                    name,
                    f"{job['median_ms']:.0f}",
                    f"{job['predicted_ms']:.0f}",
                    f"{over:.2f}",
                    at_least(row["gain"], target) if name == row["best"]["servers"] else "",
                    f"{job['idle_cores']:.1f}",
                )
            )
        moved = row.get("transfer")
        if moved is None:
            continue
        lines.append(
            f"- {row['model']}: the strategy that `optimize` found without a trial is {row['searched_gain']:.2f} times "
            f"as fast as {around}; moved to links of {listed(moved['gbit'])} Gbit/s it gains {moved['gain']:.2f}."
        )
    heads = ("model", "strategy", "ms", "predicted ms", "best all-reduce / this", f"target {target:.1f}", "idle cores")
    return [*table(heads, rows), "", *lines, ""]


def tune(result: Result) -> Lines:
    target = TARGETS["tune"].value
    rows = []
    for row in result["rows"]:
        if row["search"] == "random":
            said = "a baseline"
        else:
            said = "no winner" if row["speedup"] is None else at_least(row["speedup"], target)
        shown = "none" if row["speedup"] is None else f"{row['speedup']:.3f}"
        most = f"{row['baseline_ms'] / row['bound_ms']:.2f}"
        hits = percent(row["hit_rate"], 0)
        rows.append((row["model"], row["cluster"], row["search"], row["baseline"], shown, most, hits, said))
    heads = ("model", "cluster", "search", "best builder", "builder / winner", "builder / bound", "hit rate")
    said = "The bound holds for all schedules of all-reduces; strategies with servers on faster links may beat it."
    return [f"{result['trials']} trials for each search. {said}", "", *table((*heads, f"target {target:.1f}"), rows)]


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
