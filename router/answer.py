"""One answer: a generation's tokens as text, with stop strings applied and usage counted.

Both routes and both ways of answering (whole, streamed) read an answer through `Answer.deltas`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, NamedTuple

from pdserve.contracts.request import FinishReason, SamplingParams
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.generation import GenerationError, Generator, TokenDelta
from pdserve.router.stop_strings import StopStrings

AnswerEnd = Literal["stop", "length"]
"""``finish_reason`` as OpenAI writes it."""


class TextDelta(NamedTuple):
    """One token of the answer, and the text that became certain with it."""

    text: str
    """Often empty: a part of a character, what may be a stop string, or a token without text."""
    token: int
    logprobs: TokenLogprobs | None
    end: AnswerEnd | None
    """Set on the last token."""


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


class Answer:
    """The answer to one prompt. Nothing runs before `deltas` is iterated, and nothing after it is closed."""

    def __init__(
        self,
        generator: Generator,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        arrived_s: float,
        cache_salt: bytes,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
    ) -> None:
        """``arrived_s``: `time.monotonic` when the request arrived. The last two are this answer's own."""
        self._generator = generator
        self._prompt_tokens = prompt_tokens
        self._sampling = sampling
        self._arrived_s = arrived_s
        self._cache_salt = cache_salt
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(len(self._prompt_tokens), self._num_cached_tokens, self._num_completion_tokens)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Start the generation and yield each of its tokens. To be closed by the caller; closing early cancels it.

        Raises:
            GenerationError: refused, or failed on the way.
        """
        generation = self._generator.start(
            self._prompt_tokens, self._sampling, arrived_s=self._arrived_s, cache_salt=self._cache_salt
        )
        end: AnswerEnd | None = None
        try:
            async for token in generation:
                if token.index == 0:
                    self._num_cached_tokens = generation.num_cached_tokens
                delta = self._text_of(token)
                end = delta.end
                if end is not None and token.finish is FinishReason.NONE:
                    generation.finish(token.choice)  # a stop string, of which the workers know nothing
                    yield delta
                    return
                yield delta
        finally:
            generation.cancel()
        if end is None:
            raise GenerationError(500, "the generation ended without a last token")

    def _text_of(self, token: TokenDelta) -> TextDelta:
        self._num_completion_tokens += 1
        # The token that stops an answer is not part of its text
        text = "" if token.finish is FinishReason.STOP else self._detokenizer.push(token.token)
        end = _END[token.finish]
        if end is not None:
            text += self._detokenizer.flush()
        text, is_stopped = self._stop_strings.push(text)
        if is_stopped:
            end = "stop"
        elif end is not None:
            text += self._stop_strings.flush()
        return TextDelta(text, token.token, token.logprobs, end)


_END: dict[FinishReason, AnswerEnd | None] = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
