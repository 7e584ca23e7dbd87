"""JSON of an answer's choices: what OpenAI's two APIs write differently, and their log probabilities.

`pdserve.router.http.chat` and `pdserve.router.http.completions` implement `AnswerFormat`; `pdserve.router.http.sse` and
`pdserve.router.http.edge` put the envelope around it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from pdserve.contracts.step import TokenLogprobs
from pdserve.router.text.answer import Answer, AnswerEnd, Answers, AnswerToken, TextDelta
from pdserve.router.text.tokenizer import ChatTokenizer

_LOWEST = -9999.0
"""JSON has no infinity; vLLM writes this."""


def chat_logprobs(tokenizer: ChatTokenizer, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice: an entry for each token."""

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
    """``logprobs`` of a text completion's choice: columns, with null where nothing came before a token."""

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
    """``prompt_logprobs``: by token id, for every prompt token but the first, which has null. The rank of a prompt
    token that is not among the alternatives is null, too."""

    def entry(token: int, at_token: TokenLogprobs) -> dict[str, Any]:
        ranked = {other: (rank, logprob) for rank, (other, logprob) in enumerate(at_token.top[:num_alternatives], 1)}
        return {
            str(other): {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(other)}
            for other, (rank, logprob) in ({token: (None, at_token.logprob)} | ranked).items()
        }

    return [None, *(entry(token, at_token) for token, at_token in zip(prompt_tokens[1:], logprobs, strict=True))]


MAX_INLINE_TOKENS = 256
"""Tokens that take about as long to read or write one by one as it takes to ask a thread."""

Result = TypeVar("Result")


async def off_loop(num_tokens: int, work: Callable[[], Result]) -> Result:
    """What ``work`` on ``num_tokens`` tokens returns, from a thread where they are many."""
    return work() if num_tokens <= MAX_INLINE_TOKENS else await asyncio.to_thread(work)


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
