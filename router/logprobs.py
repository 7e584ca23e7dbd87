"""Log probabilities as OpenAI's two APIs, and vLLM for prompts, write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.contracts.step import TokenLogprobs
from pdserve.router.choice import AnswerToken
from pdserve.router.tokenizer import ChatTokenizer

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
