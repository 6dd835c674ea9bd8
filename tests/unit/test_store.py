"""The trial store: what was added is there, whoever else writes and however the writer dies."""

import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cases import mostly_slow
from strategies import Layer, Weight, make_graph

from offbeat.cluster import ClusterSpec
from offbeat.errors import OffbeatError
from offbeat.search.auto.store import Trial, TrialStore
from offbeat.strategy import Schedule, Strategy

GRAPH = make_graph([Layer((Weight("a.weight", (8, 8)),), 100), Layer((Weight("b.weight", (4, 8)),), 100)])
CLUSTER = ClusterSpec.homogeneous(nodes=2, devices_per_node=1, bandwidth="1Gbit/s", latency="50us", memory="1GiB")
OTHER = ClusterSpec.homogeneous(nodes=4, devices_per_node=1, bandwidth="1Gbit/s", latency="50us", memory="1GiB")
KILLS = (5, 30)

# Writes numbered trials for ever, and says on stdout which ones it was told are stored.
WRITER = """
import sys
sys.path[:0] = {path!r}
from test_store import CLUSTER, GRAPH, trial
from offbeat.search.auto.store import TrialStore
with TrialStore({store!r}) as store:
    print("open", flush=True)
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        store.add(GRAPH, CLUSTER, trial(number))
        print(number, flush=True)
"""


def trial(number: int) -> Trial:
    strategy = Strategy(name="made", schedule=Schedule(slice_bytes=1024 + number))
    return Trial(strategy, "done", 0.1 + number, search="s", predicted_seconds=0.2, steps=(0.1, 0.1 + number))


def start_writer(store: Path, first: int, stop: int) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).parent)
    shared = str(Path(here).parent / "shared")
    program = WRITER.format(path=[here, shared, str(Path(here).parents[1])], store=str(store))
    return subprocess.Popen([sys.executable, "-c", program, str(first), str(stop)], stdout=subprocess.PIPE)


def test_a_trial_comes_back_as_it_was(tmp_path):
    kept = Trial(trial(0).strategy, "crashed", error="rank 1 exited with code 3", search="s", predicted_seconds=0.4)
    with TrialStore(tmp_path / "t.sqlite") as store:
        assert store.add(GRAPH, CLUSTER, trial(0)) == 1
        assert store.add(GRAPH, CLUSTER, replace(kept, search="other")) == 1
        assert store.add(GRAPH, CLUSTER, trial(0)) == 0, "the same strategy in the same search"
        store.add(GRAPH, OTHER, trial(1))
    with TrialStore(tmp_path / "t.sqlite") as store:
        first, second = store.trials(GRAPH.digest, CLUSTER.digest)
        assert first.created > 1.7e9
        assert replace(first, created=0.0) == trial(0)
        assert (second.status, second.seconds, second.error) == ("crashed", None, kept.error)
        assert [domain.trials for domain in store.domains()] == [2, 1]
        assert store.load_domain(store.domains()[1]) == (GRAPH, OTHER)
        assert len(store.trials(GRAPH.digest)) == 3
        assert len(store.trials(search="other")) == 1


def test_export_and_import_carry_every_domain(tmp_path):
    with TrialStore(tmp_path / "a.sqlite") as store:
        for number in range(5):
            store.add(GRAPH, CLUSTER, trial(number))
            store.add(GRAPH, OTHER, replace(trial(number), source="replayed"))
        assert store.export(tmp_path / "out") == 10
        expected = store.trials()
    assert len(list((tmp_path / "out").iterdir())) == 2
    with TrialStore(tmp_path / "b.sqlite") as store:
        assert store.import_folder(tmp_path / "out") == 10
        assert store.import_folder(tmp_path / "out") == 0, "nothing is stored twice"
        assert sorted(store.trials(), key=repr) == sorted(expected, key=repr)


def test_a_bad_file_names_its_line_and_stores_nothing(tmp_path):
    with TrialStore(tmp_path / "a.sqlite") as store:
        store.add(GRAPH, CLUSTER, trial(0))
        store.export(tmp_path / "out")
    lines = next((tmp_path / "out").glob("*/trials.jsonl"))
    lines.write_text(lines.read_text() + '{"search": "s"}\n')
    with TrialStore(tmp_path / "b.sqlite") as store:
        with pytest.raises(OffbeatError, match=r"trials\.jsonl:2: not a trial: strategy: it is required"):
            store.import_folder(tmp_path / "out")
        assert store.domains() == []
        with pytest.raises(OffbeatError, match="contains no domain"):
            store.import_folder(tmp_path / "nothing")


def test_what_is_no_store_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "text").write_text("no database, but long enough to be looked at " * 40)
    with pytest.raises(OffbeatError, match="text: cannot open the trial store: file is not a database"):
        TrialStore(tmp_path / "text")
    with pytest.raises(OffbeatError, match="cannot open the trial store"):
        TrialStore(tmp_path / "no" / "folder.sqlite")
    with pytest.raises(ValueError, match="must have positive seconds, not None"):
        Trial(trial(0).strategy, "done")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kills", mostly_slow(KILLS, [5]))
def test_killed_writers_lose_nothing(tmp_path, kills):
    path, chance, promised = tmp_path / "t.sqlite", random.Random(6), set()
    for kill in range(kills):
        writer = start_writer(path, kill * 10_000, (kill + 1) * 10_000)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        time.sleep(chance.uniform(0.0, 0.15))
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().splitlines()
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        promised |= {int(number) for number in said if number.isdigit()}
        with TrialStore(path) as store:
            assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with TrialStore(path) as store:
        found = {int((kept.seconds or 0) - 0.1 + 0.5): kept for kept in store.trials()}
    assert promised, "no writer lived long enough to write anything"
    # A trial may be stored without having been announced, never the other way round.
    assert promised <= found.keys()
    assert len(found.keys() - promised) <= kills
    assert all(replace(kept, created=0.0) == trial(number) for number, kept in found.items())


@pytest.mark.timeout(120)
def test_writers_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "t.sqlite"
    writers = [start_writer(path, 100 * index, 100 * index + 60) for index in range(3)]
    for writer in writers:
        writer.communicate(timeout=100)
        assert writer.returncode == 0
    with TrialStore(path) as store:
        assert len(store.trials()) == 180


def test_a_store_of_an_earlier_format_is_taken_over_and_a_later_one_refused(tmp_path):
    path = tmp_path / "t.sqlite"
    with TrialStore(path) as store:
        store.add(GRAPH, CLUSTER, trial(0))
        store.save_state(GRAPH, CLUSTER, "rnn", b"first")
        store.save_state(GRAPH, CLUSTER, "rnn", b"second")
        assert store.load_state(GRAPH.digest, CLUSTER.digest, "rnn") == b"second"
        assert store.load_state(GRAPH.digest, OTHER.digest, "rnn") is None
    with sqlite3.connect(path) as raw:
        raw.execute("DROP TABLE simulators")
        raw.execute("PRAGMA user_version = 1")
    raw.close()
    with TrialStore(path) as store:
        assert len(store.trials()) == 1
        assert store.load_state(GRAPH.digest, CLUSTER.digest, "rnn") is None
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(OffbeatError, match="format 99 is not one this Offbeat reads"):
        TrialStore(path)
