"""Workers of a simulated placement: step loop, scheduler and block pool of each, behind the dispatcher's interface.

Built for `pdserve.planner.simulate.simulator`. A pipeline-parallel worker has as many *micro-batches* as stages, as in
`pdserve.engine.worker.worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.contracts.step import ModelLimits
from pdserve.contracts.worker_config import WorkerRole
from pdserve.decode_worker.swapping import swap_space
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.engine.worker.messages import AddRequest, CancelRequest
from pdserve.engine.worker.pool_size import AUTO_SWAP_SHARE
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.engine.worker.step_times import StepTimes
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.stage import Stage
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.event_queue import EventQueue
from pdserve.planner.simulate.simulated_worker import Guessing, SimulatedWorker, WorkerSink
from pdserve.planner.simulate.simulation import WorkerUse
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.placement import WorkerSnapshot


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a worker's connection."""

    free_at_s: float = 0.0


class VirtualWorker(Worker):
    """A worker, or a micro-batch of one, as a dispatcher sees it: commands reach its step loop at once."""

    def __init__(
        self,
        engine: SimulatedWorker,
        block_pool: BlockPool,
        queue: EventQueue,
        *,
        host: str,
        max_batch_tokens: int,
        max_batch_size: int,
    ) -> None:
        """
        Args:
            host: name of the worker's host, or one name for all its hosts.
        """
        super().__init__(engine.worker_id, engine.role, host=host)
        self.kv_address = engine.worker_id
        self.block_size = block_pool.block_size
        self.cached_blocks = block_pool.known_hashes
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_size = max_batch_size
        self.engine = engine
        self.egress, self.ingress = Link(), Link()
        self.num_pulls = 0
        self.num_network_pulls = 0
        """Pulls from another host."""
        self._block_pool = block_pool
        self._queue = queue
        self._num_turns_seen = -1
        """The load changes only at turns."""

    def submit(self, request: GenerationRequest) -> None:
        key = RequestKey(0, request.request_id, request.attempt)
        self.engine.receive(AddRequest(key, request, self._queue.now_s))

    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        key = RequestKey(0, request.request_id, request.attempt)
        self.engine.receive(AddRequest(key, request, self._queue.now_s, source))

    def cancel(self, request_id: int, attempt: int) -> None:
        self.engine.receive(CancelRequest(RequestKey(0, request_id, attempt)))

    def snapshot(self) -> WorkerSnapshot:
        engine = self.engine
        if engine.num_turns != self._num_turns_seen:
            self._num_turns_seen = engine.num_turns
            self.load = engine.load()
            self.num_steps = engine.num_token_steps
            self.stepped_s = engine.turned_s
        snapshot = super().snapshot()
        num_steps, num_tokens, num_blocks, stepped_s = engine.run_growth()
        if num_tokens:
            num_context_tokens = snapshot.num_context_tokens + num_tokens
            return snapshot._replace(
                num_context_tokens=num_context_tokens,
                num_free_blocks=snapshot.num_free_blocks - num_blocks,
                num_steps=snapshot.num_steps + num_steps,
                stepped_s=stepped_s,
                num_empty_blocks=max(0, snapshot.num_empty_blocks - num_blocks),
                next_step_s=engine.cost.decode_s(snapshot.num_decoding + 1, num_context_tokens),
            )
        return snapshot

    def use(self) -> WorkerUse:
        """Totals so far."""
        engine = self.engine
        return WorkerUse(
            worker_id=self.worker_id,
            role=self.role,
            busy_s=engine.busy_s,
            held_block_s=engine.held_block_s,
            num_steps=engine.num_steps,
            num_prefill_tokens=engine.num_prefill_tokens,
            num_decode_tokens=engine.num_decode_tokens,
            num_right_guesses=engine.num_right_guesses,
            num_preemptions=engine.load().num_preemptions,
            num_kv_blocks=self._block_pool.num_blocks,
            num_pulls=self.num_pulls,
            num_network_pulls=self.num_network_pulls,
        )


def _handles() -> Callable[[], bytes]:
    """Distinct handles in a deterministic order."""
    numbers = count(1)
    return lambda: next(numbers).to_bytes(16, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBuilder:
    """Builds all workers of a layout."""

    model: PlannedModel
    layout: Layout
    costs: Mapping[WorkerRole, CostModel]
    is_sharing: bool
    """Whether prompts may share prefixes, so that blocks must be identified by content."""
    turn_s: float
    queue: EventQueue
    sink: WorkerSink
    mint_handle: Callable[[], bytes] = field(default_factory=_handles)

    def workers(self) -> dict[str, VirtualWorker]:
        """All workers, by id.

        Raises:
            ValueError: the weights leave no memory for KV.
        """
        hosts = self.layout.worker_hosts
        return {
            worker.worker_id: worker
            for pool in self.layout.pools
            for replica, worker_hosts in enumerate(hosts[pool.role])
            for worker in self.micro_batches(pool, replica, "+".join(map(str, worker_hosts)))
        }

    def micro_batches(self, pool: Pool, replica: int, host: str) -> list[VirtualWorker]:
        """Those of one worker of ``pool``."""
        num_micro_batches = pool.pipeline_parallel
        num_blocks = pool.micro_batch_blocks(self.model, self.costs[pool.role])
        stage = Stage(num_micro_batches)
        names = [
            f"{pool.role.value}-{replica}" + (f".{micro_batch}" if num_micro_batches > 1 else "")
            for micro_batch in range(num_micro_batches)
        ]
        workers = [self._worker(name, pool, host, num_blocks, stage) for name in names]
        for each in workers:  # pulls of all micro-batches take turns in the worker's connection
            each.egress, each.ingress = workers[0].egress, workers[0].ingress
        return workers

    def _worker(self, worker_id: str, pool: Pool, host: str, num_blocks: int, stage: Stage) -> VirtualWorker:
        model, cost = self.model, self.costs[pool.role]
        block_pool = BlockPool(num_blocks, model.block_size, caches_content=self.is_sharing)
        max_batch_size = max(1, pool.max_batch_size // pool.pipeline_parallel)
        guessing = speculation = None
        times = StepTimes(cost)
        if pool.guesses is not None and pool.role is not WorkerRole.PREFILL:
            share_right = pool.guesses.share_right
            draft = None if pool.guesses.draft is None else pool.cost(pool.guesses.draft)
            guessing, times = Guessing(worker_id, share_right, draft), StepTimes(cost, draft)
            speculation = Speculation(times.by_guesses, share_right, plans_ahead=cost.pipeline_depth > 1)
        scheduler = Scheduler(
            block_pool,
            ModelLimits(max_model_len=model.max_model_len, vocab_size=model.shape.vocab_size),
            mint_handle=self.mint_handle,
            max_batch_tokens=pool.max_batch_tokens,
            max_batch_size=max_batch_size,
            swap_space=swap_space(cost, int(num_blocks * AUTO_SWAP_SHARE), pool.max_batch_tokens),
            mixed_s=times.mixed_s,
            speculation=speculation,
        )
        engine = SimulatedWorker(
            worker_id,
            pool.role,
            scheduler=scheduler,
            guessing=guessing,
            block_pool=block_pool,
            cost=cost,
            stage=stage,
            queue=self.queue,
            sink=self.sink,
            turn_s=self.turn_s,
        )
        return VirtualWorker(
            engine,
            block_pool,
            self.queue,
            host=host,
            max_batch_tokens=pool.max_batch_tokens,
            max_batch_size=max_batch_size,
        )
