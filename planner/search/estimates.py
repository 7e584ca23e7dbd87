"""Closed-form estimates of a layout, without simulation: memory, feasibility and goodput.

`pdserve.planner.search.search` uses them to choose the layouts that it simulates first, and where to start. Calls the
cost model only. All figures describe a steady state at a demand's mean lengths (`pdserve.planner.search.demand`).

- Memory: the weights, plus the KV of one sequence of ``max_model_len``.
- Feasibility: the share of prompts that meet the TTFT objective on an idle cluster, and the share of answers that meet
  the TPOT objective when they decode alone. If either is too low, no rate meets the SLO.
- Prefill: a worker computes the prompts that fill every step's token budget, less the time that they queue for.
- Decode and mixed workers: a step of ``b`` decode rows and ``n`` prompt tokens takes ``s(n, b)``, so a worker decodes
  ``b / (s g)`` requests of ``g`` gaps per second and prefills ``n / (s L)`` prompts of ``L`` tokens. The batch limit
  and KV limit ``b`` (Little's law), the token budget limits ``n + b``, and the TPOT objective limits ``s``, unless
  one-token answers, which have no TPOT, already reach the target. The router may let decode workers prefill, so the
  same holds for both.
- Link: KV that is prefilled elsewhere and misses the prefix cache must cross the link, one pull at a time per worker,
  at the speed of the slower side, within a host or over the network.

The estimate is the lesser of both phases' rates at the best ``(n, b)``. Sources: Little, "A proof for the queuing
formula L = lambda W" (1961); for waiting, Pollaczek and Khinchine's mean, and Kingman's exponential tail of it (1961).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import Hardware
from pdserve.planner.arrays import BoolArray, FloatArray, IntArray
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.demand import Demand
from pdserve.planner.simulate.simulator import Overheads

_MAX_SAMPLE = 200
"""Requests of the demand that are timed one by one."""
_NUM_PACKED_STEPS = 8
"""Full steps that are averaged for a prefill worker's maximum rate."""
_BATCH_GROWTH, _CHUNK_GROWTH = 1.2, 1.6
"""Ratio between neighbouring numbers of decode rows, and of prompt tokens, in the grid of steps."""
_STEADY_SHARE = 0.9
"""Share of a mean limit that an estimate uses: steps and arrivals vary."""
_SPARE_SHARE = 0.6
"""Share of the objectives that a mean request takes if nine of ten requests meet them."""
_ALMOST_ALL = 0.9999
"""Stands for "all requests" where a normal distribution, which has no maximum, models the variation."""


class Resource(Enum):
    """The resource that limits the rate."""

    PREFILL_COMPUTE = "prefill compute"
    DECODE_BANDWIDTH = "decode memory bandwidth"
    KV_MEMORY = "KV memory"
    BATCH_LIMIT = "decode batch limit"
    LINK = "KV transfer link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimate of one layout."""

    rate: float
    """Goodput."""
    resource: Resource
    """The resource that limits it."""
    is_feasible: bool = True
    """False: even an idle cluster misses the SLO for too many requests."""
    is_pull_too_long: bool = False
    """A mean pull alone takes longer than TPOT leaves a mean answer."""


class _Mix(NamedTuple):
    """Steps that a worker could run continuously, with their rates; arrays of one entry per kind of step."""

    step_s: FloatArray
    decoded_per_s: FloatArray
    """Requests decoded per worker."""
    prefilled_per_s: FloatArray
    """Prompts prefilled per worker in the same steps."""
    batch_size: FloatArray
    decode_s: FloatArray
    """Duration of a step with the decode rows alone."""
    beside_s: FloatArray
    """Time that the decode rows add to a step with prompt tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerFigures:
    """Figures of one worker of a pool."""

    cost: CostModel
    num_kv_blocks: int
    max_concurrency: int
    """Sequences of the demand's mean length that decode together, within KV and the batch limit."""
    is_kv_limited: bool
    """KV sets ``max_concurrency``, not the batch limit."""
    idle_ttft_s: FloatArray
    """Sampled prompts on an idle worker."""
    prefilled_per_s: float
    """Prompts, if the worker only prefills and every step is full."""
    mix: _Mix
    idle_tpot_s: FloatArray
    """Sampled answers that decode alone; 0 for one-token answers."""


