"""Ranks that share a model compute what one rank computes: tokens, log probabilities and KV."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, StepBatch, StepOutput, StepRow
from pdserve.kernels.cpu.ranks import RankMemory
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.torch import ranks as process_group
from pdserve.kernels.torch.ranks import create_meeting_file
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sharding import Place, shard_of
from pdserve.model.decoder.ranks import Ranks, ranks_of_devices
from pdserve.model.executors import rank_model
from pdserve.model.executors.block_copies import copy_blocks
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.executors.rank_model import Begun, Computed, PackedStep, RankModel
from pdserve.model.executors.step_inputs import StepShape
from tests.model.checkpoints import FAMILIES, write_checkpoint, write_family
from tests.model.late_queue import LateQueue
from tests.model.quantised_checkpoints import write_mxfp4, write_quantised

PROMPTS = [[5, 17, 101, 33, 54, 2, 90, 7, 61], [200, 3], [44] * 16]
TABLES = [[3, 20, 7], [1, 2, 23], [10, 11, 22]]
SAMPLING = [
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(temperature=1.3, seed=7, top_p=0.8, top_k=40),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.4),
]
NUM_STEPS = 8
NUM_BLOCKS = 24
"""Of each micro-batch."""


@contextmanager
def running_ranks(
    folder: Path,
    num_ranks: int,
    precision: Precision,
    *,
    num_stages: int = 1,
    kv_dtype: str = "float32",
    max_captured_rows: int = 0,
    num_swap_slots: int | None = None,
    expert_parallel: bool = False,
) -> Iterator[tuple[ModelExecutor, KvPool]]:
    """The executor of ``num_stages`` stages of ``num_ranks`` ranks, each in a thread, and the leader's pool.

    With ``num_swap_slots`` every rank has a pool and host slots of its own, as on a GPU; else all share a pool.
    """
    config = DecoderConfig.from_folder(folder)
    layout: KvLayout = config.kv_layout(num_stages * NUM_BLOCKS, 8, kv_dtype, "hash")
    memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8)
    rank_memory = RankMemory(num_ranks, num_stages, 1 << 18)
    shared_fd = rank_memory.create() if num_swap_slots is None else create_meeting_file()
    num_ranks_in_all = num_ranks * num_stages
    steps: list[queue.SimpleQueue[PackedStep | None]] = [queue.SimpleQueue() for _ in range(1, num_ranks_in_all)]
    failures: list[BaseException] = []

    def pool_of(rank: int) -> KvPool:
        shard = shard_of(config.shape, Place.of(rank, num_ranks, num_stages))
        if num_swap_slots is None:
            return KvPool(memory, layout.shape, getattr(torch, kv_dtype), shard.kv_heads)
        own = replace(layout, num_kv_heads=len(shard.kv_heads), num_layers=len(shard.layers))
        own_memory = torch.zeros(own.pool_bytes, dtype=torch.uint8)
        return KvPool(own_memory, own.shape, getattr(torch, kv_dtype), first_layer=shard.layers.start)

    def ranks_of(rank: int) -> Ranks:
        place = Place.of(rank, num_ranks, num_stages, expert_parallel)
        if num_swap_slots is not None:
            with patch.object(process_group, "_START_TIMEOUT", timedelta(seconds=20)):  # where a rank has failed
                return ranks_of_devices(place, shared_fd, memory.device)
        group = rank_memory.group(shared_fd, place.stage, place.tensor_rank) if num_ranks > 1 else None
        return Ranks(place, group, partial(rank_memory.channels, shared_fd) if num_stages > 1 else None)

    def arguments(rank: int) -> dict[str, object]:
        return {
            "folder": folder,
            "config": config,
            "layout": layout,
            "pool": pool_of(rank),
            "precision": precision,
            "ranks": ranks_of(rank),
            "num_swap_slots": num_swap_slots or 0,
            "max_captured_rows": max_captured_rows,
        }

    def follow(rank: int) -> None:
        try:
            model = RankModel(**arguments(rank))  # type: ignore[arg-type]
            while (step := steps[rank - 1].get()) is not None:
                model.follow(PackedStep.decode(step.encode()))
        except BaseException as error:
            failures.append(error)

    def send(step: PackedStep) -> None:
        for each in steps:
            each.put(step)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, num_ranks_in_all)]
    for thread in threads:
        thread.start()
    leader = arguments(0)
    try:
        yield ModelExecutor(**leader, send=send), leader["pool"]  # type: ignore[arg-type, misc]
    finally:
        for each in steps:
            each.put(None)
        for thread in threads:
            thread.join()
        os.close(shared_fd)
    assert not failures


def answer(executor: ModelExecutor, micro_batch: int = 0) -> list[StepOutput]:
    """Prefill in two steps, then decode; row 0 requests prompt log probabilities, row 2 has penalties."""
    depth = executor.pipeline_depth
    tables = [[micro_batch * NUM_BLOCKS + block for block in table] for table in TABLES]
    first = [
        StepRow(
            sequence_id=index,
            tokens=prompt if index else prompt[:4],
            cached_length=0,
            block_table=tables[index],
            sample=SAMPLING[index] if index else None,
            sample_position=len(prompt),
            history=prompt if SAMPLING[index].has_penalties else (),
            num_prompt_tokens=len(prompt),
            prompt_targets=() if index else prompt[1:5],
            num_prompt_logprobs=2,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    outputs = [executor.submit(StepBatch(step_id=0, rows=first)).result()]
    known = [prompt.copy() for prompt in PROMPTS]
    for row, sampled in enumerate(outputs[0].sampled):
        if sampled is not None:
            known[row].append(sampled.token)
    handles = []
    for step in range(1, NUM_STEPS):
        is_late = step > 1 and depth > 1
        rows = []
        for index in range(3):
            cached = (4 if step == 1 else len(PROMPTS[0]) + step - 2) if index == 0 else len(PROMPTS[index]) + step - 1
            tokens = known[index][cached:]
            rows.append(
                StepRow(
                    sequence_id=index,
                    tokens=() if is_late else tokens,
                    previous_row=index if is_late else -1,
                    cached_length=cached,
                    block_table=tables[index],
                    sample=SAMPLING[index],
                    sample_position=cached + (1 if is_late else len(tokens)),
                    history=known[index].copy() if SAMPLING[index].has_penalties else (),
                    num_prompt_tokens=len(PROMPTS[index]),
                )
            )
        handles.append(executor.submit(StepBatch(step_id=step, rows=rows)))
        if len(handles) == depth or step + 1 == NUM_STEPS:
            while handles:
                output = handles.pop(0).result()
                outputs.append(output)
                for row, sampled in enumerate(output.sampled):
                    assert sampled is not None
                    known[row].append(sampled.token)
                if step + 1 < NUM_STEPS:
                    break
    return outputs


def assert_equal(outputs: list[StepOutput], expected: list[StepOutput]) -> None:
    assert len(outputs) == len(expected)
    for output, other in zip(outputs, expected, strict=True):
        tokens, others = ([each and each.token for each in one.sampled] for one in (output, other))
        assert tokens == others
        probabilities, wanted = (
            [each.logprob for entries in one.prompt_logprobs.values() for each in entries]
            + [each.logprobs.logprob for each in one.sampled if each and each.logprobs]
            for one in (output, other)
        )
        assert probabilities == pytest.approx(wanted, abs=1e-4)


def answer_twice(executor: ModelExecutor) -> list[list[StepOutput]]:
    """`answer` of two micro-batches at the same time."""
    with ThreadPoolExecutor(2) as threads:
        executors = executor, executor.for_micro_batch(1, None)
        return list(threads.map(answer, executors, range(2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path, family)
    with running_ranks(folder, 1, Precision(dtype="float32")) as (executor, _):
        expected = answer(executor)
    with running_ranks(folder, 2, Precision(dtype="float32")) as (executor, _):
        assert_equal(answer(executor), expected)
    num_stages = DecoderConfig.from_folder(folder).shape.num_layers
    with running_ranks(folder, 1, Precision(dtype="float32"), num_stages=num_stages) as (executor, _):
        for outputs in answer_twice(executor):
            assert_equal(outputs, expected)
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        with running_ranks(folder, 2, Precision(dtype="float32"), expert_parallel=True) as (executor, _):
            assert_equal(answer(executor), expected)


@pytest.mark.parametrize(("quantization", "kv_dtype"), [("none", "float32"), ("int8", "int8")])
def test_stages_of_several_ranks_write_the_kv_of_one(quantization: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=quantization == "none")
    precision = Precision(dtype="float32", quantization=quantization)
    with running_ranks(folder, 1, precision, kv_dtype=kv_dtype) as (executor, pool):
        expected, one = answer(executor), pool.blocks.clone()
    with running_ranks(folder, 2, precision, num_stages=2, kv_dtype=kv_dtype) as (executor, pool):
        for micro_batch, outputs in enumerate(answer_twice(executor)):
            assert_equal(outputs, expected)
            if kv_dtype == "float32":
                blocks = pool.blocks[micro_batch * NUM_BLOCKS :][:NUM_BLOCKS]
                torch.testing.assert_close(blocks.view(torch.float32), one.view(torch.float32), atol=1e-4, rtol=1e-4)


def test_a_step_is_over_once_the_last_stage_has_computed_it(tmp_path: Path) -> None:
    """A chunk that samples nothing, whose KV another worker may pull at once."""
    folder = write_checkpoint(tmp_path)
    chunk = StepRow(sequence_id=0, tokens=PROMPTS[0], cached_length=0, block_table=[3, 4], sample=None)
    with running_ranks(folder, 1, Precision(dtype="float32"), num_stages=2) as (executor, pool):
        for step_id in range(20):
            pool.blocks.zero_()
            executor.submit(StepBatch(step_id=step_id, rows=[chunk])).result()
            first = pool.blocks[3].view(torch.float32).view(pool.shape[1:])
            assert first.abs().amin(-1).all(), "every layer has keys and values of eight tokens"


def test_a_micro_batch_enters_the_stage_while_another_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, end = threading.Barrier(2, timeout=10), RankModel.end

    def end_together(model: RankModel, step: PackedStep, begun: Begun | None) -> Computed:
        if model.place.rank == 0:
            both.wait()
        return end(model, step, begun)

    monkeypatch.setattr(RankModel, "end", end_together)
    with running_ranks(write_checkpoint(tmp_path), 1, Precision(dtype="float32"), num_stages=2) as (executor, _):
        first, second = answer_twice(executor)
        assert_equal(second, first)


@pytest.mark.parametrize(("quantization", "kv_dtype"), [("none", "float32"), ("int8", "int8")])
def test_more_ranks_than_kv_heads(quantization: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_key_value_heads=2)
    precision = Precision(dtype="float32", quantization=quantization)
    results, pools = [], []
    for num_ranks in (1, 4):
        with running_ranks(folder, num_ranks, precision, kv_dtype=kv_dtype) as (executor, pool):
            results.append(answer(executor))
            pools.append(pool.blocks.clone())
    assert_equal(results[1], results[0])
    if kv_dtype == "float32":
        one, four = (blocks.view(torch.float32) for blocks in pools)
        torch.testing.assert_close(four, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("quantization", "changes"),
    [
        ("int4", {"head_dim": 64, "intermediate_size": 256}),
        ("none", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
    ids=["int4 groups of the whole matrix", "biases added once"],
)
def test_options(quantization: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **changes)
    results = []
    for num_ranks in (1, 2):
        with running_ranks(folder, num_ranks, Precision(dtype="float32", quantization=quantization)) as (executor, _):
            results.append(answer(executor))
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("form", ["w4a16", "w8a8-int8-asymmetric", "fp8-tensor", "fp8-block", "gptq-v2", "awq"])
def test_checkpoints_that_others_quantised(form: str, tmp_path: Path) -> None:
    """Heads, features and blocks of ranks begin within words and blocks of the file."""
    folder, _ = write_quantised(tmp_path, "llama", form)
    results = []
    for num_ranks in (1, 2):
        with running_ranks(folder, num_ranks, Precision(dtype="float32")) as (executor, _):
            results.append(answer(executor))
    assert_equal(results[1], results[0])


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Ranks share features, and whole experts."""
    folder, _ = write_mxfp4(tmp_path)
    with running_ranks(folder, 1, Precision(dtype="float32")) as (executor, _):
        expected = answer(executor)
    for expert_parallel in (False, True):
        with running_ranks(folder, 2, Precision(dtype="float32"), expert_parallel=expert_parallel) as (executor, _):
            assert_equal(answer(executor), expected)


