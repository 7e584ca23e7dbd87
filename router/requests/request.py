"""Request, its specification and single outcome.

`pdserve.router.requests.dispatch` advances it; readers of the answer subclass `Request` and override its hooks. Never
waits and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import Outcome, SamplingParams
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.requests.journey import Journey

if TYPE_CHECKING:
    from pdserve.router.requests.attempt import Attempt


class GenerationError(Exception):
    """A generation that cannot continue. The HTTP edge turns it into an OpenAI error object."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status: 400 cannot run here, 429 overloaded, 503 no worker, 504 deadline, 500 other."""
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Parameters shared by every choice and every attempt."""

    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    arrived_s: float
    """Arrival by the dispatcher's clock; TTFT and the wait for token 0 count from here."""
    num_choices: int = 1
    """Answers to generate."""
    cache_salt: bytes = b""
    uses_cache: bool = True
    """False: no other prompt shares a prefix, so prefix caches are not consulted."""
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of the leading full blocks, if known: for simulated requests."""
    tenant: str = ""
    """Whose request it is; empty if keys are not asked for."""
    tier: str = DEFAULT_TIER
    """Name of its objectives in the deployment's ``slo``."""
    request_id: str = ""
    """The client's ``X-Request-Id``, or one that the edge made; for the log."""
    is_probe: bool = False
    """Health probe of both phases: never prefilled on a decode worker while a prefill worker is up."""


class Request:
    """A client's request, with one or more choices."""

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.attempts: dict[int, Attempt] = {}
        """Choices that have been launched and have not ended, by index."""
        self.waiting_choices = list(range(1, spec.num_choices))
        """Choices to launch once choice 0 has token 0, and so the prompt is in a prefix cache, or has ended."""
        self.outcome: Outcome | None = None
        self.error: GenerationError | None = None
        self.is_started = False
        """A worker has begun to compute the prompt."""
        self.num_cached_tokens = 0
        """Prompt tokens that choice 0 found in a prefix cache; meaningful once token 0 is out."""
        self.predicted_prefill_s = 0.0
        """Of its whole prompt, as counted when it was accepted."""
        self.journeys = [Journey() for _ in range(spec.num_choices)]
        """Of each choice."""
        self.workers: list[str] = []
        """Ids of the workers that got a choice, in order."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log probabilities of every prompt token but the first, if requested; complete once token 0 is out."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log probabilities were requested and are incomplete."""
        spec = self.spec
        return spec.sampling.num_prompt_logprobs >= 0 and len(self.prompt_logprobs) < len(spec.prompt_tokens) - 1

    def take_prompt_logprobs(self, first_position: int, entries: Sequence[TokenLogprobs]) -> bool:
        """Add log probabilities of consecutive prompt tokens; return ``False`` if earlier ones are missing."""
        num_known = len(self.prompt_logprobs) + 1  # the first token has none
        if first_position > num_known:
            return False
        num_missing = len(self.spec.prompt_tokens) - num_known
        self.prompt_logprobs += entries[num_known - first_position :][:num_missing]
        return True

    # Hooks, called by the dispatcher

    def prompt_started(self, num_cached_tokens: int) -> None:
        """A worker began to compute the prompt of choice 0, in its first attempt."""

    def token_received(self, token: TokenEvent) -> None:
        """Receive the next token of its choice, for the client."""

    def ended(self) -> None:
        """`outcome` is set, and `error` if the request failed."""
