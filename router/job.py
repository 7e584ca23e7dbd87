"""What one request asks for, what was tried so far, and what of each answer the client already has.

A `Job` never changes; `Tries` and each `ChoiceProgress` are kept by the leg that carries them. Nothing here speaks to a
worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.router.generation import GenerationError

MAX_FAILURES = 2
"""Failed steps after which the request itself is blamed."""
MAX_ATTEMPTS = 8
"""Dispatches of one leg at most, whoever is to blame."""
MIN_DURATION_S = 1e-3
"""What is said of a time that has passed: 0 would be none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The same for every attempt at the request."""

    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes
    arrived_s: float
    deadline_s: float
    """Instant after which the request is given up."""
    ttft_slo_s: float
    """Seconds from arrival by which token 0 is wanted, 0 for no objective."""
    is_probe: bool = False
    """Sent to see both phases work: never prefilled on a decode worker while a prefill worker is up."""

    def request(
        self,
        *,
        request_id: int,
        attempt: int,
        choices: range,
        emitted_tokens: Sequence[int],
        handoff: bool,
        now_s: float,
    ) -> GenerationRequest:
        """One attempt, as a worker is told of it at ``now_s``."""
        ttft_slo_s = 0.0
        if self.ttft_slo_s > 0 and not emitted_tokens:
            ttft_slo_s = max(self.arrived_s + self.ttft_slo_s - now_s, MIN_DURATION_S)
        return GenerationRequest(
            request_id=request_id,
            attempt=attempt,
            prompt_tokens=self.prompt_tokens,
            emitted_tokens=tuple(emitted_tokens),
            choice=choices.start,
            num_choices=len(choices),
            sampling=self.sampling,
            cache_salt=self.cache_salt,
            deadline_s=max(self.deadline_s - now_s, MIN_DURATION_S),
            ttft_slo_s=ttft_slo_s,
            handoff=handoff,
        )


@dataclass(slots=True)
class Tries:
    """What was tried for some choices, over all legs that carried them."""

    num_attempts: int = 0
    num_failures: int = 0
    """Attempts that ended with a failed step."""

    def verdict(self, *, is_late: bool) -> GenerationError | None:
        """Why there must be no next attempt, or ``None``."""
        if is_late:  # workers give up what is late, too
            return late_error()
        if self.num_failures >= MAX_FAILURES:
            return GenerationError(500, "the model could not compute this request")
        if self.num_attempts >= MAX_ATTEMPTS:
            return GenerationError(503, f"gave up after {MAX_ATTEMPTS} attempts", retry_after_s=1.0)
        return None


@dataclass(slots=True, eq=False)
class ChoiceProgress:
    """One of the answers to the prompt, until its last token."""

    index: int
    emitted: list[int] = field(default_factory=list)
    """Tokens handed to the client."""
    began_s: float = 0.0
    """When token 0 came."""


def late_error() -> GenerationError:
    return GenerationError(504, "the request's deadline has passed")
