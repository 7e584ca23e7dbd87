"""What ``pdserve top`` draws of an overview."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from pdserve.deploy.commands.top import draw

LAST: dict[str, Any] = {
    "window_s": 58.7,
    "requests_per_s": 4.0,
    "ended_per_s": 5.0,
    "good_per_s": 3.5,
    "tokens_per_s": 1250.0,
    "attainment": 0.7,
    "misses": [["ttft", "prefill_queue", 2.0], ["tpot", "decode", 1.0]],
    "ttft_s": [0.0112, 0.15, 0.21],
    "tpot_s": None,
}
OVERVIEW: dict[str, Any] = {
    "state": "ready",
    "num_routers": 1,
    "in_flight": 3,
    "queued": 1,
    "objective": {"ttft_s": 0.2, "tpot_s": 0.05, "attainment": 0.9},
    "last": LAST,
}


def text_of(overview: dict[str, Any], **styles: bool) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw(overview, {"workers": []}))
    return console.export_text(**styles)


def test_figures_are_beside_their_objectives() -> None:
    shown = text_of(OVERVIEW)
    assert "ready: 3 in flight, 1 queued; last 59 s: 4.0 requests/s arrived, 5.0 ended, 3.5 of them good" in shown
    assert "1,250 tokens/s" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["last", "59", "s", "p50", "p90", "p99", "objective"] in lines
    assert ["TTFT", "11.2", "ms", "150.0", "ms", "210.0", "ms", "200.0", "ms"] in lines
    assert ["TPOT", "-", "-", "-", "50.0", "ms"] in lines
    assert ["within", "both", "70.0%", "90%"] in lines
    assert "misses: TTFT by prefill_queue 2, TPOT by decode 1" in shown


def test_missed_objectives_are_red() -> None:
    assert "\x1b[31m70.0%" in text_of(OVERVIEW, styles=True)
    good = {**OVERVIEW, "last": {**LAST, "attainment": 0.95}}
    assert "\x1b[32m95.0%" in text_of(good, styles=True)
