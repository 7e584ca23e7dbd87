"""The planner's view of a running cluster: its workers from the router's status, its traffic as a workload.

Parses data that the caller fetched. Used by `pdserve plan --live`, with `pdserve.planner.live.live` and
`pdserve.planner.live.replan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np

from pdserve.contracts.codec import from_plain, read_value, to_plain
from pdserve.contracts.deployment import ModelConfig, SloConfig
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole, whole_worker_id
from pdserve.model.cost.hardware import Hardware
from pdserve.planner.layout import Hosts, Layout, PlannedModel, Pool
from pdserve.planner.live.live import LiveError, ObservedTraffic
from pdserve.planner.search.plan import Supply
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from pdserve.planner.workload.traffic import Traffic
from pdserve.planner.workload.workload import Workload

_DEGREES = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
"""In these and in hardware the workers of a pool are alike."""
_LIMITS = ("max_batch_tokens", "max_batch_size", "num_kv_blocks")
"""In these they may differ: a worker that had another role has those of its first pool. A pool has the least."""
_MIN_CACHED_SHARE = 0.01
"""Share of prompt tokens below which the traffic is treated as sharing nothing, which simulates much faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """One worker that is up; all micro-batches of it together."""

    worker_id: str
    role: WorkerRole
    host: str
    hardware: str
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: bool
    precision: Precision
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_batch_tokens: int
    max_batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """The cluster behind a router, from its status."""

    workers: tuple[RunningWorker, ...]
    """Workers that are up; at least one."""
    model: ModelConfig
    """As loaded by the workers; its path is on the router's host."""
    slo: SloConfig
    devices: Mapping[WorkerRole, Hardware]
    """Predicted device of each role's workers."""
    transport: str
    """``kv_transfer.transport``."""
    policy: str
    """``router.policy``."""


