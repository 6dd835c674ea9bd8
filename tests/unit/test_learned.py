"""Learned simulators: features, models, ranking and files."""

import io
import math

import numpy as np
import pytest
import torch
from tuning_cases import CLUSTER, GRAPH, HIDDEN

from offbeat.cluster import ClusterSpec
from offbeat.cost.analytic import Coefficients, compute_seconds, message_features, sync_seconds
from offbeat.errors import OffbeatError
from offbeat.plan import lower
from offbeat.search.auto.sampler import Sampler
from offbeat.search.auto.select import ranking_accuracy
from offbeat.simulate.learned.features import NODE_NAMES, WHAT_IFS, WHOLE_NAMES, Samples, TrainingSchedule, encode
from offbeat.simulate.learned.ranking import Attention, Simulator, collate, make_model, pairwise_loss
from offbeat.simulate.predict import simulate
from offbeat.strategy import build_strategy

KINDS = ("linear", "rnn", "gat", "combined")
QUICK = TrainingSchedule(epochs=25, learning_rate=5e-3, decay_epochs=(15,))


def samples(count: int, seed: int, replay: bool = True) -> Samples:
    plans = [lower(GRAPH, CLUSTER, strategy) for strategy in Sampler(GRAPH, CLUSTER, seed).sample(count)]
    return Samples(
        [encode(plan, replay=replay) for plan in plans],
        [simulate(plan, HIDDEN, memory=False).iteration_time for plan in plans],
    )


@pytest.fixture(scope="module")
def data() -> tuple[Samples, Samples]:
    return samples(60, 0), samples(50, 1)


def test_a_plan_is_encoded_shard_by_shard_in_forward_order():
    strategy = Sampler(GRAPH, CLUSTER, 3).sample(1)[0]
    plan = lower(GRAPH, CLUSTER, strategy)
    encoded = encode(plan, replay=True)
    pieces = sum(len(message.pieces) for message in plan.messages)
    assert encoded.nodes.shape == (pieces, len(NODE_NAMES))
    assert encoded.whole.shape == (len(WHOLE_NAMES),)
    assert np.isfinite(encoded.nodes).all()
    assert np.isfinite(encoded.whole).all()
    positions = encoded.nodes[:, NODE_NAMES.index("position")]
    assert (np.diff(positions) >= 0).all()
    assert encoded.base == pytest.approx(math.log(simulate(plan, memory=False).iteration_time))
    assert encode(plan).base != encoded.base, "without replay the analytic model is the base"
    assert {(a, a) for a in range(pieces)} <= set(map(tuple, encoded.edges.T.tolist()))
    assert set(map(tuple, encoded.edges.T.tolist())) == set(map(tuple, encoded.edges[::-1].T.tolist()))


