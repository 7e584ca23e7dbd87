"""Recorded requests from any trace format, and draws from them.

The readers (`pdserve.planner.workload.trace_lines`, `pdserve.planner.workload.trace_sharegpt`) fill a trace through
`TraceBuilder`, which also counts the requests that they skip. Never reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdserve.planner.arrays import FloatArray, IntArray
from pdserve.planner.workload.arrivals import first_row
from pdserve.planner.workload.lengths import EmpiricalLengths
from pdserve.planner.workload.requests import Segment, SimulatedRequest

MAX_TOKENS = 10_000_000
"""Per prompt or answer: more is a mistake in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """N requests in order of arrival, or of the file if it has no times."""

    name: str
    arrived_s: FloatArray | None
    """Relative to the first; ``None`` if the file has no times."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    segments: list[tuple[Segment, ...]]
    """Shareable segments of each prompt; empty if the file does not record them."""
    num_malformed: int = 0
    """Skipped lines; only lenient reading skips any."""
    num_empty: int = 0
    """Requests left out because they have no prompt or no answer, as failed ones do."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def num_requests(self) -> int:
        return len(self.num_prompt_tokens)

    def lengths(self) -> EmpiricalLengths:
        """Its pairs of lengths, for draws of any size, without times and shared prefixes."""
        return EmpiricalLengths(self.num_prompt_tokens, self.num_output_tokens)


@dataclass(frozen=True, slots=True)
class TracePrompts:
    """A section of a trace, in order: `pdserve.planner.workload.conversations.Contents`.

    Seed 0 begins at the trace's start, others anywhere; `pdserve.planner.workload.arrivals.Recorded` begins at the same
    row.
    """

    trace: Trace

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        """Raises:
        ValueError: the trace has fewer requests.
        """
        trace = self.trace
        first = first_row(trace.num_requests, num_requests, seed)
        rows = slice(first, first + num_requests)
        lengths = trace.num_prompt_tokens[rows].tolist(), trace.num_output_tokens[rows].tolist()
        segments = trace.segments[rows] or [()] * num_requests
        return [SimulatedRequest(0.0, *each) for each in zip(*lengths, segments, strict=True)]


class TraceRow(NamedTuple):
    """One request from a reader."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    segments: tuple[Segment, ...] = ()


class TraceBuilder:
    """Collects rows, and counts the ones left out."""

    def __init__(self, path: Path, *, lenient: bool) -> None:
        self._path = path
        self._lenient = lenient
        self._rows: list[TraceRow] = []
        self._num_malformed = 0
        self._num_empty = 0
        self._first_malformed = ""

    def add(self, row: TraceRow) -> None:
        """Add a request, unless its prompt or answer is empty."""
        if not row.num_prompt_tokens or not row.num_output_tokens:
            self._num_empty += 1
            return
        self._rows.append(row)

    def refuse(self, place: object, problem: object) -> None:
        """Skip what is at ``place``, such as a line, and cannot be read.

        Raises:
            ValueError: reading is not lenient.
        """
        message = f"{self._path}:{place}: {problem}"
        if not self._lenient:
            raise ValueError(f"{message}: correct the line, or read leniently (--lenient) to skip such lines")
        self._num_malformed += 1
        self._first_malformed = self._first_malformed or message

    def build(self, *, has_times: bool = True, notes: tuple[str, ...] = ()) -> Trace:
        """Raises:
        ValueError: there is no request in the file.
        """
        if not self._rows:
            raise ValueError(
                f"{self._path} has no request that can be used ({self._num_malformed} malformed, "
                f"{self._num_empty} without a prompt or an answer)"
            )
        rows = sorted(self._rows, key=lambda row: row.arrived_s) if has_times else self._rows
        arrived_s, num_prompt_tokens, num_output_tokens, segments = zip(*rows, strict=True)
        return Trace(
            name=self._path.stem,
            arrived_s=np.array(arrived_s) - arrived_s[0] if has_times else None,
            num_prompt_tokens=np.array(num_prompt_tokens),
            num_output_tokens=np.array(num_output_tokens),
            segments=list(segments) if any(segments) else [],
            num_malformed=self._num_malformed,
            num_empty=self._num_empty,
            notes=(*self._counts(), *notes),
        )

    def _counts(self) -> tuple[str, ...]:
        counts = []
        if self._num_malformed:
            counts.append(f"{self._num_malformed} malformed skipped, the first is {self._first_malformed}")
        if self._num_empty:
            counts.append(f"{self._num_empty} without a prompt or an answer left out")
        return tuple(counts)
