"""Measured (bytes, seconds) of a collective → LinkFit: a latency and the seconds of each byte.

PACE (section III) describes an all-reduce by a linear model fitted to samples of the profiling stage. Samples span four
orders of magnitude and some are hit by other traffic, so the fit here minimises *relative* residuals under Huber's
loss instead of the paper's plain least squares, which the largest samples decide alone (`fit_linear`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from offbeat.errors import OffbeatError

HUBER = 1.345
"""Standard deviations up to which a residual counts in full: 95% efficient where the noise is normal (Huber 1964)."""
MAD_TO_SIGMA = 1.4826
"""Median absolute deviation → standard deviation of a normal distribution."""
MAX_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class LinkFit:
    """seconds = latency_seconds + seconds_per_byte × bytes, and how well that described the samples."""

    latency_seconds: float
    seconds_per_byte: float
    relative_error: float = 0.0
    """Median of |fitted − measured| / measured over the samples."""
    r_squared: float = 1.0
    """Share of the variance of the measured seconds that the fit explains, outliers included."""

    def __post_init__(self) -> None:
        for field in ("latency_seconds", "seconds_per_byte"):
            value = getattr(self, field)
            if not 0 <= value < np.inf:
                raise OffbeatError(f"link fit: {field} must be a number of at least 0, got {value}")

    def seconds(self, bytes: float) -> float:
        """Time of one collective of this many bytes; none at all for 0 bytes."""
        return self.latency_seconds + self.seconds_per_byte * bytes if bytes > 0 else 0.0

    @property
    def bytes_per_second(self) -> float:
        """What large collectives reach; infinite where bytes cost nothing."""
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte else np.inf


def fit_linear(bytes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """The linear model closest to the samples in relative terms, with neither coefficient below 0.

    Iteratively reweighted least squares; the scale of the residuals is their median absolute deviation, so a minority
    of disturbed samples does not move the fit. Samples of one size alone give a fit without latency.
    """
    sizes, times = _samples(bytes, seconds)
    # Rows divided by the measured time make the residuals relative; a zero latency is all one size can tell.
    one_size = float(np.ptp(sizes)) == 0
    columns = [sizes / times] if one_size else [1.0 / times, sizes / times]
    design = np.stack(columns, axis=1)
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(times))
    solution = np.zeros(design.shape[1])
    for _ in range(MAX_ROUNDS):
        root = np.sqrt(weights)
        updated = nnls(design / scale * root[:, None], root)[0] / scale
        done = np.allclose(updated, solution, rtol=1e-10, atol=0.0)
        solution = updated
        residuals = np.abs(design @ solution - 1.0)
        limit = HUBER * MAD_TO_SIGMA * max(float(np.median(residuals)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(residuals, 1e-300))
        if done:
            break
    latency, per_byte = (0.0, float(solution[0])) if one_size else map(float, solution)
    return LinkFit(latency, per_byte, *_goodness(latency + per_byte * sizes, times))


def _samples(bytes: Sequence[float], seconds: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sizes, times = np.asarray(bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if sizes.ndim != 1 or sizes.shape != times.shape or not len(sizes):
        raise OffbeatError(f"linear fit: {sizes.size} sizes and {times.size} times are not one time for each size")
    for name, values, least in (("bytes", sizes, 0.0), ("seconds", times, np.finfo(float).tiny)):
        wrong = values[~(np.isfinite(values) & (values >= least))]
        if len(wrong):
            need = "at least 0" if name == "bytes" else "more than 0"
            raise OffbeatError(f"linear fit: {name} must be finite and {need}, got {wrong[0]}")
    return sizes, times


def _goodness(fitted: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    relative = float(np.median(np.abs(fitted - times) / times))
    variance = float(np.sum((times - times.mean()) ** 2))
    unexplained = float(np.sum((times - fitted) ** 2))
    return relative, 1.0 - unexplained / variance if variance > 0 else float(unexplained == 0)
