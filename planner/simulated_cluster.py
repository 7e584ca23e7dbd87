"""Workers of a simulated placement: each with its scheduler and block pool, and the router's view of it.

Built for `pdserve.planner.simulator`. A pipeline-parallel worker has as many *micro-batches* as stages, each with its
share of blocks and batch slots: while one micro-batch's step is in the second stage, the next one's is in the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from pdserve.contracts.placement import WorkerRole
from pdserve.contracts.step import ModelLimits
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.decode_worker.swapping import swap_space
from pdserve.engine.scheduling.interface import Scheduler
from pdserve.engine.worker.pool_size import AUTO_SWAP_SHARE
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.model.cost.cost_model import CostModel
from pdserve.planner.event_queue import EventQueue
from pdserve.planner.layout import Hosts, Layout, PlannedModel, Pool
from pdserve.planner.simulated_worker import AS_PREDICTED, SimulatedWorker, Stage, StepCorrections, WorkerSink
from pdserve.planner.simulation import WorkerUse
from pdserve.prefill_worker.scheduler import PrefillScheduler
from pdserve.router.cluster.worker import InFlightLoad
from pdserve.router.requests.policy import WorkerSnapshot


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a worker's connection."""

    free_at_s: float = 0.0


@dataclass(slots=True, eq=False)
class Seat:
    """A worker, or a micro-batch of one, as the simulated router sees it."""

    worker: SimulatedWorker
    block_pool: BlockPool
    max_batch_tokens: int
    max_batch_size: int
    host: str
    """Name of where it runs: of the worker's hosts, where it is on several."""
    egress: Link = field(default_factory=Link)
    ingress: Link = field(default_factory=Link)
    num_pulls: int = 0
    num_network_pulls: int = 0
    """Of those, the ones from another host."""
    _in_flight: InFlightLoad = field(default_factory=InFlightLoad)
    _snapshot: WorkerSnapshot | None = None
    """The last one, without the tokens of a run; None where a promise changed since."""
    _num_turns_seen: int = -1
    """Of the worker, by the last snapshot."""

    def promise_prefill(self, request_id: int, num_tokens: int) -> None:
        """See `InFlightLoad.add_prefill`."""
        self._in_flight.add_prefill(request_id, num_tokens)
        self._snapshot = None

    def promise_decode(self, request_id: int, num_tokens: int, num_blocks: int) -> None:
        """See `InFlightLoad.add_decode`."""
        self._in_flight.add_decode(request_id, num_tokens, num_blocks)
        self._snapshot = None

    def settle(self, request_id: int) -> None:
        """See `InFlightLoad.remove`."""
        self._in_flight.remove(request_id)
        self._snapshot = None

    def snapshot(self) -> WorkerSnapshot:
        """For one decision of the policy."""
        worker, snapshot = self.worker, self._snapshot
        if snapshot is None or self._num_turns_seen != worker.num_turns:
            snapshot = self._snapshot = self._in_flight.snapshot(
                worker_id=worker.worker_id,
                role=worker.role,
                max_batch_tokens=self.max_batch_tokens,
                max_batch_size=self.max_batch_size,
                load=worker.load(),
                cached_blocks=self.block_pool.known_hashes,
                host=self.host,
                prefill_correction=worker.corrections.prefill,
                decode_correction=worker.corrections.decode,
            )
            self._num_turns_seen = worker.num_turns
        num_run_tokens = worker.num_run_tokens()
        if num_run_tokens:
            return snapshot._replace(num_context_tokens=snapshot.num_context_tokens + num_run_tokens)
        return snapshot

    def use(self) -> WorkerUse:
        """How it has spent the simulation."""
        worker = self.worker
        return WorkerUse(
            worker_id=worker.worker_id,
            role=worker.role,
            busy_s=worker.busy_s,
            held_block_s=worker.held_block_s,
            num_steps=worker.num_steps,
            num_prefill_tokens=worker.num_prefill_tokens,
            num_decode_tokens=worker.num_decode_tokens,
            num_preemptions=worker.load().num_preemptions,
            num_kv_blocks=self.block_pool.num_blocks,
            num_pulls=self.num_pulls,
            num_network_pulls=self.num_network_pulls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBuilder:
    """Builds all workers of a layout."""

    model: PlannedModel
    layout: Layout
    costs: Mapping[WorkerRole, CostModel]
    is_sharing: bool
    """Whether prompts may begin alike, so that blocks must be known by content."""
    turn_s: float
    corrections: Mapping[WorkerRole, Sequence[StepCorrections]]
    queue: EventQueue
    sink: WorkerSink

    def seats(self) -> dict[str, Seat]:
        """By worker id.

        Raises:
            ValueError: the weights leave no memory for KV.
        """
        mint_handle = _handles()
        hosts = self.layout.worker_hosts
        return {
            seat.worker.worker_id: seat
            for pool in self.layout.pools
            for replica, worker_hosts in enumerate(hosts[pool.role])
            for seat in self._micro_batches(pool, replica, _host_name(worker_hosts), mint_handle)
        }

    def _micro_batches(self, pool: Pool, replica: int, host: str, mint_handle: Callable[[], bytes]) -> list[Seat]:
        num_micro_batches = pool.pipeline_parallel
        num_blocks = pool.kv_blocks(self.model, self.costs[pool.role])
        if num_blocks < num_micro_batches:
            raise ValueError(
                f"the weights leave no memory for KV on {pool.hardware.name} with {pool.devices_per_worker} devices a "
                "worker: use more of them, or larger ones"
            )
        stage = Stage(num_micro_batches)
        names = [
            f"{pool.role.value}-{replica}" + (f".{micro_batch}" if num_micro_batches > 1 else "")
            for micro_batch in range(num_micro_batches)
        ]
        return [self._seat(name, pool, host, num_blocks // num_micro_batches, stage, mint_handle) for name in names]

    def _seat(
        self, worker_id: str, pool: Pool, host: str, num_blocks: int, stage: Stage, mint_handle: Callable[[], bytes]
    ) -> Seat:
        block_pool = BlockPool(num_blocks, self.model.block_size, caches_content=self.is_sharing)
        max_batch_size = max(1, pool.max_batch_size // pool.pipeline_parallel)
        worker = SimulatedWorker(
            worker_id,
            pool.role,
            scheduler=self._scheduler(pool, block_pool, max_batch_size, mint_handle),
            block_pool=block_pool,
            cost=self.costs[pool.role],
            block_size=self.model.block_size,
            stage=stage,
            queue=self.queue,
            sink=self.sink,
            pipeline_depth=pool.hardware.pipeline_depth,
            turn_s=self.turn_s,
            corrections=self.corrections.get(pool.role, (AS_PREDICTED,)),
        )
        return Seat(worker, block_pool, pool.max_batch_tokens, max_batch_size, host)

    def _scheduler(
        self, pool: Pool, block_pool: BlockPool, max_batch_size: int, mint_handle: Callable[[], bytes]
    ) -> Scheduler:
        limits = ModelLimits(max_model_len=self.model.max_model_len, vocab_size=self.model.shape.vocab_size)
        if pool.role is WorkerRole.PREFILL:
            return PrefillScheduler(
                block_pool,
                limits,
                mint_handle=mint_handle,
                max_batch_tokens=pool.max_batch_tokens,
                max_batch_size=max_batch_size,
            )
        return DecodeScheduler(
            block_pool,
            limits,
            mint_handle=mint_handle,
            max_batch_tokens=pool.max_batch_tokens,
            max_batch_size=max_batch_size,
            swap_space=swap_space(self.costs[pool.role], int(block_pool.num_blocks * AUTO_SWAP_SHARE)),
        )


def _host_name(hosts: Hosts) -> str:
    """The same for workers whose hosts are."""
    return "+".join(map(str, hosts))


def _handles() -> Callable[[], bytes]:
    """Distinct handles, in an order that is always the same."""
    numbers = count(1)
    return lambda: next(numbers).to_bytes(16, "big")