@pytest.mark.parametrize(("bandwidth", "longer"), [("1Mbit/s", "network"), ("1000Gbit/s", "compute")])
def test_the_analytic_model_takes_the_longer_of_computing_and_synchronising(bandwidth, longer):
    """AutoSync's equation 1."""
    where = ClusterSpec.homogeneous(nodes=4, devices_per_node=1, bandwidth=bandwidth, latency="1us")
    plan = lower(GRAPH, where, build_strategy("all_reduce", GRAPH, where))
    none = Coefficients(phi_seconds=0.0, delta_seconds=0.0)
    seconds = {"compute": compute_seconds(plan), "network": sum(sync_seconds(message_features(plan), none))}
    assert max(seconds, key=seconds.__getitem__) == longer
    assert encode(plan, coefficients=none).base == pytest.approx(math.log(seconds[longer]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_depends_on_its_own_plan_alone(kind, data):
    plans = data[0].plans
    torch.manual_seed(0)
    model = make_model(kind, 16)
    model.standardise(plans)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    together, hidden = model(collate(plans[:7]))
    alone = [model(collate([plan])) for plan in plans[:7]]
    torch.testing.assert_close(together, torch.cat([score for score, _ in alone]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, torch.cat([vector for _, vector in alone]), rtol=1e-4, atol=1e-4)
    assert len(set(together.tolist())) > 1


def test_attention_weights_are_a_softmax_over_the_edges_into_a_node():
    torch.manual_seed(0)
    layer = Attention(3, 8, heads=2)
    nodes = torch.randn(4, 3)
    edges = torch.tensor([[0, 1, 2, 3, 1, 2], [0, 1, 2, 3, 0, 0]])
    found = layer(nodes, edges)
    values = layer.project(nodes).view(4, 2, 4)
    logits = [
        torch.nn.functional.leaky_relu((values[a] * layer.source).sum(-1) + (values[0] * layer.target).sum(-1), 0.2)
        for a in (0, 1, 2)
    ]
    weights = torch.softmax(torch.stack(logits), dim=0)
    mixed = sum(weights[i][:, None] * values[a] for i, a in enumerate((0, 1, 2)))
    expected = torch.nn.functional.elu(mixed.flatten() + layer.skip(nodes[0]))
    torch.testing.assert_close(found[0], expected)
    isolated = torch.nn.functional.elu(values[3].flatten() + layer.skip(nodes[3]))
    torch.testing.assert_close(found[3], isolated)


def test_sensitivities_say_what_a_plan_depends_on():
    by_servers, by_all = (
        encode(lower(GRAPH, CLUSTER, build_strategy(name, GRAPH, CLUSTER)), replay=True)
        for name in ("ps_load_balanced", "all_reduce")
    )
    first = WHOLE_NAMES.index("if_calls")
    calls, servers, collectives, disturbance, updates = range(first, first + len(WHAT_IFS))
    assert by_servers.whole[servers] > 0.1
    assert by_servers.whole[collectives] == 0
    assert by_all.whole[servers] == 0
    assert by_all.whole[collectives] > 0.1
    for plan in (by_servers, by_all):
        assert min(plan.whole[[calls, disturbance, updates]]) >= 0
        assert plan.whole[calls] > 0
    plain = encode(lower(GRAPH, CLUSTER, build_strategy("all_reduce", GRAPH, CLUSTER)))
    assert not plain.whole[first:].any(), "models without the replayer must not see it"


def test_the_loss_asks_for_the_order():
    scores = torch.tensor([1.0, 2.0])
    right = pairwise_loss(scores, np.array([0]), np.array([1]))
    wrong = pairwise_loss(scores, np.array([1]), np.array([0]))
    assert float(right) == pytest.approx(math.log1p(math.exp(-1)))
    assert float(wrong) == pytest.approx(math.log1p(math.exp(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_training_teaches_to_rank_unseen_plans(kind, data):
    train, test = data
    simulator = Simulator(kind, hidden=16)
    simulator.fit([train], QUICK)
    assert ranking_accuracy(simulator.predict(train.plans), train.seconds) > 0.8
    assert ranking_accuracy(simulator.predict(test.plans), test.seconds) > 0.75
    seconds = simulator.predict(test.plans)
    assert np.median(np.abs(np.log(seconds / np.array(test.seconds)))) < 0.5, "predictions are in seconds"


def test_the_combined_model_starts_as_the_replayer(data):
    untrained = Simulator("combined", hidden=16)
    untrained.model.standardise(data[0].plans)
    replayed = [plan.base for plan in data[1].plans]
    predicted = untrained.predict(data[1].plans)
    assert np.allclose(np.array(replayed)[np.argsort(predicted)], np.sort(replayed), atol=1e-6)


def test_the_same_seed_gives_the_same_simulator(data):
    first, second = Simulator("rnn", hidden=8, seed=5), Simulator("rnn", hidden=8, seed=5)
    few = TrainingSchedule(epochs=2)
    assert first.fit([data[0]], few) == second.fit([data[0]], few)
    assert np.array_equal(first.predict(data[1].plans), second.predict(data[1].plans))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_survives_being_stored(kind, data):
    simulator = Simulator(kind, hidden=8)
    simulator.fit([data[0]], TrainingSchedule(epochs=2))
    again = Simulator.from_bytes(simulator.to_bytes(), "stored")
    assert np.array_equal(again.predict(data[1].plans), simulator.predict(data[1].plans))
    assert again.trained_on == 60


def test_a_bad_state_is_refused():
    with pytest.raises(OffbeatError, match="stored: not a simulator state"):
        Simulator.from_bytes(b"nothing", "stored")
    buffer = io.BytesIO()
    np.savez(buffer, header=np.array([{"a": 1}], dtype=object))
    with pytest.raises(OffbeatError, match="stored: not a simulator state"):
        Simulator.from_bytes(buffer.getvalue(), "stored")


def test_bad_samples_are_refused(data):
    with pytest.raises(OffbeatError, match="60 plans have 1 times"):
        Samples(data[0].plans, [1.0])
    with pytest.raises(OffbeatError, match="no domain has two plans"):
        Simulator("linear").fit([Samples(data[0].plans[:1], [1.0])])
    with pytest.raises(OffbeatError, match="simulator: 'tree' is not one of"):
        Simulator("tree")  # type: ignore[arg-type]
