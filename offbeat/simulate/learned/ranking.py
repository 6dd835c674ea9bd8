"""Models that rank encoded plans, and their training on measured times.

A model gives a plan a score (the logarithm of a time, up to scale) and a hidden vector, in plain torch:

linear     w · z over the features of the whole plan                                     `LinearModel`
rnn        zi = MLP_i(z_raw ⊕ z_pre); LSTM both ways; MLP_o([h, h'])   (Eqs. 4 to 7)     `RecurrentModel`
gat        graph attention over shards, mean, linear layer             (Eqs. 8 to 10)    `AttentionModel`
combined   the replayer's logarithm plus what a linear part learns of its error          `CombinedModel`

To train a `Simulator`, pairs of plans from one domain are compared: with measured times t_i < t_j the loss is

    log(1 + exp(s_i − s_j))

which asks for an order and not for times. Training is the supplement's §10: Adam at 1e-3, times 0.3 after epochs 80 and
160 of 200, gradients clipped to 0.25. Scores become seconds by a straight line fitted to the logarithms of the measured
times, so that a prediction can be shown beside a measurement.

A state is stored as plain arrays with a JSON header (`numpy.savez`, no pickle), so that reading one runs no code.
"""

import io
import json
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from offbeat.errors import OffbeatError
from offbeat.files import one_line
from offbeat.simulate.learned.features import NODE_NAMES, WHOLE_NAMES, Encoded, Samples, TrainingSchedule, rank_pairs

FORMAT = 1
TIE = 0.03
"""Times closer than this share are not compared: two trials of one strategy differ by that much."""
Kind = Literal["linear", "rnn", "gat", "combined"]
HIDDEN = 64
HEADS = 4
_NEGATIVE_SLOPE = 0.2
_GAIN = 4.0
"""Of what the combined model learns: it moves as fast as the replayer's weight, which begins with this number."""


class Batch(NamedTuple):
    """Plans padded to the longest, with the graph of all of them side by side."""

    nodes: Tensor
    """(plans, longest, features)"""
    lengths: Tensor
    edges: Tensor
    """(2, edges) of positions in the flattened nodes of all plans without padding."""
    whole: Tensor
    base: Tensor


def collate(plans: Sequence[Encoded]) -> Batch:
    lengths = [len(plan.nodes) for plan in plans]
    starts = np.cumsum([0, *lengths[:-1]])
    edges = np.concatenate([plan.edges + start for plan, start in zip(plans, starts, strict=True)], axis=1)
    return Batch(
        pad_sequence([torch.from_numpy(plan.nodes) for plan in plans], batch_first=True),
        torch.tensor(lengths),
        torch.from_numpy(edges),
        torch.from_numpy(np.stack([plan.whole for plan in plans])),
        torch.tensor([plan.base for plan in plans], dtype=torch.float32),
    )


class ScoreModel(nn.Module, ABC):
    """What all models share: features are standardised by the first plans they are trained on."""

    node_mean: Tensor
    node_scale: Tensor
    whole_mean: Tensor
    whole_scale: Tensor
    base_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("node", len(NODE_NAMES)), ("whole", len(WHOLE_NAMES))):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
        self.register_buffer("base_mean", torch.zeros(()))

    def standardise(self, plans: Sequence[Encoded]) -> None:
        """Takes mean and spread of every feature from these plans."""
        nodes = torch.from_numpy(np.concatenate([plan.nodes for plan in plans]))
        whole = torch.from_numpy(np.stack([plan.whole for plan in plans]))
        for name, values in (("node", nodes), ("whole", whole)):
            spread = values.std(0, correction=0)
            getattr(self, f"{name}_mean").copy_(values.mean(0))
            # A feature that never varied says nothing, and a tiny spread would blow up the first plan that differs.
            getattr(self, f"{name}_scale").copy_(torch.where(spread > 1e-4, 1 / spread, torch.zeros_like(spread)))
        self.base_mean.fill_(float(np.mean([plan.base for plan in plans])))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(scores, hidden vectors), one per plan."""
        nodes = ((batch.nodes - self.node_mean) * self.node_scale).clamp(-6, 6)
        whole = ((batch.whole - self.whole_mean) * self.whole_scale).clamp(-6, 6)
        return self.score(batch._replace(nodes=nodes, whole=whole, base=batch.base - self.base_mean))

    @abstractmethod
    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same of a batch whose features have been put on one scale."""


