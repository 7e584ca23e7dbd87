from __future__ import annotations

from pdserve.kv_transfer.transfer_config import TransferConfig
from tests.kv_transfer.peer import EPOCH, LAYOUT


def test_survives_the_pipe() -> None:
    config = TransferConfig(
        layout=LAYOUT,
        worker_epoch=EPOCH,
        host="127.0.0.1",
        cluster_token="geheim ü",
        transport="auto",
        cpu_cores=(0, 3),
        parent_pid=12,
    )
    assert TransferConfig.from_json(config.to_json()) == config
