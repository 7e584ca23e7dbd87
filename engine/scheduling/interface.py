"""What a scheduler exchanges with the step loop and the transfer process: its events, and the ends of pulls.

Everything that leaves a scheduler (tokens for the router, orders for the transfer process) is an event. Every attempt
ends with one: a token with a finish reason, or a terminal `RequestEvent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdserve.contracts.events import ClientEvent
from pdserve.contracts.request import FinishReason, KvSource


class FirstToken(NamedTuple):
    """Token 0 of a handed-off prompt."""

    token: int
    finish: FinishReason = FinishReason.NONE
    """NONE unless token 0 completes the answer."""


@dataclass(frozen=True, slots=True)
class OfferEvent:
    """Prefill: the prompt may be pulled from now on. Grants follow."""

    handle: bytes


class GrantEvent(NamedTuple):
    """Prefill: blocks with complete KV, in prompt order."""

    handle: bytes
    first_index: int
    """Index in the prompt of the first of ``block_ids``."""
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int = 0
    """Final grant only: tokens whose KV the prompt's blocks hold."""
    first_token: FirstToken | None = None
    """Final grant only: the token sampled after the prompt."""
    is_prefix: bool = False
    """Any role: cached blocks lent to a pull of a prefix, all in one grant."""

    @property
    def final(self) -> bool:
        return self.first_token is not None or self.is_prefix


@dataclass(frozen=True, slots=True)
class WithdrawEvent:
    """Prefill: the prompt's blocks are about to be reused. Abort any pull of them."""

    handle: bytes


class StartPullEvent(NamedTuple):
    """Decode: blocks are reserved. Pull the prompt's KV into them."""

    pull_id: int
    source: KvSource
    num_cached_blocks: int
    """Leading blocks of the prompt already cached here."""
    block_ids: tuple[int, ...]
    """Targets of the remaining blocks of the prompt."""
    num_tokens: int
    """Tokens whose KV the prompt's blocks hold, including cached ones."""
    deadline_s: float
    """Seconds from now until the pull times out."""
    prefix: tuple[bytes, ...] = ()
    """Instead of a parked prompt's, pull the leading blocks with these hashes that the source caches."""


@dataclass(frozen=True, slots=True)
class AbortPullEvent:
    """Decode: stop a pull. Its targets stay reserved until `Scheduler.pull_done`; nothing writes to them after that."""

    pull_id: int


TransferEvent = OfferEvent | GrantEvent | WithdrawEvent | StartPullEvent | AbortPullEvent
"""Orders for the transfer process."""

Event = ClientEvent | TransferEvent


class PullResult(NamedTuple):
    """End of a pull, as reported by the transfer process."""

    pull_id: int
    failure: str = ""
    """Empty on success."""
    failure_stage: str = ""
    """Empty on success; see `PullDone.failure_stage` of transfer.proto."""
    num_tokens: int = 0
    first_token: FirstToken | None = None
    """``None`` on failure."""
    transport: str = ""
    source: str = ""
    """Address that was pulled from; set by the live loop."""
    is_prefix: bool = False
    """Set by the live loop."""
    seconds: float = 0.0
    num_bytes: int = 0
