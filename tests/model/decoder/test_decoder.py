"""The decoder against transformers, on random checkpoints of every supported family and option."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pdserve.contracts.precision import Precision
from pdserve.kernels.cpu.dense import multiplies_bfloat16
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.decoder import decoder
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.weights.stored import Checkpoint
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import (
    FAMILIES,
    LLAMA3_ROPE,
    VARIANTS,
    YARN_ROPE,
    load_reference,
    reference_logits,
    rounded_reference_logits,
    write_checkpoint,
    write_family,
)
from tests.model.planned_configs import QWEN3_30B_A3B

NUM_BLOCKS, BLOCK_SIZE = 24, 16
TOKENS = [int(token) for token in torch.randint(0, 211, (100,), generator=torch.Generator().manual_seed(3))]
OTHER_TOKENS = TOKENS[::-1]
FORK = TOKENS[:48] + OTHER_TOKENS[:40]
TABLE, OTHER_TABLE = [9, 2, 17, 0, 5, 21, 13], [1, 22, 3, 20, 7, 18, 11]
KERNELS = [pytest.param(CPU_KERNELS, id="cpu"), pytest.param(TORCH_KERNELS, id="torch")]


class PagedDecoder:
    """A decoder with a pool full of NaN, run one batch at a time."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        kernels: DecoderKernels = CPU_KERNELS,
        max_model_len: int = 0,
        quantization: str = "auto",
        cpu_products: str = "auto",
    ) -> None:
        config = DecoderConfig.from_folder(folder)
        config = config.at_length(config.limits(max_model_len).max_model_len)
        name = str(dtype).removeprefix("torch.")
        precision = Precision(dtype=name, quantization=quantization, cpu_products=cpu_products)
        layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, precision.dtype, "hash")
        self.pool = nan_pool(layout.shape, dtype)
        self.model = Decoder(folder, config, precision, kernels)

    def logits(self, *rows: tuple[list[int], int, list[int]]) -> torch.Tensor:
        """Logits of every new token of rows (new tokens, cached length, block table)."""
        metadata = AttentionMetadata.build(
            [len(tokens) for tokens, _, _ in rows],
            [cached for _, cached, _ in rows],
            [table for _, _, table in rows],
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        )
        tokens_T = torch.tensor([token for tokens, _, _ in rows for token in tokens])
        return self.some_logits(tokens_T, metadata, torch.arange(len(tokens_T)))

    def some_logits(self, tokens_T: torch.Tensor, metadata: AttentionMetadata, wanted_B: torch.Tensor) -> torch.Tensor:
        return self.model.logits(self.model.forward(tokens_T, self.pool, metadata, wanted_B))


