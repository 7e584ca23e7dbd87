"""Signatures of the decoder's and the sampler's operations, shared by every kernel implementation.

`pdserve.kernels.selection` chooses the implementation. Computes nothing.

Shape suffixes: T new tokens, N query heads, H KV heads, M = N + 2 H, D head dim, C = D / 2, E input features, F output
features, I = F / 2, X experts of a rank, Y = X + 1, K experts of a token, P = T K pairs of a token and an expert of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.weight_quantisation import GroupedWeight


class Linear(Protocol):
    """A weight matrix in one implementation's format: packed, possibly quantised."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, in bytes."""
        ...

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``x W^T + b``: ``[T, F]`` in the dtype of ``x_TE``.

        Args:
            add_to_TF: receives the product in place and is returned.
        """
        ...

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Look up rows of the weight: ``[T, E]`` in the kernels' activation dtype. With tied embeddings the output
        projection is also the embedding table."""
        ...


class PackLinear(Protocol):
    def __call__(
        self,
        weight_FE: torch.Tensor | GroupedWeight,
        bias_F: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Linear:
        """Pack a weight and its bias.

        Args:
            dtype: the model's, in which a quantised weight is multiplied unless the kernels have an activation dtype. A
                tensor has its own. Kernels whose activation dtype is float32 may round activations to bfloat16, and
                sum in float32, where this and a tensor are bfloat16.
        """
        ...


class Experts(Protocol):
    """One matrix of each of a layer's experts in one implementation's format: ``[X][F, E]``."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, in bytes."""
        ...

    def __call__(self, x_PE: torch.Tensor, starts_Y: torch.Tensor) -> torch.Tensor:
        """Multiply rows ``starts_Y[x]`` to ``starts_Y[x + 1]`` by the matrix of expert x: ``[P, F]`` in the dtype of
        ``x_PE``.

        A row's product depends on no other row. On a GPU the host does not wait if the kernels are capturable.

        Args:
            x_PE: contiguous.
            starts_Y: int64, on the device of ``x_PE``, ascending from 0. Rows from the last one on are of no expert
                here, and their products arbitrary.
        """
        ...


class PackExperts(Protocol):
    def __call__(
        self,
        weights: Iterable[torch.Tensor | GroupedWeight],
        biases_XF: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Experts:
        """Pack a weight of each expert, of equal shape and form, in their order, each before the next one is taken.

        Args:
            dtype: as in `PackLinear`.
        """
        ...


class SortedPairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert and then by token. Those of other ranks' experts come
    last."""

    tokens: torch.Tensor
    """int64 ``[P]``: of each pair."""
    starts: torch.Tensor
    """``[Y]``, as in `Experts`."""
    places: torch.Tensor
    """int64 ``[T, K]``: position of each token's pairs; -1 if the expert is of another rank."""


class SortPairs(Protocol):
    def __call__(self, experts_TK: torch.Tensor, here: range) -> SortedPairs:
        """Sort pairs by expert.

        Args:
            experts_TK: int64: experts of each token.
            here: experts of this rank.
        """
        ...


class Combine(Protocol):
    def __call__(self, y_PE: torch.Tensor, places_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Sum each token's weighted rows of ``y_PE``: contiguous ``[T, E]`` in its dtype; 0 for a token without any.

        Summed in float32 in the order of the token's experts, whatever the batch.

        Args:
            places_TK: as in `SortedPairs`.
            weights_TK: float32.
        """
        ...


class RmsNormalise(Protocol):
    def __call__(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute ``x / rms(x) * weight`` along the last axis in float32; returns the dtype of ``x_TE``."""
        ...


class Gate(Protocol):
    def __call__(self, gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
        """Compute ``activation(gate) * up``: ``[T, I]``. The first half of the features is the gate.

        Args:
            activation: ``silu``; ``gelu_tanh``; or ``swiglu_oai``: ``g * sigmoid(1.702 g) * (u + 1)`` with the gate g
                limited to 7, and u to -7 and 7 (OpenAI 2025, gpt-oss).
        """
        ...


class QkNorm(NamedTuple):
    """RMS norms of every query and key head before rotation (Qwen3, Gemma 3)."""

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
        """Normalise and rotate queries and keys in place, and write keys and values to the pool.

        Args:
            qkv_TMD: contiguous: queries, keys, values. Queries and keys are rotated in place (halves paired, as in
                Hugging Face checkpoints); keys and values are then copied to the new tokens' slots, rounded to the
                pool's dtype.
            cos_TC: float32, and so is ``sin_TC``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Attention parameters of a layer."""

    scale: float
    """Scores are ``scale * q . k``."""
    window: int = 0
    """A token attends to itself and the ``window - 1`` tokens before it; 0 means no limit."""
    softcap: float = 0.0
    """Scores become ``softcap * tanh(score / softcap)`` (Gemma 2); 0 disables it."""
    sinks: torch.Tensor | None = None
    """float32 ``[N]``, on the device: one more score of each query head, of no key and without a value (Xiao et al.
    2024, StreamingLLM; OpenAI 2025, gpt-oss). None: no such scores."""
    in_bfloat16: bool = False
    """Kernels whose activation dtype is float32 may round queries and the weights of keys to bfloat16, and sum in
    float32, where the pool is of bfloat16."""


class PagedAttention(Protocol):
    def __call__(
        self, q_TND: torch.Tensor, kv_pool: KvPool, layer: int, metadata: AttentionMetadata, rule: AttentionRule
    ) -> torch.Tensor:
        """Attend causally from every new token over its row's KV: contiguous ``[T, N, D]`` in the dtype of ``q_TND``.

        Args:
            q_TND: rotated; contiguous except for the token stride.
            kv_pool: already holds the new tokens' KV.
        """
        ...


class DecoderKernels(NamedTuple):
    """One implementation of all operations."""

    name: str
    activation_dtype: torch.dtype | None
    """Dtype between the operations; ``None`` is the model's own."""
    pack_linear: PackLinear
    pack_experts: PackExperts
    sort_pairs: SortPairs
    combine: Combine
    rms_normalise: RmsNormalise
    gate: Gate
    rope_and_write_kv: RopeAndWriteKv
    paged_attention: PagedAttention
    is_capturable: bool = False
    """Launches depend only on shapes and on the new token counts of `AttentionMetadata`, and never wait: a CUDA graph
    can capture a step."""
    device: torch.device = torch.device("cpu")
    """Device of weights, activations and `AttentionMetadata`."""
    are_weights_shared: bool = False
    """Packed weights are as `pdserve.kernels.cpu.shared_weights` shares them among processes."""
    mlp_rows: int | None = None
    """Tokens per MLP call, which bounds the intermediate activations, by far the largest; ``None``: all."""


SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Constants of the gate ``swiglu_oai``."""
LAST_ID = 2**31 - 1
"""At least every token id: `Thresholds.last_equal` if no token is excluded by its id."""


class Thresholds(NamedTuple):
    """Bounds on the tokens that may be drawn from each row of logits: ``[R]`` each, on the device of the logits.

    A token may be drawn if its logit is over ``lowest``, or equals it and its id is at most ``last_equal``.
    """

    lowest: torch.Tensor
    """float32."""
    last_equal: torch.Tensor
    """int32."""


class DrawTensors(NamedTuple):
    """Tokens to draw, ``[D]`` each, on the device of the logits."""

    row: torch.Tensor
    """int32, as are ``position``, ``choice`` and ``last_equal``."""
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
    """As in `Thresholds`, like ``last_equal``."""
    last_equal: torch.Tensor


class DrawTokens(Protocol):
    def __call__(self, logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
        """Draw one token id each, as `pdserve.kernels.torch.sampling` defines: integers ``[D]`` on the device.

        The host does not wait. Rows are not checked; if the best logit is not finite, the token is arbitrary.

        Args:
            logits_BV: float32, contiguous rows.
        """
        ...


class TopPTensors(NamedTuple):
    """Rows that need top-p: ``[R]`` each, on the device of the logits."""

    row: torch.Tensor
    """int32."""
    top_p: torch.Tensor
    """float64: share of the probability mass, in (0, 1)."""
    best: torch.Tensor
    """float32, and so are ``temperature`` and ``lowest``: the row's highest logit."""
    temperature: torch.Tensor
    """Over 0."""
    lowest: torch.Tensor
    """Logits below it have probability 0."""


class FindTopP(Protocol):
    def __call__(self, logits_BV: torch.Tensor, rows: TopPTensors) -> Thresholds:
        """Find the shortest prefix of each row's tokens, by (logit descending, id ascending), that reaches ``top_p``.

        As in `DrawTokens`, the host does not wait and nothing is checked.
        """
        ...


class SamplingKernels(NamedTuple):
    """One implementation of sampling."""

    draw_tokens: DrawTokens
    find_top_p: FindTopP
