"""Renders a plan as one self-contained HTML page (`pdserve.planner.report.page`).

Called by the command line. Text and figures come from the plan, charts from `pdserve.planner.report.charts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from pdserve.planner import wording
from pdserve.planner.layout import Pool
from pdserve.planner.report.charts import charts, drawn_candidates
from pdserve.planner.report.explain import explain
from pdserve.planner.report.page import card, page, table
from pdserve.planner.report.plan_rows import (
    CANDIDATE_COLUMNS,
    POOL_COLUMNS,
    answer_rows,
    candidate_cells,
    findings,
    fleet_words,
    pool_cells,
    result_words,
    screening_words,
    slo_words,
)
from pdserve.planner.search.plan import Plan

MAX_ROWS = 20
"""Limit of the ranked table."""
_DEFINITIONS = (
    "Goodput is the request rate at which the target share of requests meets both objectives, in steady state; the "
    "warm-up is not counted. TTFT runs from arrival to the first token; TPOT is the mean time per further token, "
    "including the handoff between phases; interactivity is 1 / p90 of end-to-end seconds over output tokens. Figures "
    "are predictions of a simulation that runs the cluster's own router policy and schedulers; the times of steps and "
    "transfers come from a cost model."
)


def report_html(plan: Plan, traffic: str) -> str:
    """The page.

    Args:
        traffic: description of the traffic.
    """
    title = f"{plan.question.model.name or 'Model'} on {fleet_words(plan)}"
    cards = map(card, charts(plan, drawn_candidates(plan)))
    body = "".join(
        (
            f"<h1>{escape(title)}</h1><p class=soft>{escape(f'{traffic}. {slo_words(plan)}.')}</p>",
            f"<p class='verdict{'' if plan.verdict.is_clear else ' unclear'}'>{escape(plan.verdict.text)}</p>",
            _list(f"{label}: {text}" for label, text in answer_rows(plan)),
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


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _explanation(plan: Plan, pool: Pool) -> str:
    """Memory and times of a worker, collapsed."""
    lines = explain(
        plan.question.model,
        pool,
        prompt_tokens=max(1, round(plan.mean_prompt_tokens)),
        context_tokens=max(1, round(plan.mean_prompt_tokens + plan.mean_output_tokens / 2)),
    )
    rows = "".join(
        f"<dt>{escape(line.name)}: <b>{escape(result_words(line))}</b></dt><dd>{escape(line.parts)}</dd>"
        for line in lines
    )
    name = f"{wording.ROLE_NAMES[pool.role]} worker, {pool.degrees}"
    return f"<details><summary>A {name} on {escape(pool.hardware.name)}</summary><dl>{rows}</dl></details>"
