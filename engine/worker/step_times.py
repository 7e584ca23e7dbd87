"""Predicted and observed times of a worker's steps, and the corrections between them. Pure; reads no clock.

The step loop owns them: the scheduler plans by what it expects of a step, and routers are told the corrections.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import log2
from typing import NamedTuple

from pdserve.contracts.step import StepBatch
from pdserve.model.cost.cost_model import CostModel, OnlineCorrection


class Prediction(NamedTuple):
    has_prefill: bool
    predicted_s: float
    """Before correction."""
    is_typical: bool
    """The step only computes and samples its rows' tokens, so its duration predicts that of others."""
    num_rows: int


class _CorrectionByTokens:
    """Observed over predicted seconds of decode steps by their new tokens, guesses included. What products of a few
    rows take rises in steps, which the cost model smooths, and guesses are chosen by the differences."""

    _NEWEST_WEIGHT = 1 / 16
    _LIMIT = 2.0
    """A step counts as this many times as long as expected at most: it may have been stalled."""
    _LOWEST = 0.1
    """Least ratio: of a step in no time, too, which emulation may have."""

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}
        self._nearest: dict[int, int] = {}
        """Observed size nearest to each that was asked for."""

    def ratio(self, num_tokens: int) -> float:
        """That of steps of about as many tokens, as far as some were observed; 1 before any was."""
        if not self._ratios:
            return 1.0
        size = _size(num_tokens)
        nearest = self._nearest.get(size)
        if nearest is None:
            nearest = self._nearest[size] = min(self._ratios, key=lambda known: abs(known - size))
        return self._ratios[nearest]

    def observe(self, num_tokens: int, predicted_s: float, observed_s: float) -> None:
        size = _size(num_tokens)
        newest = min(max(observed_s / predicted_s, self._LOWEST), self._LIMIT * self.ratio(num_tokens))
        if size not in self._ratios:
            self._nearest.clear()
        last = self._ratios.get(size, newest)
        self._ratios[size] = last + self._NEWEST_WEIGHT * (newest - last)


def _size(num_tokens: int) -> int:
    """Numbers of tokens that count as one: each up to 8, then four for each doubling."""
    return num_tokens if num_tokens <= 8 else 8 + int(4 * log2(num_tokens / 8))


class StepTimes:
    """Predicted and observed step times, and the corrections between them. Steps with prefill rows and pure decode
    steps have different errors. A decode step is predicted from its total context, as the router does, so that the
    correction makes up for it. Decode steps with guesses are corrected apart, beside others of as many tokens."""

    def __init__(self, cost: CostModel, draft: CostModel | None = None) -> None:
        """
        Args:
            draft: of the model that guesses; ``None`` if none does.
        """
        self._cost = cost
        self.prefill = OnlineCorrection()
        """Of steps with prefill rows."""
        self.decode = OnlineCorrection()
        """Of pure decode steps."""
        self._by_tokens = _CorrectionByTokens()
        self._draft = draft
        self._drafting = _CorrectionByTokens()
        """Of `_draft_s`, by the rows of the step."""

    def predict(self, batch: StepBatch) -> Prediction:
        num_rows = len(batch.rows)
        is_typical = not (batch.swap_outs or batch.swap_ins or any(row.prompt_targets for row in batch.rows))
        if batch.num_new_tokens == num_rows:
            predicted_s = self._cost.decode_s(num_rows, sum([row.cached_length for row in batch.rows]))
            return Prediction(False, predicted_s, is_typical, num_rows)
        predicted_s = self._cost.step_s((row.num_new_tokens, row.cached_length) for row in batch.rows)
        return Prediction(True, predicted_s, is_typical, num_rows)

    def mixed_s(self, chunks: Iterable[tuple[int, int]], num_rows: int, num_context_tokens: int) -> float:
        """Expected duration of a step with prefill.

        Args:
            chunks: (new tokens, cached tokens) of each.
            num_rows: further rows, which decode.
            num_context_tokens: cached tokens of those.
        """
        return self._cost.step_s(chunks, num_rows, num_context_tokens) * self.prefill.factor

    def corrected_s(self, prediction: Prediction) -> float:
        """Expected duration of a step in seconds, given the durations observed so far."""
        return prediction.predicted_s * self._correction(prediction).factor

    def by_guesses(self, batch: StepBatch) -> Callable[[int, int], float]:
        """Return the expected duration of a decode step by the number of guesses in it, and of the row with most."""
        prediction, guesses_s, ratio = self.predict(batch), self._cost.guesses_s, self._by_tokens.ratio
        num_rows, predicted_s = prediction.num_rows, prediction.predicted_s
        draft_s = self._draft_s(prediction) * self._drafting.ratio(num_rows)

        def seconds(num_guesses: int, depth: int) -> float:
            step_s = predicted_s + guesses_s(num_rows, num_guesses)
            return step_s * ratio(num_rows + num_guesses) + depth * draft_s

        return seconds

    def observe(
        self, prediction: Prediction, duration_s: float, guesses: Collection[int] = (), guessing_s: float = 0.0
    ) -> None:
        """Correct later predictions by the duration of a typical step.

        Args:
            guesses: number of guesses of each row that had some.
            guessing_s: time that they took before the step.
        """
        num_guesses = sum(guesses)
        if not prediction.is_typical:
            return
        if num_guesses and guessing_s and self._draft is not None:
            self._drafting.observe(prediction.num_rows, self._draft_s(prediction) * max(guesses), guessing_s)
        if not prediction.has_prefill:
            num_rows = prediction.num_rows
            predicted_s = prediction.predicted_s + self._cost.guesses_s(num_rows, num_guesses)
            self._by_tokens.observe(num_rows + num_guesses, predicted_s, duration_s)
        if not num_guesses:
            self._correction(prediction).observe(prediction.predicted_s, duration_s)

    def _draft_s(self, prediction: Prediction) -> float:
        """Predicted seconds of making a guess of each row, before correction."""
        return 0.0 if self._draft is None else self._draft.decode_s(prediction.num_rows, 0)

    def _correction(self, prediction: Prediction) -> OnlineCorrection:
        return self.prefill if prediction.has_prefill else self.decode
