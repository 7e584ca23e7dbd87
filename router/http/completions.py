"""``POST /v1/completions``: texts or token ids in, a continuation of each out.

Owns what differs from `pdserve.router.http.chat`: several prompts, echo, and the JSON of a choice. Called by
`pdserve.router.http.app`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.http.edge import Edge
from pdserve.router.http.format import WholeChoice, completion_logprobs, off_loop, prompt_logprobs
from pdserve.router.http.schema import CompletionBody
from pdserve.router.text.answer import Answer, AnswerEnd, Answers, AnswerToken, Echo, TextDelta
from pdserve.router.text.tokenizer import ChatTokenizer

_encode = msgspec.json.Encoder().encode


async def completion(edge: Edge, body: CompletionBody, request: Request) -> Response:
    """Answer one request.

    Raises:
        ApiError: the request cannot be served as it is.
        GenerationError: the cluster cannot serve it.
        ClientDisconnect: the client left.
    """
    max_model_len = edge.admit(body)
    answers: list[Answer] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            tokens = await edge.encode(body, max_model_len, prompt, add_special_tokens=True)
        else:
            tokens = prompt
        sampling = edge.sampling(body, max_model_len, tokens)
        echo = await off_loop(len(tokens), partial(_echo, edge.tokenizer, prompt, tokens, body)) if body.echo else None
        first_index = len(answers) * body.num_choices
        answers.append(
            edge.answer(body, sampling, tokens, request, first_index=first_index, continues_prompt=True, echo=echo)
        )
    return await edge.respond(body, request, Answers(answers), CompletionFormat(edge.tokenizer, body))


def _echo(tokenizer: ChatTokenizer, prompt: str | list[int], tokens: list[int], body: CompletionBody) -> Echo:
    """Echo of the prompt as the client sent it, with the offset of each token."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False)
    offsets_chars = []
    text = ""
    for token in tokens:
        offsets_chars.append(len(text))
        text += detokenizer.push(token)
    text += detokenizer.flush()
    return Echo(prompt if isinstance(prompt, str) else text, offsets_chars, is_all=body.max_tokens == 0)


class CompletionFormat:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: ChatTokenizer, body: CompletionBody) -> None:
        self.shows_tokens = bool(body.return_token_ids) or body.logprobs is not None
        self._tokenizer = tokenizer
        self._body = body

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, delta: TextDelta) -> bytes:
        text = _encode(delta.text)
        if not self.shows_tokens:
            return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (delta.choice, text)
        logprobs = _encode(self._logprobs([*delta.echoed, *delta.generated]))
        ids = b',"token_ids":%b' % _encode([token.token for token in delta.generated]) if self._shows_ids else b""
        shown = (delta.choice, text, logprobs, ids)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}' % shown

    def ending(self, index: int, end: AnswerEnd) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}' % (index, end.encode())

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        content: dict[str, Any] = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.end,
        }
        if self._shows_ids:
            content |= {"token_ids": choice.generated_ids, "prompt_token_ids": choice.answer.prompt_tokens}
        if self._body.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, choice.answer.prompt_tokens, choice.answer.prompt_logprobs, self._body.prompt_logprobs
            )
        return content

    def members(self, answers: Answers) -> dict[str, Any]:
        return {}

    @property
    def _shows_ids(self) -> bool:
        return bool(self._body.return_token_ids)

    def _logprobs(self, tokens: list[AnswerToken]) -> dict[str, list[Any]] | None:
        num_alternatives = self._body.logprobs
        return None if num_alternatives is None else completion_logprobs(self._tokenizer, tokens, num_alternatives)
