"""Converts between layouts and deployment files: to serve what the search found, and to simulate what is served.

`pdserve up` reads the file; its comments hold the predicted goodput. Writes text and builds layouts; accesses no
file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple

import yaml

from pdserve.contracts.codec import to_plain
from pdserve.contracts.deployment import (
    DEFAULT_POLICY,
    DeploymentConfig,
    KvTransferConfig,
    ModelConfig,
    PhaseConfig,
    RouterConfig,
    SloConfig,
)
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware
from pdserve.planner import wording
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.hosts import host_sentence, placed
from pdserve.planner.search.plan import Candidate, Plan, Supply

_MIB = 2**20
_SHARED_KEYS = (
    *("replicas", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
    *("max_batch_tokens", "max_batch_size"),
)
"""Keys of a phase that a pool has too; but for ``kv_memory``, the others keep their defaults."""


def deployment_text(plan: Plan, candidate: Candidate, model_path: str) -> str:
    """A deployment file for ``candidate``.

    Args:
        model_path: absolute, or relative to the folder of the deployment file.
    """
    question = plan.question
    config = deployment_of(candidate.layout, question.model, question.slo, model_path, policy=question.policy)
    lines = [f"Cannot be started yet: {each}" for each in problems(candidate.layout, question.model)]
    comments = "".join(f"# {line}\n" for line in (*lines, *_predictions(plan, candidate)))
    sections = "".join(f"{name}: {_flow(values)}\n" for name, values in _sections(config))
    return comments + sections


def deployment_of(
    layout: Layout, model: PlannedModel, slo: SloConfig, model_path: str, *, policy: str = DEFAULT_POLICY
) -> DeploymentConfig:
    """The deployment that ``layout`` describes."""
    phases = {pool.role: _phase(pool, model) for pool in layout.pools}
    none = PhaseConfig(replicas=0)
    return DeploymentConfig(
        model=ModelConfig(
            path=model_path,
            **to_plain(model.precision),
            max_model_len=model.max_model_len,
            block_size=model.block_size,
        ),
        slo=slo,
        router=RouterConfig(policy=policy),
        kv_transfer=KvTransferConfig(transport=model.transport),
        prefill=phases.get(WorkerRole.PREFILL, none),
        decode=phases.get(WorkerRole.DECODE, none),
        mixed=phases.get(WorkerRole.MIXED, none),
    )


def problems(layout: Layout, model: PlannedModel) -> list[str]:
    """Why `pdserve up` cannot start ``layout`` yet; empty if it can."""
    found = [model.unserved] if model.unserved else []
    if model.precision.quantization == "fp8" and not found:
        found.append("fp8 weights cannot be computed with yet")
    if any(len(hosts) > 1 for workers in layout.worker_hosts.values() for hosts in workers):
        found.append("the stages of a worker run on one host, and it has them on several")
    return found


class DevicePool(NamedTuple):
    """Properties of a pool that a deployment file does not record."""

    hardware: Hardware
    kv_bytes: int = 0
    """KV pool of each worker; 0 uses the free memory."""


def layout_of(
    config: DeploymentConfig, model: PlannedModel, pools: Mapping[WorkerRole, DevicePool], *, devices_per_host: int = 0
) -> Layout:
    """The layout that a deployment describes, on the given hardware.

    Args:
        devices_per_host: not part of a deployment; each kind of device has hosts of its own. 0 uses one host if the
            devices are no more than it usually has, otherwise hosts of the usual size.

    Raises:
        ValueError: the model does not divide by the degrees, or a host has too few devices for a worker.
    """
    phases = {role: config.phase(role) for role in WorkerRole}
    layout = Layout.of(_pool(role, each, model, pools[role]) for role, each in phases.items() if each.replicas)
    usual = min(pool.hardware.devices_per_host for pool in layout.pools)
    kinds = {pool.hardware.name: pool.hardware for pool in layout.pools}
    if layout.num_devices <= (devices_per_host or usual) and (len(kinds) == 1 or not devices_per_host):
        return layout
    # A larger group has a host of its own: the cost model covers its network traffic.
    size = devices_per_host or max(usual, *(pool.tensor_parallel for pool in layout.pools))
    num_nodes = sum(pool.num_devices for pool in layout.pools)
    return placed(
        layout, [Supply(hardware=kind, num_nodes=num_nodes, devices_per_node=size) for kind in kinds.values()]
    )


def _pool(role: WorkerRole, phase: PhaseConfig, model: PlannedModel, devices: DevicePool) -> Pool:
    shared = {key: getattr(phase, key) for key in _SHARED_KEYS}
    pool = Pool(
        role=role,
        hardware=devices.hardware,
        memory_fraction=phase.gpu_memory_utilization,
        **shared,
    )
    if not devices.kv_bytes:
        # As workers size an automatic pool: no more than full batches of the longest sequences fill.
        most = phase.max_batch_size * ceil(model.max_model_len / model.block_size)
        return dataclasses.replace(pool, num_kv_blocks=min(pool.kv_blocks(model, pool.cost(model)), most))
    num_blocks = devices.kv_bytes // _block_bytes(pool, model)
    if num_blocks < 1:
        raise ValueError(f"{role.value}.kv_memory of {devices.kv_bytes} bytes holds no KV block: raise it, or say auto")
    most = dataclasses.replace(pool, memory_fraction=1.0).kv_blocks(model, pool.cost(model))
    if num_blocks > most and not pool.hardware.is_host:
        raise ValueError(
            f"{role.value}.kv_memory of {devices.kv_bytes} bytes does not fit {pool.devices_per_worker} x "
            f"{pool.hardware.name}, where the weights leave {most * _block_bytes(pool, model)}: lower it, or say auto"
        )
    return dataclasses.replace(pool, num_kv_blocks=num_blocks)


def _block_bytes(pool: Pool, model: PlannedModel) -> int:
    return pool.cost(model).kv_bytes_per_token * model.block_size


def _phase(pool: Pool, model: PlannedModel) -> PhaseConfig:
    num_blocks = pool.kv_blocks(model, pool.cost(model))
    shared: dict[str, Any] = {key: getattr(pool, key) for key in _SHARED_KEYS}
    return PhaseConfig(kv_memory=f"{num_blocks * _block_bytes(pool, model) // _MIB}MiB", **shared)


def _predictions(plan: Plan, candidate: Candidate) -> Iterator[str]:
    question = plan.question
    yield f"Planned by pdserve for {question.model.name or 'the model'}: {candidate.layout}"
    goodput = candidate.goodput
    if goodput is None:
        yield f"Estimated goodput, not simulated: {wording.rate(candidate.rate)}"
    else:
        low, high = goodput.interval
        yield (
            f"Predicted goodput: {wording.rate(goodput.rate)} ({wording.number(low)} to {wording.number(high)} with "
            f"95 % confidence), at which {wording.share(question.slo.attainment)} of requests meet both objectives"
        )
    if candidate.layout.num_hosts > 1:
        at_rate = goodput.at_rate if goodput is not None else None
        yield host_sentence(candidate.layout, at_rate)
        num_hosts = candidate.layout.num_hosts
        yield f"Start it with pdserve up --ray-address auto --hosts {num_hosts}, and security set: docs/hosts.md"


def _sections(config: DeploymentConfig) -> Iterator[tuple[str, dict[str, object]]]:
    yield "model", to_plain(dataclasses.replace(config.model, served_name=""))
    yield "slo", to_plain(config.slo)
    if config.router.policy != DEFAULT_POLICY:
        yield "router", {"policy": config.router.policy}
    yield "kv_transfer", to_plain(config.kv_transfer)
    for role in WorkerRole:
        phase: PhaseConfig = config.phase(role)
        planned = (*_SHARED_KEYS[:3], "kv_memory", *_SHARED_KEYS[3:]) if phase.replicas else ("replicas",)
        yield role.value, {key: getattr(phase, key) for key in planned}


def _flow(values: dict[str, object]) -> str:
    """On one line, as people write it."""
    shown = {key: value for key, value in values.items() if value != ""}
    return yaml.safe_dump(shown, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True).strip()
