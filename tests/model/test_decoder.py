"""The decoder against transformers, on random checkpoints of every supported shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import DecoderKernels, Linear
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.kernels.torch_dense import matrix_dtype
from pdserve.model.config import DecoderConfig
from pdserve.model.decoder import Decoder, weight_bytes
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import LLAMA3_ROPE, VARIANTS, reference_logits, write_checkpoint

NUM_BLOCKS, BLOCK_SIZE = 24, 16
TOKENS = [int(token) for token in torch.randint(0, 211, (100,), generator=torch.Generator().manual_seed(3))]
OTHER_TOKENS = TOKENS[::-1]
TABLE, OTHER_TABLE = [9, 2, 17, 0, 5, 21, 13], [1, 22, 3, 20, 7, 18, 11]


class PagedDecoder:
    """A decoder with a pool full of NaN, run one batch at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, kernels: DecoderKernels = CPU_KERNELS) -> None:
        config = DecoderConfig.from_folder(folder)
        layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, str(dtype).removeprefix("torch."), "hash")
        self.pool = nan_pool(layout.shape, dtype)
        self.model = Decoder(folder, config, dtype, kernels)

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


def assert_close(logits: torch.Tensor, expected: torch.Tensor, relative: float = 1e-4) -> None:
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= relative * expected.abs().max()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, **VARIANTS[variant])
    logits = PagedDecoder(folder, torch.float32).logits((TOKENS, 0, TABLE))
    assert_close(logits, reference_logits(folder, TOKENS))


def test_logits_far_into_the_context(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, rope_parameters=LLAMA3_ROPE)
    tokens = (TOKENS * 4)[:380]
    logits = PagedDecoder(folder, torch.float32).logits((tokens, 0, list(range(NUM_BLOCKS))))
    assert_close(logits, reference_logits(folder, tokens))


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_shard_size="100KB")
    assert not (folder / "model.safetensors").exists()
    assert_close(PagedDecoder(folder, torch.float32).logits((TOKENS, 0, TABLE)), reference_logits(folder, TOKENS))


def test_on_torch_kernels(plain: Path) -> None:
    logits = PagedDecoder(plain, torch.float32, TORCH_KERNELS).logits((TOKENS, 0, TABLE))
    assert_close(logits, reference_logits(plain, TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])
def test_half_precision_is_close(plain: Path, kernels: DecoderKernels, dtype: torch.dtype) -> None:
    logits = PagedDecoder(plain, dtype, kernels).logits((TOKENS, 0, TABLE))
    assert_close(logits, reference_logits(plain, TOKENS), relative=0.05)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunked_prefill_is_the_whole(plain: Path, chunk: int) -> None:
    decoder = PagedDecoder(plain, torch.float32)
    chunks = [decoder.logits((TOKENS[start : start + chunk], start, TABLE)) for start in range(0, len(TOKENS), chunk)]
    assert_close(torch.cat(chunks), reference_logits(plain, TOKENS))


def test_a_prefix_computed_for_another_sequence_serves_this_one(plain: Path) -> None:
    decoder = PagedDecoder(plain, torch.float32)
    decoder.logits((TOKENS, 0, TABLE))
    fork = TOKENS[:48] + OTHER_TOKENS[:40]
    logits = decoder.logits((fork[48:], 48, TABLE[:3] + OTHER_TABLE[3:]))
    assert_close(logits, reference_logits(plain, fork)[48:])


def test_prefill_and_decode_rows_in_one_batch(plain: Path) -> None:
    decoder = PagedDecoder(plain, torch.float32)
    decoder.logits((TOKENS[:-1], 0, TABLE))
    decoder.logits((OTHER_TOKENS[:20], 0, OTHER_TABLE))
    logits = decoder.logits((TOKENS[-1:], len(TOKENS) - 1, TABLE), (OTHER_TOKENS[20:], 20, OTHER_TABLE))
    assert_close(logits[:1], reference_logits(plain, TOKENS)[-1:])
    assert_close(logits[1:], reference_logits(plain, OTHER_TOKENS)[20:])


def test_only_rows_that_sample_reach_the_output_projection(plain: Path) -> None:
    decoder = PagedDecoder(plain, torch.float32)
    every = decoder.logits((TOKENS, 0, TABLE))
    metadata = AttentionMetadata.build([100], [0], [TABLE], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    tokens_T = torch.tensor(TOKENS)
    assert_close(decoder.some_logits(tokens_T, metadata, torch.tensor([99, 3])), every[[99, 3]])
    none = decoder.some_logits(tokens_T, metadata, torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 211)


def test_weights_of_another_shape_are_refused(plain: Path, tmp_path: Path) -> None:
    narrow = write_checkpoint(tmp_path, intermediate_size=96)
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight has shape \[112, 64\], not \[96, 64\]"
    ):
        Decoder(plain, DecoderConfig.from_folder(narrow), torch.float32, CPU_KERNELS)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_are_those_that_are_held(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=tied)
    config = DecoderConfig.from_folder(folder)
    num_bytes = 0

    def counting(weight_FE: torch.Tensor, bias_F: torch.Tensor | None = None, quantization: str = "") -> Linear:
        nonlocal num_bytes
        held = CPU_KERNELS.pack_linear(weight_FE, bias_F, quantization)
        num_bytes += held.num_bytes
        return held

    Decoder(folder, config, dtype, CPU_KERNELS._replace(pack_linear=counting))
    num_norm_weights = (2 * config.num_layers + 1) * config.hidden_size
    assert weight_bytes(config, dtype) == num_bytes + num_norm_weights * dtype.itemsize


def test_matrices_are_held_in_a_dtype_that_this_cpu_multiplies() -> None:
    assert matrix_dtype(torch.float32) is torch.float32
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert matrix_dtype(torch.bfloat16) is (torch.bfloat16 if native else torch.float32)
