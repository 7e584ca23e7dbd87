"""What can be known to fail before anything is started: each check raises one line with its remedy."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import psutil

from pdserve.deploy.errors import DeployError
from pdserve.deploy.launch import Launch
from pdserve.deploy.ports import listen_error
from pdserve.model.config import DecoderConfig
from pdserve.model.hardware import hardware

_FILES_BESIDE_CLIENTS = 256
"""Open files that a process needs beside one per client connection."""

_MAX_WORKERS_PER_CORE = 8
_CONNECT_TIMEOUT_S = 5.0
_WORKER_BYTES = 300 * 2**20
"""Memory of a worker's processes beside weights and KV."""


def check_ports(launch: Launch) -> None:
    """Raises DeployError if another process listens where the router would."""
    router = launch.config.router
    for key, host, port in (("port", router.host, router.port), ("admin_port", "127.0.0.1", router.admin_port)):
        if error := listen_error(host, port):
            option = "--port 0" if key == "port" else "router.admin_port: 0"
            raise DeployError(f"cannot listen on {host}:{port}: {error}; choose another router.{key}, or {option}")


def raise_file_limit(launch: Launch) -> None:
    """Allow as many open files as the system lets us; children inherit it.

    Raises:
        DeployError: not enough for the requests that the router admits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    num_needed = launch.config.router.max_queued_requests + _FILES_BESIDE_CLIENTS
    if hard != resource.RLIM_INFINITY and hard < num_needed:
        raise DeployError(
            f"the limit of open files is {hard} and {num_needed} are needed; raise it (ulimit -Hn {num_needed}) "
            f"or lower router.max_queued_requests to {max(1, hard - _FILES_BESIDE_CLIENTS)}"
        )


def check_cores(launch: Launch, num_cores: int) -> None:
    """Raises DeployError if the workers would starve each other."""
    num_workers = len(launch.roles)
    if num_workers > _MAX_WORKERS_PER_CORE * num_cores:
        raise DeployError(
            f"{num_workers} workers are too many for {num_cores} cores; "
            f"lower the replicas to {_MAX_WORKERS_PER_CORE * num_cores} in all"
        )


def check_resources(launch: Launch) -> None:
    """Raises DeployError if a worker asks a private cluster for resources that only other clusters have."""
    for role in set(launch.roles):
        names = launch.phase(role).resources
        if names and not launch.ray_address:
            raise DeployError(
                f"{role.value}.resources names {', '.join(names)}, which a private Ray cluster does not have; "
                "remove it, or give --ray-address"
            )


def check_ray_address(launch: Launch) -> None:
    """Raises DeployError if nothing listens at the address of the existing Ray cluster."""
    if not launch.ray_address:
        return
    host, _, port = launch.ray_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DeployError(f"{launch.ray_address!r} is not an address of Ray; write --ray-address HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise DeployError(f"no Ray cluster answers at {launch.ray_address}: {error}; check --ray-address") from error


def check_model(launch: Launch, folder: Path) -> None:
    """Look at the checkpoint's configuration and files, and whether its weights fit into memory.

    Raises:
        DeployError: it cannot be served.
    """
    if not folder.is_dir():
        raise DeployError(
            f"no model folder at {folder}; give --model a folder with config.json, safetensors, tokenizer"
        )
    try:
        config = DecoderConfig.from_folder(folder)
        config.limits(launch.config.model.max_model_len)
        if launch.emulate:
            hardware(launch.emulate).flops(launch.config.model.dtype)
    except ValueError as error:
        raise DeployError(" ".join(str(error).split())) from error
    if not (folder / "tokenizer.json").is_file():
        raise DeployError(f"no tokenizer.json in {folder}; save the model's fast tokenizer there")
    if launch.emulate:
        return
    if not any(folder.glob("*.safetensors")):
        raise DeployError(f"no *.safetensors in {folder}; save the weights there, or give --emulate a GPU's name")
    num_workers = len(launch.roles)
    needed = num_workers * (config.weight_bytes(launch.config.model.dtype) + _WORKER_BYTES)
    available = psutil.virtual_memory().available
    if needed > available:
        raise DeployError(
            f"{num_workers} workers need {_gib(needed)} for weights and {_gib(available)} of memory is available; "
            "use fewer workers, a smaller model or a 16-bit model.dtype"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
