"""What each of a worker's ranks holds of a model (Shoeybi et al. 2019, Megatron-LM; Narayanan et al. 2021).

Pipeline stages share the layers. The tensor-parallel ranks of a stage share heads, features of MLPs and of experts, and
vocabulary rows; norms and routers are on every rank of the stage. With expert parallelism they share whole experts
instead of features (Lepikhin et al. 2020, GShard); all have the activations of all tokens, so none are exchanged. With
fewer KV heads than ranks, several ranks hold the same KV head. Pure; asked by the readers of weights, the engine and
the cost model.
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
    expert_parallel: bool = False
    """The ranks of a stage share whole experts, not features of each."""

    @classmethod
    def of(cls, rank: int, tensor_parallel: int, pipeline_parallel: int, expert_parallel: bool = False) -> Place:
        """Place of rank 0, 1, ...: the ranks of the first stage come first. Rank 0 is the leader."""
        stage, tensor_rank = divmod(rank, tensor_parallel)
        return cls(tensor_rank, tensor_parallel, stage, pipeline_parallel, expert_parallel)

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
    """Of the MLP, or of each routed expert."""
    experts: range
    """Routed experts."""
    shared_features: range
    """Of the shared expert."""
    dense_features: range
    """Of the MLP of a layer without experts, in a model that has them."""
    vocabulary: range
    """Rows of both tables. All ranks of a stage but the last have as many."""


def shard_of(shape: ModelShape, place: Place) -> Shard:
    """Share of the rank at ``place``.

    Raises:
        ValueError: as `check_divides`.
    """
    rank, num_ranks = place.tensor_rank, place.tensor_parallel
    check_divides(shape, num_ranks, place.pipeline_parallel, expert_parallel=place.expert_parallel)
    assert 0 <= rank < num_ranks, place
    assert 0 <= place.stage < place.pipeline_parallel, place
    num_kv_heads = max(1, shape.num_kv_heads // num_ranks)
    first_kv_head = rank * shape.num_kv_heads // num_ranks
    num_rows = -(-shape.vocab_size // num_ranks)
    whole, part = (0, 1), (rank, num_ranks)
    return Shard(
        layers=_part(shape.num_layers, place.stage, place.pipeline_parallel),
        heads=_part(shape.num_heads, rank, num_ranks),
        kv_heads=range(first_kv_head, first_kv_head + num_kv_heads),
        features=_part(shape.intermediate_size, *(whole if place.expert_parallel else part)),
        experts=_part(shape.num_experts, *(part if place.expert_parallel else whole)),
        shared_features=_part(shape.shared_intermediate_size, rank, num_ranks),
        dense_features=_part(shape.dense_intermediate_size, rank, num_ranks),
        vocabulary=range(rank * num_rows, min((rank + 1) * num_rows, shape.vocab_size)),
    )


def check_divides(shape: ModelShape, num_ranks: int, num_stages: int = 1, *, expert_parallel: bool = False) -> None:
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
    if expert_parallel and (not shape.num_experts or shape.num_experts % num_ranks):
        raise ValueError(
            f"expert_parallel: tensor_parallel {num_ranks} does not divide {shape.num_experts} experts; use a divisor, "
            "or set expert_parallel to false"
            if shape.num_experts
            else "expert_parallel is set, and the model has no experts; remove it"
        )
    parts = {
        "each expert" if shape.num_experts else "the MLP": 0 if expert_parallel else shape.intermediate_size,
        "the shared expert": shape.shared_intermediate_size,
        "a layer without experts": shape.dense_intermediate_size,
    }
    for part, num_features in parts.items():
        if num_features % num_ranks:
            raise ValueError(
                f"tensor_parallel {num_ranks} does not divide the {num_features} features of {part}; use a divisor"
            )
    if num_stages < 1 or shape.num_layers % num_stages:
        raise ValueError(f"pipeline_parallel {num_stages} does not divide {shape.num_layers} layers; use a divisor")


def check_groups(shape: ModelShape, scheme: Scheme | None, num_ranks: int, *, expert_parallel: bool = False) -> None:
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
    parts = {
        "heads": 0 if scheme.layout == "blocks" else shape.num_heads * shape.head_dim,
        "experts" if shape.num_experts else "MLP": 0 if expert_parallel else shape.intermediate_size,
        "shared expert": shape.shared_intermediate_size,
        "layers without experts": shape.dense_intermediate_size,
    }
    for what, num_inputs in parts.items():
        if num_inputs // num_ranks % scheme.group_inputs:
            remedies = ["use a lower degree"]
            remedies += ["expert_parallel true"] if what == "experts" else []
            remedies += [] if scheme.method else ["quantization int8"]
            raise ValueError(
                f"tensor_parallel {num_ranks} divides the {num_inputs} inputs of the {what} within groups of "
                f"{scheme.group_inputs} that share a scale: {' or '.join(remedies)}"
            )


def _part(count: int, rank: int, num_ranks: int) -> range:
    size = count // num_ranks
    return range(rank * size, (rank + 1) * size)
