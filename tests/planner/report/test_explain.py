"""Explanations: their arithmetic gives their results, and known answers stand in them."""

from __future__ import annotations

from math import floor

import pytest

from pdserve.contracts.placement import WorkerRole
from pdserve.contracts.precision import Precision
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import PlannedModel, Pool
from pdserve.planner.report.explain import Explanation, explain
from tests.model.planned_configs import LLAMA_3_70B, MIXTRAL_8X7B, OPT_13B, QWEN3_30B_A3B


def explanations(
    config: dict[str, object],
    degrees: tuple[int, int] = (1, 1),
    device: str = "h100",
    quantization: str = "none",
) -> dict[str, Explanation]:
    model = PlannedModel(
        shape=ModelShape.from_hf_config(config), precision=Precision(dtype="bfloat16", quantization=quantization)
    )
    pool = Pool(
        role=WorkerRole.DECODE,
        replicas=1,
        hardware=hardware(device),
        tensor_parallel=degrees[0],
        pipeline_parallel=degrees[1],
    )
    return {line.name: line for line in explain(model, pool)}


@pytest.mark.parametrize("config", [LLAMA_3_70B, MIXTRAL_8X7B, OPT_13B, QWEN3_30B_A3B])
@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_numbers_give_the_result(config: dict[str, object], degrees: tuple[int, int], quantization: str) -> None:
    for line in explanations(config, degrees, quantization=quantization).values():
        assert eval(line.numbers, {"max": max, "min": min}) == pytest.approx(line.result, rel=1e-4), line
        assert line.formula
        assert line.unit != "bytes" or "e+" not in line.numbers, "bytes are written in full"


def test_known_answers_stand_in_it() -> None:
    lines = explanations(LLAMA_3_70B, (4, 1))
    assert lines["parameters"].result == 70_553_706_496
    assert lines["weights"].result == 2 * 70_553_706_496
    assert (lines["KV of a token"].numbers, lines["KV of a token"].result) == ("2 * 80 * 8 * 256", 327_680)
    assert lines["price of a worker"].result == pytest.approx(4 * 3.99)
    # 24 GiB or so are left on each, which holds a fourth of 320 KiB a token.
    assert lines["tokens of KV"].result == pytest.approx(lines["KV of the fullest rank"].result / (327_680 / 4))
    fitting = floor(lines["tokens of KV"].result / 16) // 64
    assert lines["largest batch at 1024 tokens"].result == min(fitting, 256)


def test_at_the_ridge_point_arithmetic_and_reading_take_equally_long() -> None:
    device = hardware("h100")
    tokens = explanations(LLAMA_3_70B)["ridge point"].result
    arithmetic_s = 2 * tokens / (device.peak("bfloat16") * device.compute_efficiency.at(tokens))
    assert arithmetic_s == pytest.approx(2 / device.bandwidth)


def test_lines_are_there_where_they_mean_something() -> None:
    alone, shared = explanations(LLAMA_3_70B), explanations(MIXTRAL_8X7B, (2, 1), "rtx-4090")
    assert not any("all-reduce" in name or "experts" in name for name in alone)
    assert 0 < shared["prefill: share of all-reduces"].result < 100
    assert shared["experts that 32 tokens touch"].result == pytest.approx(8 * (1 - 0.75**32))
    assert "price of a worker" not in shared
    assert alone["largest batch at 1024 tokens"].result == 0  # its weights alone do not fit


def test_a_transfer_goes_by_the_link_or_the_network() -> None:
    lines = explanations(LLAMA_3_70B)
    inside, outside = (lines[f"transfer of 1024 tokens {where}"] for where in ("within a host", "between hosts"))
    assert outside.result == pytest.approx(inside.result * 9)