def mean_wait_s(rate: FloatArray | float, service_s: FloatArray) -> FloatArray:
    """Mean time in the queue of one FIFO server with Poisson arrivals (Pollaczek and Khinchine); infinite if it is
    overloaded.

    Args:
        rate: arrivals per second, of one server or of one per row of ``service_s``.
        service_s: sampled service times; a single value is M/D/1.
    """
    idle_share = np.maximum(1 - rate * service_s.mean(axis=-1), 0.0)
    with np.errstate(divide="ignore"):
        wait_s: FloatArray = rate * (service_s**2).mean(axis=-1) / (2 * idle_share)
    return wait_s


def fits(pool: Pool, model: PlannedModel) -> bool:
    """Whether a worker holds the weights and, in each micro-batch, the KV of one sequence of ``max_model_len``."""
    num_blocks = pool.kv_blocks(model, pool.cost(model))
    return num_blocks // pool.pipeline_parallel >= ceil((model.max_model_len + 1) / model.block_size)


def even_pulls_per_s(layout: Layout, near_s: float, far_s: float) -> float:
    """Pulls per second if every prefill worker's prompts go to all decode workers equally: under load, the policy
    balances load rather than saving network traffic. Each worker has one link."""
    hosts = layout.worker_hosts
    senders, takers = (Counter(hosts[pool.role]) for pool in (layout.prefill, layout.decode) if pool is not None)
    near_share = sum(count * takers[place] for place, count in senders.items()) / (senders.total() * takers.total())
    return min(senders.total(), takers.total()) / (near_share * near_s + (1 - near_share) * far_s)


