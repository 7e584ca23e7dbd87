"""Record of one request in a simulation, and the arrays of all records.

Written by `pdserve.planner.simulate.simulator`; kept until the end of the run, so it holds no prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

import numpy as np

from pdserve.planner.simulate.simulation import RequestTimes


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Instants in seconds of the simulation, NaN before the event; the names are those of `RequestTimes`."""

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
