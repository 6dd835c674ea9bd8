"""Training scripts as they are: each gives what averaging gradients by hand gives, bit for bit."""

import pytest
from guest_changes import OWNERS_REFUSE
from guests import PATTERNS
from harness import Pools

STRATEGIES = ("overlap", "ps_load_balanced", "sharded", "partitioned_ps", "ddp")
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
        assert answer["equal"] or (rounds and answer["error"] < 1e-15), answer
        assert answer["trained"]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("ddp before", "wrapped in DistributedDataParallel: remove the wrapper"),
        ("ddp after", "Offbeat already distributes this model: remove DistributedDataParallel"),
        ("fsdp before", "already sharded"),
        ("fsdp after", "Offbeat already distributes this model: remove FSDP"),
        ("zero redundancy", "pass the wrapped optimizer, and strategy='sharded'"),
        ("absent later", "find_unused_parameters=True"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(pools: Pools, what: str, sentence: str) -> None:
    for answer in pools(2).call("mistake", what=what):
        assert sentence in answer["refused"]
