"""Store trials {(G, R, S), seconds} in an SQLite file; export them as JSON lines, one folder per domain.

A domain is a model on a cluster, as in the AutoSync supplement's §9. A trial is written in one transaction once it has
ended, so that a process killed at any moment leaves whole trials only; write-ahead logging lets several searches write
to one file and others read it meanwhile.
"""

import json
import math
import sqlite3
import time
import zlib
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from pydantic import FiniteFloat, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from offbeat import files
from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.graph import ModelGraph
from offbeat.strategy import Strategy
from offbeat.units import quote

Status = Literal["done", "stopped", "crashed", "hung", "out_of_memory", "refused"]
Source = Literal["measured", "replayed"]

BUSY_SECONDS = 60.0
"""How long a writer waits for others before it gives up."""
VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS domains (
    id INTEGER PRIMARY KEY,
    graph_digest TEXT NOT NULL,
    cluster_digest TEXT NOT NULL,
    model TEXT NOT NULL,
    cluster_name TEXT NOT NULL,
    graph BLOB NOT NULL,
    cluster TEXT NOT NULL,
    UNIQUE (graph_digest, cluster_digest)
);
CREATE TABLE IF NOT EXISTS trials (
    id INTEGER PRIMARY KEY,
    domain INTEGER NOT NULL REFERENCES domains (id),
    search TEXT NOT NULL,
    strategy_digest TEXT NOT NULL,
    strategy TEXT NOT NULL,
    status TEXT NOT NULL,
    source TEXT NOT NULL,
    seconds REAL,
    predicted_seconds REAL,
    steps TEXT NOT NULL,
    error TEXT NOT NULL,
    created REAL NOT NULL,
    UNIQUE (domain, search, source, strategy_digest)
);
CREATE TABLE IF NOT EXISTS simulators (
    domain INTEGER NOT NULL REFERENCES domains (id),
    kind TEXT NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (domain, kind)
);
"""


@checked_dataclass(frozen=True)
class Trial:
    """A tried strategy and its result."""

    strategy: Strategy
    status: Status
    seconds: FiniteFloat | None = None
    """Median step time, of the steps so far if it was stopped; None if it did not get that far."""
    source: Source = "measured"
    """'measured': from a run; 'replayed': from a simulation."""
    search: str = ""
    """The search it belongs to."""
    predicted_seconds: FiniteFloat | None = None
    """The predicted seconds."""
    steps: tuple[FiniteFloat, ...] = ()
    """Seconds of the timed steps."""
    error: str = ""
    """One sentence about what went wrong."""
    created: FiniteFloat = 0.0
    """Seconds since 1970; 0 until it is stored."""

    @model_validator(mode="after")
    def _is_timed(self) -> "Trial":
        if self.status == "done" and not (self.seconds is not None and self.seconds > 0):
            raise OffbeatError(f"a completed trial must have positive seconds, not {self.seconds!r}")
        return self

    @property
    def usable(self) -> bool:
        """Whether it tells how fast the strategy is."""
        return self.status in ("done", "stopped") and self.seconds is not None

    @property
    def took(self) -> float:
        """Its seconds; infinite if there are none."""
        return math.inf if self.seconds is None else self.seconds


_COLUMNS = tuple(field.name for field in fields(Trial))


@dataclass(frozen=True)
class Domain:
    """A model on a cluster, with the number of trials stored for it."""

    graph_digest: str
    cluster_digest: str
    model: str
    cluster: str
    trials: int

    @property
    def digests(self) -> tuple[str, str]:
        """Digests of the graph and the cluster, which identify a domain."""
        return self.graph_digest, self.cluster_digest

    @property
    def name(self) -> str:
        """A folder's name."""
        parts = (f"{self.model}-{self.cluster}"[:60], self.graph_digest[:8], self.cluster_digest[:8])
        # Whatever a store holds, the name is one step below the folder it is put into.
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in "-".join(parts)).lstrip(".") or "domain"


