"""What the ``goodput`` policy learns from requests that are over: how long answers are, and how far predictions of TTFT
are off. Pure; `pdserve.router.requests.goodput` owns both.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TTFT_SPREAD = 0.08
"""Error of a predicted TTFT, as a share of it, before any was seen: the scale of a logistic distribution."""
PRIOR_TOKENS, PRIOR_ANSWERS = 200, 20.0
"""Mean length and weight of the answers assumed before any has ended."""
LENGTH_MEMORY = 2000.0
"""Answers after which an ended one counts 1 / e."""
MAX_LENGTH = 8192
"""Answers are counted as at most this long."""
CHANGES_PER_COUNT = 32
"""Answers that begin or end between two counts of lengths, at least."""
MIN_CHANGE = 1 / 64
"""Share of the running answers that does, at least."""
_SCALE = 1 / (2 * log(2))
"""Scale of a logistic distribution, as a share of its mean absolute deviation."""


class Lengths:
    """Expected remaining length of an answer: the survival curve of Kaplan and Meier over the answers that ended and,
    as far as they have come, those that run. Without the latter a router that has just started would know short ones
    only."""

    def __init__(self) -> None:
        self._ended = PRIOR_ANSWERS / PRIOR_TOKENS * np.exp(-np.arange(MAX_LENGTH + 1) / PRIOR_TOKENS)
        """Weight of the answers that ended, by length."""
        self._num_new, self._num_changes = 0, 0
        self._rebuild(np.zeros(MAX_LENGTH + 1, np.int64))

    def add(self, num_tokens: int) -> None:
        """An answer ended with so many tokens."""
        self._ended[min(num_tokens, MAX_LENGTH)] += 1
        self._num_new += 1

    def is_due(self, num_running: int) -> bool:
        """Note that an answer began or ended; True if `count` is to be called. That takes time for each of the answers
        that run, so the more there are, the more change between two counts."""
        self._num_changes += 1
        return self._num_changes >= max(CHANGES_PER_COUNT, num_running * MIN_CHANGE)

    def count(self, running: Iterable[IntArray]) -> None:
        """Compute the curve anew. ``running``: tokens so far of answers that run, at most `MAX_LENGTH`, by worker."""
        self._ended *= exp(-self._num_new / LENGTH_MEMORY)
        self._num_new = self._num_changes = 0
        num_running = np.zeros(MAX_LENGTH + 1, np.int64)
        for num_tokens in running:
            np.add.at(num_running, num_tokens, 1)
        self._rebuild(num_running)

    def chance_of_steps(self, most: float) -> float:
        """Chance of an answer to take a decode step, and ``most`` of them at most."""
        return float(self._survival[1] - self._survival[int(min(most, MAX_LENGTH - 1)) + 1])

    def chances_to_end(self, num_tokens: IntArray, most: FloatArray) -> FloatArray:
        """Chance of each answer that runs, of so many tokens so far, to end with ``most`` further ones at most."""
        ends = num_tokens + np.maximum(most, 0.0).astype(np.int64)
        go_on: FloatArray = self._survival.take(ends, mode="clip") / np.maximum(self._survival.take(num_tokens), 1e-300)
        return 1 - go_on

    def _rebuild(self, running: IntArray) -> None:
        """``running``: number of running answers by tokens so far."""
        as_long = np.cumsum((self._ended + running)[::-1])[::-1]
        """Weight of answers of at least each length."""
        goes_on = 1 - self._ended / np.maximum(as_long, 1e-300)
        self._survival = survival = np.cumprod(np.maximum(goes_on, 0.0))
        """Chance of an answer to be longer than each length."""
        self.median = int(np.argmax(survival < 0.5)) or MAX_LENGTH
        after = np.cumsum(survival[::-1])[::-1]
        self.remaining = np.maximum(1.0, after / np.maximum(survival, 1e-300))
        """Expected remaining tokens by tokens so far, at least 1."""
        self.mean = float(self.remaining[0])
        """Expected tokens of an answer."""
        self.of_running = np.stack((1 / (np.arange(MAX_LENGTH + 1) + self.remaining), self.remaining))
        """Of an answer that runs, by tokens so far: the inverse of its expected length, and its remaining tokens."""
        self.of_running[:, 0] = self.of_running[:, 1]  # it has one token at least


class TtftErrors:
    """How far predictions of TTFT are off, learned from log-ratios of what came to what was predicted."""

    def __init__(self) -> None:
        self.spread = TTFT_SPREAD
        """Scale of a logistic distribution."""
        self._weight, self._sum = PRIOR_ANSWERS, PRIOR_ANSWERS * TTFT_SPREAD / _SCALE

    def add(self, log_ratio: float) -> None:
        kept = 1 - 1 / LENGTH_MEMORY
        self._weight = self._weight * kept + 1
        self._sum = self._sum * kept + abs(log_ratio)
        self.spread = _SCALE * self._sum / self._weight
