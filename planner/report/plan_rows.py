"""Formats a plan's candidates as rows of text, for both the terminal and the HTML report."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import chosen_transport
from pdserve.planner import wording
from pdserve.planner.report.explain import Explanation
from pdserve.planner.report.page import Column
from pdserve.planner.search.plan import Candidate, Plan, PoolFigures

CANDIDATE_COLUMNS = (
    Column("#"),
    Column("layout", is_number=False),
    Column("GPUs"),
    Column("goodput/s"),
    Column("95 % interval"),
    Column("per GPU"),
    Column("per $", is_detail=True),
    Column("$/M tokens"),
    Column("tokens/s", is_detail=True),
    Column("interactivity", is_detail=True),
    Column("binds", is_number=False, is_detail=True),
)
"""Goodput is in requests within the SLO; money and tokens count answers, at the goodput; interactivity is that of
`pdserve.planner.simulate.simulation.interactivity`, in tokens/s."""

POOL_COLUMNS = (
    Column("phase", is_number=False),
    Column("workers", is_number=False),
    Column("weights/GPU"),
    Column("KV/GPU"),
    Column("memory", is_detail=True),
    Column("concurrent"),
    Column("longest", is_detail=True),
    Column("busy"),
    Column("KV used"),
)
"""Per worker; "at once" counts sequences of the workload's mean length, and of ``max_model_len``."""


def candidate_cells(plan: Plan, rank: int) -> tuple[str, ...]:
    """The candidate of a rank, from 1, in the order of `CANDIDATE_COLUMNS`."""
    candidate = plan.candidates[rank - 1]
    at_rate = candidate.goodput.at_rate if candidate.goodput is not None else None
    per_hour = candidate.dollars_per_hour
    return (
        str(rank),
        layout_words(plan, candidate),
        str(candidate.layout.num_devices),
        ("~" if candidate.is_estimated else "") + wording.number(candidate.rate),
        _interval(candidate),
        wording.number(candidate.rate_per_device),
        wording.number(candidate.rate * 3600 / per_hour) if per_hour else "-",
        wording.dollars(candidate.dollars_per_million_tokens(plan.mean_output_tokens)),
        wording.number(candidate.rate * plan.mean_output_tokens),
        wording.number(at_rate.interactivity) if at_rate is not None else "-",
        binds(candidate),
    )


def layout_words(plan: Plan, candidate: Candidate) -> str:
    """The layout, with the chunk budget of colocated workers, the GPUs if the fleet has several kinds, and the number
    of hosts that KV moves between."""
    pools = list(candidate.layout.pools)
    chunk = f", chunk {candidate.layout.mixed.max_batch_tokens}" if candidate.layout.mixed is not None else ""
    kinds = " and ".join(dict.fromkeys(pool.hardware.name for pool in pools))
    where = f" on {kinds}" if len(plan.question.fleet) > 1 else ""
    apart = f", {candidate.layout.num_hosts} hosts" if candidate.layout.spans_hosts else ""
    return f"{candidate.layout}{chunk}{where}{apart}"


def binds(candidate: Candidate) -> str:
    """The objective that is missed first, if known, and the limiting resource."""
    goodput = candidate.goodput
    at_rate = goodput.at_rate if goodput is not None else None
    slo = f"{at_rate.binding_slo.upper()}: " if at_rate is not None else ""
    return slo + candidate.resource.value


def pool_cells(candidate: Candidate) -> Iterator[tuple[str, ...]]:
    """A row for each pool, in the order of `POOL_COLUMNS`."""
    for figures in candidate.pools:
        yield _pool_cells(candidate, figures)


def _pool_cells(candidate: Candidate, figures: PoolFigures) -> tuple[str, ...]:
    pool = next(pool for pool in candidate.layout.pools if pool.role is figures.role)
    return (
        wording.ROLE_NAMES[figures.role],
        f"{pool.replicas} x {pool.degrees}, {pool.hardware.name}",
        wording.size(figures.weight_bytes_per_device),
        wording.size(figures.kv_bytes_per_device),
        wording.size(figures.memory_bytes_per_device),
        "-" if figures.role is WorkerRole.PREFILL else f"{figures.max_concurrency:,}",
        f"{figures.max_long_sequences:,}",
        "-" if candidate.goodput is None else wording.share(figures.busy_share),
        wording.share(figures.kv_share),
    )


