"""Admission: a bound on the answers in flight, of which each tenant and tier holds a share, and the drain. Pure."""

from __future__ import annotations

from collections import Counter

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.router.replicas import Replicas
from pdserve.router.requests.observer import DispatchObserver
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.requests.settings import DispatchSettings

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0


class Admission:
    """Counts the choices in flight."""

    def __init__(self, settings: DispatchSettings, replicas: Replicas, observer: DispatchObserver) -> None:
        self.is_draining = False
        self._settings, self._replicas, self._observer = settings, replicas, observer
        self._num_choices: Counter[tuple[str, str]] = Counter()
        """In flight, by tenant and tier."""
        self.num_in_flight = 0
        self._mean_request_s = MIN_RETRY_AFTER_S

    def begin_drain(self) -> None:
        """Refuse new requests; running ones continue."""
        self.is_draining = True

    def check(self, num_choices: int, *, tenant: str = "", tier: str = DEFAULT_TIER) -> None:
        """Check that a request for that many choices would be accepted now; count one that would not. A tenant may
        hold as many choices in a tier as are free, so that there is always room for others.

        Raises:
            GenerationError: it would not (overload, drain).
        """
        if self.is_draining:
            self._observer.refused(tier)
            raise GenerationError(503, "the router is draining", retry_after_s=MIN_RETRY_AFTER_S)
        if num_choices > self._settings.max_in_flight:
            message = f"{num_choices} choices are more than this router takes at once: {self._settings.max_in_flight}"
            raise GenerationError(400, message)
        # One that is more than this router's share has it for itself.
        max_in_flight = max(self._replicas.share(self._settings.max_in_flight), num_choices)
        num_in_flight = self.num_in_flight
        num_free, num_held = max_in_flight - num_in_flight, self._num_choices[tenant, tier]
        message = ""
        if num_choices > num_free:
            message = f"{num_in_flight} answers are in flight already"
        elif (tenant or self._settings.slo.tiers) and num_held and num_held + num_choices > num_free:
            message = f"{num_held} answers of this tenant and tier are in flight already; the rest is for others"
        if message:
            self._observer.refused(tier)
            wait_s = min(max(self._mean_request_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
            raise GenerationError(429, message, retry_after_s=wait_s)

    def accepted(self, spec: RequestSpec) -> None:
        self._num_choices[spec.tenant, spec.tier] += spec.num_choices
        self.num_in_flight += spec.num_choices

    def ended(self, spec: RequestSpec, answered_s: float) -> None:
        """``answered_s``: seconds from its arrival; 0 if it has no answer."""
        share = spec.tenant, spec.tier
        self.num_in_flight -= spec.num_choices
        self._num_choices[share] -= spec.num_choices
        if not self._num_choices[share]:
            del self._num_choices[share]
        if answered_s:
            self._mean_request_s += 0.1 * (answered_s - self._mean_request_s)
