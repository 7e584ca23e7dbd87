"""Steps of padding only, launched once before a worker serves, so that no request waits for a kernel to be compiled.

Called by `pdserve.model.gpu_executor`. How a kernel is compiled depends on how many rows, tokens or queries a step has,
in powers of two: these steps have as many as there are ways. They read and write no KV.
"""

from __future__ import annotations

import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepRow
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DeviceSamplingKernels
from pdserve.model.decoder import Decoder
from pdserve.model.device_queue import DeviceQueue
from pdserve.model.device_sampling import plan_draws, sample_on_device
from pdserve.model.step_inputs import StepShape, StepTensors, num_step_words

_FEW_TOKENS = (1, 16, 32, 64)
"""One is what is left of a prompt whose blocks are cached: its attention is the short rows'."""
_MANY_TOKENS = 128
_ROWS = 16
"""Steps of fewer rows launch what those of so many do."""
_PROMPTS = 64
"""That a step may well hold, some of them short, where few rows or none are captured."""


def warmup_shapes(max_rows: int) -> list[StepShape]:
    """Chunks of prompts alone, of few tokens and of many, and beside up to ``max_rows`` others, or `_PROMPTS`."""
    alone = [StepShape(1, tokens, 1, tokens, tokens) for tokens in (*_FEW_TOKENS, _MANY_TOKENS)]
    sizes = [_ROWS]
    while sizes[-1] < max(max_rows, _PROMPTS):
        sizes.append(2 * sizes[-1])
    return [*alone, *(StepShape(size, size + _MANY_TOKENS, 1, 1, _MANY_TOKENS) for size in sizes)]


def warm_up(
    model: Decoder, pool: KvPool, queue: DeviceQueue, kernels: DeviceSamplingKernels, *, vocab_size: int, max_rows: int
) -> None:
    """Launch what steps that are not captured may launch.

    Args:
        max_rows: that decode together.
    """
    for shape in warmup_shapes(max_rows):
        words = torch.zeros(num_step_words(shape, 0), dtype=torch.int32, device=pool.values.device)
        step = StepTensors.of(words, shape)
        hidden_WE = model.forward(step.tokens.long(), pool, step.metadata, step.wanted)
        logits_WV = model.logits(hidden_WE)
    draws = plan_draws([_DRAWN], vocab_size)
    best_W, token_W = logits_WV.max(dim=-1)
    sample_on_device(logits_WV, best_W, token_W, draws, queue.put(draws.words), kernels)


_DRAWN = StepRow(
    sequence_id=0,
    tokens=(0,),
    cached_length=0,
    block_table=(),
    sample=SamplingParams(top_k=2, top_p=0.5, min_p=0.1),
)
