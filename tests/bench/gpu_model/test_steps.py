from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.bench.gpu_model.steps import OwnModel, Variant, noise_pool
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import StepBatch, StepHandle
from pdserve.model.executors.model import ModelExecutor

CPU = torch.device("cpu")
FLOAT32 = Variant(dtype="float32")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_steps_are_timed_as_the_step_loop_submits_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    batches: list[StepBatch] = []
    submit = ModelExecutor.submit

    def listen(executor: ModelExecutor, batch: StepBatch) -> StepHandle:
        batches.append(batch)
        return submit(executor, batch)

    monkeypatch.setattr(ModelExecutor, "submit", listen)
    model = OwnModel(tiny, Variant(dtype="float32", kv_dtype=kv_dtype), CPU, num_blocks=15, max_rows=3)
    seconds = model.decode(3, 80, 5)
    assert min(seconds) > 0
    assert [len(batch.rows) for batch in batches] == [3] * 9
    assert [batch.rows[2].cached_length for batch in batches] == list(range(71, 80))
    assert [row.previous_row for row in batches[1].rows] == [0, 1, 2]
    used = [block for row in batches[0].rows for block in row.block_table]
    assert sorted(used) == list(range(15))
    assert used != sorted(used)
    batches.clear()
    assert min(model.prefill(40, 3)) > 0
    assert [batch.num_new_tokens for batch in batches] == [40] * 7
    model.step_once(2, 17)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_noise_is_finite_and_not_zero(dtype: str) -> None:
    layout = KvLayout(
        num_blocks=40, num_kv_heads=2, num_layers=2, block_size=16, head_dim=16, dtype=dtype, model_hash=""
    )
    pool = noise_pool(layout, CPU)
    values = pool.values.float()
    assert values.isfinite().all()
    assert values.std() > 0.1
    if pool.scales is not None:
        assert (values * pool.scales[..., None]).abs().max() <= 1
