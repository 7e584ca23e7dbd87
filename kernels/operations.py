"""Signatures of the operations that a decoder and sampling compute with; every implementation of the kernels has them.

`pdserve.kernels.selection` chooses the implementation. Nothing here computes.

Shape suffixes: T new tokens, N query heads, H KV heads, M = N + 2 H, D head dim, C = D / 2, E input features, F output
features, I = F / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata


class Linear(Protocol):
    """A weight matrix as one implementation holds it: packed, perhaps quantised."""

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        ...

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        """``x W^T + b``: ``[T, F]`` of the dtype of ``x_TE``.

        Args:
            add_to_TF: the product is added to it, in place, and it is returned.
        """
        ...

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: ``[T, E]`` of the kernels' activation dtype. With tied embeddings the output projection
        is the embedding table."""
        ...


class PackLinear(Protocol):
    def __call__(
        self, weight_FE: torch.Tensor, bias_F: torch.Tensor | None = None, quantization: str = "none"
    ) -> Linear:
        """Take over a weight of the checkpoint, in the model's dtype, and a bias.

        Args:
            quantization: ``none``, ``int8``: symmetric, one scale per output, or ``int4``: the same, with one scale
                per output and group of 128 inputs, of which the last may have fewer.
        """
        ...


class RmsNormalise(Protocol):
    def __call__(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * weight`` along the last axis, of the dtype of ``x_TE``; computed in float32."""
        ...


class Gate(Protocol):
    def __call__(self, gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
        """``activation(gate) * up``, ``[T, I]``: the first half of the features is the gate.

        Args:
            activation: ``silu``, or ``gelu_tanh``.
        """
        ...


class QkNorm(NamedTuple):
    """RMS norms of every query head and every key head before they are rotated (Qwen3, Gemma 3)."""

    q_weight: torch.Tensor
    """``[D]``."""
    k_weight: torch.Tensor
    """``[D]``."""
    eps: float


class RopeAndWriteKv(Protocol):
    def __call__(
        self,
        qkv_TMD: torch.Tensor,
        cos_TC: torch.Tensor,
        sin_TC: torch.Tensor,
        kv_pool: KvPool,
        layer: int,
        metadata: AttentionMetadata,
        qk_norm: QkNorm | None = None,
    ) -> None:
        """Normalise, rotate and scatter, in place.

        Args:
            qkv_TMD: contiguous: queries, keys, values. Its queries and keys are rotated where they are (halves paired,
                as in checkpoints of Hugging Face); keys and values are then copied to the new tokens' slots, rounded
                to the pool's dtype.
            cos_TC: float32, and so is ``sin_TC``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Scale, window and softcap of a layer's attention."""

    scale: float
    """Scores are ``scale * q . k``."""
    window: int = 0
    """A token sees itself and the ``window - 1`` tokens before it; 0 sees all before it."""
    softcap: float = 0.0
    """Scores become ``softcap * tanh(score / softcap)`` (Gemma 2); 0 leaves them."""


class PagedAttention(Protocol):
    def __call__(
        self, q_TND: torch.Tensor, kv_pool: KvPool, layer: int, metadata: AttentionMetadata, rule: AttentionRule
    ) -> torch.Tensor:
        """Causal attention of every new token over its row's KV: ``[T, N, D]``, contiguous, of the dtype of ``q_TND``.

        Args:
            q_TND: rotated, contiguous but for the stride of its tokens.
            kv_pool: already holds the new tokens' KV.
        """
        ...


class DecoderKernels(NamedTuple):
    """One implementation of all operations."""

    name: str
    activation_dtype: torch.dtype | None
    """Dtype between the operations; ``None`` is the model's own."""
    pack_linear: PackLinear
    rms_normalise: RmsNormalise
    gate: Gate
    rope_and_write_kv: RopeAndWriteKv
    paged_attention: PagedAttention
    is_capturable: bool = False
    """Launches follow from shapes and from `AttentionMetadata`'s numbers of new tokens alone, and waits for
    nothing: a step can be captured in a CUDA graph."""
    device: torch.device = torch.device("cpu")
    """Where weights and activations lie, and what is told of a batch."""
    mlp_rows: int | None = None
    """Tokens that the MLP takes at a time, for what lies between its products is by far the largest; ``None``: all."""


LAST_ID = 2**31 - 1
"""At least every token id: `Thresholds.last_equal` where no token is cut off by its id."""


class Thresholds(NamedTuple):
    """The tokens of some rows of logits that may be drawn, ``[R]`` each, on the device of the logits."""

    lowest: torch.Tensor
    """float32: tokens of a higher logit,"""
    last_equal: torch.Tensor
    """int32: and tokens of exactly this logit up to this id."""


class DrawTensors(NamedTuple):
    """Tokens to draw, ``[D]`` each, on the device of the logits."""

    row: torch.Tensor
    """int32, and so are ``position``, ``choice`` and ``last_equal``."""
    seed: torch.Tensor
    """int64: the bits of the seed."""
    position: torch.Tensor
    """Absolute position of the token in its sequence."""
    choice: torch.Tensor
    best: torch.Tensor
    """float32, and so are ``temperature`` and ``lowest``: the row's highest logit."""
    temperature: torch.Tensor
    """Over 0."""
    lowest: torch.Tensor
    """See `Thresholds`, and so is ``last_equal``."""
    last_equal: torch.Tensor


class DrawTokens(Protocol):
    def __call__(self, logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
        """A token id for each draw, as `pdserve.kernels.torch.sampling` defines it: integers ``[D]`` on the device.

        The host does not wait. Rows are not checked, and where the best logit is not finite the token is any number.

        Args:
            logits_BV: float32, contiguous rows.
        """
        ...


class TopPTensors(NamedTuple):
    """Rows to apply top-p to, ``[R]`` each, on the device of the logits."""

    row: torch.Tensor
    """int32."""
    top_p: torch.Tensor
    """float64: share of the probability, in (0, 1)."""
    best: torch.Tensor
    """float32, and so are ``temperature`` and ``lowest``: the row's highest logit."""
    temperature: torch.Tensor
    """Over 0."""
    lowest: torch.Tensor
    """Logits below it have no probability."""


class FindTopP(Protocol):
    def __call__(self, logits_BV: torch.Tensor, rows: TopPTensors) -> Thresholds:
        """The smallest prefix of each row's tokens, in order of (logit descending, id ascending), with the share.

        The host does not wait, and nothing is checked, as in `DrawTokens`.
        """
        ...


class SamplingKernels(NamedTuple):
    """One implementation of sampling."""

    draw_tokens: DrawTokens
    find_top_p: FindTopP
