"""Resharding of KV: which part of a block each rank of a target takes from which rank of a source.

Tensor-parallel ranks divide the KV heads of a model, and replicate them where there are fewer heads than ranks;
pipeline stages divide its layers. Ranges count in the whole model, on both sides. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class KvShard(NamedTuple):
    """A rank's part of every block. The shards of two ranks of a worker are equal (replicas) or disjoint."""

    heads: range
    """KV heads."""
    layers: range

    @property
    def size(self) -> int:
        """Pairs of a head and a layer."""
        return len(self.heads) * len(self.layers)

    def intersection(self, other: KvShard) -> KvShard:
        """The part in both shards; its size is 0 if there is none."""
        return KvShard(_intersection(self.heads, other.heads), _intersection(self.layers, other.layers))


class Piece(NamedTuple):
    """A part of every block that one target rank takes from one source rank."""

    source_rank: int
    shard: KvShard


def reshard(source: Sequence[KvShard], target: Sequence[KvShard]) -> list[list[Piece]]:
    """Return the pieces of each target rank: its shard, each byte once, in as few pieces as the shards of the source
    allow. Replicas share the load.

    Args:
        source, target: shard of each rank.

    Raises:
        ValueError: shards of the source overlap in part, or lack what a rank of the target holds.
    """
    replicas: dict[KvShard, list[int]] = {}
    for rank, shard in enumerate(source):
        replicas.setdefault(shard, []).append(rank)
    shards = list(replicas)
    if any(one.intersection(other).size for index, one in enumerate(shards) for other in shards[:index]):
        raise ValueError(f"KV shards of the source overlap in part: {shards}")
    load: Counter[int] = Counter()
    pieces: list[list[Piece]] = []
    for wanted in target:
        own: list[Piece] = []
        for shard in shards:
            part = shard.intersection(wanted)
            if part.size:
                rank = min(replicas[shard], key=lambda rank: load[rank])
                load[rank] += part.size
                own.append(Piece(rank, part))
        if sum(piece.shard.size for piece in own) != wanted.size:
            raise ValueError(f"no rank of the source holds a part of {wanted}: {shards}")
        pieces.append(own)
    return pieces


def _intersection(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
