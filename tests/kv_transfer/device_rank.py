"""Another rank of a `tests.kv_transfer.device_peer`, which computes nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pdserve.engine.worker.follower import main
from pdserve.engine.worker.followers import FollowerConfig
from pdserve.kv_transfer.pool_memory import PoolMemory
from tests.kv_transfer.device_peer import RankPools, small_batches


def _build(follower: FollowerConfig, memory: PoolMemory, shared_fd: int) -> tuple[Any, None, Any]:
    pools = RankPools(Path(follower.worker.model_path), follower.worker.tensor_parallel)
    return None, None, pools.copies(follower.rank, memory.generations)


if __name__ == "__main__":
    with small_batches(), patch("pdserve.engine.worker.follower.build_follower", _build):
        sys.exit(main())
