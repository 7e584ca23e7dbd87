"""Answers as text: one `Generation` for each HTTP request, an `Answer` for each of its prompts.

The dispatcher gives each token to its `Answer`, whose `Choice` turns it into text at once and ends, possibly at a stop
string that workers do not know about. The text of all answers waits in the one queue of their `Generation` until the
writer of the response takes it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.request import GenerationError, Request, RequestSpec
from pdserve.router.text.answer_text import AnyDetokenizer, StopStrings
from pdserve.router.text.harmony import HarmonyParts
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


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """One token of a choice and the text that became certain with it; in whole answers, often several tokens'. Made in
    a fifth of the time that a tuple with names takes."""

    choice: int
    """Index in the response."""
    text: str
    """Often empty: part of a character, a possible stop string, or a token without text."""
    end: AnswerEnd | None
    """Set on the last token."""
    tokens: Sequence[AnswerToken] = ()
    """The generated token, after those of an echoed prompt, if the answer shows tokens; ``text`` begins with the text
    of an echo."""
    num_echoed: int = 0
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    stop_string: str = ""
    """At which the choice ended."""


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Reasoning, text and tool calls of one choice."""

    reasoning: ReasoningParser | None
    tools: ToolCallParser | None
    may_call_several: bool = True

    in_header: ClassVar[bool] = False
    """All that is pushed is searched for stop strings."""

    def push(
        self, text: str, end: AnswerEnd | None, *, is_cut: bool = False
    ) -> tuple[str, str, list[CallDelta], AnswerEnd | None]:
        """Take the next text, the last with its ``end``; return reasoning, text and calls that are certain, and the
        end of the choice.

        Args:
            is_cut: whether a stop string is the end.
        """
        thought, calls = "", list[CallDelta]()
        if self.reasoning is not None:
            thought, text = self.reasoning.push(text)
            if end is not None:
                more = self.reasoning.flush()
                thought, text = thought + more[0], text + more[1]
        if self.tools is not None:
            text, calls = self.tools.push(text)
            if end is not None:
                rest, more_calls = self.tools.flush()
                text, calls = text + rest, calls + more_calls
            if not self.may_call_several and self.tools.num_calls:
                text, calls, end = "", [call for call in calls if call.number == 0], "tool_calls"
            elif end == "stop" and self.tools.num_calls:
                end = "tool_calls"
        return thought, text, calls, end


PIECE_CHARS = 256
"""Characters of a whole answer that are taken together."""


@dataclass(slots=True)
class Choice:
    """Text of one choice."""

    index: int
    detokenizer: AnyDetokenizer
    """Owned by this choice, as are the next and `parts`."""
    stop_strings: StopStrings
    shows_stop_token: bool = False
    """The token that ends the choice is part of its text."""
    shows_tokens: bool = False
    """Deltas include the tokens."""
    is_whole: bool = False
    """Nobody reads the text before its end, so that many tokens may share a delta."""
    min_tokens: int = 0
    """Tokens before stop strings are searched."""
    offset_chars: int = 0
    """Characters before the next token, those of an echoed prompt included."""
    parts: AnswerParts | HarmonyParts | None = None
    """Separates reasoning and tool calls from the text; None if all is text."""
    is_over: bool = False
    held: str = ""
    """Text of a whole answer that no delta has yet."""

    def push(self, event: TokenEvent) -> TextDelta | None:
        """Take the next token; None if a later delta has its text. Must not be called after the end."""
        assert not self.is_over
        tokens = (AnswerToken(event.token, event.logprobs, self.offset_chars),) if self.shows_tokens else ()
        end, parts, stop_strings = _END[event.finish], self.parts, self.stop_strings
        text = self.detokenizer.push(event.token) if end != "stop" or self.shows_stop_token else ""
        if end is not None:
            text += self.detokenizer.flush()
        self.offset_chars += len(text)
        if event.index >= self.min_tokens and not (parts and parts.in_header):
            text = stop_strings.push(text)
        if stop_strings.is_found:
            end = "stop"
        elif end is not None:
            text += stop_strings.flush()
        reasoning, calls = "", _NO_CALLS
        if parts is not None:
            reasoning, text, calls, end = parts.push(text, end, is_cut=stop_strings.is_found)
        self.is_over = end is not None
        if self.is_whole and not self.shows_tokens and parts is None:
            text = self.held = self.held + text
            if end is None and len(text) < PIECE_CHARS:
                return None
            self.held = ""
        return TextDelta(self.index, text, end, tokens, 0, reasoning, calls, stop_strings.found)


