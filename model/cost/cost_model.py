"""Predicts step and KV transfer durations: a roofline over the model's shape and the machine's figures.

The router's policy, admission, the planner and the emulated executor share one `CostModel`; `OnlineCorrection` scales
it by observed durations. Never imports torch, never measures anything itself.

A worker has t * p devices: t tensor-parallel ranks share heads and columns, p pipeline stages share the layers. The
duration of a step with T new tokens and S sampled rows is the sum, over all stages, of one rank's work:

- linear layers: ``max(2 T * layer weights / t / (F e(T)), bytes of those weights / t / W)``, e(T) the share of peak
  arithmetic F that products of T rows reach, W the rate at which weights are read; F is the share of float8's peak that
  its products reach if the weights are fp8 and the device multiplies float8, with activations quantised on the way;
- routed experts (E, k per token): the same formula over the experts that the step touches. Assuming even and
  independent routing, these are ``n = E (1 - (1 - k / E) ** T)`` experts with ``T k / n`` rows each. Ranks that have
  whole experts wait for the one of most, about ``n / t + sqrt(ln t * n / t * (1 - 1 / t) * (1 - n / E))``;
- the output projection, as a linear layer of S rows, whose logits are gathered from the ranks,
  ``(t - 1) / t * S * vocabulary`` values, and sent in float32 from the last stage to the first;
- attention, per row with q new tokens after c cached ones, causal work only, at least a decode over the same context:
  ``max(4 heads * head_dim * layers * (q c + q (q + 1) / 2) / t / (F a(q)), (c + q) * D)``, D being the seconds that one
  token attends to one other: ``max(4 heads * head_dim * layers / t / F, KV bytes per token / W')``, over the share of
  either that decode attention reaches. In layers with a sliding window a token attends to no more than that, and a row
  reads what its tokens attend to. With latent attention (`pdserve.model.config.shape.LatentAttention`) the operations
  of a pair in decode are those on the vectors in KV, of which every rank holds all;
- tensor parallelism: two all-reduces of the activations per layer, ``2 (t - 1) / t * bytes / link`` and one latency of
  the link each, whatever the number of ranks: small messages go directly to every rank, large ones around a ring;
- pipeline parallelism: sends of activations between stages;
- overhead: a fixed time per step, per layer and per sampled row;
- without CUDA graphs, layers and their all-reduces take at least as long as the host takes to launch their kernels,
  whatever the number of ranks; attention is counted on top, as if no launch hid it.

For a given batch, decode time is therefore linear in the context, or with sliding windows piecewise linear. A batch of
which only the total context is given counts as rows of the mean context: exact without windows, and with them where all
rows are within the window or all beyond; else too long, by as much as windows cut the mean row's context less than they
cut the rows' own. The model leaves out activation traffic within a device. Windows save no memory: all KV is kept.
Sources: Williams, Waterman, Patterson, "Roofline" (CACM 2009); Shoeybi et al., "Megatron-LM" (2019, section 3) for the
all-reduces; Dao et al., "FlashAttention" (2022) for the count of causal work and the single read of KV; Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations" (2005) for the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import expm1, log
from sys import maxsize
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.contracts.kv_layout import DTYPE_BYTES, kv_vector_bytes, resolve_kv_dtype
from pdserve.contracts.precision import Precision
from pdserve.contracts.transports import expected_transport
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS
from pdserve.model.config.shape import ModelShape
from pdserve.model.config.sharding import check_divides
from pdserve.model.cost.hardware import Hardware
from pdserve.model.weights.bytes import weight_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

MODEL_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of weights and activations."""


class StepParts(NamedTuple):
    """Breakdown of one step's duration, summed over stages."""

    layers_s: float
    output_s: float
    """Output projection, and what moves its logits to the rank that samples."""
    attention_s: float
    all_reduce_s: float
    send_s: float
    """Activations sent between stages."""
    overhead_s: float


