from __future__ import annotations

import pytest

from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.engine import ENGINE_NAMES, on_engine
from pdserve.model.cost.hardware import hardware
from tests.planner.stand_ins import LLAMA_3_8B

H100 = hardware("h100-sxm")


def decode_s(engine: str, batch_size: int) -> float:
    return CostModel(LLAMA_3_8B.shape, on_engine(H100, engine), LLAMA_3_8B.precision).decode_s(batch_size, 0)


def test_pdserve_is_what_the_device_says() -> None:
    assert on_engine(H100, "pdserve") is H100


@pytest.mark.parametrize("engine", ENGINE_NAMES[1:])
def test_an_engine_changes_overheads_alone_and_names_its_source(engine: str) -> None:
    device = on_engine(H100, engine)
    changed = {name for name in H100.sources if getattr(device, name) != getattr(H100, name)}
    assert (
        {"layer_overhead_s", "row_overhead_s"} <= changed <= {f"{each}_overhead_s" for each in ("step", "layer", "row")}
    )
    assert all(device.sources[name] != H100.sources[name] for name in changed)


def test_vllm_spends_more_on_layers_and_rows() -> None:
    num_layers = LLAMA_3_8B.shape.num_layers
    by_layers_s = num_layers * (40e-6 - H100.layer_overhead_s)
    assert decode_s("vllm", 1) - decode_s("pdserve", 1) == pytest.approx(by_layers_s + 25e-6)
    assert decode_s("vllm", 9) - decode_s("pdserve", 9) == pytest.approx(by_layers_s + 9 * 25e-6)


@pytest.mark.parametrize(("device", "engine"), [("h100", "triton"), ("cpu", "vllm")])
def test_unknown_engines_and_devices_of_pdserve_are_refused(device: str, engine: str) -> None:
    with pytest.raises(ValueError, match=r"use one of pdserve, vllm|use a GPU of the catalogue for vllm"):
        on_engine(hardware(device), engine)
