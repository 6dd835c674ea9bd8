"""Write docs/benchmarks.md, and the measured figures and the picture of README.md, from benchmarks/results/*.json.

    python benchmarks/report.py [--check]

The output depends only on these files, not on the clock. `SECTIONS` names a function of tables.py for each benchmark.
Files without a section get a generic table. `README_FIGURES` writes the lines between README's `measured` marks,
picture.py draws its picture. `--check` writes nothing and fails if the documents differ from the results.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from picture import Panel, auto_panel, draw, gpu_panel
from tables import (
    TARGETS,
    Lines,
    Result,
    accelerator,
    auto_strategy,
    dataset_summary,
    foundation,
    frontier_accuracy,
    frontier_findings,
    frontier_speed,
    generic,
    gpu_cases,
    gpu_failed,
    gpu_memory_limit,
    gpu_overhead,
    gpu_replay_accuracy,
    gpu_step_time,
    gpu_verdicts,
    intervals,
    listed,
    memory_accuracy,
    over_faster_ddp,
    pace_speed,
    pace_testbed,
    peers,
    percent,
    ranking,
    ratios,
    replay_accuracy,
    replay_speed,
    scaling,
    search_speed,
    servers,
    step_time,
    table,
    tune,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "step_times.svg"
MARKS = ("<!-- measured: written by benchmarks/report.py -->", "<!-- end of measured -->")


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
    "emulated hosts with shaped links. The bound is max(compute, network); the second bound is the processor time of "
    "both, kernel included, divided by this machine's cores. The best schedule is PACE's optimum on that link if "
    "cutting, sending and updating are free. Ratios of medians; spread is (slowest - fastest block) / median."
)
SECTIONS = (
    Section("step_time", "Step time", _STEP, step_time),
    Section(
        "step_time_16_cores",
        "Step time on 16 cores",
        "The same on a machine where the emulated hosts do not share two cores.",
        step_time,
        "python benchmarks/step_time.py --json --blocks 3",
        "16 cores",
        "2026-11-16",
    ),
    Section(
        "auto_strategy",
        "Automatic strategy",
        'strategy="auto", started cold, against DDP with its default buckets, growing ones and the best of six '
        "explicit sizes; the bound is max(compute, network).",
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
        "half an hour",
        "2026-11-16",
    ),
    Section("replay_accuracy_2_hosts", "Replay accuracy on two hosts", "The same, two hosts only.", replay_accuracy),
    Section(
        "intervals",
        "Intervals",
        "Share of the measurements in the results of other benchmarks that lie inside the 90% interval of their "
        "prediction, and the interval's width, (high - low) / predicted. Every model is held back in turn: its "
        "intervals come from the other models in the same setting, and from the prior, whose constants are taken from "
        "the same files. The scatter of recorded steps, which widens intervals further, is not part of these files.",
        intervals,
        "python benchmarks/intervals.py --json",
        "seconds, and the results of other benchmarks",
        "2026-11-19",
    ),
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
    Section(
        "tune",
        "Tuning",
        "Search with real trials on emulated hosts; the winner and the best hand-made builders are measured "
        "again in turn.",
        tune,
        "python benchmarks/tune.py --json",
        "an hour",
        "2026-11-16",
    ),
    Section(
        "servers",
        "Servers on unequal links",
        "Four workers with links of 0.5, 0.5, 1 and 1 Gbit/s and two servers that hold no replica with 1 Gbit/s, all "
        "emulated on one machine; paced models, medians of rank 0. A worker must send and receive its gradients "
        "once; a ring does so one and a half times, so servers can gain at most a factor of 1.5. Predictions use "
        "only the links' nominal bandwidths and the paced compute. `bert_fast` is `bert` with compute twice as fast.",
        servers,
        "python benchmarks/servers.py --json",
        "a quarter of an hour",
        "2026-11-19",
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
        "The trials on which the predictors were trained and tested.",
        dataset_summary,
        "python benchmarks/make_dataset.py --json --real 40",
        "an hour",
        "2026-11-15",
    ),
    Section(
        "gpu_step_time",
        "Step time on a GPU",
        "Several NCCL ranks on one GPU through MPS, as `offbeat emulate --gpu` starts them, each an emulated host with "
        "a shaped link. The batch is chosen so that compute takes 0.4 (network-bound), 1 (balanced) or 2 "
        '(compute-bound) times as long as all-reducing the gradients. "auto", started cold, alternates with DDP at its '
        "default and at the two best of five bucket sizes, FSDP2, and DDP's fp16 hook, which loses precision. Fused "
        "AdamW, bf16 autocast; medians of blocks of steps on the GPU's clock, of the slowest rank. The bound is "
        "max(compute, network). A case is noisy where blocks of auto and of the best DDP overlap.",
        gpu_step_time,
        "python benchmarks/gpu_step_time.py --output benchmarks/results/gpu_step_time.json [--clip]",
        "a GPU",
        "2026-11-18",
    ),
    Section(
        "gpu_replay_accuracy",
        "Replay on a GPU",
        "Error of predicted step times, |predicted / measured - 1|, of several NCCL ranks on one GPU through MPS, "
        "with shaped links of 5 and 10 Gbit/s. One profile of each model, recorded with `overlap` at 5 Gbit/s, "
        "predicts all other runs.",
        gpu_replay_accuracy,
        "python benchmarks/gpu_replay_accuracy.py --json --record FOLDER",
        "a GPU",
        "2026-11-18",
    ),
    Section(
        "gpu_memory_limit",
        "Memory limit on a GPU",
        "`distribute(memory_limit=…)` under a limit of 0.8 of DDP's peak, against FSDP2 settings tried by hand: each "
        "block, every two blocks or the model alone as units, freed after forward or kept, with blocks recomputed or "
        "not, gradients reduced in fp32 or bf16. What exceeds the limit does not count. NCCL ranks share one GPU "
        "through MPS, with links of 10 Gbit/s; fp32, AdamW, one sample of 1,024 tokens per rank. Peaks are "
        "`torch.cuda.max_memory_allocated` of the fullest rank; times are medians of two blocks of two steps. The "
        "start is from `distribute()` to the end of the first step.",
        gpu_memory_limit,
        "python benchmarks/gpu_memory_limit.py --cases 2r-10G-gpt2 2r-10G-gpt2_large --case-seconds 150",
        "a GPU",
        "2026-11-19",
    ),
    Section(
        "gpu_overhead",
        "Overhead on a GPU",
        "One GPU, so better communication gains nothing; bf16, AdamW.",
        gpu_overhead,
        "python benchmarks/gpu_overhead.py --json",
        "a GPU",
        "2026-11-15",
    ),
    Section(
        "accelerator",
        "Accelerator",
        "Training steps of the zoo's models on one accelerator, and the measured gain of three decisions.",
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
        "Written by `make bench-page` from `benchmarks/results/`, which `make bench` fills. Steps on emulated CPU "
        "hosts are given as ratios, because their absolute times say nothing about other machines.",
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
        '"Reached" and "missed" compare a figure with its target. Papers reached their figures on other hardware. The '
        "frontier's targets are in its own tables."
    )
    return [said, "", *table(("target of", "value", "source"), rows)]


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


def _auto_figure(result: Result) -> str:
    whole, ratios = result["summary"], [row["best_over_auto"] for row in result["rows"]]
    noisy = whole["cases"] - whole["decided"]
    return (
        f'With `strategy="auto"`, a step on two emulated hosts (real compute, {result["machine"]["cores"]} cores) is '
        f"{whole['median_default_over_auto']:.2f} times as fast as DDP's with default buckets and "
        f"{whole['median_best_over_auto']:.2f} times as fast as the best of eight settings of DDP's buckets (medians "
        f"of {whole['cases']} cases; the latter {min(ratios):.2f} to {max(ratios):.2f}, {noisy} within noise)"
    )


def _replay_figure(result: Result) -> str:
    own, cross = result["summary"]["same"], result["summary"]["cross"]
    return (
        f"Replay predicts a recorded job's step with a median error of {percent(own['median'])} (worst "
        f"{percent(own['worst'])}), and other strategies and links with {percent(cross['median'])} (worst "
        f"{percent(cross['worst'])}), on two and four emulated hosts where compute takes no processor time from the "
        "network; where it does, errors are larger"
    )


def _speed_figure(result: Result) -> str:
    folded = result["folded_10000"]
    return f"Replaying BERT-base on {folded['ranks']:,} ranks takes {folded['wall_seconds']:.2f} s"


def _gpu_figure(result: Result) -> str:
    plain = [row["offbeat_over_ddp"] for row in result["rows"]]
    faster = [over_faster_ddp(row) for row in result["rows"]]
    return (
        f"On one {result['device']}, with nothing to gain, steps take {min(plain):.2f} to {max(plain):.2f} of "
        f"DDP's time, and {min(faster):.2f} to {max(faster):.2f} of DDP's with `gradient_as_bucket_view=True`"
    )


def _gpu_step_figure(result: Result) -> str:
    cases = gpu_cases(result)
    clipped, failed = sum(row["clip"] for row in cases), len(gpu_failed(result))
    return (
        f"With {listed(sorted({row['ranks'] for row in cases}))} NCCL ranks on one {cases[0]['device']} and emulated "
        f'links of {listed(sorted({row["gbit"] for row in cases}))} Gbit/s, `strategy="auto"` is '
        f"{ratios(cases, 'default_over_auto')} times as fast as DDP with default buckets and "
        f"{ratios(cases, 'best_over_auto')} times as fast as the best of six settings of DDP's buckets: medians and "
        f"ranges of {len(cases)} cases, {clipped} of them clipped. Against the best DDP it is {gpu_verdicts(cases)}"
        f"{f'; {failed} more failed' if failed else ''}"
    )


def _gpu_replay_figure(result: Result) -> str:
    whole = result["summary"]
    own, cross, naive = whole["same"], whole["cross"], whole["daydream"]
    return (
        f"For NCCL ranks on one GPU, replay's median error is {percent(own['median'])} for a recorded job's step "
        f"(worst {percent(own['worst'])}) and {percent(cross['median'])} for other strategies and links (worst "
        f"{percent(cross['worst'])}; Daydream's method: {percent(naive['median'])} and {percent(naive['worst'])}), "
        f"over {whole['runs']} runs; recording makes steps {percent(whole['recorder_overhead']['median'])} longer"
    )


def _limit_figure(result: Result) -> str:
    rows = [row for row in result["rows"] if "error" not in row]
    # With gradients in fp32, as those of the default wrapping.
    ran = [of for row in rows if (of := row["chosen"]["offbeat"])["over_best"] and of["default_over"]]
    tried = [sum("skipped" not in each for each in row["tried"].values()) for row in rows]
    default, best = ([of[key] for of in ran] for key in ("default_over", "over_best"))
    time, memory = (percent(max(abs(of[key]) for of in ran)) for key in ("time_error", "memory_error"))
    models, ranks = listed([row["model"] for row in rows]), listed(sorted({row["ranks"] for row in rows}))
    return (
        f"Under a memory limit that plain replication breaks, `memory_limit=` trains {models} on {ranks} NCCL ranks "
        f"{min(default):.2f} to {max(default):.2f} times as fast as FSDP2's default wrapping, in {min(best):.2f} to "
        f"{max(best):.2f} of the time of the best of {min(tried)} or more settings tried by hand; step and peak memory "
        f"are predicted within {time} and {memory} (gradients in fp32)"
    )


def _peers_figure(result: Result) -> str:
    exact = [[name for name, one in row["variants"].items() if one.get("exact")] for row in result["rows"]]
    over = [row["variants"]["offbeat_auto"]["over_best_exact_peer"] for row in result["rows"]]
    ahead = sum(each <= 1 for each in over)
    return (
        f"Compared with {min(map(len, exact)) - 1} or more other exact ways to synchronise the same job (DDP's "
        f"buckets, Horovod's and BytePS's plans, ZeRO, FSDP2), on two CPU hosts with 2 cores in all, "
        f'`strategy="auto"` takes {min(over):.2f} to {max(over):.2f} times as long as the fastest, and is itself the '
        f"fastest in {ahead} of {len(over)} cases"
    )


README_FIGURES = (
    Figure("auto_strategy", _auto_figure),
    Figure("peers", _peers_figure),
    Figure("replay_accuracy", _replay_figure),
    Figure("replay_speed", _speed_figure),
    Figure("gpu_step_time", _gpu_step_figure),
    Figure("gpu_replay_accuracy", _gpu_replay_figure),
    Figure("gpu_memory_limit", _limit_figure),
    Figure("gpu_overhead", _gpu_figure),
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


def picture(results: dict[str, Result]) -> str:
    """The text of docs/images/step_times.svg."""
    panels: dict[str, Callable[[Result, str], Panel]] = {"auto_strategy": auto_panel, "gpu_step_time": gpu_panel}
    commands = {section.name: section.command for section in SECTIONS}
    return draw([make(results[name], commands[name]) for name, make in panels.items() if name in results])


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
    wanted = {PAGE: page(results), README: readme(README.read_text(), results), PICTURE: picture(results)}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if options.check:
        sys.exit(f"not current, run make bench-page: {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
