"""What the dispatcher tells of its work, to be counted."""

from __future__ import annotations

from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.request import Request, RequestSpec


class DispatchObserver:
    """Receives everything that is counted and ignores it; `pdserve.router.metrics` overrides."""

    def accepted(self, spec: RequestSpec) -> None:
        """A request was admitted."""

    def refused(self, tier: str) -> None:
        """A request was refused for lack of room, or because it would meet its objectives on no worker."""

    def placed(self, policy: str, role: WorkerRole, *, is_late: bool) -> None:
        """A prompt was sent to a worker; ``is_late`` as in `pdserve.router.requests.placement.PrefillChoice`."""

    def routed(self, seconds: float) -> None:
        """A decision of the policy took ``seconds``."""

    def prompt_started(self, num_cached_tokens: int) -> None:
        """A worker began to compute a request's prompt."""

    def pull_started(self, num_cached_tokens: int) -> None:
        """A decode worker reserved blocks for a prompt of which it had ``num_cached_tokens``."""

    def fell_back(self, reason: str) -> None:
        """A decision had no free choice; `pdserve.contracts.metrics.FALLBACK_REASONS` lists the reasons."""

    def retried(self, reason: str, num_tokens: int) -> None:
        """An attempt was dispatched again, with ``num_tokens`` to compute again, or bound to another decode worker."""

    def ended(self, request: Request) -> None:
        """``request.outcome`` is set, and its journeys are over for the dispatcher."""
