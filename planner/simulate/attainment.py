"""Evaluates a simulated run against an SLO: attainment, its confidence, and latencies.

`pdserve.planner.search.goodput` calls it at each rate, `pdserve simulate` once. Excludes requests that arrive before
the cluster reaches its steady state (`warm_up_s`). Accepts any record shaped like `Simulation`; runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.arrays import BoolArray, FloatArray
from pdserve.planner.simulate.simulation import RequestTimes, Simulation, interactivity

WARM_UP_RESIDENCES = 10
"""Mean residence times until the effect of the empty start is gone; see `warm_up_s`."""
MAX_WARM_UP_SHARE = 0.4
"""Limit on the warm-up, as a share of the time that a run's arrivals take."""
NUM_BATCHES = 10
"""Batches of a run for the confidence interval."""
NUM_LOOKS = 2
"""At a run that may end early: at each it is judged so strictly that both together are wrong as seldom as one look at a
run of fixed length (Bonferroni)."""
_STUDENT_T = {
    1: ((49, 2.010), (29, 2.045), (19, 2.093), (9, 2.262), (4, 2.776), (0, 12.71)),
    NUM_LOOKS: ((49, 2.312), (29, 2.364), (19, 2.433), (9, 2.685), (4, 3.495), (0, 25.45)),
}
"""By the number of looks: (degrees of freedom, quantile of Student's t at 1 - 0.025 / looks) for at least that many
degrees."""


class Interval(NamedTuple):
    """95 % confidence interval of a figure."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """A latency's distribution: seconds at each whole percentile. Unfinished requests count as infinite."""

    quantile_s: tuple[float, ...]
    """101 values, for percentiles 0 to 100; empty if nothing was measured."""

    def percentile(self, percent: int) -> float:
        """Latency at ``percent`` of 100 in seconds; NaN if nothing was measured."""
        return self.quantile_s[percent] if self.quantile_s else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Mean utilisation of the workers of one role, from the first arrival to the end."""

    role: WorkerRole
    busy_share: float
    """Share of the time with a step running. A decode worker is equally busy with one sequence or a hundred: see the
    batch size."""
    mean_batch_size: float
    """Decoding sequences per step."""
    kv_share: float
    """Share of KV blocks held by sequences; a shared block counts once."""
    num_preemptions: int
    network_share: float = 0.0
    """Pulls that crossed the network, as a share of all pulls."""
    tokens_per_step: float = 1.0
    """Of a decoding sequence: more than 1 where guesses are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Result of a placement under a workload at one rate."""

    rate: float
    """Offered requests per second."""
    share: float
    """Counted requests that met both objectives."""
    interval: Interval
    """Confidence interval of ``share``, from the means of consecutive batches of requests, at all looks at the run
    together."""
    ttft_share: float
    """Counted requests that met the TTFT objective, whatever their TPOT."""
    tpot_share: float
    """Counted requests that met the TPOT objective, whatever their TTFT."""
    ttft: Distribution
    tpot: Distribution
    """Answers of two tokens or more."""
    itl: Distribution
    """Gaps between tokens, including the warm-up's."""
    interactivity: float
    """As in `pdserve.planner.simulate.simulation.interactivity`, of counted requests; unfinished ones are infinite."""
    num_requests: int
    num_counted: int
    """Requests that arrived after the warm-up, and while new conversations began."""
    num_rejected: int
    warm_up_s: float
    mean_residence_s: float
    """Mean time from arrival to last token."""
    output_tokens_per_s: float
    """Tokens of finished answers over all workers, from the first arrival to the end."""
    pools: tuple[PoolUse, ...]
    is_saturated: bool = False
    """The run had no steady state (`RequestTimes.is_saturated`): a longer one would attain less."""

    @property
    def network_share(self) -> float:
        """Pulls that crossed the network, as a share of all pulls."""
        return max((pool.network_share for pool in self.pools), default=0.0)

    def meets(self, target: float) -> bool:
        """Whether enough requests met both objectives, in a steady state."""
        return self.share >= target and not self.is_saturated

    def surely_meets(self, target: float) -> bool:
        """Whether longer runs would meet the target, with 95 % confidence."""
        return self.interval.low >= target and not self.is_saturated

    def surely_misses(self, target: float) -> bool:
        """Whether longer runs would miss the target, with 95 % confidence, or have no steady state."""
        return self.interval.high < target or self.is_saturated

    @property
    def binding_slo(self) -> str:
        """``ttft`` or ``tpot``: the objective that more requests missed; TTFT on a tie."""
        return "tpot" if self.tpot_share < self.ttft_share else "ttft"


