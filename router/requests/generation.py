"""Interface between the HTTP edge and the cluster: handlers ask a `Generator` for tokens and know nothing of workers.

`pdserve.router.cluster.cluster` implements it over the dispatch core; the HTTP edge consumes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Limits of the served model, taken from the first worker's welcome."""

    max_model_len: int
    """Maximum tokens of prompt and answer together."""


class Generation(Protocol):
    """A running request. Iterate for tokens; call `cancel` when leaving early."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache; meaningful once token 0 is out."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Log probabilities of every prompt token but the first, if requested; complete once token 0 is out."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Yield every token of every choice once, in order within a choice, and end after the last choice.

        Raises:
            GenerationError: no token follows.
        """
        ...

    def take_ready(self) -> Sequence[TokenEvent]:
        """Return all tokens that iteration would yield without waiting; often none."""
        ...

    def finish(self, choice: int) -> None:
        """Finish ``choice`` early because a stop string was found. After its last choice the request is FINISHED.
        Idempotent; a no-op after the end."""
        ...

    def cancel(self) -> None:
        """Stop the request on every worker because the client left. Idempotent; a no-op after the end."""
        ...


class Generator(Protocol):
    @property
    def is_ready(self) -> bool:
        """Whether both phases have served a real round trip."""
        ...

    @property
    def model(self) -> ServedModel | None:
        """``None`` until the first worker has connected."""
        ...

    def start(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        arrived_s: float,
        cache_salt: bytes = b"",
        num_choices: int = 1,
    ) -> Generation:
        """Accept a request and begin to place it.

        Args:
            prompt_tokens: token ids, at least one.
            sampling: ``max_tokens`` already bounded by the model's length; ``seed`` minted.
            arrived_s: ``time.monotonic()`` at arrival, from which TTFT counts.
            num_choices: answers to generate.

        Raises:
            GenerationError: refused at once (overload, no worker).
        """
        ...
