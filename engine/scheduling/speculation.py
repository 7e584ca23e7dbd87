"""How many tokens of each sequence a step guesses: as many as raise the tokens per second that are expected of it.

Guess j of a row is right if those before it are and it is itself: with probability a^j, if a share a of the sequence's
guesses is right. A step of n tokens with guesses of the probabilities p is expected to yield n + sum(p) tokens in the
seconds that the cost model predicts for it, corrected by what steps with guesses took. So a guess is made where p is
more than tokens per second times the seconds it adds, which rise with the batch, from the bytes that a step reads
anyway to the arithmetic of each token (Liu et al., "TurboSpec", 2024, arXiv 2406.14066). A sequence whose guesses do
not pay makes one now and then, to find out when they do. What a grammar prescribes is right, and is always guessed: it
must be computed anyway, and costs less beside other tokens than in a step of its own.

Where steps are planned ahead, before the tokens of the one that runs are known, guesses cost more: a step that may have
some is planned once that one has ended. While fewer are right than one for 16 rows, that happens after 1, 3, 7 and at
last 32 steps ahead, and what a grammar prescribes is guessed in those steps only.

Asked by `pdserve.engine.worker.scheduler`. Decides on counts only: what is guessed, the executor decides, and a token
never depends on it. Pure, like the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import inf
from typing import NamedTuple

from pdserve.contracts.step import StepBatch, StepOutput
from pdserve.engine.scheduling.sequence import Sequence as TokenSequence
from pdserve.engine.scheduling.table import PlannedStep

MAX_GUESSES = 8
"""Guesses of a row in a step at most."""

NGRAM_SHARE, DRAFT_SHARE = 0.5, 0.8
"""Share of right guesses expected of a worker's first sequence. Too high a one is corrected sooner than one that is too
low for any guess."""

STEPS_BETWEEN_TRIALS = 32
"""Steps without guesses after which a sequence makes one again."""

_LEAST_WORTH = 1 / 16
"""Guesses that are right less often are not considered, which keeps the choice short."""
_NEWEST_WEIGHT = 1 / 8
"""Weight of the newest guess in a sequence's share of right ones."""
_NEWEST_WEIGHT_OF_ALL = 1 / 128
_LEAST_FIRST_SHARE = 0.25
"""Share of right guesses expected of a sequence at first at least. It is expected to do as those before."""
_LOOKAHEAD = 8
"""Guesses added beyond the best number so far before the search ends, or as many as the step has rows: the price of one
more is not always rising, and a draft model's first one of a row costs as much as those of all rows."""

Seconds = Callable[[int, int], float]
"""Predicted seconds of a step by the guesses in it, and by those of the row that has most: a draft model makes one of
each row at a time."""
SecondsByGuesses = Callable[[StepBatch], Seconds]
"""`pdserve.engine.worker.step_times.StepTimes.by_guesses`."""


class Choice(NamedTuple):
    row: int
    num_guesses: int
    num_forced: int = 0
    """Guesses if the row's grammar prescribes them."""


_Guess = tuple[float, int, int]
"""Its worth, negated, its number in its row, and the row: ordered by worth, those of a row in order."""


