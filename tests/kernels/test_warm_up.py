"""The warm-up launches every variant of attention that steps do: what else depends on a batch compiles nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import pytest
import torch

from pdserve.kernels.kv_pool import KvPool, KvPoolShape
from pdserve.kernels.metadata import SHORT_TOKENS
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton import decode_attention, prefill_attention
from pdserve.kernels.triton.attention import paged_attention
from pdserve.model.executors.decode_graphs import warmup_shapes
from pdserve.model.executors.step_inputs import StepShape, StepTensors, num_input_words

MODULES = {"_chunk_kernel": decode_attention, "_merge_kernel": decode_attention, "_prefill_kernel": prefill_attention}


class Variants:
    """Stands in for a kernel, and takes note of what makes other code of it."""

    def __init__(self, name: str, seen: set[tuple[str, object]]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            constants = {key: value for key, value in options.items() if key.isupper()}
            self._seen.add((self._name, tuple(sorted(constants.items()))))

        return launch


def launch(
    shapes: Iterable[StepShape], group: int, seen: set[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> set[tuple[str, object]]:
    """Variants of attention in steps of such shapes."""
    for name, module in MODULES.items():
        monkeypatch.setattr(module, name, Variants(name, seen))
    pool_shape = KvPoolShape(2, 2, 1, 2, 16, 64)
    pool = KvPool(torch.zeros(2 * 2 * 2 * 16 * 64 * 2, dtype=torch.uint8), pool_shape, torch.bfloat16)
    for shape in shapes:
        metadata = StepTensors.of(torch.zeros(num_input_words(shape, 0), dtype=torch.int32), shape).metadata
        q_TND = torch.zeros(shape.num_tokens, 2 * group, 64, dtype=torch.bfloat16)
        paged_attention(q_TND, pool, 0, metadata, AttentionRule(scale=1.0))
    return seen


@pytest.mark.parametrize("group", [1, 4, 5, 8, 40])
def test_no_step_compiles_attention(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows with and without guesses, alone as in a pipeline, and beside prompts."""
    warmed = launch(warmup_shapes(64), group, set(), monkeypatch)
    counts = [
        [short] * rows + [long] * (long > 0)
        for rows, short, long in product((1, 2, 16, 17, 33, 65, 129, 255), range(1, SHORT_TOKENS + 1), (0, 9, 500))
    ]
    served = launch([StepShape.of(each, 1) for each in counts], group, set(), monkeypatch)
    assert {name for name, _ in warmed} == set(MODULES)
    assert served <= warmed
