"""From what was simulated to what is told: a candidate's figures, what binds it and why it lost, and the verdict.

Used by `pdserve.planner.search`. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.contracts.placement import WorkerRole
from pdserve.planner.attainment import Attainment, PoolUse
from pdserve.planner.bounds import BoundBook, Bounds, Resource
from pdserve.planner.goodput import Goodput
from pdserve.planner.layout import Layout, Pool
from pdserve.planner.plan import Candidate, PoolFigures, Question, Sensitivity, Verdict
from pdserve.planner.wording import rate as rate_words
from pdserve.planner.wording import share

_FULL_SHARE = 0.9
"""Of KV blocks in use on average, at which they are what runs out."""


def assemble(
    question: Question,
    book: BoundBook,
    layout: Layout,
    bounds: Bounds,
    goodput: Goodput | None,
    dollars_per_hour: float | None,
    *,
    is_final: bool,
    at_winners_rate: Attainment | None,
    cliff_rate: float | None,
    sensitivity: tuple[Sensitivity, ...],
    winner: Candidate | None,
) -> Candidate:
    """A candidate with its figures and reasons; ``winner`` is ``None`` for the first in rank."""
    seen = goodput.at_rate if goodput is not None else None
    resource = _resource(layout, bounds, seen)
    rate = bounds.estimate if goodput is None else goodput.rate
    reasons = [_binding_words(seen, resource, book.idle_ttft_miss_share(layout))]
    if winner is not None:
        reasons.append(_losing_words(winner, layout, goodput, rate, at_winners_rate, is_final=is_final))
    return Candidate(
        layout=layout,
        bounds=bounds,
        goodput=goodput,
        resource=resource,
        pools=tuple(_figures(question, book, pool, bounds, seen) for pool in layout.pools),
        dollars_per_hour=dollars_per_hour,
        is_final=is_final,
        at_winners_rate=at_winners_rate,
        cliff_rate=cliff_rate,
        sensitivity=sensitivity,
        reasons=tuple(reasons),
    )


def _resource(layout: Layout, bounds: Bounds, seen: Attainment | None) -> Resource:
    """What runs out at the goodput: told by the objective that is missed more, or by the bound."""
    if seen is None:
        return bounds.resource
    use = next(use for use in seen.pools if use.role is not WorkerRole.PREFILL)
    if use.num_preemptions or use.kv_share > _FULL_SHARE:
        return Resource.KV_MEMORY
    if layout.is_colocated:
        return bounds.resource
    if seen.binding_slo == "ttft":
        return Resource.PREFILL_COMPUTE
    return Resource.DECODE_BANDWIDTH if bounds.resource is Resource.PREFILL_COMPUTE else bounds.resource


def _binding_words(seen: Attainment | None, resource: Resource, idle_miss_share: float) -> str:
    if seen is None:
        return f"Estimated, not simulated: {resource.value} would run out first."
    objective = seen.binding_slo.upper()
    text = (
        f"{objective} binds: at {rate_words(seen.rate)} {share(seen.ttft_share)} meet TTFT and "
        f"{share(seen.tpot_share)} TPOT; {resource.value} runs out first."
    )
    if seen.binding_slo == "ttft" and idle_miss_share:
        text += f" On an idle cluster {share(idle_miss_share)} of the prompts would miss TTFT too: they are long."
    return text


def _losing_words(
    winner: Candidate,
    layout: Layout,
    goodput: Goodput | None,
    rate: float,
    seen: Attainment | None,
    *,
    is_final: bool,
) -> str:
    if seen is not None:
        text = (
            f"At {rate_words(seen.rate)} it meets both objectives for {share(seen.share)}: TTFT is missed by "
            f"{share(1 - seen.ttft_share)}, TPOT by {share(1 - seen.tpot_share)}."
        )
        if goodput is not None and _overlaps(winner, goodput):
            text += " Its confidence interval overlaps the winner's."
        return text
    how = "Estimated at" if goodput is None else "Screened at" if not is_final else "Simulated at"
    less = 1 - rate / layout.num_devices / winner.rate_per_device
    than = f"{share(abs(less))} {'less' if less >= 0 else 'more'} per device than the winner"
    return f"{how} {rate_words(rate)} with {layout.num_devices} devices, {than}."


def _overlaps(winner: Candidate, goodput: Goodput) -> bool:
    assert winner.goodput is not None
    return (
        goodput.interval.high / goodput.num_devices >= winner.goodput.interval.low / winner.goodput.num_devices
        and winner.goodput.interval.high / winner.goodput.num_devices >= goodput.interval.low / goodput.num_devices
    )


def _figures(question: Question, book: BoundBook, pool: Pool, bounds: Bounds, seen: Attainment | None) -> PoolFigures:
    worker, model = book.figures(pool), question.model
    use: PoolUse | None = None
    if seen is not None:
        use = next(use for use in seen.pools if use.role is pool.role)
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
        busy_share=use.busy_share if use is not None else min(1.0, bounds.estimate / bounds.rate),
        kv_share=use.kv_share if use is not None else 0.0,
    )


def verdict_of(candidates: Sequence[Candidate]) -> Verdict:
    """Disaggregated or colocated: the best of both kinds among those that were simulated longest."""
    best = {kind: next(_best_of(candidates, is_colocated=kind), None) for kind in (False, True)}
    apart, together = best[False], best[True]
    if apart is None or together is None:
        only = apart or together
        assert only is not None, "the winner was simulated"
        kind = "colocated" if only.layout.is_colocated else "disaggregated"
        text = f"Only {kind} layouts meet the SLO here; the best is {only.layout}."
        return Verdict(best_disaggregated=apart, best_colocated=together, gain=None, is_clear=True, text=text)
    gain = apart.rate_per_device / together.rate_per_device - 1
    assert together.goodput is not None
    is_clear = not _overlaps(apart, together.goodput)
    return Verdict(
        best_disaggregated=apart,
        best_colocated=together,
        gain=gain,
        is_clear=is_clear,
        text=_verdict_words(apart, together, gain, is_clear=is_clear),
    )


def _best_of(candidates: Sequence[Candidate], *, is_colocated: bool) -> Iterator[Candidate]:
    """Those of a kind that were simulated and serve anything, finalists first."""
    of_kind = [each for each in candidates if each.layout.is_colocated is is_colocated and each.goodput and each.rate]
    return iter(sorted(of_kind, key=lambda each: not each.is_final))


def _verdict_words(apart: Candidate, together: Candidate, gain: float, *, is_clear: bool) -> str:
    better, worse = (apart, together) if gain >= 0 else (together, apart)
    margin = better.rate_per_device / worse.rate_per_device - 1
    kind = "colocated" if worse.layout.is_colocated else "disaggregated"
    per = "" if better.layout.num_devices == worse.layout.num_devices else " per device"
    advice = "Disaggregate" if gain >= 0 else "Serve colocated"
    text = (
        f"{advice}: {better.layout} serves {rate_words(better.rate)} within the SLO, "
        f"{share(margin)} more{per} than the best {kind} layout, {worse.layout}"
    )
    return text + ("." if is_clear else "; their confidence intervals overlap.")
