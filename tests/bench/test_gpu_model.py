"""Limits, shapes, and the run as a whole on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench import gpu_model
from pdserve.bench.gpu_model import (
    LLAMA,
    ON_CPU,
    Bench,
    DeviceLostError,
    OwnModel,
    Row,
    cells,
    decode_bytes,
    decode_shapes,
    kv_token_bytes,
    link_s,
    measure_handoff,
    name_of,
    noise_pool,
    num_blocks,
    plain,
    prefill_flops,
    run,
    show,
    write_weights,
)
from pdserve.bench.kernels.report import NoGpuError
from pdserve.bench.shapes import LLAMA_3_8B_CONFIG
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import StepBatch, StepHandle
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.weights.files import check_weights

SHAPE = ModelShape.from_hf_config(LLAMA_3_8B_CONFIG)
BF16, FLOAT32 = plain("bfloat16"), plain("float32")
CPU = torch.device("cpu")
LAYER_WEIGHTS = 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
TABLE = 128256 * 4096
H100_BYTES, H200_BYTES = 79 * 2**30, 139 * 2**30
MACHINE: dict[str, Any] = {
    "measured": "2026-11-22T01:00:00+00:00",
    "part": "",
    "device": "GPU",
    "hardware": "h200",
    "commit": "abc",
    "torch_matmul_tflops": 1e-3,
    "torch_copy_gbytes_per_s": 1.0,
    "peak_tflops": 989.0,
    "peak_gbytes_per_s": 4800.0,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32."""
    return write_weights(tmp_path_factory.mktemp("tiny"), ON_CPU)


def test_a_checkpoint_is_one_that_workers_accept(tiny: Path) -> None:
    config = DecoderConfig.from_folder(tiny)
    check_weights(tiny, config.shape)
    assert config.layers[0].rope.theta == 500000
    assert SHAPE.num_parameters == 8_030_261_248


def test_a_decode_step_reads_the_weights_and_the_kv() -> None:
    assert kv_token_bytes(SHAPE, BF16) == 2 * 2 * 8 * 128 * 32
    weights = 2 * (32 * LAYER_WEIGHTS + TABLE)
    assert decode_bytes(SHAPE, BF16, 64, 2000.5) == weights + 64 * 2000.5 * 131072


def test_quantised_weights_and_kv_are_fewer_bytes() -> None:
    int8_kv = replace(BF16, kv_dtype="int8")
    assert kv_token_bytes(SHAPE, int8_kv) == 2 * 8 * 32 * (128 + 4)
    int4 = replace(BF16, quantization="int4")
    packed = 32 * LAYER_WEIGHTS * (1 / 2 + 4 / 128)
    assert decode_bytes(SHAPE, int4, 0, 0) == packed + 2 * TABLE
    assert tuple(map(name_of, (BF16, int8_kv, int4))) == (
        "bfloat16 weights, bfloat16 KV",
        "bfloat16 weights, int8 KV",
        "int4 weights, bfloat16 KV",
    )


def test_a_prompt_is_products_and_causal_attention() -> None:
    # Scores and values: two products of 2 operations, of each of 32 heads of 128, with half of the keys.
    attention = 32 * 32 * 128 * 2 * 2 * 2048 * 2048 / 2
    assert prefill_flops(SHAPE, 2048) == 2 * 2048 * 32 * LAYER_WEIGHTS + 2 * TABLE + attention


def test_all_of_the_context_fits_an_h200() -> None:
    shapes = list(decode_shapes(LLAMA, SHAPE, BF16, H200_BYTES))
    assert shapes == [(1, 2048), (16, 2048), (64, 2048), (256, 2048)]
    assert num_blocks(LLAMA, shapes) == 256 * 128


def test_there_is_less_context_where_it_does_not_fit() -> None:
    *others, (_, context) = decode_shapes(LLAMA, SHAPE, BF16, H100_BYTES)
    assert others == [(1, 2048), (16, 2048), (64, 2048)]
    room = H100_BYTES - 2 * SHAPE.num_parameters - 6e9
    assert 1024 <= context < 2048
    assert context % 16 == 0
    assert room - 256 * 16 * 131072 < 256 * context * 131072 <= room
    with_int8 = decode_shapes(LLAMA, SHAPE, replace(BF16, kv_dtype="int8"), H100_BYTES)
    assert (256, 2048) in list(with_int8)


