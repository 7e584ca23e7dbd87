"""Whole answers hold no more memory than they say."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.http import asgi
from pdserve.router.http.schema import ChatBody, CompletionBody, GenerationBody
from pdserve.router.http.writer import AnswerWriter
from pdserve.router.requests.request import RequestSpec
from pdserve.router.text.answer import Answer, AnswerToken, TextDelta
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.patience import HANG_S
from tests.router.edge_server import endless, running_edge
from tests.router.small_tokenizers import write_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": MESSAGES}
COMPLETION: dict[str, Any] = {"prompt": "x"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatTokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "body",
    [
        ChatBody(**CHAT, n=2),
        ChatBody(**CHAT, n=2, logprobs=True, top_logprobs=20),
        CompletionBody(**COMPLETION, n=2, logprobs=20, return_token_ids=True),
    ],
    ids=["text", "chat", "completion"],
)
def test_a_whole_answer_holds_no_more_than_it_says(tokenizer: ChatTokenizer, body: GenerationBody) -> None:
    spec = RequestSpec(prompt_tokens=(1,), sampling=SamplingParams(), arrived_s=1.0, num_choices=2)
    warm, writer = (AnswerWriter(tokenizer, body, [Answer(spec, ())], "id", "m") for _ in range(2))
    for known in range(300):
        tokenizer.token_bytes(known)  # which it keeps
    num_tokens = 800 if body.shows_tokens else 8000  # else lost in what Python keeps for itself

    def fill(writer: AnswerWriter) -> int:
        num_said = 0
        for index in range(num_tokens):
            top = tuple((rank, -0.123456789 * rank) for rank in range(40, 60))
            token = AnswerToken(50 + index % 50, TokenLogprobs(-1.0 / (index + 1), top), index)
            for choice in range(2):
                text, end = f"{index} 🙂", "length" if index == num_tokens - 1 else None
                num_said += writer.add(TextDelta(choice, text, end, (token,)))  # type: ignore[arg-type]
        return num_said

    with asyncio.Runner() as runner:
        fill(warm)  # fills Python's lists of free objects, as the next line starts a thread
        runner.run(warm.whole())
        tracemalloc.start()
        num_said = fill(writer)
        num_kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        answer = runner.run(writer.whole())
        _, num_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(answer) > 2 * num_tokens * len("0 🙂")
    assert num_kept < num_peak < num_said
    assert num_said < 4 * num_peak


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 5}])
def test_whole_answers_count_to_the_memory_of_requests(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    monkeypatch.setattr(asgi, "MAX_HELD_BYTES", 200_000)
    with running_edge() as edge:
        edge.generator.script = endless(50)
        answer = httpx.post(f"{edge.url}/v1/chat/completions", json={**CHAT, **more}, timeout=HANG_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert edge.generator.last.cancelled.wait(HANG_S)
        edge.say("ab")
        assert httpx.post(f"{edge.url}/v1/chat/completions", json={**CHAT, **more}).status_code == 200


def test_a_shown_prompt_counts_to_the_memory_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_HELD_BYTES", 200_000)
    with running_edge() as edge:
        body = {"prompt": [7] * 300, "max_tokens": 1}
        edge.say("ab")
        assert httpx.post(f"{edge.url}/v1/completions", json=body).status_code == 200
        assert httpx.post(f"{edge.url}/v1/completions", json={**body, "prompt_logprobs": 2}).status_code == 429
