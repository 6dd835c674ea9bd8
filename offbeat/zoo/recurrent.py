"""Recurrent models: a GNMT-like translator and the LM1B language model."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.zoo.blocks import Built, attend, depth, length, samples, width


class Seq2Seq(nn.Module):
    """LSTM encoder and decoder with dot-product attention → cross-entropy of the next target tokens.

    As in GNMT (Wu et al. 2016): the first encoder layer reads both ways, residual connections join the upper layers,
    the first decoder layer asks the encoder, and what it gets is an input of every layer above it.
    """

    def __init__(self, vocabulary: int, size: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, size)
        self.target_embedding = nn.Embedding(vocabulary, size)
        self.encoder_first = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(
            nn.LSTM(2 * size if layer == 0 else size, size, batch_first=True) for layer in range(layers - 1)
        )
        self.decoder_first = nn.LSTM(size, size, batch_first=True)
        self.decoder = nn.ModuleList(nn.LSTM(2 * size, size, batch_first=True) for _ in range(layers - 1))
        self.output = nn.Linear(size, vocabulary)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, source: torch.Tensor, target: torch.Tensor, next_target: torch.Tensor) -> torch.Tensor:
        memory, _ = self.encoder_first(self.dropout(self.source_embedding(source)))
        for index, layer in enumerate(self.encoder):
            y, _ = layer(self.dropout(memory))
            memory = memory + y if index else y
        x, _ = self.decoder_first(self.dropout(self.target_embedding(target)))
        context = attend(x, memory, memory, heads=1)
        for index, layer in enumerate(self.decoder):
            y, _ = layer(self.dropout(torch.cat((x, context), -1)))
            x = x + y if index else y
        return F.cross_entropy(self.output(x).flatten(0, 1), next_target.flatten())


def seq2seq(scale: float, batch: int | None, *, sequence: int = 32, dropout: float = 0.0) -> Built:
    """67,192,164 parameters in 32 tensors, as in PACE's table II (67.2M, 32); 128 sentences of 32 tokens (its 4096).

    Two stacks of three layers of 512 units, and 32,100 tokens for each language. Published dropout: 0.2.
    """
    vocabulary = length(32_100, scale)
    model = Seq2Seq(vocabulary, width(512, scale), depth(3, scale), dropout)
    shape = (samples(128, scale, batch), length(sequence, scale))
    return model, tuple(torch.randint(vocabulary, shape) for _ in range(3))


class SampledLanguageModel(nn.Module):
    """Projected LSTM language model (Józefowicz et al. 2016) → sampled softmax loss of the next words.

    The softmax is computed over the true word and the batch's `sampled` ids, which the data loader draws from the
    log-uniform distribution over words sorted by frequency. As in TensorFlow's sampled_softmax_loss, each score is
    corrected by the log of the word's probability and accidental hits are removed. So the embedding and both tables of
    the softmax get sparse gradients.
    """

    def __init__(
        self, vocabulary: int, features: int, units: int, layers: int, sparse: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features, sparse=sparse)
        # nn.LSTM drops between its own layers, which one layer does not have.
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(features, units, layers, batch_first=True, proj_size=features, dropout=between)
        self.softmax_weight = nn.Embedding(vocabulary, features, sparse=sparse)
        self.softmax_bias = nn.Embedding(vocabulary, 1, sparse=sparse)
        self.dropout = nn.Dropout(dropout)
        self.log_range = math.log(vocabulary + 1)
        for embedding in (self.embedding, self.softmax_weight):
            nn.init.uniform_(embedding.weight, -(features**-0.5), features**-0.5)
        nn.init.zeros_(self.softmax_bias.weight)

    def _log_probability(self, words: torch.Tensor) -> torch.Tensor:
        rank = words.to(torch.float32)
        return torch.log(torch.log1p(1 / (rank + 1)) / self.log_range)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        embedded = self.dropout(self.embedding(words))
        with warnings.catch_warnings():
            # On CPU torch says at each call that projections run without oneDNN; nothing the user can act on.
            warnings.filterwarnings("ignore", message="LSTM with projections", category=UserWarning)
            hidden, _ = self.lstm(embedded)
        hidden, true = self.dropout(hidden).flatten(0, 1), next_words.flatten()
        ids = torch.cat((true, sampled))
        # One lookup of both, as in TensorFlow, so that each table's gradient is one sparse tensor and not a sum of two.
        true_weight, sampled_weight = self.softmax_weight(ids).split((len(true), len(sampled)))
        bias = self.softmax_bias(ids).squeeze(-1) - self._log_probability(ids)
        true_bias, sampled_bias = bias.split((len(true), len(sampled)))
        true_score = (hidden * true_weight).sum(-1) + true_bias
        scores = hidden @ sampled_weight.T + sampled_bias
        scores = scores.masked_fill(true[:, None] == sampled, -1e9)
        logits = torch.cat((true_score[:, None], scores), 1)
        return F.cross_entropy(logits, torch.zeros_like(true))


def lm1b(scale: float, batch: int | None, *, sparse: bool = True, dropout: float = 0.0) -> Built:
    """832,213,886 parameters in 13 tensors, 813 million of them with sparse gradients; 128 sequences of 20 words.

    793,470 words of 512 features, two LSTM layers of 2048 units projected to 512, 8192 sampled words. Published
    dropout: 0.1.
    """
    vocabulary = length(793_470, scale, least=64)
    features, units = width(512, scale), width(2048, scale, multiple=32)
    model = SampledLanguageModel(vocabulary, features, units, 2, sparse, dropout)
    shape = (samples(128, scale, batch), length(20, scale, least=4))
    candidates = length(8192, scale, least=16)
    # Inverse of the log-uniform distribution function.
    drawn = torch.exp(torch.rand(candidates) * math.log(vocabulary + 1)) - 1
    sampled = drawn.long().clamp(0, vocabulary - 1)
    return model, (torch.randint(vocabulary, shape), torch.randint(vocabulary, shape), sampled)
