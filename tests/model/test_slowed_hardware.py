from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.contracts.precision import Precision
from pdserve.model.cost import CostModel
from pdserve.model.hardware import hardware
from pdserve.model.shape import ModelShape
from pdserve.model.slowed_hardware import slowed
from tests.model.published_configs import LLAMA_31_8B

SHAPE = ModelShape.from_hf_config(LLAMA_31_8B)


@pytest.mark.parametrize("time_scale", [0.25, 7.0])
@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_all_that_lasts_lasts_so_many_times_as_long(time_scale: float, tensor_parallel: int) -> None:
    device = hardware("h100-sxm")
    real, slow = (
        CostModel(SHAPE, each, Precision(dtype="bfloat16"), tensor_parallel)
        for each in (device, slowed(device, time_scale))
    )
    durations: list[Callable[[CostModel], float]] = [
        lambda cost: cost.step_s([(500, 0), (1, 3000)]),
        lambda cost: cost.prefill_s(2048, 512),
        lambda cost: cost.decode_s(64, 64000),
        lambda cost: cost.decode_run_s(64, 64000)[1],
        lambda cost: cost.mixed_s(256, 0, 32, 30000),
        lambda cost: cost.transfer_s(1000, same_host=True),
        lambda cost: cost.transfer_s(1000, same_host=False),
        lambda cost: cost.swap_s(1000),
    ]
    for seconds in durations:
        assert seconds(slow) == pytest.approx(time_scale * seconds(real))
    assert slow.max_kv_blocks(16) == real.max_kv_blocks(16)
