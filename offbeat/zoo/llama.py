"""Llama: rotary positions, RMS norms, gated feed-forward, and attention whose heads share keys and values.

Sizes are those of Llama 3.2 1B (Grattafiori et al. 2024), whose output layer is the embedding.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.zoo.blocks import Built, attend, depth, heads, initialise, length, samples, width

VOCABULARY = 128_256
ROTARY_BASE = 500_000.0
SHARING = 4
"""Heads of queries for each head of keys and values."""


class LlamaBlock(nn.Module):
    """Norm and causal attention, norm and gated feed-forward, each added to the stream."""

    def __init__(self, size: int, head_count: int, shared: int, inner: int) -> None:
        super().__init__()
        self.heads, self.shared = head_count, shared
        grouped = size // shared
        self.norm1 = nn.RMSNorm(size, eps=1e-5)
        self.query, self.merge = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(size, grouped, bias=False) for _ in range(2))
        self.norm2 = nn.RMSNorm(size, eps=1e-5)
        self.gate, self.expand = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.contract = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        normed = self.norm1(x)
        query = rotated(self.query(normed), self.heads, cosines, sines)
        key = rotated(self.key(normed), self.heads // self.shared, cosines, sines)
        key, value = (self._repeated(each) for each in (key, self.value(normed)))
        x = x + self.merge(attend(query, key, value, self.heads, causal=True))
        inner = self.norm2(x)
        return x + self.contract(F.silu(self.gate(inner)) * self.expand(inner))

    def _repeated(self, x: Tensor) -> Tensor:
        """Each head of keys or values as often as heads of queries share it."""
        return x.unflatten(-1, (self.heads // self.shared, -1)).repeat_interleave(self.shared, 2).flatten(2)


class Llama(nn.Module):
    """Tokens and the tokens that follow them → cross-entropy."""

    def __init__(self, vocabulary: int, context: int, head_count: int, head_size: int, inner: int, layers: int) -> None:
        super().__init__()
        size, shared = head_count * head_size, SHARING if head_count % SHARING == 0 else 1
        self.embedding = nn.Embedding(vocabulary, size)
        self.blocks = nn.ModuleList(LlamaBlock(size, head_count, shared, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(size, eps=1e-5)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        normal = partial(nn.init.normal_, std=0.02)
        initialise(self, {nn.Linear: normal, nn.Embedding: normal})
        rates = ROTARY_BASE ** -(torch.arange(0, head_size, 2) / head_size)
        angles = (torch.arange(context)[:, None] * rates).repeat(1, 2)[:, None]
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, next_tokens: Tensor) -> Tensor:
        x, here = self.embedding(tokens), slice(tokens.shape[1])
        for block in self.blocks:
            x = block(x, self.cosines[here], self.sines[here])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), next_tokens.flatten())


def rotated(x: Tensor, head_count: int, cosines: Tensor, sines: Tensor) -> Tensor:
    """(batch, length, features), the pairs of each head's features turned by an angle that grows with the position."""
    x = x.unflatten(-1, (head_count, -1))
    first, second = x.chunk(2, -1)
    return (x * cosines + torch.cat((-second, first), -1) * sines).type_as(x).flatten(2)


def llama_1b(scale: float, batch: int | None, *, sequence: int = 1024) -> Built:
    """1,235,814,400 parameters in 146 tensors; 8 sequences of 1024 tokens."""
    head_count, head_size = heads(32, 64, scale)
    vocabulary, tokens = length(VOCABULARY, scale), length(sequence, scale)
    model = Llama(vocabulary, tokens, head_count, head_size, width(8192, scale), depth(16, scale))
    shape = (samples(8, scale, batch), tokens)
    return model, (torch.randint(vocabulary, shape), torch.randint(vocabulary, shape))
