"""A profile runs the real executor on real weights or on random ones, and keeps to its budget."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import StepBatch, StepHandle, StepOutput
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.torch.experts import Routes, route
from pdserve.model.config.decoder_config import DecoderConfig, parse_config
from pdserve.model.cost.cost_model import num_experts_touched
from pdserve.model.cost.profiling import (
    MIN_REPEATS,
    ProfiledModel,
    measure_model,
    measure_steps,
    profiled_executor,
)
from pdserve.model.cost.step_grid import Step, StepKind, StepRow
from pdserve.model.decoder import decoder
from pdserve.model.weights.files import check_weights
from pdserve.model.weights.random_checkpoint import write_random_weights
from tests.model.checkpoints import FAMILIES, write_checkpoint, write_family
from tests.model.planned_configs import QWEN3_30B_A3B
from tests.model.quantised_checkpoints import FORMS, write_mxfp4, write_quantised

LAYOUT = KvLayout(
    num_blocks=64, num_kv_heads=1, num_layers=3, block_size=16, head_dim=8, dtype="float32", model_hash="profile"
)


def prefill(num_tokens: int) -> Step:
    return Step((StepRow(num_tokens, 0),))


def decode(batch: int) -> Step:
    return Step((StepRow(1, 10),) * batch)


class TimedStep:
    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s

    def result(self) -> StepOutput:
        return StepOutput(step_id=0, sampled=[], duration_s=self._duration_s)


class TimedExecutor:
    """Lasts ``token_s`` for each new token of a step."""

    pipeline_depth = 1

    def __init__(self, token_s: float) -> None:
        self.batches: list[StepBatch] = []
        self._token_s = token_s

    def submit(self, batch: StepBatch) -> StepHandle:
        self.batches.append(batch)
        duration_s = self._token_s * batch.num_new_tokens
        time.sleep(duration_s)
        return TimedStep(duration_s)

    def close(self) -> None: ...


def test_what_the_budget_has_no_time_for_is_left_out() -> None:
    executor = TimedExecutor(token_s=0.01)
    steps = [decode(1), decode(2), decode(4), decode(32), decode(64)]
    spent: list[float] = []
    measured, left_out = measure_steps(executor, steps, LAYOUT, 0.8, lambda share, _: spent.append(share))
    assert [entry.step for entry in measured] == steps[:4]
    assert left_out == steps[4:]
    assert [entry.median_s for entry in measured] == pytest.approx([0.01, 0.02, 0.04, 0.32])
    assert all(entry.num_repeats >= MIN_REPEATS and entry.spread == 0 for entry in measured)
    assert spent == sorted(spent)
    assert spent[-1] == 1


def test_rounds_go_through_all_steps_in_changing_order() -> None:
    executor = TimedExecutor(token_s=1e-5)
    steps = [prefill(num_tokens) for num_tokens in range(2, 10)]
    measured, left_out = measure_steps(executor, steps, LAYOUT, 0.3, lambda *_: None)
    assert not left_out
    repeats = [entry.num_repeats for entry in measured]
    assert max(repeats) - min(repeats) <= 1
    first, *sizes = (batch.num_new_tokens for batch in executor.batches)
    assert first == sizes[0], "what only the first step takes is not timed"
    assert sizes[:8] == sorted(sizes[:8])
    assert sorted(sizes[8:16]) == sorted(sizes[16:24]) == sizes[:8]
    assert sizes[8:16] != sizes[16:24]


def test_short_decode_steps_follow_others_of_the_same() -> None:
    class CachingExecutor(TimedExecutor):
        """Steps like the one before last half as long."""

        def submit(self, batch: StepBatch) -> StepHandle:
            is_cold = not self.batches or self.batches[-1] is not batch
            self.batches.append(batch)
            duration_s = 1e-4 * batch.num_new_tokens
            return TimedStep(duration_s if is_cold else duration_s / 2)

    steps = [decode(1), prefill(8), decode(16), prefill(32), decode(400)]
    measured, _ = measure_steps(CachingExecutor(0.0), steps, replace(LAYOUT, num_blocks=400), 0.1, lambda *_: None)
    assert [entry.median_s for entry in measured] == pytest.approx([5e-5, 8e-4, 8e-4, 3.2e-3, 0.04])


def test_rows_of_a_step_share_no_block() -> None:
    executor = TimedExecutor(token_s=0.0)
    step = Step((StepRow(20, 5), StepRow(1, 31), StepRow(1, 32)))
    measure_steps(executor, [step], LAYOUT, 0.01, lambda *_: None)
    rows = executor.batches[0].rows
    tables = [list(row.block_table) for row in rows]
    assert tables == [[0, 1], [2, 3], [4, 5, 6]]
    assert [row.num_new_tokens for row in rows] == [20, 1, 1]


@pytest.mark.parametrize(
    ("family", "form"),
    [*((family, "") for family in FAMILIES), *(("llama", form) for form in FORMS), ("gpt_oss", "mxfp4")],
)
def test_random_weights_are_of_the_model(family: str, form: str, tmp_path: Path) -> None:
    if form == "mxfp4":
        folder, _ = write_mxfp4(tmp_path)
    else:
        folder = write_quantised(tmp_path, family, form)[0] if form else write_family(tmp_path, family)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = DecoderConfig.from_folder(folder)
    write_random_weights(folder / "model.safetensors", config.shape, "bfloat16")
    check_weights(folder, config.shape)


@pytest.mark.parametrize(("has_weights", "form"), [(True, ""), (False, ""), (True, "w8a8-int8")])
def test_a_model_is_measured(tmp_path: Path, has_weights: bool, form: str) -> None:
    folder = write_quantised(tmp_path, "llama", form)[0] if form else write_checkpoint(tmp_path)
    if not has_weights:
        (folder / "model.safetensors").unlink()
    affinity = os.sched_getaffinity(0)
    model = ProfiledModel(
        name="small",
        folder=folder,
        config=DecoderConfig.from_folder(folder),
        has_weights=has_weights,
        cores=(min(affinity),),
        kv_memory_bytes=2**22,
        max_batch_tokens=64,
        max_batch_size=4,
        block_size=8,
    )
    try:
        measured = measure_model(model, 2.0, lambda *_: None)
    finally:
        os.sched_setaffinity(0, affinity)
        use_threads(1)
    assert {entry.step.kind for entry in measured.steps} == set(StepKind)
    assert {entry.num_layers for entry in measured.steps} == {2, 1}
    assert all(entry.median_s > 0 and entry.num_repeats >= MIN_REPEATS for entry in measured.steps)
    assert measured.host_bandwidth > 1e6
    assert not any(folder.glob("pdserve-profile*"))


def test_decode_rows_touch_as_many_experts_as_the_cost_model_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(*arguments: Any, **options: Any) -> Routes:
        routes = route(*arguments, **options)
        touched.append(len({*routes.experts.flatten().tolist()}))
        return routes

    touched: list[int] = []
    monkeypatch.setattr(decoder, "route", count)
    changes = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "num_hidden_layers": 6}
    changes |= {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024, "max_position_embeddings": 512}
    model = ProfiledModel(
        name="random",
        folder=tmp_path,
        config=parse_config({**QWEN3_30B_A3B, **changes}, {}),
        has_weights=False,
        cores=(min(os.sched_getaffinity(0)),),
        kv_memory_bytes=2**26,
    )
    affinity = os.sched_getaffinity(0)
    try:
        with profiled_executor(model, 64) as (executor, layout):
            measure_steps(executor, [Step((StepRow(1, 32),) * 16)], layout, 0.01, lambda *_: None)
    finally:
        os.sched_setaffinity(0, affinity)
        use_threads(1)
    assert fmean(touched) == pytest.approx(num_experts_touched(16, 64, 4), rel=0.1)


def test_memory_too_small_for_blocks_is_said(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    model = ProfiledModel(
        name="small",
        folder=folder,
        config=DecoderConfig.from_folder(folder),
        has_weights=True,
        cores=(0,),
        kv_memory_bytes=10,
    )
    with pytest.raises(ValueError, match="no two blocks"):
        model.limits()
