"""A file for ``ray up`` with the hosts of a plan, made from the one for the same provider in ``deploy/ray``."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "ray"
PROVIDERS = ("local", "aws")


def ray_cluster_path(deployment: Path, provider: str) -> Path:
    """Path of the file, beside that of the deployment."""
    return deployment.with_name(f"{deployment.stem}.ray-{provider}.yaml")


def ray_cluster_text(provider: str, deployment: Path, *, num_hosts: int, gpus_per_host: int, gpu: str) -> str:
    """The file's text; what only the operator knows is marked in it.

    Args:
        provider: one of `PROVIDERS`. On AWS the head is one more host, without workers.
        deployment: file that the head serves.
    """
    num_workers = num_hosts if provider == "aws" else max(1, num_hosts - 1)  # Ray wants one host beside the head
    addresses = ", ".join(f"10.0.0.{11 + number}" for number in range(num_workers))
    text = (FOLDER / f"{provider}.yaml").read_text()
    for pattern, value in (
        (r"worker_ips: \[.*\]", f"worker_ips: [{addresses}]"),
        (r"(m..)_workers: \d+", rf"\1_workers: {num_workers}"),
        (r"--hosts \d+", f"--hosts {num_workers + 1}"),
        (r"GPU: \d+", f"GPU: {gpus_per_host}"),
        (r"<- with GPUs", f"<- with {gpus_per_host} x {gpu}"),
        (rf"deploy/ray/{provider}.yaml", str(ray_cluster_path(deployment.resolve(), provider))),
        (r"deploy/ray/deployment.yaml", str(deployment.resolve())),
        (r"deploy/ray/keep-control-store", str(FOLDER / "keep-control-store")),
    ):
        text = re.sub(pattern, value, text)
    return text
