"""Masks of the tokens that a grammar allows next, for each sequence that follows one.

An executor asks `GrammarMatchers.fill` for each such row at each step. A matcher stays cached between steps and accepts
the sequence's new tokens, and for a moment the row's guesses. It is a function of the grammar and the answer alone, so
it is never sent: after a handoff, a preemption, a fork or a re-dispatch it is rebuilt from the answer. The least
recently used ones are dropped beyond a bound. Grammars are compiled elsewhere (`pdserve.engine.worker.grammars`), by
xgrammar (Dong et al., "XGrammar", 2024, arXiv 2411.15100), which only this module and the compiler import, once the
first grammar arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        self._depth = 0
        """Tokens to go back to the start of the grammar."""
        self._num_accepted = 0
        self._tail: list[int] = []

    def can_extend_to(self, grammar: Grammar, answer: Sequence[int]) -> bool:
        """Return True if ``answer`` starts with the accepted tokens, judged by the last of them."""
        start, end = self._num_accepted - len(self._tail), self._num_accepted
        return self.grammar == grammar and list(answer[start:end]) == self._tail

    def extend_to(self, answer: Sequence[int]) -> None:
        for token in answer[self._num_accepted :]:
            self.accept(token)
        self._num_accepted = len(answer)
        self._tail = list(answer[-_TAIL_LENGTH:])

    def accept(self, token: int) -> None:
        if not self.is_broken and not self.matcher.is_terminated() and self.matcher.accept_token(token):
            self._depth += 1
        else:
            self.is_broken = True

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Accept what may follow; then go back."""
        depth, was_broken = self._depth, self.is_broken
        try:
            yield
        finally:
            if self._depth > depth:
                self.matcher.rollback(self._depth - depth)
            self._depth, self.is_broken = depth, was_broken


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
        self._spelled: dict[bytes, int] = {}
        """Tokens by their text, read once a grammar prescribes some."""
        self._longest = 0
        """Bytes of the longest of them."""

    @property
    def num_words(self) -> int:
        """Words of a mask: one bit for each token of the vocabulary."""
        return len(self._ends)

    def fill(self, masks: npt.NDArray[np.int32], row: StepRow, previous_token: Callable[[int], int]) -> None:
        """Set the bits of the tokens that a row may sample after its last token and after each guess; at least one of
        each mask is set.

        Banned tokens are among them only where no other may follow: they delay the end of an answer (``min_tokens``),
        and this one is complete. An answer that does not follow the grammar, or has no continuation, may only end.

        Args:
            masks: ``[1 + guesses, num_words]``; bit ``t % 32`` of word ``t // 32`` is token t.
            row: a row with a grammar.
            previous_token: returns the token sampled by a row of the previous step.
        """
        late = (previous_token(row.previous_row),) if row.previous_row >= 0 else ()
        match = self._match(row, late)
        self._fill_next(masks[0], match, row.banned_tokens)
        with match.ahead():
            for before, mask, guess in zip(masks, masks[1:], row.guesses, strict=False):
                match.is_broken |= not before[guess // 32] >> guess % 32 & 1  # xgrammar logs special tokens
                match.accept(guess)
                self._fill_next(mask, match, row.banned_tokens)

    def prescribed(self, row: StepRow) -> list[int]:
        """Return up to ``row.max_forced`` tokens that spell what the grammar prescribes after the known tokens, the
        longest first: a text has other spellings, which models seldom choose."""
        match, tokens = self._match(row), list[int]()
        with match.ahead():
            while len(tokens) < row.max_forced and not match.is_broken:
                token = self._longest_token(match.grammar, _prescribed_text(match.matcher))
                if token is None:
                    break
                match.accept(token)
                tokens.append(token)
        return tokens

    def _longest_token(self, grammar: Grammar, text: bytes) -> int | None:
        """The longest token that ``text`` starts with."""
        if not text:
            return None
        if not self._spelled:
            vocabulary = self._compiled(grammar).tokenizer_info.decoded_vocab
            self._spelled = {spelling: token for token, spelling in enumerate(vocabulary) if spelling}
            self._longest = max(map(len, self._spelled))
        prefixes = (text[:length] for length in range(min(len(text), self._longest), 0, -1))
        return next((self._spelled[prefix] for prefix in prefixes if prefix in self._spelled), None)

    def _match(self, row: StepRow, late: tuple[int, ...] = ()) -> _Match:
        """The sequence's matcher after its known tokens and the ``late`` ones."""
        assert row.sample is not None
        assert row.sample.grammar is not None
        grammar, answer = row.sample.grammar, [*row.history[row.num_prompt_tokens :], *late]
        match = self._by_sequence.pop(row.sequence_id, None)
        if match is None or not match.can_extend_to(grammar, answer):
            import xgrammar

            match = _Match(grammar, xgrammar.GrammarMatcher(self._compiled(grammar)))
        match.extend_to(answer)
        self._by_sequence[row.sequence_id] = match
        if len(self._by_sequence) > self._max_matchers:
            self._by_sequence.popitem(last=False)
        return match

    def _fill_next(self, mask: npt.NDArray[np.int32], match: _Match, banned_tokens: Sequence[int]) -> None:
        if match.is_broken or match.matcher.is_terminated():
            mask[:] = self._ends
            return
        match.matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        mask &= self._vocabulary  # it sets bits beyond the vocabulary, too
        if not mask.any():
            mask[:] = self._ends
        elif banned_tokens:
            allowed = mask & ~_bitmask(banned_tokens, 32 * len(mask))
            if allowed.any():
                mask[:] = allowed


def _prescribed_text(matcher: xgrammar.GrammarMatcher) -> bytes:
    """What the grammar prescribes next, in whole characters: models seldom write a character in tokens of its own."""
    try:
        text: str = matcher.find_jump_forward_string()
    except UnicodeDecodeError as error:  # where characters that may follow begin alike, or one has begun
        return error.object[: error.start]
    return text.encode()


def _bitmask(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
