"""One request in a simulated cluster: its progress and its final record.

Owned by `pdserve.planner.simulator`, which decides everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import nan

import numpy as np

from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.planner.prompts import NO_PROMPT, Prompt
from pdserve.planner.requests import SimulatedRequest
from pdserve.planner.simulated_cluster import Seat
from pdserve.planner.simulation import FloatArray, IntArray, RequestTimes
from pdserve.router.requests.policy import PromptBlocks

_NO_BLOCKS = PromptBlocks((), 1)


@dataclass(slots=True, eq=False)
class SimulatedFlight:
    """One request under way, and what is known of it in the end."""

    request_id: int
    request: SimulatedRequest
    prompt: Prompt
    blocks: PromptBlocks
    arrived_s: float
    attempt: int = -1
    emitted: tuple[int, ...] = ()
    prefill: Seat | None = None
    decode: Seat | None = None
    handle: bytes = b""
    started_s: float = nan
    first_token_s: float = nan
    second_token_s: float = nan
    last_token_s: float = nan
    num_cached_tokens: int = 0
    is_rejected: bool = False
    has_missed: bool = False

    @property
    def key(self) -> RequestKey:
        return RequestKey(0, self.request_id, self.attempt)

    def forget_prompt(self) -> None:
        """It is over: prompts are most of what a simulation keeps."""
        self.prompt = NO_PROMPT
        self.blocks = _NO_BLOCKS

    def attempt_request(self, *, ttft_slo_s: float, handoff: bool) -> GenerationRequest:
        """What a worker is sent for the current attempt."""
        return GenerationRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            prompt_tokens=self.prompt.tokens,
            block_hashes=self.prompt.block_hashes,
            emitted_tokens=self.emitted,
            sampling=_sampling(self.request.num_output_tokens),
            ttft_slo_s=ttft_slo_s,
            handoff=handoff,
        )


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def request_times(flights: Sequence[SimulatedFlight]) -> RequestTimes:
    """The record of all flights, in order of arrival."""

    def floats(values: Iterable[float]) -> FloatArray:
        return np.fromiter(values, np.float64, len(flights))

    def integers(values: Iterable[int]) -> IntArray:
        return np.fromiter(values, np.int64, len(flights))

    return RequestTimes(
        arrived_s=floats(flight.arrived_s for flight in flights),
        started_s=floats(flight.started_s for flight in flights),
        first_token_s=floats(flight.first_token_s for flight in flights),
        second_token_s=floats(flight.second_token_s for flight in flights),
        last_token_s=floats(flight.last_token_s for flight in flights),
        num_prompt_tokens=integers(flight.request.num_prompt_tokens for flight in flights),
        num_cached_tokens=integers(flight.num_cached_tokens for flight in flights),
        num_output_tokens=integers(flight.request.num_output_tokens for flight in flights),
        is_rejected=np.fromiter((flight.is_rejected for flight in flights), np.bool_, len(flights)),
    )
