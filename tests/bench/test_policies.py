from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.bench.policies import SETTINGS, Setting, attainment


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.workload.name)
def test_attainment_is_the_share_within_both_objectives(setting: Setting) -> None:
    assert attainment(setting, "round-robin", 1.0, 30, 0) > 0.8
    strict = replace(setting, ttft_s=1e-6)
    assert attainment(strict, "round-robin", 1.0, 30, 0) == 0.0


def test_goodput_serves_more_at_saturation() -> None:
    (prefixes,) = [setting for setting in SETTINGS if setting.workload.name == "prefixes"]
    least_time, goodput = (attainment(prefixes, policy, 110.0, 250, 0) for policy in ("least-time", "goodput"))
    assert goodput > least_time + 0.05


def test_refusing_what_is_hopeless_serves_more() -> None:
    (bound,) = [setting for setting in SETTINGS if setting.workload.name == "decode-bound"]
    late, refused = (attainment(bound, policy, 200.0, 1500, 0) for policy in ("goodput", "goodput+refuse"))
    assert refused > late + 0.1
