"""The readers under test: each target makes the n-th hostile input and reads it as a user's program would.

`TARGETS[name](chance, folder)` writes the input into an empty folder and reads it. A refusal must be an OffbeatError
with a text of one line; anything else that is raised is a bug.
"""

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.plan import lower
from offbeat.profile.kineto import read_dump
from offbeat.profile.measure import Profile
from offbeat.profile.source import load_recording
from offbeat.search.auto.store import TrialStore
from offbeat.strategy import Strategy
from offbeat.timeline import Timeline
from tests.fuzz import mutate, seeds

Target = Callable[[Random, Path], None]
LONGEST_REFUSAL = 2000
"""Characters of an error sentence beside the paths it names."""


def attempt(target: Target, chance: Random, folder: Path) -> str:
    """Reads one input; the text of the refusal, or '' if it was accepted."""
    try:
        target(chance, folder)
    except OffbeatError as error:
        text = str(error)
        shown = text.replace(str(folder), "")
        if not text or "\n" in text or "\r" in text or len(shown) > LONGEST_REFUSAL:
            raise AssertionError(f"the refusal is no sentence: {text[:300]!r}") from error
        return text
    return ""


def strategy(chance: Random, folder: Path) -> None:
    """A strategy file; what is accepted survives a round trip and can be lowered or is refused there."""
    content = _content(chance, seeds.strategies())
    path = folder / "strategy.json"
    path.write_bytes(content)
    read = Strategy.load(path)
    assert Strategy.from_json(read.to_json()).digest == read.digest
    lower(seeds.graph(), seeds.cluster(), read.model_copy(update={"graph": "", "cluster": ""}))


def cluster(chance: Random, folder: Path) -> None:
    """A cluster file in YAML or JSON."""
    content = _content(chance, seeds.clusters(), as_yaml=True)
    path = folder / "cluster.yaml"
    path.write_bytes(content)
    read = ClusterSpec.load(path)
    last = read.world_size - 1
    assert read.bandwidth(0, last) > 0
    assert read.latency(0, last) >= 0
    if len(read.nodes) < 100:
        assert ClusterSpec.from_yaml(read.to_yaml()) == read
    read.ring_bandwidth(range(min(8, read.world_size)))


def recorder(chance: Random, folder: Path) -> None:
    """A folder that Offbeat's recorder wrote, one file of it hostile."""
    whole = seeds.recording()
    ranks = [name for name in whole if name.startswith("rank")]
    victim = chance.choice([*ranks * 4, *whole])
    for name, documents in whole.items():
        if not name.startswith("rank") and name != victim and chance.random() < 0.5:
            continue
        (folder / name).write_bytes(
            _lines(documents, chance, whole["rank0.jsonl"]) if name == victim else _plain_lines(documents)
        )
    _use(load_recording(folder))


def kineto(chance: Random, folder: Path) -> None:
    """A folder with torch.profiler's traces of two ranks, one of them hostile, compressed or not."""
    whole = seeds.profiler_traces()
    kind = chance.choice(["cuda", "gloo"])
    victim = chance.randrange(2)
    for rank in range(2) if chance.random() < 0.15 else (victim,):
        document = whole[f"{kind}/rank{rank}.json"]
        content = _document(document, chance, list(whole.values())) if rank == victim else _text(document)
        packed = chance.random() < 0.3
        if packed:
            content = gzip.compress(content, 1)
            content = mutate.damage(content, chance) if rank == victim and chance.random() < 0.3 else content
        (folder / f"rank{rank}.json{'.gz' if packed else ''}").write_bytes(content)
    found = list(folder.iterdir())
    _use(load_recording(found[0] if len(found) == 1 else folder))


