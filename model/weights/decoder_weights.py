"""A decoder's weights: read from a checkpoint, and how they are held.

Hands each matrix to the kernels as it is read, and they may hold it in a form of their own: the peak of memory is the
weights and some matrices, of which the weights alone stay. Files are memory-mapped, so that only the tensor being read
takes memory; `pdserve.model.weights.files` has checked them before. Called by `pdserve.model.decoder.decoder`; computes
nothing.

Shape suffixes: V vocabulary, E hidden size, I intermediate size, N query heads, H KV heads, M = N + 2 H, D head dim.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from pdserve.kernels.cpu.build import load_library
from pdserve.kernels.operations import DecoderKernels, Linear, QkNorm
from pdserve.kernels.torch.dense import matrix_dtype
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.bytes import weight_bytes
from pdserve.model.weights.files import check_weights, norm_names, shard_paths


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Projections of the same input are one; norms are ``[E]``."""

    attention_norm: torch.Tensor
    qkv: Linear
    """``[M * D, E]``: queries, keys, values."""
    qk_norm: QkNorm | None
    output: Linear
    """``[E, N * D]``."""
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    """``[2 * I, E]``: gate, then up."""
    down: Linear
    """``[E, I]``."""
    mlp_post_norm: torch.Tensor | None


class DecoderWeights(NamedTuple):
    """All weights of a decoder."""

    embedding: Linear
    """``[V, E]``."""
    layers: list[LayerWeights]
    norm: torch.Tensor
    lm_head: Linear
    """``[V, E]``; the embedding itself where they are tied."""


def load_decoder_weights(
    folder: Path, config: DecoderConfig, dtype: torch.dtype, kernels: DecoderKernels, quantization: str = "none"
) -> DecoderWeights:
    """Read the checkpoint in ``folder``, rounded to ``dtype``, into the form that ``kernels`` hold.

    The matrices of the layers are quantised, the tables are not: `pdserve.model.weights.bytes` says why.

    Raises:
        ValueError: the weights are unusable or do not match ``config``.
    """
    shape = config.shape
    check_weights(folder, shape)
    with Checkpoint(folder, dtype) as checkpoint:
        loader = _Loader(checkpoint, config, kernels, kernels.activation_dtype or dtype, quantization)
        embedding = loader.table("model.embed_tokens")
        weights = DecoderWeights(
            embedding=embedding,
            layers=[loader.layer(index) for index in range(shape.num_layers)],
            norm=loader.norm("model.norm"),
            lm_head=embedding if shape.tie_word_embeddings else loader.table("lm_head"),
        )
    _return_freed_memory()
    return weights


def _return_freed_memory() -> None:
    """To the system. glibc keeps what matrices on their way to a kernel's form took, a quarter of the weights' size."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # Other C libraries have none.
        malloc_trim(0)


class _Loader:
    """Reads parts of a checkpoint by the names that transformers gives them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        kernels: DecoderKernels,
        norm_dtype: torch.dtype,
        quantization: str,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._kernels = kernels
        self._norm_dtype = norm_dtype
        self._quantization = quantization

    def layer(self, index: int) -> LayerWeights:
        shape, prefix = self._config.shape, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        names = norm_names(shape)
        return LayerWeights(
            attention_norm=self.norm(prefix + names.attention),
            qkv=self._linear(*(f"{attention}{part}_proj" for part in "qkv"), has_bias=shape.qkv_bias),
            qk_norm=self._qk_norm(attention) if shape.qk_norm else None,
            output=self._linear(f"{attention}o_proj", has_bias=shape.output_bias),
            attention_post_norm=self.norm(prefix + names.attention_post) if names.attention_post else None,
            mlp_norm=self.norm(prefix + names.mlp),
            gate_up=self._linear(f"{mlp}gate_proj", f"{mlp}up_proj", has_bias=shape.mlp_bias),
            down=self._linear(f"{mlp}down_proj", has_bias=shape.mlp_bias),
            mlp_post_norm=self.norm(prefix + names.mlp_post) if names.mlp_post else None,
        )

    def table(self, name: str) -> Linear:
        """The embedding, or the output projection."""
        return self._kernels.pack_linear(self._read(f"{name}.weight"))

    def _linear(self, *names: str, has_bias: bool = False) -> Linear:
        """Projections of one input, as one."""
        bias = self._read(*(f"{name}.bias" for name in names)) if has_bias else None
        weight = self._read(*(f"{name}.weight" for name in names))
        return self._kernels.pack_linear(weight, bias, self._quantization)

    def norm(self, name: str) -> torch.Tensor:
        weight = self._read(f"{name}.weight").float()
        return (weight + 1 if self._config.unit_offset_norms else weight).to(self._norm_dtype)

    def _read(self, *names: str) -> torch.Tensor:
        return self._checkpoint.read(*names).to(self._kernels.device)

    def _qk_norm(self, attention: str) -> QkNorm:
        return QkNorm(self.norm(f"{attention}q_norm"), self.norm(f"{attention}k_norm"), self._config.rms_norm_eps)


def held_bytes(shape: ModelShape, dtype: str, quantization: str) -> int:
    """Bytes that the weights take in this process.

    Raises:
        ValueError: there is no such quantization, or not without a compiler.
    """
    if load_library() is not None:
        return weight_bytes(shape, dtype, quantization).total
    return shape.num_parameters * matrix_dtype(getattr(torch, dtype), quantization).itemsize


class Checkpoint:
    """The tensors of the checkpoint in a folder, readable while this context manager is entered."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Open model.safetensors, or the shards that their index names.

        Args:
            dtype: what is read is rounded to this.

        Raises:
            ValueError: no safetensors, or a missing or damaged file.
        """
        self._dtype = dtype
        with ExitStack() as stack:
            shards = [stack.enter_context(_open(path)) for path in shard_paths(folder)]
            self._shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118
            self._open_shards = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_shards.close()

    def read(self, *names: str) -> torch.Tensor:
        """The tensors of these names, one below the other along their first dimension, in memory of their own."""
        parts = [self._shard_of[name].get_tensor(name) for name in names]
        whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=self._dtype)
        return torch.cat(parts, out=whole)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}); download it again") from error
