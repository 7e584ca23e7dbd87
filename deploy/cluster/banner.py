"""What `pdserve up` says of the model and its pools once it serves: device, dtype and transport of each, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.checks.model import model_rows, precision_words
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
    rows = [("model", f"{served_name} ({precision_words(model)})"), *model_rows(model)]
    links: list[Links] = []
    with contextlib.suppress(DeployError):  # between hosts without a transport, and perhaps without a link
        links = find_links(launch)
    for role in WorkerRole:
        if count := launch.config.phase(role).replicas:
            mine = [worker for worker in workers if worker["role"] == role.value]
            blocks = [*filter(None, map(num_blocks, mine))]  # of those that are up: others may follow
            number = f"{len(blocks)} of {count}" if len(blocks) < count else str(count)
            tokens = sum(blocks) * model.block_size
            words = [f"{number} worker{'s' * (count > 1)}{launch.layout_reason}, {tokens:,} tokens of KV cache"]
            words += [_device(launch, role, mine), f"{model.dtype} ({launch.dtype_reason})"]
            if products := sorted({worker["products"] for worker in workers} - {""}):
                words.append(_products(products))
            if (phase := launch.config.phase(role)).drafter != "none":
                words.append(f"guesses by {Path(phase.draft_path).name or phase.drafter}")
            outgoing = [each for each in links if any(pair.startswith(role.value) for pair in each.pairs)]
            words += [f"KV by {each.transport} ({each.reason})" for each in outgoing]
            rows.append((role.value, ", ".join(words)))
    return rows


def _products(dtypes: Sequence[str]) -> str:
    """Of all workers, since an answer may go on with any."""
    words = f"products in {' and '.join(dtypes)}"
    if len(dtypes) > 1:
        words += " (CPUs differ; model.cpu_products: float32 makes them compute alike)"
    return words


def _device(launch: Launch, role: WorkerRole, workers: Sequence[dict[str, Any]]) -> str:
    phase = launch.config.phase(role)
    if launch.emulate:
        return f"{launch.emulate}, emulated"
    if not launch.is_on_gpu(role):
        return f"CPU ({f'{role.value}.device' if launch.num_gpus else 'Ray has no GPU'})"
    if launch.gpu and any(str(worker["hardware"]).startswith("cpu") for worker in workers):
        return "CPU (torch sees no GPU: check nvidia-smi, or install a build of torch for CUDA)"
    num_ranks, share = phase.tensor_parallel * phase.pipeline_parallel, phase.gpu_memory_utilization
    if num_ranks == 1 and share <= MAX_SHARE:
        return f"{share:g} of a GPU each"
    return f"{num_ranks} GPU{'s' * (num_ranks > 1)} each"
