"""Decode steps of some batch sizes, each captured once, so that a step is one copy, one replay, and little for the
host; and a warm-up of the steps that are not captured.

Owned by `pdserve.model.executors.model`. A batch takes the smallest captured size that holds it; the rest of that is
padding, which reads and writes no KV. The addresses that a replay reads and writes are fixed, and its launches follow
from its size alone.

Shape suffixes: R rows of the largest size, V vocabulary.
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
from pdserve.kernels.operations import SamplingKernels
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.executors.device_queue import DeviceQueue
from pdserve.model.executors.step_inputs import StepShape, StepTensors, decode_shape, num_input_words
from pdserve.model.sampling.sampling import MAX_DRAW_WORDS, draw_into, plan_draws

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8

_FEW_TOKENS = (1, 16, 32, 64)
"""One is left of a prompt whose blocks are cached: its attention is that of short rows."""
_MANY_TOKENS = 128
_ROWS = 16
"""Steps of fewer rows launch the same."""
_PROMPTS = 64
"""Prompts that a step may well hold, some of them short, where few rows or none are captured."""

_log = logging.getLogger(__name__)


def capture_sizes(max_rows: int) -> list[int]:
    """Ascending up to the largest: at most 7 rows of a step are padding."""
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
        """Capture all sizes, the largest first, whose memory the others then find enough.

        Args:
            sampled_R: int64: the tokens of the previous step, and after a replay the likeliest ones of its own.
            max_blocks: of one row.
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
        """Rows to be added to a batch for `run`."""
        return self._sizes[bisect_left(self._sizes, num_rows)] - num_rows

    def run(self, packed: npt.NDArray[np.int32], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a decode step, and return its logits, float32 ``[B, V]``, and the highest of each row, ``[B]``: NaN
        where one of them is. Both are valid until the next replay.

        Args:
            packed: `pdserve.model.executors.step_inputs.pack_step` of ``num_rows`` rows, their `padding` and draws; on
                the device they are in `inputs`.
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
    """Chunks of prompts alone, of few tokens and of many; and chunks with up to ``max_rows`` others, or `_PROMPTS`."""
    alone = [StepShape(1, tokens, 1, tokens, tokens) for tokens in (*_FEW_TOKENS, _MANY_TOKENS)]
    sizes = [_ROWS]
    while sizes[-1] < max(max_rows, _PROMPTS):
        sizes.append(2 * sizes[-1])
    return [*alone, *(StepShape(size, size + _MANY_TOKENS, 1, 1, _MANY_TOKENS) for size in sizes)]


def warm_up(
    model: Decoder, pool: KvPool, queue: DeviceQueue, kernels: SamplingKernels, *, vocab_size: int, max_rows: int
) -> None:
    """Launch whatever steps that are not captured may launch, so that no request waits for a kernel to be compiled.

    How a kernel is compiled depends on how many rows, tokens or queries a step has, in powers of two: these steps, of
    padding only, have as many as there are ways. They read and write no KV.

    Args:
        max_rows: that decode together.
    """
    for shape in warmup_shapes(max_rows):
        inputs = torch.zeros(num_input_words(shape, 0), dtype=torch.int32, device=pool.values.device)
        step = StepTensors.of(inputs, shape)
        hidden_OE = model.forward(step.tokens.long(), pool, step.metadata, step.outputs)
        logits_OV = model.logits(hidden_OE)
    draws = plan_draws([_DRAWN], vocab_size)
    best_O, token_O = logits_OV.max(dim=-1)
    draw_into(token_O, logits_OV, best_O, draws, queue.put(draws.words), kernels)


_DRAWN = StepRow(
    sequence_id=0,
    tokens=(0,),
    cached_length=0,
    block_table=(),
    sample=SamplingParams(top_k=2, top_p=0.5, min_p=0.1),
)
