"""Steps of padding only: every shape of a step is met, and nothing is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import CPU_KERNELS, TORCH_DEVICE_SAMPLING, TORCH_KERNELS
from pdserve.model.config import DecoderConfig
from pdserve.model.decoder import Decoder
from pdserve.model.warmup import warm_up, warmup_shapes
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import write_checkpoint
from tests.model.late_queue import LateQueue


def test_shapes_double_up_to_the_largest_batch() -> None:
    assert [shape.num_rows for shape in warmup_shapes(0)] == [1, 1, 1, 1, 1, 16, 32, 64]
    assert [shape.num_rows for shape in warmup_shapes(256)] == [1, 1, 1, 1, 1, 16, 32, 64, 128, 256]
    assert [shape.num_rows for shape in warmup_shapes(100)][5:] == [16, 32, 64, 128]
    assert [shape.num_tokens for shape in warmup_shapes(0)] == [1, 16, 32, 64, 128, 144, 160, 192]


@pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])
def test_the_pool_stays_as_it_was(tmp_path: Path, kernels: DecoderKernels) -> None:
    folder = write_checkpoint(tmp_path)
    config = DecoderConfig.from_folder(folder)
    pool = nan_pool(config.kv_layout(2, 8, "float32", "hash").shape)
    before, queue = pool.blocks.clone(), LateQueue()
    decoder = Decoder(folder, config, torch.float32, kernels)
    warm_up(decoder, pool, queue, TORCH_DEVICE_SAMPLING, vocab_size=config.shape.vocab_size, max_rows=17)
    assert torch.equal(pool.blocks, before)
    assert queue.num_puts == 1
