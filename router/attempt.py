"""One dispatch of a request: the workers it is on, and how far each of them has come.

A lost or failing decode worker does not cost the attempt while the prefill worker still holds the parked prompt: the
attempt is bound to another one, which pulls the same prompt. Its number stays, because the prefill worker's tokens and
events carry it, and because the decode worker that is let go has no more to say: its session broke, or it ended the
attempt itself, and in both cases before it joined, so that it sent no token.

Owned by its `pdserve.router.flight.Flight`, which decides everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.contracts.request import KvSource
from pdserve.engine.frames import ReceivedToken
from pdserve.router.fleet import Worker

MAX_BINDINGS = 2
"""Decode workers that may try to pull one parked prompt, before it is prefilled again."""


@dataclass(slots=True, eq=False)
class Attempt:
    """See above. Only the current attempt of a request exists."""

    number: int
    prefill: Worker
    handoff: bool
    emitted: tuple[int, ...]
    """Tokens of earlier attempts."""
    decode: Worker | None = None
    num_bindings: int = 0
    """Decode workers so far."""
    source: KvSource | None = None
    is_prefill_over: bool = False
    """The prefill worker holds nothing of the request any more."""
    has_joined: bool = False
    """The decode worker holds all of the prompt's KV."""
    started_s: float = 0.0
    first_token_s: float = 0.0
    """When the attempt's first token came, 0 before."""
    joined_s: float = 0.0
    overtook: list[ReceivedToken] = field(default_factory=list)
    """Tokens of the decode worker that came before the prefill worker's."""

    @property
    def needs_prefill(self) -> bool:
        """Whether the prefill worker has something left to give: token 0, or KV."""
        return not (self.has_joined and self.first_token_s)

    @property
    def may_rebind(self) -> bool:
        """Whether another decode worker could pull the prompt."""
        is_parked = self.source is not None and not self.is_prefill_over
        return is_parked and not self.has_joined and self.num_bindings < MAX_BINDINGS

    def has(self, worker: Worker) -> bool:
        """Whether what ``worker`` says of the attempt counts."""
        return worker is self.decode or worker is self.prefill

    @property
    def workers(self) -> list[Worker]:
        """Workers that may still hold something of the request."""
        prefill = [] if self.is_prefill_over else [self.prefill]
        return prefill if self.decode is None else [*prefill, self.decode]
