"""Tokens that each sequence has seen and how often it generated them, for penalties.

Owned by an executor, which asks `TokenCountCache.counts` for each row with penalties at each step. A sequence's counts
are kept from one step to the next and grow by its new tokens, so that a long history is read once. They are a cache and
nothing else: what does not fit what was counted before (another sequence under the same number, fewer tokens than
before) is counted afresh, and sequences that were not used lately are forgotten when the sum passes a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_COUNTED_TOKENS = 4_194_304
"""Distinct tokens kept, of all sequences together; 16 bytes each. A step's own sequences are counted whatever they
need."""
MAX_COUNTED_SEQUENCES = 1024
"""Sequences kept: more than a step decodes as a rule."""

_TAIL_LENGTH = 32
_MAX_NEW_TOKENS = 16
"""With more new tokens than this, counting all of the history again is faster."""


class TokenCounts(NamedTuple):
    """The distinct tokens of a history, in ascending order. Not to be changed by who reads them."""

    tokens: npt.NDArray[np.int64]
    in_answer: npt.NDArray[np.int64]
    """Occurrences of each token in the answer; 0 for tokens of the prompt only."""

    @classmethod
    def of(cls, history: Sequence[int], num_prompt_tokens: int) -> TokenCounts:
        """Count a prompt and the answer after it."""
        tokens, index = np.unique(np.fromiter(history, np.int64, len(history)), return_inverse=True)
        return cls(tokens, np.bincount(index[num_prompt_tokens:], minlength=len(tokens)))

    def with_answered(self, token: int) -> TokenCounts:
        """These and one more token of the answer. The arrays may be the same ones, changed."""
        index = int(self.tokens.searchsorted(token))
        if index < len(self.tokens) and self.tokens[index] == token:
            self.in_answer[index] += 1
            return self
        return TokenCounts(np.insert(self.tokens, index, token), np.insert(self.in_answer, index, 1))


class _Counted(NamedTuple):
    """The counts of one sequence, and how far it was counted."""

    counts: TokenCounts
    num_prompt_tokens: int
    num_tokens: int
    tail: list[int]
    """The last tokens counted, by which the sequence is recognised."""

    def starts(self, history: Sequence[int], num_prompt_tokens: int) -> bool:
        """True if ``history`` starts with the counted tokens, as far as the last of them tell."""
        start, end = self.num_tokens - len(self.tail), self.num_tokens
        return num_prompt_tokens == self.num_prompt_tokens and list(history[start:end]) == self.tail


class TokenCountCache:
    """Counts by sequence. Not thread-safe."""

    def __init__(self, max_tokens: int = MAX_COUNTED_TOKENS, max_sequences: int = MAX_COUNTED_SEQUENCES) -> None:
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._by_sequence: OrderedDict[int, _Counted] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Distinct tokens kept."""
        return self._num_tokens

    def counts(
        self, sequence_id: int, history: Sequence[int], num_prompt_tokens: int, newest_token: int | None = None
    ) -> TokenCounts:
        """The counts of a sequence; valid until it is asked for again.

        Args:
            history: prompt and answer, as far as the scheduler knows them.
            num_prompt_tokens: how many of ``history`` are the prompt.
            newest_token: the answer's token after ``history``, if there is one.
        """
        newest = [] if newest_token is None else [newest_token]
        before = self._by_sequence.pop(sequence_id, None)
        if before is not None:
            self._num_tokens -= len(before.counts.tokens)
        is_known = before is not None and before.starts(history, num_prompt_tokens)
        if before is not None and is_known and len(history) - before.num_tokens <= _MAX_NEW_TOKENS:
            counts = before.counts
            for token in (*history[before.num_tokens :], *newest):
                counts = counts.with_answered(token)
        else:
            counts = TokenCounts.of([*history, *newest], num_prompt_tokens)
        tail = [*history[-_TAIL_LENGTH:], *newest]
        self._by_sequence[sequence_id] = _Counted(counts, num_prompt_tokens, len(history) + len(newest), tail)
        self._num_tokens += len(counts.tokens)
        self._forget_oldest()
        return counts

    def _forget_oldest(self) -> None:
        while len(self._by_sequence) > 1 and (
            self._num_tokens > self._max_tokens or len(self._by_sequence) > self._max_sequences
        ):
            _, forgotten = self._by_sequence.popitem(last=False)
            self._num_tokens -= len(forgotten.counts.tokens)
