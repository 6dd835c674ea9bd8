"""Transformers: BERT, GPT-2 and the original encoder-decoder.

BERT's pretraining (Devlin et al. 2019) guesses masked words through a decoder tied to the embedding, and the next
sentence. GPT-2 (Radford et al. 2019) is a causal language model whose output layer is the embedding. The
encoder-decoder (Vaswani et al. 2017, base size) is laid out as in sockeye, which PACE timed: norms before each sublayer
and one at the end of each stack, no biases in attention, queries, keys and values of self-attention in one matrix.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.zoo.blocks import Built, additive_mask, attend, depth, heads, initialise, length, samples, width

BERT_VOCABULARY = 30_522
POSITIONS = 512
SEGMENTS = 2
# The original pretraining data masks at most 20 of 128 tokens.
MASKED_PER_TOKEN = 20 / 128


class BertLayer(nn.Module):
    """Self-attention and feed-forward, each followed by its norm."""

    def __init__(self, size: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.heads = head_count
        self.query, self.key, self.value, self.merge = (nn.Linear(size, size) for _ in range(4))
        self.norm1 = nn.LayerNorm(size, eps=1e-12)
        self.expand = nn.Linear(size, 4 * size)
        self.contract = nn.Linear(4 * size, size)
        self.norm2 = nn.LayerNorm(size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = attend(self.query(x), self.key(x), self.value(x), self.heads, mask=mask, dropout=self.dropout)
        x = self.norm1(x + self.dropout(self.merge(attended)))
        return self.norm2(x + self.dropout(self.contract(F.gelu(self.expand(x)))))


class Bert(nn.Module):
    """Tokens of two segments → loss of the masked words plus loss of the next-sentence guess."""

    def __init__(self, vocabulary: int, positions: int, head_count: int, size: int, layers: int, dropout: float):
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary, size)
        self.position_embedding = nn.Embedding(positions, size)
        self.segment_embedding = nn.Embedding(SEGMENTS, size)
        self.embedding_norm = nn.LayerNorm(size, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(size, head_count, dropout) for _ in range(layers))
        self.pooler = nn.Linear(size, size)
        self.next_sentence = nn.Linear(size, 2)
        self.transform = nn.Linear(size, size)
        self.transform_norm = nn.LayerNorm(size, eps=1e-12)
        self.decoder = nn.Linear(size, vocabulary)
        self.dropout = nn.Dropout(dropout)
        truncated = partial(nn.init.trunc_normal_, std=0.02, a=-0.04, b=0.04)
        initialise(self, {nn.Linear: truncated, nn.Embedding: truncated})
        self.decoder.weight = self.word_embedding.weight

    def forward(
        self, tokens: Tensor, segments: Tensor, keep: Tensor, masked_at: Tensor, masked_words: Tensor, is_next: Tensor
    ) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word_embedding(tokens) + self.position_embedding(positions) + self.segment_embedding(segments)
        x = self.dropout(self.embedding_norm(x))
        mask = additive_mask(keep, x)
        for layer in self.layers:
            x = layer(x, mask)
        masked = x.gather(1, masked_at[:, :, None].expand(-1, -1, x.shape[2]))
        words = self.decoder(self.transform_norm(F.gelu(self.transform(masked))))
        pooled = self.dropout(torch.tanh(self.pooler(x[:, 0])))
        word_loss = F.cross_entropy(words.flatten(0, 1), masked_words.flatten())
        return word_loss + F.cross_entropy(self.next_sentence(pooled), is_next)


def _bert(
    layers: int,
    head_count: int,
    head_size: int,
    published_batch: int,
    scale: float,
    batch: int | None,
    *,
    sequence: int = 128,
    dropout: float = 0.0,
) -> Built:
    head_count, head_size = heads(head_count, head_size, scale)
    vocabulary, tokens = length(BERT_VOCABULARY, scale), length(sequence, scale)
    positions = max(tokens, length(POSITIONS, scale))
    model = Bert(vocabulary, positions, head_count, head_count * head_size, depth(layers, scale), dropout)
    count = samples(published_batch, scale, batch)
    masked = max(1, round(tokens * MASKED_PER_TOKEN))
    return model, (
        torch.randint(vocabulary, (count, tokens)),
        torch.randint(SEGMENTS, (count, tokens)),
        torch.ones(count, tokens, dtype=torch.bool),
        torch.randint(tokens, (count, masked)),
        torch.randint(vocabulary, (count, masked)),
        torch.randint(2, (count,)),
    )


# Layers, heads, features of a head, batch. The published dropout is 0.1.
bert_3l = partial(_bert, 3, 4, 66, 32)
"""AutoSync's BERT-3L (11M): 10,884,884 parameters, hidden size 264."""
bert_6l = partial(_bert, 6, 8, 65, 32)
"""AutoSync's BERT-6L (36M): 36,223,564 parameters, hidden size 520."""
bert_base = partial(_bert, 12, 12, 64, 32)
"""110,106,428 parameters, hidden size 768."""
bert_large = partial(_bert, 24, 16, 64, 8)
"""336,226,108 parameters, hidden size 1024."""


