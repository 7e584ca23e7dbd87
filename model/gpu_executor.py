"""The executor of a GPU: `GpuExecutor.submit` launches a step and does not wait for it, so that the next one is planned
meanwhile.

The engine's step loop submits batches, two of which may be in flight. Everything that a step is told goes to the device
in one copy, and the tokens that it sampled come back in one; the next step takes from the device those that the
scheduler does not know yet. Batches that only decode are replays of captured steps (`pdserve.model.decode_graphs`), the
others are launched kernel by kernel. A step with a row that needs more than a draw (penalties, bias, banned tokens, log
probabilities, several choices) is sampled by the host, which waits for it.

Which device it is, is known to `pdserve.model.device_queue` and the kernels only. Knows block tables, never a block
pool's bookkeeping.

Shape suffixes: R rows that a step may sample, B rows that it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import SampledToken, StepBatch, StepHandle, StepOutput, StepRow, TokenLogprobs
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import select_device_sampling_kernels, select_kernels
from pdserve.model.block_copies import BlockCopier
from pdserve.model.config import DecoderConfig
from pdserve.model.decode_graphs import DecodeGraphs, StepLogits
from pdserve.model.decoder import Decoder
from pdserve.model.device_blocks import DeviceBlocks, swap_slots
from pdserve.model.device_queue import Mark, select_queue
from pdserve.model.device_sampling import is_plain, plan_draws, sample_on_device
from pdserve.model.finished_steps import FailedStep
from pdserve.model.logprobs import logprobs_in_pieces
from pdserve.model.row_sampling import RowSampler
from pdserve.model.step_inputs import StepShape, StepTensors, Wanted, pack_step
from pdserve.model.warmup import warm_up


class _LaunchedStep:
    """The handle of a step on its way, and what the next step may ask of it."""

    def __init__(self, step_id: int, rows: Sequence[StepRow], started: Mark) -> None:
        self._step_id = step_id
        self._started = started
        self._ended = started
        self._fetched_B2: torch.Tensor | None = None
        self.wanted = Wanted.by(rows)
        self._places = {row: place for place, row in enumerate(self.wanted.sampling)}
        self.answers: list[list[SampledToken]] = [[] for _ in rows]
        """Of each row a token for each of its choices, once they are known."""
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    def end(self, ended: Mark, fetched_B2: torch.Tensor | None) -> None:
        """All of it is launched.

        Args:
            fetched_B2: int32: the tokens, and the bits of each row's highest logit; none where ``answers`` are known.
        """
        self._ended = ended
        self._fetched_B2 = fetched_B2

    def place(self, row: int) -> int:
        """Where the token of a row is among those that were sampled."""
        assert row < len(self.answers), f"the step before has no row {row}"
        assert row in self._places, f"row {row} of the step before sampled nothing"
        return self._places[row]

    def token(self, row: int) -> int:
        """The token of a row; waits for it."""
        self._wait()
        return self.answers[row][0].token

    def result(self) -> StepOutput:
        self._wait()
        return StepOutput(
            step_id=self._step_id,
            sampled=[tokens[0] if tokens else None for tokens in self.answers],
            forks={row: tokens[1:] for row, tokens in enumerate(self.answers) if len(tokens) > 1},
            prompt_logprobs=self.prompt_logprobs,
            duration_s=self._ended.seconds_since(self._started),
        )

    def _wait(self) -> None:
        self._ended.wait()
        if self._fetched_B2 is None:
            return
        best_B = self._fetched_B2[:, 1].view(torch.float32)
        if not best_B.isfinite().all():
            bad = [f"row {row}: {best}" for row, best in zip(self.wanted.sampling, best_B.tolist(), strict=True)]
            raise RuntimeError(
                f"step {self._step_id} failed: logits cannot be sampled where their maximum is not finite "
                f"({', '.join(bad)})"
            )
        for row, token in zip(self.wanted.sampling, self._fetched_B2[:, 0].tolist(), strict=True):
            self.answers[row] = [SampledToken(token, None)]
        self._fetched_B2 = None


class GpuExecutor:
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
        max_captured_rows: int,
    ) -> None:
        """Load the checkpoint in ``folder``, serve it from ``pool``, and capture its decode steps.

        Args:
            max_captured_rows: of the largest decode step that is captured; 0 captures none.
            others: as of `pdserve.model.model_executor.ModelExecutor`.

        Raises:
            ValueError: the weights are unusable or do not match ``config``.
        """
        assert pool.shape == layout.shape, f"pool {pool.shape} is not laid out as {layout.shape}"
        assert pool.dtype == getattr(torch, layout.dtype), f"pool of {pool.dtype} for a layout of {layout.dtype}"
        device, kernels = pool.values.device, select_kernels(pool)
        self._layout = layout
        self._pool = pool
        self._copier = BlockCopier(DeviceBlocks(pool.blocks), swap_slots(num_swap_slots, pool.blocks))
        self._vocab_size = config.shape.vocab_size
        self._model = Decoder(folder, config, getattr(torch, dtype), kernels, quantization)
        self._queue = select_queue(device)
        self._sampling_kernels = select_device_sampling_kernels(device)
        self._sampler = RowSampler()
        # What the step before sampled: where captured steps look for it, but after a step that sampled too many rows.
        self._captured_R = torch.zeros(max(1, max_captured_rows), dtype=torch.int64, device=device)
        self._late_R = self._captured_R
        self._previous: _LaunchedStep | None = None
        self._graphs: DecodeGraphs | None = None
        if device.type != "cpu":
            warm_up(
                self._model,
                pool,
                self._queue,
                self._sampling_kernels,
                vocab_size=self._vocab_size,
                max_rows=max_captured_rows,
            )
        if max_captured_rows and can_capture(kernels):
            self._graphs = DecodeGraphs(
                self._model,
                pool,
                self._queue,
                self._captured_R,
                vocab_size=self._vocab_size,
                max_blocks=min(layout.num_blocks, -(-config.max_context_length // layout.block_size)),
            )

    @property
    def pipeline_depth(self) -> int:
        return 2

    @torch.inference_mode()
    def submit(self, batch: StepBatch) -> StepHandle:
        """Launch the step. Its handle waits for it, and raises if it failed: here, or on the device."""
        previous, self._previous = self._previous, None
        try:
            step = _LaunchedStep(batch.step_id, batch.rows, self._queue.mark())
            self._copier.run(batch)
            fetched_B2 = self._launch(batch.rows, step, previous) if batch.rows else None
            step.end(self._queue.mark(), fetched_B2)
        except Exception as error:  # Whatever it was, it is this step's, and the handle reports it.
            self._queue.mark().wait()  # What was launched of it may write to its blocks, which others get next.
            return FailedStep(batch.step_id, error)
        self._previous = step
        return step

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""

    def _launch(self, rows: list[StepRow], step: _LaunchedStep, previous: _LaunchedStep | None) -> torch.Tensor | None:
        """Launch everything; returns what is on its way to the host."""
        wanted = step.wanted
        sampling = [rows[index] for index in wanted.sampling]
        places = [_place(row, previous) for row in rows]
        draws = plan_draws(sampling, self._vocab_size) if all(map(is_plain, sampling)) else None
        draw_words = np.zeros(0, np.int32) if draws is None else draws.words
        if self._graphs is not None and self._is_captured(rows):
            logits = self._replay(self._graphs, rows, places, draw_words)
        else:
            logits = self._forward(rows, step, places, draw_words)
        if not sampling:
            return None
        token_B = self._late_R[: len(sampling)]
        if draws is not None:
            words = logits.words[len(logits.words) - len(draws.words) :]
            sample_on_device(logits.logits, logits.best, token_B, draws, words, self._sampling_kernels)
            return self._queue.fetch(torch.stack((token_B.int(), logits.best.view(torch.int32)), dim=1))
        answers = self._sampler.sample(logits.logits, sampling, lambda row: _late_token(row, previous))
        for index, tokens in zip(wanted.sampling, answers, strict=True):
            step.answers[index] = tokens
        token_B.copy_(torch.tensor([tokens[0].token for tokens in answers]))
        return None

    def _replay(
        self, graphs: DecodeGraphs, rows: list[StepRow], places: list[int], draw_words: npt.NDArray[np.int32]
    ) -> StepLogits:
        nothing = np.zeros(0, np.int64)
        padding = graphs.padding(len(rows))
        words = pack_step(rows, places, nothing, self._layout, self._vocab_size, padding)
        return graphs.run(_with_draws(words, draw_words), len(rows))

    def _forward(
        self, rows: list[StepRow], step: _LaunchedStep, places: list[int], draw_words: npt.NDArray[np.int32]
    ) -> StepLogits:
        """Kernel by kernel, for rows of any kind; leaves the likeliest tokens where a replay does."""
        wanted = step.wanted.tokens(rows)
        words = pack_step(rows, places, wanted, self._layout, self._vocab_size)
        there = self._queue.put(_with_draws(words, draw_words))
        num_new = [row.num_new_tokens for row in rows]
        shape = StepShape(len(rows), sum(num_new), len(wanted), min(num_new), max(num_new))
        tensors = StepTensors.of(there[: len(words)], shape)
        tokens_T = tensors.known_tokens(self._late_R)
        hidden_WE = self._model.forward(tokens_T, self._pool, tensors.metadata, tensors.wanted)
        hidden_BE, prompts = step.wanted.split(hidden_WE, rows)
        for index, hidden_TE in zip(step.wanted.asking, prompts, strict=True):
            step.prompt_logprobs[index] = logprobs_in_pieces(
                self._model.logits, hidden_TE, rows[index].prompt_targets, rows[index].num_prompt_logprobs
            )
        logits_BV = self._model.logits(hidden_BE)
        best_B, self._late_R = logits_BV.max(dim=-1)
        if len(self._late_R) <= len(self._captured_R):
            self._captured_R[: len(self._late_R)] = self._late_R
            self._late_R = self._captured_R
        return StepLogits(logits_BV, best_B, there)

    def _is_captured(self, rows: Sequence[StepRow]) -> bool:
        """Whether the step decodes, and nothing else."""
        has_room = len(rows) <= len(self._captured_R) and self._late_R is self._captured_R
        return has_room and all(
            row.num_new_tokens == 1 and row.sample is not None and not row.prompt_targets for row in rows
        )


def can_capture(kernels: DecoderKernels) -> bool:
    """Whether decode steps may be captured: on a CPU, where a replay is the computation itself, always."""
    return kernels.is_capturable or kernels.device.type == "cpu"


def _with_draws(words: npt.NDArray[np.int32], draw_words: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """A step and its draws, which begin at a multiple of 8 bytes."""
    return np.concatenate((words, np.zeros(len(words) % 2, np.int32), draw_words))


def _place(row: StepRow, previous: _LaunchedStep | None) -> int:
    """Of its last token among those that the step before sampled; -1 where it is known."""
    if row.previous_row < 0:
        return -1
    assert previous is not None, f"the step before has no row {row.previous_row}"
    return previous.place(row.previous_row)


def _late_token(row: int, previous: _LaunchedStep | None) -> int:
    assert previous is not None
    return previous.token(row)
