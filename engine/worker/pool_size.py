"""Number of KV blocks of a worker and of host slots for preempted blocks: as configured, or a share of the memory.

Called once at worker startup. Never allocates.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.contracts.step import ModelLimits
from pdserve.contracts.worker_config import WorkerConfig

AUTO_MEMORY_SHARE = 0.1
"""Share of the host's available memory, after weights, for an automatic pool."""

AUTO_HOST_SHARE = 0.8
"""Share of it for the automatic pools and slots of all workers of the host together. They size them at the same time,
and the host commits pages only when they are first written."""

AUTO_SWAP_SHARE = 0.25
"""Host slots per block of the pool, unless configured. Preemption is rare, and only answers longer than expected are
swapped."""

STAGING_MEMORY_SHARE = 0.5
"""Maximum size of the staging file of an automatic GPU pool, as a share of the host's available memory."""


class KvMemory(NamedTuple):
    """Bytes available for a worker's KV."""

    max_bytes: int
    """Maximum size of a pool, however it is configured."""
    auto_bytes: int
    """Size of an automatic pool."""
    host_bytes: int
    """Host memory for the pool (its staging file for a GPU pool) and for swap slots."""


def kv_memory_on_cpu(weight_bytes: int, available_bytes: int, num_host_workers: int = 1) -> KvMemory:
    """Raise ValueError if the weights exceed the host's available memory."""
    spare_bytes = available_bytes - weight_bytes
    if spare_bytes < 0:
        raise ValueError(
            f"the model's weights take {weight_bytes} bytes on this host and {available_bytes} are available: "
            f"serve a smaller model, or this one in a 16-bit dtype or with quantization int8 or int4"
        )
    share = min(AUTO_MEMORY_SHARE, _share_of_host(num_host_workers))
    return KvMemory(spare_bytes, int(spare_bytes * share), spare_bytes)


def _share_of_host(num_workers: int) -> float:
    """Largest share of the host's memory for the automatic pool of one of so many workers; it has slots, too."""
    return AUTO_HOST_SHARE / (1 + AUTO_SWAP_SHARE) / num_workers


def kv_memory_on_gpu(
    *,
    weight_bytes: int,
    activation_bytes: int,
    reserve_bytes: int,
    free_bytes: int,
    total_bytes: int,
    utilization: float,
    host_bytes: int,
    kv_share: float = 1.0,
    num_host_workers: int = 1,
) -> KvMemory:
    """KV memory of a worker's GPUs before the weights are loaded, from that of one of them.

    An automatic pool takes ``utilization`` times the total memory, or the free memory if that is less, minus weights,
    activations and the reserve; at most `STAGING_MEMORY_SHARE` of the host's memory, and its part of `AUTO_HOST_SHARE`.

    Args:
        activation_bytes: activations of the largest step.
        reserve_bytes: memory without a formula: libraries, CUDA graphs, copies of logits. Workers that share a GPU
            have only their shares.
        free_bytes: free memory of the GPU; ``total_bytes`` is its total memory.
        host_bytes: available memory of the host.
        kv_share: share of the worker's KV on this GPU.
        num_host_workers: workers of the host, itself included.

    Raises:
        ValueError: they do not fit.
    """
    used_bytes = weight_bytes + activation_bytes + reserve_bytes
    granted_bytes = min(free_bytes, int(total_bytes * utilization))
    if used_bytes > granted_bytes:
        raise ValueError(
            f"weights take {weight_bytes} bytes, activations {activation_bytes} and libraries {reserve_bytes}, and "
            f"{granted_bytes} of the GPU's memory are granted (gpu_memory_utilization {utilization:g}) and free: raise "
            f"gpu_memory_utilization, end what else runs on the GPU, or serve a smaller model"
        )
    staging_share = min(STAGING_MEMORY_SHARE, _share_of_host(num_host_workers))
    auto_bytes = min(int((granted_bytes - used_bytes) / kv_share), int(host_bytes * staging_share))
    return KvMemory(int((free_bytes - used_bytes) / kv_share), auto_bytes, host_bytes)


def num_kv_blocks(config: WorkerConfig, limits: ModelLimits, block_bytes: int, auto_bytes: int) -> int:
    """Blocks of the worker's pool, all micro-batches together: ``num_kv_blocks``, else from ``kv_memory_bytes``, else
    automatic.

    An automatic pool takes as many blocks as ``auto_bytes`` holds, at most those of ``max_batch_size`` sequences of
    the model's length.

    Raises:
        ValueError: one sequence of the model's length would not fit into a micro-batch's share.
    """
    num_needed = -(-limits.max_model_len // config.block_size)
    if config.num_kv_blocks:
        num_blocks, knob = config.num_kv_blocks, "num_kv_blocks"
    elif config.kv_memory_bytes:
        num_blocks, knob = config.kv_memory_bytes // block_bytes, "kv_memory"
    else:
        num_blocks, knob = min(auto_bytes // block_bytes, config.max_batch_size * num_needed), "kv_memory"
    if num_blocks // config.pipeline_parallel < num_needed:
        num_needed *= config.pipeline_parallel
        each = f" in each of its {config.pipeline_parallel} micro-batches" if config.pipeline_parallel > 1 else ""
        raise ValueError(
            f"the KV pool of {num_blocks} blocks does not hold one sequence of max_model_len {limits.max_model_len} "
            f"tokens{each}: raise {knob} to {num_needed} blocks ({num_needed * block_bytes} bytes), or lower "
            "max_model_len"
        )
    return num_blocks


def check_pool_fits(pool_bytes: int, spare_bytes: int) -> None:
    """Raise ValueError if the pool exceeds the memory left by the weights."""
    if pool_bytes > spare_bytes:
        raise ValueError(
            f"the KV pool needs {pool_bytes} bytes and {spare_bytes} are available after the weights: lower kv_memory"
        )


def check_staging_fits(pool_bytes: int, host_bytes: int) -> None:
    """Raise ValueError if the staging file of a GPU pool may exceed the host's memory."""
    if pool_bytes > host_bytes:
        raise ValueError(
            f"the KV pool of {pool_bytes} bytes has a staging file on the host, where {host_bytes} bytes are "
            f"available: lower kv_memory"
        )


def num_swap_slots(config: WorkerConfig, num_blocks: int, block_bytes: int, spare_bytes: int) -> int:
    """Host slots for blocks of preempted sequences: from ``swap_memory_bytes``, else automatic.

    Args:
        num_blocks: blocks of the pool.
        spare_bytes: host memory minus weights and pool.

    Raises:
        ValueError: the configured memory holds no block, or does not fit.
    """
    if not config.may_decode:
        return 0
    swap_bytes = config.swap_memory_bytes
    if swap_bytes is None:
        return min(int(num_blocks * AUTO_SWAP_SHARE), max(0, spare_bytes) // block_bytes)
    if 0 < swap_bytes < block_bytes:
        raise ValueError(f"swap_memory of {swap_bytes} bytes holds no KV block of {block_bytes}: raise it, or write 0")
    if swap_bytes > spare_bytes:
        raise ValueError(
            f"swap_memory needs {swap_bytes} bytes and {spare_bytes} are available after weights and KV pool: lower it"
        )
    return swap_bytes // block_bytes
