"""BERT pretraining (Devlin et al. 2019): masked words through a decoder tied to the embedding, and next sentence."""

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.attention import additive_mask, attend
from offbeat.zoo.scaling import Inputs, check_dropout, check_positive, depth, heads, length, samples

VOCABULARY = 30_522
POSITIONS = 512
SEGMENTS = 2
# The original pretraining data masks at most 20 of 128 tokens.
MASKED_PER_TOKEN = 20 / 128


class Layer(nn.Module):
    """Self-attention and feed-forward, each followed by its norm."""

    def __init__(self, size: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = head_count, dropout
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.merge = nn.Linear(size, size)
        self.norm1 = nn.LayerNorm(size, eps=1e-12)
        self.expand = nn.Linear(size, 4 * size)
        self.contract = nn.Linear(4 * size, size)
        self.norm2 = nn.LayerNorm(size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        attended = attend(self.query(x), self.key(x), self.value(x), self.heads, mask=mask, dropout=dropout)
        x = self.norm1(x + self.dropout(self.merge(attended)))
        return self.norm2(x + self.dropout(self.contract(F.gelu(self.expand(x)))))


class Bert(nn.Module):
    """Tokens of two segments → loss of the masked words plus loss of the next-sentence guess."""

    def __init__(
        self,
        vocabulary: int,
        size: int,
        head_count: int,
        layers: int,
        positions: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary, size)
        self.position_embedding = nn.Embedding(positions, size)
        self.segment_embedding = nn.Embedding(SEGMENTS, size)
        self.embedding_norm = nn.LayerNorm(size, eps=1e-12)
        self.layers = nn.ModuleList(Layer(size, head_count, dropout) for _ in range(layers))
        self.pooler = nn.Linear(size, size)
        self.next_sentence = nn.Linear(size, 2)
        self.transform = nn.Linear(size, size)
        self.transform_norm = nn.LayerNorm(size, eps=1e-12)
        self.decoder = nn.Linear(size, vocabulary)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        self.decoder.weight = self.word_embedding.weight

    def forward(
        self,
        tokens: torch.Tensor,
        segments: torch.Tensor,
        keep: torch.Tensor,
        masked_positions: torch.Tensor,
        masked_words: torch.Tensor,
        is_next: torch.Tensor,
    ) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word_embedding(tokens) + self.position_embedding(positions) + self.segment_embedding(segments)
        x = self.dropout(self.embedding_norm(x))
        mask = additive_mask(keep, x)
        for layer in self.layers:
            x = layer(x, mask)
        masked = x.gather(1, masked_positions[:, :, None].expand(-1, -1, x.shape[2]))
        words = self.decoder(self.transform_norm(F.gelu(self.transform(masked))))
        pooled = self.dropout(torch.tanh(self.pooler(x[:, 0])))
        word_loss = F.cross_entropy(words.flatten(0, 1), masked_words.flatten())
        return word_loss + F.cross_entropy(self.next_sentence(pooled), is_next)


def bert_3l(scale: float, batch: int | None, *, sequence: int = 128, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """AutoSync's BERT-3L (11M): 10,884,884 parameters, hidden size 264, 4 heads; batch 32. Published dropout: 0.1."""
    return _build(3, 4, 66, 32, scale, batch, sequence, dropout)


def bert_6l(scale: float, batch: int | None, *, sequence: int = 128, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    """AutoSync's BERT-6L (36M): 36,223,564 parameters, hidden size 520, 8 heads; batch 32. Published dropout: 0.1."""
    return _build(6, 8, 65, 32, scale, batch, sequence, dropout)


def bert_base(
    scale: float, batch: int | None, *, sequence: int = 128, dropout: float = 0.0
) -> tuple[nn.Module, Inputs]:
    """110,106,428 parameters: 12 layers, hidden size 768, 12 heads; batch 32. Published dropout: 0.1."""
    return _build(12, 12, 64, 32, scale, batch, sequence, dropout)


def bert_large(
    scale: float, batch: int | None, *, sequence: int = 128, dropout: float = 0.0
) -> tuple[nn.Module, Inputs]:
    """336,226,108 parameters: 24 layers, hidden size 1024, 16 heads; batch 8. Published dropout: 0.1."""
    return _build(24, 16, 64, 8, scale, batch, sequence, dropout)


def _build(
    layers: int,
    head_count: int,
    head_size: int,
    published_batch: int,
    scale: float,
    batch: int | None,
    sequence: int,
    dropout: float,
) -> tuple[nn.Module, Inputs]:
    check_positive(sequence, "sequence", whole=True)
    head_count, head_size = heads(head_count, head_size, scale)
    vocabulary = length(VOCABULARY, scale)
    tokens = length(sequence, scale)
    positions = max(tokens, length(POSITIONS, scale))
    model = Bert(
        vocabulary, head_count * head_size, head_count, depth(layers, scale), positions, check_dropout(dropout)
    )
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
