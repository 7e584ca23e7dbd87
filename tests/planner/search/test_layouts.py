from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.bench.models import QWEN3_CODER_30B
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.quantisation import parse_scheme
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.layouts import check_fits, dollars_per_hour, enumerate_layouts
from pdserve.planner.search.plan import FitsNowhereError, Objective, Question, Space, Supply
from pdserve.planner.workload.traffic import fixed_traffic
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO

LLAMA_3_70B = PlannedModel(
    name="llama-3-70b",
    shape=replace(LLAMA_3_8B.shape, num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=64),
)
FLAT = Space(pipeline_parallel=(1,), mixed_batch_tokens=(512,))


def a_question(
    *supplies: Supply,
    model: PlannedModel = LLAMA_3_8B,
    space: Space = FLAT,
    objective: Objective = Objective.RATE,
    slo: SloConfig = SLO,
) -> Question:
    return Question(model=model, slo=slo, fleet=supplies, space=space, objective=objective, rate=1.0)


def names(question: Question) -> list[str]:
    return sorted(map(str, enumerate_layouts(question).layouts))


def test_all_of_two_devices() -> None:
    pair = Supply(hardware=H100, devices_per_node=2)
    assert names(a_question(pair)) == ["1 x M(TP2)", "1 x P(TP1) + 1 x D(TP1)", "2 x M(TP1)"]
    # Fewer than all may do where a rate is given, or goodput counts by device.
    for objective in (Objective.FEWEST_DEVICES, Objective.LEAST_COST, Objective.RATE_PER_DEVICE):
        assert names(a_question(pair, objective=objective)) == [
            "1 x M(TP1)",
            "1 x M(TP2)",
            "1 x P(TP1) + 1 x D(TP1)",
            "2 x M(TP1)",
        ]


def test_ranks_have_whole_experts_where_their_features_do_not_divide() -> None:
    """Of 768 inputs in groups of 128 two ranks have three groups each."""
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    shape = replace(QWEN3_CODER_30B.shape, scheme=parse_scheme({"quantization_config": scheme}))
    model = PlannedModel(shape=shape, max_model_len=4096)
    question = a_question(
        Supply(hardware=H100, devices_per_node=4), model=model, space=replace(FLAT, may_disaggregate=False)
    )
    assert names(question) == ["1 x M(EP4)", "2 x M(TP2)", "4 x M(TP1)"]


def test_groups_need_not_fill_a_host() -> None:
    assert names(a_question(Supply(hardware=H100, devices_per_node=3))) == [
        "1 x M(TP2)",
        "1 x P(TP1) + 1 x D(TP2)",
        "1 x P(TP1) + 2 x D(TP1)",
        "1 x P(TP2) + 1 x D(TP1)",
        "2 x P(TP1) + 1 x D(TP1)",
        "3 x M(TP1)",
    ]
    assert "1 x P(TP4) + 1 x D(TP2)" in names(a_question(Supply(hardware=H100, devices_per_node=6)))


def test_a_space_may_be_narrowed() -> None:
    pair = Supply(hardware=H100, devices_per_node=2)
    assert names(a_question(pair, space=replace(FLAT, may_disaggregate=False))) == ["1 x M(TP2)", "2 x M(TP1)"]
    assert names(a_question(pair, space=replace(FLAT, tensor_parallel=(1,)))) == [
        "1 x P(TP1) + 1 x D(TP1)",
        "2 x M(TP1)",
    ]
    limits = replace(FLAT, mixed_batch_tokens=(256, 512), may_disaggregate=False)
    layouts = enumerate_layouts(a_question(pair, space=limits)).layouts
    assert sorted(layout.mixed.max_batch_tokens for layout in layouts if layout.mixed) == [256, 256, 512, 512]


def test_tensor_parallel_groups_stay_within_a_host() -> None:
    two_hosts = Supply(hardware=H100, num_nodes=2, devices_per_node=4)
    found = names(a_question(two_hosts, space=replace(FLAT, pipeline_parallel=(1, 2))))
    assert "1 x M(TP4 PP2)" in found
    assert not any("TP8" in name for name in found)
    assert "1 x P(TP4) + 4 x D(TP1)" in found


def test_layouts_that_do_not_fit_one_host_are_on_several() -> None:
    layouts = enumerate_layouts(a_question(Supply(hardware=H100, num_nodes=2, devices_per_node=2))).layouts
    assert {layout.num_devices for layout in layouts} == {4}
    assert {layout.num_hosts for layout in layouts} == {2}
    hosts = {str(layout): layout.worker_hosts for layout in layouts}
    assert hosts["1 x P(TP2) + 1 x D(TP2)"] == {WorkerRole.PREFILL: ((0,),), WorkerRole.DECODE: ((1,),)}
    assert hosts["2 x P(TP1) + 2 x D(TP1)"] == {WorkerRole.PREFILL: ((0,), (1,)), WorkerRole.DECODE: ((0,), (1,))}
    layouts = enumerate_layouts(a_question(Supply(hardware=H100, devices_per_node=4))).layouts
    assert {layout.num_hosts for layout in layouts} == {1}


