"""Trials {(G, R, S), seconds} → an SQLite file, and back; JSON lines, one folder per domain, for exchange.

A domain is a model on a cluster, as in the AutoSync supplement's §9. A trial is written in one transaction once it has
ended, so that a process killed at any moment leaves whole trials only; write-ahead logging lets several searches write
to one file and others read it meanwhile.
"""

import json
import math
import sqlite3
import time
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

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
_COLUMNS = "search, strategy, status, source, seconds, predicted_seconds, steps, error, created"


@dataclass(frozen=True)
class Trial:
    """One strategy that was tried, and what became of it."""

    strategy: Strategy
    status: Status
    seconds: float | None = None
    """Median time of a step; of the steps until then, if it was stopped; None if it did not get that far."""
    source: Source = "measured"
    """'measured': from a run; 'replayed': from a simulation that stands in for one."""
    search: str = ""
    """The search it belongs to."""
    predicted_seconds: float | None = None
    """What the search had expected."""
    steps: tuple[float, ...] = ()
    """Seconds of the timed steps."""
    error: str = ""
    """One sentence about what went wrong."""
    created: float = 0.0
    """Seconds since 1970; 0 until it is stored."""

    def __post_init__(self) -> None:
        for field, value, known in (
            ("status", self.status, get_args(Status)),
            ("source", self.source, get_args(Source)),
        ):
            if value not in known:
                raise OffbeatError(f"trial: {field} {quote(value)} is not one of {', '.join(known)}")
        if self.status == "done" and not (self.seconds is not None and self.seconds > 0):
            raise OffbeatError(f"trial: seconds of a trial that is done must be positive, not {self.seconds!r}")

    @property
    def usable(self) -> bool:
        """It says how fast the strategy is."""
        return self.status in ("done", "stopped") and self.seconds is not None


@dataclass(frozen=True)
class Domain:
    """A model on a cluster, with the number of trials stored for it."""

    graph_digest: str
    cluster_digest: str
    model: str
    cluster: str
    trials: int

    @property
    def name(self) -> str:
        """A folder's name."""
        parts = (f"{self.model}-{self.cluster}"[:60], self.graph_digest[:8], self.cluster_digest[:8])
        # Whatever a store holds, the name is one step below the folder it is put into.
        plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in "-".join(parts))
        return plain.lstrip(".") or "domain"


