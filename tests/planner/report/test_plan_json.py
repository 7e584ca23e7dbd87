from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

from pdserve.contracts.codec import from_plain
from pdserve.contracts.deployment import SloConfig
from pdserve.planner.report.plan_json import attainment_json, plan_json
from pdserve.planner.search.plan import Plan
from tests.planner.plans import a_plan


def through_json(plan: Plan) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(plan_json(plan, "chat"), allow_nan=False))
    return read


def test_the_plan_is_there_in_order_of_rank() -> None:
    plan = through_json(a_plan())
    assert [each["layout"]["text"] for each in plan["candidates"]] == [str(each.layout) for each in a_plan().candidates]
    best, *_, last = plan["candidates"]
    assert (best["rate"], best["rate_per_device"], best["interval"]) == (16.0, 8.0, [14.4, 17.6])
    assert best["layout"]["prefill"]["tensor_parallel"] == 1
    assert (best["layout"]["num_hosts"], best["layout"]["decode"]["hosts"]) == (1, [[0]])
    assert [point["rate"] for point in best["points"]] == [4.0, 8.0, 16.0]
    assert [each["role"] for each in best["pools"]] == ["prefill", "decode"]
    assert (last["is_estimated"], last["interval"], last["points"], last["dollars_per_hour"]) == (True, None, [], None)
    assert plan["verdict"] == {
        "serve_colocated": False,
        "gain": 1.0,
        "is_clear": True,
        "text": a_plan().verdict.text,
    }
    assert plan["traffic"] == "chat"
    assert from_plain(SloConfig, plan["slo"], "plan") == SloConfig(tpot_seconds=0.02)
    assert (plan["objective"], plan["rate"]) == ("rate", None)


def test_latencies_are_percentiles_and_what_is_endless_is_null() -> None:
    goodput = a_plan().best.goodput
    assert goodput is not None
    point = goodput.points[0]
    written = attainment_json(replace(point, mean_residence_s=inf))
    assert written["ttft_s"] == {f"p{percent}": point.ttft.percentile(percent) for percent in (50, 90, 95, 99)}
    assert written["mean_residence_s"] is None
    assert json.dumps(written, allow_nan=False)