class LinearModel(ScoreModel):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.layer = nn.Linear(len(WHOLE_NAMES), 1)
        # Random weights rank worse than none, and a convex problem needs no symmetry broken.
        nn.init.zeros_(self.layer.weight)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.layer(batch.whole).squeeze(-1), batch.whole


class RecurrentModel(ScoreModel):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.read = nn.Sequential(nn.Linear(len(NODE_NAMES), hidden), nn.ReLU())
        self.walk = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.decide = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.read(batch.nodes), batch.lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.walk(packed)
        hidden = torch.cat((last[0], last[1]), dim=-1)
        return self.decide(hidden).squeeze(-1), hidden


class Attention(nn.Module):
    """One layer of graph attention (Veličković et al., 2018) with a skip connection."""

    def __init__(self, inputs: int, outputs: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.width = heads, outputs // heads
        self.project = nn.Linear(inputs, heads * self.width, bias=False)
        self.skip = nn.Linear(inputs, heads * self.width)
        self.source = nn.Parameter(torch.empty(heads, self.width))
        self.target = nn.Parameter(torch.empty(heads, self.width))
        nn.init.xavier_uniform_(self.source)
        nn.init.xavier_uniform_(self.target)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        values = self.project(nodes).view(-1, self.heads, self.width)
        sender, receiver = edges
        logits = (values * self.source).sum(-1)[sender] + (values * self.target).sum(-1)[receiver]
        logits = functional.leaky_relu(logits, _NEGATIVE_SLOPE)
        # Softmax over the edges into each node; the largest logit is taken off first, as exponentials overflow.
        index = receiver[:, None].expand(-1, self.heads)
        largest = torch.full((len(nodes), self.heads), -torch.inf).scatter_reduce(0, index, logits, "amax")
        weights = torch.exp(logits - largest[receiver])
        sums = torch.zeros(len(nodes), self.heads).index_add(0, receiver, weights)
        weights = weights / sums[receiver]
        mixed = torch.zeros_like(values).index_add(0, receiver, values[sender] * weights[..., None])
        return functional.elu(mixed.flatten(1) + self.skip(nodes))


class AttentionModel(ScoreModel):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        if hidden % HEADS:
            raise OffbeatError(f"hidden: {hidden} is not a multiple of the {HEADS} attention heads")
        self.first = Attention(len(NODE_NAMES), hidden)
        self.second = Attention(hidden, hidden)
        self.decide = nn.Linear(hidden, 1)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        present = torch.arange(batch.nodes.shape[1])[None] < batch.lengths[:, None]
        nodes = self.second(self.first(batch.nodes[present], batch.edges), batch.edges)
        plan = torch.repeat_interleave(torch.arange(len(batch.lengths)), batch.lengths)
        hidden = torch.zeros(len(batch.lengths), nodes.shape[1]).index_add(0, plan, nodes) / batch.lengths[:, None]
        return self.decide(hidden).squeeze(-1), hidden


class CombinedModel(ScoreModel):
    """Starts as the replayer's own ranking and learns where that is wrong, from its sensitivities above all.

    It has no recurrent part: with the tens of trials of a search such a part ranked held-out plans worse, not better
    (benchmarks/ranking.py).
    """

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.linear = nn.Linear(len(WHOLE_NAMES) + 1, 1)
        self.trust = nn.Parameter(torch.tensor(4.0))
        """Weight of the replayer's logarithm."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        seen = torch.cat((batch.whole, batch.base[:, None]), dim=1)
        return self.trust * batch.base + _GAIN * self.linear(seen).squeeze(-1), seen


_MODELS: dict[str, type[ScoreModel]] = {
    "linear": LinearModel,
    "rnn": RecurrentModel,
    "gat": AttentionModel,
    "combined": CombinedModel,
}


def make_model(kind: Kind, hidden: int = HIDDEN) -> ScoreModel:
    if kind not in _MODELS:
        raise OffbeatError(f"simulator: {kind!r} is not one of {', '.join(get_args(Kind))}")
    return _MODELS[kind](hidden)  # type: ignore[call-arg]


class Simulator:
    """A learned ranking of plans."""

    def __init__(self, kind: Kind = "rnn", *, hidden: int = HIDDEN, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: ScoreModel = make_model(kind, hidden)
        self.kind, self.hidden, self.seed = kind, hidden, seed
        self.trained_on = 0
        """Plans of the last fit; 0 before it."""
        self.slope, self.offset = 1.0, 0.0

    def fit(self, domains: Sequence[Samples], schedule: TrainingSchedule | None = None) -> float:
        """Continues training from the current state; returns the last epoch's mean loss."""
        schedule = schedule or TrainingSchedule()
        domains = [domain for domain in domains if len(domain.plans) > 1]
        if not domains:
            raise OffbeatError("fit: no domain has two plans to compare")
        everything = [plan for domain in domains for plan in domain.plans]
        if not self.trained_on:
            self.model.standardise(everything)
        random = np.random.default_rng(self.seed + len(everything))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=schedule.learning_rate)
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(schedule.decay_epochs), schedule.decay)
        losses: list[float] = []
        for _ in range(schedule.epochs):
            batches = []
            for domain in domains:
                order = random.permutation(len(domain.plans))
                cuts = np.array_split(order, math.ceil(len(order) / schedule.batch))
                batches += [(domain, cut) for cut in cuts if len(cut) > 1]
            losses = []
            for number in random.permutation(len(batches)):
                domain, chosen = batches[number]
                faster, slower = rank_pairs(np.asarray(domain.seconds)[chosen], TIE)
                if not len(faster):
                    continue
                scores, _ = self.model(collate([domain.plans[position] for position in chosen]))
                loss = pairwise_loss(scores, faster, slower)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), schedule.clip)
                optimizer.step()
                losses.append(float(loss.detach()))
            decay.step()
        self.trained_on = len(everything)
        self._calibrate(domains[-1])
        return float(np.mean(losses)) if losses else 0.0

    def predict(self, plans: Sequence[Encoded]) -> NDArray[np.float64]:
        """Seconds of each plan; only their order was trained."""
        return np.exp(np.clip(self.slope * self._scores(plans)[0] + self.offset, -30, 30))

    def embed(self, plans: Sequence[Encoded]) -> NDArray[np.float64]:
        """The hidden vector of each plan."""
        return self._scores(plans)[1]

    def to_bytes(self) -> bytes:
        """The state as `from_bytes` reads it."""
        header = {name: getattr(self, name) for name in ("kind", "hidden", "seed", "trained_on", "slope", "offset")}
        header |= {"format": FORMAT, "nodes": NODE_NAMES, "whole": WHOLE_NAMES}
        arrays = {f"state.{name}": value.numpy() for name, value in self.model.state_dict().items()}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, origin: str) -> "Simulator":
        """A stored state; the error for a bad one names `origin`."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            header = json.loads(arrays.pop("header").tobytes())
            if header["format"] != FORMAT:
                raise OffbeatError(f"{origin}: format {header['format']!r} is not one this Offbeat reads ({FORMAT})")
            if (tuple(header["nodes"]), tuple(header["whole"])) != (NODE_NAMES, WHOLE_NAMES):
                raise OffbeatError(f"{origin}: the simulator was trained on features of another Offbeat version")
            made = cls(header["kind"], hidden=header["hidden"], seed=header["seed"])
            state = {name.removeprefix("state."): torch.from_numpy(value) for name, value in arrays.items()}
            made.model.load_state_dict(state)
            made.trained_on = int(header["trained_on"])
            made.slope, made.offset = float(header["slope"]), float(header["offset"])
        except OffbeatError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, zipfile.BadZipFile) as error:
            raise OffbeatError(f"{origin}: not a simulator state: {one_line(error)}") from None
        return made

    def _scores(self, plans: Sequence[Encoded]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Score and hidden vector of each plan."""
        if not plans:
            return np.zeros(0), np.zeros((0, 0))
        with torch.no_grad():
            parts = [self.model(collate(plans[start : start + 256])) for start in range(0, len(plans), 256)]
        scores, hidden = (torch.cat(column).double().numpy() for column in zip(*parts, strict=True))
        return scores, hidden

    def _calibrate(self, domain: Samples) -> None:
        """A rising line from scores to the logarithms of seconds."""
        scores, logs = self._scores(domain.plans)[0], np.log(np.asarray(domain.seconds))
        spread = float(np.var(scores))
        slope = float(np.mean((scores - scores.mean()) * (logs - logs.mean()))) / spread if spread > 1e-12 else 0.0
        self.slope = max(slope, 1e-3)
        self.offset = float(np.median(logs - self.slope * scores))


def pairwise_loss(scores: Tensor, faster: NDArray[np.int64], slower: NDArray[np.int64]) -> Tensor:
    """Mean of log(1 + exp(s_faster − s_slower)) over the pairs."""
    return functional.softplus(scores[torch.from_numpy(faster)] - scores[torch.from_numpy(slower)]).mean()
