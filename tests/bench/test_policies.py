from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench.policies import MOONCAKE, SETTINGS, TARGET, Setting, goodput, mooncake, outcomes, served
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.planner.workload.workload import Workload

(UNIFORM,) = [setting for setting in SETTINGS if setting.name == "uniform"]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_attainment_is_the_share_within_both_objectives(setting: Setting) -> None:
    assert served(setting, "round-robin", 1.0, 30, 0).share > 0.8
    strict = replace(setting, ttft_s=1e-6)
    assert served(strict, "round-robin", 1.0, 30, 0).share == 0.0


def test_goodput_serves_more_at_saturation() -> None:
    (prefixes,) = [setting for setting in SETTINGS if setting.name == "prefixes"]
    least_time, best = (served(prefixes, policy, 110.0, 250, 0).share for policy in ("least-time", "goodput"))
    assert best > least_time + 0.05


def test_to_refuse_what_is_hopeless_or_to_let_it_wait_serves_more() -> None:
    (bound,) = [setting for setting in SETTINGS if setting.name == "decode-bound"]
    served_at_once = served(bound, "least-time", 200.0, 800, 0).share
    for policy in ("goodput", "goodput+refuse"):
        assert served(bound, policy, 200.0, 800, 0).share > served_at_once + 0.3


@pytest.mark.parametrize("start_rate", [10.0, 50.0, 400.0])
def test_goodput_is_interpolated_where_attainment_falls_to_the_target(start_rate: float) -> None:
    assert goodput(lambda rate: 1.1 - rate / 500, start_rate) == pytest.approx(500 * (1.1 - TARGET))
    curved = goodput(lambda rate: 1 - (rate / 500) ** 8, start_rate)
    assert curved == pytest.approx(500 * (1 - TARGET) ** (1 / 8), rel=0.003)
    assert goodput(lambda rate: 0.5, start_rate) == 0.0
    assert goodput(lambda rate: 0.95, start_rate) > 100 * start_rate


def test_policies_serve_the_same_rates() -> None:
    found = outcomes(replace(UNIFORM, ttft_s=0.06, rates=(20.0,)), ["round-robin"], 40, (0, 1), 1)
    assert [len(each["goodput"]) for each in found.values()] == [2, 1]
    assert list(found) == ["least-time", "round-robin"]
    least_time, other = found.values()
    assert least_time["goodput"][0] > other["goodput"][0] > 0
    assert least_time["good/s at 20/s"][0] == other["good/s at 20/s"][0] == 20.0
    assert least_time["good/s at 2 x"][0] > other["good/s at 2 x"][0]


class _TwoTurns:
    """Sessions of which only the first turn, of one token, can meet a strict TPOT objective."""

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        return [SimulatedRequest(0.0, 100, 1, (), SimulatedRequest(1.0, 200, 5))] * (num_requests // 2)


def test_later_turns_count_while_sessions_begin() -> None:
    strict = replace(UNIFORM, workload=Workload(name="turns", contents=_TwoTurns()), tpot_s=1e-6)
    found = outcomes(strict, ["least-time"], 60, (0,), 1, rates=(2.0, 1e4))["least-time"]
    assert found["share at 10000/s"] == [1.0]
    assert 0.5 < found["share at 2/s"][0] < 0.7
    assert 0 < found["TTFT p95 at 2/s"][0] < 1


def test_mooncake_conversations_share_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500 * row, "input_length": 1024, "output_length": 20, "hash_ids": [0, row + 1]}
        for row in range(20)
    ]
    (tmp_path / MOONCAKE).write_text("\n".join(map(json.dumps, lines)))
    assert served(mooncake(tmp_path), "goodput", 5.0, 20, 0).share == 1.0
