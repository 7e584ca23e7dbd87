from __future__ import annotations

import pytest
import torch

from pdserve.bench.gpu_model.handoff import link_s, measure_handoff
from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer.host_staging import HostStaging

LAYOUT = KvLayout(
    num_blocks=5, num_kv_heads=2, num_layers=2, block_size=16, head_dim=16, dtype="float32", model_hash="bench"
)


def test_kv_goes_from_one_pool_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    num_downloads = []
    download = HostStaging.copy_d2h

    def count(staging: HostStaging, block_ids: list[int], generations: list[int]) -> None:
        num_downloads.append(sum(staging._generations.get(block) != generations[block] for block in block_ids))
        download(staging, block_ids, generations)

    monkeypatch.setattr(HostStaging, "copy_d2h", count)
    seconds = measure_handoff(LAYOUT, torch.device("cpu"))
    assert min(seconds) > 0
    assert num_downloads == [5] * 6  # None is spared because it was copied before.


def test_other_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStaging, "copy_h2d", lambda staging, block_ids: None)
    with pytest.raises(RuntimeError, match="not what was granted"):
        measure_handoff(LAYOUT, torch.device("cpu"))


def test_copies_leave_what_was_there() -> None:
    blocks = torch.randint(0, 255, (3, 40), dtype=torch.uint8)
    before = blocks.clone()
    assert link_s(blocks) > 0
    assert torch.equal(blocks, before)
