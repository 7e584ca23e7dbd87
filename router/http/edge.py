"""Shared parts of the HTTP routes, and the path from an answer to a response.

Limits, the envelope of a response, and its timing. The two generating routes differ only in how they read a prompt and
in how they write a choice (`pdserve.router.http.format.AnswerFormat`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdserve.contracts.request import SamplingParams
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.http.asgi import cancel_on_disconnect
from pdserve.router.http.errors import ApiError
from pdserve.router.http.format import AnswerFormat, WholeChoice, off_loop
from pdserve.router.http.sampling import check_prompt_length, check_token_ids, sampling_params
from pdserve.router.http.schema import GenerationBody
from pdserve.router.http.sse import ChunkWriter, EventStream
from pdserve.router.metrics import RouterMetrics, TokenTimer
from pdserve.router.requests.request import RequestSpec
from pdserve.router.text.answer import Answer, Answers, Choice, Echo
from pdserve.router.text.answer_text import StopStrings
from pdserve.router.text.tokenizer import ChatTokenizer

VERSION = version("pdserve")

PIECE_TOKENS = 64
"""Tokens decoded together where no reader needs them one by one."""

SALT_BYTES = 32

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    cluster: Cluster
    tokenizer: ChatTokenizer
    served_name: str
    metrics: RouterMetrics

    def admit(self, body: GenerationBody) -> int:
        """Check the request as far as possible before reading the prompt; return the limit of prompt and answer.

        Raises:
            ApiError: 400 contradicting or unsupported fields, 404 another model, 503 not ready.
        """
        body.check()
        check_token_ids("logit_bias", map(int, body.logit_bias or ()), self.tokenizer.vocab_size)
        check_token_ids("stop_token_ids", body.stop_token_ids or (), self.tokenizer.vocab_size)
        if body.model not in (None, self.served_name):
            message = f"the model `{body.model}` does not exist; this server has `{self.served_name}`"
            raise ApiError(404, message, param="model", code="model_not_found")
        max_model_len = self.cluster.max_model_len
        if max_model_len is None:
            raise ApiError(503, "no worker has joined the cluster yet; try again soon", headers={"Retry-After": "1"})
        return max_model_len

    async def encode(
        self, body: GenerationBody, max_model_len: int, text: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ApiError: a lower bound on the prompt's tokens already exceeds the context.
        """
        check_prompt_length(body, self.tokenizer.fewest_tokens(text), max_model_len, is_least=True)
        return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def sampling(self, body: GenerationBody, max_model_len: int, prompt_tokens: Sequence[int]) -> SamplingParams:
        """Sampling parameters of an answer to a checked prompt.

        Raises:
            ApiError: the prompt is empty, does not fit with its answer, or holds a token outside the vocabulary.
        """
        if not prompt_tokens:
            raise ApiError(400, "the prompt is empty; it needs one token at least", param=body.prompt_field)
        check_token_ids(body.prompt_field, prompt_tokens, self.tokenizer.vocab_size)
        return sampling_params(body, len(prompt_tokens), max_model_len)

    def answer(
        self,
        body: GenerationBody,
        sampling: SamplingParams,
        prompt_tokens: Sequence[int],
        request: Request,
        *,
        first_index: int,
        continues_prompt: bool,
        echo: Echo | None = None,
    ) -> Answer:
        """Build the answer to a prompt, without starting it.

        Args:
            sampling: result of `sampling`, which has checked the prompt.
            first_index: index of the first choice in the response.
            continues_prompt: whether the text continues that of the prompt.
            echo: prompt to write before the answer.
        """
        context = prompt_tokens if continues_prompt else ()
        spec = RequestSpec(
            prompt_tokens=tuple(prompt_tokens),
            sampling=sampling,
            arrived_s=request.state.arrived_s,
            num_choices=body.num_choices,
            cache_salt=_salt(body.cache_salt),
        )
        choices = [
            self._choice(first_index + index, body, sampling, context, echo) for index in range(spec.num_choices)
        ]
        return Answer(self.cluster, spec, choices, echo)

    def _choice(
        self, index: int, body: GenerationBody, sampling: SamplingParams, context: Sequence[int], echo: Echo | None
    ) -> Choice:
        shows_stop = bool(body.include_stop_str_in_output)
        is_read_token_by_token = body.stream or body.stop or body.num_logprobs >= 0
        return Choice(
            index,
            self.tokenizer.detokenizer(
                skip_special_tokens=body.skip_special_tokens is not False,
                prompt_tokens=context,
                piece_tokens=1 if is_read_token_by_token else PIECE_TOKENS,
            ),
            StopStrings(body.stop or (), are_shown=shows_stop),
            shows_stop_token=shows_stop,
            min_tokens=sampling.min_tokens,
            offset_chars=0 if echo is None else len(echo.text),
        )

    async def respond(self, body: GenerationBody, request: Request, answers: Answers, format: AnswerFormat) -> Response:
        """Run the answers and write them, whole or as a stream.

        Raises:
            GenerationError: a whole answer failed.
            ClientDisconnect: the client left.
        """
        timer = TokenTimer(self.metrics, request.state.arrived_s)
        envelope = {
            "id": format.id_prefix + request.state.request_id,
            "object": format.chunk_object if body.stream else format.whole_object,
            "created": int(time.time()),
            "model": self.served_name,
            "system_fingerprint": f"pdserve-{VERSION}",
        }
        if body.stream:
            return EventStream(ChunkWriter(envelope, body, answers, format).events(), timer)
        choices = [
            WholeChoice(index, answers.by_prompt[index // body.num_choices]) for index in range(body.num_answers)
        ]
        async with cancel_on_disconnect(request.receive), aclosing(answers.deltas()) as deltas:
            async for together in deltas:
                for delta in together:
                    timer.token(delta.choice)
                    choices[delta.choice].add(delta, keeps_tokens=format.shows_tokens)
        timer.finished()

        def write() -> bytes:
            written = {"choices": [format.whole(choice) for choice in choices], "usage": answers.usage.as_dict()}
            return _encode(envelope | written | format.members(answers))

        num_shown = sum(len(choice.tokens) + len(choice.answer.prompt_logprobs) for choice in choices)
        return Response(await off_loop(num_shown, write), media_type="application/json")


def _salt(given: str | None) -> bytes:
    """Hash of a tenant's salt, in the length that workers expect."""
    return blake2b(given.encode(), digest_size=SALT_BYTES).digest() if given else b""
