"""The benchmark of whole steps, on a small model and a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve.bench import whole_model
from pdserve.bench.whole_model import BLOCK_SIZE, LLAMA_3_1_8B, Model, fitting, main, show, time_all
from pdserve.kernels.cpu_threads import use_threads
from pdserve.kernels.kv_pool import KvPool
from pdserve.model.config import parse_config
from pdserve.model.gpu_executor import GpuExecutor
from pdserve.model.profiling import write_random_weights


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The model is too small to share, and threads that spin on busy cores are far slower."""
    num_threads = torch.get_num_threads()
    use_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
def test_steps_are_timed_two_deep_and_held_against_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, "_NUM_STEPS", 6)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 300}
    config = parse_config({**LLAMA_3_1_8B, **small, **heads}, {})
    write_random_weights(tmp_path / "model.safetensors", config, "bfloat16")
    layout = config.kv_layout(13, BLOCK_SIZE, "bfloat16", "random")
    pool = KvPool(torch.zeros(layout.pool_bytes, dtype=torch.uint8), layout.shape, torch.bfloat16)
    executor = GpuExecutor(
        folder=tmp_path, config=config, layout=layout, pool=pool, dtype="bfloat16", max_captured_rows=2
    )
    model = Model(config, layout, "none", bytes_per_s=1e9, flop_per_s=1e12)
    assert fitting([1, 2, 5], 40, layout) == [1, 2]
    timed = time_all(executor, model, [1, 2, 5], 40, [30])
    assert [entry.name for entry in timed] == [
        "decode 1 x 40",
        "decode 1 x 40, drawn",
        "decode 2 x 40",
        "decode 2 x 40, drawn",
        "prefill 30",
    ]
    assert all(entry.step_s > 0 and entry.device_s > 0 for entry in timed)
    lines: list[str] = []
    show(timed, lines.append)
    assert len(lines) == 6


def test_limits_are_those_of_reading_and_of_products() -> None:
    config = parse_config(LLAMA_3_1_8B, {})
    layout = config.kv_layout(1, BLOCK_SIZE, "bfloat16", "random")
    model = Model(config, layout, "none", bytes_per_s=1e12, flop_per_s=1e15)
    # 6.98e9 parameters in the layers, 0.525e9 in a table, 2 bytes each; 131072 bytes of KV a token.
    assert model.decode_limit_s(1, 0) == pytest.approx(2 * (6.98e9 + 0.525e9) / 1e12, rel=1e-3)
    assert model.decode_limit_s(64, 2048) - model.decode_limit_s(1, 0) == pytest.approx(64 * 2048 * 131072 / 1e12)
    products, attention = 2 * 6.98e9 * 8192, 2 * 32 * 4096 * 8192**2
    assert model.prefill_limit_s(8192) == pytest.approx((products + attention) / 1e15, rel=1e-3)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["whole_model"])
    assert main() == 1
    assert "no GPU here" in capsys.readouterr().err
