"""Checks before anything starts: ports, open files, cores, Ray and devices.

The supervisor calls them. Each check raises one line with its remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import ssl
from pathlib import Path

import psutil

from pdserve.contracts.deployment import DEFAULT_TIER, parse_ports
from pdserve.contracts.errors import ConfigError, DeployError
from pdserve.deploy.cluster.host_facts import slow_kernels_reason
from pdserve.deploy.cluster.ray_cluster import split_address
from pdserve.deploy.launch import Launch
from pdserve.model.weights.demo_model import DEMO_MODEL
from pdserve.proto.rpc import read_tls_files
from pdserve.router.http.keys import SHARED_LIMITS, read_keys

_FILES_WITHOUT_CLIENTS = 256
"""Open files that a process needs in addition to one per client connection."""

_MAX_WORKERS_PER_CORE = 8
_CONNECT_TIMEOUT_S = 5.0


def check_launch(launch: Launch) -> None:
    """All checks of this host; those of cores and devices only where no other host is involved, which are checked once
    they are known. Raises the limit of open files."""
    check_resources(launch)
    check_ray_address(launch)
    raise_file_limit(launch)
    check_ports(launch)
    check_keys(launch)
    check_tls(launch)
    check_api_tls(launch)
    if not launch.ray_address:
        check_tier_folders(launch)
        check_cores(launch)
        check_devices(launch)


def check_ports(launch: Launch) -> None:
    """Raises DeployError if the router cannot listen: port taken or not permitted, or address not on this host; or if
    workers have too few ports."""
    router, (first, last) = launch.config.router, parse_ports(launch.config.ports)
    num_needed = sum(2 + launch.config.phase(role).pipeline_parallel for role in launch.roles)
    if last and last - first + 1 < num_needed and not launch.ray_address:
        raise DeployError(f"the workers listen on {num_needed} ports, and ports has {last - first + 1}; widen it")
    admin_ports = range(router.admin_port, router.admin_port + (router.replicas if router.admin_port else 1))
    listeners = [("port", router.host, router.port), *(("admin_port", router.admin_host, port) for port in admin_ports)]
    for key, host, port in listeners:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            reason, remedy = (
                error.strerror or str(error),
                f"set router.{key.replace('port', 'host')} to an address of this host",
            )
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                option = "--port 0" if key == "port" else "router.admin_port: 0"
                remedy = f"choose another router.{key}, or {option}"
            if error.errno == errno.EADDRINUSE and (listener := _listener_of(port)):
                reason += f" by {listener}"
            raise DeployError(f"cannot listen on {host}:{port}: {reason}; {remedy}") from error


def check_keys(launch: Launch) -> None:
    """Raises ConfigError if ``router.keys_file`` is set and is no file of API keys, or a key has a tier that the
    deployment lacks, or a limit that the routers cannot share."""
    router = launch.config.router
    if not router.keys_file:
        return
    tiers = (DEFAULT_TIER, *launch.config.slo.tiers)
    for key in read_keys(Path(router.keys_file)).values():
        for tier in key.tiers:
            if tier not in tiers:
                raise ConfigError(
                    f"{router.keys_file}: the key {key.id} of {key.tenant} has the tier {tier!r}, and the deployment "
                    f"has {', '.join(tiers)}; add it to slo.tiers, or remove the key's line and make another"
                )
        for name in SHARED_LIMITS:
            limit = getattr(key, name)
            if 0 < limit < router.replicas:
                raise ConfigError(
                    f"{router.keys_file}: the key {key.id} of {key.tenant} has {name} {limit}, and each of "
                    f"router.replicas {router.replicas} allows at least 1; raise it, or lower router.replicas"
                )


def check_tier_folders(launch: Launch) -> None:
    """Raises ConfigError if a ``kv_tier.path`` is no folder that this process may write or make."""
    for role in dict.fromkeys(launch.roles):
        tier = launch.config.phase(role).kv_tier
        if tier is None:
            continue
        path = Path(tier.path)
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            key, fault = f"{role.value}.kv_tier.path", "cannot be written" if there.is_dir() else "is no folder"
            raise ConfigError(f"{key} is {tier.path}, and {there} {fault}; name a folder for the files", key)


def check_tls(launch: Launch) -> None:
    """Raises DeployError if a file of ``security.tls`` cannot be read."""
    if tls := launch.config.security.tls:
        try:
            read_tls_files(tls)
        except ValueError as error:
            raise DeployError(f"{error}; give the same paths on every host") from error


def check_api_tls(launch: Launch) -> None:
    """Raises DeployError if the API's certificate and key cannot be used."""
    router = launch.config.router
    if not (router.tls_certificate or router.tls_key):
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            router.tls_certificate,
            router.tls_key,
            password=lambda: "",  # otherwise it would ask on the terminal
        )
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise DeployError(
            f"router.tls_certificate {router.tls_certificate!r} and router.tls_key {router.tls_key!r} cannot be used "
            f"({reason}); name a certificate in PEM and its key without a password"
        ) from error


