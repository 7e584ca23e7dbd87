"""``POST /v1/chat/completions``: a conversation in, the assistant's turn out.

Owns what differs from `pdserve.router.http.completions`: the chat template, and the JSON of a choice. Called by
`pdserve.router.http.app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.http.edge import Edge
from pdserve.router.http.errors import ApiError
from pdserve.router.http.format import WholeChoice, chat_logprobs, prompt_logprobs
from pdserve.router.http.schema import ChatBody
from pdserve.router.text.answer import AnswerEnd, Answers, AnswerToken, TextDelta
from pdserve.router.text.tokenizer import ChatTokenizer

_encode = msgspec.json.Encoder().encode


async def chat_completion(edge: Edge, body: ChatBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        ApiError: the request cannot be served as it is.
        GenerationError: the cluster cannot serve it.
        ClientDisconnect: the client left.
    """
    max_model_len = edge.admit(body)
    try:
        text = edge.tokenizer.chat_text([message.for_template() for message in body.messages])
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    prompt_tokens = await edge.encode(
        body, max_model_len, text, add_special_tokens=False
    )  # the template already wrote them
    sampling = edge.sampling(body, max_model_len, prompt_tokens)
    answer = edge.answer(body, sampling, prompt_tokens, request, first_index=0, continues_prompt=False)
    return await edge.respond(body, request, Answers([answer]), ChatFormat(edge.tokenizer, body))


class ChatFormat:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: ChatTokenizer, body: ChatBody) -> None:
        self.shows_tokens = bool(body.return_token_ids or body.logprobs)
        self._tokenizer = tokenizer
        self._body = body

    def opening(self, index: int) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta)

    def delta(self, delta: TextDelta) -> bytes:
        text = _encode(delta.text)
        if not self.shows_tokens:
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (delta.choice, text)
        logprobs = _encode(self._logprobs(delta.generated))
        ids = b',"token_ids":%b' % _encode([token.token for token in delta.generated]) if self._shows_ids else b""
        shown = (delta.choice, text, logprobs, ids)
        return b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % shown

    def ending(self, index: int, end: AnswerEnd) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}' % (index, end.encode())

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        content: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.end,
        }
        return content | {"token_ids": choice.generated_ids} if self._shows_ids else content

    def members(self, answers: Answers) -> dict[str, Any]:
        (answer,) = answers.by_prompt
        members: dict[str, Any] = {"prompt_token_ids": answer.prompt_tokens} if self._shows_ids else {}
        if self._body.prompt_logprobs is not None:
            members["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, answer.prompt_tokens, answer.prompt_logprobs, self._body.prompt_logprobs
            )
        return members

    @property
    def _shows_ids(self) -> bool:
        return bool(self._body.return_token_ids)

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._body.logprobs else None
