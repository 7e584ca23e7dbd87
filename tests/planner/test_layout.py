"""Pools and layouts: what they count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.quantisation import Scheme
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from tests.model.planned_configs import LLAMA_3_8B

MODEL = PlannedModel(shape=ModelShape.from_hf_config(LLAMA_3_8B))
POOL = Pool(role=WorkerRole.DECODE, replicas=3, hardware=hardware("h100"), tensor_parallel=2, pipeline_parallel=2)
ACT_ORDER = {"group_inputs": 128, "act_order": True}


def test_devices_are_counted() -> None:
    layout = Layout(prefill=replace(POOL, role=WorkerRole.PREFILL, replicas=1, pipeline_parallel=1), decode=POOL)
    assert (POOL.devices_per_worker, POOL.num_devices, layout.num_devices) == (4, 12, 14)
    assert str(layout) == "1 x P(TP2) + 3 x D(TP2 PP2)"


def test_blocks_are_those_given_or_as_many_as_fit_beside_the_largest_step() -> None:
    cost = POOL.cost(MODEL)
    fitting = POOL.kv_blocks(MODEL, cost)
    assert fitting == cost.max_kv_blocks(16, max_batch_tokens=2048, max_batch_size=256)
    assert replace(POOL, max_batch_tokens=16384).kv_blocks(MODEL, cost) < fitting
    assert replace(POOL, max_batch_size=2048).kv_blocks(MODEL, cost) < fitting
    assert replace(POOL, num_kv_blocks=7).kv_blocks(MODEL, cost) == 7


def test_workers_with_small_shares_of_memory_share_devices() -> None:
    shared = replace(POOL, tensor_parallel=1, pipeline_parallel=1, memory_fraction=0.45)
    prefill = replace(shared, role=WorkerRole.PREFILL, replicas=1, memory_fraction=0.5)
    cost = shared.cost(MODEL)
    assert shared.kv_blocks(MODEL, cost) < replace(shared, memory_fraction=0.9).kv_blocks(MODEL, cost) / 2
    # 0.5 + 0.45, 0.45 + 0.45
    assert Layout(prefill=prefill, decode=shared).num_devices == 2
    assert Layout(prefill=replace(prefill, hardware=hardware("h200")), decode=shared).num_devices == 3
    assert Layout(prefill=replace(prefill, memory_fraction=0.51), decode=shared).num_devices == 3
    assert replace(shared, tensor_parallel=2).workers_per_device == 1


@pytest.mark.parametrize(
    ("group", "degrees"), [({"group_inputs": 128}, [1, 2, 4]), ({"group_inputs": 0}, [1, 2, 4, 8]), (ACT_ORDER, [1])]
)
def test_degrees_that_would_cut_groups_are_none(group: dict[str, Any], degrees: list[int]) -> None:
    """Of 1,536 features each of 8 ranks would have a group and a half."""
    scheme = Scheme(kind="int4", method="GPTQ", layout="gptq", **group)
    model = replace(MODEL, shape=replace(MODEL.shape, intermediate_size=1536, scheme=scheme))
    for degree in (1, 2, 4, 8):
        pool = replace(POOL, tensor_parallel=degree)
        if degree in degrees:
            pool.cost(model)
        else:
            with pytest.raises(ValueError, match=f"tensor_parallel (is )?{degree}"):
                pool.cost(model)
