"""Which requests are alive on a worker, by the session they came through.

Owned by the step loop, so that the end of a session can cancel its requests. Never decides what runs.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.contracts.events import RefusalCode, RequestKey

MAX_LIVE_REQUESTS = 16384
"""Requests that a worker holds, waiting ones included, before it refuses more."""


class Refusal(NamedTuple):
    """Why a request is not taken."""

    code: RefusalCode
    message: str


class LiveRequests:
    def __init__(self) -> None:
        self._sessions: dict[int, set[RequestKey]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def refusal(self, key: RequestKey) -> Refusal | None:
        """Why the key cannot be added; ``None`` when it can."""
        if key in self._sessions.get(key.session, ()):
            return Refusal(RefusalCode.INVALID, "the worker already runs this attempt")
        if self._count >= MAX_LIVE_REQUESTS:
            return Refusal(RefusalCode.OVERLOADED, f"the worker holds {MAX_LIVE_REQUESTS} requests already")
        return None

    def add(self, key: RequestKey) -> None:
        assert not self.refusal(key), f"{key} cannot be added"
        self._sessions.setdefault(key.session, set()).add(key)
        self._count += 1

    def discard(self, key: RequestKey) -> None:
        """Forget a request that ended; unknown keys are ignored."""
        keys = self._sessions.get(key.session)
        if keys is None or key not in keys:
            return
        keys.remove(key)
        self._count -= 1
        if not keys:
            del self._sessions[key.session]

    def of_session(self, session: int) -> list[RequestKey]:
        return sorted(self._sessions.get(session, ()))
