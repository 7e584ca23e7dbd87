"""What `pdserve up` says of the model and its pools once it serves: device, dtype and transport of each, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from pdserve.contracts.errors import DeployError
from pdserve.contracts.placement import WorkerRole
from pdserve.deploy.checks.model import model_rows
from pdserve.deploy.cluster.resources import MAX_SHARE
from pdserve.deploy.commands.check import Links, find_links
from pdserve.deploy.commands.status import num_blocks
from pdserve.deploy.launch import Launch


def banner_rows(launch: Launch, served_name: str, workers: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Rows for the model, and one for each pool.

    Args:
        launch: as placed.
        workers: from the router's status.
    """
    model = launch.config.model
    rows = [("model", f"{served_name} ({model.precision})"), *model_rows(model)]
    links: list[Links] = []
    with contextlib.suppress(DeployError):  # of hosts between which there is no transport, and perhaps no link
        links = find_links(launch)
    for role in WorkerRole:
        mine = [worker for worker in workers if worker["role"] == role.value]
        if not (count := launch.config.phase(role).replicas):
            continue
        words = [f"{count} worker{'s' * (count > 1)}{launch.layout_reason and f' {launch.layout_reason}'}"]
        words.append(f"{sum(map(num_blocks, mine)) * model.block_size:,} tokens of KV cache")
        words.append(_device(launch, role, any(str(worker["hardware"]).startswith("cpu") for worker in mine)))
        words.append(f"{model.dtype} ({launch.dtype_reason})")
        for link in links:
            targets = [target for source, _, target in (pair.split() for pair in link.pairs) if source == role.value]
            if targets:
                words.append(f"KV to {' and '.join(targets)} by {link.transport} ({link.reason})")
        rows.append((role.value, ", ".join(words)))
    return rows


def _device(launch: Launch, role: WorkerRole, computes_on_cpu: bool) -> str:
    phase = launch.config.phase(role)
    if launch.emulate:
        return f"{launch.emulate}, emulated"
    if not launch.is_on_gpu(role):
        return f"CPU ({f'{role.value}.device' if launch.num_gpus else 'Ray has no GPU'})"
    if launch.gpu and computes_on_cpu:
        return "CPU (torch sees no GPU: check nvidia-smi, or install a build of torch for CUDA)"
    if (num_ranks := phase.tensor_parallel * phase.pipeline_parallel) > 1:
        return f"{num_ranks} GPUs each"
    share = phase.gpu_memory_utilization
    return f"{share:g} of a GPU each (shared)" if share <= MAX_SHARE else "a GPU each"
