"""The seam inside the router: HTTP handlers ask a `Generator` for tokens and know nothing of workers.

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
    """What the cluster serves, as the first worker's welcome tells it."""

    max_model_len: int
    """Prompt and answer tokens together."""


class Generation(Protocol):
    """One running request. Iterate it for tokens; leaving early requires `cancel`."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache; meaningful once token 0 is out."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Of every prompt token but the first, where they were asked for; complete once token 0 is out."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Yields every token of every choice once, those of a choice in order, and ends after the last choice.

        Raises:
            GenerationError: no token follows.
        """
        ...

    def take_ready(self) -> Sequence[TokenEvent]:
        """The tokens that iterating would yield without waiting, taken all at once; often none."""
        ...

    def finish(self, choice: int) -> None:
        """A stop string was found in ``choice``: nothing more of it is wanted. The request is FINISHED with its last
        choice. Idempotent, and harmless after the end."""
        ...

    def cancel(self) -> None:
        """The client left: stop it on every worker; idempotent, and harmless after the end."""
        ...


class Generator(Protocol):
    """Starts generations."""

    @property
    def is_ready(self) -> bool:
        """Whether both phases have served a real round trip."""
        ...

    @property
    def model(self) -> ServedModel | None:
        """``None`` until a worker has been seen."""
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
            arrived_s: ``time.monotonic()`` at the request's arrival, from which TTFT counts.
            num_choices: answers to generate.

        Raises:
            GenerationError: refused at once (overload, no worker).
        """
        ...
