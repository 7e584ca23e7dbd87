"""Renders a plan as one self-contained HTML page (`pdserve.planner.report.page`).

Called by the command line. Text and figures come from the plan, charts from `pdserve.planner.report.charts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from pdserve.planner import wording
from pdserve.planner.layout import Pool
from pdserve.planner.report.charts import charts, drawn_candidates
from pdserve.planner.report.explain import explain
from pdserve.planner.report.page import card, page, table
from pdserve.planner.report.plan_rows import (
    CANDIDATE_COLUMNS,
    POOL_COLUMNS,
    candidate_cells,
    findings,
    fleet_words,
    pool_cells,
    result_words,
    screening_words,
    slo_words,
)
from pdserve.planner.search.plan import Plan
from pdserve.planner.simulate.attainment import Attainment

MAX_ROWS = 20
"""Limit of the ranked table."""
_DEFINITIONS = (
    "Goodput is the request rate at which the target share of requests meets both objectives, in steady state; the "
    "warm-up is not counted. TTFT runs from arrival to the first token; TPOT is the mean time per further token, "
    "including the handoff between phases. Figures are predictions of a simulation that runs the cluster's own router "
    "policy and schedulers; the times of steps and transfers come from a cost model."
)


def report_html(plan: Plan, traffic: str, curves: Sequence[Sequence[Attainment]] = ()) -> str:
    """The page.

    Args:
        traffic: description of the traffic.
        curves: see `pdserve.planner.report.charts.drawn_candidates`.
    """
    title = f"{plan.question.model.name or 'Model'} on {fleet_words(plan)}"
    cards = map(card, charts(plan, drawn_candidates(plan, curves)))
    body = "".join(
        (
            f"<h1>{escape(title)}</h1><p class=soft>{escape(f'{traffic}. {slo_words(plan)}.')}</p>",
            f"<p class='verdict{'' if plan.verdict.is_clear else ' unclear'}'>{escape(plan.verdict.text)}</p>",
            f"<div class=tiles>{''.join(_tiles(plan))}</div>",
            "<h2>Ranked layouts</h2>",
            table(CANDIDATE_COLUMNS, (candidate_cells(plan, rank + 1) for rank in range(_num_rows(plan)))),
            "<h2>Why</h2>",
            _list(findings(plan)),
            "<h2>Memory of each worker of the winner</h2>",
            table(POOL_COLUMNS, pool_cells(plan.best), marks_first=False),
            f"<h2>Charts</h2><div class=cards>{''.join(cards)}</div>",
            "<h2>Where the numbers come from</h2>",
            *(_explanation(plan, pool) for pool in plan.best.layout.pools),
            "<h2>How this was found</h2>",
            _list((screening_words(plan), *plan.notes, _DEFINITIONS)),
        )
    )
    return page(title, body)


def _num_rows(plan: Plan) -> int:
    return min(MAX_ROWS, len(plan.candidates))


def _tiles(plan: Plan) -> Iterator[str]:
    best = plan.best
    at_rate = best.goodput.at_rate if best.goodput is not None else None
    tiles = [
        (wording.number(best.rate), "requests/s within the SLO"),
        (wording.number(best.rate_per_device), "requests/s per GPU"),
        (wording.number(best.rate * plan.mean_output_tokens), "answer tokens/s"),
        (wording.dollars(best.dollars_per_million_tokens(plan.mean_output_tokens)), "per million answer tokens"),
    ]
    if at_rate is not None:
        tiles.append((wording.seconds(at_rate.ttft.percentile(90)), "TTFT, p90"))
        tiles.append((wording.seconds(at_rate.tpot.percentile(90)), "TPOT, p90"))
    if best.saturation_margin is not None:
        tiles.append((f"{wording.number(best.saturation_margin)} x", "the goodput: saturation"))
    return (f"<div class=tile><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in tiles)


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _explanation(plan: Plan, pool: Pool) -> str:
    """The cost model's arithmetic, collapsed."""
    lines = explain(
        plan.question.model,
        pool,
        prompt_tokens=max(1, round(plan.mean_prompt_tokens)),
        context_tokens=max(1, round(plan.mean_prompt_tokens + plan.mean_output_tokens / 2)),
    )
    rows = "".join(
        f"<dt>{escape(line.name)}: <b>{escape(result_words(line))}</b></dt>"
        f"<dd>{escape(line.formula)}<br><code>{escape(line.numbers)}</code></dd>"
        for line in lines
    )
    name = f"{wording.ROLE_NAMES[pool.role]} worker, TP{pool.tensor_parallel} PP{pool.pipeline_parallel}"
    return f"<details><summary>A {name} on {escape(pool.hardware.name)}</summary><dl>{rows}</dl></details>"
