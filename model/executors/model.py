"""The executor that computes a real model: packs each step once, launches it, and samples.

The engine's step loop submits batches. One H2D copy carries all inputs of a step, and one D2H copy returns the sampled
tokens; the next step reads tokens that the scheduler does not know yet from the device. On a GPU, two steps are in
flight; on a CPU, a step is computed when `ModelExecutor.submit` returns. Decode-only batches replay captured steps
(`pdserve.model.executors.decode_graphs`); others launch kernel by kernel. Receives block tables, never touches the
block pool's bookkeeping. The caller sets thread counts.

Shape suffixes: R rows that a captured step may sample, B rows that a step samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.step import SampledToken, StepBatch, StepHandle, StepOutput, StepRow, TokenLogprobs
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import select_kernels, select_sampling_kernels
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.executors.block_copies import copy_blocks
from pdserve.model.executors.decode_graphs import DecodeGraphs, warm_up
from pdserve.model.executors.device_queue import Event, select_queue, swap_slots
from pdserve.model.executors.step_inputs import OutputRows, StepShape, StepTensors, pack_step
from pdserve.model.sampling.logprobs import logprobs_in_pieces
from pdserve.model.sampling.sampling import Sampler, likeliest, plan_draws


class _LaunchedStep:
    """Handle of a step in flight or of one whose launch failed; the next step reads its tokens."""

    def __init__(self, batch: StepBatch, started: Event) -> None:
        self._step_id = batch.step_id
        self._num_rows = len(batch.rows)
        self._started = self._ended = started
        self._fetched_B2: torch.Tensor | None = None
        self._tokens: list[int] = []
        self._error: Exception | None = None
        self.outputs = OutputRows.of(batch.rows)
        self._indices = {row: index for index, row in enumerate(self.outputs.sampling)}
        self.logprobs: dict[int, TokenLogprobs] = {}
        """Keyed by index in the sampled tokens."""
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    def end(self, ended: Event, fetched_B2: torch.Tensor | None) -> None:
        """Mark the step as completely launched.

        Args:
            fetched_B2: int32: the tokens, and the bits of each row's highest logit; None if no row samples.
        """
        self._ended = ended
        self._fetched_B2 = fetched_B2

    def fail(self, error: Exception) -> None:
        self._error = error

    def index(self, row: int) -> int:
        """Index of a row's token among the sampled tokens."""
        self._check_launched()
        assert row < self._num_rows, f"the step before has no row {row}"
        assert row in self._indices, f"row {row} of the step before sampled nothing"
        return self._indices[row]

    def token(self, row: int) -> int:
        """Wait for the step and return a row's token."""
        self._wait()
        return self._tokens[self.index(row)]

    def result(self) -> StepOutput:
        self._wait()
        sampled: list[SampledToken | None] = [None] * self._num_rows
        for index, (row, token) in enumerate(zip(self.outputs.sampling, self._tokens, strict=True)):
            sampled[row] = SampledToken(token, self.logprobs.get(index))
        return StepOutput(
            step_id=self._step_id,
            sampled=sampled,
            prompt_logprobs=self.prompt_logprobs,
            duration_s=self._started.elapsed_time(self._ended) / 1000,
        )

    def _check_launched(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"step {self._step_id} failed: {self._error}") from self._error

    def _wait(self) -> None:
        self._check_launched()
        self._ended.synchronize()
        if self._fetched_B2 is None:
            return
        best = self._fetched_B2[:, 1].view(torch.float32).tolist()
        if not all(map(isfinite, best)):
            values = zip(self.outputs.sampling, best, strict=True)
            bad = ", ".join(f"row {row}: {value}" for row, value in values if not isfinite(value))
            raise RuntimeError(f"step {self._step_id} failed: logits that are not finite cannot be sampled ({bad})")
        self._tokens = self._fetched_B2[:, 0].tolist()
        self._fetched_B2 = None


