"""JSON of an answer's choices: the differences between OpenAI's two APIs, and log probabilities.

`pdserve.router.http.chat` and `pdserve.router.http.completions` implement `AnswerFormat`; `pdserve.router.http.sse` and
`pdserve.router.http.edge` add the envelope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from pdserve.contracts.step import TokenLogprobs
from pdserve.router.text.answer import Answer, AnswerEnd, Answers, AnswerToken, TextDelta
from pdserve.router.text.tokenizer import ChatTokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks; the same value as in vLLM."""


def chat_logprobs(tokenizer: ChatTokenizer, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice: one entry per token."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        content = tokenizer.token_bytes(token)
        return {"token": content.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(content)}

    entries = [
        {**described(token, logprobs.logprob), "top_logprobs": [described(*other) for other in logprobs.top]}
        for token, logprobs, _ in tokens
        if logprobs is not None
    ]
    return {"content": entries, "refusal": None}


def completion_logprobs(
    tokenizer: ChatTokenizer, tokens: Sequence[AnswerToken], num_alternatives: int
) -> dict[str, list[Any]]:
    """``logprobs`` of a text completion's choice: columns, with null where nothing precedes a token."""

    def alternatives(token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        pairs = [*logprobs.top[:num_alternatives], (token, logprobs.logprob)]
        return {tokenizer.token_text(other): max(logprob, _LOWEST) for other, logprob in pairs}

    return {
        "tokens": [tokenizer.token_text(token) for token, _, _ in tokens],
        "token_logprobs": [None if logprobs is None else max(logprobs.logprob, _LOWEST) for _, logprobs, _ in tokens],
        "top_logprobs": [None if logprobs is None else alternatives(token, logprobs) for token, logprobs, _ in tokens],
        "text_offset": [offset_chars for _, _, offset_chars in tokens],
    }


def prompt_logprobs(
    tokenizer: ChatTokenizer, prompt_tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], num_alternatives: int
) -> list[dict[str, Any] | None]:
    """``prompt_logprobs``: entries by token id for every prompt token, null for the first. The rank of a prompt token
    outside the alternatives is null."""

    def entry(token: int, at_token: TokenLogprobs) -> dict[str, Any]:
        ranked = {other: (rank, logprob) for rank, (other, logprob) in enumerate(at_token.top[:num_alternatives], 1)}
        return {
            str(other): {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(other)}
            for other, (rank, logprob) in ({token: (None, at_token.logprob)} | ranked).items()
        }

    return [None, *(entry(token, at_token) for token, at_token in zip(prompt_tokens[1:], logprobs, strict=True))]


MAX_INLINE_TOKENS = 256
"""Tokens that are processed inline about as fast as they are handed to a thread."""

Result = TypeVar("Result")


async def off_loop(num_tokens: int, work: Callable[[], Result]) -> Result:
    """Return ``work()``, run in a thread if ``num_tokens`` is large."""
    return work() if num_tokens <= MAX_INLINE_TOKENS else await asyncio.to_thread(work)


class WholeChoice:
    """Accumulates the deltas of a choice that is not streamed."""

    def __init__(self, index: int, answer: Answer) -> None:
        """``answer``: answer that the choice belongs to."""
        self.index = index
        self.answer = answer
        self.tokens: list[AnswerToken] = []
        """Tokens, including those of an echoed prompt; empty unless the format shows tokens."""
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
        if delta.text:
            self._texts.append(delta.text)
        if keeps_tokens:
            self.tokens += (*delta.echoed, *delta.generated)
            self.num_echoed += len(delta.echoed)
        self.end = delta.end


class AnswerFormat(Protocol):
    """Writes choices in the JSON of one of the two APIs."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def whole_object(self) -> str:
        """``object`` of a whole response."""
        ...

    @property
    def chunk_object(self) -> str:
        """``object`` of a stream's chunk."""
        ...

    @property
    def shows_tokens(self) -> bool:
        """Whether choices include tokens as well as text, so that a token without text needs a chunk, too."""
        ...

    def opening(self, index: int) -> bytes:
        """Chunk that opens a choice; empty for none."""
        ...

    def delta(self, delta: TextDelta) -> bytes:
        """Chunk of a token."""
        ...

    def ending(self, index: int, end: AnswerEnd) -> bytes:
        """Last chunk of a choice."""
        ...

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        """Choice of a whole response."""
        ...

    def members(self, answers: Answers) -> dict[str, Any]:
        """Members of a whole response other than choices and usage."""
        ...
