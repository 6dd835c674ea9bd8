"""The encoder-decoder Transformer, base size (Vaswani et al. 2017).

Layers are laid out as in sockeye, which PACE timed: norms before each sublayer and one at the end of each stack, no
biases in attention, queries, keys and values of self-attention in one matrix.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.zoo.attention import additive_mask, attend
from offbeat.zoo.scaling import Inputs, check_dropout, check_positive, depth, heads, length, samples, width

PADDING = 0


class FeedForward(nn.Module):
    """Two dense layers with ReLU between them."""

    def __init__(self, size: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(size, inner)
        self.contract = nn.Linear(inner, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(self.dropout(F.relu(self.expand(x))))


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, size: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = head_count, dropout
        self.project = nn.Linear(size, 3 * size, bias=False)
        self.merge = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        dropout = self.dropout if self.training else 0.0
        return self.merge(attend(query, key, value, self.heads, mask=mask, causal=causal, dropout=dropout))


class CrossAttention(nn.Module):
    """Attention of the target sequence to the encoded source."""

    def __init__(self, size: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = head_count, dropout
        self.query = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size, bias=False)
        self.merge = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        return self.merge(attend(query, key, value, self.heads, mask=mask, dropout=dropout))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, size: int, head_count: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size), SelfAttention(size, head_count, dropout)
        self.norm2, self.feed_forward = nn.LayerNorm(size), FeedForward(size, inner, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, then feed-forward."""

    def __init__(self, size: int, head_count: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size), SelfAttention(size, head_count, dropout)
        self.norm2, self.source_attention = nn.LayerNorm(size), CrossAttention(size, head_count, dropout)
        self.norm3, self.feed_forward = nn.LayerNorm(size), FeedForward(size, inner, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), causal=True))
        x = x + self.dropout(self.source_attention(self.norm2(x), memory, mask))
        return x + self.dropout(self.feed_forward(self.norm3(x)))


class Transformer(nn.Module):
    """Source and target tokens → label-smoothed cross-entropy of the next target tokens."""

    def __init__(
        self,
        vocabulary: int,
        size: int,
        head_count: int,
        inner: int,
        layers: int,
        longest: int,
        shared_embeddings: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(size)
        self.source_embedding = nn.Embedding(vocabulary, size)
        self.target_embedding = self.source_embedding if shared_embeddings else nn.Embedding(vocabulary, size)
        self.encoder = nn.ModuleList(EncoderLayer(size, head_count, inner, dropout) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(size)
        self.decoder = nn.ModuleList(DecoderLayer(size, head_count, inner, dropout) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, vocabulary, bias=not shared_embeddings)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", sinusoids(longest, size), persistent=False)
        self._initialise()
        if shared_embeddings:
            self.output.weight = self.source_embedding.weight

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)

    def _embed(self, embedding: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(embedding(tokens) * self.scale + self.positions[: tokens.shape[1]])

    def forward(self, source: torch.Tensor, target: torch.Tensor, next_target: torch.Tensor) -> torch.Tensor:
        memory = self._embed(self.source_embedding, source)
        mask = additive_mask(source != PADDING, memory)
        for encoder_layer in self.encoder:
            memory = encoder_layer(memory, mask)
        memory = self.encoder_norm(memory)
        x = self._embed(self.target_embedding, target)
        for decoder_layer in self.decoder:
            x = decoder_layer(x, memory, mask)
        logits = self.output(self.decoder_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), next_target.flatten(), ignore_index=PADDING, label_smoothing=0.1)


def sinusoids(count: int, size: int) -> torch.Tensor:
    """The paper's fixed position encodings, sines in the first half of the features and cosines in the second."""
    half = size // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10000.0) / max(1, half - 1)))
    angles = torch.arange(count)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1)


def transformer(
    scale: float,
    batch: int | None,
    *,
    vocabulary: int = 37_000,
    shared_embeddings: bool = True,
    dropout: float = 0.0,
) -> tuple[nn.Module, Inputs]:
    """63,047,680 parameters in 161 tensors (AutoSync: 62M); 80 sentences of 64 tokens, about AutoSync's 5K tokens.

    One matrix embeds the 37,000 shared tokens of both languages and predicts the output, as published. With
    `shared_embeddings=False, vocabulary=31_000` it is the model of PACE's table II: 91.8 million in 164 tensors.
    Published dropout: 0.1.
    """
    check_positive(vocabulary, "vocabulary", whole=True)
    if vocabulary < 2:
        raise OffbeatError(f"vocabulary: {vocabulary!r} must be at least 2, the padding and one word")
    head_count, head_size = heads(8, 64, scale)
    tokens = length(vocabulary, scale)
    longest = length(64, scale)
    model = Transformer(
        tokens,
        head_count * head_size,
        head_count,
        width(2048, scale),
        depth(6, scale),
        longest,
        shared_embeddings,
        check_dropout(dropout),
    )
    shape = (samples(80, scale, batch), longest)
    return model, tuple(torch.randint(PADDING + 1, tokens, shape) for _ in range(3))
