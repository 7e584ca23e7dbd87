"""Which hosts the cluster has, and which worker runs on which.

A private Ray has one host, this machine. In an existing one every node is a host once its agent has answered. Workers
are placed when all of them fit; a worker that fails starts again on its host, or elsewhere if the host is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.deploy.checks.model import check_host_memory
from pdserve.deploy.checks.preflight import check_cores, check_devices
from pdserve.deploy.cluster.host_facts import LOOPBACK, check_network, host_facts
from pdserve.deploy.cluster.hosts import Host, RayHost, WorkerNeeds, check_gpus, choose_hosts
from pdserve.deploy.cluster.ray_cluster import RayCluster
from pdserve.deploy.cluster.resources import gpu_shares
from pdserve.deploy.cluster.supervised_process import ProcessState
from pdserve.deploy.cluster.worker_process import WorkerProcess
from pdserve.deploy.launch import Launch, worker_configs
from pdserve.engine.worker.process import WorkerActor
from pdserve.model.weights.digest import model_digest


class Fleet:
    """Hosts and workers of one cluster."""

    def __init__(self, ray: RayCluster, launch: Launch, cluster_token: str, folder: Path) -> None:
        """
        Args:
            folder: folder of the cluster on this machine.
        """
        self.workers: list[WorkerProcess] = []
        """Empty until they are placed."""
        self.launches: list[Launch] = []
        """The part of the launch on each host, once the workers are placed."""
        self._ray = ray
        self._launch = launch
        self._cluster_token = cluster_token
        self._folder = folder
        self._model_path = str(Path(launch.config.model.path).absolute())
        self._ours = host_facts(LOOPBACK, self._model_path)
        self._hosts: dict[str, Host] = {}
        """By id of the node."""
        self._needs: dict[str, WorkerNeeds] = {}
        """By worker."""
        self._homes: dict[str, WorkerConfig] = {}
        """First configuration of each worker, which is for its first host."""
        self._start_timeout_s = 0.0
        self._is_networked = False
        """True if workers listen beyond this machine."""

    @property
    def hosts(self) -> list[Host]:
        return list(self._hosts.values())

    @property
    def replicas(self) -> dict[WorkerRole, int]:
        """Number of workers of each role with which the cluster can start anew. A worker counts for its present role,
        or for the one that it was placed for if these request different resources of Ray."""
        config = self._launch.config
        staying = [worker for worker in self.workers if not worker.is_leaving]
        first = [self._needs[worker.name].role for worker in staying]
        roles = [
            worker.role if config.phase(worker.role).resources == config.phase(role).resources else role
            for worker, role in zip(staying, first, strict=True)
        ]
        return {role: roles.count(role) for role in WorkerRole}

    @property
    def present(self) -> dict[WorkerRole, int]:
        """Number of workers of each role, up or not, without those that leave."""
        return {role: sum(each.role is role and not each.is_leaving for each in self.workers) for role in WorkerRole}

    @property
    def is_on_gpus(self) -> bool:
        return any(needs.gpu_share for needs in self._needs.values())

    def find_hosts(self) -> list[Host]:
        """Take the live nodes of Ray as hosts; returns those that are gone."""
        if not self._launch.ray_address:
            self._hosts = self._hosts or {"": Host(self._ours, str(self._folder), self._ray.resources)}
            return []
        if self.workers and not self._is_networked:
            return []
        nodes = {node.node_id: node for node in self._ray.nodes}
        gone = [self._hosts.pop(node_id) for node_id in self._hosts.keys() - nodes.keys()]
        for host in gone:
            host.end()
            host.state = ProcessState.STOPPED
        for node_id in nodes.keys() - self._hosts.keys():
            self._hosts[node_id] = RayHost(
                self._ray.desk,
                nodes[node_id],
                self._model_path,
                self._ours,
                self._folder.name,
                self._launch.tier_paths,
            )
        return gone

    def abandon_starts(self, host: Host) -> list[WorkerProcess]:
        """Give up the workers that start on a host whose agent does not answer; returns them. Ray may take a minute to
        notice its loss."""
        starting = [each for each in self.workers if each.host is host and each.state is ProcessState.STARTING]
        for worker in starting:
            worker.abandon_start(host.failed_s)
        return starting

    def clear(self) -> None:
        """Forget hosts and actors after their Ray cluster ended."""
        for worker in self.workers:
            worker.kill()
            worker.clear()
        if self._launch.ray_address:
            for host in self.hosts:
                host.state = ProcessState.STOPPED
            self._hosts.clear()

    def place_workers(self, start_timeout_s: float) -> str:
        """Place every worker, if all have a host; returns what is missing, or nothing.

        Raises:
            DeployError: a host cannot run its workers; the text names it and the remedy.
        """
        launch, hosts = self._launch, self._hosts_up
        if len(hosts) < launch.num_hosts or not hosts:
            return f"{len(hosts)} of {launch.num_hosts} have joined"
        host_gpus = [host.resources.get("GPU", 0) for host in hosts]
        num_gpus = sum(host_gpus)
        configs = worker_configs(launch)
        shares = gpu_shares(configs, num_gpus, max(host_gpus))
        self._needs = {
            config.worker_id: WorkerNeeds(
                role=role,
                number=number,
                num_ranks=launch.num_ranks(role),
                gpu_share=share,
                resources=launch.config.phase(role).resources,
            )
            for (role, number), config, share in zip(launch.all_workers, configs, shares, strict=True)
        }
        found = choose_hosts(list(self._needs.values()), hosts, {})
        if missing := [self._needs[name] for name, host in found.items() if host is None]:
            check_gpus(missing)
            return " and ".join(_missing(needs) for needs in missing)
        self._launch = launch.on_gpus(num_gpus, {needs.role: needs.gpu_share for needs in self._needs.values()})
        placed = {name: host for name, host in found.items() if host is not None}
        self._check_network(list(placed.values()))
        self._start_timeout_s = start_timeout_s
        for name in self._needs:
            self._add(self._home_config(name, placed), placed[name])
        return ""

    def add_worker(self, role: WorkerRole) -> WorkerProcess:
        """Add one to the workers of ``role``, which the launch has; it takes no cores from the others.

        Raises:
            DeployError: no host has room.
        """
        ((needs, host),) = self.find_room([role])
        self._needs[needs.name] = needs
        self._homes[needs.name] = self._away_config(needs, host)
        return self._add(self._homes[needs.name], host)

    def find_room(
        self, roles: Sequence[WorkerRole], leaving: Sequence[WorkerProcess] = ()
    ) -> list[tuple[WorkerNeeds, Host]]:
        """Hosts for more workers of these roles, which the launch has, once others have left; and what each needs.

        Raises:
            DeployError: no host has room for one of them.
        """
        numbers = {(needs.role, needs.number) for worker in self.workers for needs in [self._needs[worker.name]]}
        added = []
        for role in roles:
            number = next(number for number in itertools.count() if (role, number) not in numbers)
            numbers.add((role, number))
            added.append(dataclasses.replace(self._like(role), number=number))
        taken = self._taken(leaving)
        found = choose_hosts(added, self._hosts_up, taken)
        placed = []
        for needs in added:
            if (host := found[needs.name]) is None:
                raise DeployError(f"no host has room: {_missing(needs)}; remove another worker, or add a host")
            here = taken.setdefault(host.address, [])
            here.append(needs)
            check_host_memory(self._launch.on_host(host.facts, [(each.role, each.number) for each in here]))
            placed.append((needs, host))
        return placed

    def request_hosts(self, replicas: Mapping[WorkerRole, int]) -> None:
        """Have Ray's autoscaler, if one runs, keep hosts for so many workers of each role, as far as these request
        resources of Ray."""
        bundles = [self._like(role).bundle for role, count in replicas.items() for _ in range(count)]
        self._ray.request_hosts([bundle for bundle in bundles if bundle])

    def _like(self, role: WorkerRole) -> WorkerNeeds:
        """What a worker of ``role`` needs, which the launch has."""
        return next(each for each in self._needs.values() if each.role is role)

    def _add(self, config: WorkerConfig, host: Host) -> WorkerProcess:
        needs = self._needs[config.worker_id]
        resources = self._ray.worker_resources | dict(needs.resources)
        worker = WorkerProcess(
            self._ray.desk, config, WorkerActor, resources, host, needs.gpu_share, self._start_timeout_s
        )
        self.workers.append(worker)
        return worker

    def why_not_relabel(self, worker: WorkerProcess, role: WorkerRole) -> str:
        """The key of the deployment by which a worker cannot take ``role``; empty if it can."""
        if role is not WorkerRole.PREFILL and not worker.may_decode:
            return "switchable is false, and prefill workers on GPUs then keep no memory to decode"
        return self._launch.config.difference(worker.role, role)

    def check_model(self) -> None:
        """
        Raises:
            DeployError: the model on this machine is another one than at the start.
        """
        if model_digest(Path(self._model_path)) != self._ours.model_digest:
            raise DeployError(f"the model in {self._model_path} has changed; put that back, or start the cluster again")

    def has_host(self, worker: WorkerProcess) -> bool:
        """Whether a stopped worker can start: its host is up, or it has been moved to another."""
        host = worker.host
        if host.state is ProcessState.UP:
            return host.seen_s >= worker.failed_s  # a host that died with its worker is not up for long
        taken = self._taken([worker])
        needs, home = self._needs[worker.name], self._homes[worker.name]
        at_home = [host for host in self._hosts_up if host.address == home.host]
        for hosts in (at_home, self._hosts_up):
            if (found := choose_hosts([needs], hosts, taken)[needs.name]) is not None:
                worker.move(found, home if found.address == home.host else self._away_config(needs, found))
                return True
        return False

    @property
    def _hosts_up(self) -> list[Host]:
        """In the order of their addresses, so that a placement is the same after a restart."""
        return sorted((host for host in self.hosts if host.state is ProcessState.UP), key=lambda host: host.address)

    def _taken(self, besides: Sequence[WorkerProcess] = ()) -> dict[str, list[WorkerNeeds]]:
        """What workers need, by address of their host."""
        taken: dict[str, list[WorkerNeeds]] = {}
        for worker in self.workers:
            if worker not in besides:
                taken.setdefault(worker.host.address, []).append(self._needs[worker.name])
        return taken

    def _check_network(self, hosts: list[Host]) -> None:
        """Let a cluster of this machine listen on loopback only, and check the security of any other."""
        self._is_networked = self._launch.num_hosts > 1 or any(
            host.facts.host_id != self._ours.host_id for host in hosts
        )
        if not self._is_networked:
            for host in hosts:
                host.facts = dataclasses.replace(host.facts, address=LOOPBACK)
        check_network([host.facts for host in hosts], self._launch.config.security)

    def _home_config(self, name: str, placed: dict[str, Host]) -> WorkerConfig:
        """Configuration of a worker on the host where it is placed first; checks the host once."""
        if name not in self._homes:
            host = placed[name]
            mine = [self._needs[each] for each in self._needs if placed[each] is host]
            launch = self._launch.on_host(host.facts, [(each.role, each.number) for each in mine])
            if self._launch.ray_address:
                _check_launch(host, launch)
            self.launches.append(launch)
            self._homes |= self._configs(launch, host)
        return self._homes[name]

    def _away_config(self, needs: WorkerNeeds, host: Host) -> WorkerConfig:
        """Configuration of a worker that joins others on a host: it takes none of their cores for itself."""
        launch = self._launch.on_host(host.facts, [(needs.role, needs.number)])
        config = self._configs(launch, host)[needs.name]
        return dataclasses.replace(
            config,
            num_host_workers=1 + len(self._taken().get(host.address, ())),
            cpu_cores=(),
            core_board="",
            core_sets=(),
            transfer_cpu_cores=host.facts.cores,
        )

    def _configs(self, launch: Launch, host: Host) -> dict[str, WorkerConfig]:
        digest = self._ours.model_digest
        configs = worker_configs(launch, self._cluster_token, host.folder)
        return {each.worker_id: dataclasses.replace(each, model_digest=digest) for each in configs}


def _check_launch(host: Host, launch: Launch) -> None:
    try:
        check_cores(launch)
        check_devices(launch)
        check_host_memory(launch)
    except DeployError as error:
        raise DeployError(f"{host.name}: {error}") from error


def _missing(needs: WorkerNeeds) -> str:
    wanted = [f"{amount:g} {name}" for name, amount in needs.resources.items()]
    if needs.gpu_share:
        wanted.append(f"{needs.gpu_share:g} GPU")
    return f"none has {' and '.join(wanted)} left for {needs.name}"