def _interval(candidate: Candidate) -> str:
    if candidate.goodput is None:
        return "estimated"
    low, high = candidate.goodput.interval
    return f"{wording.number(low)} - {wording.number(high)}"


def fleet_words(plan: Plan) -> str:
    """Such as ``8 x h100-sxm``."""
    return " and ".join(f"{supply.num_devices} x {supply.hardware.name}" for supply in plan.question.fleet)


def slo_words(plan: Plan) -> str:
    """The question's SLO in words."""
    slo = plan.question.slo
    return (
        f"{wording.share(slo.attainment)} of requests within TTFT {wording.seconds(slo.ttft_seconds)} and TPOT "
        f"{wording.seconds(slo.tpot_seconds)}"
    )


def answer_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Labels and figures of the winner: goodput, what binds, saturation, cost."""
    best = plan.best
    assert best.goodput is not None, "the winner was simulated"
    yield (
        "goodput",
        f"{wording.rate(best.rate)} ({_interval(best)}), {wording.number(best.rate_per_device)} per GPU: "
        f"{slo_words(plan)}",
    )
    yield "binds", binds(best)
    if best.saturation_rate is not None and best.saturation_margin is not None:
        yield (
            "saturation",
            f"{wording.rate(best.saturation_rate)}, {wording.number(best.saturation_margin)} times the goodput",
        )
    if best.dollars_per_hour is not None:
        per_million = wording.dollars(best.dollars_per_million_tokens(plan.mean_output_tokens))
        yield "cost", f"{wording.dollars(best.dollars_per_hour)} an hour, {per_million} per million output tokens"


def findings(plan: Plan) -> Iterator[str]:
    """Sentences on the winner and the losers: binding objective, reasons, saturation, effect of 10 % on step times."""
    best = plan.best
    yield from best.reasons
    if not best.layout.is_colocated:
        near, far = (chosen_transport(plan.question.model.transport, same_host=near) for near in (True, False))
        yield f"KV moves by {near} within a host" + (
            f" and by {far} between hosts." if best.layout.spans_hosts else "."
        )
    if best.saturation_rate is not None and best.saturation_margin is not None:
        yield (
            f"Saturation: attainment halves, or answers lag behind arrivals, at {wording.rate(best.saturation_rate)}, "
            f"{wording.number(best.saturation_margin)} times the goodput."
        )
    for each in best.sensitivity:
        percent = round(abs(each.time_factor - 1) * 100)
        change = each.rate / best.rate - 1 if best.rate else 0.0
        yield (
            f"If every step and transfer were {percent} % {'slower' if each.time_factor > 1 else 'faster'}, the "
            f"goodput would be {wording.rate(each.rate)} ({change:+.0%})."
        )
    for rank, candidate in enumerate(plan.candidates[1:3], start=2):
        for reason in candidate.reasons:
            yield f"Number {rank}, {candidate.layout}: {reason}"


def result_words(explanation: Explanation) -> str:
    """Such as ``131,072 bytes (131 kB)``."""
    result, unit = explanation.result, explanation.unit
    if unit == "bytes":
        return f"{result:,.0f} bytes ({wording.size(result)})"
    whole = f"{result:,.0f}" if float(result).is_integer() or result >= 1000 else wording.number(result)
    return f"{whole} {unit}".rstrip()


def screening_words(plan: Plan) -> str:
    """Number of layouts by outcome, in a sentence."""
    it = plan.screening
    left_out = (
        (it.num_without_memory, "do not fit"),
        (it.num_infeasible, "miss the SLO even when idle"),
        (it.num_estimated, "were only estimated"),
        (it.num_screened, "only screened"),
    )
    told = ", ".join(f"{count} {why}" for count, why in left_out if count)
    return (
        f"{it.num_layouts} layouts: {told}{', ' if told else ''}{it.num_simulated} simulated, with "
        f"{it.num_requests:,} requests in {wording.seconds(plan.elapsed_s)}."
    )
