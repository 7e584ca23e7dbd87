"""What the supervisor knows of a host: its cores, memory and GPUs, its versions, and its copy of the model.

Every host of the cluster states the same facts by `host_facts`, this one included.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path

from pdserve.contracts.deployment import SecurityConfig
from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.resources import installed_gpu
from pdserve.kernels.cpu.build import cache_folder, is_built
from pdserve.kv_transfer.handshake import host_id
from pdserve.kv_transfer.host_limits import available_memory_bytes, usable_cores
from pdserve.model.weights.digest import model_digest

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    address: str
    """Address of its Ray node, on which its workers listen."""
    name: str
    host_id: str
    """Equal for processes that see each other in ``/proc``."""
    cores: tuple[int, ...]
    """Ids of the usable cores."""
    memory_bytes: int
    """Available memory."""
    gpu: str
    """Catalogue name of its GPUs; empty without."""
    version: str
    """Version of pdserve."""
    kernel_warning: str
    """Reason why its kernels are slow; empty if they are fast."""
    model_digest: str
    """Digest of the model folder; empty if the host has no such folder."""

    @property
    def label(self) -> str:
        """The host in messages."""
        return f"{self.name} ({self.address})"


def host_facts(address: str, model_path: str) -> HostFacts:
    """Facts of this host. Reads a sample of the model's weights.

    Args:
        address: address by which the others reach this host.
        model_path: folder of the model; empty skips it.
    """
    return HostFacts(
        address=address,
        name=socket.gethostname(),
        host_id=host_id(),
        cores=usable_cores(),
        memory_bytes=available_memory_bytes(),
        gpu=installed_gpu(),
        version=version("pdserve"),
        kernel_warning=slow_kernels_reason(),
        model_digest=model_digest(Path(model_path)) if model_path else "",
    )


def slow_kernels_reason() -> str:
    """Reason why CPU kernels are slow on this host; empty if they are fast."""
    if shutil.which("g++") is None:
        return "g++ was not found: kernels run on plain torch, slower; install g++"
    folder = cache_folder()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)) and not is_built():
        return f"{folder} cannot be written: kernels run on plain torch, slower; set XDG_CACHE_HOME to another folder"
    return ""


def slow_dtype_reason(dtype: str) -> str:
    """Reason why this host's CPU computes much slower in ``dtype`` than in float32; empty if it does not. The compiled
    kernels read weights of any dtype as floats; plain torch needs instructions for products of that dtype."""
    flags = cpu_flags()
    if dtype == "float32" or not flags:
        return ""
    if not slow_kernels_reason():
        return "" if dtype == "bfloat16" or "f16c" in flags else f"this CPU converts no {dtype}"
    needed = {"avx512_bf16", "amx_bf16"} if dtype == "bfloat16" else {"avx512_fp16"}
    return "" if needed & flags else f"without compiled kernels this CPU is slow in {dtype}"


def cpu_flags() -> set[str]:
    """Features of this x86 CPU; empty for others."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def check_host(facts: HostFacts, ours: HostFacts) -> None:
    """Check that workers on a host can join those of this one.

    Raises:
        DeployError: another version of pdserve, no model, or another model; the text names the host and the remedy.
    """
    if facts.version != ours.version:
        raise DeployError(
            f"it has pdserve {facts.version}, and {ours.name} has {ours.version}; install one version on all hosts"
        )
    if not facts.model_digest:
        raise DeployError("it cannot read the model; put it at the same path on every host")
    if facts.model_digest != ours.model_digest:
        raise DeployError(f"it has another model at the same path than {ours.name}; copy one to all hosts")


def check_network(hosts: Iterable[HostFacts], security: SecurityConfig) -> None:
    """Check that no host listens beyond itself without TLS, unless the deployment says that the network is private.

    Raises:
        DeployError: one would.
    """
    exposed = next((facts for facts in hosts if not ip_address(facts.address).is_loopback), None)
    if exposed and not (security.tls or security.plaintext):
        raise DeployError(
            f"tokens, prompts and KV would cross the network of {exposed.label} in plain text; set security.tls, or "
            "security.plaintext: true if the network is private"
        )