def warm_up_s(arrived_s: FloatArray, mean_residence_s: float) -> float:
    """Seconds at the start of a run that are not counted: ten mean residence times, at most 40 % of the arrivals' time.

    A cluster starts empty and, if it has a steady state, reaches it within a few mean residence times. If it has none,
    latencies grow as long as the run lasts, and the limit keeps the run's end.
    """
    span_s = float(arrived_s[-1] - arrived_s[0]) if len(arrived_s) else 0.0
    return min(WARM_UP_RESIDENCES * mean_residence_s, MAX_WARM_UP_SHARE * span_s)


def measure(run: Simulation, slo: SloConfig, rate: float, *, num_looks: int = 1) -> Attainment:
    """Evaluate a run at ``rate`` offered requests per second.

    Args:
        num_looks: 1, or `NUM_LOOKS` of a run that might have ended at each.
    """
    times = run.times
    first_s = times.arrived_s[0] if len(times.arrived_s) else 0.0
    span_s = max(run.ended_s - float(first_s), 1e-9) if len(times.arrived_s) else 1e-9
    residence_s = _mean_residence_s(times)
    is_offered = times.arrived_s <= run.offered_until_s
    start_s = warm_up_s(times.arrived_s[is_offered], residence_s)
    counts = is_offered & (times.arrived_s >= first_s + start_s)
    ttft_s, tpot_s = _or_never(times.ttft_s), _or_never(times.tpot_s)
    met_ttft, met_tpot = ttft_s <= slo.ttft_seconds, tpot_s <= slo.tpot_seconds
    met = (met_ttft & met_tpot)[counts]
    return Attainment(
        rate=rate,
        share=_mean(met),
        interval=_interval(met, num_looks),
        ttft_share=_mean(met_ttft[counts]),
        tpot_share=_mean(met_tpot[counts]),
        ttft=_distribution(ttft_s[counts]),
        tpot=_distribution(tpot_s[counts & (times.num_output_tokens > 1)]),
        itl=_weighted_distribution(run),
        interactivity=interactivity(_or_never(times.e2e_per_token_s)[counts]),
        num_requests=len(times.arrived_s),
        num_counted=len(met),
        num_rejected=int(times.is_rejected.sum()),
        warm_up_s=start_s,
        mean_residence_s=residence_s,
        output_tokens_per_s=int(times.num_output_tokens[np.isfinite(tpot_s)].sum()) / span_s,
        pools=tuple(_pool_uses(run, span_s)),
        is_saturated=times.is_saturated,
    )


def seems_over(times: RequestTimes, now_s: float, slo: SloConfig, *, growth: float = inf) -> bool:
    """Whether a run that has come to ``now_s`` would, if it ended there, surely meet or surely miss the target of
    ``slo``, or would do neither if it were ``growth`` times as long. A guess, which leaves out requests in flight that
    may yet be in time."""
    is_known = np.isfinite(times.last_token_s) | times.is_rejected
    is_known |= np.isnan(times.first_token_s) & (now_s - times.arrived_s > slo.ttft_seconds)
    residence_s = _mean_residence_s(times)
    starts_s = times.arrived_s[0] + warm_up_s(times.arrived_s, residence_s)
    counts = is_known & (times.arrived_s >= starts_s) & (times.arrived_s <= now_s - residence_s)
    met = times.are_within(slo)[counts]
    low, high = _interval(met, NUM_LOOKS)
    distance = abs(_mean(met) - slo.attainment)
    return low >= slo.attainment or high < slo.attainment or distance < (high - low) / 2 / sqrt(growth)


