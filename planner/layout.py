"""Layout of a placement: its workers, their hardware, parallelism and limits.

The search varies layouts, the simulator runs them, and deployment files are written from them. Holds values and
counts; decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any

from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.quantisation import held_scheme
from pdserve.model.config.shape import ModelShape
from pdserve.model.config.sharding import check_groups
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import Hardware, slowed

BFLOAT16 = Precision(dtype="bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """The model to serve, and its precision and limits."""

    shape: ModelShape
    name: str = ""
    """Name of its folder or config.json."""
    precision: Precision = BFLOAT16
    block_size: int = 16
    max_model_len: int = 8192
    transport: str = "auto"
    """How KV moves between workers: ``kv_transfer.transport``."""
    unserved: str = ""
    """Why `pdserve up` refuses the checkpoint, if it does."""

    @property
    def held_name(self) -> str:
        """Name and precision, such as ``Llama-3.1-8B bfloat16 int8``."""
        precision = self.precision
        scheme = held_scheme(precision.quantization, self.shape.scheme)
        return f"{self.name} {precision.dtype}" + (f" {scheme.kind}" if scheme else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """What decode steps guess (`pdserve.engine.scheduling.speculation`)."""

    share_right: float
    """Of guesses, each after right ones. The workload's."""
    draft: PlannedModel | None = None
    """Model that guesses; ``None``: n-grams, which take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Identical workers of one role."""

    role: WorkerRole
    replicas: int
    hardware: Hardware
    """One device; a worker has ``tensor_parallel * pipeline_parallel`` of them."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    """As in `pdserve.contracts.deployment.PhaseConfig`; plans have it where experts do not divide."""
    max_batch_tokens: int = 2048
    max_batch_size: int = 256
    num_kv_blocks: int = 0
    """Per worker; 0 uses the free memory, by the cost model."""
    memory_fraction: float = 0.9
    """Share of a device's memory for a worker; workers of one device with at most half of it share devices."""
    guesses: Guesses | None = None
    """``None``: answers are computed one token at a time, as in all plans."""

    @property
    def degrees(self) -> str:
        """Such as ``TP2 PP2``; with whole experts on each rank ``EP2 PP2``."""
        tensor = f"{'EP' if self.expert_parallel else 'TP'}{self.tensor_parallel}"
        return f"{tensor} PP{self.pipeline_parallel}" if self.pipeline_parallel > 1 else tensor

    @property
    def devices_per_worker(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_devices(self) -> int:
        """Without sharing."""
        return self.replicas * self.devices_per_worker

    @property
    def workers_per_device(self) -> int:
        """Workers of this pool that share a device, if they are many enough."""
        return int(1 / self.memory_fraction) if self.devices_per_worker == 1 else 1

    def cost(self, model: PlannedModel) -> CostModel:
        """Cost model of one worker.

        Raises:
            ValueError: the model, or a group of its quantised inputs, does not divide by the degrees, or the hardware
                has no figure for its dtype.
        """
        scheme = held_scheme(model.precision.quantization, model.shape.scheme)
        check_groups(model.shape, scheme, self.tensor_parallel, expert_parallel=self.expert_parallel)
        return CostModel(
            model.shape,
            self.hardware,
            model.precision,
            self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            transport=model.transport,
            expert_parallel=self.expert_parallel,
        )

    def kv_blocks(self, model: PlannedModel, cost: CostModel) -> int:
        """KV blocks of each worker: ``num_kv_blocks``, or as many as fit; 0 if the weights do not fit."""
        return self.num_kv_blocks or cost.max_kv_blocks(
            model.block_size,
            self.memory_fraction,
            max_batch_tokens=self.max_batch_tokens,
            max_batch_size=self.max_batch_size,
        )

    def micro_batch_blocks(self, model: PlannedModel, cost: CostModel) -> int:
        """KV blocks of each micro-batch.

        Raises:
            ValueError: the weights leave no memory for KV.
        """
        num_blocks = self.kv_blocks(model, cost) // self.pipeline_parallel
        if num_blocks < 1:
            raise ValueError(
                f"the weights leave no memory for KV on {self.hardware.name} with {self.devices_per_worker} devices a "
                "worker: use more of them, or larger ones"
            )
        return num_blocks


Hosts = tuple[int, ...]
"""Hosts of one worker by number: a single host, or one per stage of its pipeline.

Between workers with equal hosts, KV stays within a host; with several, each layer's KV does.
"""
_ONE_HOST: Hosts = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A pool of each phase, or mixed workers (colocated serving), alone or beside others, as in a deployment file."""

    prefill: Pool | None = None
    decode: Pool | None = None
    mixed: Pool | None = None
    hosts: tuple[tuple[Hosts, ...], ...] = ()
    """Per worker of each pool, in the order of `pools`; empty: all on one host."""

    def __post_init__(self) -> None:
        assert self.mixed or (self.prefill and self.decode), "a layout needs workers for both phases"
        if self.hosts:
            assert [len(workers) for workers in self.hosts] == [pool.replicas for pool in self.pools]

    @classmethod
    def of(cls, pools: Iterable[Pool], hosts: tuple[tuple[Hosts, ...], ...] = ()) -> Layout:
        """The layout of pools of different roles."""
        by_role: dict[str, Any] = {pool.role.value: pool for pool in pools}
        return cls(**by_role, hosts=hosts)

    def slowed(self, factor: float) -> Layout:
        """The layout with steps and transfers ``factor`` times as long."""
        return Layout.of([replace(pool, hardware=slowed(pool.hardware, factor)) for pool in self.pools], self.hosts)

    @property
    def pools(self) -> Iterator[Pool]:
        return (pool for pool in (self.prefill, self.decode, self.mixed) if pool is not None)

    @property
    def decode_pool(self) -> Pool:
        """The pool that decodes: decode or mixed workers."""
        pool = self.decode or self.mixed
        assert pool is not None
        return pool

    @property
    def num_devices(self) -> int:
        taken: defaultdict[str, Fraction] = defaultdict(Fraction)
        for pool in self.pools:
            taken[pool.hardware.name] += Fraction(pool.num_devices, pool.workers_per_device)
        return sum(map(ceil, taken.values()))

    @property
    def worker_hosts(self) -> dict[WorkerRole, tuple[Hosts, ...]]:
        """Hosts of each worker, by role."""
        hosts = self.hosts or [(_ONE_HOST,) * pool.replicas for pool in self.pools]
        return {pool.role: workers for pool, workers in zip(self.pools, hosts, strict=True)}

    @property
    def num_hosts(self) -> int:
        return len({host for workers in self.worker_hosts.values() for worker in workers for host in worker})

    @property
    def spans_hosts(self) -> bool:
        """Whether KV may cross from one host to another."""
        return self.num_hosts > 1 and len(list(self.pools)) > 1

    @property
    def is_colocated(self) -> bool:
        return self.prefill is None

    def __str__(self) -> str:
        """Such as ``2 x P(TP4) + 3 x D(TP2 PP2)``."""
        return " + ".join(_describe(pool) for pool in self.pools)


_LETTERS = {WorkerRole.PREFILL: "P", WorkerRole.DECODE: "D", WorkerRole.MIXED: "M"}


def _describe(pool: Pool) -> str:
    return f"{pool.replicas} x {_LETTERS[pool.role]}({pool.degrees})"
