"""Ranks of a worker's model: what each holds, how they meet, and the models of those other than the leader.

`pdserve.engine.worker.backend` builds the leader's, which runs the step loop; `pdserve.engine.worker.follower` is the
process of another. Torch is imported when they are built.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.worker_config import WorkerConfig
from pdserve.engine.worker.followers import FollowerConfig, Followers, RanksCopies, RanksIpcCopies
from pdserve.engine.worker.live_loop import stall_limit_s
from pdserve.engine.worker.pool_size import check_pool_fits
from pdserve.engine.worker.served_model import (
    as_computed,
    configure_openmp,
    cores_of_rank,
    cost_of,
    max_captured_rows,
    places_of,
    served_model,
)
from pdserve.kv_transfer.host_limits import available_memory_bytes
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sharding import shard_of
from pdserve.model.cost.cost_model import CostModel

if TYPE_CHECKING:  # they import torch
    import torch

    from pdserve.kernels.cpu.ranks import RankMemory
    from pdserve.kv_transfer.group_copies import GroupCopies
    from pdserve.kv_transfer.host_staging import HostStaging
    from pdserve.kv_transfer.ipc_copies import IpcCopies
    from pdserve.model.decoder.ranks import Ranks
    from pdserve.model.executors.rank_model import RankModel

MIN_RANK_WAIT_S = 30.0


def check_ranks(config: WorkerConfig, is_on_host: bool) -> None:
    """Raise ValueError if ranks of this worker cannot share a model."""
    from pdserve.kernels.cpu.build import load_library

    if config.num_ranks > 1 and is_on_host and load_library() is None:
        raise ValueError(
            f"tensor_parallel is {config.tensor_parallel} and pipeline_parallel {config.pipeline_parallel}, which "
            "needs compiled kernels: install g++, or set both to 1"
        )


def kv_shards(config: WorkerConfig, model: DecoderConfig) -> list[KvShard]:
    """Part of every block that each rank holds, in a pool of its own."""
    shards = [shard_of(model.shape, place) for place in places_of(config)]
    return [KvShard(shard.kv_heads, shard.layers) for shard in shards]


def copies_of_ranks(
    own: GroupCopies | IpcCopies | None, followers: Followers | None
) -> GroupCopies | RanksCopies | RanksIpcCopies | None:
    """Copies of all ranks; ``own`` are the leader's."""
    from pdserve.kv_transfer.ipc_copies import IpcCopies

    if isinstance(own, IpcCopies):
        return RanksIpcCopies(own, followers)
    return own if own is None or followers is None else RanksCopies(own, followers)


def _rank_memory(config: WorkerConfig, model: DecoderConfig) -> RankMemory:
    """Memory of the worker's ranks, with room for the activations of the largest step."""
    from pdserve.kernels.cpu.ranks import RankMemory

    message_bytes = (config.max_batch_tokens + config.max_batch_size) * model.shape.hidden_size * 4  # float32
    return RankMemory(config.tensor_parallel, config.pipeline_parallel, message_bytes)


def create_shared_file(config: WorkerConfig, model: DecoderConfig, is_on_host: bool) -> int:
    """Create the file of `ranks_of`; returns its descriptor."""
    from pdserve.kernels.torch.ranks import create_meeting_file

    return _rank_memory(config, model).create() if is_on_host else create_meeting_file()


def ranks_of(config: WorkerConfig, model: DecoderConfig, device: torch.device, shared_fd: int, rank: int) -> Ranks:
    """The ranks as ``rank`` sees them, which exchange tensors through memory or between their devices."""
    from pdserve.engine.worker.model_device import is_in_host_memory
    from pdserve.model.decoder.ranks import Ranks, ranks_of_devices

    place = places_of(config)[rank]
    if not is_in_host_memory(device):
        if config.transport == "nccl":
            # NCCL takes one interface for all groups of a process, and links reach other hosts: not the loopback.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "")
        return ranks_of_devices(place, shared_fd, device)
    memory = _rank_memory(config, model)
    return Ranks(
        place,
        memory.group(shared_fd, place.stage, place.tensor_rank) if config.tensor_parallel > 1 else None,
        partial(memory.channels, shared_fd) if config.pipeline_parallel > 1 else None,
    )


def longest_wait_s(config: WorkerConfig, cost: CostModel, layout: KvLayout) -> float:
    """Seconds of a rank's wait for another after which a step hangs, whatever the step. One that has ended is found by
    its pulse; the other may compile a kernel or load a library."""
    num_cached = layout.num_blocks * config.block_size
    step_s = cost.mixed_s(config.max_batch_tokens, num_cached, config.max_batch_size, num_cached)
    return max(MIN_RANK_WAIT_S, stall_limit_s(step_s))


def build_follower(
    follower: FollowerConfig, memory: PoolMemory, shared_fd: int
) -> tuple[RankModel, HostStaging | None, GroupCopies | IpcCopies | None]:
    """Build the model of a rank other than the leader, and on a GPU the copies of its pool.

    Args:
        memory: the worker's pool, or its staging file.
        shared_fd: inherited from the leader.

    Raises:
        ValueError: the rank's GPU has no room for its share.
    """
    config, rank = follower.worker, follower.rank
    configure_openmp(config)

    import torch

    from pdserve.engine.worker.model_device import (
        build_copies,
        build_pool,
        choose_device,
        is_in_host_memory,
        kv_memory_of,
    )
    from pdserve.kernels.cpu.threads import use_cores
    from pdserve.kv_transfer.host_staging import HostStaging
    from pdserve.model.executors.rank_model import RankModel

    model, _ = served_model(config)
    device = choose_device(config, rank)
    is_on_host = is_in_host_memory(device)
    cost = cost_of(as_computed(config, is_on_host), model)
    if is_on_host:
        use_cores(cores_of_rank(config, rank))
    else:
        memory_of_gpu = kv_memory_of(device, config, cost, available_memory_bytes())
        check_pool_fits(memory.layout.pool_bytes, memory_of_gpu.max_bytes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = ranks_of(config, model, device, shared_fd, rank)
    shards = kv_shards(config, model)
    pool = build_pool(device, memory, shards[rank])
    rank_model = RankModel(
        folder=Path(config.model_path),
        config=model,
        layout=memory.layout,
        pool=pool,
        precision=config.precision,
        num_swap_slots=follower.num_swap_slots,
        max_captured_rows=max_captured_rows(config, is_on_host),
        ranks=ranks,
    )
    ranks.limit_waits(longest_wait_s(config, cost, memory.layout))
    if is_on_host:
        return rank_model, None, None
    copies = build_copies(config, pool.blocks, memory, shards, rank)
    return rank_model, HostStaging(pool.blocks, memory, shards[rank]), copies
