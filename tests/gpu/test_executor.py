"""The executor on a GPU and on a CPU: the same tokens in float32, and in bfloat16 logits as good as others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.contracts.kv_layout import resolve_kv_dtype
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, StepBatch, StepRow
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.selection import select_kernels
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.gpu.device import DEVICE, sized, some
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import reference_logits, write_family
from tests.model.traffic import Served, random_request, serve

NUM_BLOCKS, BLOCK_SIZE = 60, 16
FLOAT32 = Precision()
FAMILIES = some(("demo", "qwen3", "gemma2", "llama", "qwen2"), 1)


def checkpoint(family: str, folder: Path) -> Path:
    return DEMO_MODEL if family == "demo" else write_family(folder, family)


def executors(
    folder: Path, *, max_captured_rows: int, precision: Precision = FLOAT32
) -> tuple[ModelExecutor, ModelExecutor]:
    """Over pools of NaN, in float32."""
    config = DecoderConfig.from_folder(folder)
    config = config.at_length(config.limits(512).max_model_len)
    kv_dtype = resolve_kv_dtype(precision.kv_dtype, precision.dtype)
    layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, kv_dtype, "hash")
    shared: dict[str, Any] = {
        "folder": folder, "config": config, "layout": layout, "precision": precision, "num_swap_slots": 4,
    }  # fmt: skip
    near = nan_pool(layout.shape, getattr(torch, kv_dtype))
    there = KvPool(near.blocks.flatten().to(DEVICE, copy=True), near.shape, near.dtype)
    expected = ModelExecutor(**shared, pool=near)
    return expected, ModelExecutor(**shared, pool=there, max_captured_rows=max_captured_rows)


def assert_same_tokens(served: Served, wanted: Served) -> None:
    """What fails names the requests that differ: one of many may be a draw between equals, several are a fault."""
    assert not served.ends
    assert served.tokens.keys() == wanted.tokens.keys()
    pairs = {key: (served.tokens[key], tokens) for key, tokens in wanted.tokens.items()}
    differing = [
        key for key, answers in pairs.items() if len({tuple(token.token for token in answer) for answer in answers}) > 1
    ]
    assert not differing, f"{len(differing)} of {len(pairs)} answers differ, of (request, choice) {differing}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_captured_rows", [6, 0], ids=["captured", "eager"])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "any"])
def test_random_traffic_gets_the_tokens_of_a_cpu(
    family: str, max_captured_rows: int, is_plain: bool, tmp_path: Path
) -> None:
    folder = checkpoint(family, tmp_path)
    config = DecoderConfig.from_folder(folder)
    requests = [random_request(number, config.shape.vocab_size, is_plain=is_plain) for number in range(sized(100, 12))]
    answers = [
        serve(executor, requests, config.limits(512), NUM_BLOCKS, BLOCK_SIZE)
        for executor in executors(folder, max_captured_rows=max_captured_rows)
    ]
    assert_same_tokens(answers[1], answers[0])
    assert len(answers[0].tokens) >= len(requests)


@pytest.mark.parametrize(
    "precision",
    [Precision(quantization="int8"), Precision(kv_dtype="int8"), Precision(quantization="int4")],
    ids=["int8-weights", "int8-kv", "int4-weights"],
)
def test_quantised_models_get_the_tokens_of_a_cpu(precision: Precision) -> None:
    expected, executor = executors(DEMO_MODEL, max_captured_rows=4, precision=precision)
    config = DecoderConfig.from_folder(DEMO_MODEL)
    requests = [random_request(number, config.shape.vocab_size, is_plain=True) for number in range(sized(40, 6))]
    served, wanted = (
        serve(each, requests, config.limits(512), NUM_BLOCKS, BLOCK_SIZE) for each in (executor, expected)
    )
    assert_same_tokens(served, wanted)


def test_kv_that_went_to_the_host_comes_back_elsewhere() -> None:
    sample = SamplingParams(temperature=0)
    before = StepRow(
        sequence_id=0, tokens=[5] * 25, cached_length=0, block_table=[3, 9], sample=None, sample_position=25
    )
    after = StepRow(
        sequence_id=1, tokens=[7], cached_length=25, block_table=[40, 11], sample=sample, sample_position=26
    )
    answers = []
    for executor in executors(DEMO_MODEL, max_captured_rows=2):
        executor.submit(StepBatch(step_id=0, rows=[before]))
        executor.submit(StepBatch(step_id=1, rows=[], swap_outs=[BlockCopy(3, 0), BlockCopy(9, 1)]))
        ins = [BlockCopy(0, 40), BlockCopy(1, 11)]
        answers.append(executor.submit(StepBatch(step_id=2, rows=[after], swap_ins=ins)).result().sampled)
    assert answers[0] == answers[1]
    assert answers[0][0] is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_err_no_more_than_twice_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = checkpoint(family, tmp_path)
    config = DecoderConfig.from_folder(folder)
    config = config.at_length(config.limits(512).max_model_len)
    num_tokens = sized(200, 40)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, config.shape.vocab_size, (num_tokens,), generator=generator).tolist()
    near = nan_pool(config.kv_layout(16, BLOCK_SIZE, "bfloat16", "hash").shape, torch.bfloat16)
    pool = KvPool(near.blocks.flatten().to(DEVICE), near.shape, near.dtype)
    decoder = Decoder(folder, config, Precision(dtype="bfloat16"), select_kernels(pool))

    def logits(first: int, end: int) -> torch.Tensor:
        table = list(range(15, -1, -1))
        metadata = AttentionMetadata.build([end - first], [first], [table], num_blocks=16, block_size=BLOCK_SIZE)
        tokens_T = torch.tensor(tokens[first:end], device=DEVICE)
        rows_T = torch.arange(end - first, device=DEVICE)
        with torch.inference_mode():
            return decoder.logits(decoder.forward(tokens_T, pool, metadata.to(DEVICE), rows_T)).float().cpu()

    middle = num_tokens // 2
    computed = torch.cat((logits(0, middle), *(logits(index, index + 1) for index in range(middle, num_tokens))))
    exact = reference_logits(folder, tokens)
    error, accepted = ((each - exact).abs() for each in (computed, reference_logits(folder, tokens, torch.bfloat16)))
    assert error.mean() <= 2 * accepted.mean()
    assert error.max() <= 2 * accepted.max()
