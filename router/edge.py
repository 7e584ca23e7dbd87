"""What every route of the HTTP edge works with, and the way from an answer to a response.

The two generating routes differ in how they read a prompt and in how they write a choice
(`pdserve.router.chunks.AnswerFormat`); limits, the envelope of a response, and its timing are here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdserve.router.answer import Answer
from pdserve.router.chunks import AnswerFormat, ChunkWriter, payloads
from pdserve.router.disconnect import cancel_on_disconnect
from pdserve.router.errors import ApiError
from pdserve.router.generation import Generator, ServedModel
from pdserve.router.observer import EdgeObserver
from pdserve.router.sampling import sampling_params
from pdserve.router.schema import GenerationBody
from pdserve.router.sse import EventStream
from pdserve.router.stop_strings import StopStrings
from pdserve.router.token_timer import TokenTimer
from pdserve.router.tokenizer import ChatTokenizer

VERSION = version("pdserve")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The parts that the routes share."""

    generator: Generator
    tokenizer: ChatTokenizer
    served_name: str
    observer: EdgeObserver

    def admit(self, body: GenerationBody) -> ServedModel:
        """Check what can be checked before the prompt is read.

        Raises:
            ApiError: 400 contradicting or unsupported fields, 404 another model, 503 nothing serves yet.
        """
        body.check()
        if body.model not in (None, self.served_name):
            message = f"the model `{body.model}` does not exist; this server has `{self.served_name}`"
            raise ApiError(404, message, param="model", code="model_not_found")
        model = self.generator.model
        if model is None:
            raise ApiError(503, "no worker has joined the cluster yet; try again soon", headers={"Retry-After": "1"})
        return model

    def answer(
        self,
        body: GenerationBody,
        model: ServedModel,
        prompt_tokens: Sequence[int],
        request: Request,
        *,
        continues_prompt: bool,
    ) -> Answer:
        """The answer to a prompt, not started.

        Args:
            model: what `admit` returned.
            continues_prompt: its text goes on where the prompt's ends.

        Raises:
            ApiError: the prompt is empty or not of the model's tokens, or does not fit with its answer.
        """
        self._check_prompt(prompt_tokens)
        return Answer(
            self.generator,
            prompt_tokens,
            sampling_params(body, len(prompt_tokens), model.max_model_len),
            arrived_s=request.state.arrived_s,
            cache_salt=(body.cache_salt or "").encode(),
            detokenizer=self.tokenizer.detokenizer(
                skip_special_tokens=body.skip_special_tokens is not False,
                prompt_tokens=prompt_tokens if continues_prompt else (),
            ),
            stop_strings=StopStrings(body.stop or ()),
        )

    def _check_prompt(self, prompt_tokens: Sequence[int]) -> None:
        if not prompt_tokens:
            raise ApiError(400, "the prompt is empty; it needs one token at least", param="prompt")
        highest = max(prompt_tokens)
        if highest >= self.tokenizer.vocab_size:
            message = f"the prompt has token id {highest}; the model's are below {self.tokenizer.vocab_size}"
            raise ApiError(400, message, param="prompt")

    async def respond(self, body: GenerationBody, request: Request, answer: Answer, format: AnswerFormat) -> Response:
        """Run the answer and write it, whole or as a stream.

        Raises:
            GenerationError: a whole answer failed.
            ClientDisconnect: nobody waits for it any more.
        """
        timer = TokenTimer(self.observer, request.state.arrived_s)
        envelope = {
            "id": format.id_prefix + request.state.request_id,
            "object": format.chunk_object if body.stream else format.whole_object,
            "created": int(time.time()),
            "model": self.served_name,
            "system_fingerprint": f"pdserve-{VERSION}",
        }
        if body.stream:
            return EventStream(payloads(answer, format, ChunkWriter(envelope, body)), timer)
        deltas = []
        async with cancel_on_disconnect(request.receive), aclosing(answer.deltas()) as running:
            async for delta in running:
                timer.token()
                deltas.append(delta)
        timer.finished()
        end = deltas[-1].end
        assert end is not None
        whole = envelope | {"choices": [format.whole(deltas, end)], "usage": answer.usage.as_dict()}
        return Response(_encode(whole), media_type="application/json")
