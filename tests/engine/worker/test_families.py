"""Greedy answers that one worker process hands off to another are those of transformers, for every family that
`tests.e2e.test_same_tokens` serves over HTTP no model of."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from tests.e2e.models import make_prompts, write_model
from tests.e2e.reference import assert_same_tokens, greedy_choices
from tests.workers import WorkerProcess

NUM_TOKENS = 24
RANKS = {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("family", "form", "prefill"),
    [
        ("qwen2", None, {}),
        ("gemma3_text", None, {}),
        ("qwen3", "fp8-block", RANKS),
        ("gemma2", None, RANKS),
    ],
)
def test_same_tokens(family: str, form: str | None, prefill: dict[str, Any], tmp_path: Path) -> None:
    """Twelve prompts at once, several chunks long and with shared prefixes."""
    served, plain = write_model(tmp_path, family, form)
    prompts = make_prompts()[:12]
    requests = [
        GenerationRequest(
            request_id=n,
            prompt_tokens=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        for n, prompt in enumerate(prompts)
    ]
    with ExitStack() as stack:
        prefiller, decoder = (
            stack.enter_context(stack.enter_context(WorkerProcess(config_of(served, role, **fields))).connect())
            for role, fields in ((WorkerRole.PREFILL, prefill), (WorkerRole.DECODE, {}))
        )
        for request in requests:
            prefiller.submit(replace(request, handoff=True))
        for request in requests:
            decoder.prepare(request, prefiller.wait_for_source(request.request_id))
        answers = [
            prefiller.wait_for_tokens(request.request_id, 1) + decoder.wait_for_answer(request.request_id)
            for request in requests
        ]
        prefiller.wait_until_free()
        decoder.wait_until_free()
    assert {len(answer) for answer in answers} == {NUM_TOKENS}
    assert_same_tokens(answers, greedy_choices(plain, prompts, answers))


def config_of(model_path: Path, role: WorkerRole, **fields: Any) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{role.value}-0",
        role=role,
        model_path=str(model_path),
        kv_memory_bytes=64 * 2**20,
        max_batch_tokens=128,
        cluster_token="secret",
        **fields,
    )