class Reference(NamedTuple):
    """A checkpoint, and what transformers computes from it for `TOKENS`, `OTHER_TOKENS` and `FORK`."""

    folder: Path
    logits: torch.Tensor
    other_logits: torch.Tensor
    fork_logits: torch.Tensor


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture(scope="module", params=FAMILIES)
def family(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Reference:
    folder = write_family(tmp_path_factory.mktemp("family"), request.param)
    return Reference(folder, *(reference_logits(folder, tokens) for tokens in (TOKENS, OTHER_TOKENS, FORK)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_of_every_family_are_those_of_transformers(family: Reference, kernels: DecoderKernels) -> None:
    decoder = PagedDecoder(family.folder, torch.float32, kernels)
    assert_close(decoder.logits((TOKENS, 0, TABLE)), family.logits)


@pytest.mark.parametrize("chunk", [1, 33])
def test_chunked_prefill_is_the_whole(family: Reference, chunk: int) -> None:
    decoder = PagedDecoder(family.folder, torch.float32)
    chunks = [decoder.logits((TOKENS[start : start + chunk], start, TABLE)) for start in range(0, len(TOKENS), chunk)]
    assert_close(torch.cat(chunks), family.logits)


def test_a_prefix_computed_for_another_sequence_serves_this_one(family: Reference) -> None:
    decoder = PagedDecoder(family.folder, torch.float32)
    decoder.logits((TOKENS, 0, TABLE))
    logits = decoder.logits((FORK[48:], 48, TABLE[:3] + OTHER_TABLE[3:]))
    assert_close(logits, family.fork_logits[48:])


def test_prefill_and_decode_rows_in_one_batch(family: Reference) -> None:
    decoder = PagedDecoder(family.folder, torch.float32)
    decoder.logits((TOKENS[:-1], 0, TABLE))
    decoder.logits((OTHER_TOKENS[:20], 0, OTHER_TABLE))
    logits = decoder.logits((TOKENS[-1:], len(TOKENS) - 1, TABLE), (OTHER_TOKENS[20:], 20, OTHER_TABLE))
    assert_close(logits[:1], family.logits[-1:])
    assert_close(logits[1:], family.other_logits[20:])


def test_compiled_kernels_give_a_token_the_same_logits_in_any_batch_and_chunk(family: Reference) -> None:
    decoder = PagedDecoder(family.folder, torch.bfloat16)
    whole = decoder.logits((TOKENS, 0, TABLE))
    for chunk in (1, 33):
        starts = range(0, len(TOKENS), chunk)
        chunks = [decoder.logits((TOKENS[start : start + chunk], start, TABLE)) for start in starts]
        assert torch.equal(torch.cat(chunks), whole)
    together = decoder.logits((OTHER_TOKENS, 0, OTHER_TABLE), (TOKENS[60:], 60, TABLE))
    assert torch.equal(together[len(OTHER_TOKENS) :], whole[60:])


def test_the_mlp_takes_some_tokens_at_a_time_and_computes_the_same(
    family: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gate(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
        taken.append(len(gate_up_TF))
        return CPU_KERNELS.gate(gate_up_TF, activation)

    taken: list[int] = []
    whole = PagedDecoder(family.folder, torch.bfloat16).logits((TOKENS, 0, TABLE))
    shape = DecoderConfig.from_folder(family.folder).shape
    pairs = max(1, shape.experts_per_token)
    monkeypatch.setattr(decoder, "_EXPERT_BYTES", 30 * pairs * 4 * (shape.hidden_size + 2 * shape.intermediate_size))
    in_pieces = PagedDecoder(family.folder, torch.bfloat16, CPU_KERNELS._replace(gate=gate, mlp_rows=30))
    assert torch.equal(in_pieces.logits((TOKENS, 0, TABLE)), whole)
    assert {30 * pairs, 10 * pairs} <= set(taken) <= {30 * pairs, 10 * pairs, 30, 10}


def test_a_prompt_of_2048_tokens_reads_each_expert_once() -> None:
    """All its tokens fit into one call of a layer's experts, of which each reads its weights once."""
    assert decoder._expert_rows(ModelShape.from_hf_config(QWEN3_30B_A3B)) >= 2048


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen2_moe", "gpt_oss"])
def test_workers_that_share_weights_have_the_logits_of_one_with_its_own(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_family(tmp_path, family)
    own = PagedDecoder(folder, torch.bfloat16, CPU_KERNELS._replace(are_weights_shared=False))
    first = PagedDecoder(folder, torch.bfloat16)
    read: list[str] = []
    read_all = Checkpoint.read

    def recorded(self: Checkpoint, *names: str, rows: Sequence[range] = ()) -> torch.Tensor:
        read.extend(names)
        return read_all(self, *names, rows=rows)

    monkeypatch.setattr(Checkpoint, "read", recorded)
    second = PagedDecoder(folder, torch.bfloat16)
    assert all(name.endswith(("norm.weight", "bias", "sinks")) for name in read)
    expected = own.logits((TOKENS, 0, TABLE))
    assert torch.equal(first.logits((TOKENS, 0, TABLE)), expected)
    assert torch.equal(second.logits((TOKENS, 0, TABLE)), expected)


@pytest.mark.parametrize(("quantization", "largest_error"), [("int8", 0.15), ("int4", 2.0)])
def test_quantised_layers_compute_what_their_rounded_weights_do(
    family: Reference, quantization: str, largest_error: float
) -> None:
    expected = rounded_reference_logits(family.folder, TOKENS, quantization)
    logits = PagedDecoder(family.folder, torch.float32, quantization=quantization).logits((TOKENS, 0, TABLE))
    assert_close(logits, expected)
    assert 0 < logprob_error(logits, family.logits) < largest_error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_option_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, **VARIANTS[variant])
    logits = PagedDecoder(folder, torch.float32).logits((TOKENS, 0, TABLE))
    assert_close(logits, reference_logits(folder, TOKENS))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 384},
        {"rope_parameters": {**YARN_ROPE, "factor": 6.0}, "max_position_embeddings": 64},
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 6.0},
            "max_position_embeddings": 64,
        },
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}, "max_position_embeddings": 64},
        {"model_type": "gemma3_text", **FAMILIES["gemma3_text"]},
    ],
    ids=["llama3", "yarn", "linear", "dynamic", "gemma3"],
)
def test_logits_far_beyond_the_trained_length(tmp_path: Path, changes: dict[str, Any]) -> None:
    """transformers makes dynamic rope for the sequence at hand: here one of ``max_model_len`` tokens."""
    folder = write_checkpoint(tmp_path, **changes)
    tokens = (TOKENS * 4)[:380]
    table = list(range(NUM_BLOCKS))
    decoder = PagedDecoder(folder, torch.float32, max_model_len=len(tokens))
    chunks = (decoder.logits((tokens[:200], 0, table)), *(
        decoder.logits((tokens[start : start + 20], start, table)) for start in range(200, 380, 20)
    ))  # fmt: skip
    assert_close(torch.cat(chunks), reference_logits(folder, tokens))


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_shard_size="100KB")
    assert not (folder / "model.safetensors").exists()
    assert_close(PagedDecoder(folder, torch.float32).logits((TOKENS, 0, TABLE)), reference_logits(folder, TOKENS))


