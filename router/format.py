"""What the two APIs write differently: the choices of a response, whole or in chunks.

`pdserve.router.chat` and `pdserve.router.completions` implement it; `pdserve.router.chunks` and `pdserve.router.edge`
put the envelope around it.
"""

from __future__ import annotations

from typing import Any, Protocol

from pdserve.router.answer import Answer
from pdserve.router.answers import Answers
from pdserve.router.choice import AnswerEnd, AnswerToken, TextDelta


class WholeChoice:
    """A choice that is complete, or about to be."""

    def __init__(self, index: int, answer: Answer) -> None:
        """``answer``: which it belongs to."""
        self.index = index
        self.answer = answer
        self.tokens: list[AnswerToken] = []
        """Those of an echoed prompt included; none unless the format shows tokens."""
        self.num_echoed = 0
        self.end: AnswerEnd | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def generated_ids(self) -> list[int]:
        return [token.token for token in self.tokens[self.num_echoed :]]

    def add(self, delta: TextDelta, *, keeps_tokens: bool) -> None:
        """Take the next of the choice's deltas."""
        if delta.text:
            self._texts.append(delta.text)
        if keeps_tokens:
            self.tokens += (*delta.echoed, *delta.generated)
            self.num_echoed += len(delta.echoed)
        self.end = delta.end


class AnswerFormat(Protocol):
    """How one of the two APIs writes a choice, in JSON."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def whole_object(self) -> str:
        """``object`` of a whole response."""
        ...

    @property
    def chunk_object(self) -> str:
        """``object`` of a chunk of a stream."""
        ...

    @property
    def shows_tokens(self) -> bool:
        """Whether a choice tells of its tokens beside their text, so that one without text needs a chunk, too."""
        ...

    def opening(self, index: int) -> bytes:
        """What the chunk that opens a choice says of it; empty for no such chunk."""
        ...

    def delta(self, delta: TextDelta) -> bytes:
        """What a token's chunk says."""
        ...

    def ending(self, index: int, end: AnswerEnd) -> bytes:
        """What a choice's last chunk says."""
        ...

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        """A choice of a whole response."""
        ...

    def members(self, answers: Answers) -> dict[str, Any]:
        """What a whole response has beside its choices."""
        ...