_NO_CALLS: Sequence[CallDelta] = ()
_END: dict[FinishReason, AnswerEnd | None] = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class Answer(Request):
    """Choices of one prompt. Turns each token into text when it arrives, for its `Generation`."""

    def __init__(self, spec: RequestSpec, choices: Sequence[Choice], echo: TextDelta | None = None) -> None:
        """``echo``: prompt to write before each choice, without log probabilities; with an ``end`` it is the whole
        answer, and the generated token is hidden."""
        super().__init__(spec)
        self.choices = choices
        self.echo = echo
        self.num_completion_tokens = 0
        """Generated tokens, including those without text but not a hidden one."""
        self._generation: Generation

    def begin(self, generation: Generation) -> None:
        """Give all text to ``generation`` from now on."""
        self._generation = generation

    def token_received(self, token: TokenEvent) -> None:
        choice = self.choices[token.choice]
        if choice.is_over or self._generation.error is not None:
            return  # by a stop string that workers do not know about yet, or as all answers of the client
        try:
            if token.index == 0 and self.echo is not None:
                delta: TextDelta | None = self._echoed(self.echo, choice, token)
            else:
                self.num_completion_tokens += 1
                delta = choice.push(token)
            self._generation.take(choice.index, delta)
            if delta is not None and delta.end is not None and not token.finish:
                self._generation.finish_soon(self, token.choice)
        except Exception as error:  # the worker's frame has tokens of others
            self._generation.failed(error)

    def ended(self) -> None:
        if self.error is not None or not all(choice.is_over for choice in self.choices):
            self._generation.failed(self.error or GenerationError(500, "the generation ended without a last token"))

    def _echoed(self, echo: TextDelta, choice: Choice, token: TokenEvent) -> TextDelta:
        # The first token has no log probability because nothing precedes it
        logprobs = (None, *(self.prompt_logprobs or (None,) * (len(echo.tokens) - 1)))
        tokens = [token._replace(logprobs=each) for token, each in zip(echo.tokens, logprobs, strict=True)]
        if echo.end is not None:
            choice.is_over = True
            return replace(echo, choice=choice.index, tokens=tokens)
        self.num_completion_tokens += 1
        delta = choice.push(token) or TextDelta(choice.index, "", None)
        return replace(delta, text=echo.text + delta.text, tokens=[*tokens, *delta.tokens], num_echoed=echo.num_echoed)


def usage(answers: Sequence[Answer]) -> dict[str, object]:
    """``usage`` object of a response."""
    num_prompt_tokens = sum(len(answer.spec.prompt_tokens) for answer in answers)
    num_completion_tokens = sum(answer.num_completion_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached_tokens for answer in answers)},
    }


WRITE_TURN_S = 0.0002
"""Seconds of writing after which the event loop looks at what else has come. A request takes several of its turns, each
of which would wait for all tokens of a frame."""


class Outbox:
    """Generations whose text is written in next turns of the event loop, some in each: a call for each of them would
    take about as long as to make its text."""

    def __init__(self) -> None:
        self._waiting: deque[Generation] = deque()
        """A turn comes for as long as there are any."""

    def put(self, generation: Generation) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._waiting.append(generation)

    def _hand_over(self) -> None:
        end_s = time.monotonic() + WRITE_TURN_S
        try:
            while self._waiting and time.monotonic() < end_s:
                self._waiting.popleft().hand_over()
        finally:  # one that fails stops no others
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._hand_over)


class Generation:
    """The answers to one HTTP request: what of their text its writer has not taken yet, and the writer, if it waits.

    Read in a ``with`` block, which starts all answers or none and cancels what is unfinished at its end. The failure of
    one is that of all.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        answers: Sequence[Answer],
        outbox: Outbox,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            outbox: that of all requests.
            arrived: told the index of its choice when a token arrives.
        """
        self.answers = answers
        self.error: Exception | None = None
        """Why no more text follows; set once."""
        self._loop = asyncio.get_running_loop()
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._arrived = arrived
        self._started: list[Answer] = []
        self._num_running = sum(len(answer.choices) for answer in answers)
        """Choices whose end has not arrived."""
        self._ready: list[TextDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._write: Callable[[Sequence[TextDelta]], bool] | None = None

    def __enter__(self) -> Self:
        """
        Raises:
            GenerationError: an answer was refused.
        """
        spec = self.answers[0].spec
        self._dispatcher.admission.check(self._num_running, tenant=spec.tenant, tier=spec.tier)
        try:
            for answer in self.answers:
                answer.begin(self)
                self._dispatcher.start(answer, is_further=bool(self._started))
                self._started.append(answer)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for answer in self._started:
            for number, choice in enumerate(answer.choices):
                if choice.is_over:  # perhaps by a stop string, which workers may be told a turn later
                    self._dispatcher.finish(answer, number)
            self._dispatcher.cancel(answer)

    async def next(self, write: Callable[[Sequence[TextDelta]], bool] | None = None) -> list[TextDelta]:
        """Wait for text and take what has arrived; empty after the last token.

        Args:
            write: is given text in the turn after it has arrived, but for the last, and says whether it took that.
                What it took is not returned: to wake who waits here would cost more than to write a token.

        Raises:
            Exception: an answer failed, and what came before is taken.
        """
        self._write = write
        try:
            while not self._ready and self._num_running:
                if self.error is not None:
                    raise self.error
                self._waiter = self._loop.create_future()
                await self._waiter
        finally:
            self._write = None
        ready, self._ready = self._ready, []
        return ready

    # Called by answers

    def take(self, choice: int, delta: TextDelta | None) -> None:
        """A token of ``choice`` arrived; ``delta`` is its text and that of earlier ones, if they have a delta now."""
        if self._arrived is not None:
            self._arrived(choice)
        if delta is None:
            return
        self._ready.append(delta)
        self._num_running -= delta.end is not None
        if self._write is None:
            self._wake()
        elif len(self._ready) == 1:
            self._outbox.put(self)

    def finish_soon(self, answer: Answer, choice: int) -> None:
        """Have workers end ``choice``, which is over, after the frame that is being handled."""
        self._loop.call_soon(self._dispatcher.finish, answer, choice)

    def failed(self, error: Exception) -> None:
        self.error = self.error or error
        self._wake()

    def hand_over(self) -> None:
        """Have all that has arrived since the last turn written, or wake who waits for it. Called by the outbox."""
        if not self._ready:
            return
        if self._write is not None and self._num_running and self.error is None:
            try:
                if self._write(self._ready):
                    self._ready = []
                    return
            except Exception as error:  # other answers are handed over in the same turn
                self._ready = []
                self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