class TrialStore:
    """The trials of any number of searches in one file. Use it in a `with` block, or close it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = fspath(path)
        try:
            self._connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        except sqlite3.Error as error:
            raise OffbeatError(f"{self.path}: cannot open the trial store: {error}") from None
        try:
            with self._explained("open"):
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "TrialStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def add(self, graph: ModelGraph, cluster: ClusterSpec, trial: Trial) -> bool:
        """Stores a trial for good before it returns; False if this search has one of the same strategy already."""
        return bool(self.add_many(graph, cluster, [trial]))

    def add_many(self, graph: ModelGraph, cluster: ClusterSpec, trials: Iterable[Trial]) -> int:
        """Stores all of them or, if the process dies meanwhile, none; how many were new."""
        rows = [_row(trial) for trial in trials]
        with self._explained("write to"), self._transaction():
            domain = self._domain_id(graph, cluster)
            before = self._connection.total_changes
            self._connection.executemany(
                f"INSERT OR IGNORE INTO trials (domain, strategy_digest, {_COLUMNS}) "
                f"VALUES ({domain}, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            return self._connection.total_changes - before

    def update(self, graph: ModelGraph, cluster: ClusterSpec, trial: Trial) -> None:
        """Puts in what is known by now of a trial that this search has stored before."""
        with self._explained("write to"), self._transaction():
            self._connection.execute(
                "UPDATE trials SET status = ?, seconds = ?, steps = ? "
                "WHERE domain = ? AND search = ? AND source = ? AND strategy_digest = ?",
                (
                    *(trial.status, trial.seconds, json.dumps(trial.steps), self._domain_id(graph, cluster)),
                    *(trial.search, trial.source, trial.strategy.digest),
                ),
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
        conditions = {
            "graph_digest": graph_digest,
            "cluster_digest": cluster_digest,
            "search": search,
            "source": source,
        }
        given = {name: value for name, value in conditions.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in given) or "1"
        with self._explained("read"):
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM trials JOIN domains ON domains.id = trials.domain "
                f"WHERE {where} ORDER BY trials.id",
                tuple(given.values()),
            ).fetchall()
        return [_trial(row, self.path) for row in rows]

    def domains(self) -> list[Domain]:
        """Every model on every cluster that has trials."""
        with self._explained("read"):
            rows = self._connection.execute(
                "SELECT graph_digest, cluster_digest, model, cluster_name, COUNT(trials.id) FROM domains "
                "LEFT JOIN trials ON trials.domain = domains.id GROUP BY domains.id ORDER BY domains.id"
            ).fetchall()
        for row in rows:
            if not all(isinstance(text, str) for text in row[:4]):
                raise OffbeatError(
                    f"{self.path}: not a trial store: the domain {quote(row[:4])} has a name that is no text"
                )
        return [Domain(*row) for row in rows]

    def load_domain(self, domain: Domain) -> tuple[ModelGraph, ClusterSpec]:
        with self._explained("read"):
            row = self._connection.execute(
                "SELECT graph, cluster FROM domains WHERE graph_digest = ? AND cluster_digest = ?",
                (domain.graph_digest, domain.cluster_digest),
            ).fetchone()
        if row is None:
            raise OffbeatError(f"{self.path}: there is no domain {domain.name!r}")
        graph = ModelGraph.from_json(_unpacked(row[0], self.path), origin=self.path)
        return graph, ClusterSpec.from_json(_text(row[1], self.path), origin=self.path)

    def save_state(self, graph: ModelGraph, cluster: ClusterSpec, kind: str, state: bytes) -> None:
        """Keeps the state of a learned simulator of that kind for a domain, in the place of an earlier one."""
        with self._explained("write to"), self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO simulators (domain, kind, state) VALUES (?, ?, ?)",
                (self._domain_id(graph, cluster), kind, state),
            )

    def load_state(self, graph_digest: str, cluster_digest: str, kind: str) -> bytes | None:
        """What `save_state` kept; None if nothing was."""
        with self._explained("read"):
            row = self._connection.execute(
                "SELECT state FROM simulators JOIN domains ON domains.id = simulators.domain "
                "WHERE graph_digest = ? AND cluster_digest = ? AND kind = ?",
                (graph_digest, cluster_digest, kind),
            ).fetchone()
        return None if row is None else bytes(row[0])

    def export(self, folder: str | PathLike[str]) -> int:
        """Writes graph.json, cluster.json and trials.jsonl into one folder per domain; how many trials."""
        count = 0
        for domain in self.domains():
            target = Path(folder) / domain.name
            try:
                target.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OffbeatError(f"{target}: cannot make the folder: {error.strerror}") from None
            graph, cluster = self.load_domain(domain)
            lines = [_line(trial) for trial in self.trials(domain.graph_digest, domain.cluster_digest)]
            files.write_atomic(target / "graph.json", graph.to_json(), "model graph")
            files.write_atomic(target / "cluster.json", cluster.model_dump_json().encode(), "cluster")
            files.write_atomic(target / "trials.jsonl", "".join(lines).encode(), "trials")
            count += len(lines)
        return count

    def import_folder(self, folder: str | PathLike[str]) -> int:
        """Reads what `export` wrote; trials that are known already are left out. How many were new."""
        found = sorted(Path(folder).glob("*/trials.jsonl"))
        if not found:
            raise OffbeatError(f"{folder}: holds no domain, which is a folder with graph.json and trials.jsonl")
        # Everything is read before anything is stored, so that a bad file leaves the store as it was.
        domains = [_read_domain(path) for path in found]
        return sum(self.add_many(graph, cluster, trials) for graph, cluster, trials in domains)

    def _prepare(self) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
        self._check_schema()
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

    def _check_schema(self) -> None:
        """Refuses a file with anything but a store's tables: a view or trigger of a hostile one could run for ever."""
        self._connection.execute("PRAGMA trusted_schema = OFF")
        known = {_plain(statement) for statement in _SCHEMA.split(";")}
        for kind, name, statement in self._connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
            if statement is not None and _plain(str(statement)) not in known:
                raise OffbeatError(f"{self.path}: not a trial store: it holds the {kind} {quote(name)}, which none has")

    def _domain_id(self, graph: ModelGraph, cluster: ClusterSpec) -> int:
        keys = (graph.digest, cluster.digest)
        query = "SELECT id FROM domains WHERE graph_digest = ? AND cluster_digest = ?"
        row = self._connection.execute(query, keys).fetchone()
        if row is None:
            self._connection.execute(
                "INSERT INTO domains (graph_digest, cluster_digest, model, cluster_name, graph, cluster) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*keys, graph.name, cluster.name, zlib.compress(graph.to_json()), cluster.model_dump_json()),
            )
            row = self._connection.execute(query, keys).fetchone()
        return int(row[0])

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
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
            said = " ".join(str(error).split())[:160]
            raise OffbeatError(f"{self.path}: cannot {what} the trial store: {said}") from None


