"""Frequencies against those of transformers, at the sizes of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdserve.model.config.rope_config import parse_ropes
from pdserve.model.decoder.rope import inverse_frequencies, rope_angles

HEAD_DIM = 128
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn, untruncated": {**YARN, "truncate": False},
    "yarn, other bounds": {**YARN, "beta_fast": 16, "beta_slow": 4},
    "yarn, two scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, one scale": {**YARN, "mscale": 0.707},
    "yarn, its factor given": {**YARN, "attention_factor": 1.25},
    "yarn, factor from the lengths": {**YARN, "factor": None},
    "yarn, bounds that meet": {**YARN, "beta_fast": 1e9, "beta_slow": 5300},
}  # fmt: skip


def reference(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=131072,
        rope_parameters=dict(rope),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_factor_are_those_of_transformers(name: str) -> None:
    config = reference(ROPES[name])
    if name == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config)
    rope = parse_ropes({"max_position_embeddings": 131072, "rope_parameters": ROPES[name]})["full_attention"]
    assert torch.allclose(inverse_frequencies(rope, HEAD_DIM), expected, rtol=1e-6, atol=0)
    angles = rope_angles(torch.tensor([0, 7]), inverse_frequencies(rope, HEAD_DIM), rope.attention_factor)
    assert angles.cos[0].tolist() == [pytest.approx(factor)] * (HEAD_DIM // 2)
    assert angles.sin[1].tolist() == pytest.approx((7 * expected).sin().mul(factor).tolist(), abs=1e-6)


@pytest.mark.parametrize("length", [1000, 4096, 10000])
def test_dynamic_frequencies_are_those_of_transformers_for_a_sequence_of_the_length(length: int) -> None:
    given = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = reference(given)
    config.max_position_embeddings = 4096
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    rope = parse_ropes({"max_position_embeddings": 4096, "rope_parameters": given})["full_attention"]
    assert torch.allclose(inverse_frequencies(rope.at_length(length), HEAD_DIM), expected, rtol=1e-6, atol=0)


def test_every_option_of_yarn_changes_something() -> None:
    seen = []
    for given in ROPES.values():
        rope = parse_ropes({"max_position_embeddings": 131072, "rope_parameters": given})["full_attention"]
        positions, inv_freq = torch.tensor([100000]), inverse_frequencies(rope, HEAD_DIM)
        seen.append(rope_angles(positions, inv_freq, rope.attention_factor).cos)
    same = [(i, j) for i in range(len(seen)) for j in range(i) if torch.equal(seen[i], seen[j])]
    names = list(ROPES)
    allowed = {"yarn", "yarn, one scale", "yarn, factor from the lengths"}
    assert all({names[i], names[j]} <= allowed for i, j in same)
