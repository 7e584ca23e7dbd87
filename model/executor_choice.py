"""Which executor computes a model: decided by the device that the KV pool lies on. Called where a worker is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import Executor
from pdserve.kernels.kv_pool import KvPool
from pdserve.model.config import DecoderConfig
from pdserve.model.gpu_executor import GpuExecutor
from pdserve.model.model_executor import ModelExecutor


def build_executor(
    *,
    folder: Path,
    config: DecoderConfig,
    layout: KvLayout,
    pool: KvPool,
    dtype: str,
    quantization: str = "none",
    num_swap_slots: int = 0,
    max_captured_rows: int,
) -> Executor:
    """The executor for ``pool``, whose weights are loaded to the pool's device; see both executors.

    Args:
        max_captured_rows: of `GpuExecutor`.
    """
    executor: Callable[..., Executor] = ModelExecutor
    if pool.values.device.type != "cpu":
        executor = partial(GpuExecutor, max_captured_rows=max_captured_rows)
    return executor(
        folder=folder,
        config=config,
        layout=layout,
        pool=pool,
        dtype=dtype,
        quantization=quantization,
        num_swap_slots=num_swap_slots,
    )
