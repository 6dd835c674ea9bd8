"""Costs fitted to trials: they come near those the trials were made with, and rank strategies that were not tried."""

import numpy as np
import pytest
from tuning_cases import CLUSTER, GRAPH, HIDDEN, run

from offbeat.cost.measured import Costs
from offbeat.plan import lower
from offbeat.search.auto.fit import Evidence, fit_costs
from offbeat.search.auto.neighbours import STARTS, starting_strategies
from offbeat.search.auto.sampler import Sampler
from offbeat.search.auto.select import ranking_accuracy
from offbeat.simulate.predict import simulate

STRATEGIES = Sampler(GRAPH, CLUSTER, 0).sample(30)
PLANS = [lower(GRAPH, CLUSTER, strategy) for strategy in STRATEGIES]
SECONDS = [trial.seconds or 0.0 for trial in run(STRATEGIES, None)]


def replayed(plans, costs):
    return np.array([simulate(plan, costs, memory=False).iteration_time for plan in plans])


def test_eight_trials_make_replay_agree_with_the_rest():
    fitted = fit_costs([Evidence(plan, took) for plan, took in zip(PLANS[:8], SECONDS[:8], strict=True)])
    before, after = replayed(PLANS[8:], Costs()), replayed(PLANS[8:], fitted)
    took = np.array(SECONDS[8:])
    assert np.median(np.abs(after / took - 1)) < 0.5 * np.median(np.abs(before / took - 1))
    assert ranking_accuracy(after, took) >= ranking_accuracy(before, took)
    assert ranking_accuracy(after, took) > 0.9


def test_without_trials_the_prior_stands_and_what_is_known_is_added_to():
    prior = fit_costs([])
    known = fit_costs([], HIDDEN)
    assert known.interference == pytest.approx(prior.interference + HIDDEN.interference)
    assert known.update_call_seconds == pytest.approx(prior.update_call_seconds + HIDDEN.update_call_seconds)
    assert known.collectives == HIDDEN.collectives


def test_one_trial_that_replay_cannot_explain_does_not_bend_the_rest():
    evidence = [Evidence(plan, took) for plan, took in zip(PLANS[:10], SECONDS[:10], strict=True)]
    disturbed = [*evidence[:-1], Evidence(PLANS[9], 5 * SECONDS[9])]
    sound, bent = replayed(PLANS[10:], fit_costs(evidence)), replayed(PLANS[10:], fit_costs(disturbed))
    assert np.max(np.abs(bent / sound - 1)) < 0.15


def test_trials_of_elsewhere_weigh_less():
    near = fit_costs([Evidence(plan, 2 * took) for plan, took in zip(PLANS[:6], SECONDS[:6], strict=True)])
    far = fit_costs([Evidence(plan, 2 * took, 0.01) for plan, took in zip(PLANS[:6], SECONDS[:6], strict=True)])
    prior = replayed(PLANS[6:], fit_costs([]))
    assert np.mean(replayed(PLANS[6:], near) / prior) > np.mean(replayed(PLANS[6:], far) / prior)


def test_a_search_starts_from_every_known_system():
    starts = starting_strategies(GRAPH, CLUSTER)
    assert {strategy.name for strategy in starts} == set(STARTS)
    assert len({strategy.digest for strategy in starts}) == len(starts)