class Speculation:
    """Chooses the guesses of each step, and counts them."""

    def __init__(
        self, seconds_by_guesses: SecondsByGuesses, first_share: float = NGRAM_SHARE, *, plans_ahead: bool = False
    ) -> None:
        """
        Args:
            first_share: share of right guesses expected of the first sequence.
            plans_ahead: whether steps without guesses are planned while another one runs.
        """
        self._seconds_by_guesses = seconds_by_guesses
        self.num_guesses = 0
        """Guesses made."""
        self.num_right = 0
        self._share = first_share
        """Of right guesses of all sequences."""
        self._num_plain_rows = 0
        """Rows without guesses since there were some: answers may be too short for a trial of their own."""
        self._plans_ahead = plans_ahead
        self._num_between = 0
        """Steps planned ahead between two that may have guesses."""
        self._num_ahead = 0
        """Of them, those planned."""
        self._is_prefilling = False
        """Whether the last step prefilled, as the next one may."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step may have guesses, so that the tokens before it must be known."""
        return self._num_ahead >= self._num_between and not self._is_prefilling

    def choose(self, step: PlannedStep, max_guesses: int) -> list[Choice]:
        """Choose the guesses of a planned step's rows, ``max_guesses`` in all at most. A step that prefills has none:
        its time is that of its arithmetic, of which prompts make more."""
        self._is_prefilling = step.num_chunk_tokens > 0
        if self._is_prefilling or not step.batch.rows:
            return []
        if self._num_ahead < self._num_between:
            self._num_ahead += 1
            return []
        choices = self._choose(step, max_guesses)
        if not choices:
            self._end_trial(is_worth_it=False)
        return choices

    def _choose(self, step: PlannedStep, max_guesses: int) -> list[Choice]:
        batch = step.batch
        rows = {
            index: limit
            for index, (row, sequence) in enumerate(zip(batch.rows, step.sequences, strict=True))
            if row.tokens and (limit := sequence.max_guesses) > 0
        }
        if not rows or max_guesses <= 0:
            return []
        first_share = max(self._share, _LEAST_FIRST_SHARE)
        shares: dict[int, float] = {}
        due = []
        may_guess = False
        for index in rows:
            sequence = step.sequences[index]
            if sequence.acceptance is None:
                sequence.acceptance = first_share
                sequence.num_plain_steps = self._num_plain_rows
            shares[index] = sequence.acceptance
            sequence.num_plain_steps += 1 + self._num_between
            if sequence.num_plain_steps > STEPS_BETWEEN_TRIALS:
                due.append(index)
            may_guess |= sequence.acceptance >= _LEAST_WORTH or sequence.sampling.grammar is not None
        self._num_plain_rows += len(rows) * (1 + self._num_between)
        if not may_guess and not due:
            return []
        guesses = islice(_by_worth(shares, rows), max_guesses)
        limit_s = min([s.request.max_gap_s for s in step.sequences if s.request.max_gap_s], default=inf)
        seconds = self._seconds_by_guesses(batch)
        chosen = _best(guesses, len(batch.rows), seconds, limit_s)
        numbers = dict.fromkeys(rows, 0)
        for _, number, index in chosen:
            numbers[index] = number
        num_chosen, depth = len(chosen), max(numbers.values())
        for index in due:
            if not numbers[index] and num_chosen < max_guesses and seconds(num_chosen + 1, max(depth, 1)) <= limit_s:
                numbers[index], depth = 1, max(depth, 1)
                num_chosen += 1
        for index, number in numbers.items():
            if number:
                step.sequences[index].num_plain_steps = 0
        choices = []
        for index, number in numbers.items():
            num_forced = 0
            if step.sequences[index].sampling.grammar is not None:
                num_forced = min(rows[index], MAX_GUESSES, number + max_guesses - num_chosen)
                while num_forced > number and seconds(num_chosen + num_forced - number, depth) > limit_s:
                    num_forced -= 1
                num_chosen += max(0, num_forced - number)
            if number or num_forced:
                choices.append(Choice(index, number, num_forced))
        if any(numbers.values()):
            self._num_plain_rows = 0
        return choices

    def learn(self, sequences: Sequence[TokenSequence], output: StepOutput) -> None:
        """Update the shares of the ``sequences`` of a step that might guess by what became of their guesses."""
        num_more = sum(map(len, output.more.values()))
        self._end_trial(is_worth_it=num_more > _LEAST_WORTH * len(sequences))
        for row, num_guesses in output.num_guesses.items():
            sequence, num_right = sequences[row], len(output.more.get(row, ()))
            assert sequence.acceptance is not None
            self.num_guesses += num_guesses
            self.num_right += num_right
            if row in output.forced:
                continue
            is_wrong = num_right < num_guesses
            sequence.acceptance = _learned(sequence.acceptance, num_right, is_wrong, _NEWEST_WEIGHT)
            self._share = _learned(self._share, num_right, is_wrong, _NEWEST_WEIGHT_OF_ALL)

    def _end_trial(self, *, is_worth_it: bool) -> None:
        self._num_ahead = 0
        overlaps = self._plans_ahead and not is_worth_it
        self._num_between = min(2 * self._num_between + 1, STEPS_BETWEEN_TRIALS) if overlaps else 0


def _learned(share: float, num_right: int, is_wrong: bool, newest_weight: float) -> float:
    """Share of right guesses after so many right ones, and then a wrong one or none."""
    share = 1 - (1 - share) * (1 - newest_weight) ** num_right
    return share * (1 - newest_weight) if is_wrong else share


def _by_worth(shares: Mapping[int, float], limits: Mapping[int, int]) -> Iterator[_Guess]:
    """Guesses worth considering, the best first.

    Args:
        shares: of right guesses, by row.
        limits: of the number of guesses, by row.
    """
    best = [(-share, 1, row) for row, share in shares.items() if share >= _LEAST_WORTH]
    heapify(best)
    while best:
        minus_worth, number, row = guess = best[0]
        yield guess
        minus_worth *= shares[row]
        if number < min(limits[row], MAX_GUESSES) and -minus_worth >= _LEAST_WORTH:
            heapreplace(best, (minus_worth, number + 1, row))
        else:
            heappop(best)


def _best(guesses: Iterable[_Guess], num_tokens: int, seconds: Seconds, limit_s: float) -> list[_Guess]:
    """The first ``guesses``, as many as make most expected tokens per second, in a step of ``limit_s`` at most."""
    considered: list[_Guess] = []
    best, depth, expected = 0, 0, float(num_tokens)
    best_rate, lookahead = expected / seconds(0, 0), max(_LOOKAHEAD, num_tokens)
    for number, guess in enumerate(guesses, 1):
        minus_worth, of_row, _ = guess
        depth = max(depth, of_row)
        step_s = seconds(number, depth)
        if step_s > limit_s or number > best + lookahead:
            break
        considered.append(guess)
        expected -= minus_worth
        if expected / step_s > best_rate:
            best, best_rate = number, expected / step_s
    return considered[:best]
