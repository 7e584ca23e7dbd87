"""Turns a deployment into the configuration of each process. The command line builds a `Launch`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.contracts.codec import to_json
from pdserve.contracts.deployment import DeploymentConfig, PhaseConfig
from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.decode_worker.worker import DecodeWorker
from pdserve.deploy.cluster.resources import CoreSplit
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.prefill_worker.worker import PrefillWorker
from pdserve.router.process_config import RouterProcessConfig

WORKER_CLASSES: dict[WorkerRole, type] = {
    WorkerRole.PREFILL: PrefillWorker,
    WorkerRole.DECODE: DecodeWorker,
    WorkerRole.MIXED: DecodeWorker,
}


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
    time_scale: float = 1.0
    """Real seconds per emulated second."""
    ray_address: str = ""
    """``host:port`` of an existing Ray cluster; empty starts a private one."""
    drain_timeout_s: float = 30.0
    """Seconds that in-flight requests may take after the signal to stop."""

    def phase(self, role: WorkerRole) -> PhaseConfig:
        return self.config.phase(role)

    def device(self, num_cores: int) -> Hardware:
        """Device that a worker with ``num_cores`` cores computes on, or emulates.

        Raises:
            ValueError: neither the profile nor the catalogue has the device.
        """
        if self.emulate or not self.devices:
            return hardware(self.emulate or "cpu", num_cores=num_cores, added=self.devices)
        if f"cpu-{num_cores}" not in self.devices:
            raise ValueError(
                f"{self.config.model.profile} has {', '.join(self.devices)}, and a worker has {num_cores} cores; "
                f"run pdserve profile --cores {num_cores} with it as --output"
            )
        return self.devices[f"cpu-{num_cores}"]

    def predicted_device(self, role: WorkerRole, num_cores: int) -> Hardware | None:
        """Device of the predictions by worker and router: the worker's GPU if it may have one, else `device`. None
        without a profile: worker and router then look into the catalogue."""
        if self.gpu and not self.emulate and self.phase(role).device != "cpu":
            return hardware(self.gpu, added=self.devices)
        return self.device(num_cores) if self.devices else None

    @property
    def roles(self) -> list[WorkerRole]:
        """One entry per worker: prefill first, then decode, then mixed."""
        return [role for role in WorkerRole for _ in range(self.phase(role).replicas)]


def worker_configs(
    launch: Launch,
    model_path: Path,
    split: CoreSplit,
    all_cores: Sequence[int],
    cluster_token: str,
    core_board: str = "",
) -> list[WorkerConfig]:
    """Configuration of each worker, in the order of `Launch.roles`.

    Args:
        split: cores of each worker.
        all_cores: cores of the transfer processes if no core is spare.
        core_board: file through which workers lend their idle cores; empty lends none.
    """
    model = launch.config.model
    lent_cores = tuple(
        cores if launch.phase(role).lend_cores else ()
        for role, cores in zip(launch.roles, split.worker_cores, strict=True)
    )
    numbers = dict.fromkeys(WorkerRole, 0)
    configs = []
    for index, (role, cores) in enumerate(zip(launch.roles, split.worker_cores, strict=True)):
        phase = launch.phase(role)
        device = launch.predicted_device(role, len(cores) or len(all_cores))
        configs.append(
            WorkerConfig(
                worker_id=f"{role.value}-{numbers[role]}",
                role=role,
                model_path=str(model_path),
                precision=model.precision,
                tensor_parallel=phase.tensor_parallel,
                device=phase.device,
                gpu_memory_utilization=phase.gpu_memory_utilization,
                max_model_len=model.max_model_len,
                block_size=model.block_size,
                kv_memory_bytes=phase.kv_memory_bytes,
                swap_memory_bytes=phase.swap_memory_bytes,
                max_batch_tokens=phase.max_batch_tokens,
                max_batch_size=phase.max_batch_size,
                transport=launch.config.kv_transfer.transport,
                cluster_token=cluster_token,
                cpu_cores=cores,
                core_board=core_board if cores and phase.lend_cores else "",
                core_index=index,
                core_sets=lent_cores,
                transfer_cpu_cores=split.spare_cores or tuple(all_cores),
                emulate=launch.emulate,
                hardware=to_json(device) if device else "",
                time_scale=launch.time_scale,
            )
        )
        numbers[role] += 1
    return configs


def router_config(
    launch: Launch, model_path: Path, split: CoreSplit, num_cores: int, cluster_token: str
) -> RouterProcessConfig:
    """Configuration of the router.

    Args:
        num_cores: usable cores of this machine.
    """
    model, router = launch.config.model, launch.config.router
    return RouterProcessConfig(
        model_path=str(model_path),
        served_name=model.served_name or model_path.resolve().name,
        host=router.host,
        port=router.port,
        admin_port=router.admin_port,
        slo=launch.config.slo,
        max_queued_requests=router.max_queued_requests,
        cluster_token=cluster_token,
        hardware=launch.emulate or "cpu",
        devices={
            role: device
            for role, cores in zip(launch.roles, split.worker_cores, strict=True)
            if (device := launch.predicted_device(role, len(cores) or num_cores))
        },
        time_scale=launch.time_scale if launch.emulate else 1.0,
        tensor_parallel={role: launch.phase(role).tensor_parallel for role in launch.roles},
        cores_per_worker=max(1, *(len(cores) for cores in split.worker_cores)),
        precision=model.precision,
        drain_timeout_s=launch.drain_timeout_s,
    )
