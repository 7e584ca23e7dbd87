from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv_transfer.resharding import KvShard, reshard
from pdserve.model.config.shape import ModelShape
from pdserve.model.config.sharding import Place, shard_of

NUM_LAYERS = 12
KV_HEADS = (1, 2, 8, 16)
DEGREES = st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 3, 4)))
"""Tensor-parallel ranks and pipeline stages."""


def shards(degrees: tuple[int, int], num_kv_heads: int) -> list[KvShard]:
    """Shards of a worker's ranks."""
    shape = ModelShape(
        num_layers=NUM_LAYERS, hidden_size=64, num_heads=16, num_kv_heads=num_kv_heads, head_dim=4,
        intermediate_size=64, vocab_size=64,
    )  # fmt: skip
    tensor_parallel, pipeline_parallel = degrees
    places = (Place.of(rank, *degrees) for rank in range(tensor_parallel * pipeline_parallel))
    return [KvShard(shard.kv_heads, shard.layers) for shard in (shard_of(shape, place) for place in places)]


@given(DEGREES, DEGREES, st.sampled_from(KV_HEADS))
def test_every_byte_comes_once_in_the_fewest_pieces_and_replicas_share_the_load(
    source_degrees: tuple[int, int], target_degrees: tuple[int, int], num_kv_heads: int
) -> None:
    source, target = shards(source_degrees, num_kv_heads), shards(target_degrees, num_kv_heads)
    load, largest = Counter[int](), 0
    for wanted, pieces in zip(target, reshard(source, target), strict=True):
        received = [pair for piece in pieces for pair in product(piece.shard.heads, piece.shard.layers)]
        assert sorted(received) == sorted(product(wanted.heads, wanted.layers))
        for piece in pieces:
            held = source[piece.source_rank]
            assert {*product(piece.shard.heads, piece.shard.layers)} <= {*product(held.heads, held.layers)}
            load[piece.source_rank] += piece.shard.size
            largest = max(largest, piece.shard.size)
        assert len(pieces) == len({shard for shard in source if shard.intersection(wanted).size})
    for shard in set(source):
        loads = [load[rank] for rank, held in enumerate(source) if held == shard]
        assert max(loads) - min(loads) <= largest


def test_ranks_of_equal_degrees_take_from_their_like() -> None:
    for degrees in (1, 1), (8, 1), (4, 2):
        own = shards(degrees, num_kv_heads=2)
        for rank, pieces in enumerate(reshard(own, own)):
            assert pieces == [(rank, own[rank])]


def test_shards_that_overlap_in_part_or_do_not_hold_the_target_are_refused() -> None:
    layers = range(2)
    whole, half, rest = (KvShard(heads, layers) for heads in (range(4), range(2), range(1, 4)))
    with pytest.raises(ValueError, match="overlap in part"):
        reshard([half, rest], [whole])
    with pytest.raises(ValueError, match="no rank of the source holds"):
        reshard([half, half], [whole])