def test_a_batch_that_would_be_another_is_left_out() -> None:
    shapes = list(decode_shapes(LLAMA, SHAPE, BF16, 40 * 10**9))
    assert [rows for rows, _ in shapes] == [1, 16, 64]


def test_a_pool_holds_the_longest_prompt() -> None:
    assert num_blocks(LLAMA, []) == 8192 // 16
    assert num_blocks(replace(LLAMA, prompt_tokens=(17,)), [(3, 33)]) == 9


def bench_of(folder: Path, results: Path) -> Bench:
    document: dict[str, Any] = {**MACHINE, "clocks": {}, "notes": [], "failures": []}
    return Bench(folder, ON_CPU, CPU, document, results)


def test_every_row_is_written_as_it_comes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = Bench.write

    def count(bench: Bench) -> Path:
        file = write(bench)
        written.append(len(json.loads(file.read_text())["rows"]))
        return file

    monkeypatch.setattr(Bench, "write", count)
    bench = bench_of(tiny, tmp_path)
    bench.steps(FLOAT32, decode=True, prefill=True)
    names = ("phase", "num_rows", "context_tokens", "num_tokens")
    shapes = [tuple(row[name] for name in names) for row in bench.rows]
    assert shapes == [("decode", 1, 64, 1), ("decode", 3, 64, 3), ("prefill", 1, 40, 40)]
    assert set(written) == {1, 2, 3}
    one, three, prompt = bench.rows
    # Read by two more rows, on average over the steps.
    assert three["limit_s"] - one["limit_s"] == pytest.approx(2 * 61.5 * (2 * 2 * 2 * 16 * 4) / 1e9)
    assert prompt["limit_s"] == pytest.approx(prefill_flops(bench.config.shape, 40) / 1e9)
    assert (tmp_path / "2026-11-22_gpu_model_h200.json").exists()


