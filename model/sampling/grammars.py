"""Masks of the tokens that a grammar allows next, for each sequence that follows one.

An executor asks `GrammarMatchers.fill` for each such row at each step. A matcher stays cached between steps and accepts
the sequence's new tokens. It is a function of the grammar and the answer alone, so it is never sent: after a handoff, a
preemption, a fork or a re-dispatch it is rebuilt from the answer. The least recently used ones are dropped beyond a
bound. Grammars are compiled elsewhere (`pdserve.engine.worker.grammars`), by xgrammar (Dong et al., "XGrammar", 2024,
arXiv 2411.15100), which only this module and the compiler import, once the first grammar arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdserve.contracts.request import Grammar
from pdserve.contracts.step import StepRow

if TYPE_CHECKING:
    import xgrammar

MAX_MATCHERS = 1024
"""Matchers kept: more than a step usually decodes."""

_TAIL_LENGTH = 32


class _Match:
    """How far a sequence's answer has matched its grammar."""

    def __init__(self, grammar: Grammar, matcher: xgrammar.GrammarMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.is_broken = False
        """The answer does not follow the grammar, or is complete: only its end may follow."""
        self._num_accepted = 0
        self._tail: list[int] = []

    def can_extend_to(self, grammar: Grammar, answer: Sequence[int]) -> bool:
        """Return True if ``answer`` starts with the accepted tokens, judged by the last of them."""
        start, end = self._num_accepted - len(self._tail), self._num_accepted
        return self.grammar == grammar and list(answer[start:end]) == self._tail

    def extend_to(self, answer: Sequence[int]) -> None:
        for token in answer[self._num_accepted :]:
            self.is_broken = self.is_broken or not self.matcher.accept_token(token)
        self._num_accepted = len(answer)
        self._tail = list(answer[-_TAIL_LENGTH:])


class GrammarMatchers:
    """Matchers by sequence. Not thread-safe."""

    def __init__(
        self,
        compiled: Callable[[Grammar], xgrammar.CompiledGrammar],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_matchers: int = MAX_MATCHERS,
    ) -> None:
        """
        Args:
            compiled: returns a compiled grammar; a worker takes no request before its grammar is compiled.
            vocab_size: logits of a row.
            eos_token_ids: tokens that end an answer, at least one.
            max_matchers: sequences kept.
        """
        self._compiled = compiled
        self._ends = _bitmask(eos_token_ids, vocab_size)
        self._vocabulary = _bitmask(range(vocab_size), vocab_size)
        self._max_matchers = max_matchers
        self._by_sequence: OrderedDict[int, _Match] = OrderedDict()

    @property
    def num_words(self) -> int:
        """Words of a mask: one bit for each token of the vocabulary."""
        return len(self._ends)

    def fill(self, mask: npt.NDArray[np.int32], row: StepRow, previous_token: Callable[[int], int]) -> None:
        """Set the bits of the tokens that a row may sample; at least one is set.

        Banned tokens are among them only where no other may follow: they delay the end of an answer (``min_tokens``),
        and this one is complete. An answer that does not follow the grammar, or has no continuation, may only end.

        Args:
            mask: ``[num_words]``; bit ``t % 32`` of word ``t // 32`` is token t.
            row: a row with a grammar.
            previous_token: returns the token sampled by a row of the previous step.
        """
        assert row.sample is not None
        assert row.sample.grammar is not None
        grammar, answer = row.sample.grammar, [*row.history[row.num_prompt_tokens :]]
        if row.previous_row >= 0:
            answer.append(previous_token(row.previous_row))
        match = self._by_sequence.pop(row.sequence_id, None)
        if match is None or not match.can_extend_to(grammar, answer):
            import xgrammar

            match = _Match(grammar, xgrammar.GrammarMatcher(self._compiled(grammar)))
        match.extend_to(answer)
        self._by_sequence[row.sequence_id] = match
        if len(self._by_sequence) > self._max_matchers:
            self._by_sequence.popitem(last=False)
        if match.is_broken or match.matcher.is_terminated():
            mask[:] = self._ends
            return
        match.matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        mask &= self._vocabulary  # it sets bits beyond the vocabulary, too
        if not mask.any():
            mask[:] = self._ends
        elif row.banned_tokens:
            allowed = mask & ~_bitmask(row.banned_tokens, 32 * len(mask))
            if allowed.any():
                mask[:] = allowed


def _bitmask(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
