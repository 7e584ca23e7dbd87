"""Pulls of a simulated cluster, from a worker's request for KV until both engines know the outcome.

A pull ends once its last chunk is granted and the link has carried everything; chunks granted earlier travel in the
meantime. Each worker's link serves one pull at a time in each direction, so pulls share its bandwidth without modelling
the partial progress of each. Owned by `pdserve.planner.simulate.simulator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pdserve.engine.scheduling.interface import GrantEvent, PullResult, StartPullEvent
from pdserve.engine.worker.messages import LeaseChanged, LendPrefix, PromptReleased
from pdserve.planner.simulate.event_queue import EventQueue
from pdserve.planner.simulate.simulated_cluster import VirtualWorker


@dataclass(frozen=True, slots=True)
class _Pull:
    """A pull requested by a decode worker."""

    pull_id: int
    worker: VirtualWorker
    begins_s: float
    num_blocks: int


@dataclass(slots=True, eq=False)
class _Offer:
    """A parked prompt that is not pulled yet, with its holder and the first of grant and pull to arrive."""

    worker: VirtualWorker
    grant: GrantEvent | None = None
    """The final grant."""
    pull: _Pull | None = None


class SimulatedTransfers:
    """Offers by handle."""

    def __init__(
        self,
        queue: EventQueue,
        *,
        block_size: int,
        pull_s: float,
        prefix_failed: Callable[[VirtualWorker], None],
    ) -> None:
        """
        Args:
            pull_s: seconds per pull in addition to its bytes.
            prefix_failed: called with the source of a pull of a prefix that failed.
        """
        self._prefix_failed = prefix_failed
        self._queue = queue
        self._block_size = block_size
        self._pull_s = pull_s
        self._offers: dict[bytes, _Offer] = {}
        self._num_loans = 0
        self._loans: dict[bytes, tuple[VirtualWorker, _Pull]] = {}
        """Pulls of prefixes that have not ended, each with its source."""

    def start_pull(self, source: VirtualWorker, target: VirtualWorker, event: StartPullEvent) -> None:
        """``target`` reserved its blocks now."""
        handle = event.source.handle
        pull = _Pull(event.pull_id, target, self._queue.now_s, len(event.block_ids))
        if event.prefix:
            self._num_loans += 1
            handle = b"loan %d" % self._num_loans
            self._loans[handle] = source, pull
            self._queue.at(self._queue.now_s + event.deadline_s, partial(self.give_up, handle))
            source.engine.receive(LendPrefix(handle, event.prefix))
        else:
            source.engine.receive(LeaseChanged(handle, True))
        offer = self._offers.setdefault(handle, _Offer(source))
        offer.pull = pull
        self._carry(handle, offer)

    def give_up(self, handle: bytes) -> None:
        """End the pull of a prefix, if it has not ended: its deadline has passed, or the source needs the blocks."""
        if handle in self._loans:
            source, pull = self._loans.pop(handle)
            self._offers.pop(handle, None)
            self._prefix_failed(source)
            source.engine.receive(PromptReleased(handle))
            pull.worker.engine.receive(PullResult(pull.pull_id, failure="the prefix did not come"))

    def granted_whole(self, source: VirtualWorker, event: GrantEvent) -> None:
        """``source`` wrote the last block of a prompt now, or lends its cached blocks."""
        if event.is_prefix and event.handle not in self._loans:
            return
        offer = self._offers.setdefault(event.handle, _Offer(source))
        offer.grant = event
        self._carry(event.handle, offer)

    def _carry(self, handle: bytes, offer: _Offer) -> None:
        """Start the transfer once both grant and pull are known."""
        pull, grant = offer.pull, offer.grant
        if pull is None or grant is None:
            return
        del self._offers[handle]
        if grant.is_prefix:
            pull = replace(pull, num_blocks=len(grant.block_ids))
        pull.worker.num_pulls += 1
        pull.worker.num_network_pulls += offer.worker.host != pull.worker.host
        last_s = self._transfer_s(offer.worker, pull, min(len(grant.block_ids), pull.num_blocks))
        whole_s = self._transfer_s(offer.worker, pull, pull.num_blocks)
        begins_s = max(pull.begins_s, self._queue.now_s + last_s - whole_s)
        egress, ingress = offer.worker.egress, pull.worker.ingress
        ends_s = max(begins_s, egress.free_at_s, ingress.free_at_s) + whole_s
        egress.free_at_s = ingress.free_at_s = ends_s
        result = PullResult(pull_id=pull.pull_id, num_tokens=grant.num_tokens, first_token=grant.first_token)
        self._queue.at(ends_s + self._pull_s, partial(self._pulled, offer.worker, pull.worker, handle, result))

    def _transfer_s(self, source: VirtualWorker, pull: _Pull, num_blocks: int) -> float:
        """Over the link between both workers, by the slower estimate: fewer ranks, or slower links."""
        num_tokens = num_blocks * self._block_size
        sides, same_host = (source.engine.cost, pull.worker.engine.cost), source.host == pull.worker.host
        return max([cost.transfer_s(num_tokens, same_host=same_host) for cost in sides])

    def _pulled(self, source: VirtualWorker, target: VirtualWorker, handle: bytes, result: PullResult) -> None:
        if handle in self._loans:
            del self._loans[handle]
        elif result.first_token is None:
            return  # it was given up
        target.engine.receive(result)
        source.engine.receive(PromptReleased(handle))