class TrialStore(AbstractContextManager["TrialStore"]):
    """The trials of any number of searches in one file. Use it in a `with` block, or close it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = fspath(path)
        with self._explained("open"):
            self._connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def add(self, graph: ModelGraph, cluster: ClusterSpec, *trials: Trial) -> int:
        """Stores all of them durably or, if the process dies, none.

        How many were new: a search keeps one trial of each strategy."""
        with self._transaction():
            domain = self._domain_id(graph, cluster)
            before = self._connection.total_changes
            self._connection.executemany(
                f"INSERT OR IGNORE INTO trials (domain, strategy_digest, {', '.join(_COLUMNS)}) "
                f"VALUES ({domain}, :digest, :{', :'.join(_COLUMNS)})",
                [
                    vars(trial)
                    | {"strategy": trial.strategy.to_json(), "digest": trial.strategy.digest}
                    | {"steps": json.dumps(trial.steps), "created": trial.created or time.time()}
                    for trial in trials
                ],
            )
            return self._connection.total_changes - before

    def update(self, graph: ModelGraph, cluster: ClusterSpec, trial: Trial) -> None:
        """Updates a trial that this search has stored before."""
        known = trial.status, trial.seconds, json.dumps(trial.steps)
        with self._transaction():
            self._connection.execute(
                "UPDATE trials SET status = ?, seconds = ?, steps = ? "
                "WHERE domain = ? AND search = ? AND source = ? AND strategy_digest = ?",
                (*known, self._domain_id(graph, cluster), trial.search, trial.source, trial.strategy.digest),
            )

    def trials(
        self,
        graph_digest: str | None = None,
        cluster_digest: str | None = None,
        *,
        search: str | None = None,
        source: Source | None = None,
    ) -> list[Trial]:
        """The trials of one domain, of one model, of one cluster or all, in the order in which they were made."""
        wanted = {"graph_digest": graph_digest, "cluster_digest": cluster_digest, "search": search, "source": source}
        given = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in given) or "1"
        rows = self._read(
            f"SELECT {', '.join(_COLUMNS)} FROM trials JOIN domains ON domains.id = trials.domain "
            f"WHERE {where} ORDER BY trials.id",
            *given.values(),
        )
        found = []
        for row in rows:
            raw = dict(zip(_COLUMNS, row, strict=True))
            for name in ("steps", "strategy"):
                raw[name] = files.parse_json(_text(raw[name], self.path), self.path, name)
            found.append(_checked(raw, self.path))
        return found

    def domains(self) -> list[Domain]:
        """Every model on every cluster that has trials."""
        rows = self._read(
            "SELECT graph_digest, cluster_digest, model, cluster_name, COUNT(trials.id) FROM domains "
            "LEFT JOIN trials ON trials.domain = domains.id GROUP BY domains.id ORDER BY domains.id"
        )
        for row in rows:
            if not all(isinstance(text, str) for text in row[:4]):
                problem = f"the domain {quote(row[:4])} has a name that is no text"
                raise OffbeatError(f"{self.path}: not a trial store: {problem}")
        return [Domain(*row) for row in rows]

    def load_domain(self, domain: Domain) -> tuple[ModelGraph, ClusterSpec]:
        query = "SELECT graph, cluster FROM domains WHERE graph_digest = ? AND cluster_digest = ?"
        rows = self._read(query, *domain.digests)
        if not rows:
            raise OffbeatError(f"{self.path}: no domain {domain.name!r}")
        graph = ModelGraph.from_json(_unpacked(rows[0][0], self.path), origin=self.path)
        return graph, ClusterSpec.from_json(_text(rows[0][1], self.path), origin=self.path)

    def save_state(self, graph: ModelGraph, cluster: ClusterSpec, kind: str, state: bytes) -> None:
        """Stores the state of a learned simulator of this kind for a domain, replacing an earlier one."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO simulators (domain, kind, state) VALUES (?, ?, ?)",
                (self._domain_id(graph, cluster), kind, state),
            )

    def load_state(self, graph_digest: str, cluster_digest: str, kind: str) -> bytes | None:
        """The state stored by `save_state`, or None."""
        query = (
            "SELECT state FROM simulators JOIN domains ON domains.id = simulators.domain "
            "WHERE graph_digest = ? AND cluster_digest = ? AND kind = ?"
        )
        rows = self._read(query, graph_digest, cluster_digest, kind)
        return bytes(rows[0][0]) if rows else None

    def export(self, folder: str | PathLike[str]) -> int:
        """Writes graph.json, cluster.json and trials.jsonl into one folder per domain; returns the number of trials."""
        count = 0
        for domain in self.domains():
            target = Path(folder) / domain.name
            try:
                target.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OffbeatError(f"{target}: cannot create the folder: {error.strerror}") from None
            graph, cluster = self.load_domain(domain)
            trials = [vars(t) | {"strategy": json.loads(t.strategy.to_json())} for t in self.trials(*domain.digests)]
            lines = [json.dumps(trial, separators=(",", ":"), allow_nan=False) + "\n" for trial in trials]
            files.write_atomic(target / "graph.json", graph.to_json(), "model graph")
            files.write_atomic(target / "cluster.json", cluster.model_dump_json().encode(), "cluster")
            files.write_atomic(target / "trials.jsonl", "".join(lines).encode(), "trials")
            count += len(lines)
        return count

    def import_folder(self, folder: str | PathLike[str]) -> int:
        """Reads an exported folder; known trials are skipped. Returns the number of new ones."""
        found = sorted(Path(folder).glob("*/trials.jsonl"))
        if not found:
            raise OffbeatError(f"{folder}: contains no domain, which is a folder with graph.json and trials.jsonl")
        # Everything is read before anything is stored, so that a bad file leaves the store as it was.
        domains = []
        for path in found:
            graph = ModelGraph.load(path.with_name("graph.json"))
            cluster = ClusterSpec.load(path.with_name("cluster.json"))
            lines = files.read_bytes(path, "trials").decode(errors="replace").splitlines()
            named = [(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line]
            trials = [_checked(files.parse_json(line, origin, "trial"), origin) for line, origin in named]
            domains.append((graph, cluster, trials))
        return sum(self.add(graph, cluster, *trials) for graph, cluster, trials in domains)

    def _prepare(self) -> None:
        """Rejects a file with anything but a store's tables: a hostile view or trigger could run for ever."""
        self._connection.execute("PRAGMA trusted_schema = OFF")
        known = {_plain(statement) for statement in _SCHEMA.split(";")}
        for kind, name, statement in self._connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
            if statement is not None and _plain(str(statement)) not in known:
                raise OffbeatError(f"{self.path}: not a trial store: it contains the unknown {kind} {quote(name)}")
        self._connection.execute("PRAGMA journal_mode = WAL")
        # Waits for the disk at every commit, so that a trial survives a power cut as well.
        self._connection.execute("PRAGMA synchronous = FULL")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise OffbeatError(f"{self.path}: format {version} is not one this Offbeat reads ({VERSION})")
        if version < VERSION:
            # Earlier formats lack tables, no more.
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {VERSION}")

    def _domain_id(self, graph: ModelGraph, cluster: ClusterSpec) -> int:
        keys = (graph.digest, cluster.digest)
        query = "SELECT id FROM domains WHERE graph_digest = ? AND cluster_digest = ?"
        if not self._read(query, *keys):
            self._connection.execute(
                "INSERT INTO domains (graph_digest, cluster_digest, model, cluster_name, graph, cluster) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*keys, graph.name, cluster.name, zlib.compress(graph.to_json()), cluster.model_dump_json()),
            )
        return int(self._read(query, *keys)[0][0])

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._explained("read"):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        with self._explained("write to"):
            # Takes the write lock at once: a reader that becomes a writer later can be refused without waiting.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self, what: str) -> Generator[None, None, None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            # A damaged file is quoted in the error, and may not even be text there.
            raise OffbeatError(f"{self.path}: cannot {what} the trial store: {files.one_line(error)}") from None


def _checked(raw: Any, origin: str) -> Trial:
    """A trial of values that may be anything; the error names `origin`."""
    with files.problems_named(f"{origin}: not a trial"):
        return TypeAdapter(Trial).validate_python(raw)


def _text(value: Any, origin: str) -> str:
    if not isinstance(value, str):
        raise OffbeatError(f"{origin}: not a trial: {quote(value)} is not a text")
    return value


def _unpacked(packed: Any, origin: str) -> bytes:
    """A compressed graph, if it is not larger than a file of one may be."""
    named = f"{origin}: not a trial store: a model graph in it"
    try:
        content = zlib.decompressobj().decompress(packed, files.MAX_BYTES)
    except (zlib.error, TypeError) as error:
        raise OffbeatError(f"{named} is damaged ({error})") from None
    if len(content) == files.MAX_BYTES:
        raise OffbeatError(f"{named} unpacks to {files.MAX_BYTES} bytes or more")
    return content


def _plain(statement: str) -> str:
    return " ".join(statement.replace("IF NOT EXISTS ", "").split())