def running_cluster(status: Mapping[str, Any]) -> RunningCluster:
    """Parse the router's `/status`.

    Raises:
        LiveError: it is not a router's status, no worker is up, or their models differ.
    """
    try:
        have_whole_experts = {WorkerRole(each) for each in status["expert_parallel"]}
        workers = _joined([_worker(each, have_whole_experts) for each in status["workers"] if each["up"]])
        slo = from_plain(SloConfig, status["slo"], "the status")
        devices = read_value(dict[WorkerRole, Hardware], status["devices"], "the status", "devices")
        path, name = str(status["model"]["path"]), str(status["model"]["name"])
        transport, policy = str(status["kv_transport"]), str(status["policy"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LiveError("this is not the status of a pdserve router of this version; give its admin address") from error
    if not workers:
        raise LiveError("no worker of the cluster is up; wait until pdserve status reports that it is ready")
    held = _held(path, name, workers)
    return RunningCluster(workers=workers, model=held, slo=slo, devices=devices, transport=transport, policy=policy)


def _held(path: str, name: str, workers: Sequence[RunningWorker]) -> ModelConfig:
    ways = {(each.precision, each.block_size) for each in workers}
    if len(ways) > 1:
        words = " and ".join(
            sorted(
                f"{held.dtype}, KV {held.kv_dtype}, weights {held.quantization}, blocks of {size}"
                for held, size in ways
            )
        )
        raise LiveError(f"the workers differ in precision or block size: {words}; a placement has one of each")
    ((precision, block_size),) = ways
    return ModelConfig(
        path=path,
        **to_plain(precision),
        max_model_len=min(each.max_model_len for each in workers),
        block_size=block_size,
        served_name=name,
    )


def _worker(status: Mapping[str, Any], have_whole_experts: Container[WorkerRole]) -> RunningWorker:
    limits, role = status["limits"], WorkerRole(status["role"])
    return RunningWorker(
        worker_id=str(status["worker_id"]),
        role=role,
        host=str(status["address"]).rpartition(":")[0],
        hardware=str(status["hardware"]),
        tensor_parallel=int(status["tensor_parallel"]),
        pipeline_parallel=int(status["pipeline_parallel"]),
        expert_parallel=role in have_whole_experts,
        precision=from_plain(Precision, {name: status[name] for name in to_plain(Precision())}, "the status"),
        max_model_len=int(limits["max_model_len"]),
        block_size=int(limits["block_size"]),
        num_kv_blocks=int(limits["num_blocks"]),
        max_batch_tokens=int(limits["max_batch_tokens"]),
        max_batch_size=int(limits["max_batch_size"]),
    )


def _joined(micro_batches: Iterable[RunningWorker]) -> tuple[RunningWorker, ...]:
    """The workers of ``micro_batches``, whose ids are those of the workers and a number."""
    parts: dict[str, list[RunningWorker]] = {}
    for each in micro_batches:
        parts.setdefault(whole_worker_id(each.worker_id), []).append(each)
    summed = ("num_kv_blocks", "max_batch_size")
    return tuple(
        replace(some[0], worker_id=worker_id, **{name: sum(getattr(each, name) for each in some) for name in summed})
        for worker_id, some in parts.items()
    )


def running_layout(workers: Sequence[RunningWorker], device: Callable[[RunningWorker], Hardware]) -> Layout:
    """The placement of the workers.

    Args:
        device: maps a worker to the hardware of its ranks.

    Raises:
        LiveError: a phase has no workers, or those of one role differ in device or parallel degrees.
        ValueError: unknown hardware.
    """
    up = {role: [each for each in workers if each.role is role] for role in WorkerRole}
    pools = [_pool(role, each, device) for role, each in up.items() if each]
    absent = [role.value for role in (WorkerRole.PREFILL, WorkerRole.DECODE) if not up[role]]
    if absent and not up[WorkerRole.MIXED]:
        raise LiveError(f"no {absent[0]} worker is up; wait until pdserve status reports that the cluster is ready")
    return Layout.of(pools, _hosts(workers))


def _hosts(workers: Sequence[RunningWorker]) -> tuple[tuple[Hosts, ...], ...]:
    """`Layout.hosts` of the workers, numbered in order of appearance; a worker's address names its host."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(each.host for each in workers))}
    if len(numbers) == 1:
        return ()
    by_role = (tuple((numbers[each.host],) for each in workers if each.role is role) for role in WorkerRole)
    return tuple(filter(None, by_role))


def _pool(role: WorkerRole, workers: Sequence[RunningWorker], device: Callable[[RunningWorker], Hardware]) -> Pool:
    kinds = {tuple(getattr(each, name) for name in ("hardware", *_DEGREES)) for each in workers}
    if len(kinds) > 1:
        raise LiveError(f"the {role.value} workers differ: {sorted(kinds)}; a placement has one kind per role")
    shared: dict[str, Any] = {name: getattr(workers[0], name) for name in _DEGREES}
    shared |= {name: min(getattr(each, name) for each in workers) for name in _LIMITS}
    return Pool(role=role, replicas=len(workers), hardware=device(workers[0]), **shared)


def supplies(layout: Layout, workers: Sequence[RunningWorker]) -> tuple[Supply, ...]:
    """The layout's devices on their hosts, which a new layout may use too."""
    kinds = {pool.hardware.name: pool.hardware for pool in layout.pools}
    counts: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    for pool in layout.pools:
        for worker in workers:
            if worker.role is pool.role:
                counts[pool.hardware.name][worker.host] += pool.devices_per_worker
    widest = max(pool.tensor_parallel for pool in layout.pools)
    return tuple(_supply(kinds[name], list(hosts.values()), widest) for name, hosts in counts.items())


def _supply(hardware: Hardware, host_sizes: Sequence[int], widest: int) -> Supply:
    # The search supports uniform hosts only. Split others into equal parts, although KV between two parts of a host
    # need not cross the network: the result is a lower bound. If no part would hold the widest running worker,
    # treat them as one host.
    devices_per_node = gcd(*host_sizes)
    if devices_per_node < widest:
        devices_per_node = sum(host_sizes)
    return Supply(
        hardware=hardware,
        num_nodes=sum(host_sizes) // devices_per_node,
        devices_per_node=devices_per_node,
        dollars_per_hour=hardware.price_per_hour_usd,
    )


@dataclass(frozen=True, slots=True)
class ObservedContents:
    """Requests with the observed lengths: `pdserve.planner.workload.conversations.Contents`.

    Prefix-cache hits become one prefix that all prompts share, in proportion to their length: metrics do not record
    who shared what.
    """

    observed: ObservedTraffic

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        random = np.random.default_rng(seed)
        prompts = self.observed.prompt_tokens.draw(num_requests, random).tolist()
        outputs = self.observed.output_tokens.draw(num_requests, random).tolist()
        share = self.observed.cached_share if self.observed.cached_share >= _MIN_CACHED_SHARE else 0.0
        return [
            SimulatedRequest(0.0, prompt, output, _segments(row, prompt, share) if share else ())
            for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]


def _segments(row: int, num_tokens: int, share: float) -> tuple[Segment, ...]:
    num_shared = min(round(num_tokens * share), num_tokens - 1)
    segments = (Segment(0, num_shared), Segment(row + 1, num_tokens - num_shared))
    return segments if num_shared else segments[1:]


def observed_traffic(observed: ObservedTraffic, model: PlannedModel) -> Traffic:
    """The traffic to plan for."""
    workload = Workload(name="observed", contents=ObservedContents(observed))
    return Traffic(workload=workload, max_model_len=model.max_model_len)