class Estimator:
    """Estimate of a model's layouts under one demand; caches what several layouts share."""

    def __init__(self, model: PlannedModel, demand: Demand, slo: SloConfig) -> None:
        self._model = model
        self._demand = demand
        self._slo = slo
        self._figures: dict[Pool, WorkerFigures] = {}
        self._costs: dict[tuple[Hardware, int, int, bool], CostModel] = {}
        self._queued: dict[Pool, float] = {}

    def figures(self, pool: Pool) -> WorkerFigures:
        """Figures of one worker of ``pool``.

        Raises:
            ValueError: the model does not divide by the pool's degrees.
        """
        key = replace(pool, replicas=1)
        if key not in self._figures:
            self._figures[key] = self._work_out(pool)
        return self._figures[key]

    @property
    def residence_s(self) -> float:
        """Mean time of a request in a cluster that meets the objectives with some slack."""
        return (self._slo.ttft_seconds + self._demand.mean_gaps * self._slo.tpot_seconds) * _SPARE_SHARE

    def idle_ttft_s(self, layout: Layout, percent: float) -> float:
        """Percentile of TTFT on an idle cluster."""
        samples = [self.figures(pool).idle_ttft_s for pool in layout.pools]
        return float(np.percentile(np.min(samples, axis=0), percent))

    def idle_ttft_miss_share(self, layout: Layout) -> float:
        """Share of prompts that miss the TTFT objective on an idle cluster."""
        samples = [self.figures(pool).idle_ttft_s for pool in layout.pools]
        return float((np.min(samples, axis=0) > self._slo.ttft_seconds).mean())

    def idle_tpot_s(self, layout: Layout, percent: float) -> float:
        """Percentile of TPOT on an idle cluster."""
        return float(np.percentile(self.figures(layout.decode_pool).idle_tpot_s, percent))

    def estimate(self, layout: Layout) -> Estimate:
        """Estimate of a layout whose workers all fit (`fits`), with room for variation: queues of prompts, and more
        sequences at times than on average."""
        slo, served_share, decode_pool = self._slo, self._demand.served_share, layout.decode_pool
        decode = self.figures(decode_pool)
        mix, idle_ttft_s = decode.mix, decode.idle_ttft_s
        prefilled = decode_pool.replicas * mix.prefilled_per_s
        tpot_s = mix.step_s / _STEADY_SHARE
        is_link_limited = is_pull_too_long = False
        if layout.prefill is not None:
            idle_ttft_s = np.minimum(self.figures(layout.prefill).idle_ttft_s, idle_ttft_s)
            if layout.prefill not in self._queued:
                self._queued[layout.prefill] = float(self._queued_rates(layout.prefill)[0])
            handed_off, linked = self._queued[layout.prefill], even_pulls_per_s(layout, *self._pull_times_s(layout))
            is_link_limited = linked < handed_off
            mean_pull_s = min(layout.prefill.replicas, decode_pool.replicas) / linked
            is_pull_too_long = mean_pull_s > self._demand.mean_gaps * slo.tpot_seconds
            prefilled = min(handed_off, linked) + prefilled * self._local_share(decode_pool)
        else:
            tpot_s = tpot_s + self._stalls_s(decode_pool)
            prefilled = np.minimum(prefilled, self._queued_rates(decode_pool, mix))
        decoded = np.where(self._is_within(tpot_s), decode_pool.replicas * mix.decoded_per_s, 0.0)
        ttft_reach = float((idle_ttft_s <= slo.ttft_seconds).mean())
        tpot_reach = float((decode.idle_tpot_s <= slo.tpot_seconds).mean())
        reaches = min(ttft_reach, tpot_reach) * served_share >= slo.attainment
        rate = max(_STEADY_SHARE * float(np.minimum(decoded, prefilled).max()), 1 / self.residence_s)
        return Estimate(
            rate=rate / served_share,
            resource=_resource(decode, decoded, prefilled, is_link_limited=is_link_limited),
            is_feasible=reaches and bool(self._is_within(mix.step_s).any()),
            is_pull_too_long=is_pull_too_long,
        )

    @property
    def _judged_share(self) -> float:
        """Minimum share of requests that must decode in short steps to meet the target; above 0 if there are any."""
        return self._slo.attainment - self._demand.one_token_share

    def _is_within(self, step_s: FloatArray) -> BoolArray:
        """Steps that answers may decode in continuously."""
        return (step_s <= self._slo.tpot_seconds) | (self._judged_share <= 0)

    def _stalls_s(self, pool: Pool) -> FloatArray:
        """Seconds per token, for each kind of step, by which the TPOT at the target exceeds the mean: more prompts than
        average arrive during some answers, in Poisson numbers, and each stalls the answer for a step."""
        mix, demand = self.figures(pool).mix, self._demand
        chunk = min(round(demand.mean_new_tokens), pool.max_batch_tokens)
        stall_s = self.figures(pool).cost.prefill_s(chunk, 0)
        per_s = np.minimum(mix.decoded_per_s, mix.prefilled_per_s) * ceil(demand.mean_new_tokens / chunk)
        num_gaps = max(demand.mean_gaps, 1.0)
        num_stalls = num_gaps * mix.step_s * per_s
        longer_s: FloatArray = (
            NormalDist().inv_cdf(min(self._slo.attainment, _ALMOST_ALL)) * np.sqrt(num_stalls) * stall_s / num_gaps
        )
        return longer_s

    def _queued_rates(self, pool: Pool, mix: _Mix | None = None) -> FloatArray:
        """Highest rates at which enough prompts, queueing included, meet the TTFT objective.

        Args:
            mix: kinds of steps of a worker that also decodes; returns one rate for each. Decode rows lengthen a
                prompt's steps, and on a busy worker a step is in flight when the prompt arrives.
        """
        figures, slo = self.figures(pool), self._slo
        decoding = np.zeros((1, 2)) if mix is None else np.stack([mix.decode_s, mix.beside_s], axis=1)
        (decode_s, beside_s), kind = (found.T for found in np.unique(decoding, axis=0, return_inverse=True))
        num_steps = np.array([-(-num_new // pool.max_batch_tokens) for num_new, _ in self._sampled_prompts()])
        service_s = figures.idle_ttft_s + np.outer(beside_s, num_steps)
        mean_s = service_s.mean(axis=1)
        low, high = np.zeros_like(mean_s), np.ones_like(mean_s)
        for _ in range(10):
            utilisation = (low + high) / 2
            wait_s = mean_wait_s(utilisation / mean_s, service_s)
            # Share of prompts that wait with several workers (Sakasegawa, 1977), and for how long.
            share_waiting = utilisation ** (sqrt(2 * (pool.replicas + 1)) - 1)
            tail_s = wait_s / utilisation / pool.replicas
            spare_s = slo.ttft_seconds - service_s - (utilisation * decode_s)[:, None]
            late = share_waiting[:, None] * np.exp(-np.maximum(spare_s, 0.0) / tail_s[:, None])
            is_met = 1 - np.where(spare_s < 0, 1.0, late).mean(axis=1) >= slo.attainment
            low, high = np.where(is_met, utilisation, low), np.where(is_met, high, utilisation)
        capacity = pool.replicas * figures.prefilled_per_s * figures.idle_ttft_s.mean() / mean_s
        rates: FloatArray = (low * capacity)[kind.ravel()]
        return rates

    def _local_share(self, pool: Pool) -> float:
        """Share of prompt tokens in prompts that a decode worker may prefill without harm to its steps."""
        is_short = self.figures(pool).idle_ttft_s <= self._slo.tpot_seconds
        tokens = self._sample(self._demand.num_new_tokens)
        return float(tokens[is_short].sum() / tokens.sum())

    def _pull_times_s(self, layout: Layout) -> Iterator[float]:
        """Seconds of a pull of mean length within a host, and over the network."""
        num_tokens = int(self._demand.mean_new_tokens)
        costs = [self.figures(pool).cost for pool in (layout.prefill, layout.decode) if pool is not None]
        for same_host in (True, False):
            yield max([1e-9, *(cost.transfer_s(num_tokens, same_host=same_host) for cost in costs)])

    # One worker

    def _work_out(self, pool: Pool) -> WorkerFigures:
        cost, demand, num_lanes = self._cost(pool), self._demand, pool.pipeline_parallel
        num_blocks = pool.kv_blocks(self._model, cost)
        lane_tokens = num_blocks // num_lanes * self._model.block_size
        num_held = int(lane_tokens // max(demand.mean_decode_context, 1.0))
        max_batch = max(1, min(pool.max_batch_size, num_held))
        overheads = Overheads()
        idle_s = np.array([cost.prompt_s(*row, pool.max_batch_tokens) for row in self._sampled_prompts()])
        return WorkerFigures(
            cost=cost,
            num_kv_blocks=num_blocks,
            max_concurrency=max_batch * num_lanes,
            is_kv_limited=num_held < pool.max_batch_size,
            idle_ttft_s=idle_s + overheads.arrival_s + overheads.message_s + overheads.answer_s,
            prefilled_per_s=num_lanes * self._packed_per_s(pool, cost),
            mix=self._mix(pool, cost, max_batch),
            idle_tpot_s=self._idle_tpot_s(cost),
        )

    def _cost(self, pool: Pool) -> CostModel:
        key = (pool.hardware, pool.tensor_parallel, pool.pipeline_parallel, pool.expert_parallel)
        if key not in self._costs:
            self._costs[key] = pool.cost(self._model)
        return self._costs[key]

    def _sample(self, values: IntArray) -> IntArray:
        return values[:_MAX_SAMPLE]

    def _sampled_prompts(self) -> list[tuple[int, int]]:
        """(new, cached) tokens of sampled prompts."""
        demand = self._demand
        new, cached = self._sample(demand.num_new_tokens), self._sample(demand.num_cached_tokens)
        return list(zip(new.tolist(), cached.tolist(), strict=True))

    def _idle_tpot_s(self, cost: CostModel) -> FloatArray:
        demand = self._demand
        outputs = self._sample(demand.num_output_tokens)
        contexts = self._sample(demand.num_new_tokens + demand.num_cached_tokens) + outputs // 2
        return np.where(outputs == 1, 0.0, [cost.decode_s(1, context) for context in contexts.tolist()])

    def _packed_per_s(self, pool: Pool, cost: CostModel) -> float:
        """Prompts per second of one micro-batch that always finds enough prompts to fill its steps."""
        prompts = itertools.cycle(self._sampled_prompts())
        total_s, num_new, num_cached = 0.0, 0, 0
        for _ in range(_NUM_PACKED_STEPS):
            rows, num_left = [], pool.max_batch_tokens
            while num_left:
                if not num_new:
                    num_new, num_cached = next(prompts)
                chunk = min(num_new, num_left)
                rows.append((chunk, num_cached))
                num_new, num_cached, num_left = num_new - chunk, num_cached + chunk, num_left - chunk
            total_s += cost.step_s(rows)
        num_tokens = _NUM_PACKED_STEPS * pool.max_batch_tokens
        return num_tokens / total_s / float(self._sample(self._demand.num_new_tokens).mean())

    def _mix(self, pool: Pool, cost: CostModel, max_batch: int) -> _Mix:
        demand = self._demand
        context = demand.mean_decode_context
        new = demand.num_new_tokens
        prompt = max(1, round(float((new**2).mean() / new.mean())))
        num_cached = round(float(demand.num_cached_tokens.mean()))
        steps = []
        num_lanes, num_gaps = pool.pipeline_parallel, max(demand.mean_gaps, 1e-9)
        for batch in _sizes(max_batch, _BATCH_GROWTH):
            context_tokens = round(batch * context)
            decode_s = cost.decode_s(batch, context_tokens)
            chunk = min(prompt, pool.max_batch_tokens)
            beside_s = cost.mixed_s(chunk, num_cached, batch, context_tokens) - cost.prefill_s(chunk, num_cached)
            for num_prompt in (0, *_sizes(max(pool.max_batch_tokens - batch, 0), _CHUNK_GROWTH)):
                step_s = _mixed_step_s(cost, num_prompt, prompt, num_cached, batch, context_tokens)
                decoded = num_lanes * batch / (step_s * num_gaps)
                prefilled = num_lanes * num_prompt / (step_s * demand.mean_new_tokens)
                steps.append((step_s, decoded, prefilled, batch, decode_s, beside_s))
        return _Mix(*(np.array(column, np.float64) for column in zip(*steps, strict=True)))


def _mixed_step_s(
    cost: CostModel, num_prompt: int, prompt: int, num_cached: int, batch: int, context_tokens: int
) -> float:
    """Seconds of a step with ``num_prompt`` tokens of prompts of ``prompt`` tokens each, and a decode batch."""
    if not num_prompt:
        return cost.decode_s(batch, context_tokens)
    if num_prompt <= prompt:
        # The chunk lies somewhere within a prompt: take its middle.
        num_before = num_cached + (prompt - num_prompt) // 2
        return cost.mixed_s(num_prompt, num_before, batch, context_tokens)
    num_whole, num_rest = divmod(num_prompt, prompt)
    rows = [(prompt, num_cached)] * num_whole + ([(num_rest, num_cached)] if num_rest else [])
    more_s = max(0.0, cost.step_s(rows) - cost.prefill_s(prompt, num_cached))
    return cost.mixed_s(prompt, num_cached, batch, context_tokens) + more_s


def _sizes(largest: int, growth: float) -> list[int]:
    """Geometric sizes from 1 to ``largest``, by the factor ``growth``."""
    sizes: list[int] = []
    size = float(largest)
    while size >= 1:
        if not sizes or round(size) != sizes[-1]:
            sizes.append(round(size))
        size /= growth
    return sizes[::-1]


def _resource(decode: WorkerFigures, decoded: FloatArray, prefilled: FloatArray, *, is_link_limited: bool) -> Resource:
    """The resource that would raise the lesser of both phases' rates, over all kinds of steps."""
    if np.minimum(decoded, 1.1 * prefilled).max() > np.minimum(1.1 * decoded, prefilled).max():
        return Resource.LINK if is_link_limited else Resource.PREFILL_COMPUTE
    best = int(np.minimum(decoded, prefilled).argmax())
    if decode.mix.batch_size[best] < decode.mix.batch_size.max():
        return Resource.DECODE_BANDWIDTH
    return Resource.KV_MEMORY if decode.is_kv_limited else Resource.BATCH_LIMIT
