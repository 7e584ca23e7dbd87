"""The executor that computes a real model, one step at a time in the caller's thread.

The engine's step loop submits batches; this lays them out flat, runs `pdserve.model.decoder` over the KV pool it was
given, and samples. Knows block tables, never a block pool's bookkeeping. Thread counts are the caller's to set.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import SampledToken, StepBatch, StepHandle, StepOutput, StepRow, TokenLogprobs
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.selection import select_kernels
from pdserve.model.block_copies import BlockCopier
from pdserve.model.config import DecoderConfig
from pdserve.model.decoder import Decoder
from pdserve.model.finished_steps import DoneStep, FailedStep
from pdserve.model.logprobs import logprobs_in_pieces
from pdserve.model.row_sampling import RowSampler
from pdserve.model.step_inputs import Wanted


class _Result(NamedTuple):
    """What a step computed."""

    sampled: list[list[SampledToken]]
    """Of each row, one for each of its choices; none where it does not sample."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]


class ModelExecutor:
    """Implements `pdserve.contracts.step.Executor`. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        *,
        folder: Path,
        config: DecoderConfig,
        layout: KvLayout,
        pool: KvPool,
        dtype: str,
        quantization: str = "none",
        num_swap_slots: int = 0,
    ) -> None:
        """Load the checkpoint in ``folder`` and serve it from ``pool``.

        Args:
            layout: of the pool; the model must be the one that ``config`` describes.
            pool: laid out as ``layout`` says; this writes new tokens' KV to it.
            dtype: of weights and activations: ``float32``, ``bfloat16`` or ``float16``.
            quantization: of the weights of layers: ``none``, ``int8`` or ``int4``.
            num_swap_slots: host slots for blocks of preempted sequences.

        Raises:
            ValueError: the weights are unusable or do not match ``config``.
        """
        assert pool.shape == layout.shape, f"pool {pool.shape} is not laid out as {layout.shape}"
        assert pool.dtype == getattr(torch, layout.dtype), f"pool of {pool.dtype} for a layout of {layout.dtype}"
        self._layout = layout
        self._pool = pool
        slots = torch.empty((num_swap_slots, pool.blocks.shape[1]), dtype=torch.uint8)
        self._copier = BlockCopier(pool.blocks, slots)
        self._vocab_size = config.shape.vocab_size
        self._model = Decoder(folder, config, getattr(torch, dtype), select_kernels(pool), quantization)
        self._previous_sampled: list[SampledToken | None] = []
        self._sampler = RowSampler()

    @property
    def pipeline_depth(self) -> int:
        return 1

    def submit(self, batch: StepBatch) -> StepHandle:
        """Compute the step at once; the handle is ready, and raises if the computation did."""
        started_s = perf_counter()
        try:
            self._copier.run(batch)
            result = self._run(batch.rows) if batch.rows else _Result([], {})
        except Exception as error:  # Whatever it was, it is this step's, and the handle reports it.
            self._previous_sampled = []
            return FailedStep(batch.step_id, error)
        self._previous_sampled = [tokens[0] if tokens else None for tokens in result.sampled]
        return DoneStep(
            StepOutput(
                step_id=batch.step_id,
                sampled=list(self._previous_sampled),
                forks={row: tokens[1:] for row, tokens in enumerate(result.sampled) if len(tokens) > 1},
                prompt_logprobs=result.prompt_logprobs,
                duration_s=perf_counter() - started_s,
            )
        )

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""

    def _run(self, rows: list[StepRow]) -> _Result:
        metadata = AttentionMetadata.build(
            [row.num_new_tokens for row in rows],
            [row.cached_length for row in rows],
            [row.block_table for row in rows],
            num_blocks=self._layout.num_blocks,
            block_size=self._layout.block_size,
        )
        tokens = np.fromiter(chain.from_iterable(map(self._tokens, rows)), np.int64, metadata.num_tokens)
        assert tokens.min() >= 0, f"token id {tokens.min()} is negative"
        assert tokens.max() < self._vocab_size, f"token id {tokens.max()} is outside a vocabulary of {self._vocab_size}"
        wanted = Wanted.by(rows)
        hidden = self._model.forward(
            torch.from_numpy(tokens), self._pool, metadata, torch.from_numpy(wanted.tokens(rows))
        )
        hidden_BE, prompts = wanted.split(hidden, rows)
        result = _Result([[] for _ in rows], {})
        if wanted.sampling:
            sampling = [rows[index] for index in wanted.sampling]
            sampled = self._sampler.sample(self._model.logits(hidden_BE), sampling, self._late_token)
            for index, tokens_of_row in zip(wanted.sampling, sampled, strict=True):
                result.sampled[index] = tokens_of_row
        for index, hidden_TE in zip(wanted.asking, prompts, strict=True):
            row = rows[index]
            result.prompt_logprobs[index] = logprobs_in_pieces(
                self._model.logits, hidden_TE, row.prompt_targets, row.num_prompt_logprobs
            )
        return result

    def _tokens(self, row: StepRow) -> Sequence[int]:
        """The row's new tokens; the one that the step before sampled, where the scheduler did not know it yet."""
        if row.previous_row < 0:
            return row.tokens
        assert not row.tokens, "a row has tokens of its own or the previous step's, not both"
        return (self._late_token(row.previous_row),)

    def _late_token(self, previous_row: int) -> int:
        assert previous_row < len(self._previous_sampled), f"the step before has no row {previous_row}"
        sampled = self._previous_sampled[previous_row]
        assert sampled is not None, f"row {previous_row} of the step before sampled nothing"
        return sampled.token
