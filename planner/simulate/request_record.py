"""Record of one request in a simulation, and the arrays of all records.

Written by `pdserve.planner.simulate.simulator`; kept until the end of the run, so it holds no prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from pdserve.planner.arrays import FloatArray, IntArray
from pdserve.planner.simulate.simulation import RequestTimes


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Instants in seconds of the simulation; NaN before the event."""

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

    def floats(values: Iterable[float]) -> FloatArray:
        return np.fromiter(values, np.float64, len(records))

    def integers(values: Iterable[int]) -> IntArray:
        return np.fromiter(values, np.int64, len(records))

    return RequestTimes(
        arrived_s=floats(record.arrived_s for record in records),
        started_s=floats(record.started_s for record in records),
        first_token_s=floats(record.first_token_s for record in records),
        second_token_s=floats(record.second_token_s for record in records),
        last_token_s=floats(record.last_token_s for record in records),
        num_prompt_tokens=integers(record.num_prompt_tokens for record in records),
        num_cached_tokens=integers(record.num_cached_tokens for record in records),
        num_output_tokens=integers(record.num_output_tokens for record in records),
        is_rejected=np.fromiter((record.is_rejected for record in records), np.bool_, len(records)),
    )
