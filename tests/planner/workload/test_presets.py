from __future__ import annotations

import re

import pytest

from pdserve.planner.workload.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_means_and_objectives_it_states(name: str) -> None:
    workload = preset(name)
    assert workload.slo is not None
    assert workload.source
    statistics = workload.draw(50_000, seed=7).statistics()
    assert preset.__doc__
    row = re.search(rf"^ *{name} +([\d,]+) / (\d+) .* (\d\.\d\d) +([\d.]+) s / ([\d.]+) ms$", preset.__doc__, re.M)
    assert row is not None
    assert statistics.mean_prompt_tokens == pytest.approx(float(row[1].replace(",", "")), rel=0.03)
    assert statistics.mean_output_tokens == pytest.approx(float(row[2]), rel=0.05)
    assert statistics.cacheable_share == pytest.approx(float(row[3]), abs=0.01)
    assert workload.slo.ttft_seconds == float(row[4])
    assert workload.slo.tpot_seconds * 1e3 == pytest.approx(float(row[5]))


def test_distserve_s_lengths_fit_its_models() -> None:
    for name in ("sharegpt-synthetic", "longbench-synthetic"):
        assert str(preset(name).draw(20_000, max_model_len=2048).clamped) == ""


@pytest.mark.parametrize(
    ("name", "nearest"), [("chta", "chat"), ("ShareGPT", "sharegpt-synthetic"), ("summarization", "summarisation")]
)
def test_an_unknown_preset_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no preset '{name}': use .*{nearest}") as caught:
        preset(name)
    assert "agent" not in str(caught.value)


def test_a_preset_like_no_other_names_them_all() -> None:
    with pytest.raises(ValueError, match=" or ".join(PRESETS)):
        preset("%%%%")
