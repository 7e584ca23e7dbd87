"""What a worker was sent and does not show in its load yet, and the policy's view of a worker that follows.

Kept by the fleet for each live worker, and by the planner's simulator for each virtual one, so that both decide on the
same view. Knows no session and no clock.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pdserve.contracts.placement import WorkerRole
from pdserve.router.policy import WorkerSnapshot


class ReportedLoad(Protocol):
    """What a worker says of itself: the wire's `Load`, or a scheduler's own."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int: ...
    @property
    def num_started_tokens(self) -> int: ...
    @property
    def num_context_tokens(self) -> int: ...
    @property
    def num_blocks_free(self) -> int: ...
    @property
    def num_blocks_cached(self) -> int: ...


class _PromisedDecode(NamedTuple):
    num_choices: int
    num_tokens: int
    """In the contexts of all choices."""
    num_blocks: int


@dataclass(slots=True)
class Promises:
    """By request id."""

    _prefills: dict[int, int] = field(default_factory=dict)
    _decodes: dict[int, _PromisedDecode] = field(default_factory=dict)

    def prefill(self, request_id: int, num_tokens: int) -> None:
        """A prompt was sent; until its start shows in the load, count its tokens as waiting."""
        self._prefills[request_id] = num_tokens

    def decode(self, request_id: int, num_choices: int, num_tokens: int, num_blocks: int) -> None:
        """A prompt was sent to decode ``num_choices`` answers; until its blocks are reserved, count them as taken."""
        self._decodes[request_id] = _PromisedDecode(num_choices, num_tokens * num_choices, num_blocks)

    def settle(self, request_id: int) -> None:
        """What was promised shows in the load from now on, or is over."""
        self._prefills.pop(request_id, None)
        self._decodes.pop(request_id, None)

    def clear(self) -> None:
        self._prefills.clear()
        self._decodes.clear()

    def snapshot(
        self,
        *,
        worker_id: str,
        role: WorkerRole,
        max_batch_tokens: int,
        max_batch_size: int,
        load: ReportedLoad,
        cached_blocks: AbstractSet[bytes],
        host: str,
        prefill_correction: float = 1.0,
        decode_correction: float = 1.0,
    ) -> WorkerSnapshot:
        """For one decision of the policy. Waiting prompts show in the load soon after they are sent and are promised
        until they start, so the larger of the two numbers counts, not their sum; started ones are beside them."""
        num_choices = num_tokens = num_blocks = 0
        for promise in self._decodes.values():
            num_choices += promise.num_choices
            num_tokens += promise.num_tokens
            num_blocks += promise.num_blocks
        return WorkerSnapshot(
            worker_id=worker_id,
            role=role,
            max_batch_tokens=max_batch_tokens,
            max_batch_size=max_batch_size,
            num_running=load.num_running,
            num_waiting_tokens=load.num_started_tokens + max(load.num_waiting_tokens, sum(self._prefills.values())),
            num_context_tokens=load.num_context_tokens + num_tokens,
            num_decoding=load.num_running + max(load.num_waiting, num_choices),
            num_free_blocks=load.num_blocks_free + load.num_blocks_cached - num_blocks,
            prefill_correction=prefill_correction,
            decode_correction=decode_correction,
            cached_blocks=cached_blocks,
            host=host,
        )
