from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from pdserve.planner.report.charts import charts, drawn_candidates
from pdserve.planner.report.page import Chart, check_drawing
from pdserve.planner.report.report import report_html
from pdserve.planner.search.plan import Verdict
from pdserve.planner.simulate.attainment import Attainment
from tests.planner.plans import APART, TOGETHER, a_plan


class Page(HTMLParser):
    """Checks that elements close in the order in which they opened, and collects text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_small_and_needs_nothing_beside_it() -> None:
    html = report_html(a_plan(), "chat & more")
    page = Page(html)
    assert page.open == []
    assert len(html) < 300_000
    assert not {name for name, _ in page.attributes} & {"href", "src", "onclick"}
    assert not re.search(r"<script|@import|url\((?!#)|http", html)
    assert all(target.startswith("#") for name, target in page.attributes if target and name == "xlink:href")
    assert "Llama-3-8B <i> on 4 x h100-sxm" in page.texts, "names are escaped"
    assert any(text.startswith("chat & more. 90 % of requests within TTFT 250 ms") for text in page.texts)


def test_the_page_says_what_the_plan_says() -> None:
    texts = Page(report_html(a_plan(), "chat")).texts
    plan = a_plan()
    assert plan.verdict.text in texts
    assert {"16.0", "14.4 - 17.6", "~6.00", "estimated", "$2.08", "56.0 GB"} <= set(texts)
    assert any(text.startswith("goodput: 16.0 requests/s (14.4 - 17.6)") for text in texts)
    assert "If every step and transfer were 10 % slower, the goodput would be 12.8 requests/s (-20%)." in texts
    assert "Number 2, 2 x M(TP1): At most 8.0 requests/s: prefill compute." in texts
    assert "Prices are of a list." in texts


def test_the_winners_workers_are_explained_in_folds() -> None:
    html = report_html(a_plan(), "chat")
    assert html.count("<details>") == 2
    assert "KV of a token: <b>131,072 bytes (131 kB)</b>" in html
    assert "a prompt of 500 tokens" in html


def test_an_unclear_verdict_looks_so() -> None:
    verdict: Verdict = replace(a_plan().verdict, is_clear=False)
    assert "class='verdict unclear'" in report_html(replace(a_plan(), verdict=verdict), "chat")


def test_winner_and_runner_up_are_drawn_and_nothing_twice() -> None:
    drawn = drawn_candidates(a_plan())
    assert [each.candidate.layout for each in drawn] == [APART, TOGETHER]
    titles = [chart.title for chart in charts(a_plan(), drawn)]
    assert titles[:2] == ["Winner: 1 x P(TP1) + 1 x D(TP1)", "Runner-up: 2 x M(TP1)"]
    assert titles[2:] == ["TTFT at the goodput", "TPOT at the goodput", "Goodput by P:D ratio"]


def test_charts_have_the_colours_of_the_page_and_their_words_as_text() -> None:
    for chart in charts(a_plan(), drawn_candidates(a_plan())):
        assert not re.search(r"#[ab]0000\d", chart.svg)
        assert {"var(--c0)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", chart.svg))
    winner = next(charts(a_plan(), drawn_candidates(a_plan())))
    assert {"target 90 %", "goodput 16.0", "both objectives", "TTFT", "TPOT"} <= set(Page(winner.svg).texts)


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_drawing()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"needs matplotlib: pip install 'pdserve\[plan\]'"):
        check_drawing()


def test_the_best_colocated_layout_is_drawn_however_far_behind() -> None:
    plan = a_plan()
    plan = replace(plan, candidates=(plan.best, *(plan.candidates[2:] * 2), plan.candidates[1]))
    assert [each.name for each in drawn_candidates(plan)] == [
        "Winner: 1 x P(TP1) + 1 x D(TP1)",
        "Best colocated: 2 x M(TP1)",
    ]


def test_points_of_saturated_runs_are_hollow() -> None:
    plan = a_plan()
    assert plan.best.goodput is not None
    point = plan.best.goodput.points[-1]
    saturated: Attainment = replace(point, is_saturated=True)
    longer = replace(saturated, num_requests=3000, is_saturated=False)

    def drawn(*points: Attainment) -> Chart:
        (winner, *_) = drawn_candidates(plan)
        return next(charts(plan, [winner._replace(goodput=replace(winner.goodput, points=points))]))

    whole, hollow = drawn(point), drawn(saturated)
    sure = "The goodput lies between 14.4 and 17.6, with 95 % confidence."
    assert whole.note == f"Share within the SLO, of 200 requests at each rate. {sure}"
    assert "each rate; hollow points are saturated: longer runs attain less. The" in hollow.note
    assert "of 200 to 3,000 requests at each rate" in drawn(point, longer).note
    assert "fill: var(--card)" in hollow.svg
    assert "fill: var(--card)" not in whole.svg
