"""Decide whether a new plan is faster, from noisy times of alternating blocks.

Each pair of neighbouring blocks is one comparison: the logarithm of the old block's time over the new one's. The new
plan is kept once the mean of these, over its standard error, is as large as `NEEDED` after so many pairs, and given up
once it is as small as `HOPELESS` or no pair is left. Two equal plans pass in 7 of 100 cases, whatever the noise
(tests/unit/test_verdict.py). A machine that becomes slower for a while slows both blocks of a pair.

Between two plans of which neither has been compared with anything (`even`), none has to prove itself: without a clear
verdict the one that was faster on average is taken.
"""

from dataclasses import dataclass, field
from math import log, sqrt
from statistics import fmean, median
from typing import Literal

NEEDED = {3: 7.0, 4: 4.5, 5: 3.6, 6: 3.2, 7: 3.0, 8: 3.0, 9: 3.0, 10: 1.9}
"""By the number of pairs. Few pairs estimate their spread poorly, so they must agree more closely."""
HOPELESS, EVENLY_HOPELESS = -0.3, -2.0


@dataclass
class Verdict:
    """The blocks of a comparison so far, in seconds of a step."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    even: bool = False

    def add(self, old: float, new: float) -> None:
        """Another pair of neighbouring blocks."""
        self.old.append(old)
        self.new.append(new)

    @property
    def decision(self) -> Literal["keep", "give up", "open"]:
        pairs = len(self._gains)
        if pairs < min(NEEDED):
            return "open"
        mean, last = fmean(self._gains), pairs == max(NEEDED)
        spread = sqrt(sum((gain - mean) ** 2 for gain in self._gains) / (pairs - 1))
        sureness = mean * sqrt(pairs) / max(spread, 1e-9)
        if sureness >= NEEDED[pairs] or (self.even and last and mean > 0):
            return "keep"
        hopeless = EVENLY_HOPELESS if self.even else HOPELESS
        return "give up" if sureness <= hopeless or last else "open"

    @property
    def kept(self) -> bool:
        """Whether the new plan stays if there are no further pairs."""
        return self.decision == "keep" or (self.even and self.decision == "open" and fmean(self._gains) > 0)

    @property
    def _gains(self) -> list[float]:
        return [log(old / new) for old, new in zip(self.old, self.new, strict=True)]

    def __str__(self) -> str:
        """The step before and after, each with its spread."""
        return f"{_spread(self.old)} before, {_spread(self.new)} with it"


def _spread(blocks: list[float]) -> str:
    return f"{median(blocks) * 1e3:.1f} ms ({min(blocks) * 1e3:.1f} to {max(blocks) * 1e3:.1f})"