class CountTerms(NamedTuple):
    """Terms of a step's duration that depend on one count, for an array of counts."""

    tokens_s: FloatArray
    """Layers, communication and overhead for so many new tokens, without attention."""
    rows_s: FloatArray
    """Output projection, with its logits' way, and overhead of so many rows."""
    pair_s: FloatArray
    """One token attending to one other, in a chunk of so many new tokens."""


class RankMemory(NamedTuple):
    """Memory of the fullest rank."""

    weight_bytes: float
    activation_bytes: float
    reserve_bytes: int
    kv_bytes: float
    """Remainder, free for KV."""


class CostModel:
    """Durations and memory of one model on the devices of one worker.

    Args:
        shape: the whole model.
        hardware: one device; a worker has ``tensor_parallel * pipeline_parallel`` of them.
        precision: of weights, activations and KV; arithmetic is in its ``dtype``, one of `MODEL_DTYPES`.
        tensor_parallel: ranks that share heads and columns.
        pipeline_parallel: stages, each with an equal share of the layers.
        transport: ``kv_transfer.transport``.
        expert_parallel: the ranks have whole experts, not features of each.

    Raises:
        ValueError: heads or layers not divisible by the parallel sizes, or a dtype that the hardware cannot read or has
            no figure for.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        precision: Precision,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        transport: str = "auto",
        *,
        expert_parallel: bool = False,
    ) -> None:
        check_divides(shape, tensor_parallel, pipeline_parallel, expert_parallel=expert_parallel)
        dtype = precision.dtype
        if dtype not in MODEL_DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of a model; use one of {', '.join(MODEL_DTYPES)}")
        self.shape = shape
        self.hardware = hardware
        self.dtype = dtype
        self.kv_dtype = resolve_kv_dtype(precision.kv_dtype, dtype)
        hardware.check_reads(self.kv_dtype)
        self.tensor_parallel = tensor_parallel
        self.pipeline_parallel = pipeline_parallel
        self._expert_parts = 1 if expert_parallel else tensor_parallel
        """Ranks that share the features of an expert."""
        self.pipeline_depth = hardware.pipeline_depth if pipeline_parallel == 1 else 1
        """Steps that a step loop submits before it reads the first result. A pipeline has one for each of its
        micro-batches, because the first stage needs the tokens that the last one samples."""
        self._weights = weights = weight_bytes(shape, dtype, precision.quantization)
        self.weight_bytes = weights.total
        """Weights of the whole model, summed over ranks."""
        self.kv_bytes_per_token = shape.kv_vectors_per_token * kv_vector_bytes(shape.head_dim, self.kv_dtype)
        """KV of one token over the whole model; each KV head counts once."""

        self._rank_flops = hardware.peak(dtype) * tensor_parallel  # a rank does this share of an operation's work
        multiplies_float8 = precision.quantization == "fp8" and "float8" in hardware.peak_flops
        self._layer_flops = self._rank_flops
        if multiplies_float8:
            self._layer_flops = hardware.peak("float8") * hardware.float8_efficiency * tensor_parallel
        self._rank_bandwidth = hardware.bandwidth * tensor_parallel
        stages_kv_bytes = self.kv_bytes_per_token / min(tensor_parallel, shape.num_kv_heads)
        self.rank_kv_bytes_per_token = stages_kv_bytes / pipeline_parallel
        """KV of one token on one rank; every rank that holds a copy of a head counts it."""
        windows = shape.windows[: shape.num_layers]
        self.window = max(windows, default=0)
        """Tokens that a token attends to in the share `window_share` of the layers; 0 if all see all."""
        self.window_share = sum(window > 0 for window in windows) / shape.num_layers
        self._pull_token_s = [
            self._token_transfer_s(chosen_transport(transport, same_host=near), near) for near in (False, True)
        ]
        self._pair_s = shape.pair_operations * shape.num_layers / self._rank_flops
        decode_pair_s = shape.decode_pair_operations * shape.num_layers / self._rank_flops
        decode_s = max(decode_pair_s, stages_kv_bytes / hardware.memory_bandwidth)
        self._decode_token_s = decode_s / hardware.decode_attention_efficiency
        inside = (hardware.link_latency_s, hardware.link_bandwidth * hardware.link_efficiency)
        outside = (hardware.network_latency_s, hardware.network_bandwidth * hardware.link_efficiency)
        # Tensor-parallel ranks fill hosts first, then stages.
        self._all_reduce = outside
        if tensor_parallel <= hardware.devices_per_host:
            self._all_reduce = (hardware.link_latency_s, hardware.link_bandwidth * hardware.all_reduce_efficiency)
        stages_per_host = max(1, hardware.devices_per_host // tensor_parallel)
        num_outside = -(-pipeline_parallel // stages_per_host) - 1
        self._to_leader = outside if num_outside else inside
        self._hops = [(num_outside, *outside), (pipeline_parallel - 1 - num_outside, *inside)]
        num_expert_weights = (shape.num_layers - shape.num_dense_layers) * shape.num_experts * shape.expert_parameters
        self._expert_weight_bytes = weights.experts / max(1, num_expert_weights)
        """Bytes of a weight of routed experts, with its share of scales."""
        self._common_weight_bytes = (weights.layers - weights.experts) / (shape.matrix_parameters - num_expert_weights)
        self._common_layer_parameters = shape.common_layer_parameters
        self._activation_bytes = shape.hidden_size * DTYPE_BYTES[dtype]
        # The planner looks a few counts up millions of times.
        self._tokens_s = _Memo(lambda num_tokens: sum(self._token_parts(num_tokens)))
        self._rows_s = _Memo(lambda num_rows: self._output_s(num_rows) + num_rows * hardware.row_overhead_s)
        self._pairs_s = _Memo(lambda num_new: self._pair_s / hardware.prefill_attention_efficiency.at(num_new))
        self._whole_prompts_s = _Memo(lambda num_new: self._sum_s(num_new, 1, self._attention_s(num_new, 0)))

    def step_s(self, rows: Iterable[tuple[int, int]], batch_size: int = 0, context_tokens: int = 0) -> float:
        """Seconds of one step; 0 for an empty one.

        Args:
            rows: (new tokens, cached tokens) of each row; a decode row is ``(1, context)``. Every row samples.
            batch_size: number of additional decode rows.
            context_tokens: total cached tokens of those decode rows.
        """
        num_tokens, num_rows, prefill_attention_s, num_seen = self._sum_rows(rows)
        num_seen += self.attended(context_tokens + batch_size, batch_size)
        attention_s = prefill_attention_s + num_seen * self._decode_token_s
        return self._sum_s(num_tokens + batch_size, num_rows + batch_size, attention_s)

    def prefill_s(self, num_new: int, num_cached: int = 0) -> float:
        """Seconds of a step that computes ``num_new`` tokens of one prompt after ``num_cached`` cached ones."""
        if num_new == 1:
            return self.decode_s(1, num_cached)
        if not num_cached:
            return self._whole_prompts_s[num_new]
        return self._sum_s(num_new, 1, self._attention_s(num_new, num_cached))

    def prompt_s(self, num_new: int, num_cached: int, budget: int) -> float:
        """Seconds of the steps that compute ``num_new`` tokens of one prompt in chunks of ``budget`` tokens: the sum of
        `prefill_s`, in closed form. The sums of reads and of arithmetic are compared, not those of each chunk, which
        matters where a small ``budget`` makes the first chunks read for longer than they compute."""
        num_chunks, num_left = divmod(num_new, budget)
        if not num_chunks or num_new == budget:
            return self.prefill_s(num_new, num_cached)
        num_whole = num_new - num_left
        pairs_s = self._num_pairs(num_whole, num_cached) * self._pairs_s[budget]
        read_s = (self._read_s(budget, num_cached) + self._read_s(budget, num_cached + num_whole - budget)) / 2
        attention_s = max(pairs_s, num_chunks * read_s)
        chunks_s = num_chunks * (self._tokens_s[budget] + self._rows_s[1]) + attention_s
        return chunks_s + (self.prefill_s(num_left, num_cached + num_whole) if num_left else 0.0)

    def decode_s(self, batch_size: int, context_tokens: int) -> float:
        """Seconds of a step that decodes one token for each of ``batch_size`` sequences.

        Args:
            context_tokens: total cached tokens of the sequences.
        """
        attention_s = self.attended(context_tokens + batch_size, batch_size) * self._decode_token_s
        return self._sum_s(batch_size, batch_size, attention_s)

    def decode_run_s(self, batch_size: int, context_tokens: int) -> tuple[float, float, int]:
        """Seconds of a step as in `decode_s`, their increase per step as the same sequences keep decoding, and for how
        many steps, the first included, it stays what it is."""
        first_s, growth_s = self.decode_s(batch_size, context_tokens), batch_size * self._decode_token_s
        num_steps = maxsize
        if self.window:
            num_steps = self.window - -(-context_tokens // batch_size)
            if num_steps <= 0:
                growth_s, num_steps = growth_s * (1 - self.window_share), maxsize
        return first_s, growth_s, num_steps

    def attended(self, num_tokens: float, num_rows: float) -> float:
        """Tokens that ``num_rows`` decode rows attend to, of ``num_tokens`` known in all: as many for each row, and
        averaged over layers."""
        num_beyond = num_tokens - num_rows * self.window
        return num_tokens - self.window_share * num_beyond if num_beyond > 0 else num_tokens

    def guesses_s(self, batch_size: int, num_guesses: int) -> float:
        """Seconds that guesses of further tokens add to a step that decodes one token for each of ``batch_size``
        sequences. Attention is left out, because a guess attends to what its row reads anyway."""
        tokens_s, rows_s, num_tokens = self._tokens_s, self._rows_s, batch_size + num_guesses
        return tokens_s[num_tokens] - tokens_s[batch_size] + rows_s[num_tokens] - rows_s[batch_size]

    def mixed_s(self, num_new: int, num_cached: int, batch_size: int, context_tokens: int) -> float:
        """Seconds of a mixed step: a prefill chunk as in `prefill_s` plus decode rows as in `decode_s`."""
        if num_new <= 1:
            return self.decode_s(batch_size + num_new, context_tokens + num_new * num_cached)
        decode_attention_s = self.attended(context_tokens + batch_size, batch_size) * self._decode_token_s
        attention_s = self._attention_s(num_new, num_cached) + decode_attention_s
        return self._sum_s(num_new + batch_size, 1 + batch_size, attention_s)

    def terms(self, counts: FloatArray) -> CountTerms:
        """Terms of `step_s` for an array of counts of 1 or more."""
        parts: Any = self._token_parts(counts)
        return CountTerms(
            tokens_s=sum(parts),
            rows_s=self._output_s(counts) + counts * self.hardware.row_overhead_s,
            pair_s=self._pair_s / self.hardware.prefill_attention_efficiency.at(counts),
        )

    @property
    def decode_token_s(self) -> float:
        """Seconds of decode attention for each token `attended`, and the lower bound for those of prefill."""
        return self._decode_token_s

    def parts(self, rows: Iterable[tuple[int, int]]) -> StepParts:
        """Breakdown of `step_s`; ``rows`` must not be empty."""
        num_tokens, num_rows, prefill_attention_s, num_seen = self._sum_rows(rows)
        tokens = self._token_parts(num_tokens)
        return tokens._replace(
            output_s=self._output_s(num_rows),
            attention_s=prefill_attention_s + num_seen * self._decode_token_s,
            overhead_s=tokens.overhead_s + num_rows * self.hardware.row_overhead_s,
        )

    def transfer_s(self, num_tokens: int, *, same_host: bool) -> float:
        """Seconds to transfer the KV of ``num_tokens`` tokens to another worker.

        From GPU to GPU, ranks transfer in parallel. Otherwise one process of the worker copies or receives the KV of
        all ranks, and then each rank on a GPU copies its part through pinned memory. Copies D2H are not counted: they
        run beside the prompt's steps.
        """
        return num_tokens * self._pull_token_s[same_host]

    def pull_s(self, num_tokens: float, *, same_host: bool) -> float:
        """Seconds of a pull: its `transfer_s`, and what every pull takes."""
        return self.hardware.pull_overhead_s + num_tokens * self._pull_token_s[same_host]

    def read_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many new tokens reads, and of the embedding table."""
        shape = self.shape
        if not shape.num_experts:
            return self.weight_bytes
        num_untouched = shape.num_experts - num_experts_touched(num_tokens, shape.num_experts, shape.experts_per_token)
        untouched_bytes = num_untouched * shape.expert_parameters * self._expert_weight_bytes
        return float(self.weight_bytes - (shape.num_layers - shape.num_dense_layers) * untouched_bytes)

    def swap_s(self, num_tokens: int) -> float:
        """Seconds of a D2H or H2D copy of the KV of ``num_tokens`` tokens; ranks copy in parallel."""
        return num_tokens * self.rank_kv_bytes_per_token / self.hardware.host_bandwidth

    def rank_memory(
        self, memory_fraction: float = 0.9, *, max_batch_tokens: int = 2048, max_batch_size: int = 256
    ) -> RankMemory:
        """Divide ``memory_fraction`` of the fullest rank's memory.

        Args:
            max_batch_tokens: new tokens of the largest step, for activations.
            max_batch_size: rows of the largest step, for logits.
        """
        shape, weights = self.shape, self._weights
        num_tables = 1 if shape.tie_word_embeddings or self.pipeline_parallel > 1 else 2
        all_tables_bytes = weights.table * (1 if shape.tie_word_embeddings else 2)
        # The first stage has the embedding table, the last the output projection.
        stage_bytes = (weights.total - all_tables_bytes) / self.pipeline_parallel + num_tables * weights.table
        rank_weights = stage_bytes / self.tensor_parallel
        # At its widest: the residual stream, its norm and what is added to it, and the MLP's two halves and their
        # product, or those of a token's experts and the output of each; then logits and their probabilities in float32.
        width = shape.intermediate_size * max(1, shape.experts_per_token) / self._expert_parts
        width += shape.shared_intermediate_size / self.tensor_parallel
        layer_bytes = (3 + shape.experts_per_token) * self._activation_bytes + 3 * width * DTYPE_BYTES[self.dtype]
        activations = max_batch_tokens * layer_bytes + max_batch_size * 2 * 4 * shape.vocab_size
        reserve = self.hardware.memory_reserve_bytes
        free_bytes = self.hardware.memory_bytes * memory_fraction - rank_weights - activations - reserve
        return RankMemory(rank_weights, activations, reserve, max(0.0, free_bytes))

    def max_kv_blocks(
        self, block_size: int, memory_fraction: float = 0.9, *, max_batch_tokens: int = 2048, max_batch_size: int = 256
    ) -> int:
        """Blocks of ``block_size`` tokens that fit on the fullest rank, with the arguments of `rank_memory`; 0 if the
        weights alone do not fit.
        """
        memory = self.rank_memory(memory_fraction, max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size)
        return int(memory.kv_bytes // (block_size * self.rank_kv_bytes_per_token))

    def _token_transfer_s(self, transport: str, same_host: bool) -> float:
        hardware, rank_bytes = self.hardware, self.rank_kv_bytes_per_token
        if transport in DIRECT_TRANSPORTS:
            near = hardware.pair_bandwidth or hardware.link_bandwidth
            return rank_bytes / ((near if same_host else hardware.network_bandwidth) * hardware.link_efficiency)
        bandwidth = hardware.memfd_bandwidth if transport == "memfd" else hardware.tcp_bandwidth
        if not same_host:
            bandwidth = min(bandwidth, hardware.network_bandwidth * hardware.link_efficiency)
        staging_s = 0.0 if hardware.is_host else rank_bytes / hardware.memfd_bandwidth + self.swap_s(1)
        return self.kv_bytes_per_token / bandwidth + staging_s

    # Parts of a step; counts are numbers, or arrays of them

    def _sum_rows(self, rows: Iterable[tuple[int, int]]) -> tuple[int, int, float, float]:
        """Sum new tokens, rows, attention seconds of prefill rows, and the tokens that decode rows attend to."""
        num_tokens = num_rows = 0
        attention_s = num_seen = 0.0
        for num_new, num_cached in rows:
            num_rows += 1
            num_tokens += num_new
            if num_new == 1:
                num_seen += self.attended(num_cached + 1, 1)
            else:
                attention_s += self._attention_s(num_new, num_cached)
        return num_tokens, num_rows, attention_s, num_seen

    def _sum_s(self, num_tokens: int, num_rows: int, attention_s: float) -> float:
        if num_tokens == 0:
            return 0.0
        return self._tokens_s[num_tokens] + self._rows_s[num_rows] + attention_s

    def _attention_s(self, num_new: int, num_cached: int) -> float:
        """Attention of one prefill row, in all layers."""
        return max(self._num_pairs(num_new, num_cached) * self._pairs_s[num_new], self._read_s(num_new, num_cached))

    def _read_s(self, num_new: int, num_cached: int) -> float:
        num_unread = max(0, num_cached + 1 - self.window)  # before the window of the first new token
        return (num_cached + num_new - self.window_share * num_unread) * self._decode_token_s

    def _num_pairs(self, num_new: int, num_cached: int) -> float:
        """Pairs of tokens that attend, averaged over layers."""
        before, after = max(0, num_cached - self.window), max(0, num_cached + num_new - self.window)
        num_beyond = (after * (after + 1) - before * (before + 1)) / 2
        return num_new * num_cached + num_new * (num_new + 1) / 2 - self.window_share * num_beyond

    def _token_parts(self, num_tokens: Any) -> StepParts:
        """Parts that depend on the number of new tokens; the others are 0."""
        hardware, num_layers, num_ranks = self.hardware, self.shape.num_layers, self.tensor_parallel
        message_bytes = num_tokens * self._activation_bytes
        latency_s, bandwidth = self._all_reduce
        sent_bytes = 2 * (num_ranks - 1) / num_ranks * message_bytes
        all_reduces_s = 2 * num_layers * (latency_s + sent_bytes / bandwidth) if num_ranks > 1 else 0.0
        layers_s, gaps_s = self._layers_s(num_tokens), num_layers * hardware.layer_overhead_s
        wait_s = _larger(num_layers * hardware.layer_launch_s - (layers_s + all_reduces_s + gaps_s), 0.0)
        return StepParts(
            layers_s=layers_s,
            output_s=0.0,
            attention_s=0.0,
            all_reduce_s=all_reduces_s,
            send_s=sum(hops * (latency_s + message_bytes / bandwidth) for hops, latency_s, bandwidth in self._hops),
            overhead_s=hardware.step_overhead_s + (num_ranks > 1) * hardware.ranks_overhead_s + gaps_s + wait_s,
        )

    def _layers_s(self, num_tokens: Any) -> Any:
        """Linear layers of all stages."""
        shape = self.shape
        bytes_each = self._common_weight_bytes
        common_s = self._product_s(num_tokens, self._common_layer_parameters, bytes_each, self._layer_flops)
        if not shape.num_experts:
            return shape.num_layers * common_s
        num_uses = num_tokens * shape.experts_per_token
        num_touched = num_experts_touched(num_tokens, shape.num_experts, shape.experts_per_token)
        num_weights = num_touched * shape.expert_parameters
        if self._expert_parts < self.tensor_parallel:
            num_weights *= busiest_share(num_touched, shape.num_experts, self.tensor_parallel) * self.tensor_parallel
        experts_s = self._product_s(num_uses / num_touched, num_weights, self._expert_weight_bytes, self._layer_flops)
        num_dense = shape.num_dense_layers
        seconds = (shape.num_layers - num_dense) * (common_s + experts_s)
        if num_dense:
            parameters = shape.dense_layer_parameters
            seconds = seconds + num_dense * self._product_s(num_tokens, parameters, bytes_each, self._layer_flops)
        return seconds

    def _output_s(self, num_rows: Any) -> Any:
        product_s = self._product_s(num_rows, self.shape.table_parameters, DTYPE_BYTES[self.dtype], self._rank_flops)
        num_logits, num_ranks = num_rows * self.shape.vocab_size, self.tensor_parallel
        gather_s = sent_s = 0.0
        if num_ranks > 1:
            latency_s, bandwidth = self._all_reduce
            gather_s = latency_s + (num_ranks - 1) / num_ranks * num_logits * DTYPE_BYTES[self.dtype] / bandwidth
        if self.pipeline_parallel > 1:
            latency_s, bandwidth = self._to_leader
            sent_s = latency_s + num_logits * DTYPE_BYTES["float32"] / bandwidth
        return product_s + gather_s + sent_s

    def _product_s(self, num_rows: Any, num_weights: Any, bytes_each: float, flops: float) -> Any:
        """Seconds to multiply ``num_rows`` rows by ``num_weights`` weights, split over a stage's ranks, at a peak of
        ``flops`` operations per second."""
        flops = flops * self.hardware.compute_efficiency.at(num_rows)
        return _larger(2 * num_rows * num_weights / flops, num_weights * bytes_each / self._rank_bandwidth)


def chosen_transport(setting: str, *, same_host: bool) -> str:
    """Transport that workers choose by ``kv_transfer.transport``; memfd also between hosts, where they refuse it."""
    is_same_host = same_host or setting == "memfd"
    return expected_transport(setting, is_same_host=is_same_host, are_on_gpus=True)[0]


def _larger(values: Any, limit: Any) -> Any:
    return max(values, limit) if isinstance(values, int | float) else values.clip(limit)


def num_experts_touched(num_tokens: Any, num_experts: int, experts_per_token: int) -> Any:
    """Expected number of distinct experts for ``num_tokens`` tokens under even, independent routing."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** num_tokens)


def busiest_share(num_touched: Any, num_experts: int, num_ranks: int) -> Any:
    """Share of the touched experts that the rank with the most of them has: the mean, and above it about ``sqrt(ln t)``
    standard deviations of the hypergeometric distribution, the expected maximum of ``t`` such counts."""
    variance = num_touched / num_ranks * (1 - 1 / num_ranks) * (1 - num_touched / num_experts)
    return 1 / num_ranks + (log(num_ranks) * variance) ** 0.5 / num_touched


_MAX_REMEMBERED = 32768


class _Memo(dict[int, float]):
    """Cache of a function of a count, for counts up to `_MAX_REMEMBERED`."""

    def __init__(self, compute: Callable[[int], float]) -> None:
        self._compute = compute

    def __missing__(self, count: int) -> float:
        value = self._compute(count)
        if count <= _MAX_REMEMBERED:
            self[count] = value
        return value


@dataclass(slots=True, kw_only=True)
class OnlineCorrection:
    """Correction factor of predictions: an exponential moving average of observed / predicted durations.

    Multiply predictions by `factor`. ``highest`` and ``most_weight`` bound the effect of one outlier, such as a stalled
    step. Short steps weigh less than long ones, because a delay of a few milliseconds predicts little.
    """

    memory_s: float = 1.0
    """Predicted seconds after which an observation's weight has decayed to 1 / e."""
    most_weight: float = 0.1
    """Upper limit on the weight of the newest observation."""
    lowest: float = 0.1
    highest: float = 10.0
    factor: float = 1.0

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Add one observation; ``predicted_s`` is the uncorrected prediction, above 0."""
        assert predicted_s > 0
        ratio = min(max(observed_s / predicted_s, self.lowest), self.highest)
        weight = min(-expm1(-predicted_s / self.memory_s), self.most_weight)
        self.factor += weight * (ratio - self.factor)
