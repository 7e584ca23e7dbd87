from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pdserve.bench.race import (
    ANSWER_TOKENS,
    NUM_CONCURRENT,
    PROMPT_TOKENS,
    Implementation,
    limit,
    measure,
    medians,
    running_vllm,
)
from pdserve.model.config.shape import ModelShape

PEER = """
import json, sys
print("noise")
print("RACE " + json.dumps({"ready_s": 2.5}), flush=True)
for line in sys.stdin:
    burst = json.loads(line)
    num_tokens = len(burst["prompts"]) * burst["max_tokens"]
    print("RACE " + json.dumps({"seconds": 0.5, "num_tokens": num_tokens}), flush=True)
"""


def interpreter(folder: Path, program: str) -> str:
    """Runs ``program`` in place of vLLM's half."""
    (folder / "peer.py").write_text(program)
    file = folder / "python"
    file.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'peer.py'}\n")
    file.chmod(0o755)
    return str(file)


def test_a_round_is_three_bursts_after_a_small_one() -> None:
    bursts: list[tuple[int, int, int]] = []

    def burst(prompts: list[list[int]], max_tokens: int) -> float:
        bursts.append((len(prompts), len(prompts[0]), max_tokens))
        return 2.0

    figures = measure(Implementation(7.0, burst), np.random.default_rng(0), 100)
    assert bursts[1:] == [
        (NUM_CONCURRENT, PROMPT_TOKENS, 1),
        (NUM_CONCURRENT, PROMPT_TOKENS, ANSWER_TOKENS),
        (1, PROMPT_TOKENS, ANSWER_TOKENS),
    ]
    assert figures == {
        "ready_s": 7.0,
        "prompts_s": 2.0,
        "tokens_per_s": NUM_CONCURRENT * ANSWER_TOKENS / 2,
        "alone_tokens_per_s": ANSWER_TOKENS / 2,
    }


def test_medians_over_rounds() -> None:
    assert medians([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}


def test_vllm_is_driven_over_its_pipes(tmp_path: Path) -> None:
    with running_vllm(interpreter(tmp_path, PEER), tmp_path, "bfloat16") as vllm:
        assert vllm.ready_s == 2.5
        assert vllm.burst([[1], [2]], 3) == 0.5


def test_a_dead_vllm_is_an_error(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="vLLM ended with 3"), running_vllm(python, tmp_path, "float32"):
        pass


def test_the_limit_counts_the_products_of_a_burst() -> None:
    shape = ModelShape(
        num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=100
    )
    found = limit(shape)
    flops = 1e9 * found["gemm_gflops"]
    prompt = 2 * NUM_CONCURRENT * (PROMPT_TOKENS * 2 * shape.layer_parameters + shape.table_parameters)
    assert found["prompts_s"] == pytest.approx(prompt / flops, rel=0.1, abs=1e-4)
    assert found["tokens_per_s"] < NUM_CONCURRENT * ANSWER_TOKENS * flops / prompt
