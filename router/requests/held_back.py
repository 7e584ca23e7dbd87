"""Attempts that are held back: late ones that would harm others wherever they would be computed now. Pure."""

from __future__ import annotations

from pdserve.router.requests.request import Attempt


class HeldBack:
    """Attempts by share, which take turns; in each, the first that was added goes first."""

    def __init__(self) -> None:
        self._shares: dict[str, dict[int, Attempt]] = {}
        self._share_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._share_of)

    def is_any_of(self, share: str) -> bool:
        return share in self._shares

    def add(self, share: str, attempt: Attempt) -> None:
        self._shares.setdefault(share, {})[attempt.request_id] = attempt
        self._share_of[attempt.request_id] = share

    def discard(self, attempt: Attempt) -> None:
        share = self._share_of.pop(attempt.request_id, None)
        if share is not None:
            del self._shares[share][attempt.request_id]
            if not self._shares[share]:
                del self._shares[share]

    def first(self) -> Attempt | None:
        """First attempt of the share whose turn it is."""
        for attempts in self._shares.values():
            return next(iter(attempts.values()))
        return None

    def end_turn(self) -> None:
        share = next(iter(self._shares))
        self._shares[share] = self._shares.pop(share)
