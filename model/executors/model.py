"""The executor that computes a real model: packs each step once, launches it, and samples.

The engine's step loop submits batches. One H2D copy carries all inputs of a step, and one D2H copy returns the sampled
tokens; the next step reads tokens that the scheduler does not know yet from the device. On a GPU, two steps are in
flight; on a CPU, a step is computed when `ModelExecutor.submit` returns. Decode-only batches replay captured steps
(`pdserve.model.executors.decode_graphs`); others launch kernel by kernel. Receives block tables, never touches the
block pool's bookkeeping. The caller sets thread counts. With several ranks this one leads: the others compute the steps
that it sends (`pdserve.model.executors.rank_model`). A pipeline has an executor for each micro-batch, each on a thread
of its own, with one step in flight; they take turns in the leader's stage. On a GPU all use one stream there, and each
another aside, where it waits for its logits and samples while the next one's step is in the stage.

Shape suffixes: B rows that a step samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import accumulate, takewhile
from math import isfinite
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.step import (
    RankLostError,
    SampledToken,
    StepBatch,
    StepHandle,
    StepOutput,
    StepRow,
    TokenLogprobs,
)
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.selection import select_sampling_kernels
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.decoder.ranks import ONE_RANK, Ranks
from pdserve.model.executors.device_queue import Event
from pdserve.model.executors.drafting import Drafter, num_right, with_guesses
from pdserve.model.executors.rank_model import PackedStep, RankModel
from pdserve.model.executors.step_inputs import OutputRows, StepShape, pack_step
from pdserve.model.sampling.grammars import GrammarMatchers
from pdserve.model.sampling.logprobs import logprobs_in_pieces
from pdserve.model.sampling.sampling import Sampler, plan_draws


class _LaunchedStep:
    """Handle of a step in flight or of one whose launch failed; the next step reads its tokens."""

    def __init__(self, step_id: int, rows: list[StepRow], started: Event, guessing_s: float = 0.0) -> None:
        self._step_id = step_id
        self._guessing_s = guessing_s
        self._rows = rows
        self._started = self._ended = started
        self._fetched_B2: torch.Tensor | None = None
        self._tokens: list[int] = []
        self._unfit: dict[int, float] = {}
        """Highest logits that are not finite, by index in the sampled tokens."""
        self._error: Exception | None = None
        self.outputs = OutputRows.of(rows)
        ends = accumulate((1 + len(rows[row].guesses) for row in self.outputs.sampling), initial=0)
        self._indices = dict(zip(self.outputs.sampling, ends, strict=False))
        """Where the tokens of each row begin among the sampled ones: the one after its last token first."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        """Keyed by index in the sampled tokens."""
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.inputs: torch.Tensor | None = None
        """Kept for as long as the step is in flight: a stream other than their own may read them."""

    def begin(self, started: Event) -> None:
        """Count the step's duration from now on."""
        self._started = started

    def end(self, ended: Event, fetched_B2: torch.Tensor | None) -> None:
        """Mark the step as completely launched.

        Args:
            fetched_B2: int32: the sampled tokens, and the bits of each one's highest logit; None if no row samples.
        """
        self._ended = ended
        self._fetched_B2 = fetched_B2

    def fail(self, error: Exception) -> None:
        self._error = error

    def index(self, row: int) -> int:
        """Index of a row's token among the sampled tokens."""
        self._check_launched()
        assert row < len(self._rows), f"the step before has no row {row}"
        assert row in self._indices, f"row {row} of the step before sampled nothing"
        return self._indices[row]

    def token(self, row: int) -> int:
        """Wait for the step and return a row's token, which is arbitrary if the row failed."""
        self._wait()
        return self._tokens[self.index(row)]

    def result(self) -> StepOutput:
        self._wait()
        output = StepOutput(
            step_id=self._step_id,
            sampled=[None] * len(self._rows),
            prompt_logprobs=self.prompt_logprobs,
            guessing_s=self._guessing_s,
            duration_s=self._started.elapsed_time(self._ended) / 1000,
        )
        for row, index in self._indices.items():
            if index in self._unfit:
                value = self._unfit[index]
                output.failed[row] = f"logits that are not finite cannot be sampled: the highest is {value}"
                continue
            output.sampled[row] = self._sampled(index)
            if guesses := self._rows[row].guesses:
                end = index + 1 + num_right(guesses, self._tokens[index:])
                output.num_guesses[row] = len(guesses)
                if self._rows[row].is_forced:
                    output.forced.add(row)
                output.more[row] = [*map(self._sampled, takewhile(self._is_fit, range(index + 1, end)))]
        return output

    def _sampled(self, index: int) -> SampledToken:
        return SampledToken(self._tokens[index], self.logprobs.get(index))

    def _is_fit(self, index: int) -> bool:
        return index not in self._unfit

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
            self._unfit = {index: value for index, value in enumerate(best) if not isfinite(value)}
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
        matchers: GrammarMatchers | None = None,
        drafter: Drafter | None = None,
        ranks: Ranks = ONE_RANK,
        send: Callable[[PackedStep], None] | None = None,
    ) -> None:
        """Load the checkpoint in ``folder`` to the pool's device and capture its decode steps.

        Args:
            layout: layout of all ranks' pool, for the model that ``config`` describes.
            pool: this rank's heads of it, and all layers or its own; the executor writes new tokens' KV to it.
            precision: of weights and activations; the KV dtype is the layout's.
            num_swap_slots: host slots of each micro-batch for blocks of preempted sequences.
            max_captured_rows: rows of the largest captured decode step; 0 captures none.
            matchers: match the answers of rows with grammars; ``None`` if there are none.
            drafter: guesses tokens; ``None`` if no row has guesses.
            ranks: share the model; this one is the leader.
            send: sends a step to the other ranks; ``None`` without them.

        Raises:
            ValueError: unusable weights, or weights that do not match ``config``.
        """
        assert pool.dtype == getattr(torch, layout.dtype), f"pool of {pool.dtype} for a layout of {layout.dtype}"
        self._layout = layout
        self._vocab_size = config.shape.vocab_size
        self._send = send
        self._model = RankModel(
            folder=folder,
            config=config,
            layout=layout,
            pool=pool,
            precision=precision,
            num_swap_slots=num_swap_slots,
            max_captured_rows=max_captured_rows,
            ranks=ranks,
        )
        self._sampling_kernels = select_sampling_kernels(pool.values.device)
        self._sampler = Sampler(self._sampling_kernels, matchers)
        self._drafter = drafter
        self._previous: _LaunchedStep | None = None
        self._micro_batch = 0
        self._turn = Lock()
        """Held in the leader's stage of a pipeline, so that all ranks compute the steps in the same order; between
        devices until all of the step is launched (`pdserve.kernels.torch.ranks` says why)."""
        self._aside = self._new_aside()

    def for_micro_batch(
        self, number: int, matchers: GrammarMatchers | None, drafter: Drafter | None = None
    ) -> ModelExecutor:
        """Executor of another micro-batch of the pipeline, for another thread; shares model and pool with this one."""
        other = copy(self)
        other._micro_batch = number
        other._aside = self._new_aside()
        other._sampler = Sampler(self._sampling_kernels, matchers)
        other._drafter = drafter
        return other

    def _new_aside(self) -> AbstractContextManager[object]:
        return self._model.queue.aside() if self._model.place.pipeline_parallel > 1 else nullcontext()

    @property
    def pipeline_depth(self) -> int:
        return self._model.pipeline_depth

    @torch.inference_mode()
    def submit(self, batch: StepBatch) -> StepHandle:
        """Launch the step. The handle waits for it, and raises if the launch or the computation failed."""
        queue = self._model.queue
        rows, guessing_s, no_guess = with_guesses(batch, self._drafter, self._sampler.matchers)
        started = queue.event()
        previous, self._previous = self._previous, _LaunchedStep(batch.step_id, rows, started, guessing_s)
        step = self._previous
        with self._aside:
            try:
                self._launch_copies(batch)
                if no_guess is not None:
                    raise no_guess
                fetched_B2 = self._launch(rows, step, previous) if rows else None
                step.end(queue.event(), fetched_B2)
            except RankLostError:
                raise
            except Exception as error:  # The handle reports any error of this step.
                queue.event().synchronize()  # Launched kernels may still write to blocks that the caller frees.
                step.fail(error)
        return step

    def close(self) -> None:
        """Do nothing: memory is freed with the object."""

    def _launch_copies(self, batch: StepBatch) -> None:
        """Launch a step's block copies, on every rank with a pool of its own."""
        if not (batch.swap_outs or batch.swap_ins):
            return
        model, micro_batch = self._model, self._micro_batch
        with self._turn:
            with model.queue.in_turn():
                model.copy_blocks(batch, micro_batch)
            if model.has_own_pool and self._send is not None:
                outs, ins = tuple(batch.swap_outs), tuple(batch.swap_ins)
                with _out_of_step():
                    self._send(PackedStep(micro_batch=micro_batch, swap_outs=outs, swap_ins=ins))
                    model.end_copies(micro_batch)

    def _launch(self, rows: list[StepRow], step: _LaunchedStep, previous: _LaunchedStep | None) -> torch.Tensor | None:
        """Launch a step's rows; return the tensor that receives tokens and highest logits on the host."""
        outputs, model = step.outputs, self._model
        sampled = outputs.sampled(rows)
        sampling = [row for row, _ in sampled]
        draws = plan_draws(sampling, self._vocab_size, [number for _, number in sampled])
        packed = self._pack(rows, outputs, len(sampling), previous, draws.words)
        with _out_of_step() if self._send is not None else nullcontext(), ExitStack() as turn:
            turn.enter_context(self._turn)
            with model.queue.in_turn():
                if model.place.pipeline_parallel > 1:
                    step.begin(model.queue.event())
                if self._send is not None:
                    self._send(packed)
                begun = model.begin(packed)
            if not model.has_own_pool:
                turn.close()  # a receiver waits for its own micro-batch's messages only
            computed = model.end(packed, begun)
            step.inputs = computed.inputs
            logits_of = partial(model.logits, micro_batch=self._micro_batch)
            for index, hidden_TE in zip(outputs.asking, computed.prompts, strict=True):
                row = rows[index]
                step.prompt_logprobs[index] = logprobs_in_pieces(
                    logits_of, hidden_TE, row.prompt_targets, row.num_prompt_logprobs
                )
        if not sampling:
            return None
        assert computed.logits is not None
        assert computed.best is not None
        assert computed.tokens is not None
        token_B = computed.tokens

        def previous_token(row: int) -> int:
            assert previous is not None
            return previous.token(row)

        words = computed.inputs[len(packed.words) - len(draws.words) : len(packed.words)]
        try:
            best_B, step.logprobs = self._sampler.sample(
                computed.logits, computed.best, token_B, sampling, draws, words, previous_token
            )
        finally:
            with _out_of_step():
                model.share_tokens(token_B)  # the other ranks wait for them even if the step has failed
        return model.queue.fetch(torch.stack((token_B.int(), best_B.view(torch.int32)), dim=1))

    def _pack(
        self,
        rows: list[StepRow],
        outputs: OutputRows,
        num_sampling: int,
        previous: _LaunchedStep | None,
        draws: npt.NDArray[np.int32],
    ) -> PackedStep:
        tokens_O, num_new = outputs.tokens(rows), [row.num_new_tokens for row in rows]
        previous_indices = [_previous_index(row, previous) for row in rows]
        padding = self._model.padding(len(rows), outputs.is_decode)
        return PackedStep(
            words=pack_step(
                rows,
                previous_indices,
                tokens_O,
                self._layout,
                self._vocab_size,
                num_padding=padding or 0,
                draws=draws,
            ),
            shape=StepShape.of(num_new, len(tokens_O)),
            num_sampling=num_sampling,
            prompt_lengths=tuple(len(rows[index].prompt_targets) for index in outputs.asking),
            is_decode=outputs.is_decode,
            has_late_tokens=max(previous_indices) >= 0,
            is_captured=padding is not None,
            micro_batch=self._micro_batch,
        )


@contextmanager
def _out_of_step() -> Iterator[None]:
    """Raise `RankLostError` for an error between the ranks' collectives: the others wait for this one."""
    try:
        yield
    except Exception as error:
        raise RankLostError(f"the ranks are out of step: {error}") from error


def _previous_index(row: StepRow, previous: _LaunchedStep | None) -> int:
    """Index of the row's last token among those that the previous step sampled; -1 if the host knows it."""
    if row.previous_row < 0:
        return -1
    assert previous is not None, f"the step before has no row {row.previous_row}"
    return previous.index(row.previous_row)
