from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.bench.gpu_model.run import ON_CPU
from pdserve.bench.gpu_model.steps import OwnModel, Variant, random_tokens
from pdserve.bench.gpu_model.transformers_steps import TransformersModel, together_s

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def peer(tiny: Path) -> TransformersModel:
    return TransformersModel(tiny, "float32", CPU, options=ON_CPU.peer_options)


def test_it_gives_the_answers_that_we_give(tiny: Path, peer: TransformersModel) -> None:
    own = OwnModel(tiny, Variant(dtype="float32"), CPU, num_blocks=8, max_rows=1)
    for length in (5, 40):
        prompt = random_tokens(length, own.shape.vocab_size, seed=length)
        assert peer.greedy(prompt, 10) == own.greedy(prompt, 10)


def test_its_continuous_batching_decodes(peer: TransformersModel) -> None:
    assert peer.decode_s(2, 40, 6) > 0
    assert peer.prefill_s(20, 2) > 0


def test_steps_count_while_all_decode() -> None:
    first = [0.0, 5.0, 6.0, 7.0, 20.0]
    second = [5.0, 6.5, 8.0]
    assert together_s([first, second]) == 1.25  # Of 1, 1, 1.5 and 1.5.
    with pytest.raises(RuntimeError, match="never"):
        together_s([[0.0, 1.0], [2.0, 3.0]])