def test_only_rows_that_sample_reach_the_output_projection(llama: Path) -> None:
    decoder = PagedDecoder(llama, torch.float32)
    every = decoder.logits((TOKENS, 0, TABLE))
    metadata = AttentionMetadata.build([100], [0], [TABLE], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    tokens_T = torch.tensor(TOKENS)
    assert_close(decoder.some_logits(tokens_T, metadata, torch.tensor([99, 3])), every[[99, 3]])
    none = decoder.some_logits(tokens_T, metadata, torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 211)


@pytest.mark.parametrize(
    ("kernels", "cpu_products"),
    [
        pytest.param(CPU_KERNELS, "auto", id="cpu"),
        pytest.param(CPU_KERNELS, "float32", id="cpu, float32 products"),
        pytest.param(TORCH_KERNELS, "auto", id="torch"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_transformers_own(
    family: Reference, dtype: torch.dtype, kernels: DecoderKernels, cpu_products: str
) -> None:
    """The measure is what the same rounded weights give in float32, for the median token: a few others are routed to
    another expert by what rounding makes of a near tie."""
    exact = load_reference(family.folder, dtype).float()
    with torch.inference_mode():
        expected = exact(torch.tensor([TOKENS])).logits[0]
    decoder = PagedDecoder(family.folder, dtype, kernels, cpu_products=cpu_products)
    error = token_error(decoder.logits((TOKENS, 0, TABLE)), expected)
    own_error = token_error(reference_logits(family.folder, TOKENS, dtype), expected)
    if kernels is TORCH_KERNELS:
        assert error <= 1.5 * own_error
    elif dtype == torch.bfloat16 and cpu_products == "auto" and multiplies_bfloat16():
        assert error <= 0.7 * own_error
    else:
        assert error <= min(2e-2, 1.5 * own_error)


def test_products_in_float32_are_a_setting(family: Reference) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, pinned = (
            PagedDecoder(family.folder, dtype, cpu_products=products).logits((TOKENS, 0, TABLE))
            for products in ("auto", "float32")
        )
        assert torch.equal(logits, pinned) is not (dtype == torch.bfloat16 and multiplies_bfloat16())


def logprob_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference of log probabilities."""
    return float((logits.log_softmax(dim=-1) - expected.log_softmax(dim=-1)).square().mean().sqrt())


def token_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """`logprob_error` of the median token."""
    return float(torch.tensor([logprob_error(*rows) for rows in zip(logits, expected, strict=True)]).median())
