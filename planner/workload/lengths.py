"""Distributions of prompt and answer lengths, drawn as pairs.

Used by `pdserve.planner.workload.conversations`. Knows nothing of arrivals, shared prefixes or a model's limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np

from pdserve.planner.arrays import FloatArray, IntArray


class LengthPairs(NamedTuple):
    """Lengths of N requests, at least 1 each."""

    num_prompt_tokens: IntArray
    num_output_tokens: IntArray


class Lengths(Protocol):
    """A joint distribution of prompt and answer lengths."""

    def draw(self, num_requests: int, random: np.random.Generator) -> LengthPairs: ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Equal lengths for every request."""

    num_prompt_tokens: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one answer token")

    def draw(self, num_requests: int, random: np.random.Generator) -> LengthPairs:
        return LengthPairs(np.full(num_requests, self.num_prompt_tokens), np.full(num_requests, self.num_output_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """Lognormal prompts and answers, given by their means and coefficients of variation.

    Their logarithms are jointly normal (Johnson and Kotz, Continuous Multivariate Distributions, ch. 35).
    """

    mean_prompt_tokens: float
    mean_output_tokens: float
    prompt_variation: float = 1.0
    """Standard deviation over mean."""
    output_variation: float = 1.0
    correlation: float = 0.0
    """Correlation of the logarithms."""

    def __post_init__(self) -> None:
        assert min(self.mean_prompt_tokens, self.mean_output_tokens) >= 1, "a prompt and an answer have a token or more"
        assert min(self.prompt_variation, self.output_variation) >= 0
        assert -1 <= self.correlation <= 1

    def draw(self, num_requests: int, random: np.random.Generator) -> LengthPairs:
        first, second = _correlated_normals(self.correlation, num_requests, random)
        return LengthPairs(
            _whole(_lognormal(self.mean_prompt_tokens, self.prompt_variation, first)),
            _whole(_lognormal(self.mean_output_tokens, self.output_variation, second)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileLengths:
    """Lengths from known quantiles, interpolated linearly, as a report of percentiles gives them.

    Both lengths are coupled like the ranks of a bivariate normal distribution (a Gaussian copula).
    """

    shares: tuple[float, ...]
    """Ascending from 0 to 1."""
    num_prompt_tokens: tuple[float, ...]
    """Quantile for each share."""
    num_output_tokens: tuple[float, ...]
    correlation: float = 0.0
    max_total_tokens: int = 0
    """Limit on prompt plus answer: longer answers are drawn again; 0 for no limit."""

    def __post_init__(self) -> None:
        assert self.shares[0] == 0, "quantiles start at share 0"
        assert self.shares[-1] == 1, "quantiles end at share 1"
        for row in (self.shares, self.num_prompt_tokens, self.num_output_tokens):
            assert len(row) == len(self.shares), "every share has a quantile"
            assert list(row) == sorted(row), "quantiles ascend"
        assert -1 <= self.correlation <= 1
        fits = self.num_prompt_tokens[-1] + self.num_output_tokens[0] <= self.max_total_tokens
        assert fits or not self.max_total_tokens, "every prompt leaves room for some answer"

    def draw(self, num_requests: int, random: np.random.Generator) -> LengthPairs:
        first, second = _correlated_normals(self.correlation, num_requests, random)
        prompts = self._quantiles(self.num_prompt_tokens, first)
        answers = self._quantiles(self.num_output_tokens, second)
        while self.max_total_tokens:
            (too_long,) = np.nonzero(prompts + answers > self.max_total_tokens)
            if not len(too_long):
                break
            answers[too_long] = self._quantiles(self.num_output_tokens, random.standard_normal(len(too_long)))
        return LengthPairs(prompts, answers)

    def _quantiles(self, quantiles: tuple[float, ...], normals: FloatArray) -> IntArray:
        return _whole(np.interp(_normal_shares(normals), self.shares, quantiles))


def _correlated_normals(
    correlation: float, num_pairs: int, random: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    first, other = random.standard_normal((num_pairs, 2)).T
    return first, correlation * first + sqrt(1 - correlation * correlation) * other


def _lognormal(mean: float, variation: float, normals: FloatArray) -> FloatArray:
    variance = log(1 + variation * variation)
    lengths: FloatArray = np.exp(log(mean) - variance / 2 + sqrt(variance) * normals)
    return lengths


_GRID = np.linspace(-8, 8, 4097)
_GRID_SHARES = np.array([NormalDist().cdf(x) for x in _GRID])


def _normal_shares(normals: FloatArray) -> FloatArray:
    """The normal distribution function, within 1e-6."""
    shares: FloatArray = np.interp(normals, _GRID, _GRID_SHARES)
    return shares


def _whole(lengths: FloatArray) -> IntArray:
    whole: IntArray = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return whole