def _row(trial: Trial) -> tuple[Any, ...]:
    return (
        trial.strategy.digest,
        trial.search,
        trial.strategy.to_json(),
        trial.status,
        trial.source,
        trial.seconds,
        trial.predicted_seconds,
        json.dumps(trial.steps),
        trial.error,
        trial.created or time.time(),
    )


def _trial(row: tuple[Any, ...], origin: str) -> Trial:
    raw = dict(zip(_COLUMNS.split(", "), row, strict=True))
    raw["steps"] = files.parse_json(_text(raw["steps"], origin), origin, "list of seconds")
    return _checked(raw, _text(raw["strategy"], origin), origin)


def _line(trial: Trial) -> str:
    content = {
        "search": trial.search,
        "status": trial.status,
        "source": trial.source,
        "seconds": trial.seconds,
        "predicted_seconds": trial.predicted_seconds,
        "steps": trial.steps,
        "error": trial.error,
        "created": trial.created,
        "strategy": json.loads(trial.strategy.to_json()),
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def _read_domain(path: Path) -> tuple[ModelGraph, ClusterSpec, list[Trial]]:
    graph = ModelGraph.load(path.with_name("graph.json"))
    cluster = ClusterSpec.load(path.with_name("cluster.json"))
    lines = files.read_bytes(path, "trials").decode(errors="replace").splitlines()
    return graph, cluster, [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line]


def _read_line(line: str, origin: str) -> Trial:
    raw = files.parse_json(line, origin, "trial")
    try:
        strategy = json.dumps(raw["strategy"])
    except (KeyError, TypeError, IndexError, RecursionError) as error:
        raise OffbeatError(f"{origin}: not a trial: {type(error).__name__} at {error}") from None
    return _checked(raw, strategy, origin)


def _checked(raw: dict[str, Any], strategy: str, origin: str) -> Trial:
    """A trial of values that may be anything; the error names `origin`."""
    try:
        return Trial(
            strategy=Strategy.from_json(strategy, origin=origin),
            status=raw["status"],
            seconds=None if raw["seconds"] is None else _finite(raw["seconds"]),
            source=raw["source"],
            search=_text(raw["search"], origin),
            predicted_seconds=None if raw["predicted_seconds"] is None else _finite(raw["predicted_seconds"]),
            steps=tuple(map(_finite, raw["steps"])),
            error=_text(raw["error"], origin),
            created=_finite(raw["created"]),
        )
    except OffbeatError as error:
        raise (error if str(error).startswith(origin) else OffbeatError(f"{origin}: {error}")) from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        said = " ".join(str(error).split())[:160]
        raise OffbeatError(f"{origin}: not a trial: {type(error).__name__} at {said}") from None


def _finite(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise OffbeatError(f"not a trial: {quote(value)} is not a number of seconds")
    return seconds


def _text(value: Any, origin: str) -> str:
    """A text that can be stored: SQLite takes no half of a surrogate pair, which JSON can spell."""
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise OffbeatError(f"{origin}: not a trial: {quote(value)} is not a text")
    return value


def _unpacked(packed: Any, origin: str) -> bytes:
    """A compressed graph, if it is not larger than a file of one may be."""
    try:
        content = zlib.decompressobj().decompress(packed, files.MAX_BYTES)
    except (zlib.error, TypeError) as error:
        raise OffbeatError(f"{origin}: not a trial store: a model graph in it is damaged ({error})") from None
    if len(content) == files.MAX_BYTES:
        raise OffbeatError(
            f"{origin}: not a trial store: a model graph in it unpacks to {files.MAX_BYTES} bytes or more"
        )
    return content


def _plain(statement: str) -> str:
    return " ".join(statement.replace("IF NOT EXISTS ", "").split())
