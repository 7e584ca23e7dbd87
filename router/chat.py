"""``POST /v1/chat/completions``: a conversation in, the assistant's turn out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.answer import AnswerEnd, TextDelta
from pdserve.router.chunks import token_ids_member
from pdserve.router.edge import Edge
from pdserve.router.errors import ApiError
from pdserve.router.logprobs import ChatLogprobs
from pdserve.router.schema import ChatBody
from pdserve.router.tokenizer import ChatTokenizer

_encode = msgspec.json.Encoder().encode


async def chat_completion(edge: Edge, body: ChatBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        ApiError: the request cannot be served as it is.
        GenerationError: the cluster cannot serve it.
        ClientDisconnect: nobody waits for it any more.
    """
    model = edge.admit(body)
    try:
        prompt_tokens = await edge.tokenizer.encode_chat([message.for_template() for message in body.messages])
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    answer = edge.answer(body, model, prompt_tokens, request, continues_prompt=False)
    return await edge.respond(
        body, request, answer, ChatFormat(edge.tokenizer, returns_token_ids=bool(body.return_token_ids))
    )


class ChatFormat:
    """Choices of one chat completion."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'

    def __init__(self, tokenizer: ChatTokenizer, *, returns_token_ids: bool) -> None:
        self.returns_token_ids = returns_token_ids
        self._logprobs = ChatLogprobs(tokenizer)

    def token(self, delta: TextDelta) -> bytes:
        """A chunk's choice, with the text that the token added."""
        text, logprobs = _encode(delta.text), _encode(self._logprobs_of([delta]))
        ids = token_ids_member(delta, self.returns_token_ids)
        return b'{"index":0,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (text, logprobs, ids)

    def ending(self, end: AnswerEnd) -> bytes:
        """The last chunk's choice."""
        return b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"%b"}' % end.encode()

    def whole(self, deltas: Sequence[TextDelta], end: AnswerEnd) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        text = "".join(delta.text for delta in deltas)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs_of(deltas),
            "finish_reason": end,
        }
        return choice | {"token_ids": [delta.token for delta in deltas]} if self.returns_token_ids else choice

    def _logprobs_of(self, deltas: Sequence[TextDelta]) -> dict[str, Any] | None:
        entries = [self._logprobs.entry(delta.token, delta.logprobs) for delta in deltas if delta.logprobs is not None]
        return {"content": entries, "refusal": None} if entries else None
