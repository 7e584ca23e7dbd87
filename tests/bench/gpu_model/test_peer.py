from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from pdserve.bench.gpu_model.limits import Variant
from pdserve.bench.gpu_model.own import OwnModel, random_tokens
from pdserve.bench.gpu_model.peer import PeerFailedError, PeerModel, together_s
from pdserve.bench.gpu_model.plan import ON_CPU

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def peer(tiny: Path) -> PeerModel:
    return PeerModel(tiny, "float32", CPU, options=dict(ON_CPU.peer_options or {}))


def test_it_gives_the_answers_that_we_give(tiny: Path, peer: PeerModel) -> None:
    own = OwnModel(tiny, Variant(dtype="float32"), CPU, num_blocks=8, max_rows=1)
    for length in (5, 40):
        prompt = random_tokens(length, own.shape.vocab_size, seed=length)
        assert peer.greedy(prompt, 10) == own.greedy(prompt, 10)


def test_its_continuous_batching_decodes(peer: PeerModel) -> None:
    peer.ways.clear()
    assert peer.decode_s(2, 40, 6) > 0
    assert peer.ways == ["2 rows: continuous batching, sdpa"]
    assert peer.prefill_s(20, 2) > 0


def test_a_static_cache_does_where_that_fails(peer: PeerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(type(peer._model), "generate_batch", fails)
    instants_s = chain([0.0, 9.0, 10.0, 12.0, 20.0, 27.0], repeat(0.0))
    monkeypatch.setattr("pdserve.bench.gpu_model.peer.perf_counter", lambda: next(instants_s))
    peer.ways.clear()
    assert peer.decode_s(2, 40, 6) == 1.0  # Six tokens took 7 s and one of them 2: five steps.
    assert peer.ways == ["2 rows: continuous batching failed: no kernel; generate with a static cache, sdpa"]
    monkeypatch.setattr(type(peer._model), "generate", fails)
    with pytest.raises(PeerFailedError, match="static cache failed: no kernel"):
        peer.decode_s(2, 40, 6)


def test_a_device_that_is_lost_ends_it(peer: PeerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(*arguments: object, **options: object) -> None:
        raise torch.AcceleratorError("CUDA error: illegal address")

    monkeypatch.setattr(type(peer._model), "generate_batch", is_lost)
    with pytest.raises(torch.AcceleratorError):
        peer.decode_s(2, 40, 6)


def test_steps_count_while_all_decode() -> None:
    first = [0.0, 5.0, 6.0, 7.0, 20.0]
    second = [5.0, 6.5, 8.0]
    assert together_s([first, second]) == 1.25  # Of 1, 1, 1.5 and 1.5.
    with pytest.raises(PeerFailedError, match="never"):
        together_s([[0.0, 1.0], [2.0, 3.0]])
