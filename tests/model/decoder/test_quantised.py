"""Checkpoints that others have quantised, against transformers with the weights that theirs stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.kernels.selection import TORCH_KERNELS
from tests.model.checkpoints import reference_logits
from tests.model.decoder.test_decoder import TABLE, TOKENS, PagedDecoder, assert_close
from tests.model.quantised_checkpoints import FORMS, write_quantised

PROMPT = TOKENS[:40]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, form: str) -> None:
    quantised, plain = write_quantised(tmp_path, family, form, num_hidden_layers=2)
    expected = reference_logits(plain, PROMPT)
    for kernels in (TORCH_KERNELS,):
        assert_close(PagedDecoder(quantised, torch.float32, kernels).logits((PROMPT, 0, TABLE)), expected)
