from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.bench import layer_claims
from pdserve.bench.layer_claims import errors, gather_tokens, layer_ms, overlap_bound, pruned
from pdserve.model.cost.hardware import hardware

H100 = hardware("h100-sxm")


def test_the_larger_two_of_four_inputs_are_kept() -> None:
    weight = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.5, 0.0, -0.25, 8.0]])
    assert pruned(weight).tolist() == [[0, -4, 3, 0, 0.5, 0, 0, 8]]
    found = {name: each["error"] for name, each in errors().items()}
    assert found["int8"] < found["int4"] < found["2:4 in bfloat16"] < 0.5


def test_only_steps_with_several_bottlenecks_gain_by_overlap() -> None:
    assert overlap_bound(H100, 1, 16, 512) == 1
    mixed = overlap_bound(H100, 1, 128, 4096, 2048)
    assert 1.2 < mixed < 2
    assert overlap_bound(H100, 4, 128, 4096, 2048) > mixed  # all-reduces may hide as well


def test_twice_the_bandwidth_needs_about_half_the_tokens() -> None:
    tokens = [gather_tokens(H100, 8, bandwidth) for bandwidth in (1e11, 2e11)]
    assert tokens[0] / tokens[1] == pytest.approx(2, rel=0.1)
    assert gather_tokens(H100, 2, 1e11) < tokens[0]
    assert gather_tokens(replace(H100, memory_bandwidth=1e9), 2, 1e11) == 1  # computing is slow enough


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_each_case_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_claims, "NUM_OUTPUTS", 256)
    found = layer_ms(1)
    assert [*found] == [*layer_claims.NUM_ROWS]
    assert "two halves" in found[16]
    assert min(min(times.values()) for times in found.values()) >= 0
