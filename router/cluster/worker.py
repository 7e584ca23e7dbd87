"""Worker as the dispatcher sees it: limits, reported load, prefix cache, and in-flight load not reported yet.

The driver of the dispatcher subclasses `Worker` to send commands and keeps it current; the live driver is
`pdserve.router.cluster.remote_worker`, over gRPC sessions. Reads no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.request import GenerationRequest, Grammar, KvSource
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import CostModel
from pdserve.router.requests.placement import WorkerSnapshot


class InFlightLoad:
    """Requests sent to a worker that its reported load does not include yet, by request id."""

    __slots__ = ("_prefills", "decodes", "num_blocks", "num_changes", "num_context_tokens", "num_prefill_tokens")

    def __init__(self) -> None:
        self._prefills: dict[int, int] = {}
        self.decodes: dict[int, tuple[int, int]] = {}
        """Context tokens and blocks by request id."""
        self.num_prefill_tokens = self.num_context_tokens = self.num_blocks = 0
        self.num_changes = 0
        """Grows with each change."""

    def add_prefill(self, request_id: int, num_tokens: int) -> None:
        """Count the tokens of a prompt as waiting until it starts."""
        self.num_changes += 1
        self._prefills[request_id] = num_tokens
        self.num_prefill_tokens += num_tokens

    def add_decode(self, request_id: int, num_tokens: int, num_blocks: int) -> None:
        """Count the blocks of a decode request as taken until they are reserved."""
        self.num_changes += 1
        self.decodes[request_id] = num_tokens, num_blocks
        self.num_context_tokens += num_tokens
        self.num_blocks += num_blocks

    def remove(self, request_id: int) -> None:
        """Remove a request that the reported load now includes, or that is over."""
        self.num_changes += 1
        self.num_prefill_tokens -= self._prefills.pop(request_id, 0)
        num_tokens, num_blocks = self.decodes.pop(request_id, (0, 0))
        self.num_context_tokens -= num_tokens
        self.num_blocks -= num_blocks


class Worker(ABC):
    """One incarnation of a worker. Its driver sets the attributes; the dispatcher reads them and sends commands."""

    def __init__(self, worker_id: str, role: WorkerRole, *, host: str = "", epoch: int = 0) -> None:
        self.worker_id = worker_id
        self.role = role
        self.host = host
        """Host of the worker: KV between two workers of one host takes the faster path."""
        self.epoch = epoch
        self.kv_address = ""
        """Address from which others pull parked prompts."""
        self.block_size = 0
        self.max_batch_tokens = 0
        self.max_batch_size = 0
        self.is_up = False
        """Commands can be sent."""
        self.is_draining = False
        self.load = SchedulerLoad()
        self.num_steps = 0.0
        """Steps with tokens for this router since the first report. With guesses one counts for as many as its
        answers got on average."""
        self.stepped_s = 0.0
        """Instant of the last one."""
        self.cached_blocks: Container[bytes] = frozenset()
        """Hashes of the blocks in its prefix cache."""
        self.in_flight = InFlightLoad()
        self.cost: CostModel | None = None
        """Predicts its steps; the dispatcher sets it when the worker is up."""
        self._snapshot: WorkerSnapshot
        self._seen: tuple[SchedulerLoad | None, int, float] = None, 0, 0.0
        """Load, changes in flight and steps that the snapshot was made of."""

    def take_role(self, role: WorkerRole) -> None:
        """Be of another role to all decisions from now on. What the worker has goes on there."""
        self.role = role
        self._seen = None, 0, 0.0

    @property
    def takes_work(self) -> bool:
        return self.is_up and not self.is_draining

    def snapshot(self) -> WorkerSnapshot:
        """Snapshot for decisions of the policy; the same one until a load is reported, a step ends, or what is in
        flight changes. The driver asks for it with each report, so that a decision finds it. A waiting prompt appears
        in the reported load soon after it is sent and stays in flight until it starts, so the larger of the two counts
        is used, not the sum; started ones are added."""
        load, in_flight = self.load, self.in_flight
        seen_load, num_changes, num_steps = self._seen
        if seen_load is load and num_changes == in_flight.num_changes and num_steps == self.num_steps:
            return self._snapshot
        self._seen = load, in_flight.num_changes, self.num_steps
        num_context_tokens = load.num_context_tokens + in_flight.num_context_tokens
        num_decoding = load.num_running + max(load.num_waiting, len(in_flight.decodes))
        self._snapshot = WorkerSnapshot(  # by position, which takes half the time
            self.worker_id,
            self.role,
            self.max_batch_tokens,
            self.max_batch_size,
            load.num_started_tokens + max(load.num_waiting_tokens, in_flight.num_prefill_tokens),
            num_context_tokens,
            num_decoding,
            load.num_blocks_free + load.num_blocks_cached - in_flight.num_blocks,
            load.prefill_correction,
            load.decode_correction,
            self.cached_blocks,
            self.host,
            self.num_steps,
            self.stepped_s,
            load.num_tokens_in_flight,
            max(0, load.num_blocks_free - in_flight.num_blocks),
            self.cost.decode_s(num_decoding + 1, num_context_tokens) * load.decode_correction if self.cost else 0.0,
        )
        return self._snapshot

    @abstractmethod
    def submit(self, request: GenerationRequest) -> None:
        """Prefill ``request``, then park it for a handoff or generate to the end, as ``request.handoff`` requires.
        Commands return at once, are sent in order, and require `is_up`."""

    @abstractmethod
    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        """Pull the prompt of ``request`` from ``source`` and decode it."""

    def announce(self, grammar: Grammar) -> None:  # noqa: B027
        """Tell the worker that a request with ``grammar`` may follow."""

    @abstractmethod
    def cancel(self, request_id: int, attempt: int) -> None:
        """Free the attempt; a no-op if it is over."""