class ModelExecutor:
    """Implements `pdserve.contracts.step.Executor`. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        *,
        folder: Path,
        config: DecoderConfig,
        layout: KvLayout,
        pool: KvPool,
        precision: Precision,
        num_swap_slots: int = 0,
        max_captured_rows: int = 0,
    ) -> None:
        """Load the checkpoint in ``folder`` to the pool's device and capture its decode steps.

        Args:
            layout: layout of the pool, for the model that ``config`` describes.
            pool: pool of that layout; the executor writes new tokens' KV to it.
            precision: of weights and activations; the KV dtype is the layout's.
            num_swap_slots: host slots for blocks of preempted sequences.
            max_captured_rows: rows of the largest captured decode step; 0 captures none.

        Raises:
            ValueError: unusable weights, or weights that do not match ``config``.
        """
        assert pool.shape == layout.shape, f"pool {pool.shape} is not laid out as {layout.shape}"
        assert pool.dtype == getattr(torch, layout.dtype), f"pool of {pool.dtype} for a layout of {layout.dtype}"
        device, kernels = pool.values.device, select_kernels(pool)
        self._layout = layout
        self._pool = pool
        self._slots = swap_slots(num_swap_slots, pool.blocks)
        self._vocab_size = vocab_size = config.shape.vocab_size
        self._model = Decoder(folder, config, precision, kernels)
        self._queue = select_queue(device)
        sampling_kernels = select_sampling_kernels(device)
        self._sampler = Sampler(sampling_kernels)
        # Tokens of the previous step, in the captured steps' buffer unless that step sampled too many rows for it.
        self._captured_R = torch.zeros(max_captured_rows, dtype=torch.int64, device=device)
        self._sampled_R = self._captured_R
        self._previous: _LaunchedStep | None = None
        self._graphs: DecodeGraphs | None = None
        if device.type != "cpu":
            warm_up(self._model, pool, self._queue, sampling_kernels, vocab_size=vocab_size, max_rows=max_captured_rows)
        if max_captured_rows and can_capture(kernels):
            max_blocks = min(layout.num_blocks, layout.num_blocks_for(config.max_context_length))
            self._graphs = DecodeGraphs(
                self._model, pool, self._queue, self._captured_R, vocab_size=vocab_size, max_blocks=max_blocks
            )

    @property
    def pipeline_depth(self) -> int:
        return self._queue.pipeline_depth

    @torch.inference_mode()
    def submit(self, batch: StepBatch) -> StepHandle:
        """Launch the step. The handle waits for it, and raises if the launch or the computation failed."""
        previous, self._previous = self._previous, _LaunchedStep(batch, self._queue.event())
        step = self._previous
        try:
            copy_blocks(batch, self._pool.blocks, self._slots, _copy_block)
            fetched_B2 = self._launch(batch.rows, step, previous) if batch.rows else None
            step.end(self._queue.event(), fetched_B2)
        except Exception as error:  # The handle reports any error of this step.
            self._queue.event().synchronize()  # Launched kernels may still write to blocks that the caller frees.
            step.fail(error)
        return step

    def close(self) -> None:
        """Do nothing: memory is freed with the object."""

    def _launch(self, rows: list[StepRow], step: _LaunchedStep, previous: _LaunchedStep | None) -> torch.Tensor | None:
        """Launch the whole step; return the tensor that receives tokens and highest logits on the host."""
        sampling = [rows[index] for index in step.outputs.sampling]
        previous_indices = [_previous_index(row, previous) for row in rows]
        draws = plan_draws(sampling, self._vocab_size)
        graphs = self._graphs if self._is_captured(rows, step.outputs) else None
        outputs = step.outputs.tokens(rows)
        packed = pack_step(
            rows,
            previous_indices,
            outputs,
            self._layout,
            self._vocab_size,
            num_padding=graphs.padding(len(rows)) if graphs is not None else 0,
            draws=draws.words,
        )
        if graphs is not None:
            inputs = graphs.inputs
            logits_BV, best_B = graphs.run(packed, len(rows))
        else:
            inputs = self._queue.put(packed)
            hidden_BE = self._forward(rows, step, inputs, len(outputs), max(previous_indices) >= 0)
            if not sampling:
                return None
            logits_BV = self._model.logits(hidden_BE)
            best_B, self._sampled_R = likeliest(logits_BV)
            if len(self._sampled_R) <= len(self._captured_R):
                self._captured_R[: len(self._sampled_R)] = self._sampled_R
                self._sampled_R = self._captured_R
        token_B = self._sampled_R[: len(sampling)]

        def previous_token(row: int) -> int:
            assert previous is not None
            return previous.token(row)

        words = inputs[len(packed) - len(draws.words) : len(packed)]
        best_B, step.logprobs = self._sampler.sample(logits_BV, best_B, token_B, sampling, draws, words, previous_token)
        return self._queue.fetch(torch.stack((token_B.int(), best_B.view(torch.int32)), dim=1))

    def _forward(
        self, rows: list[StepRow], step: _LaunchedStep, inputs: torch.Tensor, num_outputs: int, has_late_tokens: bool
    ) -> torch.Tensor:
        """Launch kernel by kernel; return the last hidden states of sampling rows, ``[B, E]``."""
        num_new = [row.num_new_tokens for row in rows]
        tensors = StepTensors.of(inputs, StepShape(len(rows), sum(num_new), num_outputs, min(num_new), max(num_new)))
        tokens_T = tensors.known_tokens(self._sampled_R) if has_late_tokens else tensors.tokens.long()
        wanted = None if step.outputs.is_decode else tensors.outputs
        hidden_OE = self._model.forward(tokens_T, self._pool, tensors.metadata, wanted)
        hidden_BE, prompts = step.outputs.split(hidden_OE, rows)
        for index, hidden_TE in zip(step.outputs.asking, prompts, strict=True):
            step.prompt_logprobs[index] = logprobs_in_pieces(
                self._model.logits, hidden_TE, rows[index].prompt_targets, rows[index].num_prompt_logprobs
            )
        return hidden_BE

    def _is_captured(self, rows: Sequence[StepRow], outputs: OutputRows) -> bool:
        """Return True for a decode step that fits a captured size."""
        has_room = len(rows) <= len(self._captured_R) and self._sampled_R is self._captured_R
        return has_room and outputs.is_decode


def _copy_block(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def can_capture(kernels: DecoderKernels) -> bool:
    """Return True if decode steps may be captured; always on a CPU, where a replay computes directly."""
    return kernels.is_capturable or kernels.device.type == "cpu"


def _previous_index(row: StepRow, previous: _LaunchedStep | None) -> int:
    """Index of the row's last token among those that the previous step sampled; -1 if the host knows it."""
    if row.previous_row < 0:
        return -1
    assert previous is not None, f"the step before has no row {row.previous_row}"
    return previous.index(row.previous_row)
