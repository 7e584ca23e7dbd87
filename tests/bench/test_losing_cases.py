from __future__ import annotations

from pdserve.bench.losing_cases import CASES, figures

AGENTS, LONG_PROMPTS = CASES


def test_disaggregation_trades_gaps_for_first_tokens() -> None:
    colocated, disaggregated, *_ = (figures(LONG_PROMPTS, layout, 60) for layout in LONG_PROMPTS.layouts[:2])
    assert colocated["itl_p99_ms"] > 10 * disaggregated["itl_p99_ms"]
    assert disaggregated["ttft_p50_ms"] > 2 * colocated["ttft_p50_ms"]


def test_agents_whose_prompts_are_cached_gain_nothing() -> None:
    colocated, disaggregated = (figures(AGENTS, layout, 150) for layout in AGENTS.layouts[:2])
    assert colocated["cached"] > 0.8
    assert disaggregated["ttft_p50_ms"] > 1.05 * colocated["ttft_p50_ms"]
    assert disaggregated["tpot_p50_ms"] > 0.8 * colocated["tpot_p50_ms"]
