"""Builds the traffic of the command line from a preset, a trace file or fixed lengths, fitted to a model.

Also describes it in words. Passes draws of `pdserve.planner.workload.workload` through unchanged, except that it
truncates lengths to the model's limit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.contracts.deployment import SloConfig
from pdserve.planner import wording
from pdserve.planner.workload.arrivals import POISSON, RandomGaps, Recorded
from pdserve.planner.workload.conversations import Conversations
from pdserve.planner.workload.lengths import FixedLengths
from pdserve.planner.workload.presets import PRESETS, preset
from pdserve.planner.workload.sessions import RedrawnSessions
from pdserve.planner.workload.trace import Trace
from pdserve.planner.workload.trace_reading import read_trace
from pdserve.planner.workload.workload import Workload, WorkloadSample, trace_workload

_MOST_SHORTENED = 0.1
_NUM_LOOKED_AT = 2000
"""Requests drawn to describe a workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A workload for one model."""

    workload: Workload
    max_model_len: int
    trace: Trace | None = None
    """Source of recorded requests, if any."""
    notes: tuple[str, ...] = ()
    """Notes from the reader, such as skipped lines."""

    def draw(self, num_requests: int, seed: int) -> WorkloadSample:
        """``num_requests`` requests, none longer than the model's limit."""
        return self.workload.draw(num_requests, seed, max_model_len=self.max_model_len)

    @property
    def usual_slo(self) -> SloConfig:
        """Usual objectives of this kind of traffic, if there are any."""
        return self.workload.slo or SloConfig()

    def recorded_rate(self, num_requests: int, seed: int) -> float | None:
        """Recorded requests per second of a draw; ``None`` if no times were recorded."""
        return self.workload.recorded_requests_per_s(num_requests, seed)

    @property
    def max_requests(self) -> int | None:
        """Number of recorded requests; ``None`` if any number can be drawn."""
        return None if self.trace is None else self.trace.num_requests

    def at_most(self, num_requests: int) -> int:
        """``num_requests``, or the number of recorded ones if that is less."""
        return num_requests if self.max_requests is None else min(num_requests, self.max_requests)

    def bursty(self, variation: float) -> Traffic:
        """The same requests with random gaps of this coefficient of variation.

        Raises:
            ValueError: the variation is negative.
        """
        return dataclasses.replace(self, workload=dataclasses.replace(self.workload, arrivals=RandomGaps(variation)))

    def limited(self, max_tokens: int) -> Traffic:
        """The same requests with this limit on answers, as in `SimulatedRequest`."""
        return dataclasses.replace(self, workload=dataclasses.replace(self.workload, max_tokens=max_tokens))

    def check_lengths(self) -> None:
        """Raise ValueError if more than a tenth of a trace's requests are longer than the model's limit."""
        if self.trace is None:
            return
        num_tokens = self.trace.num_prompt_tokens + self.trace.num_output_tokens
        num_longer, most = int((num_tokens > self.max_model_len).sum()), self.max_model_len
        if num_longer > _MOST_SHORTENED * len(num_tokens):
            raise ValueError(
                f"{num_longer:,} of {len(num_tokens):,} requests are longer than {most} tokens, the longest has "
                f"{num_tokens.max()}: give --set model.max_model_len={num_tokens.max()} for all, or {most} to shorten "
                "them"
            )

    def with_at_least(self, num_requests: int) -> Traffic:
        """This traffic or, if it is a trace with fewer requests, draws from the trace's sessions.

        The draws have random arrivals: a short trace does not determine more.
        """
        if self.trace is None or self.trace.num_requests >= num_requests:
            return self
        workload = dataclasses.replace(self.workload, contents=RedrawnSessions(self.trace), arrivals=POISSON)
        note = (
            f"The trace has {self.trace.num_requests} requests, too few to plan by: they are drawn again and again, "
            "whole sessions each time, with Poisson arrivals."
        )
        return dataclasses.replace(self, workload=workload, trace=None, notes=(*self.notes, note))

    def described(self) -> tuple[str, tuple[str, ...]]:
        """A description, and notes for the reader."""
        sample = self.draw(self.at_most(_NUM_LOOKED_AT), seed=0)
        statistics = sample.statistics()
        words = (
            f"{self.workload.name}: prompts of {statistics.mean_prompt_tokens:,.0f} tokens and answers of "
            f"{statistics.mean_output_tokens:,.0f} on average, {self._arrivals()}"
        )
        if statistics.cacheable_share >= 0.005:
            words += f"; up to {statistics.cacheable_share * 100:.0f} % of prompt tokens could come from a cache"
        if self.workload.max_tokens:
            words += f"; clients limit answers to {self.workload.max_tokens} tokens"
        notes = self.notes
        if str(sample.clamped):
            notes += (
                f"Shortened to {self.max_model_len} tokens: {sample.clamped}, of {sample.num_requests} requests.",
            )
        return words, notes

    def _arrivals(self) -> str:
        arrivals = self.workload.arrivals
        if isinstance(arrivals, Recorded):
            return "in the pattern of the trace"
        assert isinstance(arrivals, RandomGaps)
        variation = arrivals.coefficient_of_variation
        if not variation:
            return "evenly spaced"
        return "Poisson arrivals" if variation == 1 else f"gaps with a burstiness of {variation**-2:g}"


def named_traffic(name: str, *, max_model_len: int, **reading: Any) -> Traffic:
    """The preset of that name, or the trace in the file at that path.

    Args:
        reading: arguments of `read_trace`.

    Raises:
        ValueError: there is neither, or the file is not a trace; the message names the nearest preset or the line.
    """
    path = Path(name).expanduser()
    if name in PRESETS or not (path.exists() or path.suffix or "/" in name):
        return Traffic(workload=preset(name), max_model_len=max_model_len)
    try:
        trace = read_trace(path, **reading)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    notes = trace.notes
    if trace.arrived_s is not None and trace.rate:
        span = wording.seconds(float(trace.arrived_s[-1]))
        notes = (f"{trace.num_requests:,} requests, {wording.rate(trace.rate)} over {span}", *notes)
    return Traffic(
        workload=trace_workload(trace),
        max_model_len=max_model_len,
        trace=trace,
        notes=tuple(f"Trace: {note}." for note in notes),
    )


def fixed_traffic(num_prompt_tokens: int, num_output_tokens: int, *, max_model_len: int) -> Traffic:
    """Poisson arrivals of identical requests.

    Raises:
        ValueError: a length is below 1, or both together exceed the model's limit.
    """
    if num_prompt_tokens + num_output_tokens > max_model_len:
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens and {num_output_tokens} answer tokens exceed max_model_len "
            f"{max_model_len}: raise it with --set model.max_model_len={num_prompt_tokens + num_output_tokens}, or use "
            "shorter requests"
        )
    lengths = FixedLengths(num_prompt_tokens, num_output_tokens)
    workload = Workload(name="fixed lengths", contents=Conversations(lengths=lengths))
    return Traffic(workload=workload, max_model_len=max_model_len)
