"""Greedy answers over HTTP are identical through every way of serving."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import running_cluster
from tests.e2e.models import make_prompts, write_model
from tests.e2e.reference import assert_same_tokens, greedy_choices
from tests.patience import HANG_S

NUM_TOKENS = 24
MAX_BATCH_TOKENS = 128


async def complete(client: httpx.AsyncClient, prompt: list[int], stream: bool) -> tuple[list[int], dict[str, Any]]:
    """Token ids and usage of one greedy completion, streamed or not."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": stream,
    }  # fmt: skip
    if not stream:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["choices"][0]["token_ids"], answer["usage"]
    body["stream_options"] = {"include_usage": True}
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as streamed:
        async for line in streamed.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids", [])
            usage = chunk["usage"] or usage
    return tokens, usage


async def complete_all(url: str, prompts: list[list[int]]) -> list[tuple[list[int], dict[str, Any]]]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as client:
        return await asyncio.gather(
            *(complete(client, prompt, stream=index % 2 == 0) for index, prompt in enumerate(prompts))
        )


def serve(
    checkpoint: Path, topology: str, prompts: list[list[int]], folder: Path
) -> list[tuple[list[int], dict[str, Any]]]:
    """Answer all prompts at once, on a cluster that must be idle again afterwards."""
    deployment: dict[str, Any] = {"model": {"path": str(checkpoint), "served_name": "tiny"}}
    for section, values in TOPOLOGIES[topology].items():
        deployment[section] = values
    for phase in ("prefill", "decode", "mixed"):
        deployment[phase] = {**deployment.get(phase, {}), "kv_memory": "64MiB", "max_batch_tokens": MAX_BATCH_TOKENS}
        deployment[phase].setdefault("replicas", 0 if phase == "mixed" else 1)
    with running_cluster(folder, deployment) as cluster:
        results = asyncio.run(complete_all(cluster.url, prompts))
        cluster.wait_until_idle()
    return results


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "mixed": {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": 1}},
    "1P+1D memfd": {"kv_transfer": {"transport": "memfd"}},
    "1P+1D of 2 stages, tcp": {"kv_transfer": {"transport": "tcp"}, "decode": {"pipeline_parallel": 2}},
    "1P of 2 ranks+1D": {"prefill": {"tensor_parallel": 2}},
    "1P of 2 ranks with whole experts+1D": {"prefill": {"tensor_parallel": 2, "expert_parallel": True}},
    "2P+2D": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
}


@pytest.mark.parametrize(
    ("topology", "family", "form", "num_prompts"),
    [
        ("mixed", "mixtral", "gptq", 64),
        ("1P+1D memfd", "qwen2_moe", None, 12),
        ("1P+1D of 2 stages, tcp", "llama", None, 64),
        ("1P of 2 ranks with whole experts+1D", "qwen3_moe", "gptq", 12),
        ("1P of 2 ranks+1D", "gpt_oss", None, 12),
        ("2P+2D", "mistral", "w8a8-fp8", 64),
    ],
)
def test_same_tokens_and_exact_usage(
    topology: str, family: str, form: str | None, num_prompts: int, tmp_path: Path
) -> None:
    """Every topology, and every family with experts; of a quantised model as transformers computes what its weights
    stand for. Other families are handed off in `tests.engine.worker.test_families`."""
    no_window = {"sliding_window": None} if family == "mixtral" else {}  # as published
    served, plain = write_model(tmp_path, family, form, **no_window)
    prompts = make_prompts()[:num_prompts]
    results = serve(served, topology, prompts, tmp_path)
    answers = [tokens for tokens, _ in results]
    assert_same_tokens(answers, greedy_choices(plain, prompts, answers))
    for prompt, (tokens, usage) in zip(prompts, results, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert usage["prompt_tokens"] == len(prompt)
        assert usage["completion_tokens"] == NUM_TOKENS
        assert usage["total_tokens"] == len(prompt) + NUM_TOKENS
