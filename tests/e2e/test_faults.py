"""Workers killed under load and clients that leave: every stream ends correctly and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.deploy.cluster.folder import admin_headers
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.models import write_model
from tests.e2e.reference import ReferenceAnswer, assert_same_tokens
from tests.patience import HANG_S

NUM_STREAMS = 16
NUM_TOKENS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1 P + 1 D on a model, quantised and of experts, slow enough for a stream to last about a second."""
    folder = tmp_path_factory.mktemp("cluster")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "sliding_window": None}
    checkpoint = write_model(folder, "mixtral", "gptq", **sizes, max_position_embeddings=4096).served
    phase = {"kv_memory": "256MiB", "max_batch_tokens": 256}
    deployment = {
        "model": {"path": str(checkpoint), "served_name": "tiny"},
        "prefill": phase,
        "decode": {**phase, "speculation": "ngram"},
    }
    with running_cluster(folder, deployment) as cluster:
        yield cluster


def request_body(index: int, **extra: Any) -> dict[str, Any]:
    """Every other request has a grammar, whose answers are no shorter than the others."""
    rng = random.Random(index)
    schema = {"type": "array", "items": {"type": "integer", "minimum": index, "maximum": 999}, "minItems": NUM_TOKENS}
    shape = {"structured_outputs": {"json": schema}} if index % 2 else {"ignore_eos": True}
    return {
        "model": "tiny", "prompt": [rng.randrange(6, 512) for _ in range(20 + 13 * index)], "max_tokens": NUM_TOKENS,
        "temperature": 0, "return_token_ids": True, "stream": True, **shape, **extra,
    }  # fmt: skip


async def stream_tokens(client: httpx.AsyncClient, body: dict[str, Any], tokens: list[int] | None = None) -> list[int]:
    """Token ids of a stream, added to ``tokens`` as they come. It must end with ``[DONE]``."""
    tokens = [] if tokens is None else tokens
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids", [])
    assert done, f"the stream broke off after {len(tokens)} tokens"
    return tokens


async def undisturbed_answers(url: str) -> list[ReferenceAnswer]:
    """Answers to the same requests without failures, with the top-2 margin at each token."""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        bodies = [request_body(index, stream=False, logprobs=2) for index in range(NUM_STREAMS)]
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    answers = []
    for reply in replies:
        choice = reply.json()["choices"][0]
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        margins = [top[0] - top[1] if len(top) > 1 else 0.0 for top in tops]
        answers.append(ReferenceAnswer(choice["token_ids"], margins))
    return answers


async def answers_while(url: str, disturb: Any) -> list[list[int]]:
    """Run all streams at once; call ``disturb()`` once they are well under way."""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        streams = [asyncio.create_task(stream_tokens(client, request_body(i))) for i in range(NUM_STREAMS)]
        await asyncio.sleep(0.4)
        assert not any(task.done() for task in streams), "the streams ended before the fault: make them longer"
        disturb()
        return await asyncio.gather(*streams)


@pytest.fixture(scope="module")
def references(cluster: Cluster) -> list[ReferenceAnswer]:
    return asyncio.run(undisturbed_answers(cluster.url))


@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-0"])
def test_a_killed_worker_loses_nothing(cluster: Cluster, references: list[ReferenceAnswer], worker_id: str) -> None:
    victim = cluster.worker_pid(worker_id)
    answers = asyncio.run(answers_while(cluster.url, lambda: os.kill(victim, signal.SIGKILL)))
    assert_same_tokens(answers, references)
    cluster.wait_until_healthy()
    assert cluster.worker_pid(worker_id) != victim
    cluster.wait_until_idle()


def test_guesses_outlive_a_killed_worker(cluster: Cluster) -> None:
    check_guesses_outlive_killed_workers(cluster, num_streams=3, num_tokens=1500, num_kills=1)


