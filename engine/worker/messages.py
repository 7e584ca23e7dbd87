"""Messages to the step loop of a worker, which `pdserve.engine.worker.loop` handles in order.

They come from routers through the service, from the transfer process, the tier and the grammar compiler; in the
planner's simulator from what stands for these.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import GenerationRequest, Grammar, KvSource
from pdserve.engine.scheduling.interface import PullResult


class AddRequest(NamedTuple):
    """Prefill here, or decode here what another worker prefills."""

    key: RequestKey
    request: GenerationRequest
    received_s: float
    """On the driver's clock. Objectives count from here, not from when the loop handles the message."""
    source: KvSource | None = None
    """Where to pull the prompt from that another worker prefills."""


class CancelRequest(NamedTuple):
    key: RequestKey


class GrammarCompiled(NamedTuple):
    """Requests with this grammar no longer have to wait for it: it is compiled, or cannot be."""

    grammar: Grammar


class SessionEnded(NamedTuple):
    """A session has ended for good: cancel all its requests."""

    session: int


class LeaseChanged(NamedTuple):
    """A decode worker began to pull a parked prompt, or left without releasing it."""

    handle: bytes
    is_leased: bool


class PromptReleased(NamedTuple):
    """The puller has every block of a parked prompt, or a pull of lent blocks has ended."""

    handle: bytes


class LendPrefix(NamedTuple):
    """Another worker asks for cached blocks; a `GrantEvent` answers, and `PromptReleased` follows."""

    handle: bytes
    """Distinct from that of any other pull."""
    hashes: tuple[bytes, ...]
    """Of the blocks, in order."""


class BlocksRestored(NamedTuple):
    """The tier has ended a restore, with all blocks or fewer."""

    restore_id: int


class StartDrain(NamedTuple):
    """Refuse new work and finish running requests."""


Message = (
    AddRequest
    | CancelRequest
    | GrammarCompiled
    | SessionEnded
    | LeaseChanged
    | PromptReleased
    | LendPrefix
    | PullResult
    | BlocksRestored
    | StartDrain
)
