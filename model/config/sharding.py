"""What each of several tensor-parallel ranks holds of a model (Shoeybi et al. 2019, Megatron-LM).

Ranks share heads, MLP features and vocabulary rows; norms are on every rank. With fewer KV heads than ranks, several
ranks hold the same KV head. Pure; asked by the readers of weights, the engine and the cost model.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.model.config.shape import ModelShape


class Shard(NamedTuple):
    """One rank's share. Ranges count in the whole model."""

    heads: range
    """Query heads."""
    kv_heads: range
    features: range
    """Of the MLP."""
    vocabulary: range
    """Rows of both tables. All ranks but the last have as many."""


def shard_of(shape: ModelShape, rank: int, num_ranks: int) -> Shard:
    """Share of one of ``num_ranks`` ranks.

    Raises:
        ValueError: as `check_divides`.
    """
    check_divides(shape, num_ranks)
    assert 0 <= rank < num_ranks, (rank, num_ranks)
    num_kv_heads = max(1, shape.num_kv_heads // num_ranks)
    first_kv_head = rank * shape.num_kv_heads // num_ranks
    num_rows = -(-shape.vocab_size // num_ranks)
    return Shard(
        heads=_part(shape.num_heads, rank, num_ranks),
        kv_heads=range(first_kv_head, first_kv_head + num_kv_heads),
        features=_part(shape.intermediate_size, rank, num_ranks),
        vocabulary=range(rank * num_rows, min((rank + 1) * num_rows, shape.vocab_size)),
    )


def check_divides(shape: ModelShape, num_ranks: int) -> None:
    """Check that ``num_ranks`` ranks can share the model.

    Raises:
        ValueError: they cannot; the message names the remedy.
    """
    kv_heads = shape.num_kv_heads
    is_whole_kv = num_ranks >= 1 and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0)
    if not is_whole_kv or shape.num_heads % num_ranks:
        raise ValueError(
            f"tensor_parallel {num_ranks} does not divide {shape.num_heads} heads and {kv_heads} KV heads; "
            "use a divisor of the heads that divides the KV heads, or is a multiple of them"
        )
    if shape.intermediate_size % num_ranks:
        raise ValueError(
            f"tensor_parallel {num_ranks} does not divide the MLP's {shape.intermediate_size} features; use a divisor"
        )


def _part(count: int, rank: int, num_ranks: int) -> range:
    size = count // num_ranks
    return range(rank * size, (rank + 1) * size)
