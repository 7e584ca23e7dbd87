from __future__ import annotations

from pdserve.bench.placements import QUICK, settings


def test_settings_differ_and_are_on_one_host_or_two() -> None:
    listed = list(settings())
    assert len({setting.name for setting in listed}) == len(listed) == 17
    for setting in listed:
        question = setting.question(QUICK)
        (supply,) = question.fleet
        assert supply.num_nodes * supply.devices_per_node == (16 if "175B" in setting.name else 8)
        assert (question.slo.ttft_seconds, question.slo.tpot_seconds) == (setting.ttft_s, setting.tpot_s)
        assert setting.model.shape.num_heads % 8 == 0
