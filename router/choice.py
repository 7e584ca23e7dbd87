"""One choice of an answer: its tokens as text, up to its end, which a stop string may bring before the workers know.

`pdserve.router.answer` feeds it the tokens of its choice and passes on what it makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.stop_strings import StopStrings

AnswerEnd = Literal["stop", "length"]
"""``finish_reason`` as OpenAI writes it."""


class AnswerToken(NamedTuple):
    """One token, and where its text stands."""

    token: int
    logprobs: TokenLogprobs | None
    offset_chars: int
    """Of the choice's text, before this token's."""


class TextDelta(NamedTuple):
    """One token of a choice, and the text that became certain with it."""

    choice: int
    """Index in the response."""
    text: str
    """Often empty: a part of a character, what may be a stop string, or a token without text."""
    generated: Sequence[AnswerToken]
    """The one token; none where an echoed prompt is all that was asked for."""
    end: AnswerEnd | None
    """Set on the last token."""
    echoed: Sequence[AnswerToken] = ()
    """Tokens of the prompt, whose text ``text`` begins with."""


class Choice:
    """Text of one choice."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        *,
        shows_stop_token: bool,
        min_tokens: int,
        offset_chars: int,
    ) -> None:
        """
        Args:
            detokenizer: this choice's own, as ``stop_strings``.
            shows_stop_token: the token that ends the choice is part of its text.
            min_tokens: so many tokens pass before stop strings are looked for.
            offset_chars: of an echoed prompt, which the text comes after.
        """
        self.index = index
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._shows_stop_token = shows_stop_token
        self._min_tokens = min_tokens
        self._offset_chars = offset_chars
        self.is_over = False

    def push(self, delta: TokenEvent) -> TextDelta:
        """Take the next token. After the end nothing more may be pushed."""
        assert not self.is_over
        token = AnswerToken(delta.token, delta.logprobs, self._offset_chars)
        is_shown = self._shows_stop_token or delta.finish is not FinishReason.STOP
        text = self._detokenizer.push(delta.token) if is_shown else ""
        end = _END[delta.finish]
        if end is not None:
            text += self._detokenizer.flush()
        self._offset_chars += len(text)
        is_stopped = False
        if delta.index >= self._min_tokens:
            text, is_stopped = self._stop_strings.push(text)
        if is_stopped:
            end = "stop"
        elif end is not None:
            text += self._stop_strings.flush()
        self.is_over = end is not None
        return TextDelta(self.index, text, (token,), end)


_END: dict[FinishReason, AnswerEnd | None] = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
