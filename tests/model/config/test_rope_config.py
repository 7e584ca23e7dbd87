from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.model.config.rope_config import RopeConfig, parse_ropes
from tests.model.checkpoints import LLAMA3_ROPE, YARN_ROPE


def parse(max_position_embeddings: int = 4096, **values: Any) -> RopeConfig:
    return parse_ropes({"max_position_embeddings": max_position_embeddings, **values})["full_attention"]


def test_without_any_key_rope_is_plain() -> None:
    assert parse() == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3_ROPE,
        YARN_ROPE,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "default"},
    ],
)
def test_both_spellings_say_the_same(scaling: dict[str, Any]) -> None:
    newer = parse(rope_parameters={**scaling, "rope_theta": 5e5})
    older = {key: value for key, value in scaling.items() if key != "rope_theta"}
    assert newer.theta == 5e5
    assert parse(rope_theta=5e5, rope_scaling=older) == newer
    oldest = {"type" if key == "rope_type" else key: value for key, value in older.items()}
    assert parse(rope_theta=5e5, rope_scaling=oldest) == newer


def test_both_spellings_are_merged() -> None:
    both = parse(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"})
    assert both == RopeConfig(theta=10000.0, type="linear", factor=2.0)


def test_each_layer_type_may_have_its_own() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    expected = {
        "full_attention": RopeConfig(theta=1e6, type="linear", factor=8.0),
        "sliding_attention": RopeConfig(theta=5e3),
    }
    assert parse_ropes({"max_position_embeddings": 64, "rope_parameters": nested}) == expected
    older = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}, "rope_local_base_freq": 5e3}
    assert parse_ropes({"max_position_embeddings": 64, **older}) == expected
    without_bases = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    older["rope_scaling"] = None
    assert parse_ropes({"max_position_embeddings": 64, "rope_parameters": without_bases, **older}) == expected


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "default"}, 4096),
        (LLAMA3_ROPE, 4096),
        ({"rope_type": "linear", "factor": 2.5}, 10240),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "original_max_position_embeddings": 2048}, 4096),
    ],
)
def test_scaling_extends_the_context(scaling: dict[str, Any], length: int) -> None:
    assert parse(rope_parameters=scaling).context_length(4096) == length


def test_the_trained_length_at_the_top_level_comes_first() -> None:
    for given in (YARN_ROPE, LLAMA3_ROPE):
        rope = parse(rope_parameters=given, original_max_position_embeddings=128)
        assert rope.type == given["rope_type"]
        assert rope.trained_length == 128


def test_only_dynamic_scaling_depends_on_the_length() -> None:
    dynamic = parse(rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    expected = RopeConfig(theta=10000.0, type="dynamic", factor=2.0, trained_length=4096, length=8192)
    assert dynamic == expected
    assert dynamic.at_length(5000) == replace(expected, length=5000)
    yarn = parse(rope_parameters=YARN_ROPE)
    assert yarn.at_length(5000) == yarn


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported.*linear.*yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a positive number, not None"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": "2"}}, "factor must be a positive number, not '2'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
        ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, "factor"),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": ["llama3"]}, "rope_parameters is not an object"),
        ({"rope_parameters": {"full_attention": ["default"]}}, "rope_parameters of a layer type is not an object"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**values)
