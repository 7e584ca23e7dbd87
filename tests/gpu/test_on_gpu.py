"""The GPU path on a GPU: the files of this folder, and the tests that run in Triton's interpreter elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.on_gpu import DEADLINE_S, FILES, ROOT, failures

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(DEADLINE_S + 60),
]

INTERPRETED = {
    "attention": (),
    "decode_attention": (),
    "experts": ("test_bytes_are_those_of_all_experts", "test_launches_depend_on_shapes_alone"),
    "gate": (),
    "norm": (),
    "prefill_attention": (),
    "quantized_matmul": (
        "test_weights_beyond_32_bits",
        "test_a_packed_matrix",
        "test_products_are_those_of_the_cpu",
    ),
    "rope": (),
    "sampling": ("test_tokens_with_penalties_and_truncation_are_those_of_torch", "test_rows_beyond_32_bits"),
}
"""Tests of kernels, by the end of their file's name, and which of them only the interpreter can run."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_with_the_shapes_of_serving(path: Path) -> None:
    assert not (output := failures(path)), output


@pytest.mark.parametrize("kernel", INTERPRETED)
def test_as_in_the_interpreter(kernel: str) -> None:
    output = failures(ROOT / f"tests/kernels/triton/test_{kernel}.py", INTERPRETED[kernel])
    assert not output, output
