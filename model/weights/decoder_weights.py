"""A decoder's weights: read from a checkpoint and packed for the kernels.

Each matrix goes to the kernels as it is read, and they may keep a packed copy: loading peaks at the size of the weights
plus a few matrices. Files are memory-mapped, so that only the tensor being read takes memory;
`pdserve.model.weights.files` has checked them. Called by `pdserve.model.decoder.decoder`; computes nothing.

Shape suffixes: V vocabulary, E hidden size, I intermediate size, A experts, N query heads, H KV heads, M = N + 2 H, D
head dim. V, I, N and H count in the rank's share.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from pdserve.contracts.precision import Precision
from pdserve.kernels.cpu.build import load_library
from pdserve.kernels.cpu.dense import multiplies_bfloat16
from pdserve.kernels.cpu.shared_weights import Packing, packed_form, present_bytes, shared_weights
from pdserve.kernels.operations import DecoderKernels, Experts, Linear, QkNorm
from pdserve.kernels.torch.dense import matrix_dtype
from pdserve.kernels.weight_quantisation import GroupedWeight, quantise
from pdserve.model.config import sharding
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.config.sharding import Place, shard_of
from pdserve.model.weights import files, stored
from pdserve.model.weights.bytes import weight_bytes
from pdserve.model.weights.files import check_weights, norm_names, shard_paths
from pdserve.model.weights.stored import Checkpoint, read_matrices, read_stacked

_MAX_PARAMETER_BYTES, _MAX_PADDING_BYTES = 8, 2**26
"""Upper limits of what packed weights take: of float32, with outputs padded to whole panels; more for matrices of few
outputs."""


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
    sinks: torch.Tensor | None
    """float32 ``[N]``, as in `pdserve.kernels.operations.AttentionRule`."""
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
    check_weights(folder, config.shape)
    packing: AbstractContextManager[Packing] = nullcontext(Packing())
    if kernels.are_weights_shared:
        key = _copy_key(folder, config.shape, precision, place)
        packing = shared_weights(key, _MAX_PARAMETER_BYTES * config.shape.num_parameters + _MAX_PADDING_BYTES)
    with Checkpoint(folder, getattr(torch, precision.dtype)) as checkpoint, packing as pack:
        weights = _Loader(checkpoint, config, precision, kernels, place, pack).weights()
    _return_freed_memory()
    return weights


def _copy_key(folder: Path, shape: ModelShape, precision: Precision, place: Place) -> str:
    """Key of a rank's packed weights: equal only for the same files, unchanged since, and for the same packing."""
    statuses = [path.stat() for path in shard_paths(folder)]
    shards = [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in statuses]
    model = repr((shards, shape, replace(precision, kv_dtype="auto"), place))
    digest = blake2b(f"{model} {packed_form(os.sched_getaffinity(0))} ".encode(), digest_size=16)
    for file in (__file__, stored.__file__, files.__file__, sharding.__file__):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


