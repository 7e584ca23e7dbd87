"""Decode steps of a ladder of batch sizes, each captured once: a step is one copy, one replay, and little for the host.

Owned by `pdserve.model.gpu_executor`. A batch takes the smallest captured size that holds it; what is left of that is
padding, which reads and writes no KV. What a replay reads and writes lies at fixed places, and what it launches follows
from its size alone.

Shape suffixes: R rows of the largest size, V vocabulary.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.kernels.kv_pool import KvPool
from pdserve.model.decoder import Decoder
from pdserve.model.device_queue import DeviceQueue
from pdserve.model.device_sampling import DRAW_WORDS
from pdserve.model.step_inputs import StepTensors, decode_shape, num_step_words

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8

_log = logging.getLogger(__name__)


class StepLogits(NamedTuple):
    """What a forward leaves of the rows that sample. Of a replay it is valid until the next one."""

    logits: torch.Tensor
    """float32 ``[B, V]``."""
    best: torch.Tensor
    """float32 ``[B]``: the highest of each row; NaN where one of them is."""
    words: torch.Tensor
    """The packed step on the device."""


def ladder(max_rows: int) -> list[int]:
    """Sizes up to the largest, ascending: at most 7 rows of a step are padding."""
    sizes = [*_SMALL_SIZES, *range(_SIZE_STEP, max_rows, _SIZE_STEP)]
    return [*(size for size in sizes if size < max_rows), max_rows]


class DecodeGraphs:
    """Captured decode steps of one model over one pool."""

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        queue: DeviceQueue,
        late_R: torch.Tensor,
        *,
        vocab_size: int,
        max_blocks: int,
    ) -> None:
        """Capture all sizes, the largest first, whose memory the others then find enough.

        Args:
            late_R: int64: the tokens that the step before sampled, and after a replay the likeliest ones of its own.
            max_blocks: of one row.
        """
        max_rows, device = len(late_R), late_R.device
        self._model = model
        self._pool = pool
        self._queue = queue
        self._late_R = late_R
        self._sizes = ladder(max_rows)
        self._max_block_ids = max_rows * max_blocks
        num_words = num_step_words(decode_shape(max_rows), self._max_block_ids) + 1 + DRAW_WORDS * max_rows
        # All rows of it are padding.
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._best_R = torch.zeros(max_rows, device=device)
        self._logits_RV = torch.zeros((max_rows, vocab_size), device=device)
        self._replays = {}
        for index, size in enumerate(reversed(self._sizes), 1):
            self._replays[size] = queue.capture(partial(self._compute, size))
            _log.info("captured the decode step of %d rows, %d of %d sizes", size, index, len(self._sizes))

    def padding(self, num_rows: int) -> int:
        """Rows to be added to a batch for `run`."""
        return self._sizes[bisect_left(self._sizes, num_rows)] - num_rows

    def run(self, words: npt.NDArray[np.int32], num_rows: int) -> StepLogits:
        """Launch a decode step.

        Args:
            words: of `pdserve.model.step_inputs.pack_step` for ``num_rows`` and their `padding`, and the draws.
        """
        size = num_rows + self.padding(num_rows)
        assert len(words) <= len(self._words), f"{len(words)} words for a decode step of {num_rows} rows"
        there = self._queue.put(words, self._words)
        self._replays[size]()
        return StepLogits(self._logits_RV[:num_rows], self._best_R[:num_rows], there)

    def _compute(self, size: int) -> None:
        shape = decode_shape(size)
        step = StepTensors.of(self._words[: num_step_words(shape, self._max_block_ids)], shape)
        hidden_BE = self._model.forward(step.known_tokens(self._late_R), self._pool, step.metadata)
        logits_BV = self._model.logits(hidden_BE, self._logits_RV[:size])
        torch.max(logits_BV, dim=-1, out=(self._best_R[:size], self._late_R[:size]))