def test_each_phase_may_have_devices_of_its_own_kind() -> None:
    a100 = hardware("a100")
    question = a_question(
        Supply(hardware=H100, devices_per_node=1, dollars_per_hour=3.0),
        Supply(hardware=a100, devices_per_node=1, dollars_per_hour=1.5),
    )
    layouts = enumerate_layouts(question).layouts
    kinds = {tuple(pool.hardware.name for pool in layout.pools) for layout in layouts}
    assert kinds == {(H100.name,), (a100.name,), (H100.name, a100.name), (a100.name, H100.name)}
    pairs = [layout for layout in layouts if not layout.is_colocated]
    assert {layout.num_hosts for layout in pairs} == {2}
    assert [dollars_per_hour(layout, question.fleet) for layout in pairs] == [4.5, 4.5]


def test_a_price_is_the_users_or_the_catalogues() -> None:
    layout = enumerate_layouts(a_question(Supply(hardware=H100, devices_per_node=2))).layouts[0]
    assert H100.price_per_hour_usd is not None
    assert dollars_per_hour(layout, [Supply(hardware=H100)]) == layout.num_devices * H100.price_per_hour_usd
    unknown = replace(H100, price_per_hour_usd=None)
    assert dollars_per_hour(layout, [Supply(hardware=unknown)]) is None


def test_workers_without_memory_are_counted_and_left_out() -> None:
    enumeration = enumerate_layouts(a_question(Supply(hardware=H100, devices_per_node=8), model=LLAMA_3_70B))
    assert enumeration.num_without_memory > 0
    assert all(pool.tensor_parallel >= 4 for layout in enumeration.layouts for pool in layout.pools)


def test_a_model_that_fits_nowhere_names_the_smallest_worker_that_would() -> None:
    why = r"the weights of llama-3-70b in bfloat16 do not fit 1 x h100-sxm; .* TP4, 4 x h100-sxm"
    with pytest.raises(FitsNowhereError, match=why):
        enumerate_layouts(a_question(Supply(hardware=H100, devices_per_node=1), model=LLAMA_3_70B))


def test_a_length_that_fits_nowhere_names_the_longest_that_would() -> None:
    supply = Supply(hardware=H100, devices_per_node=1)
    long = replace(LLAMA_3_8B, max_model_len=2**20)
    with pytest.raises(
        FitsNowhereError, match=r"the longest request, 1048576 tokens, does not fit 1 x h100-sxm"
    ) as why:
        enumerate_layouts(a_question(supply, model=long))
    most = int(str(why.value).partition(", but --set model.max_model_len=")[2].split()[0])
    assert enumerate_layouts(a_question(supply, model=replace(long, max_model_len=most))).layouts
    with pytest.raises(FitsNowhereError):
        enumerate_layouts(a_question(supply, model=replace(long, max_model_len=most + 1)))


def test_a_prefill_worker_holds_no_answers() -> None:
    sample = fixed_traffic(960, 640, max_model_len=8192).draw(3, 0)

    def layout(num_prefill_blocks: int, num_decode_blocks: int) -> Layout:
        pool = Pool(role=WorkerRole.PREFILL, replicas=1, hardware=H100, num_kv_blocks=num_prefill_blocks)
        return Layout(prefill=pool, decode=replace(pool, role=WorkerRole.DECODE, num_kv_blocks=num_decode_blocks))

    assert LLAMA_3_8B.block_size == 16
    check_fits(layout(60, 100), LLAMA_3_8B, sample)
    with pytest.raises(FitsNowhereError, match="the longest request, 960 tokens"):
        check_fits(layout(59, 100), LLAMA_3_8B, sample)
    with pytest.raises(FitsNowhereError, match="the longest request, 1600 tokens"):
        check_fits(layout(60, 99), LLAMA_3_8B, sample)


def test_kv_of_float8_is_for_devices_that_read_it() -> None:
    model = replace(LLAMA_3_8B, precision=Precision(dtype="bfloat16", kv_dtype="float8_e4m3fn"))
    a100 = Supply(hardware=hardware("a100"), devices_per_node=2)
    with pytest.raises(ValueError, match="a100-80gb-sxm has no float8; use kv_dtype int8"):
        enumerate_layouts(a_question(a100, model=model))
    h100 = Supply(hardware=H100, devices_per_node=2)
    assert names(a_question(h100, a100, model=model)) == names(a_question(h100, model=model))


@settings(max_examples=30)
@given(
    num_nodes=st.integers(1, 3),
    devices_per_node=st.sampled_from([1, 2, 3, 4, 6, 8]),
    objective=st.sampled_from(Objective),
)
def test_every_layout_fits_the_hosts_and_none_comes_twice(
    num_nodes: int, devices_per_node: int, objective: Objective
) -> None:
    supply = Supply(hardware=H100, num_nodes=num_nodes, devices_per_node=devices_per_node)
    space = replace(FLAT, pipeline_parallel=(1, 2))
    layouts: list[Layout] = enumerate_layouts(a_question(supply, objective=objective, space=space)).layouts
    assert len(set(layouts)) == len(layouts)
    assert all(layout.num_devices <= supply.num_devices for layout in layouts)
    if objective is Objective.RATE:
        assert not any(_is_part_of(one, other) for one in layouts for other in layouts if one is not other)


def _is_part_of(one: Layout, other: Layout) -> bool:
    """Whether ``other`` is ``one`` with further workers."""
    pairs = list(zip_longest(one.pools, other.pools))
    return all(a is not None and b is not None and replace(a, replicas=b.replicas) == b for a, b in pairs) and all(
        a.replicas <= b.replicas for a, b in pairs
    )
