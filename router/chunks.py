"""The events of a streamed answer: one chunk per token, and those of its beginning and end.

What is the same in every chunk of a stream is encoded once; a token costs the encoding of its own text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from pdserve.router.answer import Usage
from pdserve.router.answers import Answers
from pdserve.router.choice import TextDelta
from pdserve.router.format import AnswerFormat
from pdserve.router.off_loop import off_loop
from pdserve.router.schema import GenerationBody
from pdserve.router.sse import DONE, TokenEvents, event

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the answers of one stream."""

    def __init__(
        self, envelope: dict[str, object], body: GenerationBody, answers: Answers, format: AnswerFormat
    ) -> None:
        """``envelope``: the members that all chunks share."""
        self._head = _encode(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if body.has_usage_chunk else b"]}"
        self._has_usage_chunk = body.has_usage_chunk
        self._has_usage_everywhere = body.has_usage_everywhere
        self._shows_prompt = body.shows_prompt
        self._answers = answers
        self._format = format
        self._unopened = set(range(body.num_answers))
        self._num_running = body.num_answers

    async def events(self) -> AsyncGenerator[TokenEvents, None]:
        """The events of tokens as they come; those of a beginning and an end go with the first and the last token.

        Raises:
            GenerationError: no token follows.
        """
        async with aclosing(self._answers.deltas()) as deltas:
            async for together in deltas:
                yield TokenEvents([delta.choice for delta in together], await self._data(together))

    async def _data(self, together: Sequence[TextDelta]) -> bytes:
        num_echoed = sum(len(delta.echoed) for delta in together) if self._shows_prompt else 0
        return await off_loop(num_echoed, lambda: b"".join(map(self._token, together)))

    def _token(self, delta: TextDelta) -> bytes:
        data = self._opening(delta.choice) if delta.choice in self._unopened else b""
        if delta.end is None or delta.text or self._format.shows_tokens:
            data += self._chunk(self._format.delta(delta))
        if delta.end is not None:
            data += self._ending(delta)
        return data

    def _opening(self, index: int) -> bytes:
        self._unopened.remove(index)
        opening = self._format.opening(index)
        return self._chunk(opening) if opening else b""

    def _ending(self, delta: TextDelta) -> bytes:
        assert delta.end is not None
        data = self._chunk(self._format.ending(delta.choice, delta.end))
        self._num_running -= 1
        if self._num_running:
            return data
        if self._has_usage_chunk:
            data += event(self._head + _usage_tail(self._answers.usage))
        return data + DONE

    def _chunk(self, choice: bytes) -> bytes:
        tail = _usage_tail(self._answers.usage) if self._has_usage_everywhere else self._tail
        return event(self._head + choice + tail)


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + _encode(usage.as_dict()) + b"}"
