"""The zoo's models have the published sizes, train, and can be captured."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from cases import mostly_slow

from offbeat import zoo
from offbeat.errors import OffbeatError
from offbeat.zoo import blocks

# Trainable parameters and tensors at full size.
PUBLISHED = {
    "vgg16": (138_357_544, 32),
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "inception_v3": (23_834_568, 284),
    "densenet121": (7_978_856, 364),
    "wide_resnet": (68_883_240, 161),
    "transformer": (63_047_680, 161),
    "seq2seq": (67_192_164, 32),
    "ncf_dense": (122_122_801, 10),
    "ncf_sparse": (122_122_801, 10),
    "lm1b": (832_213_886, 13),
    "bert_3l": (10_884_884, 62),
    "bert_6l": (36_223_564, 110),
    "bert_base": (110_106_428, 206),
    "bert_large": (336_226_108, 398),
    "gpt2": (124_439_808, 148),
    "gpt2_medium": (354_823_168, 292),
    "gpt2_large": (774_030_080, 436),
    "gpt2_xl": (1_557_611_200, 580),
    "llama_1b": (1_235_814_400, 146),
    "mlp": (2_383_370, 8),
}
# Millions of parameters as the papers print them: AutoSync's table 1 and PACE's table II.
PAPERS = {
    "resnet101": 45,
    "inception_v3": 24,
    "vgg16": 138,
    "densenet121": 8,
    "ncf_dense": 122,
    "ncf_sparse": 122,
    "seq2seq": 67,
    "bert_3l": 11,
    "bert_6l": 36,
    "bert_base": 110,
}
BATCHES = {"vgg16": 32, "bert_3l": 32, "bert_large": 8, "ncf_dense": 256, "gpt2": 8}
SMALL = 0.05
QUICK = ("vgg16", "densenet121", "transformer", "ncf_sparse", "lm1b", "bert_3l", "gpt2", "llama_1b", "mlp")


def _on_meta(name: str, scale: float = 1.0, **options: object) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        return zoo.build(name, scale, **options)


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_names_cover_the_papers_models() -> None:
    assert set(zoo.names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", zoo.names())
def test_full_size_has_the_published_parameters(name: str) -> None:
    model, _ = _on_meta(name)
    assert (_count(model), len(list(model.parameters()))) == PUBLISHED[name]
    assert all(parameter.requires_grad for parameter in model.parameters())
    if name in PAPERS:
        assert round(_count(model) / 1e6) == PAPERS[name]


def test_full_size_batches_are_the_papers() -> None:
    for name, batch in BATCHES.items():
        assert _on_meta(name)[1][0].shape[0] == batch
    tokens = _on_meta("transformer")[1][0].numel()
    assert tokens == pytest.approx(5000, rel=0.05)
    assert _on_meta("seq2seq")[1][0].numel() == 4096


def test_options_build_the_other_papers_variants() -> None:
    pace, _ = _on_meta("transformer", shared_embeddings=False, vocabulary=31_000)
    assert round(_count(pace) / 1e6, 1) == 91.8
    assert len(list(pace.parameters())) == 164
    tensoropt, _ = _on_meta("wide_resnet", width=12.25)
    assert round(_count(tensoropt) * 4 / 1e9, 1) == 7.3
    assert _count(_on_meta("wide_resnet", width=1)[0]) == PUBLISHED["resnet50"][0]


@pytest.mark.parametrize("name", zoo.names())
def test_size_and_batch_grow_with_scale(name: str) -> None:
    sizes = []
    for scale in (1e-4, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0):
        model, inputs = _on_meta(name, scale)
        sizes.append((_count(model), len(list(model.parameters())), sum(tensor.numel() for tensor in inputs)))
    for smaller, larger in pairwise(sizes):
        assert all(a <= b for a, b in zip(smaller, larger, strict=True))
    assert sizes[0][0] < sizes[-1][0] / 10


@pytest.mark.parametrize("name", zoo.names())
def test_scale_keeps_the_kinds_of_layers_and_tied_weights(name: str) -> None:
    full, small = _on_meta(name)[0], _on_meta(name, SMALL)[0]
    assert {type(module) for module in full.modules()} == {type(module) for module in small.modules()}
    assert _tied(full) == _tied(small)


def _tied(model: torch.nn.Module) -> int:
    return len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("transformer", 2), ("bert_base", 1), ("gpt2", 1), ("llama_1b", 1), ("vgg16", 0), ("seq2seq", 0)],
)
def test_output_layers_are_tied_to_embeddings_where_published(name: str, expected: int) -> None:
    assert _tied(_on_meta(name)[0]) == expected


@pytest.mark.parametrize("name", mostly_slow(zoo.names(), QUICK))
def test_small_model_trains(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = zoo.build(name, SMALL)
    first = model(*inputs)
    assert first.shape == ()
    first.backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        assert torch.isfinite(values).all(), path
        assert values.abs().sum() > 0, path
    optimizers = _optimizers(model)
    for _ in range(20):
        loss = model(*inputs)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert model(*inputs).item() < 0.98 * first.item()


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    sparse = [p for p in model.parameters() if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    return [torch.optim.Adam(dense, lr=3e-3)] + ([torch.optim.SparseAdam(sparse, lr=3e-3)] if sparse else [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncf_sparse", {"user_embedding.weight", "item_embedding.weight"}),
        ("ncf_dense", set()),
        ("lm1b", {"embedding.weight", "softmax_weight.weight", "softmax_bias.weight"}),
        ("bert_base", set()),
    ],
)
def test_sparse_models_give_sparse_gradients(name: str, expected: set[str]) -> None:
    model, inputs = zoo.build(name, 0.01)
    model(*inputs).backward()
    assert {path for path, parameter in model.named_parameters() if parameter.grad.is_sparse} == expected


def test_sampled_softmax_is_the_softmax_when_every_word_is_sampled() -> None:
    from offbeat.zoo.recurrent import SampledLanguageModel

    torch.manual_seed(0)
    model = SampledLanguageModel(32, 8, 16, 1)
    # Uniform corrections cancel, so the loss must be the plain cross-entropy.
    model._log_probability = torch.zeros_like
    words, next_words = torch.randint(32, (3, 5)), torch.randint(32, (3, 5))
    hidden, _ = model.lstm(model.embedding(words))
    logits = hidden @ model.softmax_weight.weight.T + model.softmax_bias.weight.squeeze(1)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_words.flatten())
    torch.testing.assert_close(model(words, next_words, torch.arange(32)), plain)


def test_log_uniform_probabilities_sum_to_one() -> None:
    from offbeat.zoo.recurrent import SampledLanguageModel

    total = SampledLanguageModel(100, 8, 16, 1)._log_probability(torch.arange(100)).exp().sum()
    torch.testing.assert_close(total, torch.tensor(1.0))


def test_transformer_ignores_padding_and_the_future() -> None:
    torch.manual_seed(0)
    model, (source, target, following) = zoo.build("transformer", SMALL, batch=2)
    with torch.no_grad():
        short = source[:, :-2]
        padded = torch.cat((short, torch.zeros_like(source[:, -2:])), 1)
        torch.testing.assert_close(model(padded, target, following), model(short, target, following))
        assert model(source, target, following) != model(padded, target, following)
        first_only = torch.zeros_like(following)
        first_only[:, 0] = following[:, 0]
        other_future = torch.cat((target[:, :1], target[:, 1:].flip(1)), 1)
        torch.testing.assert_close(model(source, other_future, first_only), model(source, target, first_only))
        assert model(source, other_future, following) != model(source, target, following)


def test_bert_ignores_padding() -> None:
    torch.manual_seed(0)
    model, (tokens, segments, keep, positions, words, is_next) = zoo.build("bert_3l", SMALL, batch=2)
    positions, keep = positions % 4, keep.clone()
    keep[:, 4:] = False
    other = torch.cat((tokens[:, :4], tokens[:, 4:].flip(1)), 1)
    with torch.no_grad():
        loss = model(tokens, segments, keep, positions, words, is_next)
        torch.testing.assert_close(model(other, segments, keep, positions, words, is_next), loss)
        seen = torch.ones_like(keep)
        assert model(other, segments, seen, positions, words, is_next) != loss


def test_llama_sees_distances_and_not_the_future() -> None:
    from offbeat.zoo.llama import Llama, rotated

    torch.manual_seed(0)
    model = Llama(100, 16, 8, 16, 32, 2)
    assert model.blocks[0].key.out_features == model.blocks[0].query.out_features // 4
    query, key = torch.randn(2, 1, 1, 16).expand(2, 1, 16, 16)
    turned = [rotated(each, 1, model.cosines, model.sines) for each in (query, key)]
    scores = (turned[0] @ turned[1].transpose(1, 2))[0]
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:])
    assert not torch.allclose(scores[0], scores[0, 0])
    tokens, following = torch.randint(100, (2, 1, 8))
    other = torch.cat((tokens[:, :5], 99 - tokens[:, 5:]), 1)
    states = []
    model.norm.register_forward_hook(lambda _, __, state: states.append(state))
    with torch.no_grad():
        model(tokens, following)
        model(other, following)
    torch.testing.assert_close(states[0][:, :5], states[1][:, :5])
    assert not torch.allclose(states[0][:, 5:], states[1][:, 5:])


@pytest.mark.parametrize("name", ["resnet50", "densenet121", "inception_v3", "transformer", "lm1b"])
def test_single_sample_trains(name: str) -> None:
    model, inputs = zoo.build(name, 0.02, batch=1)
    loss = model(*inputs)
    loss.backward()
    assert torch.isfinite(loss)


def test_batch_is_what_was_asked() -> None:
    for name in zoo.names():
        assert _on_meta(name, 0.1, batch=5)[1][0].shape[0] == 5


def test_dropout_is_off_unless_asked() -> None:
    torch.manual_seed(0)
    for dropout, same in ((0.0, True), (0.5, False)):
        model, inputs = zoo.build("gpt2", 0.02, dropout=dropout)
        assert (model(*inputs).item() == model(*inputs).item()) is same


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "alexnet"}, "'alexnet'.*vgg16.*mlp"),
        ({"name": "mlp", "scale": 0}, "scale: 0 "),
        ({"name": "mlp", "scale": 1.5}, "scale: 1.5"),
        ({"name": "mlp", "scale": float("nan")}, "scale: nan"),
        ({"name": "mlp", "scale": "big"}, "scale: 'big'"),
        ({"name": "mlp", "scale": True}, "scale: True"),
        ({"name": "mlp", "batch": 0}, "batch: 0"),
        ({"name": "mlp", "batch": 2.5}, "batch: 2.5"),
        ({"name": "mlp", "batch": True}, "batch: True"),
        ({"name": "mlp", "width": 2}, "width: model 'mlp' has no such option; it has dropout"),
        ({"name": "mlp", "dropout": 1.0}, "dropout: 1.0"),
        ({"name": "wide_resnet", "width": -1}, "width: -1"),
        ({"name": "transformer", "vocabulary": 1}, "vocabulary: 1 "),
        ({"name": "bert_base", "sequence": 2.5}, "sequence: 2.5"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OffbeatError, match=message):
        zoo.build(**arguments)  # type: ignore[arg-type]


def test_scaling_functions_keep_full_size_exact() -> None:
    for size in (1, 7, 65, 66, 1000):
        assert blocks.width(size, 1.0) == size
        assert blocks.length(size, 1.0) == size
        assert blocks.depth(size, 1.0) == size
        assert blocks.samples(size, 1.0, None) == size
    assert blocks.heads(25, 64, 1.0) == (25, 64)


def test_listing_names_does_not_import_torch() -> None:
    check = "import sys; from offbeat import zoo; zoo.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("name", mostly_slow(zoo.names(), QUICK))
def test_small_model_captures_by_the_joint_path(name: str) -> None:
    graph = zoo.capture(name, SMALL)
    model, inputs = _on_meta(name, SMALL)
    assert graph.name == name
    assert graph.source == "joint"
    assert graph.parameter_count == _count(model)
    assert len(graph.variables) == len(list(model.parameters()))
    assert all(variable.gradient_from is not None for variable in graph.variables)
    assert len(graph.inputs) == len(inputs)
    assert graph.phase("backward")


def test_captured_graph_knows_which_gradients_are_sparse() -> None:
    sparse = {variable.name for variable in zoo.capture("ncf_sparse", SMALL).variables if variable.sparse}
    assert sparse == {"user_embedding.weight", "item_embedding.weight"}
    assert not any(variable.sparse for variable in zoo.capture("ncf_dense", SMALL).variables)


FULL_SIZE = """
import resource, time
from offbeat import zoo
start = time.perf_counter()
graph = zoo.capture("bert_large")
seconds = time.perf_counter() - start
print(graph.source, graph.parameter_count, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_bert_large_is_captured_without_its_weights() -> None:
    run = subprocess.run([sys.executable, "-c", FULL_SIZE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    source, parameters, seconds, peak_kib = run.stdout.split()
    assert source == "joint"
    assert int(parameters) == PUBLISHED["bert_large"][0]
    assert float(seconds) < 60
    assert int(peak_kib) < 2 * 2**20