class _Loader:
    """One rank's share of an open checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        precision: Precision,
        kernels: DecoderKernels,
        place: Place,
        pack: Packing,
    ) -> None:
        self._checkpoint = checkpoint
        self._pack = pack
        self._config, self._shape = config, config.shape
        self._quantization, self._dtype = precision.quantization, getattr(torch, precision.dtype)
        self._kernels = kernels
        is_pinned = kernels.activation_dtype is torch.float32 and precision.cpu_products == "float32"
        self._product_dtype = torch.float32 if is_pinned else self._dtype
        self._place = place
        self._shard = shard_of(config.shape, place)

    def weights(self) -> DecoderWeights:
        place = self._place
        embedding = self._table("model.embed_tokens") if place.stage == 0 else None
        return DecoderWeights(
            embedding=embedding,
            layers=[self._layer(index) for index in self._shard.layers],
            norm=self._norm("model.norm") if place.is_last_stage else None,
            lm_head=self._output_table(embedding) if place.is_last_stage else None,
        )

    def _table(self, name: str) -> Linear:
        rows, dtype = [self._shard.vocabulary], self._product_dtype
        return self._pack(lambda: self._kernels.pack_linear(self._read(f"{name}.weight", rows=rows), dtype=dtype))

    def _output_table(self, embedding: Linear | None) -> Linear:
        if not self._shape.tie_word_embeddings:
            return self._table("lm_head")
        return embedding or self._table("model.embed_tokens")

    def _layer(self, index: int) -> LayerWeights:
        shape, shard = self._shape, self._shard
        heads, kv_heads = (_scaled(part, shape.head_dim) for part in (shard.heads, shard.kv_heads))
        prefix, qk_norm = f"model.layers.{index}.", None
        attention = f"{prefix}self_attn."
        if shape.qk_norm:
            norms = self._norm(f"{attention}q_norm"), self._norm(f"{attention}k_norm")
            qk_norm = QkNorm(*norms, self._config.rms_norm_eps)
        return LayerWeights(
            qkv=self._joined(attention, {"q": heads, "k": kv_heads, "v": kv_heads}, shape.qkv_bias),
            qk_norm=qk_norm,
            sinks=self._read(f"{attention}sinks", rows=[shard.heads]).float() if shape.sinks else None,
            output=self._summed(f"{attention}o", heads, shape.output_bias),
            mlp=self._mlp(index),
            **{field: self._norm(prefix + name) for field, name in norm_names(shape).items()},
        )

    def _mlp(self, index: int) -> DenseMlp | ExpertMlp:
        prefix, shape, shard = f"model.layers.{index}.mlp.", self._shape, self._shard
        if not shape.num_experts:
            return self._dense_mlp(prefix, shard.features)
        if index in shape.dense_layers:
            return self._dense_mlp(prefix, shard.dense_features)
        return self._expert_mlp(prefix)

    def _dense_mlp(self, prefix: str, features: range) -> DenseMlp:
        return DenseMlp(
            self._joined(prefix, {"gate": features, "up": features}, self._shape.mlp_bias),
            self._summed(f"{prefix}down", features, self._shape.mlp_bias),
        )

    def _expert_mlp(self, prefix: str) -> ExpertMlp:
        if self._shape.stacked_experts:
            return self._stacked_mlp(prefix)
        features = self._shard.features
        each = [f"{prefix}experts.{expert}." for expert in self._shard.experts]
        shared = shared_gate = None
        if self._shape.shared_intermediate_size:
            shared = self._dense_mlp(f"{prefix}shared_expert.", self._shard.shared_features)
            shared_gate = self._unquantised(f"{prefix}shared_expert_gate")
        return ExpertMlp(
            router=self._unquantised(f"{prefix}gate"),
            gate_up=self._experts(self._outputs(expert, {"gate": features, "up": features}) for expert in each),
            down=self._experts(self._inputs(f"{expert}down", features) for expert in each),
            shared=shared,
            shared_gate=shared_gate,
        )

    def _stacked_mlp(self, prefix: str) -> ExpertMlp:
        """Experts that are stacked. Where ranks share features, the first adds the bias of ``down``."""
        features, experts = self._shard.features, self._shard.experts
        hidden, both = range(self._shape.hidden_size), _scaled(features, 2)
        gate_up, down = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
        gate_up_bias_XF, down_bias_XE = (
            self._checkpoint.stored(f"{name}_bias", experts, outputs).to(self._kernels.device, self._dtype)
            for name, outputs in ((gate_up, both), (down, hidden))
        )
        gate_up_bias_XF = _halves(gate_up_bias_XF.T).T.contiguous()
        if not self._place.expert_parallel and self._place.tensor_rank > 0:
            down_bias_XE = torch.zeros_like(down_bias_XE)
        return ExpertMlp(
            router=self._unquantised(f"{prefix}router", has_bias=True),
            gate_up=self._experts((self._stacked(gate_up, each, both, hidden) for each in experts), gate_up_bias_XF),
            down=self._experts((self._stacked(down, each, hidden, features) for each in experts), down_bias_XE),
            shared=None,
            shared_gate=None,
        )

    def _experts(
        self, weights: Iterator[torch.Tensor | GroupedWeight], biases_XF: torch.Tensor | None = None
    ) -> Experts:
        """Pack a matrix of each expert; ``weights`` reads them."""
        return self._pack(lambda: self._kernels.pack_experts(weights, biases_XF, dtype=self._product_dtype))

    def _stacked(self, name: str, expert: int, outputs: range, inputs: range) -> torch.Tensor | GroupedWeight:
        """Some outputs and inputs of one of a stack of matrices; of gates and ups, which are stored in turns, all gates
        first."""
        are_in_turns, scheme = name.endswith("gate_up_proj"), self._shape.scheme
        if scheme is not None:
            weight = read_stacked(self._checkpoint, name, scheme, expert, outputs, inputs)
            if are_in_turns:
                weight = weight._replace(values=_halves(weight.values), scales=_halves(weight.scales))
            return _on(self._kernels.device, weight)
        all_inputs = range(self._shape.hidden_size if are_in_turns else self._shape.intermediate_size)
        weight_EF = self._checkpoint.stored(name, range(expert, expert + 1), all_inputs, outputs)[0]
        weight_FE = _halves(weight_EF.T) if are_in_turns else weight_EF.T
        return self._rounded(weight_FE.to(self._kernels.device, self._dtype), inputs)

    def _unquantised(self, name: str, *, has_bias: bool = False) -> Linear:
        def pack() -> Linear:
            weight, bias = self._read(f"{name}.weight"), self._read(f"{name}.bias") if has_bias else None
            # Products of 16-bit activations would be rounded.
            if self._kernels.activation_dtype is not torch.float32:
                weight, bias = weight.float(), None if bias is None else bias.float()
            return self._kernels.pack_linear(weight, bias)

        return self._pack(pack)

    def _joined(self, prefix: str, outputs: dict[str, range], has_bias: bool) -> Linear:
        """Pack the rank's outputs of projections of the same input as one."""
        names, rows = [f"{prefix}{name}_proj.bias" for name in outputs], [*outputs.values()]
        bias = self._read(*names, rows=rows) if has_bias else None
        return self._pack(
            lambda: self._kernels.pack_linear(self._outputs(prefix, outputs), bias, dtype=self._product_dtype)
        )

    def _summed(self, name: str, inputs: range, has_bias: bool) -> Linear:
        """Pack a projection of the rank's inputs, whose product is added to those of the other ranks."""
        bias = self._read(f"{name}_proj.bias") if has_bias and self._place.tensor_rank == 0 else None
        return self._pack(
            lambda: self._kernels.pack_linear(self._inputs(name, inputs), bias, dtype=self._product_dtype)
        )

    def _outputs(self, prefix: str, outputs: dict[str, range]) -> torch.Tensor | GroupedWeight:
        """Some outputs of projections of the same input."""
        names = [f"{prefix}{name}_proj" for name in outputs]
        return self._matrix(names, [*outputs.values()], range(self._shape.hidden_size))

    def _inputs(self, name: str, inputs: range) -> torch.Tensor | GroupedWeight:
        """Some inputs of a projection."""
        return self._matrix([f"{name}_proj"], [range(self._shape.hidden_size)], inputs)

    def _matrix(self, names: Sequence[str], rows: Sequence[range], inputs: range) -> torch.Tensor | GroupedWeight:
        """The outputs ``rows`` of matrices of the same input, as one, and of them the rank's ``inputs``.

        A setting quantises all inputs first, so that ranks have the values and scales of one that has them all.
        """
        scheme = self._shape.scheme
        if scheme is not None and any(map(scheme.quantises, names)):
            return _on(self._kernels.device, read_matrices(self._checkpoint, names, scheme, rows, inputs))
        weight_FE = self._read(*(f"{name}.weight" for name in names), rows=rows)
        return self._rounded(weight_FE, inputs)

    def _rounded(self, weight_FE: torch.Tensor, inputs: range) -> torch.Tensor | GroupedWeight:
        """Some inputs of a weight, quantised if the setting says so."""
        if self._quantization in ("int8", "int4"):
            return quantise(weight_FE, self._quantization).inputs(inputs)
        return weight_FE[:, inputs.start : inputs.stop].contiguous()

    def _norm(self, name: str) -> torch.Tensor:
        weight = self._read(f"{name}.weight").float()
        if self._config.unit_offset_norms:
            weight += 1
        return weight.to(self._kernels.activation_dtype or self._dtype)

    def _read(self, *names: str, rows: Sequence[range] = ()) -> torch.Tensor:
        return self._checkpoint.read(*names, rows=rows).to(self._kernels.device)


