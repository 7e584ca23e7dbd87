"""Answers as text: choices of one prompt and prompts of one request, merged into one stream of `TextDelta`.

`Choice` turns tokens into text until it ends, possibly at a stop string that workers do not know about. `Answer` runs
one prompt's generation; `deltas_of` runs all prompts of a request concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason, Outcome
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.cluster.cluster import Cluster, TokenStream
from pdserve.router.requests.journey import Journey
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.text.answer_text import ByteDetokenizer, Detokenizer, StopStrings
from pdserve.router.text.reasoning import ReasoningParser
from pdserve.router.text.tool_calls import CallDelta, ToolCallParser

AnswerEnd = Literal["stop", "length", "tool_calls"]
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
    end: AnswerEnd | None
    """Set on the last token."""
    tokens: Sequence[AnswerToken]
    """The generated token, after those of an echoed prompt; ``text`` begins with their text."""
    num_echoed: int = 0
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


class AnswerParts:
    """Reasoning, text and tool calls of one choice."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, *, may_call_several: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._may_call_several = may_call_several

    def push(self, text: str, end: AnswerEnd | None) -> tuple[str, str, list[CallDelta], AnswerEnd | None]:
        """Take the next text, the last with its ``end``; return reasoning, text and calls that are certain, and the
        end of the choice."""
        thought, calls = "", list[CallDelta]()
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            if end is not None:
                more = self._reasoning.flush()
                thought, text = thought + more[0], text + more[1]
        if self._tools is not None:
            text, calls = self._tools.push(text)
            if end is not None:
                rest, more_calls = self._tools.flush()
                text, calls = text + rest, calls + more_calls
            if not self._may_call_several and self._tools.num_calls:
                text, calls, end = "", [call for call in calls if call.number == 0], "tool_calls"
            elif end == "stop" and self._tools.num_calls:
                end = "tool_calls"
        return thought, text, calls, end