def raise_file_limit(launch: Launch) -> None:
    """Raise the limit of open files as far as the system allows; child processes inherit it.

    Raises:
        DeployError: the limit is too low for the requests that the router admits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    num_needed = launch.config.router.max_queued_requests + _FILES_WITHOUT_CLIENTS
    if hard != resource.RLIM_INFINITY and hard < num_needed:
        num_left = hard - _FILES_WITHOUT_CLIENTS
        lower = f" or lower router.max_queued_requests to {num_left}" if num_left > 0 else ""
        raise DeployError(
            f"the limit of open files is {hard} and {num_needed} are needed; raise it (ulimit -Hn {num_needed}){lower}"
        )


def check_cores(launch: Launch) -> None:
    """Raises DeployError if there are too few cores for the workers."""
    num_workers, num_cores = sum(map(launch.num_ranks, launch.roles)), len(launch.cores)
    if num_workers > _MAX_WORKERS_PER_CORE * num_cores:
        raise DeployError(
            f"{num_workers} workers, counting their ranks, are too many for {num_cores} cores; "
            f"lower the replicas, tensor_parallel or pipeline_parallel to {_MAX_WORKERS_PER_CORE * num_cores} in all"
        )


def check_resources(launch: Launch) -> None:
    """Raises DeployError if a worker requests resources that a private Ray cluster does not have."""
    for role in set(launch.roles):
        names = launch.config.phase(role).resources
        if names and not launch.ray_address:
            raise DeployError(
                f"{role.value}.resources names {', '.join(names)}, which a private Ray cluster does not have; "
                "remove it, or give --ray-address"
            )


def check_ray_address(launch: Launch) -> None:
    """Raises DeployError if nothing listens at the address of the existing Ray cluster."""
    if not launch.ray_address:
        return
    try:
        socket.create_connection(split_address(launch.ray_address), timeout=_CONNECT_TIMEOUT_S).close()
    except ValueError as error:
        raise DeployError(f"--ray-address: {error}") from error
    except OSError as error:
        raise DeployError(f"no Ray cluster answers at {launch.ray_address}: {error}; check --ray-address") from error


def check_devices(launch: Launch) -> None:
    """Check the emulated GPU and the profile against the deployment.

    Raises:
        DeployError: a GPU cannot be emulated, the profile lacks the workers' devices, or either lacks the model's dtype
            or its KV dtype.
    """
    for role, cores in zip(launch.roles, launch.split.worker_cores, strict=True):
        try:
            device = launch.device(cores, launch.num_ranks(role))
            device.peak(launch.config.model.dtype)
            device.check_reads(launch.config.model.kv_dtype)
        except ValueError as error:
            raise DeployError(f"{'--emulate' if launch.emulate else 'model.profile'}: {error}") from error


def core_warning(launch: Launch) -> str:
    """That workers share cores of this host, or a quota leaves few; empty if neither, or another Ray places them."""
    if launch.ray_address:
        return ""
    num_cores, num_all = len(launch.cores), len(os.sched_getaffinity(0))
    if num_cores >= len(launch.roles):
        return f"{num_cores} of {num_all}, because a control group has a CPU quota" if num_cores < num_all else ""
    return f"fewer than workers: {len(launch.roles)} workers on {len(launch.cores)}"


def gpu_warning(launch: Launch) -> str:
    """That workers take GPUs and this host's driver shows none; empty if it shows some, or another Ray places them.
    Ray may still find some, as in WSL, so that this is no error."""
    on_gpus = [role.value for role in dict.fromkeys(launch.roles) if launch.config.phase(role).device == "cuda"]
    if launch.ray_address or launch.emulate or launch.num_gpus or not on_gpus:
        return ""
    keys = " and ".join(f"{role}.device" for role in on_gpus)
    return f"{keys}: cuda, and no driver shows one here; unless Ray finds some, set device to auto or cpu"


def kernel_warning(launch: Launch) -> str:
    """Reason why kernels are slow on this host; empty if they are fast."""
    return "" if launch.emulate else slow_kernels_reason()


def _listener_of(port: int) -> str:
    """Process that listens on ``port`` of this host, for a message; empty if unknown."""
    for connection in psutil.net_connections("tcp"):
        is_it = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if is_it and connection.pid:
            with contextlib.suppress(psutil.Error):
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""


def demo_model_folder() -> Path:
    """Folder of the demo model.

    Raises:
        DeployError: this installation has no demo model.
    """
    if not (DEMO_MODEL / "config.json").is_file():
        raise DeployError(
            f"no model is named, and the demo model is not in {DEMO_MODEL}; name a model with --model FOLDER "
            "(config.json, safetensors, tokenizer) or as model.path in the deployment file"
        )
    return DEMO_MODEL
