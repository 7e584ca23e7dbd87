"""Four thousand malformed bodies: each is answered or refused in OpenAI's format, and the edge keeps serving."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fastapi import FastAPI

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest
from pdserve.contracts.step import ModelLimits, TokenLogprobs
from pdserve.proto.codec import request_from_proto, request_to_proto
from pdserve.router.http.app import create_app
from pdserve.router.requests.request import Request
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.patience import HANG_S
from tests.router.bodies import CHAT_BODY, COMPLETION_BODY, mutated, odd_body
from tests.router.edge_server import (
    MAX_MODEL_LEN,
    ScriptedGeneration,
    ScriptedGenerator,
    deployment_of,
    token_event,
)
from tests.router.http.test_tools import TEMPLATE
from tests.router.small_tokenizers import EOS_ID, write_tokenizer
from tests.router.sse import data_of

NUM_BODIES = 2_000
"""Bodies per route."""

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
SENT = Path(__file__).parents[2] / "first_contact" / "bodies"


class CheckedGenerator(ScriptedGenerator):
    """Checks that a worker would accept the request."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._limits = ModelLimits(max_model_len=MAX_MODEL_LEN, vocab_size=vocab_size, eos_token_ids=(EOS_ID,))
        self.script = speaking

    def start(self, request: Request, *, is_further: bool) -> None:
        spec = request.spec
        sent = GenerationRequest(
            request_id=1,
            prompt_tokens=spec.prompt_tokens,
            sampling=spec.sampling,
            cache_salt=spec.cache_salt,
            choice=spec.num_choices - 1,
        )
        request_from_proto(request_to_proto(sent), self._limits)
        assert len(spec.prompt_tokens) + spec.sampling.max_tokens <= MAX_MODEL_LEN
        self.generations.clear()
        super().start(request, is_further=is_further)


async def speaking(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
    """Script of a few tokens per choice, some of them only part of a character."""
    sampling = generation.sampling
    num_tokens = min(sampling.max_tokens, 3)
    top = tuple((token, -0.5) for token in range(sampling.num_logprobs))
    logprobs = TokenLogprobs(-0.5, top) if sampling.num_logprobs >= 0 else None
    for index in range(num_tokens):
        end = FinishReason.LENGTH if index == num_tokens - 1 else FinishReason.NONE
        for choice in range(generation.num_choices):
            yield token_event(choice, index, 150 + index, logprobs, end)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setattr("pdserve.router.http.json_body.MAX_BODY_BYTES", 100_000)
    write_tokenizer(tmp_path, TEMPLATE)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    return create_app(CheckedGenerator(tokenizer.vocab_size), tokenizer, deployment_of())


async def post(app: FastAPI, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of an answer, which must end properly."""
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    async with asyncio.timeout(HANG_S):
        await app(scope, receive, send)
    start, *parts = sent
    assert start["type"] == "http.response.start"
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    return start["status"], b"".join(part["body"] for part in parts)


def check_answer(path: str, status: int, answer: bytes) -> None:
    """Check that the answer is in the format of OpenAI's API."""
    if status != 200:
        assert status in (400, 404, 413), (status, answer)
        error = json.loads(answer)["error"]
        if path == MESSAGES:
            error |= {"param": None, "code": None}
            error["type"] = error["type"].replace("not_found_error", "invalid_request_error")
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert 0 < len(error["message"]) < 2000
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["param"], str | None)
        assert isinstance(error["code"], str | None)
        return
    if answer.startswith(b"data: "):
        *events, end = data_of(answer)
        assert end == "[DONE]"
        chunks = [json.loads(event) for event in events]
    else:
        chunks = [json.loads(answer)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == sorted({choice["index"] for choice in choices}) == list(range(len(ended)))
    assert all(chunk["object"].startswith("chat.completion" if path == CHAT else "text_completion") for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_odd_bodies(app: FastAPI, path: str) -> None:
    random = Random(path)
    good = json.dumps(CHAT_BODY if path == CHAT else COMPLETION_BODY).encode()

    async def run() -> Counter[int]:
        statuses = Counter[int]()
        for _ in range(NUM_BODIES):
            body = odd_body(random, is_chat=path == CHAT)
            status, answer = await post(app, path, body)
            try:
                check_answer(path, status, answer)
            except Exception as error:
                error.add_note(f"body: {body[:2000]!r}\nanswer: {status} {answer[:2000]!r}")
                raise
            statuses[status] += 1
        status, answer = await post(app, path, good)
        assert status == 200
        check_answer(path, status, answer)
        return statuses

    statuses = asyncio.run(run())
    assert statuses[200] > NUM_BODIES // 10
    assert statuses[400] > NUM_BODIES // 4
    assert statuses[404]
    assert statuses[413]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_odd_bodies_of_other_apis(app: FastAPI, path: str) -> None:
    cases = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(SENT.glob("*.json"))]
    bodies = [case["body"] for case in cases if case.get("route") == path]
    random = Random(path)

    async def run() -> Counter[int]:
        statuses = Counter[int]()
        for _ in range(NUM_BODIES // 2):
            body = random.choice(bodies)
            for _ in range(random.randrange(3)):
                body = mutated(random, body)
            status, answer = await post(app, path, json.dumps(body).encode())
            assert b"internal error" not in answer, body
            if status != 200:
                check_answer(path, status, answer)
            statuses[status] += 1
        return statuses

    statuses = asyncio.run(run())
    assert statuses[200] > NUM_BODIES // 20
    assert statuses[400] > NUM_BODIES // 20