def test_guesses_of_a_draft_model_outlive_three_killed_workers(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 688, "num_layers": 2}
    checkpoint = write_random_checkpoint(tmp_path / "model", hidden_size=256, **sizes)
    write_random_checkpoint(tmp_path / "draft", hidden_size=64, **sizes)
    deployment = {
        "model": {"path": str(checkpoint), "served_name": "tiny"},
        "slo": {"ttft_seconds": 60.0, "tpot_seconds": 10.0},
        "prefill": {"kv_memory": "64MiB"},
        "decode": {"kv_memory": "64MiB", "max_batch_size": 128, "speculation": {"draft": "draft"}},
    }
    with running_cluster(tmp_path, deployment) as cluster:
        check_guesses_outlive_killed_workers(cluster, num_streams=72, num_tokens=160, num_kills=3)


def check_guesses_outlive_killed_workers(
    cluster: Cluster, *, num_streams: int, num_tokens: int, num_kills: int
) -> None:
    """Answers of four tokens repeat themselves. Those to compare with have a penalty, which is too small to change a
    logit, and so no guesses."""
    shape = {"temperature": 1.0, "logit_bias": dict.fromkeys(("7", "8", "9", "10"), 15.0), "max_tokens": num_tokens}
    bodies = [request_body(2 * (index % 3), seed=index, **shape) for index in range(num_streams)]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
            num_guesses = cluster.num_guesses()
            plain = [{**body, "frequency_penalty": 1e-15, "stream": False} for body in bodies]
            replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in plain))
            expected = [reply.json()["choices"][0]["token_ids"] for reply in replies]
            assert cluster.num_guesses() == num_guesses
            answers: list[list[int]] = [[] for _ in bodies]
            streams = [asyncio.create_task(stream_tokens(client, *each)) for each in zip(bodies, answers, strict=True)]

            async def wait_until(is_so: Callable[[], bool]) -> None:
                while not is_so():
                    assert not all(task.done() for task in streams), "the streams ended before the fault"
                    await asyncio.sleep(0.02)

            def is_guessing(least: int) -> bool:
                return cluster.num_guesses() >= least

            await wait_until(lambda: all(answers))  # a request without a token is not kept until a worker is back
            for most in (num_guesses, *[0] * (num_kills - 1)):
                await wait_until(partial(is_guessing, most + 20))
                os.kill(cluster.worker_pid("decode-0"), signal.SIGKILL)
                await wait_until(lambda: cluster.num_guesses() == 0)
            assert await asyncio.gather(*streams) == expected
            assert cluster.num_guesses() > 0

    asyncio.run(run())
    cluster.wait_until_healthy()
    cluster.wait_until_idle()


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


async def leave_early(url: str, count: int) -> None:
    """Run ``count`` clients that disconnect at a random time: queued, prefilling, in handoff or decoding."""
    rng = random.Random(3)
    host, port = url.removeprefix("http://").split(":")

    async def one(index: int, after_s: float) -> None:
        # httpx loses its connection if it is cancelled in the turn of the loop in which it connects.
        body = json.dumps(request_body(index % 40, max_tokens=2000, stream=index % 3 != 0)).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEAD % len(body) + body)
        await asyncio.sleep(after_s)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(one(index, rng.uniform(0.0, 2.0)) for index in range(count)))


def test_two_hundred_disconnects_free_everything(cluster: Cluster) -> None:
    asyncio.run(leave_early(cluster.url, 200))
    cluster.wait_until_idle()
    metrics = httpx.get(f"{cluster.admin_url}/metrics", headers=admin_headers(cluster.admin_url), timeout=HANG_S).text
    [num_cancelled] = re.findall(r'outcome="cancelled"} (\d+)', metrics)
    assert int(num_cancelled) > 20
    start = time.monotonic()
    answer = httpx.post(f"{cluster.url}/v1/completions", json=request_body(0, stream=False), timeout=HANG_S).json()
    assert len(answer["choices"][0]["token_ids"]) == NUM_TOKENS, time.monotonic() - start
