"""Workloads and models of the planner's tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.goodput import Runner, Trial
from pdserve.planner.search.goodput import Workload as RequestSource
from pdserve.planner.simulate.attainment import Attainment
from pdserve.planner.workload.requests import Clamped, SimulatedRequest

H100 = hardware("h100-sxm")
LLAMA_3_8B = PlannedModel(
    name="llama-3-8b",
    shape=ModelShape(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    transport="nccl",
)
SLO = SloConfig(ttft_seconds=0.2, tpot_seconds=0.02)


@dataclass(frozen=True)
class UnitRateRequests:
    """Requests that arrive once a second."""

    requests: tuple[SimulatedRequest, ...]
    clamped: Clamped = field(default_factory=Clamped)

    def at_rate(self, requests_per_s: float) -> list[SimulatedRequest]:
        return [replace(request, arrived_s=request.arrived_s / requests_per_s) for request in self.requests]


@dataclass(frozen=True)
class PoissonWorkload:
    """Poisson arrivals of lognormal lengths, or of constant ones where ``spread`` is 0."""

    prompt_tokens: float = 600
    output_tokens: float = 60
    spread: float = 0.5

    def draw(self, num_requests: int, seed: int, *, max_model_len: int = 0) -> UnitRateRequests:
        random = np.random.default_rng(seed)
        arrived_s = np.cumsum(random.exponential(1.0, num_requests))
        prompts, outputs = (
            np.maximum(mean * np.exp(random.normal(-(self.spread**2) / 2, self.spread, num_requests)), 1).astype(int)
            for mean in (self.prompt_tokens, self.output_tokens)
        )
        rows = zip(arrived_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        return UnitRateRequests(tuple(SimulatedRequest(*row) for row in rows))


def a_pool(
    role: WorkerRole,
    replicas: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    num_kv_blocks: int = 0,
) -> Pool:
    return Pool(
        role=role,
        replicas=replicas,
        hardware=H100,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        num_kv_blocks=num_kv_blocks,
    )


def disaggregated(num_prefill: int = 1, num_decode: int = 1, num_kv_blocks: int = 0) -> Layout:
    return Layout(
        prefill=a_pool(WorkerRole.PREFILL, num_prefill, num_kv_blocks=num_kv_blocks),
        decode=a_pool(WorkerRole.DECODE, num_decode, num_kv_blocks=num_kv_blocks),
    )


def colocated(replicas: int = 1, num_kv_blocks: int = 0) -> Layout:
    return Layout(mixed=a_pool(WorkerRole.MIXED, replicas, num_kv_blocks=num_kv_blocks))


def attain(trial: Trial, workload: RequestSource, rate: float) -> Attainment:
    """Serve the workload at ``rate``, once for each seed."""
    return Runner(workload).attainment(trial, rate)
