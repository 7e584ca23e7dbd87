"""Log probabilities as OpenAI's two APIs write them."""

from __future__ import annotations

from typing import Any

from pdserve.contracts.step import TokenLogprobs
from pdserve.router.tokenizer import ChatTokenizer

_LOWEST = -9999.0
"""JSON has no infinity; vLLM writes this."""


class ChatLogprobs:
    """Entries of ``logprobs.content``."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """One generated token with its likeliest alternatives."""
        top = [self._token(alternative, logprob) for alternative, logprob in logprobs.top]
        return {**self._token(token, logprobs.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionLogprobs:
    """The columns of a text completion's ``logprobs``; offsets count on through the answer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset_chars = 0

    def columns(self, token: int, logprobs: TokenLogprobs) -> dict[str, list[Any]]:
        """One generated token, as columns of length one."""
        text = self._tokenizer.token_text(token)
        offset = self._offset_chars
        self._offset_chars += len(text)
        pairs = [*logprobs.top, (token, logprobs.logprob)]
        return {
            "tokens": [text],
            "token_logprobs": [max(logprobs.logprob, _LOWEST)],
            "top_logprobs": [{self._tokenizer.token_text(other): max(value, _LOWEST) for other, value in pairs}],
            "text_offset": [offset],
        }
