"""Prints a plan in a terminal: the answer, and on demand the ranked table, the winner's workers and the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from pdserve.planner.report.explain import Explanation
from pdserve.planner.report.page import Column
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

_GAP = 2
"""Spaces between columns."""


def print_plan(plan: Plan, console: Console, *, num_rows: int) -> None:
    """Print the answer and its limits, and with ``num_rows`` above 0 a table of that many layouts and the reasons."""
    _print_heading(console, plan.verdict.text)
    answer = Table.grid(padding=(0, _GAP))
    for label, text in answer_rows(plan):
        answer.add_row(label, escape(text))
    console.print(answer, highlight=False)
    for note in plan.notes:
        console.print(escape(note), highlight=False)
    if num_rows > 0:
        _print_details(plan, console, num_rows)


def _print_details(plan: Plan, console: Console, num_rows: int) -> None:
    _print_heading(console, f"{plan.question.model.held_name} on {fleet_words(plan)}: {slo_words(plan)}")
    ranks = range(1, min(num_rows, len(plan.candidates)) + 1)
    console.print(text_table(CANDIDATE_COLUMNS, (candidate_cells(plan, rank) for rank in ranks), console.width))
    _print_heading(console, f"Each worker of {plan.best.layout}")
    console.print(text_table(POOL_COLUMNS, pool_cells(plan.best), console.width))
    _print_heading(console, "Why")
    for sentence in findings(plan):
        console.print(Padding(escape(sentence), (0, 0, 0, 2)), highlight=False)
    console.print(Padding(screening_words(plan), (0, 0, 0, 2)), style="dim", highlight=False)


def print_explanations(title: str, explanations: Iterable[Explanation], console: Console) -> None:
    """Results with their parts."""
    console.print(escape(title), style="bold", highlight=False, soft_wrap=True)
    for each in explanations:
        console.print(f"{escape(each.name)}: [bold]{result_words(each)}[/]", highlight=False, soft_wrap=True)
        if each.parts:
            console.print(f"  {escape(each.parts)}", style="dim", highlight=False, soft_wrap=True)


def _print_heading(console: Console, text: str) -> None:
    console.print()
    console.print(escape(text), style="bold", highlight=False)


def text_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> Table:
    """Drops detail columns if they do not fit on a line."""
    cells = list(rows)
    widths = [max(map(len, (column.heading, *texts))) for column, *texts in zip(columns, *cells, strict=True)]
    is_wide = sum(widths) + _GAP * (len(widths) - 1) <= width
    shown = [index for index, column in enumerate(columns) if is_wide or not column.is_detail]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index in shown:
        column = columns[index]
        table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=column.is_number)
    for row in cells:
        table.add_row(*(escape(row[index]) for index in shown))
    return table
