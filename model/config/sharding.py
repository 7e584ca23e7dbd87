"""What each of a worker's ranks holds of a model (Shoeybi et al. 2019, Megatron-LM; Narayanan et al. 2021).

Pipeline stages share the layers. The tensor-parallel ranks of a stage share heads, MLP features and vocabulary rows;
norms are on every rank of the stage. With fewer KV heads than ranks, several ranks hold the same KV head. Pure; asked
by the readers of weights, the engine and the cost model.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.model.config.quantisation import Scheme
from pdserve.model.config.shape import ModelShape


class Place(NamedTuple):
    """A rank's place among the ranks of a worker. The default is one rank alone."""

    tensor_rank: int = 0
    """Among the ranks that share its stage."""
    tensor_parallel: int = 1
    stage: int = 0
    pipeline_parallel: int = 1

    @classmethod
    def of(cls, rank: int, tensor_parallel: int, pipeline_parallel: int) -> Place:
        """Place of rank 0, 1, ...: the ranks of the first stage come first. Rank 0 is the leader."""
        stage, tensor_rank = divmod(rank, tensor_parallel)
        return cls(tensor_rank, tensor_parallel, stage, pipeline_parallel)

    @property
    def rank(self) -> int:
        return self.stage * self.tensor_parallel + self.tensor_rank

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def is_last_stage(self) -> bool:
        return self.stage + 1 == self.pipeline_parallel


class Shard(NamedTuple):
    """One rank's share. Ranges count in the whole model. The first stage has the embedding table, too, the last one the
    final norm and the output projection."""

    layers: range
    heads: range
    """Query heads."""
    kv_heads: range
    features: range
    """Of the MLP."""
    vocabulary: range
    """Rows of both tables. All ranks of a stage but the last have as many."""


def shard_of(shape: ModelShape, place: Place) -> Shard:
    """Share of the rank at ``place``.

    Raises:
        ValueError: as `check_divides`.
    """
    rank, num_ranks = place.tensor_rank, place.tensor_parallel
    check_divides(shape, num_ranks, place.pipeline_parallel)
    assert 0 <= rank < num_ranks, place
    assert 0 <= place.stage < place.pipeline_parallel, place
    num_kv_heads = max(1, shape.num_kv_heads // num_ranks)
    first_kv_head = rank * shape.num_kv_heads // num_ranks
    num_rows = -(-shape.vocab_size // num_ranks)
    return Shard(
        layers=_part(shape.num_layers, place.stage, place.pipeline_parallel),
        heads=_part(shape.num_heads, rank, num_ranks),
        kv_heads=range(first_kv_head, first_kv_head + num_kv_heads),
        features=_part(shape.intermediate_size, rank, num_ranks),
        vocabulary=range(rank * num_rows, min((rank + 1) * num_rows, shape.vocab_size)),
    )


def check_divides(shape: ModelShape, num_ranks: int, num_stages: int = 1) -> None:
    """Check that ``num_stages`` stages of ``num_ranks`` ranks can share the model.

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
    if num_stages < 1 or shape.num_layers % num_stages:
        raise ValueError(f"pipeline_parallel {num_stages} does not divide {shape.num_layers} layers; use a divisor")


def check_groups(shape: ModelShape, scheme: Scheme | None, num_ranks: int) -> None:
    """Check that ``num_ranks`` tensor-parallel ranks can share the inputs of matrices held in ``scheme``.

    Raises:
        ValueError: two ranks would share a scale; the message names the remedy.
    """
    if scheme is None or not scheme.group_inputs or num_ranks == 1:
        return
    if scheme.act_order:
        raise ValueError(
            f"tensor_parallel is {num_ranks}, and the groups of {scheme} are in act-order (desc_act or actorder in "
            "quantization_config), so ranks would share scales: set it to 1, or serve a checkpoint without act-order"
        )
    for what, num_inputs in (("heads", shape.num_heads * shape.head_dim), ("MLP", shape.intermediate_size)):
        if num_inputs // num_ranks % scheme.group_inputs:
            raise ValueError(
                f"tensor_parallel {num_ranks} divides the {num_inputs} inputs of the {what} within groups of "
                f"{scheme.group_inputs} that share a scale: use a lower degree"
                + ("" if scheme.method else ", or quantization int8")
            )


def _part(count: int, rank: int, num_ranks: int) -> range:
    size = count // num_ranks
    return range(rank * size, (rank + 1) * size)