def flight(chance: Random, folder: Path) -> None:
    """A Flight Recorder dump alone, and beside the traces it belongs to."""
    whole = seeds.profiler_traces()
    victim = chance.randrange(2)
    for rank in range(2) if chance.random() < 0.1 else (victim,):
        (folder / f"rank{rank}.json").write_bytes(_text(whole[f"gloo/rank{rank}.json"]))
    content = _document(whole[f"gloo/dump_rank{victim}.json"], chance, list(whole.values()))
    path = folder / f"dump_rank{victim}.json"
    path.write_bytes(content)
    _use(load_recording(folder))
    read_dump(path)


def timeline(chance: Random, folder: Path) -> None:
    """A timeline that Offbeat saved."""
    plain, packed = seeds.timelines()
    if chance.random() < 0.2:
        content = mutate.damage(packed, chance)
    else:
        content = _content(chance, (plain,))
        content = gzip.compress(content, 1) if chance.random() < 0.2 else content
    path = folder / "timeline.json"
    path.write_bytes(content)
    _use(load_recording(path))
    Timeline.load(path).save(folder / "again.json")


def store(chance: Random, folder: Path) -> None:
    """A trial store's SQLite file: damaged bytes, cells of other types, tables that are not what they seem."""
    base = seeds.store()
    kind = chance.random()
    content = _changed_cells(base, chance) if kind < 0.6 else mutate.damage(base, chance) if kind < 0.95 else None
    inner = folder / "inner"
    inner.mkdir()
    path = inner / "trials.sqlite"
    path.write_bytes(mutate.noise(chance) if content is None else content)
    try:
        with TrialStore(path) as read:
            read.trials()
            for domain in read.domains():
                read.load_domain(domain)
            read.export(inner / "out")
            read.add(seeds.graph(), seeds.cluster(), seeds.trials()[0])
    finally:
        outside = [str(place) for place in folder.iterdir() if place != inner]
        assert not outside, f"files were written outside the folder: {outside}"


def trials(chance: Random, folder: Path) -> None:
    """The JSON lines that a store imports."""
    whole = seeds.exported()
    victim = chance.choice([*["trials.jsonl"] * 4, *whole])
    (folder / "out" / "domain").mkdir(parents=True)
    for name, documents in whole.items():
        content = _lines(documents, chance, whole["trials.jsonl"]) if name == victim else _plain_lines(documents)
        (folder / "out" / "domain" / name).write_bytes(content)
    with TrialStore(":memory:") as read:
        read.import_folder(folder / "out")
        assert len(read.trials()) <= 200
        read.export(folder / "again")


TARGETS: dict[str, Target] = {
    "strategy": strategy,
    "cluster": cluster,
    "recorder": recorder,
    "kineto": kineto,
    "flight": flight,
    "timeline": timeline,
    "store": store,
    "trials": trials,
}


def _use(read: Profile | Timeline) -> None:
    """What every command does first with a recording; a trace without steps may refuse."""
    found = read.timeline if isinstance(read, Profile) else read
    assert len(found) == len(found.end)
    if found.marks.size:
        assert isinstance(found.iteration_time, float)


def _content(chance: Random, corpus: tuple[bytes, ...], *, as_yaml: bool = False) -> bytes:
    """A hostile version of one of the valid files."""
    kind = chance.random()
    if kind < 0.03:
        return mutate.noise(chance)
    base = chance.choice(corpus)
    if kind < 0.4:
        return mutate.damage(base, chance, corpus)
    document = mutate.distort(_parsed(base), chance, [_parsed(other) for other in corpus])
    if as_yaml and chance.random() < 0.3:
        try:
            return yaml.safe_dump(document).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, RecursionError, ValueError):
            pass
    return mutate.render(document, chance)


_PARSED: dict[bytes, Any] = {}


def _parsed(content: bytes) -> Any:
    if content not in _PARSED:
        _PARSED[content] = yaml.safe_load(content) if content[:1] not in b"{[" else json.loads(content)
    return _PARSED[content]


def _document(document: Any, chance: Random, others: list[Any]) -> bytes:
    kind = chance.random()
    if kind < 0.03:
        return mutate.noise(chance)
    if kind < 0.35:
        return mutate.damage(_text(document), chance, [_text(chance.choice(others))])
    return mutate.render(mutate.distort(document, chance, others), chance)


