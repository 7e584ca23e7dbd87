"""The answers to all prompts of one request, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pdserve.router.answer import Answer, Usage
from pdserve.router.choice import TextDelta

MAX_WAITING = 64
"""Lists of tokens that wait for the writer of a request before its answers wait, too."""


class Answers:
    """Nothing runs before `deltas` is iterated, and nothing after it is closed."""

    def __init__(self, by_prompt: Sequence[Answer]) -> None:
        self.by_prompt = by_prompt

    @property
    def usage(self) -> Usage:
        """Of all of them, so far."""
        return Usage(*map(sum, zip(*(answer.usage for answer in self.by_prompt), strict=True)))

    def deltas(self) -> AsyncGenerator[list[TextDelta], None]:
        """Start every answer and yield their tokens as they come, those that come together in one list.
        To be closed by the caller; closing early, or the failure of one of them, cancels all.

        Raises:
            GenerationError: one was refused, or failed on the way.
        """
        return self.by_prompt[0].deltas() if len(self.by_prompt) == 1 else self._interleaved()

    async def _interleaved(self) -> AsyncGenerator[list[TextDelta], None]:
        queue = asyncio.Queue[list[TextDelta] | Exception | None](MAX_WAITING)

        async def read(answer: Answer) -> None:
            try:
                async with aclosing(answer.deltas()) as deltas:
                    async for delta in deltas:
                        await queue.put(delta)
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        readers = [asyncio.create_task(read(answer)) for answer in self.by_prompt]
        num_running = len(readers)
        try:
            while num_running:
                match await queue.get():
                    case None:
                        num_running -= 1
                    case list() as deltas:
                        yield deltas
                    case error:
                        raise error
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
