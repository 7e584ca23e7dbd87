"""Explanations: known answers stand in them, and parts add up."""

from __future__ import annotations

import re
from math import floor

import pytest

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import PlannedModel, Pool
from pdserve.planner.report.explain import Explanation, explain
from tests.model.planned_configs import LLAMA_3_70B, MIXTRAL_8X7B, QWEN3_30B_A3B

PREFILL, DECODE = "prefill of a prompt of 1024 tokens", "decode of 32 sequences of 1024 tokens"
SECONDS = {"s": 1.0, "ms": 1e-3}


def explanations(
    config: dict[str, object], degrees: tuple[int, int] = (1, 1), device: str = "h100"
) -> dict[str, Explanation]:
    pool = Pool(
        role=WorkerRole.DECODE,
        replicas=1,
        hardware=hardware(device),
        tensor_parallel=degrees[0],
        pipeline_parallel=degrees[1],
    )
    return {line.name: line for line in explain(PlannedModel(shape=ModelShape.from_hf_config(config)), pool)}


def test_known_answers_stand_in_it() -> None:
    lines = explanations(LLAMA_3_70B, (4, 1))
    assert lines["parameters"].result == 70_553_706_496
    assert lines["weights"].result == 2 * 70_553_706_496
    assert lines["KV of a token"].result == 2 * 80 * 8 * 256
    assert lines["price of a worker"].result == pytest.approx(4 * 3.99)
    # 24 GiB or so are left on each, which holds a fourth of 320 KiB a token.
    assert lines["tokens of KV"].result == pytest.approx(lines["KV of the fullest rank"].result / (327_680 / 4))
    fitting = floor(lines["tokens of KV"].result / 16) // 64
    largest = lines["largest batch at 1024 tokens"]
    assert (largest.result, largest.parts.startswith(f"the lesser of {fitting}, ")) == (min(fitting, 256), True)


@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (2, 2)])
def test_parts_add_up_to_the_step(degrees: tuple[int, int]) -> None:
    lines = explanations(LLAMA_3_70B, degrees)
    for name in (PREFILL, DECODE):
        parts = {each[1]: float(each[2]) * SECONDS[each[3]] for each in re.finditer(
            r"([a-z][a-z -]*) ([\d.]+) (m?s)(?:, |$)", lines[name].parts
        )}  # fmt: skip
        assert 1e3 * sum(parts.values()) == pytest.approx(lines[name].result, rel=5e-3)
        assert ("all-reduces" in parts) == (degrees[0] > 1)
        assert ("sends between stages" in parts) == (degrees[1] > 1)


def test_experts_that_a_step_reads() -> None:
    line = explanations(QWEN3_30B_A3B)["weights read in decode of 32 sequences"]
    num_touched = 128 * (1 - (120 / 128) ** 32)
    assert line.result == pytest.approx(2 * (30_532_122_624 - 48 * (128 - num_touched) * 3 * 2048 * 768))
    assert line.parts == "112 of 128 experts in each layer that has some, if all are as likely"


def test_what_does_not_fit_or_has_no_price() -> None:
    assert explanations(LLAMA_3_70B)["largest batch at 1024 tokens"].result == 0  # its weights alone do not fit
    assert "price of a worker" not in explanations(MIXTRAL_8X7B, (2, 1), "rtx-4090")


def test_a_pull_goes_by_the_transport_within_a_host_or_between_two() -> None:
    lines = explanations(LLAMA_3_70B, (4, 1))
    inside, outside = (lines[f"pull of 1024 tokens {where}"] for where in ("within a host", "between hosts"))
    assert (inside.parts, outside.parts) == ("by memfd", "by tcp")
    staging_ms, num_bytes = 1e3 * 1024 * 327_680 / 4 * (1 / 5.9e9 + 1 / 64e9), 1024 * 327_680
    assert inside.result == pytest.approx(1 + 1e3 * num_bytes / 5.9e9 + staging_ms)
    assert outside.result == pytest.approx(1 + 1e3 * num_bytes / 2.6e9 + staging_ms)
