from __future__ import annotations

from dataclasses import replace

from pdserve.bench.gpu_model.checkpoint import LLAMA_8B
from pdserve.bench.gpu_model.limits import Variant
from pdserve.bench.gpu_model.plan import LLAMA, DecodeShape, decode_shapes, num_blocks
from pdserve.model.config.shape import ModelShape

SHAPE = ModelShape.from_hf_config(LLAMA_8B)
BF16 = Variant(dtype="bfloat16")
H100_BYTES, H200_BYTES = 79 * 2**30, 139 * 2**30


def test_all_of_the_context_fits_an_h200() -> None:
    shapes = list(decode_shapes(LLAMA, SHAPE, BF16, H200_BYTES))
    assert shapes == [(1, 2048), (16, 2048), (64, 2048), (256, 2048)]
    assert num_blocks(LLAMA, shapes) == 256 * 128


def test_there_is_less_context_where_it_does_not_fit() -> None:
    *others, largest = decode_shapes(LLAMA, SHAPE, BF16, H100_BYTES)
    assert others == [(1, 2048), (16, 2048), (64, 2048)]
    room = H100_BYTES - 2 * SHAPE.num_parameters - 6e9
    assert 1024 <= largest.context_tokens < 2048
    assert largest.context_tokens % 16 == 0
    assert room - 256 * 16 * 131072 < 256 * largest.context_tokens * 131072 <= room
    with_int8 = decode_shapes(LLAMA, SHAPE, Variant(dtype="bfloat16", kv_dtype="int8"), H100_BYTES)
    assert DecodeShape(256, 2048) in list(with_int8)


def test_a_batch_that_would_be_another_is_left_out() -> None:
    shapes = list(decode_shapes(LLAMA, SHAPE, BF16, 40 * 10**9))
    assert [shape.num_rows for shape in shapes] == [1, 16, 64]


def test_a_pool_holds_the_longest_prompt() -> None:
    assert num_blocks(LLAMA, []) == 8192 // 16
    assert num_blocks(replace(LLAMA, prompt_tokens=(17,)), [DecodeShape(3, 33)]) == 9
