"""Divides this host's cores and GPUs among workers.

Threads of two processes that wait for each other on shared cores slow both down, so workers get disjoint sets. Workers
pin themselves; a worker without cores uses every core, with threads that wait passively. Pure except `installed_gpu`
and `num_gpus`, which read the driver's files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice, takewhile
from math import floor, inf, isclose
from pathlib import Path

from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.model.cost.hardware import catalogue_name

_LOAD = {WorkerRole.PREFILL: 2.0, WorkerRole.MIXED: 2.0, WorkerRole.DECODE: 1.0}
"""Relative need of cores by role: prefill is compute-bound and gains from each core; decode is bound by memory
bandwidth, which few cores saturate."""

_CORES_PER_SPARE = 8
"""One core in this many stays with the router and the daemons, once every worker has one. On smaller hosts they take
what they need from workers, which Ray runs at a lower priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSplit:
    worker_cores: tuple[tuple[int, ...], ...]
    """Cores of each worker, in the order of the roles; all empty if there are fewer cores than ranks."""
    spare_cores: tuple[int, ...]
    """Cores without a worker; may be empty."""


def split_cores(cores: Sequence[int], roles: Sequence[WorkerRole], ranks: Sequence[int] = ()) -> CoreSplit:
    """Give each worker a contiguous run of ``cores``, sized by its role's load and its ranks.

    Each rank gets one core, one in eight stays spare, and further ones go to the workers with the fewest per load.

    Args:
        cores: ids of the usable cores, at least one.
        roles: one entry per worker, at least one.
        ranks: ranks of each worker; by default one.
    """
    assert cores
    assert roles
    counts = [*ranks] or [1] * len(roles)
    if len(cores) < sum(counts):
        return CoreSplit(worker_cores=((),) * len(roles), spare_cores=())
    loads = [_LOAD[role] * count for role, count in zip(roles, counts, strict=True)]
    num_extra = len(cores) - sum(counts)
    num_spare = min(num_extra, len(cores) // _CORES_PER_SPARE)
    for _ in range(num_extra - num_spare):
        neediest = min(range(len(roles)), key=lambda index: counts[index] / loads[index])
        counts[neediest] += 1
    left = iter(cores)
    runs = tuple(tuple(islice(left, count)) for count in counts)
    return CoreSplit(worker_cores=runs, spare_cores=tuple(left))


_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
MAX_SHARE = 0.5
"""A worker that takes more of a GPU's memory than this gets the whole GPU."""


def installed_gpu(folder: Path = _DRIVER_FOLDER) -> str:
    """Catalogue name of this host's first GPU, taken for all of them; empty if none is visible, or if the catalogue
    lacks it."""
    for path in sorted(folder.glob("*/information"))[: num_gpus(folder)]:
        fields = dict(line.partition(":")[::2] for line in path.read_text(errors="replace").splitlines())
        return catalogue_name(fields.get("Model", "").strip())
    return ""


def num_gpus(folder: Path = _DRIVER_FOLDER) -> int:
    """GPUs of this host that ``CUDA_VISIBLE_DEVICES`` shows: those before the first entry that names none, as -1."""
    found = len(list(folder.glob("*/information")))
    if (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return found
    return min(found, len(list(takewhile(re.compile(r"\s*(\d|GPU-|MIG-)").match, shown.split(",")))))


def gpu_shares(configs: Sequence[WorkerConfig], num_gpus: float, num_gpus_of_host: float = inf) -> list[float]:
    """GPUs that each worker requests from Ray; 0 for a worker that computes on the CPU or emulates.

    Each rank of a worker with several gets a whole GPU. Another worker's share equals its share of the GPU's memory if
    that is at most one half; otherwise it gets a whole GPU. Where these are too few, workers with ``device: auto``
    share them, each with as much memory as leaves room for all; without any, they compute on the CPU.

    Args:
        num_gpus: GPUs of the cluster.
        num_gpus_of_host: GPUs of the host with the most.

    Raises:
        DeployError: too few GPUs, also when shared.
    """
    on_gpus = [num_gpus > 0 or config.device == "cuda" for config in configs]
    for num_sharing in range(1, len(configs) + 1):
        shares = [_share(config, num_sharing) * is_on for config, is_on in zip(configs, on_gpus, strict=True)]
        if _num_gpus(shares) <= num_gpus and max(shares) <= num_gpus_of_host:
            return shares
    asked = _num_gpus(map(_share, compress(configs, on_gpus)))
    raise DeployError(
        f"the workers take {asked} GPUs and Ray has {num_gpus:g}: use fewer workers, lower their tensor_parallel or "
        "pipeline_parallel, lower their gpu_memory_utilization to share GPUs, or set device to cpu; a host has "
        f"{min(num_gpus, num_gpus_of_host):g}"
    )


def _share(config: WorkerConfig, num_sharing: int = 1) -> float:
    if config.emulate or config.device == "cpu":
        return 0.0
    if (num_ranks := config.tensor_parallel * config.pipeline_parallel) > 1:
        return float(num_ranks)
    if num_sharing > 1 and config.device == "auto":
        return max(1, floor(100 * config.gpu_memory_utilization / num_sharing)) / 100
    return config.gpu_memory_utilization if config.gpu_memory_utilization <= MAX_SHARE else 1.0


def _num_gpus(shares: Iterable[float]) -> int:
    """Number of GPUs that hold all shares: whole ones, and first fit for the others, largest share first."""
    shares = list(shares)
    num_whole = sum(int(share) for share in shares if share >= 1)
    left: list[float] = []
    for share in sorted((share for share in shares if 0 < share < 1), reverse=True):
        index = next((index for index, room in enumerate(left) if room > share or isclose(room, share)), len(left))
        if index == len(left):
            left.append(1.0)
        left[index] -= share
    return num_whole + len(left)
