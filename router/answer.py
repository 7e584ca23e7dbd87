"""The answers to one prompt: a generation's tokens as text, choice by choice, and its usage.

Both routes and both ways of answering (whole, streamed) read them through `Answer.deltas`, several prompts' through
`pdserve.router.answers`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason, SamplingParams
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.choice import AnswerToken, Choice, TextDelta
from pdserve.router.generation import Generation, Generator
from pdserve.router.request import GenerationError


class Usage(NamedTuple):
    """Tokens of a request, every generated one counted, shown or not."""

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
    """The prompt, where it is part of the answer."""

    text: str
    offsets_chars: Sequence[int]
    """Where in the text each of the prompt's tokens begins."""
    is_all: bool
    """Nothing that is generated is shown."""


class Answer:
    """The choices of one prompt. Nothing runs before `deltas` is iterated, and nothing after it is closed."""

    def __init__(
        self,
        generator: Generator,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        arrived_s: float,
        cache_salt: bytes,
        choices: Sequence[Choice],
        echo: Echo | None = None,
    ) -> None:
        """``arrived_s``: `time.monotonic` when the request arrived."""
        self.prompt_tokens = prompt_tokens
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        """Of every prompt token but the first, once the first delta is out, where they were asked for."""
        self._generator = generator
        self._sampling = sampling
        self._arrived_s = arrived_s
        self._cache_salt = cache_salt
        self._choices = choices
        self._echo = echo
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(len(self.prompt_tokens), self._num_cached_tokens, self._num_completion_tokens)

    async def deltas(self) -> AsyncGenerator[list[TextDelta], None]:
        """Start the generation and yield the tokens of all choices as they come, those that come together in one list.
        To be closed by the caller; closing early cancels it.

        Raises:
            GenerationError: refused, or failed on the way.
        """
        generation = self._generator.start(
            self.prompt_tokens,
            self._sampling,
            arrived_s=self._arrived_s,
            cache_salt=self._cache_salt,
            num_choices=len(self._choices),
        )
        num_running = len(self._choices)
        try:
            async for token in generation:
                deltas = [
                    self._delta_of(token, generation)
                    for token in (token, *generation.take_ready())
                    if not self._choices[token.choice].is_over  # by a stop string, of which workers have yet to hear
                ]
                num_running -= sum(delta.end is not None for delta in deltas)
                if deltas:
                    yield deltas
                if not num_running:
                    return
        finally:
            generation.cancel()
        raise GenerationError(500, "the generation ended without a last token")

    def _delta_of(self, token: TokenEvent, generation: Generation) -> TextDelta:
        delta = self._next_of(self._choices[token.choice], token, generation)
        if delta.end is not None and token.finish is FinishReason.NONE:
            generation.finish(token.choice)
        return delta

    def _next_of(self, choice: Choice, token: TokenEvent, generation: Generation) -> TextDelta:
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
        """The prompt's tokens; nothing comes before the first one, so it has no probability."""
        logprobs = (None, *(self.prompt_logprobs or (None,) * (len(self.prompt_tokens) - 1)))
        return [AnswerToken(*row) for row in zip(self.prompt_tokens, logprobs, echo.offsets_chars, strict=True)]
