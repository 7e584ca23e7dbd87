from __future__ import annotations

import pytest

from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.engine import ENGINE_NAMES, on_engine
from pdserve.model.cost.hardware import hardware
from pdserve.model.cost.hardware_catalogue import ENGINES
from tests.planner.stand_ins import LLAMA_3_8B

H100 = hardware("h100-sxm")
COSTS = {"step_overhead_s", "ranks_overhead_s", "row_overhead_s"}


def test_pdserve_is_what_the_device_says_and_says_that_it_was_not_measured() -> None:
    assert on_engine(H100, "pdserve") is H100
    assert all("pdserve has not run on a GPU" in H100.sources[name] for name in COSTS)


@pytest.mark.parametrize("engine", ENGINE_NAMES[1:])
def test_an_engine_has_costs_and_a_source_of_its_own(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, engine, ENGINES[engine]._replace(row_overhead_s=1e-3))
    device = on_engine(H100, engine)
    assert {name for name in H100.sources if device.sources[name] != H100.sources[name]} == COSTS
    added_s = CostModel(LLAMA_3_8B.shape, device, LLAMA_3_8B.precision).decode_s(9, 0)
    added_s -= CostModel(LLAMA_3_8B.shape, H100, LLAMA_3_8B.precision).decode_s(9, 0)
    assert added_s == pytest.approx(9 * (1e-3 - H100.row_overhead_s))


@pytest.mark.parametrize(("device", "engine"), [("h100", "triton"), ("cpu", "vllm")])
def test_unknown_engines_and_devices_of_pdserve_are_refused(device: str, engine: str) -> None:
    with pytest.raises(ValueError, match=r"use one of pdserve, vllm|use a GPU of the catalogue for vllm"):
        on_engine(hardware(device), engine)
