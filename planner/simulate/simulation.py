"""Result of a simulation: the times of each request's events and the utilisation of the workers.

Arrays have one entry per request, in order of arrival; times are seconds on the simulation's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.arrays import FloatArray, IntArray

_LEAST_ANSWERED, _MOST_DRIFT = 0.97, 0.25
"""Limits of a steady state: answers over arrivals, and growth of a request's mean time from one third to the next."""
_LEAST_RESIDENCES = 10
"""Length of a run that reaches a steady state, in mean times of its first requests."""
_DEVIATIONS = 3.0
"""Standard deviations that pass for chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Instants of N requests; NaN for events that never happened."""

    arrived_s: FloatArray
    started_s: FloatArray
    """The first chunk of the prompt was planned."""
    first_token_s: FloatArray
    """Token 0 reached the client."""
    second_token_s: FloatArray
    """Token 1 reached the client; the gap before it is the handoff stall. NaN for a one-token answer."""
    last_token_s: FloatArray
    num_prompt_tokens: IntArray
    num_cached_tokens: IntArray
    """Prompt tokens found in the prefix cache of the worker that prefilled."""
    num_output_tokens: IntArray
    is_rejected: npt.NDArray[np.bool_]

    @property
    def ttft_s(self) -> FloatArray:
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> FloatArray:
        """(last token - token 0) / (tokens - 1); 0 for a one-token answer, which is judged on TTFT alone."""
        num_gaps = np.maximum(self.num_output_tokens - 1, 1)
        tpot_s: FloatArray = (self.last_token_s - self.first_token_s) / num_gaps
        return tpot_s

    @property
    def e2e_per_token_s(self) -> FloatArray:
        """(last token - arrival) / tokens; NaN for an answer that did not end."""
        per_token_s: FloatArray = (self.last_token_s - self.arrived_s) / self.num_output_tokens
        return per_token_s

    def are_within(self, slo: SloConfig, scale: float = 1.0) -> npt.NDArray[np.bool_]:
        """Which requests ended within both objectives, each ``scale`` times as long."""
        is_in_time = (self.ttft_s <= scale * slo.ttft_seconds) & (self.tpot_s <= scale * slo.tpot_seconds)
        within: npt.NDArray[np.bool_] = is_in_time & ~self.is_rejected
        return within

    @property
    def is_saturated(self) -> bool:
        """Whether the run had no steady state: requests were rejected, over its second half answers lag behind
        arrivals, or from its second to its last third the time from arrival to last token grows, by more than chance
        would explain. Without rejections, runs too short to reach a steady state from an empty cluster do not count."""
        if self.is_rejected.mean() > 1 - _LEAST_ANSWERED:
            return True
        residence_s = self.last_token_s - self.arrived_s
        is_over = np.isfinite(residence_s)
        first_s, middle_s, last_s = np.array_split(residence_s[is_over], 3)
        if len(middle_s) < 2 or self.arrived_s[-1] - self.arrived_s[0] < _LEAST_RESIDENCES * first_s.mean():
            return False
        error_s = _DEVIATIONS * float(np.hypot(middle_s.std(), last_s.std())) / np.sqrt(len(middle_s))
        if last_s.mean() - middle_s.mean() > _MOST_DRIFT * middle_s.mean() + error_s:
            return True
        start_s, end_s = self.arrived_s[len(self.arrived_s) // 2], self.arrived_s[-1]
        num_offered = int(((self.arrived_s > start_s) & ~self.is_rejected).sum())
        num_answered = int(((self.last_token_s > start_s) & (self.last_token_s <= end_s)).sum())
        num_in_flight = num_offered / max(end_s - start_s, 1e-9) * residence_s[is_over].mean()
        chance = _DEVIATIONS * np.sqrt(2 * num_in_flight)
        return bool(num_offered - num_answered > (1 - _LEAST_ANSWERED) * num_offered + chance)


def interactivity(e2e_per_token_s: FloatArray) -> float:
    """Tokens per second that nine of ten answers have at least, from arrival on: 1 / p90 of E2E over output tokens, by
    which InferenceX ranks ("E2E-normalised interactivity"). 0 if p90 is infinite, NaN for no answers."""
    return float(1 / np.percentile(e2e_per_token_s, 90, method="higher")) if len(e2e_per_token_s) else nan


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request while it is simulated: instants in seconds, NaN before the event. The names are those of
    `RequestTimes`."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    started_s: float = nan
    first_token_s: float = nan
    second_token_s: float = nan
    last_token_s: float = nan
    num_cached_tokens: int = 0
    is_rejected: bool = False


def request_times(records: Sequence[RequestRecord]) -> RequestTimes:
    """Arrays of ``records``, which are in order of arrival."""
    kinds = {"num": np.int64, "is": np.bool_}

    def column(name: str) -> Any:
        kind = kinds.get(name.partition("_")[0], np.float64)
        return np.fromiter((getattr(record, name) for record in records), kind, len(records))

    return RequestTimes(**{field.name: column(field.name) for field in fields(RequestTimes)})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """Totals of one worker over the simulation."""

    worker_id: str
    role: WorkerRole
    busy_s: float
    """Time in steps."""
    held_block_s: float
    """Referenced KV blocks times seconds."""
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    """Without right guesses."""
    num_right_guesses: int = 0
    num_preemptions: int
    num_kv_blocks: int
    num_pulls: int
    """Pulls of prompts' KV from other workers."""
    num_network_pulls: int
    """Pulls from another host."""


class Scaled(NamedTuple):
    """A change of the numbers of workers."""

    at_s: float
    reason: str
    replicas: Mapping[WorkerRole, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Result of one run."""

    times: RequestTimes
    workers: list[WorkerUse]
    gap_s: FloatArray
    """Distinct lengths of gaps between tokens of answers (ITL)."""
    gap_weights: FloatArray
    """Number of gaps of each length."""
    ended_s: float
    """Time of the last event."""
    offered_until_s: float = inf
    """Time of the last arrival of an open loop; later turns of conversations arrive while the load falls."""
    worker_s: float = 0.0
    """Seconds of all workers, from the start of each to its end."""
    scaled: Sequence[Scaled] = ()
    """Changes by an autoscaler."""
