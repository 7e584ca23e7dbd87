"""Judges one simulated run against an SLO: attainment, its confidence, and latencies.

`pdserve.planner.goodput` calls it at each rate, `pdserve simulate` once. Excludes requests that arrive before the
cluster reaches its steady state (`warm_up_s`). Works on any `Simulation`-shaped record; runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.planner.simulation import FloatArray, RequestTimes, Simulation

WARM_UP_RESIDENCES = 10
"""Mean times in the cluster after which it has forgotten that it began empty; see `warm_up_s`."""
MAX_WARM_UP_SHARE = 0.4
"""Of a run's arrivals, by time."""
NUM_BATCHES = 10
"""Into which each run is cut for the confidence interval."""
_STUDENT_T = ((49, 2.010), (29, 2.045), (19, 2.093), (9, 2.262), (4, 2.776), (0, 12.71))
"""Degrees of freedom, and the quantile at 97.5 % of Student's t with so many or a little more."""
_NORMAL_Z = 1.96

BoolArray = npt.NDArray[np.bool_]


class Interval(NamedTuple):
    """Of a figure, where it lies with 95 % confidence."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """A latency's distribution: seconds at each whole percentile. What never ended counts as infinite."""

    quantile_s: tuple[float, ...]
    """101 values, of percentiles 0 to 100; empty where nothing was measured."""

    def percentile(self, percent: int) -> float:
        """Seconds that ``percent`` of 100 stay within; NaN where nothing was measured."""
        return self.quantile_s[percent] if self.quantile_s else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """How the workers of one role were used, on average, from the first arrival to the last."""

    role: WorkerRole
    busy_share: float
    """Of the time, in which a step ran. A decode worker is busy with one sequence as with a hundred: see the batch."""
    mean_batch_size: float
    """Sequences that decode, per step."""
    kv_share: float
    """Of the KV blocks, those that sequences held: one that several share counts once."""
    num_preemptions: int
    network_share: float = 0.0
    """Of its pulls, those that crossed the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """What a placement made of a workload at one rate."""

    rate: float
    """Requests per second that were offered."""
    share: float
    """Of the counted requests, those that met both objectives. Of a run that was stopped early (``is_partial``), the
    most that could have been. Judged as papers do (``is_finite`` of `measure`), the lesser of the shares below."""
    interval: Interval
    """Of ``share``, from the means of consecutive batches of requests."""
    ttft_share: float
    """Of the counted requests, those that met the objective for TTFT, whatever their TPOT."""
    tpot_share: float
    """The same of TPOT."""
    ttft: Distribution
    tpot: Distribution
    """Of answers of two tokens and more."""
    itl: Distribution
    """Gaps between tokens; those of the warm-up are in it."""
    num_requests: int
    num_counted: int
    """Requests that arrived after the warm-up."""
    num_rejected: int
    warm_up_s: float
    """Length of the warm-up of each run."""
    mean_residence_s: float
    """From arrival to last token."""
    output_tokens_per_s: float
    """Of the answers that ended, all workers together, from the first arrival to the end."""
    pools: tuple[PoolUse, ...]
    num_runs: int = 1
    """That it is made of, equally long ones of different seeds."""
    is_partial: bool = False

    @property
    def network_share(self) -> float:
        """Of all pulls, those that crossed the network."""
        return max(pool.network_share for pool in self.pools)

    def meets(self, target: float) -> bool:
        """Whether enough requests met both objectives."""
        return self.share >= target and not self.is_partial

    @property
    def binding_slo(self) -> str:
        """``ttft`` or ``tpot``: the objective that more requests missed; TTFT if as many."""
        return "tpot" if self.tpot_share < self.ttft_share else "ttft"


def warm_up_s(arrived_s: FloatArray, mean_residence_s: float) -> float:
    """How much of a run's beginning is not counted: ten mean residence times, or 40 % of the arrivals if that is less.

    A cluster starts empty, and fills to its steady state within a few mean residence times where there is one. Where
    there is none, latencies grow as long as the run lasts, and a fixed share keeps the run's end.
    """
    span_s = float(arrived_s[-1] - arrived_s[0]) if len(arrived_s) else 0.0
    return min(WARM_UP_RESIDENCES * mean_residence_s, MAX_WARM_UP_SHARE * span_s)


def measure(
    runs: Sequence[Simulation],
    slo: SloConfig,
    rate: float,
    *,
    num_offered: int = 0,
    is_finite: bool = False,
) -> Attainment:
    """Judge runs of one layout at one rate, which differ in their seeds.

    Args:
        rate: requests per second that were offered.
        num_offered: requests of each run, if it may have been stopped early.
        is_finite: count every request, and hold each objective's own share against the target, not both jointly.
    """
    assert runs
    judged = [_Judged.of(run, slo, is_finite=is_finite) for run in runs]
    is_partial = any(run.was_stopped for run in runs)
    met = [each.met for each in judged]
    share, interval = _mean(met), _interval(met)
    ttft_share, tpot_share = _mean([each.met_ttft for each in judged]), _mean([each.met_tpot for each in judged])
    if is_finite:
        share = min(ttft_share, tpot_share)
        interval = min(_interval([each.met_ttft for each in judged]), _interval([each.met_tpot for each in judged]))
    if is_partial:
        assert num_offered, "of a run that was stopped, it must be known how many were still to come"
        share = 1 - sum(each.num_missed for each in judged) / (num_offered * len(runs))
        interval = Interval(0.0, share)
    return Attainment(
        rate=rate,
        share=share,
        interval=interval,
        ttft_share=ttft_share,
        tpot_share=tpot_share,
        ttft=_distribution(np.concatenate([each.ttft_s for each in judged])),
        tpot=_distribution(np.concatenate([each.tpot_s for each in judged])),
        itl=_weighted_distribution(runs),
        num_requests=sum(len(run.times.arrived_s) for run in runs),
        num_counted=sum(len(each.met) for each in judged),
        num_rejected=sum(int(run.times.is_rejected.sum()) for run in runs),
        warm_up_s=float(np.mean([each.warm_up_s for each in judged])),
        mean_residence_s=float(np.mean([each.mean_residence_s for each in judged])),
        output_tokens_per_s=sum(each.num_answered for each in judged) / sum(_span_s(run) for run in runs),
        pools=tuple(_pool_uses(runs)),
        num_runs=len(runs),
        is_partial=is_partial,
    )


class _Judged(NamedTuple):
    """The requests of one run that count."""

    met: BoolArray
    met_ttft: BoolArray
    met_tpot: BoolArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    """Of answers of two tokens and more."""
    num_answered: int
    """Tokens of all answers that ended, those of the warm-up too."""
    num_missed: int
    """Of all requests, those that were seen to miss an objective."""
    warm_up_s: float
    mean_residence_s: float

    @classmethod
    def of(cls, run: Simulation, slo: SloConfig, *, is_finite: bool) -> _Judged:
        times = run.times
        residence_s = _mean_residence_s(times)
        start_s = 0.0 if is_finite else warm_up_s(times.arrived_s, residence_s)
        counts = times.arrived_s >= (times.arrived_s[0] if len(times.arrived_s) else 0.0) + start_s
        ttft_s, tpot_s = _or_never(times.ttft_s), _or_never(times.tpot_s)
        met_ttft, met_tpot = ttft_s <= slo.ttft_seconds, tpot_s <= slo.tpot_seconds
        is_over = np.isfinite(tpot_s)
        was_late = (np.isfinite(ttft_s) & ~met_ttft) | (is_over & ~met_tpot) | times.is_rejected
        return cls(
            met=(met_ttft & met_tpot)[counts],
            met_ttft=met_ttft[counts],
            met_tpot=met_tpot[counts],
            ttft_s=ttft_s[counts],
            tpot_s=tpot_s[counts & (times.num_output_tokens > 1)],
            num_answered=int(times.num_output_tokens[is_over].sum()),
            num_missed=int(was_late.sum()),
            warm_up_s=start_s,
            mean_residence_s=residence_s,
        )


def _span_s(run: Simulation) -> float:
    """From the first arrival to the end; not quite 0 of a run of nothing."""
    arrived_s = run.times.arrived_s
    return max(run.ended_s - float(arrived_s[0]), 1e-9) if len(arrived_s) else 1e-9


def _or_never(latency_s: FloatArray) -> FloatArray:
    """With infinity for what never came."""
    return np.where(np.isnan(latency_s), inf, latency_s)


def _mean_residence_s(times: RequestTimes) -> float:
    residence_s = times.last_token_s - times.arrived_s
    ended = residence_s[np.isfinite(residence_s)]
    return float(ended.mean()) if len(ended) else 0.0


def _mean(values: Iterable[BoolArray | FloatArray]) -> float:
    together = np.concatenate(list(values))
    return float(together.mean()) if len(together) else 0.0


def _interval(met: Sequence[BoolArray]) -> Interval:
    """From the means of batches of consecutive requests, which hardly depend on each other (Law, "Simulation Modeling
    and Analysis", section 9.5.3); never narrower than Wilson's for independent requests, which all may have met."""
    share, num_counted = _mean(met), sum(len(each) for each in met)
    if not num_counted:
        return Interval(0.0, 1.0)
    means = [float(batch.mean()) for each in met for batch in np.array_split(each, NUM_BATCHES) if len(batch)]
    half = inf
    if len(means) > 1:
        student = next(quantile for degrees, quantile in _STUDENT_T if len(means) - 1 >= degrees)
        half = student * float(np.std(means, ddof=1)) / sqrt(len(means))
    z_squared = _NORMAL_Z**2 / num_counted
    centre = (share + z_squared / 2) / (1 + z_squared)
    spread = _NORMAL_Z * sqrt(share * (1 - share) / num_counted + z_squared / (4 * num_counted)) / (1 + z_squared)
    return Interval(max(0.0, min(share - half, centre - spread)), min(1.0, max(share + half, centre + spread)))


def _distribution(latency_s: FloatArray) -> Distribution:
    if not len(latency_s):
        return Distribution(())
    # The higher of two neighbours, because between a number and infinity there is no middle.
    return Distribution(tuple(np.percentile(latency_s, np.arange(101), method="higher").tolist()))


def _weighted_distribution(runs: Sequence[Simulation]) -> Distribution:
    """Of the gaps between tokens, which a simulation gives as lengths and numbers."""
    gap_s = np.concatenate([run.gap_s for run in runs])
    if not len(gap_s):
        return Distribution(())
    order = np.argsort(gap_s)
    reached = np.cumsum(np.concatenate([run.gap_weights for run in runs])[order])
    places = np.searchsorted(reached, np.arange(101) / 100 * reached[-1])
    return Distribution(tuple(gap_s[order][np.minimum(places, len(order) - 1)].tolist()))


def _pool_uses(runs: Sequence[Simulation]) -> Iterable[PoolUse]:
    roles = {worker.role: None for worker in runs[0].workers}
    for role in roles:
        busy_s = available_s = num_decoded = num_steps = held_s = block_s = 0.0
        num_preemptions = num_pulls = num_network_pulls = 0
        for run in runs:
            workers = [worker for worker in run.workers if worker.role is role]
            span_s = _span_s(run)
            busy_s += sum(worker.busy_s for worker in workers)
            available_s += span_s * len(workers)
            num_decoded += sum(worker.num_decode_tokens for worker in workers)
            num_steps += sum(worker.num_steps for worker in workers)
            num_preemptions += sum(worker.num_preemptions for worker in workers)
            num_pulls += sum(worker.num_pulls for worker in workers)
            num_network_pulls += sum(worker.num_network_pulls for worker in workers)
            held_s += sum(worker.held_block_s for worker in workers)
            block_s += span_s * sum(worker.num_kv_blocks for worker in workers)
        yield PoolUse(
            role=role,
            busy_share=min(1.0, busy_s / available_s),
            mean_batch_size=num_decoded / num_steps if num_steps else 0.0,
            kv_share=min(1.0, held_s / block_s),
            num_preemptions=num_preemptions,
            network_share=num_network_pulls / num_pulls if num_pulls else 0.0,
        )
