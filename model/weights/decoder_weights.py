"""A decoder's weights: read from a checkpoint and packed for the kernels.

Each matrix goes to the kernels as it is read, and they may keep a packed copy: loading peaks at the size of the weights
plus a few matrices. Files are memory-mapped, so that only the tensor being read takes memory;
`pdserve.model.weights.files` has checked them. Called by `pdserve.model.decoder.decoder`; computes nothing.

Shape suffixes: V vocabulary, E hidden size, I intermediate size, A experts, N query heads, H KV heads, M = N + 2 H, D
head dim. V, I, N and H count in the rank's share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from pdserve.contracts.precision import Precision
from pdserve.kernels.cpu.build import load_library
from pdserve.kernels.operations import DecoderKernels, Experts, Linear, QkNorm
from pdserve.kernels.torch.dense import matrix_dtype
from pdserve.kernels.weight_quantisation import GroupedWeight, quantise
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.config.sharding import Place, shard_of
from pdserve.model.weights.bytes import weight_bytes
from pdserve.model.weights.files import check_weights, norm_names
from pdserve.model.weights.stored import Checkpoint, read_matrices


class DenseMlp(NamedTuple):
    gate_up: Linear
    """``[2 * I, E]``: gate, then up."""
    down: Linear
    """``[E, I]``."""


class ExpertMlp(NamedTuple):
    router: Linear
    """``[A, E]``: its products are the logits of all experts of the layer, in float32. Never quantised."""
    gate_up: Experts
    """``[2 * I, E]`` each."""
    down: Experts
    """``[E, I]`` each."""
    shared: DenseMlp | None
    """Expert of every token."""
    shared_gate: Linear | None
    """``[1, E]``. Never quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer. Projections of the same input are joined; norms are ``[E]``."""

    attention_norm: torch.Tensor
    qkv: Linear
    """``[M * D, E]``: queries, keys, values."""
    qk_norm: QkNorm | None
    output: Linear
    """``[E, N * D]``."""
    attention_post_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor
    mlp: DenseMlp | ExpertMlp
    mlp_post_norm: torch.Tensor | None = None


class DecoderWeights(NamedTuple):
    """Of a rank; None where its pipeline stage has none."""

    embedding: Linear | None
    """``[V, E]``."""
    layers: list[LayerWeights]
    norm: torch.Tensor | None
    lm_head: Linear | None
    """``[V, E]``; the embedding itself if they are tied and on the same rank."""


def load_decoder_weights(
    folder: Path,
    config: DecoderConfig,
    precision: Precision,
    kernels: DecoderKernels,
    place: Place = Place(),  # noqa: B008  # immutable
) -> DecoderWeights:
    """Read one rank's share of the checkpoint in ``folder`` and pack it for ``kernels``.

    Quantises the matrices of the layers, not the tables; `pdserve.model.weights.bytes` says why. The products of a
    stage's ranks with ``output`` and ``down`` add up to the whole; the first of them adds the bias.

    Raises:
        ValueError: the weights are unusable or do not match ``config``.
    """
    shape = config.shape
    shard = shard_of(shape, place)
    heads, kv_heads = (_scaled(part, shape.head_dim) for part in (shard.heads, shard.kv_heads))
    hidden, dtype = range(shape.hidden_size), getattr(torch, precision.dtype)
    check_weights(folder, shape)
    with Checkpoint(folder, dtype) as checkpoint:

        def read(*names: str, rows: Sequence[range] = ()) -> torch.Tensor:
            return checkpoint.read(*names, rows=rows).to(kernels.device)

        def norm(name: str) -> torch.Tensor:
            weight = read(f"{name}.weight").float()
            return (weight + 1 if config.unit_offset_norms else weight).to(kernels.activation_dtype or dtype)

        def matrix(names: Sequence[str], rows: Sequence[range], inputs: range) -> torch.Tensor | GroupedWeight:
            """The outputs ``rows`` of matrices of the same input, as one, and of them the rank's ``inputs``.

            A setting quantises all inputs first, so that ranks have the values and scales of one that has them all.
            """
            if shape.scheme is not None and any(map(shape.scheme.quantises, names)):
                return _on(kernels.device, read_matrices(checkpoint, names, shape.scheme, rows, inputs))
            weight_FE = read(*(f"{name}.weight" for name in names), rows=rows)
            if precision.quantization in ("int8", "int4"):
                return quantise(weight_FE, precision.quantization).inputs(inputs)
            return weight_FE[:, inputs.start : inputs.stop].contiguous()

        def read_outputs(prefix: str, outputs: dict[str, range]) -> torch.Tensor | GroupedWeight:
            """Some outputs of projections of the same input."""
            return matrix([f"{prefix}{name}_proj" for name in outputs], [*outputs.values()], hidden)

        def read_inputs(name: str, inputs: range) -> torch.Tensor | GroupedWeight:
            """Some inputs of a projection."""
            return matrix([f"{name}_proj"], [hidden], inputs)

        def pack(weight: torch.Tensor | GroupedWeight, bias: torch.Tensor | None) -> Linear:
            return kernels.pack_linear(weight, bias, dtype=dtype)

        def joined(prefix: str, outputs: dict[str, range], has_bias: bool) -> Linear:
            """Pack the rank's outputs of projections of the same input as one."""
            names, rows = [f"{prefix}{name}_proj.bias" for name in outputs], [*outputs.values()]
            return pack(read_outputs(prefix, outputs), read(*names, rows=rows) if has_bias else None)

        def summed(name: str, inputs: range, has_bias: bool) -> Linear:
            """Pack a projection of the rank's inputs, whose product is added to those of the other ranks."""
            bias = read(f"{name}_proj.bias") if has_bias and place.tensor_rank == 0 else None
            return pack(read_inputs(name, inputs), bias)

        def table(name: str) -> Linear:
            return kernels.pack_linear(read(f"{name}.weight", rows=[shard.vocabulary]))

        def unquantised(name: str) -> Linear:
            weight = read(f"{name}.weight")
            # Products of 16-bit activations would be rounded.
            return kernels.pack_linear(weight if kernels.activation_dtype is torch.float32 else weight.float())

        def dense_mlp(prefix: str, features: range) -> DenseMlp:
            return DenseMlp(
                joined(prefix, {"gate": features, "up": features}, shape.mlp_bias),
                summed(f"{prefix}down", features, shape.mlp_bias),
            )

        def expert_mlp(prefix: str) -> ExpertMlp:
            each = [f"{prefix}experts.{expert}." for expert in shard.experts]
            has_shared = shape.shared_intermediate_size > 0
            gate_ups = (read_outputs(expert, {"gate": shard.features, "up": shard.features}) for expert in each)
            downs = (read_inputs(f"{expert}down", shard.features) for expert in each)
            return ExpertMlp(
                router=unquantised(f"{prefix}gate"),
                gate_up=kernels.pack_experts(gate_ups, dtype=dtype),
                down=kernels.pack_experts(downs, dtype=dtype),
                shared=dense_mlp(f"{prefix}shared_expert.", shard.shared_features) if has_shared else None,
                shared_gate=unquantised(f"{prefix}shared_expert_gate") if has_shared else None,
            )

        def mlp_of(index: int) -> DenseMlp | ExpertMlp:
            prefix = f"model.layers.{index}.mlp."
            if not shape.num_experts:
                return dense_mlp(prefix, shard.features)
            return dense_mlp(prefix, shard.dense_features) if index in shape.dense_layers else expert_mlp(prefix)

        def layer(index: int) -> LayerWeights:
            prefix, qk_norm = f"model.layers.{index}.", None
            attention = f"{prefix}self_attn."
            if shape.qk_norm:
                qk_norm = QkNorm(norm(f"{attention}q_norm"), norm(f"{attention}k_norm"), config.rms_norm_eps)
            return LayerWeights(
                qkv=joined(attention, {"q": heads, "k": kv_heads, "v": kv_heads}, shape.qkv_bias),
                qk_norm=qk_norm,
                output=summed(f"{attention}o", heads, shape.output_bias),
                mlp=mlp_of(index),
                **{field: norm(prefix + name) for field, name in norm_names(shape).items()},
            )

        def output_table(embedding: Linear | None) -> Linear:
            if not shape.tie_word_embeddings:
                return table("lm_head")
            return embedding or table("model.embed_tokens")

        embedding = table("model.embed_tokens") if place.stage == 0 else None
        weights = DecoderWeights(
            embedding=embedding,
            layers=[layer(index) for index in shard.layers],
            norm=norm("model.norm") if place.is_last_stage else None,
            lm_head=output_table(embedding) if place.is_last_stage else None,
        )
    _return_freed_memory()
    return weights


def _on(device: torch.device, weight: torch.Tensor | GroupedWeight) -> torch.Tensor | GroupedWeight:
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    return weight._replace(
        values=weight.values.to(device),
        scales=weight.scales.to(device),
        zeros=None if weight.zeros is None else weight.zeros.to(device),
        permutation=None if weight.permutation is None else weight.permutation.to(device),
    )


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc would keep that of unpacked matrices, a quarter of the weights' size."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # Other C libraries have none.
        malloc_trim(0)


def held_bytes(shape: ModelShape, dtype: str, quantization: str) -> int:
    """Bytes that packed weights take in this process.

    Raises:
        ValueError: an unknown quantization, or one that needs a compiler where there is none.
    """
    if load_library() is not None:
        return weight_bytes(shape, dtype, quantization).total
    if quantization not in ("auto", "none"):
        raise ValueError(f"{quantization} weights need compiled kernels: install g++, or set model.quantization none")
    return shape.num_parameters * matrix_dtype(getattr(torch, dtype)).itemsize