def test_a_failed_shape_does_not_stop_the_others(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(OwnModel, "decode", fails)
    bench = bench_of(tiny, tmp_path)
    bench.steps(FLOAT32, decode=True, prefill=True)
    assert bench.document["failures"] == ["1 rows: out of memory", "3 rows: out of memory"]
    assert [row["phase"] for row in bench.rows] == ["prefill"]


def test_a_device_that_is_lost_ends_it(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(*arguments: Any) -> None:
        raise torch.AcceleratorError("CUDA error: illegal address")

    monkeypatch.setattr(OwnModel, "decode", is_lost)
    bench = bench_of(tiny, tmp_path)
    with pytest.raises(DeviceLostError):
        bench.steps(FLOAT32, decode=True, prefill=True)
    assert bench.document["failures"] == ["1 rows: CUDA error: illegal address"]


def test_shapes_that_do_not_fit_are_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model, "free_bytes", lambda device: 0)
    bench = bench_of(tiny, tmp_path)
    bench.steps(FLOAT32, decode=True, prefill=False)
    assert len(bench.document["notes"]) == 2
    assert all("not half of their context fits" in note for note in bench.document["notes"])
    assert not bench.rows


def row(phase: str = "decode", **changes: Any) -> Row:
    fields: Row = {
        "phase": phase,
        "precision": "bfloat16 weights, bfloat16 KV",
        "num_rows": 64,
        "context_tokens": 2048,
        "step_s": 0.01,
        "tokens_per_s": 6400,
        "limit_share": 0.8,
        "device_s": None,
        "host_s": None,
    }
    return {**fields, **changes}


def test_rows_give_shares_of_their_limit(tiny: Path, tmp_path: Path) -> None:
    bench = bench_of(tiny, tmp_path)
    bench._add("decode", BF16, 64, 2048, 64, 0.008, step_s=0.01)
    assert cells(bench.rows[0]) == cells(row())


def test_a_table_for_each_phase() -> None:
    rows = [row("prefill"), row(num_rows=256), row(device_s=0.009, host_s=0.001)]
    document = {**MACHINE, "torch_matmul_tflops": 700.0, "torch_copy_gbytes_per_s": 4000.0}
    extra = {"clocks": {"decoding": {"clocks.sm": "1980 MHz"}}, "notes": ["a note"], "failures": ["broken"]}
    lines: list[str] = []
    show({**document, **extra, "rows": rows}, lines.append)
    assert lines[0] == (
        "GPU: torch's large product 700 TFLOP/s, its large copy 4000 GB/s; by its data sheet 989 and 4800"
    )
    assert [line.split(",")[0] for line in lines if line.endswith((", a step", ", a prompt"))] == ["decode", "prefill"]
    assert lines[3].split()[-5:] == ["10.000", "6400", "80.0%", "9.000", "1.000"]
    assert lines[4].split()[-2:] == ["-", "-"]
    assert lines[-3:] == ["decoding: clocks.sm 1980 MHz", "a note", "FAILED: broken"]


def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    printed: list[str] = []
    assert run(printed.append, device="cpu", folder=tmp_path) == 0
    document = json.loads(next(tmp_path.glob("*_gpu_model_cpu.json")).read_text())
    assert document["torch"] == torch.__version__
    assert not document["failures"]
    shapes = [(row["phase"], row["num_rows"]) for row in document["rows"]]
    assert shapes == [("decode", 1), ("decode", 3), ("prefill", 1), ("handoff", 1)]
    assert printed[1] == "decode, a step"


@pytest.mark.parametrize("only", ["decode", "handoff"])
def test_a_part_of_it_with_quantised_ones(tmp_path: Path, only: str) -> None:
    run(lambda line: None, device="cpu", folder=tmp_path, only=only, quantised=only == "decode")
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert {row["phase"] for row in rows} == {only}
    assert len({row["precision"] for row in rows}) == (5 if only == "decode" else 1)


def test_without_a_gpu_there_is_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoGpuError, match="--device cpu"):
        run(lambda line: None, folder=Path())


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_steps_are_timed_as_the_step_loop_submits_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    batches: list[StepBatch] = []
    submit = ModelExecutor.submit

    def listen(executor: ModelExecutor, batch: StepBatch) -> StepHandle:
        batches.append(batch)
        return submit(executor, batch)

    monkeypatch.setattr(ModelExecutor, "submit", listen)
    model = OwnModel(tiny, replace(FLOAT32, kv_dtype=kv_dtype), CPU, num_blocks=15, max_rows=3)
    seconds = model.decode(3, 80, 5)
    assert min(seconds) > 0
    assert [len(batch.rows) for batch in batches] == [3] * 9
    assert [batch.rows[2].cached_length for batch in batches] == list(range(71, 80))
    assert [row.previous_row for row in batches[1].rows] == [0, 1, 2]
    used = [block for row in batches[0].rows for block in row.block_table]
    assert sorted(used) == list(range(15))
    assert used != sorted(used)
    batches.clear()
    assert min(model.prefill(40, 3)) > 0
    assert [batch.num_new_tokens for batch in batches] == [40] * 7
    model.step_once(2, 17)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_noise_is_finite_and_not_zero(dtype: str) -> None:
    layout = KvLayout(
        num_blocks=40, num_kv_heads=2, num_layers=2, block_size=16, head_dim=16, dtype=dtype, model_hash=""
    )
    pool = noise_pool(layout, CPU)
    values = pool.values.float()
    assert values.isfinite().all()
    assert values.std() > 0.1
    if pool.scales is not None:
        assert (values * pool.scales[..., None]).abs().max() <= 1


LAYOUT = KvLayout(
    num_blocks=5, num_kv_heads=2, num_layers=2, block_size=16, head_dim=16, dtype="float32", model_hash="bench"
)


def test_kv_goes_from_one_pool_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    num_downloads = []
    download = HostStaging.copy_d2h

    def count(staging: HostStaging, block_ids: list[int], generations: list[int]) -> None:
        num_downloads.append(sum(staging._generations.get(block) != generations[block] for block in block_ids))
        download(staging, block_ids, generations)

    monkeypatch.setattr(HostStaging, "copy_d2h", count)
    seconds = measure_handoff(LAYOUT, CPU)
    assert min(seconds) > 0
    assert num_downloads == [5] * 6  # None is spared because it was copied before.


def test_other_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStaging, "copy_h2d", lambda staging, block_ids: None)
    with pytest.raises(RuntimeError, match="not what was granted"):
        measure_handoff(LAYOUT, CPU)


def test_copies_leave_what_was_there() -> None:
    blocks = torch.randint(0, 255, (3, 40), dtype=torch.uint8)
    before = blocks.clone()
    assert link_s(blocks) > 0
    assert torch.equal(blocks, before)
