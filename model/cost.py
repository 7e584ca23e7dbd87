"""Predicts how long a step, or a transfer of KV, takes: a roofline over the model's shape and the machine's figures.

The router's policy, admission, the planner and the emulated executor all ask the same `CostModel`; `OnlineCorrection`
scales it by what is observed. Never imports torch, never measures anything itself.

Per rank, with T new tokens, S sampled rows and the rank's share 1/t of heads and columns:

- linear layers: ``max(2 (T * layer weights + S * output projection) / F, bytes of all those weights / W)``;
- attention, row by row, q new tokens after c cached ones, causal work only:
  ``max(4 * heads * head_dim * layers * (q c + q (q + 1) / 2) / F, (c + q) * KV bytes per token / W)``;
- tensor parallelism: two ring all-reduces of the activations per layer, ``2 (t - 1) / t * bytes / link`` each;
- overhead: a fixed time per step and per layer.

F and W are achievable arithmetic and memory rates (`pdserve.model.hardware`). The traffic of activations is left out,
and so are sliding windows: every layer counts as if it saw the whole context.
Sources: Williams, Waterman, Patterson, "Roofline" (CACM 2009); Shoeybi et al., "Megatron-LM" (2019, section 3) for the
all-reduces; Dao et al., "FlashAttention" (2022) for the count of causal work and the single read of KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.contracts.kv_layout import DTYPE_BYTES, kv_vector_bytes, resolve_kv_dtype
from pdserve.model.hardware import Hardware
from pdserve.model.shape import ModelShape
from pdserve.model.weight_bytes import weight_bytes


class CostModel:
    """Seconds and bytes of one model, in one dtype, on one kind of device.

    Args:
        shape: the whole model.
        hardware: one device; a worker has ``tensor_parallel`` of them.
        dtype: of weights and activations; a key of `DTYPE_BYTES`.
        tensor_parallel: ranks that share the model's heads and columns.
        kv_dtype: ``auto``, which is ``dtype``, or ``int8``.
        quantization: of the weights: ``none`` or ``int8``; arithmetic stays in ``dtype``.

    Raises:
        ValueError: heads that do not divide among the ranks, or a dtype that the hardware has no figure for.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        dtype: str,
        tensor_parallel: int = 1,
        kv_dtype: str = "auto",
        quantization: str = "none",
        pipeline_parallel: int = 1,
    ) -> None:
        _check_divides(shape, tensor_parallel)
        self.shape = shape
        self.hardware = hardware
        self.dtype = dtype
        self.kv_dtype = resolve_kv_dtype(kv_dtype, dtype)
        self.tensor_parallel = tensor_parallel
        flops, bandwidth = hardware.flops(dtype), hardware.bandwidth
        value_bytes = DTYPE_BYTES[dtype]
        weights = weight_bytes(shape, dtype, quantization)
        self.weight_bytes = weights.total
        """Of the whole model, all ranks together."""
        self.kv_bytes_per_token = shape.kv_vectors_per_token * kv_vector_bytes(shape.head_dim, self.kv_dtype)
        """Of the whole model, all ranks together, each KV head counted once."""

        layers_parameters = shape.num_layers * shape.layer_parameters / tensor_parallel
        output_parameters = shape.table_parameters / tensor_parallel
        self._rank_kv_bytes = self.kv_bytes_per_token / min(tensor_parallel, shape.num_kv_heads)
        self._overhead_s = hardware.step_overhead_s + shape.num_layers * hardware.layer_overhead_s
        self._weights_s = (weights.layers + weights.table) / tensor_parallel / bandwidth
        self._token_s = 2 * layers_parameters / flops
        self._sampled_s = 2 * output_parameters / flops
        self._pair_s = 4 * shape.num_heads * shape.head_dim * shape.num_layers / tensor_parallel / flops
        self._kv_read_s = self._rank_kv_bytes / bandwidth
        activation_bytes = shape.hidden_size * value_bytes
        share = (tensor_parallel - 1) / tensor_parallel
        self._all_reduce_s = 2 * shape.num_layers * 2 * share * activation_bytes / hardware.link_bandwidth

    def step_s(self, rows: Iterable[tuple[int, int]]) -> float:
        """Seconds of one step; 0 for an empty one.

        Args:
            rows: (new tokens, cached tokens) of each row; a decode row is ``(1, context)``. Each is taken to sample.
        """
        num_rows = num_tokens = 0
        attention_s = 0.0
        for num_new, num_cached in rows:
            num_rows += 1
            num_tokens += num_new
            attention_s += self._attention_s(num_new, num_cached)
        return self._sum_s(num_tokens, num_rows, attention_s)

    def prefill_s(self, num_new: int, num_cached: int = 0) -> float:
        """Seconds of a step that computes ``num_new`` tokens of one prompt after ``num_cached`` cached ones."""
        return self._sum_s(num_new, 1, self._attention_s(num_new, num_cached))

    def decode_s(self, batch_size: int, context_tokens: int) -> float:
        """Seconds of a step that decodes one token of each of ``batch_size`` sequences.

        Args:
            context_tokens: cached tokens of all the sequences together.
        """
        return self._sum_s(batch_size, batch_size, self._decode_attention_s(batch_size, context_tokens))

    def decode_run_s(self, batch_size: int, context_tokens: int) -> tuple[float, float]:
        """Seconds of a step as in `decode_s`, and by how much each step is longer than the one before while the same
        sequences decode: for a given batch, time grows in proportion to the context."""
        return (
            self.decode_s(batch_size, context_tokens),
            batch_size * max(self._pair_s, self._kv_read_s),
        )

    def mixed_s(self, num_new: int, num_cached: int, batch_size: int, context_tokens: int) -> float:
        """Seconds of a step with a prompt's chunk, as in `prefill_s`, beside a decode, as in `decode_s`."""
        attention_s = self._attention_s(num_new, num_cached) + self._decode_attention_s(batch_size, context_tokens)
        return self._sum_s(num_new + batch_size, 1 + batch_size, attention_s)

    def transfer_s(self, num_tokens: int, *, same_host: bool) -> float:
        """Seconds to move the KV of ``num_tokens`` tokens to another worker, each rank's share in parallel."""
        bandwidth = self.hardware.link_bandwidth if same_host else self.hardware.network_bandwidth
        return num_tokens * self._rank_kv_bytes / bandwidth

    def swap_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of ``num_tokens`` tokens to the host or back, each rank's share in parallel."""
        return num_tokens * self._rank_kv_bytes / self.hardware.host_bandwidth

    def max_kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """Blocks of ``block_size`` tokens that fit beside the weights in a share of each rank's memory.

        0 where the weights alone do not fit.
        """
        free_bytes = self.hardware.memory_bytes * memory_fraction - self.weight_bytes / self.tensor_parallel
        return max(0, int(free_bytes // (block_size * self._rank_kv_bytes)))

    def _attention_s(self, num_new: int, num_cached: int) -> float:
        """Attention of one row, in all layers."""
        pairs = num_new * num_cached + num_new * (num_new + 1) / 2
        return max(pairs * self._pair_s, (num_cached + num_new) * self._kv_read_s)

    def _decode_attention_s(self, batch_size: int, context_tokens: int) -> float:
        """Attention of ``batch_size`` rows of one token, in all layers."""
        # Both sides of a decode row's roofline grow by the same factor with its context, so that one side is the
        # greater for every row, and rows can be added up before they are compared.
        return (context_tokens + batch_size) * max(self._pair_s, self._kv_read_s)

    def _sum_s(self, num_tokens: int, num_rows: int, attention_s: float) -> float:
        if num_tokens == 0:
            return 0.0
        linear_s = max(num_tokens * self._token_s + num_rows * self._sampled_s, self._weights_s)
        return linear_s + attention_s + num_tokens * self._all_reduce_s + self._overhead_s


def _check_divides(shape: ModelShape, tensor_parallel: int) -> None:
    kv_heads = shape.num_kv_heads
    is_whole_kv = tensor_parallel >= 1 and (kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0)
    if not is_whole_kv or shape.num_heads % tensor_parallel:
        raise ValueError(
            f"tensor_parallel {tensor_parallel} does not divide {shape.num_heads} heads and {kv_heads} KV heads; "
            f"use a divisor of both"
        )


@dataclass(slots=True, kw_only=True)
class OnlineCorrection:
    """How much longer things take than predicted: an exponential moving average of observed / predicted.

    Multiply predictions by `factor`. One outlier, a stalled step say, counts as ``highest`` at most.
    """

    weight: float = 0.1
    """Share of the newest observation in the average."""
    lowest: float = 0.1
    highest: float = 10.0
    factor: float = 1.0

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Take one observation; ``predicted_s`` is what the model said before correction, more than 0."""
        assert predicted_s > 0
        ratio = min(max(observed_s / predicted_s, self.lowest), self.highest)
        self.factor += self.weight * (ratio - self.factor)