class Choice:
    """Text of one choice."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer | ByteDetokenizer,
        stop_strings: StopStrings,
        *,
        shows_stop_token: bool,
        min_tokens: int,
        offset_chars: int,
        parts: AnswerParts | None = None,
    ) -> None:
        """
        Args:
            detokenizer: owned by this choice, as is ``stop_strings``.
            shows_stop_token: whether the token that ends the choice is part of its text.
            min_tokens: tokens before stop strings are searched.
            offset_chars: length of an echoed prompt that precedes the text.
            parts: separates reasoning and tool calls from the text; ``None`` if all is text.
        """
        self.index = index
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._shows_stop_token = shows_stop_token
        self._min_tokens = min_tokens
        self._offset_chars = offset_chars
        self._parts = parts
        self.is_over = False

    def push(self, event: TokenEvent) -> TextDelta:
        """Take the next token. Must not be called after the end."""
        assert not self.is_over
        token = AnswerToken(event.token, event.logprobs, self._offset_chars)
        is_shown = self._shows_stop_token or event.finish is not FinishReason.STOP
        text = self._detokenizer.push(event.token) if is_shown else ""
        end = _END[event.finish]
        if end is not None:
            text += self._detokenizer.flush()
        self._offset_chars += len(text)
        if event.index >= self._min_tokens:
            text = self._stop_strings.push(text)
        if self._stop_strings.is_found:
            end = "stop"
        elif end is not None:
            text += self._stop_strings.flush()
        if self._parts is None:
            self.is_over = end is not None
            return TextDelta(self.index, text, end, (token,))
        reasoning, text, calls, end = self._parts.push(text, end)
        self.is_over = end is not None
        return TextDelta(self.index, text, end, (token,), reasoning=reasoning, calls=calls)


_END: dict[FinishReason, AnswerEnd | None] = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class Answer:
    """Choices of one prompt. Starts when `deltas` is iterated; stops when it is closed."""

    def __init__(
        self, cluster: Cluster, spec: RequestSpec, choices: Sequence[Choice], echo: TextDelta | None = None
    ) -> None:
        """``echo``: prompt to write before each choice, without log probabilities; with an ``end`` it is the whole
        answer, and the generated token is hidden."""
        self.prompt_tokens = spec.prompt_tokens
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        """Log probabilities of every prompt token but the first, if requested; set with the first delta."""
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        """Generated tokens, including those without text but not a hidden one."""
        self.outcome = Outcome.REJECTED
        """How the generation ended; meaningful at its end."""
        self.journey = Journey()
        """Complete at its end."""
        self._cluster = cluster
        self._spec = spec
        self._choices = choices
        self._echo = echo

    @property
    def has_echo(self) -> bool:
        return self._echo is not None

    @staticmethod
    def start_all(answers: Sequence[Answer]) -> list[TokenStream]:
        """Start the generations of all answers, or none.

        Raises:
            GenerationError: one was refused.
        """
        return answers[0]._cluster.start_all([answer._spec for answer in answers])

    async def deltas(self, stream: TokenStream | None = None) -> AsyncGenerator[list[TextDelta], None]:
        """Start the generation, unless ``stream`` is it, and yield tokens of all choices; tokens that arrive together
        share one list. The caller must close it; closing early cancels the generation.

        Raises:
            GenerationError: refused, or failed on the way.
        """
        stream = stream or self._cluster.start(self._spec)
        self.journey = stream.journey
        num_running = len(self._choices)
        try:
            async for token in stream:
                deltas = [
                    self._delta_of(token, stream)
                    for token in (token, *stream.take_ready())
                    if not self._choices[token.choice].is_over  # by a stop string that workers do not know about yet
                ]
                num_running -= sum([delta.end is not None for delta in deltas])
                if deltas:
                    yield deltas
                if not num_running:
                    return
        finally:
            stream.cancel()
            self.outcome = stream.outcome or self.outcome
        raise GenerationError(500, "the generation ended without a last token")

    def _delta_of(self, token: TokenEvent, stream: TokenStream) -> TextDelta:
        choice = self._choices[token.choice]
        if token.index == 0:
            self.num_cached_tokens = stream.num_cached_tokens
            self.prompt_logprobs = stream.prompt_logprobs
        if token.index == 0 and self._echo is not None:
            delta = self._echoed(self._echo, choice, token)
        else:
            self.num_completion_tokens += 1
            delta = choice.push(token)
        if delta.end is not None and token.finish is FinishReason.NONE:
            stream.finish(token.choice)
        return delta

    def _echoed(self, echo: TextDelta, choice: Choice, token: TokenEvent) -> TextDelta:
        # The first token has no log probability because nothing precedes it
        logprobs = (None, *(self.prompt_logprobs or (None,) * (len(echo.tokens) - 1)))
        tokens = [token._replace(logprobs=each) for token, each in zip(echo.tokens, logprobs, strict=True)]
        if echo.end is not None:
            return echo._replace(choice=choice.index, tokens=tokens)
        self.num_completion_tokens += 1
        delta = choice.push(token)
        return delta._replace(text=echo.text + delta.text, tokens=[*tokens, *delta.tokens], num_echoed=echo.num_echoed)


def usage(answers: Sequence[Answer]) -> dict[str, object]:
    """``usage`` object of a response."""
    num_prompt_tokens = sum(len(answer.prompt_tokens) for answer in answers)
    num_completion_tokens = sum(answer.num_completion_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached_tokens for answer in answers)},
    }


MAX_WAITING = 64
"""Lists of tokens that wait for the writer of a request before its answers wait, too."""


def deltas_of(answers: Sequence[Answer]) -> AsyncGenerator[list[TextDelta], None]:
    """Start every answer and yield their tokens; tokens that arrive together share one list. The caller must close it;
    closing early, or the failure of one answer, cancels all.

    Raises:
        GenerationError: an answer was refused, or failed on the way.
    """
    return answers[0].deltas() if len(answers) == 1 else _interleaved(answers)


async def _interleaved(answers: Sequence[Answer]) -> AsyncGenerator[list[TextDelta], None]:
    queue = asyncio.Queue[list[TextDelta] | Exception | None](MAX_WAITING)

    async def read(answer: Answer, stream: TokenStream) -> None:
        try:
            async with aclosing(answer.deltas(stream)) as deltas:
                async for batch in deltas:
                    await queue.put(batch)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    streams = Answer.start_all(answers)
    readers = [asyncio.create_task(read(*pair)) for pair in zip(answers, streams, strict=True)]
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
        for stream in streams:
            if stream.outcome is None:  # its reader had not begun
                stream.cancel()
