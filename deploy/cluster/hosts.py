"""The hosts of a Ray cluster: an agent on each, and the choice of hosts for workers.

A `Host` is this machine, or a node of Ray whose agent answers. `choose_hosts` is pure.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import ceil, inf, isclose
from pathlib import Path
from typing import Any

import psutil

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cluster.folder import cluster_folder
from pdserve.deploy.cluster.host_facts import HostFacts, check_host, host_facts
from pdserve.deploy.cluster.ray_cluster import RayNode
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.deploy.cluster.supervised_process import ProcessState, SupervisedProcess

PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 10.0
"""Time without an answer of its agent after which a host counts as lost."""
_START_TIMEOUT_S = 60.0
_GPU = "GPU"


def _kill_worker(process_id: int) -> None:
    """Kill a worker's process on this host, also one that is stopped; ignores any other process."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        if psutil.Process(process_id).name().startswith("ray::"):
            os.kill(process_id, signal.SIGKILL)


class HostAgent:
    """Actor that speaks for a host. Holds a folder there, which its successor takes over if it ends."""

    def __init__(self, folder_name: str, elsewhere: Sequence[str]) -> None:
        """Arguments are those of `cluster_folder`."""
        self._open = contextlib.ExitStack()
        self._folder = self._open.enter_context(cluster_folder(folder_name, elsewhere))

    def facts(self, address: str, model_path: str) -> dict[str, Any]:
        """Fields of the `HostFacts`."""
        facts: dict[str, Any] = to_plain(host_facts(address, model_path))
        return facts

    def folder(self) -> str:
        return str(self._folder)

    def kill(self, process_id: int) -> None:
        _kill_worker(process_id)

    def clear(self) -> None:
        """Remove what the cluster has on the host."""
        self._open.close()


class Host(SupervisedProcess):
    """This machine, which needs no agent."""

    def __init__(self, facts: HostFacts, folder: str, resources: Mapping[str, float]) -> None:
        super().__init__(f"host {facts.label}")
        self.facts = facts
        self.folder = folder
        """Folder on the host that its workers share."""
        self.resources = resources
        """Ray resources of the host, used ones included."""
        self.seen_s = inf
        """Time of its last sign of life."""
        self.state = ProcessState.UP

    @property
    def address(self) -> str:
        return self.facts.address

    @property
    def warning(self) -> str:
        """What should be said of another machine that is up; empty if nothing."""
        return ""

    @property
    def actor_options(self) -> dict[str, Any]:
        """Options that bind an actor to the host. Imports Ray."""
        return {}

    def kill(self, process_id: int) -> None:
        """Kill a worker's process without Ray's help where that is possible."""
        _kill_worker(process_id)

    def log_path(self, process_id: int) -> Path | None:
        """Log of a live worker, if this process can read it."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{process_id}/fd/2").readlink()
        return None

    def clear(self) -> Future[Any] | None:
        """Remove what an agent keeps there; returns what to wait for, ``None`` unless it is up."""
        return None

    def end(self) -> None:
        pass

    def _start(self) -> None:
        pass

    def _check_starting(self, now_s: float) -> bool:
        return True

    def _check_up(self, now_s: float) -> None:
        pass


class RayHost(Host):
    """A node of an existing Ray cluster; up while its agent answers."""

    def __init__(
        self,
        desk: RayDesk,
        node: RayNode,
        model_path: str,
        ours: HostFacts,
        cluster_name: str,
        tier_paths: Sequence[str] = (),
    ) -> None:
        """
        Args:
            ours: facts of this machine, with which those of the host must agree.
            cluster_name: part of the name of the host's folder.
            tier_paths: folders of KV tiers.
        """
        unknown = HostFacts(
            address=node.address,
            name=node.hostname,
            host_id="",
            cores=(),
            memory_bytes=0,
            gpu="",
            version="",
            kernel_warning="",
            model_digest="",
        )
        super().__init__(unknown, "", node.resources)
        self.state = ProcessState.STOPPED
        self._desk = desk
        self._node_id = node.node_id
        self._model_path = model_path
        self._ours = ours
        self._folder_name = f"{cluster_name}-{self._node_id}"
        self._tier_paths = tier_paths
        self._agent: Any = None
        self._pending: Future[Any] | None = None
        self._called_at_s = 0.0

    @property
    def actor_options(self) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self._node_id, soft=False)}

    @property
    def warning(self) -> str:
        return "" if self._is_here else self.facts.kernel_warning

    @property
    def _is_here(self) -> bool:
        return self.facts.host_id == self._ours.host_id

    def kill(self, process_id: int) -> None:
        if self._is_here:
            super().kill(process_id)
        elif (agent := self._agent) is not None:
            self._desk.submit(lambda: agent.kill.remote(process_id))

    def log_path(self, process_id: int) -> Path | None:
        return super().log_path(process_id) if self._is_here else None

    def clear(self) -> Future[Any] | None:
        agent = self._agent
        return self._desk.submit(lambda: agent.clear.remote()) if self.state is ProcessState.UP else None

    def end(self) -> None:
        if (agent := self._agent) is not None:
            self._desk.submit(lambda: _end_actor(agent))
        self._agent = self._pending = None

    def _start(self) -> None:
        self._called_at_s = 0.0
        self._pending = self._desk.submit(self._create)

    def _create(self) -> Any:
        import ray

        options = {"num_cpus": 0, "max_concurrency": 2, **self.actor_options}
        return ray.remote(HostAgent).options(**options).remote(self._folder_name, self._tier_paths)

    def _check_starting(self, now_s: float) -> bool:
        if (answer := self._answer(now_s, _START_TIMEOUT_S)) is None:
            return False
        if self._agent is None:
            self._agent = agent = answer
            self._pending = self._desk.submit(lambda: agent.folder.remote())
            return False
        agent = self._agent
        if isinstance(answer, str):
            self.folder = answer
            address, model_path = self.facts.address, self._model_path
            self._pending = self._desk.submit(lambda: agent.facts.remote(address, model_path))
            return False
        self.facts = from_plain(HostFacts, answer, "the facts of a host")
        check_host(self.facts, self._ours)
        self._called_at_s = self.seen_s = now_s
        return True

    def _check_up(self, now_s: float) -> None:
        called_at_s = self._called_at_s
        if self._answer(now_s, PING_TIMEOUT_S) is not None and now_s - called_at_s >= PING_INTERVAL_S:
            agent = self._agent
            self.seen_s = called_at_s
            self._called_at_s = now_s
            self._pending = self._desk.submit(lambda: agent.folder.remote())

    def _answer(self, now_s: float, timeout_s: float) -> Any:
        """Result of the pending call; ``None`` while it runs."""
        assert self._pending is not None
        if self._pending.done():
            return self._pending.result()
        if self._desk.is_stuck or not self._called_at_s:
            self._called_at_s = now_s
        elif now_s - self._called_at_s > timeout_s:
            raise TimeoutError(f"no answer for {timeout_s:.0f} s")
        return None

    def _reason(self, error: Exception) -> str:
        if isinstance(error, DeployError | TimeoutError):
            return str(error)
        # A package that the host lacks, for example, ends the agent's creation.
        return str(error).strip().splitlines()[-1] if "creation task" in str(error) else "its agent has ended"


def _end_actor(agent: Any) -> None:
    import ray

    ray.kill(agent)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeeds:
    """What a worker needs of its host."""

    role: WorkerRole
    number: int
    num_ranks: int = 1
    gpu_share: float = 0.0
    """GPUs, one for each rank, or the share of one."""
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.number}"

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray counts of it; empty for a worker that any host can take."""
        return {**self.resources, **({"GPU": self.gpu_share} if self.gpu_share else {})}


