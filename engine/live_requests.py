"""Which requests are alive on a worker, by the session they came through.

Owned by the step loop, so that the end of a session can cancel its requests. Never decides what runs.
"""

from __future__ import annotations

from pdserve.engine.scheduler import RequestKey

MAX_LIVE_REQUESTS = 16384
"""Requests that a worker holds, waiting ones included, before it refuses more."""


class LiveRequests:
    def __init__(self) -> None:
        self._sessions: dict[int, set[RequestKey]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def refusal(self, key: RequestKey) -> str:
        """Why the key cannot be added; empty when it can."""
        if key in self._sessions.get(key.session, ()):
            return "the worker already runs this attempt"
        if self._count >= MAX_LIVE_REQUESTS:
            return f"the worker holds {MAX_LIVE_REQUESTS} requests already"
        return ""

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
