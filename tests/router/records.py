"""Records of answers whose tokens came at given times."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.contracts.request import SamplingParams
from pdserve.router.record import RequestRecord
from pdserve.router.requests.request import RequestSpec
from pdserve.router.text.answer import Answer

ARRIVED_S = 10.0


def new_record(num_choices: int = 1, num_prompts: int = 1, *, tier: str = DEFAULT_TIER) -> RequestRecord:
    """A request that is about to generate."""
    spec = RequestSpec(prompt_tokens=(1,), sampling=SamplingParams(), arrived_s=ARRIVED_S, num_choices=num_choices)
    record = RequestRecord(id="id-1", path="/v1/completions", arrived_s=ARRIVED_S, tier=tier)
    record.started([Answer(spec, ()) for _ in range(num_prompts)])
    return record


def answer_record(ttft_s: float, gaps_s: Sequence[float] = (), *, tier: str = DEFAULT_TIER) -> RequestRecord:
    """Of one choice, all of whose tokens were handed over."""
    record = new_record(tier=tier)
    [journey] = record.journeys
    journey.first_s = ARRIVED_S + ttft_s
    journey.last_s = journey.first_s + sum(gaps_s)
    journey.num_gaps, journey.longest_gap_s = len(gaps_s), max(gaps_s, default=0.0)
    return record