def choose_hosts(
    workers: Sequence[WorkerNeeds], hosts: Sequence[Host], taken: Mapping[str, Sequence[WorkerNeeds]]
) -> dict[str, Host | None]:
    """Give each worker the emptiest host with room for it, larger ones first, as the planner simulates it; ``None``
    where no host has room. Cores are shared if they are too few; GPUs and resources are not.

    Args:
        taken: what other workers need, by address of their host.
    """
    rooms = {host.address: _Room(host, taken.get(host.address, ())) for host in hosts}
    found: dict[str, Host | None] = {}
    for needs in sorted(workers, key=lambda needs: (needs.gpu_share, needs.num_ranks), reverse=True):
        fitting = [room for room in rooms.values() if room.fits(needs)]
        room = min(fitting, key=lambda room: room.load(needs), default=None)
        found[needs.name] = room.host if room else None
        if room:
            room.take(needs)
    return found


def check_gpus(missing: Sequence[WorkerNeeds]) -> None:
    """Raises DeployError if workers have no host because of their GPUs, which are enough over all hosts."""
    if names := [needs.name for needs in missing if needs.gpu_share and not needs.resources]:
        raise DeployError(
            f"no single host has the GPUs of {' and '.join(names)} left, though all hosts together do: lower "
            "tensor_parallel, pipeline_parallel or the replicas, or set device to cpu"
        )


class _Room:
    """What is left of a host."""

    def __init__(self, host: Host, taken: Sequence[WorkerNeeds]) -> None:
        self.host = host
        self._num_ranks = 0
        self._gpus = [1.0] * int(host.resources.get(_GPU, 0))
        self._resources = dict(host.resources)
        for needs in taken:
            self.take(needs)

    def fits(self, needs: WorkerNeeds) -> bool:
        return self._gpus_for(needs) is not None and all(
            self._resources.get(name, 0) >= amount for name, amount in needs.resources.items()
        )

    def load(self, needs: WorkerNeeds) -> float:
        """Share of the host's GPUs, or of its cores, that is in use."""
        if needs.gpu_share:
            return 1 - sum(self._gpus) / len(self._gpus)
        return self._num_ranks / max(1, len(self.host.facts.cores))

    def take(self, needs: WorkerNeeds) -> None:
        self._num_ranks += needs.num_ranks
        for index in self._gpus_for(needs) or ():
            self._gpus[index] -= min(1.0, needs.gpu_share)
        for name, amount in needs.resources.items():
            self._resources[name] = self._resources.get(name, 0) - amount

    def _gpus_for(self, needs: WorkerNeeds) -> list[int] | None:
        """The first GPUs with room, one for each rank; None where they are too few."""
        share, num_gpus = min(1.0, needs.gpu_share), ceil(needs.gpu_share)
        with_room = [index for index, left in enumerate(self._gpus) if left > share or isclose(left, share)]
        return with_room[:num_gpus] if len(with_room) >= num_gpus else None
