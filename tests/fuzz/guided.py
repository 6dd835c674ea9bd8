"""Coverage-guided inputs: python -m tests.fuzz.guided --target strategy -runs=10000 -max_len=20000

Needs atheris, which is no dependency of the project: pip install atheris. Options with one dash are libFuzzer's. The
corpus starts with the seeds; the first input that raises anything but an OffbeatError of one line ends the run and is
written to the present folder.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER_FILES = {"recorder": "rank0.jsonl", "trials": "domain/trials.jsonl"}
"""Targets that read a folder, with the file in it that is hostile; the others read one file."""


def readers() -> dict[str, Callable[[Path], Any]]:
    """What reads each target's file or folder."""
    from offbeat.cluster import ClusterSpec
    from offbeat.profile.kineto import read_dump
    from offbeat.profile.source import load_recording
    from offbeat.search.auto.store import TrialStore
    from offbeat.strategy import Strategy
    from offbeat.timeline.chrome import read as read_timeline

    def read_store(path: Path) -> None:
        with TrialStore(path) as store:
            store.trials()

    def import_trials(folder: Path) -> None:
        with TrialStore(":memory:") as store:
            store.import_folder(folder)

    return {
        "strategy": Strategy.load,
        "cluster": ClusterSpec.load,
        "kineto": load_recording,
        "flight": read_dump,
        "timeline": read_timeline,
        "store": read_store,
        "recorder": load_recording,
        "trials": import_trials,
    }


def corpus(target: str) -> list[bytes]:
    """Valid files of a target."""
    from tests.fuzz import seeds

    def lines(documents: list[Any]) -> bytes:
        return b"".join(json.dumps(document).encode() + b"\n" for document in documents)

    traces = {name: json.dumps(document).encode() for name, document in seeds.profiler_traces().items()}
    return {
        "strategy": list(seeds.strategies()),
        "cluster": list(seeds.clusters()),
        "kineto": [content for name, content in traces.items() if "dump" not in name],
        "flight": [content for name, content in traces.items() if "dump" in name],
        "timeline": list(seeds.timelines()),
        "store": [seeds.store()],
        "recorder": [lines(seeds.recording()["rank0.jsonl"])],
        "trials": [lines(seeds.exported()["trials.jsonl"])],
    }[target]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target",
        required=True,
        choices=["strategy", "cluster", "kineto", "flight", "timeline", "store", *FOLDER_FILES],
    )
    options, rest = parser.parse_known_args()
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed; it is optional: pip install atheris")
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=["offbeat"]):
        read = readers()[options.target]
    place = Path(tempfile.mkdtemp(prefix="guided"))
    found, folder = place / "corpus", place / "input"
    found.mkdir()
    for number, content in enumerate(corpus(options.target)):
        (found / str(number)).write_bytes(content)
    path = folder / FOLDER_FILES.get(options.target, "rank0.json")
    path.parent.mkdir(parents=True)
    if options.target == "trials":
        from tests.fuzz import seeds

        for name in ("graph.json", "cluster.json"):
            path.with_name(name).write_text(json.dumps(seeds.exported()[name][0]))
    from offbeat.errors import OffbeatError

    def test_one(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read(folder if options.target in FOLDER_FILES else path)
        except OffbeatError as error:
            refusal = str(error)
            if "\n" in refusal:
                raise ValueError(f"the refusal is no sentence: {refusal!r}") from error

    atheris.Setup([sys.argv[0], *rest, str(found)], test_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