def test_tokens_that_only_devices_know_reach_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path)
    with running_ranks(folder, 1, Precision(dtype="float32")) as (executor, _):
        expected = answer(executor)
    monkeypatch.setattr(rank_model, "select_queue", lambda device: LateQueue())
    for max_captured_rows in (0, 4):
        with running_ranks(folder, 2, Precision(dtype="float32"), max_captured_rows=max_captured_rows) as (executor, _):
            assert_equal(answer(executor), expected)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "kv_dtype"),
    [(2, 1, "float32"), (4, 1, "float32"), (1, 3, "int8"), (2, 2, "float32")],
)
def test_ranks_with_pools_of_their_own(
    num_ranks: int, num_stages: int, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with process groups: two KV heads, one for each rank or for two."""
    folder = write_checkpoint(tmp_path, num_key_value_heads=2, num_hidden_layers=6)
    precision = Precision(dtype="float32")
    with running_ranks(folder, 1, precision, kv_dtype=kv_dtype) as (executor, _):
        expected = answer(executor)
    monkeypatch.setattr(rank_model, "select_queue", lambda device: LateQueue())
    end = RankModel.end

    def end_late(model: RankModel, step: PackedStep, begun: Begun | None) -> Computed:
        if model.place.rank == 0 and step.micro_batch == 0:
            time.sleep(0.01)  # the other micro-batch shares the channel
        return end(model, step, begun)

    monkeypatch.setattr(RankModel, "end", end_late)
    with running_ranks(
        folder, num_ranks, precision, num_stages=num_stages, kv_dtype=kv_dtype, max_captured_rows=4, num_swap_slots=1
    ) as (executor, _):
        assert executor.pipeline_depth == (2 if num_stages == 1 else 1)
        for outputs in answer_twice(executor) if num_stages > 1 else [answer(executor)]:
            assert_equal(outputs, expected)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_rank_swaps_its_own_blocks(num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of copies is over once all have made theirs."""
    copied: list[object] = []

    def copy_late(*arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        copy_blocks(*arguments)
        copied.append(arguments)

    monkeypatch.setattr(rank_model, "copy_blocks", copy_late)
    folder = write_checkpoint(tmp_path, num_key_value_heads=2)
    prompt = StepRow(sequence_id=0, tokens=PROMPTS[0], cached_length=0, block_table=[3, 4], sample=None)
    other = replace(prompt, tokens=PROMPTS[2])
    decode = replace(prompt, tokens=[8], cached_length=len(PROMPTS[0]), sample=SAMPLING[0], sample_position=10)
    with running_ranks(folder, 2, Precision(dtype="float32"), num_stages=num_stages, num_swap_slots=3) as ranks:
        executor = ranks[0].for_micro_batch(num_stages - 1, None)
        executor.submit(StepBatch(step_id=0, rows=[prompt])).result()
        expected = executor.submit(StepBatch(step_id=1, rows=[decode])).result()
        outs = [BlockCopy(3, 2), BlockCopy(4, 0)]
        executor.submit(StepBatch(step_id=2, rows=[], swap_outs=outs)).result()
        assert len(copied) == 2 * num_stages
        executor.submit(StepBatch(step_id=3, rows=[other])).result()
        if num_stages > 1:  # into the slots of another micro-batch
            ranks[0].submit(StepBatch(step_id=0, rows=[], swap_outs=outs)).result()
        ins = [BlockCopy(2, 9), BlockCopy(0, 6)]
        moved = [replace(decode, block_table=[9, 6])]
        assert executor.submit(StepBatch(step_id=4, rows=moved, swap_ins=ins)).result().sampled == expected.sampled


def test_ranks_stay_in_step_where_one_s_sampling_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its tokens."""
    folder = write_checkpoint(tmp_path)
    row = StepRow(sequence_id=0, tokens=PROMPTS[0], cached_length=0, block_table=[3, 4], sample=SAMPLING[0])
    monkeypatch.setattr(rank_model, "select_queue", lambda device: LateQueue())
    with running_ranks(folder, 2, Precision(dtype="float32")) as (executor, _):
        expected = executor.submit(StepBatch(step_id=0, rows=[row])).result()
        with monkeypatch.context() as patched:
            patched.setattr(executor._sampler, "sample", lambda *arguments: 1 / 0)
            failed = executor.submit(StepBatch(step_id=1, rows=[row]))
            with pytest.raises(RuntimeError, match="step 1 failed"):
                failed.result()
        assert executor.submit(StepBatch(step_id=2, rows=[row])).result().sampled == expected.sampled


def test_an_encoded_step_is_the_same_step() -> None:
    words = np.arange(17, dtype=np.int32)
    step = PackedStep(
        words=words,
        shape=StepShape(1, 2, 3, 4, 5, 6),
        num_sampling=6,
        prompt_lengths=(7, 8),
        is_decode=False,
        has_late_tokens=True,
        is_captured=False,
        micro_batch=9,
        swap_outs=(BlockCopy(10, 11), BlockCopy(12, 13)),
        swap_ins=(BlockCopy(14, 15),),
    )
    decoded = PackedStep.decode(step.encode())
    assert decoded.words.tolist() == words.tolist()
    assert decoded._replace(words=words) == step
