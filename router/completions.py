"""``POST /v1/completions``: a text or its token ids in, the text that follows out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.answer import AnswerEnd, TextDelta
from pdserve.router.chunks import token_ids_member
from pdserve.router.edge import Edge
from pdserve.router.logprobs import CompletionLogprobs
from pdserve.router.schema import CompletionBody
from pdserve.router.tokenizer import ChatTokenizer

_encode = msgspec.json.Encoder().encode


async def completion(edge: Edge, body: CompletionBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        ApiError: the request cannot be served as it is.
        GenerationError: the cluster cannot serve it.
        ClientDisconnect: nobody waits for it any more.
    """
    model = edge.admit(body)
    prompt_tokens = await edge.tokenizer.encode_text(body.prompt) if isinstance(body.prompt, str) else body.prompt
    answer = edge.answer(body, model, prompt_tokens, request, continues_prompt=True)
    return await edge.respond(
        body, request, answer, CompletionFormat(edge.tokenizer, returns_token_ids=bool(body.return_token_ids))
    )


class CompletionFormat:
    """Choices of one text completion."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    opening = b""

    def __init__(self, tokenizer: ChatTokenizer, *, returns_token_ids: bool) -> None:
        self.returns_token_ids = returns_token_ids
        self._logprobs = CompletionLogprobs(tokenizer)

    def token(self, delta: TextDelta) -> bytes:
        """A chunk's choice, with the text that the token added."""
        text, logprobs = _encode(delta.text), _encode(self._logprobs_of([delta]))
        ids = token_ids_member(delta, self.returns_token_ids)
        return b'{"index":0,"text":%b,"logprobs":%b,"finish_reason":null%b}' % (text, logprobs, ids)

    def ending(self, end: AnswerEnd) -> bytes:
        """The last chunk's choice."""
        return b'{"index":0,"text":"","logprobs":null,"finish_reason":"%b"}' % end.encode()

    def whole(self, deltas: Sequence[TextDelta], end: AnswerEnd) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        text = "".join(delta.text for delta in deltas)
        choice = {"index": 0, "text": text, "logprobs": self._logprobs_of(deltas), "finish_reason": end}
        return choice | {"token_ids": [delta.token for delta in deltas]} if self.returns_token_ids else choice

    def _logprobs_of(self, deltas: Sequence[TextDelta]) -> dict[str, list[Any]] | None:
        columns = [
            self._logprobs.columns(delta.token, delta.logprobs) for delta in deltas if delta.logprobs is not None
        ]
        return {name: [part[name][0] for part in columns] for name in columns[0]} if columns else None
