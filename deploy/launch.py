"""Turns a deployment into the configuration of each process. The command line builds a `Launch`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdserve.contracts.codec import to_json
from pdserve.contracts.deployment import DeploymentConfig, PhaseConfig, parse_bytes, parse_ports
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.deploy.cluster.host_facts import LOOPBACK, HostFacts
from pdserve.deploy.cluster.resources import CoreSplit, gpu_shares, split_cores
from pdserve.deploy.config import override
from pdserve.kv_transfer.host_limits import available_memory_bytes, usable_cores
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.router.process_config import RouterProcessConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Deployment of one `pdserve up`, with the options of this run."""

    config: DeploymentConfig = field(default_factory=DeploymentConfig)
    devices: Mapping[str, Hardware] = field(default_factory=dict)
    """Devices of ``model.profile``, by name."""
    emulate: str = ""
    """GPU to emulate instead of computing; empty computes."""
    gpu: str = ""
    """Catalogue name of this host's GPUs; empty if there are none, or if the catalogue lacks their kind."""
    num_gpus: float = 0
    """GPUs of this host."""
    dtype_reason: str = "model.dtype"
    """Why ``model.dtype`` is as it is, for the banner."""
    layout_reason: str = ""
    """What the banner adds to the number of workers, if they are others than those of the deployment."""
    time_scale: float = 1.0
    """Real seconds per emulated second."""
    cores: tuple[int, ...] = field(default_factory=usable_cores)
    """Cores of this host that the cluster may use."""
    memory_bytes: int = field(default_factory=available_memory_bytes)
    """Memory of this host that is available."""
    address: str = LOOPBACK
    """Address of this host on which its workers listen."""
    workers: tuple[tuple[WorkerRole, int], ...] = ()
    """Role of each worker of this host, and its number among those of its role; empty has all of the deployment."""
    ray_address: str = ""
    """``host:port`` of an existing Ray cluster; empty starts a private one."""
    num_hosts: int = 1
    """Hosts of the existing Ray cluster to wait for."""
    drain_timeout_s: float = 30.0
    """Seconds that in-flight requests may take after the signal to stop."""

    def num_ranks(self, role: WorkerRole) -> int:
        """Processes that share the cores of a worker."""
        phase = self.config.phase(role)
        return 1 if self.emulate else phase.tensor_parallel * phase.pipeline_parallel

    def device(self, cores: Sequence[int], num_ranks: int = 1) -> Hardware:
        """Device that a rank of a worker with ``cores`` computes on, or emulates. No ``cores``: all.

        Raises:
            ValueError: neither the profile nor the catalogue has the device.
        """
        num_cores = max(1, (len(cores) or len(self.cores)) // num_ranks)
        if self.emulate or not self.devices:
            return hardware(self.emulate or "cpu", num_cores=num_cores, added=self.devices)
        if f"cpu-{num_cores}" not in self.devices:
            raise ValueError(
                f"{self.config.model.profile} has {', '.join(self.devices)}, and a rank has {num_cores} cores; "
                f"run pdserve profile --cores {num_cores} with it as --output"
            )
        return self.devices[f"cpu-{num_cores}"]

    def is_on_gpu(self, role: WorkerRole) -> bool:
        """Whether a worker gets GPUs, if there are enough."""
        device = self.config.phase(role).device
        return not self.emulate and (device == "cuda" or (device == "auto" and bool(self.gpu or self.num_gpus)))

    def predicted_device(self, role: WorkerRole, cores: Sequence[int]) -> Hardware | None:
        """Device of the predictions by worker and router: the worker's GPU if it may have one, else `device`. None
        without a profile: worker and router then look into the catalogue."""
        if self.gpu and self.is_on_gpu(role):
            return hardware(self.gpu, added=self.devices)
        return self.device(cores, self.num_ranks(role)) if self.devices else None

    def on_host(self, facts: HostFacts, workers: Sequence[tuple[WorkerRole, int]]) -> Launch:
        """The part of this launch with ``workers``, on one of several hosts."""
        return replace(
            self,
            cores=facts.cores,
            memory_bytes=facts.memory_bytes,
            gpu=facts.gpu,
            address=facts.address,
            workers=tuple(workers),
        )

    def fitted(self, *, is_layout_named: bool) -> Launch:
        """This launch on the GPUs of this host. One GPU gets one worker for both phases, unless the user named others.

        Raises:
            DeployError: the GPUs are too few.
        """
        launch = self
        if self.num_gpus == 1 and not (is_layout_named or self.emulate):
            none = PhaseConfig(replicas=0)
            config = replace(self.config, prefill=none, decode=none, mixed=PhaseConfig())
            launch = replace(self, config=config, layout_reason=" for both phases, because there is one GPU")
        shares = gpu_shares(worker_configs(launch), self.num_gpus)
        return launch.on_gpus(self.num_gpus, dict(zip(launch.roles, shares, strict=True)))

    def on_gpus(self, num_gpus: float, shares: Mapping[WorkerRole, float]) -> Launch:
        """This launch in a cluster with ``num_gpus``, of which each worker of a role has that share, or that many."""
        phases: dict[str, Any] = {}
        for role, share in shares.items():
            phase = self.config.phase(role)
            device = phase.device if share else "cpu"
            utilization = min(share, phase.gpu_memory_utilization) if share % 1 else phase.gpu_memory_utilization
            phases[role.value] = replace(phase, device=device, gpu_memory_utilization=utilization)
        return replace(self, num_gpus=num_gpus, config=replace(self.config, **phases))

    @property
    def all_workers(self) -> tuple[tuple[WorkerRole, int], ...]:
        """`workers`, with the default filled in: prefill first, then decode, then mixed."""
        return self.workers or tuple(
            (role, index) for role in WorkerRole for index in range(self.config.phase(role).replicas)
        )

    @property
    def roles(self) -> list[WorkerRole]:
        """One entry per worker, in the order of `all_workers`."""
        return [role for role, _ in self.all_workers]

    @property
    def tier_paths(self) -> list[str]:
        """Folders of KV tiers."""
        return [tier.path for role in WorkerRole if (tier := self.config.phase(role).kv_tier) is not None]

    @property
    def split(self) -> CoreSplit:
        """Cores of each worker, in the order of `roles`."""
        return split_cores(self.cores, self.roles, [self.num_ranks(role) for role in self.roles])


def worker_configs(launch: Launch, cluster_token: str = "", folder: str = "") -> list[WorkerConfig]:
    """Configuration of each worker, in the order of `Launch.roles`.

    Args:
        folder: that workers of a host share, to lend idle cores there; empty lends none. Files of their KV tiers are in
            folders of its name.
    """
    model, roles, split = launch.config.model, launch.roles, launch.split
    lent_cores = tuple(
        cores if _lends_cores(launch, role) else () for role, cores in zip(roles, split.worker_cores, strict=True)
    )
    configs = []
    for index, ((role, number), cores) in enumerate(zip(launch.all_workers, split.worker_cores, strict=True)):
        phase = launch.config.phase(role)
        device = launch.predicted_device(role, cores)
        configs.append(
            WorkerConfig(
                worker_id=f"{role.value}-{number}",
                host=launch.address,
                ports=parse_ports(launch.config.ports),
                role=role,
                model_path=model.path,
                may_decode=role is not WorkerRole.PREFILL or launch.config.switchable or not launch.is_on_gpu(role),
                precision=model.precision,
                tensor_parallel=phase.tensor_parallel,
                pipeline_parallel=phase.pipeline_parallel,
                expert_parallel=phase.expert_parallel,
                device=phase.device,
                gpu_memory_utilization=phase.gpu_memory_utilization,
                max_model_len=model.max_model_len,
                block_size=model.block_size,
                kv_memory_bytes=phase.kv_memory_bytes,
                swap_memory_bytes=phase.swap_memory_bytes,
                num_host_workers=len(roles),
                kv_tier_path=str(Path(phase.kv_tier.path) / Path(folder).name) if phase.kv_tier else "",
                kv_tier_bytes=parse_bytes(phase.kv_tier.size) if phase.kv_tier else 0,
                max_batch_tokens=phase.max_batch_tokens,
                max_batch_size=phase.max_batch_size,
                batching=phase.batching,
                speculation=phase.drafter,
                draft_path=phase.draft_path,
                transport=launch.config.kv_transfer.transport,
                cluster_token=cluster_token,
                tls=launch.config.security.tls,
                cpu_cores=cores,
                core_board=f"{folder}/cores" if folder and cores and _lends_cores(launch, role) else "",
                core_index=index,
                core_sets=lent_cores,
                transfer_cpu_cores=split.spare_cores or launch.cores,
                emulate=launch.emulate,
                hardware=to_json(device) if device else "",
                time_scale=launch.time_scale,
            )
        )
    return configs


def _lends_cores(launch: Launch, role: WorkerRole) -> bool:
    """Ranks of one worker keep their cores: the slowest sets the pace."""
    return launch.config.phase(role).lend_cores and launch.num_ranks(role) == 1


def router_configs(
    launch: Launch, cluster_token: str = "", admin_token: str = "", hosts: Sequence[Launch] = ()
) -> list[RouterProcessConfig]:
    """Configuration of each router, with the arguments of `router_config`."""
    config, router = router_config(launch, cluster_token, admin_token, hosts), launch.config.router
    ports = [router.admin_port and router.admin_port + number for number in range(router.replicas)]
    deployments = [override(config.deployment, "router", admin_port=port) for port in ports]
    return [replace(config, replica=number, deployment=each) for number, each in enumerate(deployments)]


def _absolute(path: str) -> str:
    return path and str(Path(path).absolute())


def _folder_name(folder: Path) -> str:
    """Name of a model's folder; of a snapshot in Hugging Face's cache, that of its repository."""
    repository = folder.parent.parent.name
    return repository.removeprefix("models--").replace("--", "/") if repository.startswith("models--") else folder.name


def router_config(
    launch: Launch, cluster_token: str = "", admin_token: str = "", hosts: Sequence[Launch] = ()
) -> RouterProcessConfig:
    """Configuration of the router.

    Args:
        hosts: the part of ``launch`` on each host, if there are several.
    """
    model, router = launch.config.model, launch.config.router
    named = override(launch.config, "model", served_name=model.served_name or _folder_name(Path(model.path).resolve()))
    deployment = override(
        named,
        "router",
        keys_file=_absolute(router.keys_file),
        tls_certificate=_absolute(router.tls_certificate),
        tls_key=_absolute(router.tls_key),
        request_log=_absolute(router.request_log),
    )
    workers = [
        (role, cores, host)
        for host in hosts or (launch,)
        for role, cores in zip(host.roles, host.split.worker_cores, strict=True)
    ]
    return RouterProcessConfig(
        deployment=deployment,
        admin_token=admin_token,
        cluster_token=cluster_token,
        hardware=launch.emulate or "cpu",
        devices={role: device for role, cores, host in workers if (device := host.predicted_device(role, cores))},
        time_scale=launch.time_scale,
        cores_per_rank=max(1, *(len(cores) // launch.num_ranks(role) for role, cores, _ in workers)),
        drain_timeout_s=launch.drain_timeout_s,
    )
