"""Guesses of a sequence's next tokens, which the same step computes and checks.

Executors call `with_guesses` for rows that may have some (``StepRow.max_guesses``), compute the guesses like other new
tokens, and keep what follows from right ones (`num_right`). A wrong guess costs time and changes no token, so a drafter
needs no state that survives its worker. Never imports torch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple, Protocol

from pdserve.contracts.step import StepBatch, StepRow
from pdserve.model.sampling.grammars import GrammarMatchers

_LONGEST_MATCH = 4
_SHORTEST_MATCH = 2
_MAX_KEPT_TOKENS = 1 << 24
"""Tokens of the sequences kept, 1 to 4 bytes each. The newest sequence is kept whatever it needs."""


class Drafter(Protocol):
    """Guesses tokens."""

    def read(self, rows: Sequence[StepRow]) -> None:
        """Read what is new of the rows' sequences, for `guess`."""
        ...

    def guess(self, rows: Sequence[StepRow]) -> Sequence[Sequence[int]]:
        """Return for each row up to ``row.max_guesses`` tokens of the vocabulary that may follow ``row.history``."""
        ...


class NgramDrafter:
    """Guesses that a text goes on as it did after its last tokens before: where an answer quotes its prompt or itself.

    Looks for the last 2 to 4 tokens, the longest match first and of those the latest (Saxena, "Prompt lookup decoding",
    2023). A sequence is kept as a string with a character for each token, which is searched at the speed of memory and
    needs no index.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[int, str] = OrderedDict()
        """By sequence; the least recently used first."""
        self._num_kept = 0

    def read(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._text(row.sequence_id, row.history)

    def guess(self, rows: Sequence[StepRow]) -> Sequence[Sequence[int]]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: StepRow) -> Sequence[int]:
        text = self._text(row.sequence_id, row.history)
        end = len(text) - 1  # a match ends before the last token, or it would be the end of the text itself
        is_found = False
        for length in range(_SHORTEST_MATCH, _LONGEST_MATCH + 1):
            start = text.rfind(text[-length:], 0, end)  # a longer match ends with a shorter one
            if start < 0:
                break
            end, is_found = start + length, True
        return [ord(token) for token in islice(cycle(text[end:]), row.max_guesses)] if is_found else ()

    def _text(self, sequence_id: int, history: Sequence[int]) -> str:
        """The sequence's tokens. What another sequence left under its number costs right guesses at most."""
        text = self._texts.pop(sequence_id, "")
        self._num_kept += len(history) - len(text)
        text = text[: len(history)] + "".join(map(chr, history[len(text) :]))
        self._texts[sequence_id] = text
        while self._num_kept > _MAX_KEPT_TOKENS and len(self._texts) > 1:
            self._num_kept -= len(self._texts.popitem(last=False)[1])
        return text


class Guessing(NamedTuple):
    rows: list[StepRow]
    """With guesses, where they may have some."""
    seconds: float
    """Time that the guesses took, without that of reading sequences."""
    error: RuntimeError | None = None
    """Why none could be made, which fails the step alone, once its copies of blocks are made."""


def with_guesses(batch: StepBatch, drafter: Drafter | None, matchers: GrammarMatchers | None = None) -> Guessing:
    """Guess what the grammar prescribes, and else what ``drafter`` does."""
    if not batch.may_guess:
        return Guessing([*batch.rows], 0.0)
    try:
        return _guesses(batch, drafter, matchers)
    except Exception as error:
        return Guessing([*batch.rows], 0.0, RuntimeError(f"no guess could be made: {error!r}"))


def _guesses(batch: StepBatch, drafter: Drafter | None, matchers: GrammarMatchers | None) -> Guessing:
    rows, guessing, may_draft = batch.rows, [*batch.rows], list[int]()
    for index, row in enumerate(rows):
        if row.max_forced and matchers is not None and (forced := matchers.prescribed(row)):
            guessing[index] = replace(row, guesses=forced, is_forced=True)
        elif row.max_guesses:
            may_draft.append(index)
    if drafter is None or not may_draft:
        return Guessing(guessing, 0.0)
    drafting = [rows[index] for index in may_draft]
    drafter.read(drafting)
    start_s = time.perf_counter()
    drafts = drafter.guess(drafting)
    for index, draft in zip(may_draft, drafts, strict=True):
        if draft:
            guessing[index] = replace(rows[index], guesses=draft)
    return Guessing(guessing, time.perf_counter() - start_s)


def num_right(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Number of leading guesses that are right.

    Args:
        tokens: those sampled after the tokens before each guess.
    """
    pairs = zip(guesses, tokens, strict=False)
    return next((index for index, (guess, token) in enumerate(pairs) if guess != token), len(guesses))
