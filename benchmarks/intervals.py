"""How often measurements lie inside the intervals of their predictions, over the committed results.

    python benchmarks/intervals.py --json

Every pair of a predicted and a measured step in `results/` is held back once: its interval is made from the pairs of
the other models in the same setting, as the history of that machine would have them, and from the prior. Jobs are told
apart by their model, so that no run of the held-back model helps. The prior's constants (SPREAD in
`offbeat.cost.interval`) come from the same files; a second figure gives the share that they alone would contain. Widths
are (high - low) / predicted. The scatter of recorded steps is not part of these files, so it is taken as 0.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from offbeat.cost.interval import Trust
from offbeat.cost.outcomes import Kind, Outcome

RESULTS = Path(__file__).parent / "results"
DECIDED = re.compile(r"before, ([\d.]+) ms .*? with it(?: \(|; predicted: )([\d.]+) ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = evaluate(RESULTS)
    print(json.dumps(result["summary"], indent=1), file=sys.stderr)
    if options.json:
        print(json.dumps(result, indent=1))


def evaluate(folder: Path) -> dict:
    """Coverage and width of every setting and kind of prediction."""
    settings = dict(pairs(folder))
    held = {name: list(hold_back(outcomes)) for name, outcomes in settings.items()}
    rows = [
        {"setting": name, "kind": kind} | summary([one for each, one in found if each == kind])
        for name, found in held.items()
        for kind in dict.fromkeys(kind for kind, _ in found)
    ]
    replay = [one for name, found in held.items() if name in REPLAYED for _, one in found]
    idle = [one for name, found in held.items() if name in REPLAYED and name != SHARED for _, one in found]
    return {
        "benchmark": "intervals",
        "summary": {
            "all": summary([one for found in held.values() for _, one in found]),
            "replay": summary(replay),
            "replay_without_shared_processors": summary(idle),
        },
        "rows": rows,
    }


def hold_back(outcomes: list[Outcome]) -> Iterator[tuple[Kind, dict]]:
    """(kind, whether the interval contains it, its width, and the same without history) of each outcome in turn."""
    for each in outcomes:
        others = tuple(other for other in outcomes if other.job != each.job)
        made = Trust(each.device, each.job, past=others).interval(each.predicted, each.kind)
        alone = Trust(each.device, each.job).interval(each.predicted, each.kind)
        yield (
            each.kind,
            {
                "inside": made.low <= each.measured <= made.high,
                "width": (made.high - made.low) / each.predicted,
                "inside_prior": alone.low <= each.measured <= alone.high,
                "width_prior": (alone.high - alone.low) / each.predicted,
            },
        )


def summary(found: list[dict]) -> dict:
    return {"measurements": len(found)} | {
        name: round(fmean(each[key] for each in found), 4)
        for name, key in (
            ("coverage", "inside"),
            ("mean_width", "width"),
            ("prior_coverage", "inside_prior"),
            ("prior_mean_width", "width_prior"),
        )
    }


def pairs(folder: Path) -> Iterator[tuple[str, list[Outcome]]]:
    """(setting, outcomes there)."""

    def load(name: str) -> dict:
        return json.loads((folder / f"{name}.json").read_text())

    accuracy = load("replay_accuracy")
    yield "paced compute, 2 and 4 hosts", list(replayed(accuracy["rows"], "paced"))
    yield SHARED, list(replayed(accuracy["rows_real_compute"], "cpu"))
    yield "NCCL ranks on one H200", list(replayed(load("gpu_replay_accuracy")["rows"], "H200"))
    for name, device in (("auto_strategy", "cpu"), ("gpu_step_time", "H200")):
        yield f"tuner, {name}.json", list(decided(load(name)["rows"], device))
    yield "offbeat tune, combined guide, paced", list(tuned(load("tune")["rows"]))
    yield "sharded strategies, frontier_accuracy.json", list(sharded(load("frontier_accuracy")["models"]))


SHARED = "real compute, 2 hosts on 2 cores"
REPLAYED = ("paced compute, 2 and 4 hosts", SHARED, "NCCL ranks on one H200")


def replayed(rows: list[dict], device: str) -> Iterator[Outcome]:
    """Of each run its own replay, and what the profile of one run on the slow link predicts for it."""
    for row in rows:
        for name, kind in (("same", "same"), ("cross", "strategy" if row["speed"] == "slow" else "link")):
            if name in row:
                predicted = row["measured_ms"] * (1 + row[name]) / 1e3
                yield Outcome(kind, device, row["model"], predicted, row["measured_ms"] / 1e3)


def decided(rows: list[dict], device: str) -> Iterator[Outcome]:
    """What the tuner said of the plans that it tried."""
    for row in rows:
        for said in row.get("history", ()):
            if found := DECIDED.search(said):
                yield Outcome("trial", device, row["model"], float(found[2]) / 1e3, float(found[1]) / 1e3)


def tuned(rows: list[dict]) -> Iterator[Outcome]:
    for row in (row for row in rows if row["search"] == "combined"):
        for trial in row["curve"]:
            if trial["status"] == "done" and trial["predicted_ms"]:
                yield Outcome("trial", "paced", row["model"], trial["predicted_ms"] / 1e3, trial["measured_ms"] / 1e3)


def sharded(models: list[dict]) -> Iterator[Outcome]:
    for model in models:
        for row in model["rows"]:
            yield Outcome("strategy", "cpu", model["model"], row["estimate_seconds"], row["measured_seconds"])


if __name__ == "__main__":
    main()
