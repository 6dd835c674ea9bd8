"""Training scripts as they are: each gives what averaging gradients by hand gives, bit for bit."""

import pytest
from guest_changes import OWNERS_REFUSE
from guests import PATTERNS
from harness import Pools

STRATEGIES = ("overlap", "ps_load_balanced", "sharded", "partitioned_ps", "ddp")
SINGLE_PRECISION = ("mixed_precision", "converted_for_good")
CASES = [
    pytest.param(pattern, strategy, marks=() if strategy == "overlap" else pytest.mark.slow)
    for pattern in PATTERNS
    for strategy in STRATEGIES
    if strategy in ("overlap", "ddp") or pattern not in OWNERS_REFUSE
]


@pytest.mark.parametrize(("pattern", "strategy"), CASES)
def test_pattern_equals_averaging_by_hand(pools: Pools, pattern: str, strategy: str) -> None:
    for answer in pools(2).call("guest", name=pattern, strategy=strategy):
        # A rank that updates a part of a variable may round its last elements otherwise than one that updates all.
        # Rows of an embedding that occur several times are summed in another order than by hand.
        rounds = strategy == "sharded" or pattern == "sparse_embeddings"
        error = 1e-6 if pattern in SINGLE_PRECISION else 1e-15
        assert answer["equal"] or (rounds and answer["error"] < error), answer
        assert answer["trained"]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(("strategy", "mode"), [("overlap", "deferred"), ("ddp", "barrier")])
def test_a_plain_loop_equals_torchs_ddp_bit_for_bit(pools: Pools, strategy: str, mode: str, optimizer: str) -> None:
    for answer in pools(2).call("as_with_ddp", optimizer=optimizer, strategy=strategy):
        assert answer == {"equal": True, "mode": mode}


@pytest.mark.parametrize("kind", ["split", "fsdp"])
def test_models_that_are_spread_over_ranks_have_module_and_no_sync(pools: Pools, kind: str) -> None:
    for answer in pools(2).call("spread_as_with_ddp", kind=kind):
        assert max(answer.values()) < 1e-10


WRAPPED = "wrapped in DistributedDataParallel: remove the wrapper"
SENTENCES = {
    "ddp before": WRAPPED,
    "ddp after": "Offbeat already distributes this model: remove DistributedDataParallel",
    "ddp around a wrapper of": "Offbeat already distributes the module 'inner' in it: remove DistributedDataParallel",
    "a wrapper of": "its module 'inner' is distributed by Offbeat already",
    "fsdp around a wrapper of": ": remove F",
}
SPREAD = {
    "Join of {}": "join() needs a whole model on every rank",
    "join of {}": "join() needs a whole model on every rank",
    "a copy of {}": "call state_dict() on every rank, and load the result into a plain model",
    "a pickle of {}": "call state_dict() on every rank, and load the result into a plain model",
    "{} twice": "which cannot be undone: distribute a new one",
}
SHARED = ("Join of", "join of", "a copy of", "a pickle of")
KINDS = ("overlap", "split", "fsdp")
TORCHS = ("fsdp around a wrapper of", "fsdp")
"""What torch refuses itself."""


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        *((f"{what} {kind}", text) for what, text in SENTENCES.items() for kind in KINDS if (what, kind) != TORCHS),
        *((what.format("split"), sentence) for what, sentence in SPREAD.items()),
        ("fsdp twice", SPREAD["{} twice"]),
        # The code is that of split operators.
        *(pytest.param(f"{what} fsdp", SPREAD[f"{what} {{}}"], marks=pytest.mark.slow) for what in SHARED),
        ("Join of overlap", "use `with model.join():`"),
        ("a part of a distributed model", "belongs to another model that Offbeat distributes"),
        ("fsdp before", "already sharded"),
        ("fsdp after", "Offbeat already distributes this model: remove FSDP"),
        ("fsdp with original parameters inside", "its module 'inner' is wrapped in FullyShardedDataParallel"),
        ("zero redundancy", "pass the wrapped optimizer, and strategy='sharded'"),
        ("absent later", "find_unused_parameters=True"),
        ("join with another divisor", "always divide by the number of all ranks"),
        ("join that throws", "ranks without data follow the others"),
        ("a closure in join", "step() with a closure inside join()"),
        ("frozen in join", "has changed inside join()"),
        ("asynchronous in join", "join() is for synchronous strategies"),
        ("a checkpoint used more often later", "needs use_reentrant=False"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(pools: Pools, what: str, sentence: str) -> None:
    for answer in pools(2).call("mistake", what=what):
        assert sentence in answer["refused"]