GPT2_VOCABULARY = 50_257
CONTEXT = 1024


class GPT2Block(nn.Module):
    """Norm and causal attention, norm and feed-forward, each added to the stream."""

    def __init__(self, size: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.heads = head_count
        self.norm1 = nn.LayerNorm(size)
        self.project = nn.Linear(size, 3 * size)
        self.merge = nn.Linear(size, size)
        self.norm2 = nn.LayerNorm(size)
        self.expand = nn.Linear(size, 4 * size)
        self.contract = nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(self.norm1(x)).chunk(3, -1)
        x = x + self.dropout(self.merge(attend(query, key, value, self.heads, causal=True, dropout=self.dropout)))
        inner = F.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.contract(inner))


class GPT2(nn.Module):
    """Tokens and the tokens that follow them → cross-entropy."""

    def __init__(self, vocabulary: int, context: int, head_count: int, size: int, layers: int, dropout: float):
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary, size)
        self.position_embedding = nn.Embedding(context, size)
        self.blocks = nn.ModuleList(GPT2Block(size, head_count, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head.weight = self.word_embedding.weight
        normal = partial(nn.init.normal_, std=0.02)
        initialise(self, {nn.Linear: normal, nn.Embedding: normal})
        for block in self.blocks:
            # Keeps the variance of the residual stream independent of the depth.
            for layer in (block.merge, block.contract):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor, next_tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.word_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())


def _gpt2(
    layers: int, head_count: int, scale: float, batch: int | None, *, sequence: int = CONTEXT, dropout: float = 0.0
) -> Built:
    head_count, head_size = heads(head_count, 64, scale)
    vocabulary, tokens = length(GPT2_VOCABULARY, scale), length(sequence, scale)
    context = max(tokens, length(CONTEXT, scale))
    model = GPT2(vocabulary, context, head_count, head_count * head_size, depth(layers, scale), dropout)
    shape = (samples(8, scale, batch), tokens)
    return model, (torch.randint(vocabulary, shape), torch.randint(vocabulary, shape))


# Layers and heads of 64 features; batch 8 of 1024 tokens. The published dropout is 0.1.
gpt2 = partial(_gpt2, 12, 12)
"""124,439,808 parameters."""
gpt2_medium = partial(_gpt2, 24, 16)
"""354,823,168 parameters."""
gpt2_large = partial(_gpt2, 36, 20)
"""774,030,080 parameters."""
gpt2_xl = partial(_gpt2, 48, 25)
"""1,557,611,200 parameters."""


PADDING = 0


class FeedForward(nn.Module):
    """Two dense layers with ReLU between them."""

    def __init__(self, size: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(size, inner)
        self.contract = nn.Linear(inner, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.dropout(F.relu(self.expand(x))))


class Attention(nn.Module):
    """Attention of a sequence to itself, or of the target to the encoded source (`cross`)."""

    def __init__(self, size: int, head_count: int, dropout: float, cross: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout = head_count, nn.Dropout(dropout)
        if cross:
            self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        else:
            self.project = nn.Linear(size, 3 * size, bias=False)
        self.merge = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, **masked: Any) -> Tensor:
        if memory is None:
            query, key, value = self.project(x).chunk(3, -1)
        else:
            query, key, value = self.query(x), self.key(memory), self.value(memory)
        return self.merge(attend(query, key, value, self.heads, dropout=self.dropout, **masked))


class Layer(nn.Module):
    """Self-attention and feed-forward; a decoder's layer, whose self-attention is causal, reads the source between."""

    def __init__(self, size: int, head_count: int, inner: int, dropout: float, decodes: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size), Attention(size, head_count, dropout)
        self.norm2 = nn.LayerNorm(size)
        if decodes:
            self.source_attention = Attention(size, head_count, dropout, cross=True)
            self.norm3 = nn.LayerNorm(size)
        self.feed_forward = FeedForward(size, inner, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        own = {"mask": mask} if memory is None else {"causal": True}
        x = x + self.dropout(self.attention(self.norm1(x), **own))
        if memory is None:
            return x + self.dropout(self.feed_forward(self.norm2(x)))
        x = x + self.dropout(self.source_attention(self.norm2(x), memory, mask=mask))
        return x + self.dropout(self.feed_forward(self.norm3(x)))


class Transformer(nn.Module):
    """Source and target tokens → label-smoothed cross-entropy of the next target tokens."""

    def __init__(self, scale: float, vocabulary: int, longest: int, shared_embeddings: bool, dropout: float) -> None:
        super().__init__()
        head_count, head_size = heads(8, 64, scale)
        size, inner, layers = head_count * head_size, width(2048, scale), depth(6, scale)
        self.scale = math.sqrt(size)
        self.source_embedding = nn.Embedding(vocabulary, size)
        self.target_embedding = self.source_embedding if shared_embeddings else nn.Embedding(vocabulary, size)
        self.encoder = nn.ModuleList(Layer(size, head_count, inner, dropout, False) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(size)
        self.decoder = nn.ModuleList(Layer(size, head_count, inner, dropout, True) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, vocabulary, bias=not shared_embeddings)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", sinusoids(longest, size), persistent=False)
        embedded = partial(nn.init.normal_, std=size**-0.5)
        initialise(self, {nn.Linear: nn.init.xavier_uniform_, nn.Embedding: embedded})
        if shared_embeddings:
            self.output.weight = self.source_embedding.weight

    def _embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        return self.dropout(embedding(tokens) * self.scale + self.positions[: tokens.shape[1]])

    def forward(self, source: Tensor, target: Tensor, next_target: Tensor) -> Tensor:
        memory = self._embed(self.source_embedding, source)
        mask = additive_mask(source != PADDING, memory)
        for encoder_layer in self.encoder:
            memory = encoder_layer(memory, mask)
        memory = self.encoder_norm(memory)
        x = self._embed(self.target_embedding, target)
        for decoder_layer in self.decoder:
            x = decoder_layer(x, mask, memory)
        logits = self.output(self.decoder_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), next_target.flatten(), ignore_index=PADDING, label_smoothing=0.1)


def sinusoids(count: int, size: int) -> Tensor:
    """The paper's fixed position encodings, sines in the first half of the features and cosines in the second."""
    half = size // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10000.0) / max(1, half - 1)))
    angles = torch.arange(count)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1)


def transformer(
    scale: float, batch: int | None, *, vocabulary: int = 37_000, shared_embeddings: bool = True, dropout: float = 0.0
) -> Built:
    """63,047,680 parameters in 161 tensors (AutoSync: 62M); 80 sentences of 64 tokens, about AutoSync's 5K tokens.

    One matrix embeds the 37,000 shared tokens of both languages and predicts the output, as published. With
    `shared_embeddings=False, vocabulary=31_000` it is the model of PACE's table II: 91.8 million in 164 tensors.
    Published dropout: 0.1.
    """
    tokens, longest = length(vocabulary, scale), length(64, scale)
    model = Transformer(scale, tokens, longest, shared_embeddings, dropout)
    shape = (samples(80, scale, batch), longest)
    return model, tuple(torch.randint(PADDING + 1, tokens, shape) for _ in range(3))
