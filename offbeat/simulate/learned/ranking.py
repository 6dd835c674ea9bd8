"""Train a Simulator on encoded plans and measured times; it ranks other plans and can be stored.

Pairs of plans from one domain are compared: with measured times t_i < t_j the loss is

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
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from offbeat.errors import OffbeatError
from offbeat.files import one_line
from offbeat.simulate.learned.features import NODE_NAMES, WHOLE_NAMES, Encoded, Samples, TrainingSchedule, rank_pairs
from offbeat.simulate.learned.models import HIDDEN, Kind, ScoreModel, collate, make_model

FORMAT = 1
TIE = 0.03
"""Times closer than this share are not compared: two trials of one strategy differ by that much."""

__all__ = ["Samples", "Simulator", "TrainingSchedule", "pairwise_loss"]


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
