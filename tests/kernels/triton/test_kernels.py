"""Whole decoders on the kernels of a GPU, in Triton's interpreter, against transformers."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from pdserve.contracts.precision import Precision
from pdserve.kernels.kv_pool import LARGEST_VALUES
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.triton.kernels import TRITON_KERNELS
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.decoder.decoder import Decoder
from tests.kernels.padding import assert_padding_is_nobodys
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import reference_logits, rounded_reference_logits, write_family
from tests.model.decoder.test_decoder import PagedDecoder
from tests.model.quantised_checkpoints import write_mxfp4, write_quantised

NUM_BLOCKS, BLOCK_SIZE = 8, 16
TOKENS = [int(token) for token in torch.randint(0, 211, (26,), generator=torch.Generator().manual_seed(3))]
OTHER_TOKENS = TOKENS[12:0:-1]
TABLE, OTHER_TABLE = [5, 0, 7], [2, 6]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_prefill_and_decode_rows_compute_what_transformers_does(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path, family)
    config = DecoderConfig.from_folder(folder)
    config = config.at_length(config.limits(0).max_model_len)
    pool = nan_pool(config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, "float32", "hash").shape)
    decoder = Decoder(folder, config, Precision(), TRITON_KERNELS)

    def logits(*rows: tuple[list[int], int, list[int]]) -> torch.Tensor:
        """Of every new token of rows (new tokens, cached length, block table)."""
        new, cached, tables = zip(*rows, strict=True)
        metadata = AttentionMetadata.build(
            list(map(len, new)), cached, tables, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
        )
        tokens_T = torch.tensor(list(chain.from_iterable(new)))
        return decoder.logits(decoder.forward(tokens_T, pool, metadata, torch.arange(len(tokens_T))))

    prefilled = logits((TOKENS[:-1], 0, TABLE))
    both = logits((TOKENS[-1:], len(TOKENS) - 1, TABLE), (OTHER_TOKENS, 0, OTHER_TABLE))
    for computed, tokens in ((torch.cat((prefilled, both[:1])), TOKENS), (both[1:], OTHER_TOKENS)):
        expected = reference_logits(folder, tokens)
        assert (computed - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_layers_compute_what_their_rounded_weights_do(tmp_path: Path, quantization: str) -> None:
    folder, tokens_T = write_family(tmp_path, "qwen2"), torch.tensor(TOKENS[:5])
    config = DecoderConfig.from_folder(folder)
    config = config.at_length(config.limits(0).max_model_len)
    expected = rounded_reference_logits(folder, TOKENS[:5], quantization)
    decoder = Decoder(folder, config, Precision(quantization=quantization), TRITON_KERNELS)
    metadata = AttentionMetadata.build([5], [0], [[3]], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    pool = nan_pool(config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, "float32", "hash").shape)
    logits = decoder.logits(decoder.forward(tokens_T, pool, metadata, torch.arange(5)))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_experts_that_others_have_quantised(tmp_path: Path) -> None:
    """In four bits with zero points."""
    quantised, plain = write_quantised(tmp_path, "mixtral", "awq", num_hidden_layers=1)
    logits = PagedDecoder(quantised, torch.float32, TRITON_KERNELS).logits((TOKENS[:9], 0, TABLE))
    expected = reference_logits(plain, TOKENS[:9])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    quantised, plain = write_mxfp4(tmp_path, num_hidden_layers=1)
    logits = PagedDecoder(quantised, torch.float32, TRITON_KERNELS).logits((TOKENS[:9], 0, TABLE))
    expected = reference_logits(plain, TOKENS[:9])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, *LARGEST_VALUES], ids=str)
def test_padding_is_nobodys(dtype: torch.dtype) -> None:
    assert_padding_is_nobodys(TRITON_KERNELS, dtype)
