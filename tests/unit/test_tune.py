"""The search: selection rules, and whole searches with replay in the place of trials."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from tuning_cases import CLUSTER, GRAPH, HIDDEN, run

from offbeat.cluster import ClusterSpec, CollectiveTable
from offbeat.errors import OffbeatError
from offbeat.plan import lower
from offbeat.search.auto.guide import Guide
from offbeat.search.auto.neighbours import vary
from offbeat.search.auto.sampler import Sampler
from offbeat.search.auto.select import (
    diverse_pick,
    elite,
    embedding_similarity,
    expression_similarity,
    fidelity_level,
    ranking_accuracy,
)
from offbeat.search.auto.session import target_name
from offbeat.search.auto.store import Trial, TrialStore
from offbeat.search.auto.tune import MARGIN, Options, tune
from offbeat.simulate.learned.features import TrainingSchedule
from offbeat.simulate.predict import simulate
from offbeat.strategy import build_strategy

SHORT = TrainingSchedule(epochs=6)
KILLS = 30

# A search whose trials take a moment, so that kills fall between and into them.
SEARCHER = """
import sys, time
sys.path[:0] = {path!r}
from tuning_cases import CLUSTER, GRAPH, run
from offbeat.search.auto.store import TrialStore
from offbeat.search.auto.tune import Options, tune
def slow(strategies, best):
    for trial in run(strategies, best):
        time.sleep(0.01)
        yield trial
print("begins", flush=True)
with TrialStore({store!r}) as store:
    options = Options(trials=40, guide="replay", candidates=12, resume=True)
    result = tune(GRAPH, CLUSTER, slow, options, store=store, on_progress=lambda p: print(p.number, flush=True))
