"""Tokens that each sequence has seen and how often it generated them, for penalties.

An executor's sampler asks `TokenCountCache.counts` for each row with penalties at each step. Counts stay cached between
steps and grow by the sequence's new tokens, so that a long history is read once. A cached count that does not match its
sequence (another one under the same number, or fewer tokens than before) is replaced; the least recently used ones are
dropped beyond a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

MAX_COUNTED_TOKENS = 4_194_304
"""Distinct tokens kept, over all sequences; 16 bytes each. The newest sequence is kept whatever it needs."""
MAX_COUNTED_SEQUENCES = 1024
"""Sequences kept: more than a step usually decodes."""

_TAIL_LENGTH = 32
_MAX_NEW_TOKENS = 16
"""With more new tokens than this, counting the whole history again is faster."""


class TokenCounts:
    """Counts of the distinct tokens of one sequence. Read-only outside this module."""

    def __init__(self, history: Sequence[int], num_prompt_tokens: int) -> None:
        """Count a prompt and the answer after it."""
        self.tokens, index = np.unique(np.fromiter(history, np.int64, len(history)), return_inverse=True)
        """int64, ascending."""
        self.in_answer = np.bincount(index[num_prompt_tokens:], minlength=len(self.tokens))
        """int64: occurrences of each token in the answer; 0 for tokens of the prompt only."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = len(history)
        self._tail = list(history[-_TAIL_LENGTH:])

    def can_extend_to(self, history: Sequence[int], num_prompt_tokens: int) -> bool:
        """Return True if ``history`` starts with the counted tokens, judged by the last of them, and adds few."""
        start, end = self._num_counted - len(self._tail), self._num_counted
        is_same = num_prompt_tokens == self._num_prompt_tokens and list(history[start:end]) == self._tail
        return is_same and len(history) - end <= _MAX_NEW_TOKENS

    def extend_to(self, history: Sequence[int], newest: Sequence[int]) -> None:
        """Add the tokens of ``history`` that are not counted yet, and ``newest``; all belong to the answer."""
        for token in (*history[self._num_counted :], *newest):
            index = int(self.tokens.searchsorted(token))
            if index == len(self.tokens) or self.tokens[index] != token:
                self.tokens = np.insert(self.tokens, index, token)
                self.in_answer = np.insert(self.in_answer, index, 0)
            self.in_answer[index] += 1
        self._num_counted = len(history) + len(newest)
        self._tail = [*history[-_TAIL_LENGTH:], *newest]


class TokenCountCache:
    """Counts by sequence. Not thread-safe."""

    def __init__(self, max_tokens: int = MAX_COUNTED_TOKENS, max_sequences: int = MAX_COUNTED_SEQUENCES) -> None:
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._by_sequence: OrderedDict[int, TokenCounts] = OrderedDict()
        self.num_tokens = 0
        """Distinct tokens kept."""

    def counts(
        self, sequence_id: int, history: Sequence[int], num_prompt_tokens: int, newest_token: int | None = None
    ) -> TokenCounts:
        """Return the counts of a sequence; valid until the next call for it.

        Args:
            history: prompt and answer, as far as the scheduler knows them.
            num_prompt_tokens: prompt tokens at the start of ``history``.
            newest_token: the answer's token after ``history``, if any.
        """
        counts = self._by_sequence.pop(sequence_id, None)
        if counts is not None:
            self.num_tokens -= len(counts.tokens)
        newest = () if newest_token is None else (newest_token,)
        if counts is not None and counts.can_extend_to(history, num_prompt_tokens):
            counts.extend_to(history, newest)
        else:
            counts = TokenCounts([*history, *newest], num_prompt_tokens)
        self._by_sequence[sequence_id] = counts
        self.num_tokens += len(counts.tokens)
        while len(self._by_sequence) > 1 and (
            self.num_tokens > self._max_tokens or len(self._by_sequence) > self._max_sequences
        ):
            _, oldest = self._by_sequence.popitem(last=False)
            self.num_tokens -= len(oldest.tokens)
        return counts
