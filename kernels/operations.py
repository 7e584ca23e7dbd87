"""What a decoder computes with: the signatures that every implementation of the kernels has.

The model is written against these; `pdserve.kernels.selection` chooses who implements them. Nothing here computes.

Shape suffixes: T new tokens, N query heads, H KV heads, M = N + 2 H, D head dim, C = D / 2, E input features, F output
features, I = F / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
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
    """How a layer attends."""

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
    """Of everything between the operations; ``None`` is the model's own dtype."""
    pack_linear: PackLinear
    rms_normalise: RmsNormalise
    gate: Gate
    rope_and_write_kv: RopeAndWriteKv
    paged_attention: PagedAttention
    is_capturable: bool = False
    """What is launched follows from shapes and from `AttentionMetadata`'s numbers of new tokens alone, and waits for
    nothing: a step can be captured in a CUDA graph."""
    device: torch.device = torch.device("cpu")
    """Where weights and activations lie, and what is told of a batch."""
    mlp_rows: int | None = None
    """Tokens that the MLP takes at a time, for what lies between its products is by far the largest; ``None``: all."""


class Kept(NamedTuple):
    """The tokens of a row of logits that may be drawn."""

    lowest: float
    """Those of a higher logit than this,"""
    last_equal: int
    """and those of just this one up to this id."""


ALL_KEPT = Kept(-inf, 2**31 - 1)


class Draw(NamedTuple):
    """One token to be drawn from a row of logits."""

    row: int
    seed: int
    """64 bits."""
    position: int
    """Absolute position of the token in its sequence."""
    choice: int
    best: float
    """The row's highest logit."""
    temperature: float
    """Over 0."""
    kept: Kept


class DrawTokens(Protocol):
    def __call__(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """A token id for each draw, as `pdserve.kernels.torch_gumbel` defines it.

        Args:
            logits_BV: float32; a draw's row has a finite highest logit.
        """
        ...


class Nucleus(NamedTuple):
    """The smallest set of the most likely tokens of a row with a share of its probability."""

    row: int
    top_p: float
    """The share, in (0, 1)."""
    best: float
    """The row's highest logit."""
    temperature: float
    """Over 0."""
    lowest: float
    """Logits below it are left out beforehand: they have no probability."""


class FindNuclei(Protocol):
    def __call__(self, logits_BV: torch.Tensor, nuclei: Sequence[Nucleus]) -> list[Kept]:
        """What each nucleus keeps: a prefix of its tokens in order of (logit descending, id ascending).

        Args:
            logits_BV: float32; a nucleus' row has a finite highest logit.
        """
        ...


class SamplingKernels(NamedTuple):
    """One implementation of both."""

    draw_tokens: DrawTokens
    find_nuclei: FindNuclei


class DrawTensors(NamedTuple):
    """Draws as the device knows them, field by field as `Draw`: ``[D]`` each, on the device of the logits."""

    row: torch.Tensor
    """int32, and so are ``position``, ``choice`` and ``last_equal``."""
    seed: torch.Tensor
    """int64, the bits of the seed."""
    position: torch.Tensor
    choice: torch.Tensor
    best: torch.Tensor
    """float32, and so are ``temperature`` and ``lowest``."""
    temperature: torch.Tensor
    lowest: torch.Tensor
    last_equal: torch.Tensor


class NucleusTensors(NamedTuple):
    """Nuclei as the device knows them, field by field as `Nucleus`: ``[R]`` each, on the device of the logits."""

    row: torch.Tensor
    """int32."""
    top_p: torch.Tensor
    """float64."""
    best: torch.Tensor
    """float32, and so are ``temperature`` and ``lowest``."""
    temperature: torch.Tensor
    lowest: torch.Tensor


class KeptTensors(NamedTuple):
    """What truncation leaves, field by field as `Kept`."""

    lowest: torch.Tensor
    """float32."""
    last_equal: torch.Tensor
    """int32."""


class DrawOnDevice(Protocol):
    def __call__(self, logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
        """What `DrawTokens` returns, as integers ``[D]`` on the device: the host waits for nothing.

        Nothing is checked: rows are in range, and where the best logit is not finite any token may come.
        """
        ...


class FindNucleiOnDevice(Protocol):
    def __call__(self, logits_BV: torch.Tensor, nuclei: NucleusTensors) -> KeptTensors:
        """What `FindNuclei` returns, on the device: the host waits for nothing, and nothing is checked."""
        ...


class DeviceSamplingKernels(NamedTuple):
    """One implementation of both."""

    draw: DrawOnDevice
    find_nuclei: FindNucleiOnDevice
