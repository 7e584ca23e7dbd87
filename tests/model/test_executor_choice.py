from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.kernels.kv_pool import KvPool
from pdserve.model import executor_choice
from pdserve.model.config import DecoderConfig
from pdserve.model.executor_choice import build_executor
from pdserve.model.model_executor import ModelExecutor
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import write_checkpoint


def test_a_pool_on_a_cpu_and_one_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig.from_folder(write_checkpoint(tmp_path))
    layout = config.kv_layout(4, 8, "float32", "hash")
    pool = nan_pool(layout.shape)
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(executor_choice, "GpuExecutor", lambda **options: asked.append(options))

    def build(pool: KvPool) -> object:
        return build_executor(
            folder=tmp_path,
            config=config,
            layout=layout,
            pool=pool,
            dtype="float32",
            num_swap_slots=2,
            max_captured_rows=7,
        )

    assert isinstance(build(pool), ModelExecutor)
    elsewhere = KvPool(pool.blocks.flatten().to("meta"), layout.shape, pool.dtype)
    build(elsewhere)
    [options] = asked
    assert options["pool"] is elsewhere
    assert (options["max_captured_rows"], options["num_swap_slots"], options["quantization"]) == (7, 2, "none")
