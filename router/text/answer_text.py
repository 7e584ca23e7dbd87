"""Incremental detokenisation and stop-string search for one answer.

A token may be part of a character, and its text may depend on the previous token: a leading space that a decoder
strips, bytes that only together form a character. Each step therefore decodes the held tokens after the last ones
returned and returns the added text, as vLLM and text-generation-inference do. `tokenizers.decoders.DecodeStream` takes
6 us per token against 7 to 12 here, but raises on bytes that are not a character and loses the text of an unfinished
one.

Text that may begin a stop string is held back until it is known not to. The cut does not depend on how the text was
split: it comes before the stop string that is complete first.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Output of a decoder for bytes that are not, or not yet, a character."""

MAX_HELD_TOKENS = 32
"""Limit on held tokens. A character takes far fewer; a longer run is not text and is returned as decoded."""


class Detokenizer:
    """Text of one answer. Never splits a character; `flush` returns the rest of an unfinished one.

    The concatenation of all returned text equals the decoding of all tokens, unless more than `MAX_HELD_TOKENS` in a
    row are broken bytes.
    """

    def __init__(
        self, tokenizer: Tokenizer, hidden_ids: Container[int], context: Sequence[int] = (), *, piece_tokens: int = 1
    ) -> None:
        """Begin an answer.

        Args:
            hidden_ids: tokens without text.
            context: tokens that the answer continues; their text is not returned again.
            piece_tokens: tokens to hold before any text is returned. More than one is cheaper.
        """
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._piece_tokens = piece_tokens
        self._held: list[int] = []
        self._advance([token for token in context if token not in hidden_ids])

    def push(self, token: int) -> str:
        """Take the next token and return the text that is now certain, often that of the token."""
        if token in self._hidden_ids:
            return ""
        self._held.append(token)
        num_waited = len(self._held) - self._piece_tokens
        if num_waited < 0:
            return ""
        text = self._decode(self._context + self._held)
        is_certain = len(text) > len(self._context_text) and not text.endswith(_INCOMPLETE)
        if not is_certain and num_waited < MAX_HELD_TOKENS - 1:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """Return the remaining text at the end of the answer."""
        return self._give(self._decode(self._context + self._held)) if self._held else ""

    def _give(self, text: str) -> str:
        added = text[len(self._context_text) :]
        self._advance(self._held)
        return added

    def _advance(self, context: list[int]) -> None:
        self._context = context
        self._context_text = self._decode(context)
        self._held = []

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class ByteDetokenizer:
    """`Detokenizer` of a byte-level tokenizer, whose text is that of its tokens' bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden_ids: Container[int], context: Sequence[int]) -> None:
        """
        Args:
            token_bytes: returns the bytes of a token.
            hidden_ids, context: as in `Detokenizer`.
        """
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._begun = b""
        """Bytes of an unfinished character."""
        for token in context:
            self.push(token)

    def push(self, token: int) -> str:
        """Take the next token and return the text that is now certain, often that of the token."""
        if token in self._hidden_ids:
            return ""
        content = self._begun + self._token_bytes(token)
        text, num_decoded = utf_8_decode(content, "replace", False)
        self._begun = content[num_decoded:]
        return text

    def flush(self) -> str:
        """Return the remaining text at the end of the answer."""
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


class MarkedDetokenizer(NamedTuple):
    """Writes a mark for some tokens, which ends the character before it; any other token's text is that of another
    detokenizer."""

    texts: Detokenizer | ByteDetokenizer
    marks: Mapping[int, str]

    def push(self, token: int) -> str:
        mark = self.marks.get(token)
        return self.texts.push(token) if mark is None else self.texts.flush() + mark

    def flush(self) -> str:
        return self.texts.flush()


AnyDetokenizer = Detokenizer | ByteDetokenizer | MarkedDetokenizer


class StopStrings:
    """Stop strings of one answer; none is empty."""

    def __init__(self, stops: Sequence[str], *, are_shown: bool = False) -> None:
        """``are_shown``: whether the text includes the stop string."""
        assert all(stops)
        self._stops = tuple(stops)
        self._are_shown = are_shown
        self._held = ""
        self.is_found = False
        """The text returned last is cut at a stop string."""
        self.found = ""
        """That stop string."""

    def push(self, text: str) -> str:
        """Take the next piece of text and return what may be written. Must not be called after a stop."""
        if not self._stops:
            return text
        text = self._held + text
        found = self._find(text)
        if found is not None:
            end, start = found
            self.is_found, self.found = True, text[start:end]
            return text[: end if self._are_shown else start]
        safe = len(text) - max(num_held_chars(text, stop) for stop in self._stops)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text still held back at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """End and start of the stop string that ends first; the longest of those with the same end."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, default=None)


def num_held_chars(text: str, tag: str) -> int:
    """Characters at the end of ``text`` that may begin ``tag``: its longest suffix that is a proper prefix of that."""
    start = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while start >= 0:
        if tag.startswith(text[start:]):
            return len(text) - start
        start = text.find(tag[0], start + 1)
    return 0