_TEXTS: dict[int, bytes] = {}


def _text(document: Any) -> bytes:
    """A seed as JSON; seeds live as long as the process, so that their identity names them."""
    if id(document) not in _TEXTS:
        _TEXTS[id(document)] = json.dumps(document).encode()
    return _TEXTS[id(document)]


def _plain_lines(documents: list[Any]) -> bytes:
    return b"".join(_text(document) + b"\n" for document in documents)


def _lines(documents: list[Any], chance: Random, others: list[Any]) -> bytes:
    """JSON lines of which some are hostile; or the whole text damaged."""
    kind = chance.random()
    if kind < 0.03:
        return mutate.noise(chance)
    if kind < 0.35:
        return mutate.damage(_plain_lines(documents), chance, [_plain_lines(others)])
    lines = [_text(document) for document in documents]
    for _ in range(chance.choice([1, 1, 2])):
        place = chance.randrange(len(lines))
        if chance.random() < 0.15:
            lines[place] = mutate.render(mutate.hostile_value(chance), chance)
        else:
            lines[place] = mutate.render(mutate.distort(documents[place], chance, others), chance)
    return b"\n".join(lines) + b"\n"


_COLUMNS = {
    "domains": ("id", "graph_digest", "cluster_digest", "model", "cluster_name", "graph", "cluster"),
    "trials": (
        *("id", "domain", "search", "strategy_digest", "strategy", "status", "source", "seconds", "predicted_seconds"),
        *("steps", "error", "created"),
    ),
}
_SCHEMES = (
    "DROP TABLE trials",
    "DROP TABLE domains",
    "DROP TABLE trials; CREATE TABLE trials (id, domain)",
    "DROP TABLE trials; CREATE VIEW trials AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
    "SELECT x AS id, 1 AS domain, '' AS search, '{}' AS strategy, 'done' AS status, 'measured' AS source, "
    "1.0 AS seconds, 1.0 AS predicted_seconds, '[]' AS steps, '' AS error, 0.0 AS created FROM c",
    "CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END",
    "CREATE TRIGGER t BEFORE INSERT ON domains BEGIN SELECT zeroblob(500000000); END",
    "ALTER TABLE domains ADD COLUMN extra",
    "PRAGMA user_version = 7",
    "PRAGMA user_version = 0",
)


def _changed_cells(base: bytes, chance: Random) -> bytes:
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(base)
        for _ in range(chance.choice([1, 1, 2, 3])):
            if chance.random() < 0.05:
                # What comes after would fail, or read a table that never ends.
                connection.executescript(chance.choice(_SCHEMES))
                break
            table = chance.choice([*_COLUMNS])
            column = chance.choice(_COLUMNS[table])
            rows = [row[0] for row in connection.execute(f"SELECT rowid FROM {table}")]
            if rows:
                changed = (_cell(chance, column), chance.choice(rows))
                connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE rowid = ?", changed)
        connection.commit()
        return connection.serialize()
    except sqlite3.Error:
        return base
    finally:
        connection.close()


def _cell(chance: Random, column: str) -> Any:
    """A value of any type that SQLite holds, or a hostile document where the column has one."""
    documents = {"strategy": list(seeds.strategies()), "cluster": [seeds.cluster().to_json()], "steps": [b"[0.1, 0.2]"]}
    if column in documents and chance.random() < 0.6:
        text = _content(chance, tuple(documents[column]))
        return text.decode("utf-8", "replace") if chance.random() < 0.8 else text
    if column in ("graph_digest", "cluster_digest", "model", "cluster_name") and chance.random() < 0.5:
        return chance.choice(["../../x", "/../../", "..", "/tmp/", "\0", "a/b", "x" * 3000, ".", "\n", "\u202e"])
    value = mutate.hostile_value(chance)
    if isinstance(value, (list, dict)):
        return mutate.render(value, chance)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float("inf")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value