def _or_never(latency_s: FloatArray) -> FloatArray:
    """Replace NaN, a missing event, by infinity."""
    return np.where(np.isnan(latency_s), inf, latency_s)


def _mean_residence_s(times: RequestTimes) -> float:
    residence_s = times.last_token_s - times.arrived_s
    ended = residence_s[np.isfinite(residence_s)]
    return float(ended.mean()) if len(ended) else 0.0


def _mean(met: BoolArray) -> float:
    return float(met.mean()) if len(met) else 0.0


def _interval(met: BoolArray, num_looks: int) -> Interval:
    """Confidence interval from the means of batches of consecutive requests, which hardly depend on each other (Law,
    "Simulation Modeling and Analysis", section 9.5.3); never narrower than Wilson's for independent requests, which
    does not collapse if all of them met the objectives."""
    share, num_counted = _mean(met), len(met)
    if not num_counted:
        return Interval(0.0, 1.0)
    means = [float(batch.mean()) for batch in np.array_split(met, NUM_BATCHES) if len(batch)]
    half = inf
    if len(means) > 1:
        half = _student_t(len(means) - 1, num_looks) * float(np.std(means, ddof=1)) / sqrt(len(means))
    z_squared = NormalDist().inv_cdf(1 - 0.025 / num_looks) ** 2 / num_counted
    centre = (share + z_squared / 2) / (1 + z_squared)
    spread = sqrt(z_squared * (share * (1 - share) + z_squared / 4)) / (1 + z_squared)
    return Interval(max(0.0, min(share - half, centre - spread)), min(1.0, max(share + half, centre + spread)))


def _student_t(num_degrees: int, num_looks: int) -> float:
    return next(quantile for degrees, quantile in _STUDENT_T[num_looks] if num_degrees >= degrees)


def _distribution(latency_s: FloatArray) -> Distribution:
    if not len(latency_s):
        return Distribution(())
    # The higher of two neighbours: a number and infinity have no middle.
    return Distribution(tuple(np.percentile(latency_s, np.arange(101), method="higher").tolist()))


def _weighted_distribution(run: Simulation) -> Distribution:
    """Distribution of the gaps between tokens, from a simulation's lengths and counts."""
    if not len(run.gap_s):
        return Distribution(())
    order = np.argsort(run.gap_s)
    reached = np.cumsum(run.gap_weights[order])
    places = np.searchsorted(reached, np.arange(101) / 100 * reached[-1])
    return Distribution(tuple(run.gap_s[order][np.minimum(places, len(order) - 1)].tolist()))


def _pool_uses(run: Simulation, span_s: float) -> Iterable[PoolUse]:
    for role in {worker.role: None for worker in run.workers}:
        workers = [worker for worker in run.workers if worker.role is role]

        def total(name: str) -> Any:
            return sum(getattr(worker, name) for worker in workers)  # noqa: B023

        num_steps, num_pulls, num_decoded = total("num_steps"), total("num_pulls"), total("num_decode_tokens")
        yield PoolUse(
            role=role,
            busy_share=min(1.0, total("busy_s") / (span_s * len(workers))),
            mean_batch_size=num_decoded / num_steps if num_steps else 0.0,
            kv_share=min(1.0, total("held_block_s") / (span_s * total("num_kv_blocks"))),
            num_preemptions=total("num_preemptions"),
            network_share=total("num_network_pulls") / num_pulls if num_pulls else 0.0,
            tokens_per_step=1 + total("num_right_guesses") / num_decoded if num_decoded else 1.0,
        )
