from __future__ import annotations

import pytest

from pdserve.bench.step_interference import BATCH_SIZE, BLOCKS_PER_PULL, CONTEXT_TOKENS, decode_batch, report
from pdserve.contracts.kv_layout import KvLayout

LAYOUT = KvLayout(
    num_blocks=1024, num_kv_heads=4, num_layers=4, block_size=16, head_dim=32, dtype="float32", model_hash="bench"
)


def test_decoded_blocks_are_not_pulled_ones() -> None:
    rows = decode_batch(0, LAYOUT).rows
    blocks = [block for row in rows for block in row.block_table]
    assert len(rows) == BATCH_SIZE
    assert len(set(blocks)) == len(blocks) >= BATCH_SIZE * CONTEXT_TOKENS // LAYOUT.block_size
    assert min(blocks) >= BLOCKS_PER_PULL
    assert max(blocks) < LAYOUT.num_blocks


def test_ratios_are_of_percentiles() -> None:
    quiet = [0.001 * (1 + number) for number in range(101)]
    result = report("memfd", quiet, [2 * seconds for seconds in quiet], 3e9, LAYOUT)
    assert (result["p50_ratio"], result["p99_ratio"], result["pull_gbytes_per_s"]) == pytest.approx((2, 2, 3))
    assert result["quiet"]["p50_ms"] == pytest.approx(51)
    assert result["pull_bytes"] == BLOCKS_PER_PULL * LAYOUT.block_bytes
