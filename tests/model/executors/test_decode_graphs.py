"""Sizes of captured decode steps, and steps of padding; what they compute is tested with the executor."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.contracts.precision import Precision
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS, TORCH_SAMPLING
from pdserve.kernels.torch.ranks import create_meeting_file
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sharding import Place, shard_of
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.decoder.ranks import ranks_of_devices
from pdserve.model.executors.decode_graphs import DecodeGraphs, capture_sizes, warm_up, warmup_shapes
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import write_checkpoint
from tests.model.late_queue import LateQueue


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (29, [1, 2, 4, 8, 16, 24, 29]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_sizes_are_few_and_near(max_rows: int, sizes: list[int]) -> None:
    assert capture_sizes(max_rows) == sizes


def test_every_size_is_captured_once_and_the_largest_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path)
    config = DecoderConfig.from_folder(folder)
    pool = nan_pool(config.kv_layout(2, 8, "float32", "hash").shape)
    queue = LateQueue()
    with caplog.at_level(logging.INFO):
        graphs = DecodeGraphs(
            Decoder(folder, config, Precision(), CPU_KERNELS),
            pool,
            queue,
            torch.zeros(9, dtype=torch.int64),
            vocab_size=config.shape.vocab_size,
            max_blocks=2,
        )
    assert queue.num_captured == 5
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "captured the decode step of 9 rows, 1 of 5 sizes"
    assert messages[-1] == "captured the decode step of 1 rows, 5 of 5 sizes"
    assert [graphs.padding(num_rows) for num_rows in range(1, 10)] == [0, 0, 1, 0, 3, 2, 1, 0, 0]
    with pytest.raises(AssertionError, match="words for a decode step"):
        graphs.run(np.zeros(1000, np.int32), 3)


def test_shapes_double_up_to_the_largest_batch() -> None:
    assert [shape.num_rows for shape in warmup_shapes(0)[:5]] == [1] * 5
    assert [shape.num_rows for shape in warmup_shapes(0)[5::2]] == [16, 32, 64, 128, 256]
    assert [shape.num_rows for shape in warmup_shapes(300)[5::2]] == [16, 32, 64, 128, 256, 512]
    assert [shape.num_tokens for shape in warmup_shapes(0)[:7]] == [1, 16, 32, 64, 128, 144, 144]
    assert [shape.most_short_tokens for shape in warmup_shapes(0)] == [1, 0, 0, 0, 0] + [1, 8] * 5


@pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])
def test_the_pool_stays_as_it_was(tmp_path: Path, kernels: DecoderKernels) -> None:
    folder = write_checkpoint(tmp_path)
    config = DecoderConfig.from_folder(folder)
    pool = nan_pool(config.kv_layout(2, 8, "float32", "hash").shape)
    before, queue = pool.blocks.clone(), LateQueue()
    decoder = Decoder(folder, config, Precision(), kernels)
    warm_up(decoder, pool, queue, TORCH_SAMPLING, vocab_size=config.shape.vocab_size, max_rows=17)
    assert torch.equal(pool.blocks, before)
    assert queue.num_puts == 1


def test_the_ranks_of_every_stage_warm_up_together(tmp_path: Path) -> None:
    folder, fd = write_checkpoint(tmp_path), create_meeting_file()
    config = DecoderConfig.from_folder(folder)
    shape = config.kv_layout(2, 8, "float32", "hash").shape

    def run(rank: int) -> int:
        ranks, queue = ranks_of_devices(Place.of(rank, 2, 2), fd, torch.device("cpu")), LateQueue()
        pool = KvPool(
            nan_pool(shape).blocks.flatten(), shape, torch.float32, shard_of(config.shape, ranks.place).kv_heads
        )
        decoder = Decoder(folder, config, Precision(), CPU_KERNELS, ranks)
        warm_up(decoder, pool, queue, TORCH_SAMPLING, vocab_size=config.shape.vocab_size, max_rows=17)
        return queue.num_puts

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [1, 0, 1, 1], "rank 1 has no logits to draw from"
    os.close(fd)
