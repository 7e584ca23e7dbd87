from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from pdserve.model.cost.hardware import hardware
from pdserve.planner.report.tables import print_plan
from pdserve.planner.search.plan import Plan, Supply
from tests.planner.plans import a_plan


def printed(plan: Plan, num_rows: int = 5, width: int = 140) -> str:
    out = StringIO()
    print_plan(plan, Console(file=out, width=width), num_rows=num_rows)
    return out.getvalue()


def test_the_answer_comes_first_and_alone_unless_more_is_asked() -> None:
    lines = [" ".join(line.split()) for line in printed(a_plan(), num_rows=0).splitlines()]
    assert lines[1:] == [
        a_plan().verdict.text,
        "goodput 16.0 requests/s (14.4 - 17.6), 8.00 per GPU: 90 % of requests within TTFT 250 ms and TPOT 20 ms",
        "binds TTFT: prefill compute",
        "saturation 24.0 requests/s, 1.50 times the goodput",
        "cost $6.00 an hour, $2.08 per million output tokens",
        *a_plan().notes,
    ]


def test_a_plan_reads_from_answer_to_reasons() -> None:
    lines = [" ".join(line.split()) for line in printed(a_plan()).splitlines()]
    assert "1 1 x P(TP1) + 1 x D(TP1) 2 16.0 14.4 - 17.6 8.00 9,600 $2.08 800 131 TTFT: prefill compute" in lines
    assert "3 1 x P(TP2) + 1 x D(TP2) 4 ~6.00 estimated 1.50 - - 300 - KV transfer link" in lines
    assert "decode 1 x TP1, h100-sxm 16.0 GB 56.0 GB 80.0 GB 256 50 70 % 10 %" in lines
    saturation = "attainment halves, or answers lag behind arrivals, at 24.0 requests/s, 1.50 times the goodput."
    assert f"Saturation: {saturation}" in lines
    assert "4 layouts: 1 do not fit, 1 were only estimated, 2 simulated, with 1,200 requests in 1.5 s." in lines
    assert "Llama-3-8B <i> bfloat16 on 4 x h100-sxm: 90 % of requests within TTFT 250 ms and TPOT 20 ms" in lines
    assert lines[1] == a_plan().verdict.text


def test_only_as_many_rows_as_asked() -> None:
    assert "P(TP2)" not in printed(a_plan(), num_rows=2)


def test_a_narrow_terminal_is_spared_the_details() -> None:
    lines = [" ".join(line.split()) for line in printed(a_plan(), width=80).splitlines()]
    assert "1 1 x P(TP1) + 1 x D(TP1) 2 16.0 14.4 - 17.6 8.00 $2.08" in lines
    assert "decode 1 x TP1, h100-sxm 16.0 GB 56.0 GB 256 70 % 10 %" in lines


def test_a_fleet_of_several_kinds_says_which_a_layout_takes() -> None:
    plan = a_plan()
    fleet = (*plan.question.fleet, Supply(hardware=hardware("h200")))
    said = " ".join(printed(replace(plan, question=replace(plan.question, fleet=fleet)), width=200).split())
    assert "1 x P(TP1) + 1 x D(TP1) on h100-sxm 2" in said
    assert "on h100-sxm" not in printed(plan)


def test_layouts_of_several_hosts_say_so() -> None:
    plan = a_plan()
    apart = replace(plan.best, layout=replace(plan.best.layout, hosts=(((0,),), ((1,),))))
    lines = [" ".join(line.split()) for line in printed(replace(plan, candidates=(apart,))).splitlines()]
    assert any(line.startswith("1 1 x P(TP1) + 1 x D(TP1), 2 hosts 2 16.0") for line in lines)
    assert not any(" hosts " in line for line in lines if line.startswith("#"))


def test_words_are_no_markup() -> None:
    assert "[bold]" in printed(replace(a_plan(), notes=("a [bold] claim",)))
