"""Shares of ranks are disjoint and complete, and every rank has the KV heads of its queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.model.config.shape import ModelShape
from pdserve.model.config.sharding import Place, shard_of

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=24,
    num_kv_heads=8,
    head_dim=16,
    vocab_size=211,
)


@given(
    num_ranks=st.sampled_from((1, 2, 4, 8)),
    num_kv_heads=st.sampled_from((1, 2, 4, 8, 16)),
    group=st.sampled_from((1, 3, 8)),
    vocab_size=st.integers(64, 300),
)
def test_ranks_share_everything(num_ranks: int, num_kv_heads: int, group: int, vocab_size: int) -> None:
    num_heads = num_kv_heads * group
    if num_heads % num_ranks:
        return
    shape = replace(SHAPE, num_heads=num_heads, num_kv_heads=num_kv_heads, vocab_size=vocab_size)
    shards = [shard_of(shape, Place(rank, num_ranks)) for rank in range(num_ranks)]
    for parts, count in (
        ([shard.heads for shard in shards], num_heads),
        ([shard.features for shard in shards], shape.intermediate_size),
        ([shard.vocabulary for shard in shards], vocab_size),
    ):
        assert [index for part in parts for index in part] == list(range(count))
    assert len({len(shard.vocabulary) for shard in shards[:-1]}) <= 1
    for shard in shards:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert len(shard.heads) % len(shard.kv_heads) == 0


ROUTED = replace(SHAPE, num_experts=8, experts_per_token=2, shared_intermediate_size=48, dense_intermediate_size=80)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_ranks_share_features_of_experts_or_whole_experts(num_ranks: int, expert_parallel: bool) -> None:
    shards = [shard_of(ROUTED, Place.of(rank, num_ranks, 1, expert_parallel)) for rank in range(num_ranks)]
    held = [(expert, feature) for shard in shards for expert in shard.experts for feature in shard.features]
    assert len(held) == len(set(held)) == 8 * 96
    assert {len(shard.features) for shard in shards} == {96 if expert_parallel else 96 // num_ranks}
    for parts, count in (
        ([shard.shared_features for shard in shards], 48),
        ([shard.dense_features for shard in shards], 80),
    ):
        assert [index for part in parts for index in part] == list(range(count))


@pytest.mark.parametrize(
    ("changes", "expert_parallel", "reason"),
    [
        ({"num_experts": 7}, True, "expert_parallel: tensor_parallel 8 does not divide 7 experts; use a divisor, or"),
        ({"num_experts": 0}, True, "expert_parallel is set, and the model has no experts; remove it"),
        ({"intermediate_size": 100}, False, "does not divide the 100 features of each expert"),
        ({"shared_intermediate_size": 50}, True, "does not divide the 50 features of the shared expert"),
        ({"dense_intermediate_size": 50}, True, "does not divide the 50 features of a layer without experts"),
    ],
)
def test_experts_that_do_not_divide_are_refused(changes: dict[str, Any], expert_parallel: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        shard_of(replace(ROUTED, **changes), Place.of(0, 8, 1, expert_parallel))
    if "intermediate_size" in changes:
        shard_of(replace(ROUTED, **changes), Place.of(0, 8, 1, not expert_parallel))


@given(
    tensor_parallel=st.sampled_from((1, 2, 4)),
    pipeline_parallel=st.sampled_from((1, 2, 3, 4)),
    layers_each=st.integers(1, 5),
)
def test_stages_share_the_layers_and_ranks_of_a_stage_everything_else(
    tensor_parallel: int, pipeline_parallel: int, layers_each: int
) -> None:
    shape = replace(SHAPE, num_layers=pipeline_parallel * layers_each)
    places = [Place.of(rank, tensor_parallel, pipeline_parallel) for rank in range(tensor_parallel * pipeline_parallel)]
    assert [place.rank for place in places] == list(range(places[0].num_ranks))
    assert [place.is_last_stage for place in places].count(True) == tensor_parallel
    shards = [shard_of(shape, place) for place in places]
    layers = [index for shard in shards[::tensor_parallel] for index in shard.layers]
    assert layers == list(range(shape.num_layers))
    for place, shard in zip(places, shards, strict=True):
        alone = shard_of(shape, Place(place.tensor_rank, tensor_parallel))
        assert shard == alone._replace(layers=shards[place.stage * tensor_parallel].layers)


@pytest.mark.parametrize(
    ("num_ranks", "reason"),
    [
        (5, "tensor_parallel 5 does not divide 24 heads and 8 KV heads; use a divisor of the heads that"),
        (3, "tensor_parallel 3 does not divide 24 heads and 8 KV heads"),
        (0, "tensor_parallel 0 does not divide"),
    ],
)
def test_what_does_not_divide_is_refused(num_ranks: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        shard_of(SHAPE, Place(0, num_ranks))


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="8 does not divide the 100 features of the MLP; use a divisor"):
        shard_of(replace(SHAPE, intermediate_size=100), Place(0, 8))


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel 3 does not divide 2 layers; use a divisor"):
        shard_of(SHAPE, Place(pipeline_parallel=3))
