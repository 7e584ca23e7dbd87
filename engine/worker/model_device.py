"""Devices of a worker's model, its memory for KV, and the KV pool of each rank.

Called by `pdserve.engine.worker.backend` for a real model, once torch may be imported. Decisions that need no torch
are in `pdserve.engine.worker.pool_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from pdserve.contracts.precision import FLOAT8_CAPABILITY
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS, WorkerConfig
from pdserve.engine.worker.pool_size import KvMemory, kv_memory_on_cpu, kv_memory_on_gpu
from pdserve.engine.worker.served_model import places_of
from pdserve.kernels.kv_pool import KvPool
from pdserve.kv_transfer.group_copies import GroupCopies, device_id
from pdserve.kv_transfer.ipc_copies import IpcCopies
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.weights.decoder_weights import missing_bytes

CPU = torch.device("cpu")
_FIRST_CAPABILITY = (8, 0)
"""That of Ampere, for which the kernels are written: older GPUs lack bfloat16."""


def choose_device(config: WorkerConfig, rank: int = 0) -> torch.device:
    """Return a rank's device: its GPU, or the CPU that all share. Raises ValueError if the device is absent or too old,
    or the worker has more ranks than GPUs."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ValueError(
            "device is cuda and torch sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, install a build of torch "
            "for CUDA, or set device to cpu"
        )
    if not has_gpu or config.device == "cpu":
        return CPU
    num_gpus = torch.cuda.device_count()
    if config.num_ranks > num_gpus:
        raise ValueError(
            f"tensor_parallel is {config.tensor_parallel} and pipeline_parallel {config.pipeline_parallel}, and the "
            f"worker sees {num_gpus} GPUs: lower them, show the worker more in CUDA_VISIBLE_DEVICES, or set device to "
            "cpu"
        )
    if (capability := torch.cuda.get_device_capability(rank)) < _FIRST_CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name(rank)} has compute capability {capability[0]}.{capability[1]}, and kernels "
            "need 8.0: set device to cpu, or use another card"
        )
    return torch.device("cuda", rank)


def is_in_host_memory(device: torch.device) -> bool:
    """Whether a pool on ``device`` is the memory that transfer processes map, which the ranks of a worker share."""
    return device == CPU


def check_kv_dtype(device: torch.device, kv_dtype: str) -> None:
    """Raise ValueError if no kernel reads KV of this dtype on ``device``."""
    if device == CPU or kv_dtype != "float8_e4m3fn":
        return
    if torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise ValueError(f"{torch.cuda.get_device_name(device)} has no float8: set kv_dtype to int8")


def kv_memory_of(device: torch.device, config: WorkerConfig, cost: CostModel, host_bytes: int) -> KvMemory:
    """Memory left after weights, activations and the rest, on ``device`` and with it on those of the other ranks.

    Args:
        host_bytes: available memory of the host.

    Raises:
        ValueError: they do not fit.
    """
    if device == CPU:
        places = places_of(config)
        return kv_memory_on_cpu(
            missing_bytes(Path(config.model_path), cost.shape, config.precision, places),
            host_bytes,
            config.num_host_workers,
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    needed = cost.rank_memory(max_batch_tokens=config.max_batch_tokens, max_batch_size=config.max_batch_size)
    return kv_memory_on_gpu(
        weight_bytes=int(needed.weight_bytes),
        activation_bytes=int(needed.activation_bytes),
        reserve_bytes=needed.reserve_bytes,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        utilization=config.gpu_memory_utilization,
        host_bytes=host_bytes,
        kv_share=cost.rank_kv_bytes_per_token / cost.kv_bytes_per_token,
        num_host_workers=config.num_host_workers,
    )


def build_pool(device: torch.device, memory: PoolMemory, shard: KvShard) -> KvPool:
    """Build the pool that a rank computes its shard in. On a CPU it is the memory mapped by the transfer process. On a
    GPU it is GPU memory for the shard, zeroed because the unused end of a block is sent to other workers with it.
    """
    layout = memory.layout
    if is_in_host_memory(device):
        pool_bytes = torch.frombuffer(memory.blocks, dtype=torch.uint8)
        return KvPool(pool_bytes, layout.shape, getattr(torch, layout.dtype), shard.heads)
    own = replace(layout, num_kv_heads=len(shard.heads), num_layers=len(shard.layers))
    pool_bytes = torch.zeros(own.pool_bytes, dtype=torch.uint8, device=device)
    return KvPool(pool_bytes, own.shape, getattr(torch, own.dtype), first_layer=shard.layers.start)


def build_copies(
    config: WorkerConfig, pool_blocks: torch.Tensor, memory: PoolMemory, shards: Sequence[KvShard], rank: int = 0
) -> GroupCopies | IpcCopies | None:
    """Build the copies of blocks between the pool of a rank and those of other workers; ``None`` if the worker's
    transport is neither nccl nor cuda_ipc: KV is copied through the host then.

    Args:
        pool_blocks: uint8 ``[num_blocks, bytes of its shard]``, in memory that transfer processes do not map.
        memory: the staging file.
        shards: of each rank.

    Raises:
        ValueError: the transport is impossible here.
    """
    if config.transport not in DIRECT_TRANSPORTS:
        return None
    why_not = ""
    if config.transport == "cuda_ipc":
        try:
            return IpcCopies(pool_blocks, memory, shards, rank)
        except RuntimeError as error:
            why_not = str(error)
    elif config.tls is not None:
        why_not = "NCCL does not encrypt, and security.tls is set"
    elif pool_blocks.is_cuda and not (distributed.is_available() and distributed.is_nccl_available()):
        why_not = "this build of torch lacks NCCL"
    if why_not:
        raise ValueError(f"kv_transfer.transport is {config.transport}, which is impossible here: {why_not}. Use auto")
    device = device_id([choose_device(config, each) for each in range(len(shards))])
    return GroupCopies(pool_blocks, memory.generations, memory.layout, shards=shards, rank=rank, device=device)
