"""Every sampling parameter, over HTTP, of experts in int4: identical answers mixed, disaggregated, and while workers
are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.models import write_model
from tests.patience import HANG_S

NUM_TOKENS = 160
PHASE = {"kv_memory": "128MiB", "max_batch_tokens": 256}

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k and top-p": {"temperature": 1.2, "top_k": 40, "top_p": 0.9},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "penalties, greedy": {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "penalties, drawn": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logit bias": {"temperature": 0.7, "logit_bias": {"17": 6, "300": -100}},
    "min tokens": {"temperature": 0.8, "min_tokens": 40, "stop_token_ids": list(range(6, 130)), "ignore_eos": False},
    "four choices": {"temperature": 0.9, "n": 4},
    "three equal choices": {"temperature": 0, "n": 3},
    "four choices that end apart": {"temperature": 1, "n": 4, "stop_token_ids": list(range(6, 16))},
    "logprobs": {"temperature": 0.8, "logprobs": 4},
    "logprobs of choices with penalties": {"temperature": 1, "n": 2, "logprobs": 2, "frequency_penalty": 0.5},
    "echo": {"temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 8},
    "stop strings": {"temperature": 0.8, "n": 2, "stop": ["e t", "es", "qu"]},
}


def request_body(name: str, **extra: Any) -> dict[str, Any]:
    rng = random.Random(name)
    prompt = [rng.randrange(6, 512) for _ in range(rng.choice((5, 33, 100, 320)))]
    return {
        "model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": len(name),
        "return_token_ids": True, **SETTINGS[name], **extra,
    }  # fmt: skip


Answers = dict[str, list[dict[str, Any]]]
"""Choices of each request."""


async def ask_all(url: str, disturb: Callable[[], None] | None = None) -> Answers:
    """Send all requests at once; call ``disturb()`` once they are under way."""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        requests = {
            name: asyncio.create_task(client.post("/v1/completions", json=request_body(name))) for name in SETTINGS
        }
        if disturb is not None:
            await asyncio.sleep(0.3)
            assert not all(task.done() for task in requests.values()), "the answers were complete before the fault"
            disturb()
        replies = {name: await task for name, task in requests.items()}
    for name, reply in replies.items():
        assert reply.status_code == 200, f"{name}: {reply.text}"
    return {name: reply.json()["choices"] for name, reply in replies.items()}


def deployment(checkpoint: Path, **phases: Any) -> dict[str, Any]:
    return {"model": {"path": str(checkpoint), "served_name": "tiny"}, **phases}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3}
    return write_model(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe", "w4a16", **sizes).served


@pytest.fixture(scope="module")
def answers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Undisturbed answers of one mixed worker."""
    phases = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {**PHASE, "replicas": 1}}
    with running_cluster(tmp_path_factory.mktemp("mixed"), deployment(checkpoint, **phases)) as cluster:
        return asyncio.run(ask_all(cluster.url))


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("disaggregated")
    with running_cluster(folder, deployment(checkpoint, prefill=PHASE, decode=PHASE)) as cluster:
        yield cluster


def assert_same(answers: Answers, expected: Answers) -> None:
    for name, choices in expected.items():
        for choice, reference in zip(answers[name], choices, strict=True):
            where = f"{name}, choice {reference['index']}"
            assert choice["token_ids"] == reference["token_ids"], where
            for key in ("index", "text", "finish_reason"):
                assert choice[key] == reference[key], f"{where}: {key}"
            assert_same_logprobs(choice["logprobs"], reference["logprobs"], where)


def assert_same_logprobs(logprobs: dict[str, Any] | None, expected: dict[str, Any] | None, where: str) -> None:
    if expected is None or logprobs is None:
        assert logprobs is expected, where
        return
    assert logprobs["tokens"] == expected["tokens"], where
    assert logprobs["text_offset"] == expected["text_offset"], where
    # nothing precedes the first token of a prompt
    pairs = zip(logprobs["token_logprobs"], expected["token_logprobs"], strict=True)
    assert all(a == b or abs(a - b) < 1e-4 for a, b in pairs), where


def test_settings_do_what_they_say(answers: Answers) -> None:
    tokens = {name: [choice["token_ids"] for choice in choices] for name, choices in answers.items()}
    assert [choice["index"] for choice in answers["four choices"]] == [0, 1, 2, 3]
    assert len({tuple(choice) for choice in tokens["four choices"]}) == 4
    assert len({tuple(choice) for choice in tokens["three equal choices"]}) == 1
    assert 300 not in tokens["logit bias"][0]
    assert tokens["logit bias"][0].count(17) > 5
    assert len(tokens["min tokens"][0]) > 40
    assert answers["min tokens"][0]["finish_reason"] == "stop"
    assert len(set(tokens["penalties, greedy"][0])) > NUM_TOKENS // 4
    echoed = answers["echo"][0]["logprobs"]
    assert len(echoed["tokens"]) == len(request_body("echo")["prompt"]) + 8
    assert echoed["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in echoed["token_logprobs"][1:])
    for choice in answers["stop strings"]:
        assert not any(stop in choice["text"] for stop in SETTINGS["stop strings"]["stop"])


def test_disaggregated_answers_are_the_same(cluster: Cluster, answers: Answers) -> None:
    assert_same(asyncio.run(ask_all(cluster.url)), answers)
    cluster.wait_until_idle()


@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-0"])
def test_answers_are_the_same_when_a_worker_is_killed(cluster: Cluster, answers: Answers, worker_id: str) -> None:
    victim = cluster.worker_pid(worker_id)
    disturbed = asyncio.run(ask_all(cluster.url, lambda: os.kill(victim, signal.SIGKILL)))
    assert_same(disturbed, answers)
    cluster.wait_until_healthy()
    cluster.wait_until_idle()
