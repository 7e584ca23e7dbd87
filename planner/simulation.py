"""Result of a simulation: the times of each request's events and the utilisation of the workers.

Arrays have one entry per request, in order of arrival; times are seconds on the simulation's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve.contracts.placement import WorkerRole

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Instants of N requests; NaN where one never got there."""

    arrived_s: FloatArray
    started_s: FloatArray
    """Its prompt's first chunk was planned."""
    first_token_s: FloatArray
    """Token 0 reached the client."""
    second_token_s: FloatArray
    """Token 1: what lies between is the handoff stall. NaN for an answer of one token."""
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
        """(last token - token 0) / (tokens - 1); 0 for an answer of one token, which is judged on TTFT alone."""
        num_gaps = np.maximum(self.num_output_tokens - 1, 1)
        tpot_s: FloatArray = (self.last_token_s - self.first_token_s) / num_gaps
        return tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """How one worker spent the simulation."""

    worker_id: str
    role: WorkerRole
    busy_s: float
    """In steps."""
    held_block_s: float
    """Seconds that KV blocks were referenced, summed over the blocks."""
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    num_kv_blocks: int
    num_pulls: int
    """Of prompts' KV, from others."""
    num_network_pulls: int
    """Those from another host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Samples at equal distances of time, of a pool's workers together."""

    role: WorkerRole
    sampled_s: FloatArray
    num_waiting: IntArray
    """Requests that hold no blocks yet."""
    num_running: IntArray
    kv_share: FloatArray
    """Of the blocks, those that are referenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of one run."""

    times: RequestTimes
    workers: list[WorkerUse]
    timelines: list[Timeline] = field(default_factory=list)
    """Empty unless asked for."""
    gap_s: FloatArray
    """Lengths of gaps between tokens of answers (ITL), each distinct kind once ..."""
    gap_weights: FloatArray
    """... and how many gaps were so long."""
    ended_s: float
    """When the last event happened."""
    was_stopped: bool = False
    """Too many objectives were missed: not all requests came, and not all of those that did have ended."""
