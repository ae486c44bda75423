"""Calibration: turns a drafter's scores into probabilities, fitted to held-out text.

A drafter's log-probability x of a candidate at distance d becomes a x + b, kept below 0, with one a and one b per
distance: a corrects drafters that are too confident or not confident enough, b corrects effects common to all
candidates, such as tokens missing from a draft vocabulary. The conditional chance is fitted: only positions count where
the token at every smaller distance was among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

BINS_PER_NAT, NATS = 8, 8  # candidates of less than exp(-8) are hardly ever drafted
_FEWEST = 100  # candidates to fit to

IDENTITY = (1.0, 0.0)


def fit(tried: np.ndarray, right: np.ndarray, otherwise: Sequence[Sequence[float]] | None = None) -> list[list[float]]:
    """Maximum-likelihood estimates of a and b for every distance, [M][2].

    Args:
      tried: [M, X], candidates by distance and by their log-probability x, from 0 down in X equal bins.
      right: [M, X], how many of them were right.
      otherwise: [M][2], values for distances with too few candidates; default 1 and 0.
    """
    return [_fit(*counts) for counts in zip(tried, right, otherwise or [IDENTITY] * len(tried), strict=True)]


def _fit(tried: np.ndarray, right: np.ndarray, otherwise: Sequence[float]) -> list[float]:
    x = -(np.arange(len(tried)) + 0.5) / BINS_PER_NAT
    if tried.sum() < _FEWEST or not right.any():
        return [*otherwise]

    def surprise(settings: np.ndarray) -> float:
        """Negative log-likelihood per candidate."""
        log_p = np.minimum(settings[0] * x + settings[1], -1e-3)
        return -(right * log_p + (tried - right) * np.log1p(-np.exp(log_p))).sum() / tried.sum()

    optimum = minimize(surprise, IDENTITY, method="Nelder-Mead", bounds=((0.1, 10.0), (-10.0, 2.0)))
    return np.round(optimum.x, 4).tolist()
