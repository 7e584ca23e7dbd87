"""Turns simulations into candidates: their figures, bottlenecks and reasons for losing, and the verdict.

Used by `pdserve.planner.search.search`. Simulates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.layout import Layout, Pool
from pdserve.planner.search.estimates import Estimate, Estimator, Resource
from pdserve.planner.search.goodput import Goodput
from pdserve.planner.search.hosts import host_sentence
from pdserve.planner.search.plan import Candidate, Objective, PoolFigures, Question, Sensitivity, Verdict
from pdserve.planner.search.ranking import Entry
from pdserve.planner.simulate.attainment import Attainment, PoolUse
from pdserve.planner.wording import dollars, share
from pdserve.planner.wording import rate as rate_words

_MANY_TIMES = 2.0
"""Ratio from which two rates are told, and not their difference in percent."""
_FULL_SHARE = 0.9
"""Mean share of KV blocks in use from which KV memory is the limiting resource."""


def assemble(
    question: Question,
    estimator: Estimator,
    entry: Entry,
    winner: Candidate | None,
    *,
    at_winners_rate: Attainment | None = None,
    saturation_rate: float | None = None,
    sensitivity: tuple[Sensitivity, ...] = (),
) -> Candidate:
    """A candidate with its figures and reasons; ``winner`` is ``None`` for the first in rank."""
    layout, goodput = entry.layout, entry.goodput
    seen = goodput.at_rate if goodput is not None else None
    resource = _resource(layout, entry.estimate, seen)
    reasons = [_binding_words(seen, resource, estimator.idle_ttft_miss_share(layout))]
    if goodput is not None and not goodput.rate:
        reasons = [f"No rate that was simulated meets both objectives{_cause(entry.estimate)}."]
    if winner is None and layout.spans_hosts:
        reasons.append(host_sentence(layout, seen))
    if winner is not None:
        reasons.append(_losing_words(question, winner, entry, at_winners_rate))
        if question.objective.has_rate and entry.rate >= question.rate:
            reasons += _cost_words(question, winner, layout, entry.dollars_per_hour)
    return Candidate(
        layout=layout,
        estimate=replace(entry.estimate, rate=entry.expected_rate),
        goodput=goodput,
        resource=resource,
        pools=tuple(_figures(question, estimator, pool, seen) for pool in layout.pools),
        dollars_per_hour=entry.dollars_per_hour,
        at_winners_rate=at_winners_rate,
        saturation_rate=saturation_rate,
        sensitivity=sensitivity,
        reasons=tuple(reasons),
    )


def _resource(layout: Layout, estimate: Estimate, seen: Attainment | None) -> Resource:
    """The limiting resource at the goodput, from the objective that more requests miss, or from the bound."""
    if seen is None:
        return estimate.resource
    for use in seen.pools:
        if use.role is not WorkerRole.PREFILL and (use.num_preemptions or use.kv_share > _FULL_SHARE):
            return Resource.KV_MEMORY
    if layout.is_colocated:
        return estimate.resource
    if seen.binding_slo == "ttft":
        return Resource.PREFILL_COMPUTE
    return Resource.DECODE_BANDWIDTH if estimate.resource is Resource.PREFILL_COMPUTE else estimate.resource


def _binding_words(seen: Attainment | None, resource: Resource, idle_miss_share: float) -> str:
    if seen is None:
        return f"Its highest rate is estimated: {resource.value} would run out first."
    objective = seen.binding_slo.upper()
    text = (
        f"{objective} binds: at {rate_words(seen.rate)} {share(seen.ttft_share)} meet TTFT and "
        f"{share(seen.tpot_share)} TPOT; {resource.value} runs out first."
    )
    if seen.binding_slo == "ttft" and idle_miss_share:
        text += f" Even on an idle cluster, {share(idle_miss_share)} of the prompts miss TTFT: they are too long."
    return text


def _losing_words(question: Question, winner: Candidate, entry: Entry, seen: Attainment | None) -> str:
    goodput, num_devices = entry.goodput, entry.layout.num_devices
    if seen is not None:
        text = (
            f"At {rate_words(seen.rate)} it meets both objectives for {share(seen.share)}: TTFT is missed by "
            f"{share(1 - seen.ttft_share)}, TPOT by {share(1 - seen.tpot_share)}."
        )
        if goodput is not None and _overlaps(question, winner, goodput):
            text += " Its confidence interval overlaps the winner's."
        return text
    how = "Estimated" if goodput is None else "Simulated"
    less = 1 - entry.rate / num_devices / winner.rate_per_device
    than = f"{share(abs(less))} {'less' if less >= 0 else 'more'} per device than the winner"
    return f"{how} at {rate_words(entry.rate)} with {num_devices} devices, {than}."


def _cost_words(question: Question, winner: Candidate, layout: Layout, dollars_per_hour: float | None) -> Iterator[str]:
    """Extra cost over the winner, for a layout that serves the required rate."""
    if question.objective is Objective.LEAST_COST:
        if dollars_per_hour != winner.dollars_per_hour:
            yield f"It costs {dollars(dollars_per_hour)} an hour, the winner {dollars(winner.dollars_per_hour)}."
    elif layout.num_devices != winner.layout.num_devices:
        yield f"It takes {_devices(layout)}, the winner {winner.layout.num_devices}."


def _devices(layout: Layout) -> str:
    return f"{layout.num_devices} device{'s' * (layout.num_devices > 1)}"


def _overlaps(question: Question, winner: Candidate, goodput: Goodput) -> bool:
    """Whether the confidence intervals overlap, of goodput or, for that objective, of goodput per device."""
    assert winner.goodput is not None
    size = winner.goodput.num_devices / goodput.num_devices if question.objective is Objective.RATE_PER_DEVICE else 1.0
    its, other = winner.goodput.interval, goodput.interval
    return other.high * size >= its.low and its.high >= other.low * size


def _figures(question: Question, estimator: Estimator, pool: Pool, seen: Attainment | None) -> PoolFigures:
    worker, model = estimator.figures(pool), question.model
    use: PoolUse | None = None
    if seen is not None:
        use = next((use for use in seen.pools if use.role is pool.role), None)
    cost = worker.cost
    num_tokens = worker.num_kv_blocks * model.block_size
    return PoolFigures(
        role=pool.role,
        weight_bytes_per_device=cost.rank_memory().weight_bytes,
        kv_bytes_per_device=num_tokens * cost.rank_kv_bytes_per_token,
        memory_bytes_per_device=pool.hardware.memory_bytes,
        num_kv_blocks=worker.num_kv_blocks,
        max_concurrency=worker.max_concurrency,
        max_long_sequences=num_tokens // model.max_model_len,
        busy_share=use.busy_share if use is not None else 0.0,
        kv_share=use.kv_share if use is not None else 0.0,
    )


def verdict_of(question: Question, candidates: Sequence[Candidate]) -> Verdict:
    """Disaggregated or colocated: compares the best simulated layout of either kind, by the objective.

    Args:
        candidates: in order of rank.
    """
    best = {kind: next(_best_of(candidates, is_colocated=kind), None) for kind in (False, True)}
    apart, together = best[False], best[True]
    if apart is None or together is None:
        only = apart or together
        assert only is not None, "the winner was simulated"
        others = [each for each in candidates if each.layout.is_colocated is not only.layout.is_colocated]
        text = f"Only {_kind(only)} layouts fit and meet the SLO here; the best is {only.layout}."
        if failed := next((each for each in others if each.goodput), None):
            cause = _cause(failed.estimate)
            text += f" Of {_kind(failed)} ones, {failed.layout} meets it at no rate that was simulated{cause}."
        return Verdict(best_disaggregated=apart, best_colocated=together, gain=None, is_clear=True, text=text)
    comparison = _compared(question, apart, together)
    return Verdict(
        best_disaggregated=apart,
        best_colocated=together,
        gain=comparison.merit(apart) / comparison.merit(together) - 1,
        is_clear=comparison.is_clear,
        text=_verdict_words(question, comparison, *sorted((apart, together), key=comparison.merit, reverse=True)),
    )


def _best_of(candidates: Sequence[Candidate], *, is_colocated: bool) -> Iterator[Candidate]:
    """Simulated candidates of a kind with a goodput above 0."""
    return (each for each in candidates if each.layout.is_colocated is is_colocated and each.goodput and each.rate)


class _Comparison(NamedTuple):
    """Measure by which two candidates are compared."""

    merit: Callable[[Candidate], float]
    """Higher is better."""
    is_by_cost: bool
    """By devices or dollars: both serve the required rate."""
    is_clear: bool


def _compared(question: Question, first: Candidate, second: Candidate) -> _Comparison:
    """Compare by the objective; by goodput if one of them does not serve the rate, or if both cost the same."""
    objective = question.objective
    cheaper, dearer = sorted((first, second), key=lambda each: _cost(question, each))
    is_served = objective.has_rate and min(first.rate, second.rate) >= question.rate
    if is_served and _cost(question, cheaper) < _cost(question, dearer):
        assert cheaper.goodput is not None
        is_sure = cheaper.goodput.interval.low >= question.rate
        return _Comparison(lambda each: 1 / _cost(question, each), is_by_cost=True, is_clear=is_sure)
    assert second.goodput is not None
    is_clear = not _overlaps(question, first, second.goodput)
    if objective is Objective.RATE_PER_DEVICE:
        return _Comparison(lambda each: each.rate_per_device, is_by_cost=False, is_clear=is_clear)
    return _Comparison(lambda each: each.rate, is_by_cost=False, is_clear=is_clear)


def _cost(question: Question, candidate: Candidate) -> float:
    """Devices, or dollars per hour."""
    if question.objective is not Objective.LEAST_COST:
        return candidate.layout.num_devices
    assert candidate.dollars_per_hour is not None, "the search asks for prices"
    return candidate.dollars_per_hour


def _verdict_words(question: Question, comparison: _Comparison, better: Candidate, worse: Candidate) -> str:
    advice = "Serve colocated" if better.layout.is_colocated else "Disaggregate"
    other = f"the best {_kind(worse)} layout, {worse.layout}"
    served = f"{advice}: {better.layout} serves {rate_words(better.rate)} within the SLO"
    if comparison.is_by_cost:
        unsure = (
            "" if comparison.is_clear else "; the former's confidence interval reaches below the rate that was asked"
        )
        if question.objective is Objective.LEAST_COST:
            prices = dollars(better.dollars_per_hour), dollars(worse.dollars_per_hour)
            return f"{served} for {prices[0]} an hour; {other}, costs {prices[1]}{unsure}."
        return f"{served} with {_devices(better.layout)}; {other}, takes {worse.layout.num_devices}{unsure}."
    ratio = comparison.merit(better) / comparison.merit(worse)
    per = instead = ""
    if better.layout.num_devices != worse.layout.num_devices:
        if question.objective is Objective.RATE_PER_DEVICE:
            per = " per device"
        else:
            instead = f", with {_devices(better.layout)} instead of {worse.layout.num_devices}"
    unsure = "" if comparison.is_clear else "; their confidence intervals overlap"
    if ratio >= _MANY_TIMES:
        reached = f"{rate_words(comparison.merit(worse))}{per}{_cause(worse.estimate)}"
        return f"{served}{instead}; {other}, reaches {reached}{unsure}."
    return f"{served}, {share(ratio - 1)} more{per} than {other}{instead}{unsure}."


def _kind(candidate: Candidate) -> str:
    return "colocated" if candidate.layout.is_colocated else "disaggregated"


def _cause(estimate: Estimate) -> str:
    """Why a layout serves next to nothing, if it is known."""
    return ": its mean pull of KV takes longer than TPOT leaves a mean answer" if estimate.is_pull_too_long else ""
