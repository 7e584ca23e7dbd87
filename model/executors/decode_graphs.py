"""Captured decode steps of some batch sizes, and a warm-up of all other steps.

Owned by `pdserve.model.executors.model`. A captured step costs the host one copy and one replay. A batch takes the
smallest captured size that holds it, with padding rows that read and write no KV. A replay's addresses are fixed, and
its launches depend only on its size.

Shape suffixes: R rows of the largest size, B rows of the batch, V vocabulary.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepRow
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import SHORT_TOKENS
from pdserve.kernels.operations import SamplingKernels
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.executors.device_queue import DeviceQueue
from pdserve.model.executors.step_inputs import StepShape, StepTensors, decode_shape, num_input_words
from pdserve.model.sampling.sampling import MAX_DRAW_WORDS, draw_into, plan_draws

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8

_FEW_TOKENS = (1, 16, 32, 64)
"""1 is the rest of a prompt whose blocks are cached; its attention runs as for decode rows."""
_MANY_TOKENS = 128
_ROWS = 16
"""Steps of fewer rows launch the same kernels."""
_PROMPTS = 256
"""Prompts in one step, at least, where fewer rows decode together."""

_log = logging.getLogger(__name__)


def capture_sizes(max_rows: int) -> list[int]:
    """Captured batch sizes, ascending; a step has at most 7 rows of padding."""
    sizes = [*_SMALL_SIZES, *range(_SIZE_STEP, max_rows, _SIZE_STEP)]
    return [*(size for size in sizes if size < max_rows), max_rows]


class DecodeGraphs:
    """Captured decode steps of one model over one pool."""

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        queue: DeviceQueue,
        sampled_R: torch.Tensor,
        *,
        vocab_size: int,
        max_blocks: int,
    ) -> None:
        """Capture all sizes, the largest first; the others then find enough memory.

        Args:
            sampled_R: int64: tokens of the previous step; a replay overwrites them with its likeliest tokens.
            max_blocks: upper limit of one row's blocks.
        """
        max_rows, device = len(sampled_R), sampled_R.device
        self._model = model
        self._pool = pool
        self._queue = queue
        self._sampled_R = sampled_R
        self._sizes = capture_sizes(max_rows)
        self._max_block_ids = max_rows * max_blocks
        num_words = num_input_words(decode_shape(max_rows), self._max_block_ids) + 1 + MAX_DRAW_WORDS * max_rows
        # All rows of it are padding.
        self.inputs = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._best_R = torch.zeros(max_rows, device=device)
        self._logits_RV = torch.zeros((max_rows, vocab_size), device=device)
        self._replays = {}
        for index, size in enumerate(reversed(self._sizes), 1):
            self._replays[size] = queue.capture(partial(self._compute, size))
            _log.info("captured the decode step of %d rows, %d of %d sizes", size, index, len(self._sizes))

    def padding(self, num_rows: int) -> int:
        """Padding rows of a batch."""
        return self._sizes[bisect_left(self._sizes, num_rows)] - num_rows

    def run(self, packed: npt.NDArray[np.int32], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a decode step; return its logits, float32 ``[B, V]``, and the highest of each row (or NaN), ``[B]``.

        Both are valid until the next replay.

        Args:
            packed: `pdserve.model.executors.step_inputs.pack_step` of ``num_rows`` rows, `padding` and draws; copied to
                `inputs`.
        """
        assert len(packed) <= len(self.inputs), f"{len(packed)} words for a decode step of {num_rows} rows"
        self._queue.put(packed, self.inputs)
        self._replays[num_rows + self.padding(num_rows)]()
        return self._logits_RV[:num_rows], self._best_R[:num_rows]

    def _compute(self, size: int) -> None:
        shape = decode_shape(size)
        step = StepTensors.of(self.inputs[: num_input_words(shape, self._max_block_ids)], shape)
        hidden_BE = self._model.forward(step.known_tokens(self._sampled_R), self._pool, step.metadata)
        logits_BV = self._model.logits(hidden_BE, self._logits_RV[:size])
        torch.max(logits_BV, dim=-1, out=(self._best_R[:size], self._sampled_R[:size]))


def warmup_shapes(max_rows: int) -> list[StepShape]:
    """Steps to warm up: single prompt chunks, and a chunk with up to ``max_rows`` or `_PROMPTS` other rows, which have
    one new token or, with guesses or at the end of a prompt, several."""
    alone = [StepShape.of([tokens], 1) for tokens in (*_FEW_TOKENS, _MANY_TOKENS)]
    sizes = [_ROWS]
    while sizes[-1] < max(max_rows, _PROMPTS):
        sizes.append(2 * sizes[-1])
    others = [(size, short) for size in sizes for short in (1, SHORT_TOKENS)]
    return [*alone, *(StepShape(size, size + _MANY_TOKENS, 1, 1, _MANY_TOKENS, short) for size, short in others)]


def warm_up(
    model: Decoder, pool: KvPool, queue: DeviceQueue, kernels: SamplingKernels, *, vocab_size: int, max_rows: int
) -> None:
    """Launch every kernel variant of steps that are not captured, so that no request waits for compilation.

    Variants depend on the numbers of rows, tokens and queries in powers of two. All rows are padding and touch no KV.

    Args:
        max_rows: rows that decode together.
    """
    for shape in warmup_shapes(max_rows):
        inputs = torch.zeros(num_input_words(shape, 0), dtype=torch.int32, device=pool.values.device)
        step = StepTensors.of(inputs, shape)
        hidden_OE = model.forward(step.tokens.long(), pool, step.metadata, step.outputs)
        if model.has_logits:
            logits_OV = model.logits(hidden_OE)
    if not model.has_logits:
        return
    draws = plan_draws([_DRAWN], vocab_size)
    best_O, token_O = logits_OV.max(dim=-1)
    draw_into(token_O, logits_OV, best_O, draws, queue.put(draws.words), kernels)


_DRAWN = StepRow(
    sequence_id=0, tokens=(0,), cached_length=0, block_table=(), sample=SamplingParams(top_k=2, top_p=0.5, min_p=0.1)
)