def _on(device: torch.device, weight: torch.Tensor | GroupedWeight) -> torch.Tensor | GroupedWeight:
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    return weight._replace(
        values=weight.values.to(device),
        scales=weight.scales.to(device),
        zeros=None if weight.zeros is None else weight.zeros.to(device),
        permutation=None if weight.permutation is None else weight.permutation.to(device),
    )


def _halves(in_turns: torch.Tensor) -> torch.Tensor:
    """Every other row, and then the rows between them."""
    return torch.cat((in_turns[::2], in_turns[1::2]))


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc would keep that of unpacked matrices, a quarter of the weights' size."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # Other C libraries have none.
        malloc_trim(0)


def products_of(precision: Precision) -> str:
    """Dtype in which a CPU multiplies activations and weights of this precision."""
    if load_library() is None:
        return str(matrix_dtype(getattr(torch, precision.dtype))).removeprefix("torch.")
    in_bfloat16 = precision.dtype == "bfloat16" and precision.cpu_products == "auto" and multiplies_bfloat16()
    return "bfloat16" if in_bfloat16 else "float32"


def missing_bytes(folder: Path, shape: ModelShape, precision: Precision, places: Iterable[Place]) -> int:
    """`held_bytes` of a worker of these ranks, less what other workers of this host have already packed for it.

    Raises:
        ValueError: as there.
    """
    num_bytes = held_bytes(shape, precision.dtype, precision.quantization)
    if load_library() is None:
        return num_bytes
    present = sum(present_bytes(_copy_key(folder, shape, precision, place)) for place in places)
    return max(0, num_bytes - present)


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
