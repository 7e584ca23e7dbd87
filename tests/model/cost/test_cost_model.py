"""The cost model against hand arithmetic on public configurations, and what must hold of any roofline."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.precision import Precision
from pdserve.model.config.decoder_config import parse_config
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import (
    CostModel,
    OnlineCorrection,
    busiest_share,
    chosen_transport,
    num_experts_touched,
)
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware import Hardware, hardware
from tests.model.planned_configs import DEEPSEEK_V3, GEMMA_3_27B, LLAMA_3_8B, LLAMA_3_70B, MIXTRAL_8X7B, PUBLISHED
from tests.model.published_configs import GPT_OSS_20B

H100 = hardware("h100-sxm")


def cost_model(
    config: dict[str, object], tensor_parallel: int = 1, pipeline_parallel: int = 1, transport: str = "auto"
) -> CostModel:
    shape = ModelShape.from_hf_config(config)
    return CostModel(shape, H100, Precision(dtype="bfloat16"), tensor_parallel, pipeline_parallel, transport)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_of_known_models(name: str) -> None:
    config, num_parameters, kv_bytes_per_token = PUBLISHED[name]
    model = cost_model(config)
    assert model.weight_bytes == 2 * num_parameters
    assert model.kv_bytes_per_token == kv_bytes_per_token
    assert cost_model(config, 4).weight_bytes == 2 * num_parameters


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_kv_is_smaller_and_read_faster(dtype: str) -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_8B)
    whole, quantised = (
        CostModel(shape, H100, Precision(dtype="bfloat16", kv_dtype=kv_dtype)) for kv_dtype in ("auto", dtype)
    )
    assert quantised.kv_bytes_per_token == 2 * 32 * 8 * (128 + 4)
    assert quantised.weight_bytes == whole.weight_bytes
    assert quantised.max_kv_blocks(16) > 1.9 * whole.max_kv_blocks(16)
    saved_s = whole.decode_s(8, 80_000) - quantised.decode_s(8, 80_000)
    rate = H100.memory_bandwidth * H100.decode_attention_efficiency
    assert saved_s == pytest.approx(80_008 * (131_072 - quantised.kv_bytes_per_token) / rate)


def test_int8_weights_are_smaller_and_read_faster() -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_8B)
    whole, quantised = (
        CostModel(shape, H100, Precision(dtype="bfloat16", quantization=how)) for how in ("none", "int8")
    )
    # Per layer: matrices as above, and outputs of q, k, v, o, gate and up, down. Tables and norms stay in bfloat16.
    num_in_layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    num_outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert quantised.weight_bytes == num_in_layers + 4 * num_outputs + 2 * (2 * 128256 * 4096 + 65 * 4096)
    saved_s = whole.decode_s(1, 0) - quantised.decode_s(1, 0)
    assert saved_s == pytest.approx((num_in_layers - 4 * num_outputs) / H100.bandwidth)
    assert whole.prefill_s(8192) == quantised.prefill_s(8192)
    with pytest.raises(ValueError, match="quantization 'awq' is not supported: use one of auto, none, int8, int4"):
        CostModel(shape, H100, Precision(dtype="bfloat16", quantization="awq"))


def test_fp8_weights_take_a_byte_and_are_multiplied_as_such_where_the_device_can() -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_8B)

    def seconds(device: str, quantization: str) -> tuple[float, float]:
        cost = CostModel(shape, hardware(device), Precision(dtype="bfloat16", quantization=quantization))
        return cost.parts([(8192, 0)]).layers_s, cost.decode_s(1, 0)

    whole, fp8, int8 = (seconds("h100-sxm", how) for how in ("none", "fp8", "int8"))
    assert fp8[0] == pytest.approx(whole[0] * 989 / (0.72 * 1979))
    assert fp8[1] == int8[1] < whole[1]
    assert seconds("a100-80gb-sxm", "fp8") == seconds("a100-80gb-sxm", "int8")


def test_int4_weights_take_half_a_byte_and_a_scale_for_128_of_them() -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_8B)
    whole, quantised = (
        CostModel(shape, H100, Precision(dtype="bfloat16", quantization=how)) for how in ("none", "int4")
    )
    num_in_layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert quantised.weight_bytes == num_in_layers * (1 / 2 + 4 / 128) + 2 * (2 * 128256 * 4096 + 65 * 4096)
    saved_s = whole.decode_s(1, 0) - quantised.decode_s(1, 0)
    assert saved_s == pytest.approx(num_in_layers * (2 - 1 / 2 - 4 / 128) / H100.bandwidth)
    assert whole.prefill_s(8192) == quantised.prefill_s(8192)


def test_tied_embeddings_are_counted_once() -> None:
    tied, untied = cost_model({**LLAMA_3_8B, "tie_word_embeddings": True}), cost_model(LLAMA_3_8B)
    assert untied.weight_bytes - tied.weight_bytes == 2 * 128256 * 4096
    assert untied.decode_s(1, 100) == tied.decode_s(1, 100)


def test_a_checkpoints_configuration_gives_the_same_shape() -> None:
    config = {**LLAMA_3_8B, "max_position_embeddings": 8192}
    assert parse_config(config, {}).shape == ModelShape.from_hf_config(LLAMA_3_8B)


def test_decode_of_one_sequence_is_the_reading_of_the_weights() -> None:
    model = cost_model(LLAMA_3_8B)
    overhead_s = H100.step_overhead_s + 32 * H100.layer_overhead_s + H100.row_overhead_s
    # The embedding table is not read, one row of it is: 7.5 of 8.0 billion weights at 0.88 * 3.35 TB/s are 5.09 ms.
    assert model.decode_s(1, 0) - overhead_s == pytest.approx(5.09e-3, rel=0.005)


def test_a_long_prefill_is_the_arithmetic_of_the_layers() -> None:
    parts = cost_model(LLAMA_3_8B).parts([(8192, 0)])
    # 2 * 8192 * 6.98e9 / (0.8 * 989e12) = 145 ms of layers; causal attention of 8192 tokens: 4 * 32 * 128 * 32 * 8192
    # * 8193 / 2 operations at 0.6 of the same peak = 29.7 ms; one row of the output projection reads 1.05 GB.
    assert parts.layers_s == pytest.approx(0.1445, rel=0.003)
    assert parts.attention_s == pytest.approx(0.0297, rel=0.003)
    assert parts.output_s == pytest.approx(2 * 128256 * 4096 / H100.bandwidth)


def test_few_tokens_do_not_reach_the_peak() -> None:
    parts = cost_model(LLAMA_3_8B).parts([(512, 0)])
    assert parts.layers_s == pytest.approx(2 * 512 * 6_979_321_856 / (0.77 * 989e12))


def test_transfer_takes_the_kv_bytes_over_the_link() -> None:
    model = cost_model(LLAMA_3_8B, transport="nccl")
    assert model.transfer_s(1000, same_host=True) == pytest.approx(131_072_000 / 450e9 / 0.6)
    assert model.transfer_s(1000, same_host=False) == pytest.approx(131_072_000 / 50e9 / 0.6)
    for_each = 131_072_000 / 4 / 50e9 / 0.6
    assert cost_model(LLAMA_3_8B, 4, 1, "nccl").transfer_s(1000, same_host=False) == pytest.approx(for_each)
    assert cost_model(LLAMA_3_8B, 2, 2, "nccl").transfer_s(1000, same_host=False) == pytest.approx(for_each)
    assert cost_model(LLAMA_3_8B, 2, 2).swap_s(1000) == pytest.approx(131_072_000 / 4 / 64e9)


def test_kv_that_passes_through_the_host_takes_its_copies() -> None:
    model = cost_model(LLAMA_3_70B, 4)
    # All ranks' KV in one process, then each rank's through pinned memory.
    num_bytes = 8000 * 2 * 2 * 80 * 8 * 128
    staging_s = num_bytes / 4 * (1 / 5.9e9 + 1 / 64e9)
    assert model.transfer_s(8000, same_host=True) == pytest.approx(num_bytes / 5.9e9 + staging_s)
    assert model.transfer_s(8000, same_host=False) == pytest.approx(num_bytes / 2.6e9 + staging_s)
    assert model.pull_s(8000, same_host=True) == pytest.approx(0.001 + num_bytes / 5.9e9 + staging_s)
    ipc = cost_model(LLAMA_3_70B, 4, 1, "cuda_ipc")
    assert ipc.transfer_s(8000, same_host=True) == pytest.approx(num_bytes / 4 / (0.6 * 450e9))
    assert ipc.transfer_s(8000, same_host=False) == model.transfer_s(8000, same_host=False)
    on_cpu = CostModel(model.shape, hardware("cpu"), Precision(dtype="bfloat16"))
    assert on_cpu.transfer_s(8000, same_host=True) == pytest.approx(num_bytes / 5.9e9)
    assert on_cpu.transfer_s(8000, same_host=False) == pytest.approx(num_bytes / 1.25e9), "as the network carries"


@pytest.mark.parametrize(
    ("setting", "near", "far"), [("auto", "memfd", "tcp"), ("memfd", "memfd", "memfd"), ("cuda_ipc", "cuda_ipc", "tcp")]
)
def test_the_transport_is_the_one_that_workers_choose(setting: str, near: str, far: str) -> None:
    assert [chosen_transport(setting, same_host=same_host) for same_host in (True, False)] == [near, far]


def test_kv_blocks_fill_the_memory_that_the_rest_leaves() -> None:
    num_blocks = cost_model(LLAMA_3_8B).max_kv_blocks(16, 0.9, max_batch_tokens=1000, max_batch_size=10)
    activation_bytes = 1000 * 2 * (3 * 4096 + 3 * 14336) + 10 * 2 * 4 * 128256
    free_bytes = 0.9 * 80e9 - 2 * 8_030_261_248 - activation_bytes - H100.memory_reserve_bytes
    assert num_blocks * 16 * 131_072 <= free_bytes < (num_blocks + 1) * 16 * 131_072
    assert cost_model(LLAMA_3_70B).max_kv_blocks(16, 0.9) == 0
    assert cost_model(LLAMA_3_70B, 4).max_kv_blocks(16, 0.9) > 0


def test_activations_are_of_the_largest_step() -> None:
    one, four = (
        cost_model(MIXTRAL_8X7B, ranks).rank_memory(max_batch_tokens=100, max_batch_size=1) for ranks in (1, 4)
    )
    # Of each token three vectors of the width and one for each of two experts, and three of the experts' width, which
    # ranks share.
    logits_bytes = 2 * 4 * 32000
    assert one.activation_bytes == 100 * 2 * (5 * 4096 + 3 * 2 * 14336) + logits_bytes
    assert four.activation_bytes == 100 * 2 * (5 * 4096 + 3 * 2 * 14336 / 4) + logits_bytes


def test_rows_that_sample_have_an_overhead() -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_8B)
    slower = CostModel(shape, replace(H100, row_overhead_s=1e-3), Precision(dtype="bfloat16"))
    more_s = 7 * (1e-3 - H100.row_overhead_s)
    assert slower.decode_s(7, 700) == pytest.approx(cost_model(LLAMA_3_8B).decode_s(7, 700) + more_s)


def test_a_host_that_launches_slowly_hides_what_more_ranks_save() -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_70B)
    two, four, eight, graphs = (
        CostModel(shape, replace(H100, layer_launch_s=launch_s), Precision(dtype="bfloat16"), ranks)
        for launch_s, ranks in ((370e-6, 2), (370e-6, 4), (370e-6, 8), (0, 8))
    )
    parts = eight.parts([(1, 0)])
    launched_s = parts.layers_s + parts.all_reduce_s + parts.overhead_s
    assert launched_s == pytest.approx(H100.step_overhead_s + H100.ranks_overhead_s + H100.row_overhead_s + 80 * 370e-6)
    assert four.decode_s(1, 0) - four.parts([(1, 0)]).output_s == pytest.approx(
        eight.decode_s(1, 0) - parts.output_s, rel=1e-3
    )
    assert two.decode_s(64, 0) > four.decode_s(64, 0)
    assert graphs.decode_s(1, 0) < 0.5 * eight.decode_s(1, 0)
    assert graphs.prefill_s(8192) == eight.prefill_s(8192)


def test_stages_share_layers_and_the_tables_are_at_the_ends() -> None:
    whole, halves = cost_model(LLAMA_3_8B), cost_model(LLAMA_3_8B, 1, 2)
    table_bytes = 2 * 128256 * 4096
    assert halves.weight_bytes == whole.weight_bytes
    assert whole.rank_memory().weight_bytes == 2 * 8_030_261_248
    assert halves.rank_memory().weight_bytes == (2 * 8_030_261_248 - 2 * table_bytes) / 2 + table_bytes
    tied = {**LLAMA_3_8B, "tie_word_embeddings": True}
    assert cost_model(tied, 1, 2).rank_memory().weight_bytes == halves.rank_memory().weight_bytes
    assert cost_model(tied, 4).rank_memory().weight_bytes == (2 * 8_030_261_248 - table_bytes) / 4
    # Each rank holds the KV of half of the layers, and so as many more tokens.
    num_blocks = halves.max_kv_blocks(16)
    assert num_blocks == halves.rank_memory().kv_bytes // (16 * 131_072 / 2)
    assert num_blocks > 2 * whole.max_kv_blocks(16)


def test_a_pipeline_takes_as_long_as_its_stages_and_what_is_sent_between_them() -> None:
    one, four = cost_model(LLAMA_3_70B, 4), cost_model(LLAMA_3_70B, 4, 4)
    # Two stages of four ranks fill a host: of three hops one leaves it.
    message_bytes = 2048 * 8192 * 2
    inside_s = 5e-6 + message_bytes / (0.6 * 450e9)
    outside_s = 30e-6 + message_bytes / (0.6 * 50e9)
    assert four.parts([(2048, 0)]).send_s == pytest.approx(2 * inside_s + outside_s)
    logits_s = 30e-6 + 128256 * 4 / (0.6 * 50e9)  # of one row, to the leader
    assert four.prefill_s(2048) == pytest.approx(one.prefill_s(2048) + 2 * inside_s + outside_s + logits_s)
    with pytest.raises(ValueError, match="pipeline_parallel 3 does not divide 80 layers; use a divisor"):
        cost_model(LLAMA_3_70B, 1, 3)


ROWS = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 30_000)), min_size=1, max_size=8)


@given(rows=ROWS, row=st.tuples(st.integers(1, 4096), st.integers(0, 30_000)))
def test_more_work_never_takes_less_time(rows: list[tuple[int, int]], row: tuple[int, int]) -> None:
    model = cost_model(LLAMA_3_8B)
    num_new, num_cached = row
    step_s = model.step_s([*rows, row])
    assert step_s > model.step_s(rows) > 0
    assert model.step_s([*rows, (num_new + 1, num_cached)]) > step_s
    assert model.step_s([*rows, (num_new, num_cached + 1)]) > step_s
    assert step_s < model.step_s(rows) + model.step_s([row])  # weights and overhead are shared


SLOW_AT_PROMPTS = replace(
    hardware("cpu"), prefill_attention_efficiency=Curve.constant(0.01), row_overhead_s=1e-4, name="slow"
)


@given(
    contexts=st.lists(st.integers(0, 30_000), max_size=300),
    num_new=st.integers(1, 9000) | st.integers(1, 2),
    num_cached=st.integers(0, 30_000),
    parallel=st.sampled_from([(1, 1), (4, 1), (2, 4), (8, 2)]),
    device=st.sampled_from([H100, hardware("a100"), hardware("cpu"), SLOW_AT_PROMPTS]),
)
def test_all_ways_to_ask_for_a_step_agree_to_the_bit(
    contexts: list[int], num_new: int, num_cached: int, parallel: tuple[int, int], device: Hardware
) -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_8B)
    model = CostModel(shape, device, Precision(dtype="bfloat16"), parallel[0], pipeline_parallel=parallel[1])
    decoding = [(1, context) for context in contexts]
    assert model.decode_s(len(contexts), sum(contexts)) == model.step_s(decoding)
    assert model.prefill_s(num_new, num_cached) == model.step_s([(num_new, num_cached)])
    mixed = [(num_new, num_cached), *decoding]
    mixed_s = model.mixed_s(num_new, num_cached, len(contexts), sum(contexts))
    assert mixed_s == model.step_s(mixed) == model.step_s(mixed[:1], len(contexts), sum(contexts))
    assert mixed_s == pytest.approx(sum(model.parts(mixed)))
    assert model.mixed_s(0, num_cached, len(contexts), sum(contexts)) == model.step_s(decoding)
    if contexts:
        first_s, growth_s, _ = model.decode_run_s(len(contexts), sum(contexts))
        assert first_s == model.step_s(decoding)
        assert first_s + 100 * growth_s == pytest.approx(model.step_s((1, context + 100) for context in contexts))


@pytest.mark.parametrize("context", [500, 8_000, 32_000, 100_000])
def test_layers_with_a_window_attend_to_no_more(context: int) -> None:
    model, num_rows = cost_model(GEMMA_3_27B), 16
    attention_s = 0.0
    for layer in range(62):
        seen = context + 1 if layer % 6 == 5 else min(context + 1, 1024)
        work_s, reading_s = 4 * 32 * 128 * seen / 989e12, 2 * 2 * 16 * 128 * seen / 3.35e12
        attention_s += num_rows * max(work_s, reading_s) / H100.decode_attention_efficiency
    parts = model.parts([(1, context)] * num_rows)
    assert parts.attention_s == pytest.approx(attention_s)
    assert model.decode_s(num_rows, num_rows * context) == pytest.approx(sum(parts))
    assert model.kv_bytes_per_token == 2 * 2 * 62 * 16 * 128, "all is kept"


@given(num_new=st.integers(2, 300), num_cached=st.integers(0, 300), window=st.integers(1, 400))
def test_pairs_of_a_prompt_end_at_the_window(num_new: int, num_cached: int, window: int) -> None:
    shape = replace(ModelShape.from_hf_config(LLAMA_3_8B), windows=(window, 0, 0, 0) * 8)
    model = CostModel(shape, SLOW_AT_PROMPTS, Precision(dtype="float32"))
    seen = [num_cached + position + 1 for position in range(num_new)]
    num_pairs = sum(24 * each + 8 * min(each, window) for each in seen)
    assert model.parts([(num_new, num_cached)]).attention_s == pytest.approx(4 * 32 * 128 * num_pairs / 80e9 / 0.01)


@given(
    num_new=st.integers(0, 40_000),
    num_cached=st.integers(0, 40_000),
    budget=st.integers(128, 8192),
    config=st.sampled_from([LLAMA_3_8B, GEMMA_3_27B, MIXTRAL_8X7B]),
)
def test_a_prompt_takes_what_its_chunks_take(
    num_new: int, num_cached: int, budget: int, config: dict[str, object]
) -> None:
    model, chunks_s = cost_model(config), 0.0
    for begin in range(0, num_new, budget):
        chunks_s += model.prefill_s(min(budget, num_new - begin), num_cached + begin)
    assert model.prompt_s(num_new, num_cached, budget) == pytest.approx(chunks_s, rel=1e-9)


@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize("budget", [8, 16, 32, 64])
def test_small_chunks_read_the_context_again(budget: int, window: int) -> None:
    shape = replace(ModelShape.from_hf_config(LLAMA_3_8B), windows=(0, window) * 16)
    model = CostModel(shape, H100, Precision(dtype="bfloat16"))
    chunks_s = sum(model.prefill_s(budget, begin) for begin in range(0, 32_768, budget))
    assert model.prompt_s(32_768, 0, budget) == pytest.approx(chunks_s, rel=0.01)


@given(contexts=st.lists(st.integers(0, 1500), min_size=1, max_size=9))
def test_a_run_is_linear_up_to_the_window(contexts: list[int]) -> None:
    model, batch_size, context = cost_model(GEMMA_3_27B), len(contexts), sum(contexts)
    first_s, growth_s, num_steps = model.decode_run_s(batch_size, context)
    for step in {0, 1, num_steps - 1} if num_steps < 2000 else {0, 1, 50_000}:
        if step < num_steps:
            expected_s = model.decode_s(batch_size, context + step * batch_size)
            assert first_s + step * growth_s == pytest.approx(expected_s)
    if num_steps < 2000:
        beyond_s = model.decode_s(batch_size, context + (num_steps + 1) * batch_size)
        assert beyond_s < first_s + (num_steps + 1) * growth_s
    assert model.decode_s(batch_size, context) >= model.step_s((1, each) for each in contexts) * (1 - 1e-12)


def test_an_empty_step_takes_no_time() -> None:
    model = cost_model(LLAMA_3_8B)
    assert model.step_s([]) == model.decode_s(0, 0) == model.prefill_s(0) == 0


def test_tensor_parallelism_divides_the_work_and_adds_the_all_reduces() -> None:
    one, four = (cost_model(LLAMA_3_70B, ranks).parts([(2048, 0)]) for ranks in (1, 4))
    assert four.layers_s == pytest.approx(one.layers_s / 4)
    assert four.attention_s == pytest.approx(one.attention_s / 4)
    gather_s = 5e-6 + 3 / 4 * 128256 * 2 / (0.28 * 450e9)
    assert four.output_s == pytest.approx(one.output_s / 4 + gather_s)
    assert four.overhead_s == pytest.approx(one.overhead_s + H100.ranks_overhead_s)
    # 80 layers, 2 all-reduces each: 5 us, and 6 times a fourth of 2048 tokens * 8192 values * 2 bytes, at 450 GB/s.
    assert four.all_reduce_s == pytest.approx(80 * 2 * (5e-6 + 6 * 2048 * 8192 * 2 / 4 / (0.28 * 450e9)))
    assert one.all_reduce_s == 0


def test_ranks_of_several_hosts_reduce_over_the_network() -> None:
    sixteen = cost_model(LLAMA_3_70B, 16).parts([(2048, 0)])
    assert sixteen.all_reduce_s == pytest.approx(80 * 2 * (30e-6 + 30 * 2048 * 8192 * 2 / 16 / (0.6 * 50e9)))


def test_one_token_reads_the_experts_it_is_routed_to() -> None:
    model = cost_model(MIXTRAL_8X7B)
    common = 2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096
    expert = 3 * 4096 * 14336
    reading_s = 32 * 2 * (common + 2 * expert) / H100.bandwidth
    assert model.parts([(1, 0)]).layers_s == pytest.approx(reading_s)
    # Eight rows: of 8 experts each is missed by one with probability 3/4, by all with 0.75^8.
    num_touched = 8 * (1 - 0.75**8)
    reading_s = 32 * 2 * (common + num_touched * expert) / H100.bandwidth
    assert model.parts([(1, 0)] * 8).layers_s == pytest.approx(reading_s)


def test_many_tokens_are_multiplied_with_their_own_experts_only() -> None:
    common, experts = 2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096, 2 * 3 * 4096 * 14336
    compute = H100.compute_efficiency
    # 8192 tokens, each by two experts, are 2048 rows an expert.
    expected_s = 32 * 2 * 8192 * (common / compute.at(8192) + experts / compute.at(2048)) / 989e12
    assert cost_model(MIXTRAL_8X7B).parts([(8192, 0)]).layers_s == pytest.approx(expected_s)


def test_latent_attention_reads_one_vector_and_multiplies_heads_with_it() -> None:
    one, eight = cost_model(DEEPSEEK_V3), cost_model(DEEPSEEK_V3, 8)
    reading_s, work_s = 2 * 576 / 3.35e12, 2 * 128 * (576 + 512) / 989e12
    assert work_s < reading_s
    for model in (one, eight):  # each of whose ranks reads all of it
        attention_s = model.parts([(1, 999)]).attention_s
        assert attention_s == pytest.approx(61 * 1000 * reading_s / H100.decode_attention_efficiency)
    assert eight.rank_kv_bytes_per_token == one.kv_bytes_per_token
    slow = CostModel(one.shape, replace(H100, peak_flops={"bfloat16": 1e14}), Precision(dtype="bfloat16"))
    attention_s = slow.parts([(1, 999)]).attention_s
    expected_s = 61 * 1000 * 2 * 128 * (576 + 512) / 1e14 / H100.decode_attention_efficiency
    assert attention_s == pytest.approx(expected_s)
    # In a prompt, keys of 192 values and values of 128 are projected from it.
    pairs_s = 61 * 4096 * 4097 / 2 * 2 * 128 * (192 + 128) / 989e12
    attention_s = one.parts([(4096, 0)]).attention_s
    assert attention_s == pytest.approx(pairs_s / H100.prefill_attention_efficiency.at(4096))


def test_the_first_layers_have_no_experts() -> None:
    model, attention = cost_model(DEEPSEEK_V3), 7168 * (1536 + 576 + 16384) + 1536 * 128 * 192 + 512 * 128 * 256
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    routed = attention + 256 * 7168 + 9 * expert
    reading_s = 2 * (3 * (attention + dense) + 58 * routed) / H100.bandwidth
    assert model.parts([(1, 0)]).layers_s == pytest.approx(reading_s)


@given(num_tokens=st.integers(1, 3000))
def test_more_tokens_touch_more_experts(num_tokens: int) -> None:
    assert 8 <= num_experts_touched(num_tokens, 128, 8) <= min(128, 8 * num_tokens) * (1 + 1e-12)
    model = cost_model(MIXTRAL_8X7B)
    assert model.prefill_s(num_tokens) < model.prefill_s(num_tokens + 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_touched", [8, 40, 128])
def test_ranks_with_whole_experts_wait_for_the_busiest(num_touched: int, num_ranks: int) -> None:
    random = np.random.default_rng(0)
    touched = random.permuted(np.tile(np.arange(128), (2000, 1)), axis=1)[:, :num_touched] * num_ranks // 128
    most = np.stack([(touched == rank).sum(axis=1) for rank in range(num_ranks)]).max(axis=0).mean()
    assert busiest_share(num_touched, 128, num_ranks) == pytest.approx(most / num_touched, rel=0.1)


def test_whole_experts_take_longer_until_all_are_touched() -> None:
    shape = ModelShape.from_hf_config(MIXTRAL_8X7B)
    parts, whole = (
        CostModel(shape, H100, Precision(dtype="bfloat16"), 4, expert_parallel=expert_parallel)
        for expert_parallel in (False, True)
    )
    assert whole.decode_s(1, 100) > 1.2 * parts.decode_s(1, 100)
    assert whole.decode_s(64, 6400) == pytest.approx(parts.decode_s(64, 6400), rel=0.01)
    assert whole.rank_memory().activation_bytes > parts.rank_memory().activation_bytes


def test_more_ranks_than_kv_heads_repeat_them() -> None:
    sixteen, eight = (cost_model(LLAMA_3_8B, ranks, 1, "nccl") for ranks in (16, 8))
    assert sixteen.transfer_s(1, same_host=True) == eight.transfer_s(1, same_host=True)


@pytest.mark.parametrize("tensor_parallel", [0, 3, 64])
def test_heads_that_do_not_divide_are_refused(tensor_parallel: int) -> None:
    with pytest.raises(ValueError, match="does not divide 32 heads and 8 KV heads"):
        cost_model(LLAMA_3_8B, tensor_parallel)


def test_a_dtype_without_a_figure_is_refused() -> None:
    shape = ModelShape.from_hf_config(LLAMA_3_8B)
    with pytest.raises(ValueError, match="dtype 'int8' is not one of a model; use one of float32, bfloat16"):
        CostModel(shape, H100, Precision(dtype="int8"))
    with pytest.raises(ValueError, match="h100-sxm has no figure for 'bfloat16'; use one of float32"):
        CostModel(shape, replace(H100, peak_flops={"float32": 67e12}), Precision(dtype="bfloat16"))


def test_correction_follows_what_is_observed() -> None:
    correction = OnlineCorrection()
    assert correction.factor == 1
    for _ in range(100):
        correction.observe(0.010, 0.025)
    assert correction.factor == pytest.approx(1 + 1.5 * (1 - math.exp(-1)))
    for _ in range(600):
        correction.observe(0.010, 0.025)
    assert correction.factor == pytest.approx(2.5, rel=1e-3)


def test_correction_bounds_an_outlier_and_takes_a_short_one_lightly() -> None:
    correction = OnlineCorrection()
    correction.observe(0.010, 100.0)
    assert correction.factor == pytest.approx(1 + 0.01 * (10 - 1), rel=0.01)
    long_step = OnlineCorrection()
    long_step.observe(2.0, 100.0)
    assert long_step.factor == pytest.approx(1 + 0.1 * (10 - 1))
    for _ in range(200):
        correction.observe(1.0, 0.0)
    assert correction.factor == pytest.approx(0.1)


def test_experts_in_four_bits_are_read_beside_matrices_in_sixteen() -> None:
    """Of one token, 4 of 32 experts, in 17/4 bits a weight."""
    shape = ModelShape.from_hf_config(GPT_OSS_20B)
    cost, experts = CostModel(shape, H100, Precision(dtype="bfloat16")), 24 * 32 * shape.expert_parameters * 17 // 32
    assert cost.read_bytes(1) == pytest.approx(cost.weight_bytes - experts * 28 / 32)
    common = 24 * 2 * shape.common_layer_parameters
    assert cost.parts([(1, 1)]).layers_s == pytest.approx((common + experts * 4 / 32) / H100.bandwidth)
