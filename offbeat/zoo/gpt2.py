"""GPT-2 (Radford et al. 2019): a causal language model whose output layer is the embedding."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.attention import attend
from offbeat.zoo.scaling import Inputs, check_dropout, check_positive, depth, heads, length, samples

VOCABULARY = 50_257
CONTEXT = 1024


class Block(nn.Module):
    """Norm and causal attention, norm and feed-forward, each added to the stream."""

    def __init__(self, size: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = head_count, dropout
        self.norm1 = nn.LayerNorm(size)
        self.project = nn.Linear(size, 3 * size)
        self.merge = nn.Linear(size, size)
        self.norm2 = nn.LayerNorm(size)
        self.expand = nn.Linear(size, 4 * size)
        self.contract = nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm1(x)).chunk(3, -1)
        dropout = self.attention_dropout if self.training else 0.0
        x = x + self.dropout(self.merge(attend(query, key, value, self.heads, causal=True, dropout=dropout)))
        inner = F.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.contract(inner))


class GPT2(nn.Module):
    """Tokens and the tokens that follow them → cross-entropy."""

    def __init__(
        self, vocabulary: int, size: int, head_count: int, layers: int, context: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary, size)
        self.position_embedding = nn.Embedding(context, size)
        self.blocks = nn.ModuleList(Block(size, head_count, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head.weight = self.word_embedding.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            # Keeps the variance of the residual stream independent of the depth.
            for layer in (block.merge, block.contract):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.word_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())


def gpt2(scale: float, batch: int | None, *, sequence: int = CONTEXT, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """124,439,808 parameters: 12 layers, 768 features, 12 heads; batch 8 of 1024 tokens. Published dropout: 0.1."""
    return _build(12, 12, scale, batch, sequence, dropout)


def gpt2_medium(
    scale: float, batch: int | None, *, sequence: int = CONTEXT, dropout: float = 0.0
) -> tuple[nn.Module, Inputs]:
    """354,823,168 parameters: 24 layers, 1024 features, 16 heads; batch 8 of 1024 tokens. Published dropout: 0.1."""
    return _build(24, 16, scale, batch, sequence, dropout)


def gpt2_xl(
    scale: float, batch: int | None, *, sequence: int = CONTEXT, dropout: float = 0.0
) -> tuple[nn.Module, Inputs]:
    """1,557,611,200 parameters: 48 layers, 1600 features, 25 heads; batch 8 of 1024 tokens. Published dropout: 0.1."""
    return _build(48, 25, scale, batch, sequence, dropout)


def _build(
    layers: int, head_count: int, scale: float, batch: int | None, sequence: int, dropout: float
) -> tuple[nn.Module, Inputs]:
    check_positive(sequence, "sequence", whole=True)
    head_count, head_size = heads(head_count, 64, scale)
    vocabulary = length(VOCABULARY, scale)
    tokens = length(sequence, scale)
    context = max(tokens, length(CONTEXT, scale))
    model = GPT2(vocabulary, head_count * head_size, head_count, depth(layers, scale), context, check_dropout(dropout))
    shape = (samples(8, scale, batch), tokens)
    return model, (torch.randint(vocabulary, shape), torch.randint(vocabulary, shape))
