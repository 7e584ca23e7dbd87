"""Answers as text: choices of one prompt and prompts of one request, merged into one stream of `TextDelta`.

`Choice` turns tokens into text until it ends, possibly at a stop string that workers do not know about. `Answer` runs
one prompt's generation; `Answers` runs all prompts of a request concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.cluster.cluster import Cluster, TokenStream
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.text.answer_text import Detokenizer, StopStrings

AnswerEnd = Literal["stop", "length"]
"""``finish_reason`` in OpenAI's spelling."""


class AnswerToken(NamedTuple):
    """Token and the position of its text."""

    token: int
    logprobs: TokenLogprobs | None
    offset_chars: int
    """Characters of the choice's text before this token's."""


class TextDelta(NamedTuple):
    """One token of a choice and the text that became certain with it."""

    choice: int
    """Index in the response."""
    text: str
    """Often empty: part of a character, a possible stop string, or a token without text."""
    generated: Sequence[AnswerToken]
    """The generated token; empty if only an echoed prompt was requested."""
    end: AnswerEnd | None
    """Set on the last token."""
    echoed: Sequence[AnswerToken] = ()
    """Prompt tokens; ``text`` begins with their text."""


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
            detokenizer: owned by this choice, as is ``stop_strings``.
            shows_stop_token: whether the token that ends the choice is part of its text.
            min_tokens: tokens before stop strings are searched.
            offset_chars: length of an echoed prompt that precedes the text.
        """
        self.index = index
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._shows_stop_token = shows_stop_token
        self._min_tokens = min_tokens
        self._offset_chars = offset_chars
        self.is_over = False

    def push(self, delta: TokenEvent) -> TextDelta:
        """Take the next token. Must not be called after the end."""
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


class Usage(NamedTuple):
    """Token counts of a request; every generated token counts, shown or not."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int

    def as_dict(self) -> dict[str, object]:
        """The ``usage`` object of a response."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class Echo(NamedTuple):
    """Prompt that is part of the answer."""

    text: str
    offsets_chars: Sequence[int]
    """Start of each prompt token in the text."""
    is_all: bool
    """Whether generated tokens are hidden."""


class Answer:
    """Choices of one prompt. Starts when `deltas` is iterated; stops when it is closed."""

    def __init__(
        self,
        cluster: Cluster,
        spec: RequestSpec,
        choices: Sequence[Choice],
        echo: Echo | None = None,
    ) -> None:
        self.prompt_tokens = spec.prompt_tokens
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        """Log probabilities of every prompt token but the first, if requested; set with the first delta."""
        self._cluster = cluster
        self._spec = spec
        self._choices = choices
        self._echo = echo
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_tokens), self._num_cached_tokens, self._num_completion_tokens)

    async def deltas(self) -> AsyncGenerator[list[TextDelta], None]:
        """Start the generation and yield tokens of all choices; tokens that arrive together share one list. The caller
        must close it; closing early cancels the generation.

        Raises:
            GenerationError: refused, or failed on the way.
        """
        generation = self._cluster.start(self._spec)
        num_running = len(self._choices)
        try:
            async for token in generation:
                deltas = [
                    self._delta_of(token, generation)
                    for token in (token, *generation.take_ready())
                    if not self._choices[token.choice].is_over  # by a stop string that workers do not know about yet
                ]
                num_running -= sum(delta.end is not None for delta in deltas)
                if deltas:
                    yield deltas
                if not num_running:
                    return
        finally:
            generation.cancel()
        raise GenerationError(500, "the generation ended without a last token")

    def _delta_of(self, token: TokenEvent, generation: TokenStream) -> TextDelta:
        delta = self._next_of(self._choices[token.choice], token, generation)
        if delta.end is not None and token.finish is FinishReason.NONE:
            generation.finish(token.choice)
        return delta

    def _next_of(self, choice: Choice, token: TokenEvent, generation: TokenStream) -> TextDelta:
        if token.index == 0:
            self._num_cached_tokens = generation.num_cached_tokens
            self.prompt_logprobs = generation.prompt_logprobs
        echo = self._echo
        if echo is not None and echo.is_all:
            choice.is_over = True
            return TextDelta(choice.index, echo.text, (), "length", self._echoed(echo))
        self._num_completion_tokens += 1
        delta = choice.push(token)
        if echo is not None and token.index == 0:
            return delta._replace(text=echo.text + delta.text, echoed=self._echoed(echo))
        return delta

    def _echoed(self, echo: Echo) -> Sequence[AnswerToken]:
        """Prompt tokens; the first has no log probability because nothing precedes it."""
        logprobs = (None, *(self.prompt_logprobs or (None,) * (len(self.prompt_tokens) - 1)))
        return [AnswerToken(*row) for row in zip(self.prompt_tokens, logprobs, echo.offsets_chars, strict=True)]


MAX_WAITING = 64
"""Lists of tokens that wait for the writer of a request before its answers wait, too."""


class Answers:
    """Answers to all prompts of a request. Start when `deltas` is iterated; stop when it is closed."""

    def __init__(self, by_prompt: Sequence[Answer]) -> None:
        self.by_prompt = by_prompt

    @property
    def usage(self) -> Usage:
        return Usage(*map(sum, zip(*(answer.usage for answer in self.by_prompt), strict=True)))

    def deltas(self) -> AsyncGenerator[list[TextDelta], None]:
        """Start every answer and yield their tokens; tokens that arrive together share one list. The caller must close
        it; closing early, or the failure of one answer, cancels all.

        Raises:
            GenerationError: an answer was refused, or failed on the way.
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
