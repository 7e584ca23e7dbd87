"""The events of a streamed answer, one payload of bytes per token.

What is the same in every chunk of a stream is encoded once; a token costs the encoding of its own text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from pdserve.router.answer import Answer, AnswerEnd, TextDelta, Usage
from pdserve.router.schema import GenerationBody
from pdserve.router.sse import DONE, event

_encode = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """How one of the two APIs writes the choice of one answer, in JSON."""

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
    def returns_token_ids(self) -> bool:
        """Whether a choice carries its token ids, so that a token without text needs a chunk, too."""
        ...

    @property
    def opening(self) -> bytes:
        """Choice of the chunk that opens a stream; empty for none."""
        ...

    def token(self, delta: TextDelta) -> bytes:
        """Choice of a token's chunk."""
        ...

    def ending(self, end: AnswerEnd) -> bytes:
        """Choice of the last chunk."""
        ...

    def whole(self, deltas: Sequence[TextDelta], end: AnswerEnd) -> dict[str, Any]:
        """Choice of a whole response."""
        ...


class ChunkWriter:
    """Puts the envelope of one stream around its choices."""

    def __init__(self, envelope: dict[str, object], body: GenerationBody) -> None:
        """``envelope``: the members that all chunks share."""
        self._head = _encode(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if body.has_usage_chunk else b"]}"
        self._has_usage_chunk = body.has_usage_chunk
        self._has_usage_everywhere = body.has_usage_everywhere

    def chunk(self, choice: bytes, usage: Usage) -> bytes:
        """The event of one choice."""
        return event(self._head + choice + (_usage_tail(usage) if self._has_usage_everywhere else self._tail))

    def ending(self, usage: Usage) -> bytes:
        """What follows the last choice."""
        return event(self._head + _usage_tail(usage)) + DONE if self._has_usage_chunk else DONE


def token_ids_member(delta: TextDelta, is_wanted: bool) -> bytes:
    """The member of a chunk's choice that holds the token's id, or nothing."""
    return b',"token_ids":[%d]' % delta.token if is_wanted else b""


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + _encode(usage.as_dict()) + b"}"


async def payloads(answer: Answer, format: AnswerFormat, writer: ChunkWriter) -> AsyncGenerator[bytes, None]:
    """The events of each token; those of the stream's beginning and end go with the first and the last one.

    Raises:
        GenerationError: no token follows.
    """
    opening = format.opening
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            payload = writer.chunk(opening, answer.usage) if opening else b""
            opening = b""
            if delta.end is None or delta.text or delta.logprobs is not None or format.returns_token_ids:
                payload += writer.chunk(format.token(delta), answer.usage)
            if delta.end is not None:
                payload += writer.chunk(format.ending(delta.end), answer.usage) + writer.ending(answer.usage)
            yield payload