print("ended", len(result.trials), flush=True)
"""


def test_accuracy_counts_pairs():
    assert ranking_accuracy([1, 2, 3], [10, 20, 30]) == 1.0
    assert ranking_accuracy([3, 2, 1], [10, 20, 30]) == 0.0
    assert ranking_accuracy([1, 3, 2], [10, 20, 30]) == pytest.approx(2 / 3)
    assert ranking_accuracy([1, 1], [10, 20]) == 0.5, "undecided"
    assert math.isnan(ranking_accuracy([1, 2], [10, 10.01])), "a tie is no pair"


def test_the_level_is_the_best_score_below_which_ranking_holds():
    measured = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert fidelity_level(measured, measured) == 1.0
    # Right on the slow half, at a loss on the fast one.
    guessed = [2.9, 2.5, 1.0, 4.0, 5.0, 6.0]
    level = fidelity_level(guessed, measured, accuracy=0.9)
    assert 1.0 < level <= 4.0
    slower = [i for i, guess in enumerate(guessed) if guess >= level]
    assert ranking_accuracy([guessed[i] for i in slower], [measured[i] for i in slower]) >= 0.9
    assert fidelity_level([3, 2, 1], [1, 2, 3]) == math.inf
    assert fidelity_level([], []) == math.inf


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=12))
def test_no_better_level_would_hold(points):
    guessed, measured = [p for p, _ in points], [m for _, m in points]
    level = fidelity_level(guessed, measured)
    for lower_level in sorted(set(guessed)):
        if lower_level < level:
            slower = [i for i, guess in enumerate(guessed) if guess >= lower_level]
            accuracy = ranking_accuracy([guessed[i] for i in slower], [measured[i] for i in slower])
            assert not accuracy >= 0.8


def test_the_filter_keeps_the_elite_and_never_too_few():
    assert elite([5.0, 1.0, 3.0, 2.0], level=3.0, least=1) == [1, 3, 2]
    assert elite([5.0, 1.0, 3.0, 2.0], level=0.5, least=2) == [1, 3]
    assert elite([5.0, 1.0], level=math.inf, least=1) == [1, 0]


def test_the_pick_trades_time_for_difference():
    alike = lambda a, b: 1.0 if {a, b} <= {0, 1} else 0.0  # noqa: E731 - a table of similarities
    times = [1.0, 1.01, 1.05]
    assert diverse_pick(times, alike, 2, alpha=0.0) == [0, 1]
    assert diverse_pick(times, alike, 2, alpha=0.5) == [0, 2]
    assert diverse_pick(times, alike, 9) == [0, 2, 1]
    assert diverse_pick([], alike, 2) == []


def test_similarity_by_expression_and_by_embedding():
    first, second = Sampler(GRAPH, CLUSTER, 0).sample(2)
    near = vary(Sampler(GRAPH, CLUSTER, 0), first, 1)[0]
    assert expression_similarity(first, first) == 1.0
    assert expression_similarity(first, second) == expression_similarity(second, first) < 1.0
    assert expression_similarity(first, near) > expression_similarity(first, second)
    assert embedding_similarity(np.array([1.0, 0.0]), np.array([2.0, 0.0])) == pytest.approx(1.0)
    assert embedding_similarity(np.array([1.0, 0.0]), np.array([0.0, 2.0])) == 0.0
    assert embedding_similarity(np.zeros(2), np.ones(2)) == 0.0


GUIDES = ("random", "predefined", "linear", "rnn", "gat", "replay", "combined")


@pytest.mark.parametrize("guide", mostly_slow(GUIDES, set(GUIDES) - {"rnn", "gat"}))
def test_every_guide_spends_its_budget_and_finds_the_best_of_its_trials(guide):
    seen = []
    options = Options(trials=18, guide=guide, candidates=30, schedule=SHORT)
    result = tune(GRAPH, CLUSTER, run, options, on_progress=seen.append)
    assert len(result.trials) == 18
    assert len({trial.strategy.digest for trial in result.trials}) == 18, "no strategy is tried twice"
    done = [trial.seconds for trial in result.trials if trial.status == "done"]
    assert result.best is not None
    assert result.best.seconds <= (1 + MARGIN) * min(done)
    assert [progress.number for progress in seen] == list(range(1, 19))
    assert seen[-1].seconds_left == 0
    assert math.isnan(result.accuracy) == (guide == "random")
    if guide in ("linear", "rnn", "gat", "combined"):
        assert result.simulator is not None
        assert result.simulator.trained_on >= 16


def test_replay_finds_better_strategies_than_chance_and_than_the_builders():
    """On average: twelve draws may be lucky, and with seed 0 they are."""

    def best(guide, seed):
        found = tune(GRAPH, CLUSTER, run, Options(trials=12, guide=guide, candidates=60, seed=seed)).best
        assert found is not None
        return found.seconds

    guided = [best("replay", seed) for seed in range(4)]
    assert np.mean(guided) < np.mean([best("random", seed) for seed in range(4)])
    for name in ("ddp", "all_reduce", "ps_load_balanced", "partitioned_ps"):
        (built,) = run([build_strategy(name, GRAPH, CLUSTER)], None)
        assert max(guided) <= built.seconds


def test_finalists_are_run_again_and_luck_is_forgotten(tmp_path):
    """One slow strategy is measured far too fast, once: it leads the trials and is not returned."""
    lucky = []

    def disturbed(strategies, best):
        for trial in run(strategies, None):
            if not lucky and len(strategies) == 4 and best is not None:
                lucky.append(trial.strategy.digest)
                yield replace(trial, seconds=0.9 * best, steps=(0.9 * best,))
            else:
                yield trial

    options = Options(trials=8, guide="replay", candidates=20, finalists=2, seed=1)
    with TrialStore(tmp_path / "t.sqlite") as store:
        result = tune(GRAPH, CLUSTER, disturbed, options, store=store)
        assert [t.seconds for t in store.trials()] == [t.seconds for t in result.trials], "the store has second runs"
    assert result.best is not None
    (first,) = (trial for trial in result.trials if trial.strategy.digest in lucky)
    assert first.seconds > result.best.seconds
    assert result.best.strategy.digest not in lucky
    assert len(result.trials) == 8
    lucky.clear()
    fooled = tune(GRAPH, CLUSTER, disturbed, replace(options, finalists=0))
    assert fooled.best is not None
    assert fooled.best.strategy.digest in lucky


def test_strategies_that_replay_cannot_tell_apart_are_not_both_tried():
    result = tune(GRAPH, CLUSTER, run, Options(trials=12, guide="replay", candidates=60))
    # The first round compares builders, whatever replay says of them.
    predicted = [f"{trial.predicted_seconds:.6g}" for trial in result.trials[4:] if trial.predicted_seconds is not None]
    assert len(set(predicted)) == len(predicted) == 8


def test_a_builder_is_returned_unless_something_is_clearly_faster():
    def level(factor):
        def alike(strategies, best):
            for strategy in strategies:
                yield Trial(strategy, "done", 1.0 if strategy.name != "auto" else factor, source="replayed")

        return tune(GRAPH, CLUSTER, alike, Options(trials=8, guide="replay", candidates=20))

    assert level(0.99).strategy.name != "auto"
    assert level(0.9).strategy.name == "auto"


def test_the_same_seed_repeats_a_search():
    options = Options(trials=6, guide="replay", candidates=20, seed=3)
    first, second = (tune(GRAPH, CLUSTER, run, options) for _ in range(2))
    assert [trial.strategy for trial in first.trials] == [trial.strategy for trial in second.trials]


def test_failed_trials_are_recorded_and_the_search_goes_on(tmp_path):
    def failing(strategies, best):
        for number, trial in enumerate(run(strategies, best)):
            yield (
                Trial(trial.strategy, ("crashed", "hung", "out_of_memory")[number % 3], error="x") if number else trial
            )

    with TrialStore(tmp_path / "t.sqlite") as store:
        result = tune(GRAPH, CLUSTER, failing, Options(trials=8, guide="replay", candidates=20), store=store)
        assert [trial.status for trial in store.trials()] == [trial.status for trial in result.trials]
    assert {trial.status for trial in result.trials} == {"done", "hung", "out_of_memory", "crashed"}
    assert result.best is not None


def test_nothing_that_works_is_said_in_one_sentence():
    result = tune(
        GRAPH,
        CLUSTER,
        lambda strategies, best: (Trial(s, "crashed", error="x") for s in strategies),
        Options(trials=3, guide="replay", candidates=10),
    )
    assert result.best is None
    with pytest.raises(OffbeatError, match="none of the 3 trials completed"):
        _ = result.strategy


def test_an_interrupt_returns_the_best_and_resume_goes_on(tmp_path):
    def interrupted(strategies, best):
        for number, trial in enumerate(run(strategies, best)):
            if best is not None and number == 1:
                raise KeyboardInterrupt
            yield trial

    options = Options(trials=10, guide="replay", candidates=20)
    with TrialStore(tmp_path / "t.sqlite") as store:
        first = tune(GRAPH, CLUSTER, interrupted, options, store=store)
        assert first.interrupted
        assert len(first.trials) == 5
        assert first.best is not None
        with pytest.raises(OffbeatError, match="search 'search' already has 5 trials"):
            tune(GRAPH, CLUSTER, run, options, store=store)
        second = tune(GRAPH, CLUSTER, run, replace(options, resume=True), store=store)
        assert not second.interrupted
        assert [t.strategy for t in second.trials[:5]] == [t.strategy for t in first.trials]
        assert len({trial.strategy.digest for trial in second.trials}) == 10
        assert len(store.trials()) == 10


def test_a_later_search_starts_from_the_store(tmp_path):
    """Transfer: with the trials of the same model elsewhere, the first round is better than without."""
    other = ClusterSpec.homogeneous(nodes=4, bandwidth="300Mbit/s", latency="150us", memory="1GiB")

    def elsewhere(strategies, best):
        for strategy in strategies:
            seconds = simulate(lower(GRAPH, other, strategy), HIDDEN, memory=False).iteration_time
            yield Trial(strategy, "done", seconds, source="replayed")

    first_round = Options(trials=4, guide="combined", candidates=40, schedule=SHORT, search="later")
    with TrialStore(tmp_path / "t.sqlite") as store:
        alone = tune(GRAPH, CLUSTER, run, first_round)
        tune(GRAPH, other, elsewhere, Options(trials=24, guide="replay", candidates=40), store=store)
        helped = tune(GRAPH, CLUSTER, run, first_round, store=store)
    assert helped.simulator is not None
    assert helped.simulator.trained_on >= 24
    assert helped.best is not None
    assert alone.best is not None
    assert helped.best.seconds <= alone.best.seconds


def test_the_simulator_of_a_search_is_where_the_next_one_begins(tmp_path):
    options = Options(trials=17, guide="combined", candidates=12, schedule=SHORT)
    with TrialStore(tmp_path / "t.sqlite") as store:
        first = tune(GRAPH, CLUSTER, run, options, store=store)
        state = store.load_state(GRAPH.digest, CLUSTER.digest, "combined")
        assert first.simulator is not None
        assert state == first.simulator.to_bytes()
        begun = []
        tune(
            GRAPH,
            CLUSTER,
            run,
            replace(options, trials=1, search="next"),
            store=store,
            on_progress=lambda progress: begun.append(progress.trial.predicted_seconds),
        )
        guide = Guide("combined", GRAPH, CLUSTER)
        assert guide.restore(state)
        assert not guide.restore(b"something else")
        assert not Guide("rnn", GRAPH, CLUSTER).restore(state), "a model of another kind"
    assert begun[0] is not None


def test_trials_of_another_release_do_not_stop_a_search():
    """A store whose strategies name their graph in another way than this release does."""
    trials = [
        replace(trial, strategy=trial.strategy.model_copy(update={"graph": "another"}))
        for trial in run(Sampler(GRAPH, CLUSTER, 0).sample(3), None)
    ]
    guide = Guide("combined", GRAPH, CLUSTER)
    guide.add_domain(GRAPH, CLUSTER, trials)
    assert not guide.earlier


def test_the_learned_model_leads_only_where_it_has_ordered_trials_better():
    guide = Guide("combined", GRAPH, CLUSTER, schedule=SHORT)
    assert not guide.trusts_learned
    strategies = Sampler(GRAPH, CLUSTER, 0).sample(20)
    trials = list(run(strategies, None))
    guide.learn(trials[:4])
    assert guide.fitted is not None
    assert not guide.learned
    guide.learn(trials)
    assert guide.learned
    assert not guide.trusts_learned, "it has shown nothing yet"
    took = np.arange(1.0, 10.0)
    guide._shown = list(zip(took[::-1], took, took, strict=True))
    assert guide.trusts_learned
    guide._shown = list(zip(took, took[::-1], took, strict=True))
    assert not guide.trusts_learned


def test_measured_collectives_set_the_coefficients_of_the_predefined_model():
    assert Guide("predefined", GRAPH, CLUSTER).coefficients is None
    sizes = (2**10, 2**16, 2**20)
    table = CollectiveTable(
        collective="all_reduce",
        groups=((0, 1, 2, 3),),
        sizes_bytes=sizes,
        seconds=tuple(4e-3 + size * 1.2e-7 for size in sizes),
    )
    measured = CLUSTER.model_copy(update={"tables": (table,)})
    guide = Guide("predefined", GRAPH, measured)
    assert guide.coefficients is not None
    assert guide.coefficients.phi_seconds == pytest.approx(1e-3, rel=0.1), "four participants share 4 ms"
    strategy = build_strategy("all_reduce", GRAPH, measured).model_copy(update={"cluster": ""})
    assert guide.predict([strategy])[0] > Guide("predefined", GRAPH, CLUSTER).predict([strategy])[0]


def test_functions_are_known_to_trials_by_name(monkeypatch):
    assert target_name("train.py") == "train.py"
    assert target_name(Path("a/train.py")) == "a/train.py"
    assert target_name(build_strategy) == f"{build_strategy.__module__}:build_strategy"
    with pytest.raises(OffbeatError, match="not a top-level function of a module"):
        target_name(lambda: None)

    def build():
        raise AssertionError("it is named, not called")

    build.__qualname__, build.__module__ = "build", "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/jobs/train_it.py", raising=False)
    assert target_name(build) == "train_it:build"
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(OffbeatError, match="interactive session"):
        target_name(build)


def test_time_limits_are_kept():
    result = tune(GRAPH, CLUSTER, run, Options(trials=500, guide="replay", candidates=6, time_limit_seconds=0.5))
    assert 0 < len(result.trials) < 500


def test_bad_options_are_refused():
    with pytest.raises(OffbeatError, match="trials: 0 is not at least 1"):
        Options(trials=0)
    with pytest.raises(OffbeatError, match="guide: 'luck' is not one of"):
        Options(guide="luck")  # type: ignore[arg-type]
    with pytest.raises(OffbeatError, match="similarity: 'taste'"):
        Options(similarity="taste")
    with pytest.raises(OffbeatError, match="needs its trial store"):
        tune(GRAPH, CLUSTER, run, Options(resume=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thirty_kills_and_a_resume_finish_the_search(tmp_path):
    path, chance, shown = tmp_path / "t.sqlite", random.Random(1), 0
    here = Path(__file__).parent
    program = SEARCHER.format(path=[str(here), str(here.parents[1])], store=str(path))
    for kill in range(KILLS + 1):
        search = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert search.stdout is not None
        if kill < KILLS:
            assert search.stdout.readline() == b"begins\n"
            time.sleep(chance.uniform(0.0, 0.8))
            search.send_signal(signal.SIGKILL)
        said = search.stdout.read().split()
        search.stdout.close()
        search.wait()
        numbers = [int(word) for word in said if word.isdigit()]
        with TrialStore(path) as store:
            kept = store.trials(search="search")
        assert len(kept) >= max([shown, *numbers]), "a trial that was shown is lost"
        shown = len(kept)
    assert said[-2:] == [b"ended", b"40"]
    assert len({trial.strategy.digest for trial in kept}) == len(kept) == 40


def test_a_builder_is_measured_first_so_that_the_result_is_no_worse():
    result = tune(GRAPH, CLUSTER, run, Options(trials=1, guide="replay", candidates=10))
    assert result.trials[0].strategy.name != "auto"
    assert result.baseline_seconds == result.trials[0].seconds


def test_the_commands_refuse_bad_input_and_carry_the_store(tmp_path, capsys, monkeypatch):
    from offbeat.cli import main, tuning

    assert tuning.STORE.name == "offbeat-trials.sqlite"
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "nothing.py"]) == 1
    assert "nothing.py: no such script" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is written for a script that does not exist"
    assert main(["trials"]) == 1
    assert "no such trial store" in capsys.readouterr().err
    with TrialStore("a.sqlite") as store:
        tune(GRAPH, CLUSTER, run, Options(trials=3, guide="random", candidates=5), store=store)
    assert main(["trials", "--store", "a.sqlite", "--export", "out"]) == 0
    assert main(["trials", "--store", "b.sqlite", "--import", "out", "--json"]) == 0
    assert '"imported": 3' in capsys.readouterr().out
    assert main(["trials", "--store", "b.sqlite", "--best", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    with TrialStore("b.sqlite") as store:
        assert row["step_seconds"] == min(trial.seconds for trial in store.trials() if trial.status == "done")
