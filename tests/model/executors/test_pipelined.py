"""The executor with two steps in flight and captured decode steps, as on a GPU: the tokens, the KV and the failures of
one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pdserve.contracts.events import RequestEventKind
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, Executor, SampledToken, StepBatch, StepHandle, StepOutput, StepRow
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.kernels.kv_pool import KvPool
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors import rank_model
from pdserve.model.executors.device_queue import DeviceQueue
from pdserve.model.executors.drafting import Drafter, NgramDrafter
from pdserve.model.executors.model import ModelExecutor
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import write_checkpoint
from tests.model.executors.test_guesses import Oracle, anything
from tests.model.late_queue import LateQueue
from tests.model.traffic import random_request, serve

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 60, 8, 211
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> LateQueue:
    """Of the executors that the test builds; they have it one after the other."""
    queue = LateQueue()
    monkeypatch.setattr(rank_model, "select_queue", lambda device: queue)
    return queue


class Worlds:
    """Executors of one checkpoint, one step at a time and two, each over a pool of NaN."""

    def __init__(self, folder: Path, dtype: str = "float32", kv_dtype: str | None = None) -> None:
        self.config = DecoderConfig.from_folder(folder)
        self.layout = self.config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, kv_dtype or dtype, "hash")
        self.pools = [nan_pool(self.layout.shape, getattr(torch, kv_dtype or dtype)) for _ in range(2)]
        self._options: dict[str, Any] = {"folder": folder, "config": self.config, "layout": self.layout}
        self._options["precision"] = Precision(dtype=dtype)

    def plain(self) -> ModelExecutor:
        with patch.object(rank_model, "select_queue", lambda device: DeviceQueue()):
            return ModelExecutor(**self._options, pool=self.pools[0], num_swap_slots=4)

    def ahead(self, max_captured_rows: int = 6, drafter: Drafter | None = None) -> ModelExecutor:
        return ModelExecutor(
            **self._options,
            pool=self.pools[1],
            num_swap_slots=4,
            max_captured_rows=max_captured_rows,
            drafter=drafter,
        )


def row(
    index: int, tokens: list[int], cached: int, *, sample: SamplingParams | None = GREEDY, previous_row: int = -1
) -> StepRow:
    """A row of sequence ``index``, which has blocks of its own."""
    return StepRow(
        sequence_id=index,
        tokens=tokens,
        previous_row=previous_row,
        cached_length=cached,
        block_table=[(7 * index + block) % NUM_BLOCKS for block in range(7)],
        sample=sample,
        sample_position=cached + max(1, len(tokens)),
    )


def batch(*rows: StepRow, step_id: int = 0) -> StepBatch:
    return StepBatch(step_id=step_id, rows=list(rows))


def tokens_of(sampled: list[SampledToken | None]) -> list[int]:
    return [answer.token for answer in sampled if answer is not None]


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "any"])
@pytest.mark.parametrize("max_captured", [6, 2, 0], ids=["all captured", "few captured", "none captured"])
def test_requests_get_the_tokens_that_one_step_at_a_time_gives(
    folder: Path, queue: LateQueue, is_plain: bool, max_captured: int
) -> None:
    worlds = Worlds(folder)
    limits = worlds.config.limits(0)
    requests = [random_request(number, VOCAB_SIZE, is_plain=is_plain) for number in range(60)]
    expected = serve(worlds.plain(), requests, limits, NUM_BLOCKS, BLOCK_SIZE)
    executor = worlds.ahead(max_captured)
    assert (worlds.plain().pipeline_depth, executor.pipeline_depth) == (1, 2)
    served = serve(executor, requests, limits, NUM_BLOCKS, BLOCK_SIZE)
    assert served == expected
    assert len(served.tokens) >= 60
    assert not served.ends
    assert bool(served.prompts) == (not is_plain)
    assert queue.num_replays >= 8 * bool(max_captured)
    assert queue.num_puts > queue.num_replays + 10


@pytest.mark.parametrize("luck", ["all right", "all wrong", "any", "none made"])
def test_guesses_among_steps_planned_ahead_change_no_token(folder: Path, queue: LateQueue, luck: str) -> None:
    worlds = Worlds(folder)
    limits = worlds.config.limits(0)
    requests = [random_request(number, VOCAB_SIZE, is_plain=number % 2 == 0) for number in range(24)]
    requests = [replace(each, sampling=replace(each.sampling, max_tokens=40)) for each in requests]
    expected = serve(worlds.plain(), requests, limits, NUM_BLOCKS, BLOCK_SIZE)
    first_wrong = {"all right": lambda: 99, "all wrong": lambda: 0, "any": anything(), "none made": lambda: 99}[luck]
    drafter = Oracle(expected, requests, first_wrong, VOCAB_SIZE)
    executor = Ahead(worlds.ahead(drafter=NgramDrafter() if luck == "none made" else drafter))
    speculation = Speculation(lambda batch: lambda num_guesses, depth: 1.0, plans_ahead=True)
    served = serve(executor, requests, limits, NUM_BLOCKS, BLOCK_SIZE, speculation=speculation)
    assert served == expected
    assert not served.ends
    assert (speculation.num_right > 100) == (luck in ("all right", "any"))
    assert (speculation.num_guesses - speculation.num_right > 10) == (luck in ("all wrong", "any"))
    assert executor.num_ahead > (0.8 if luck == "none made" else 0.25) * executor.num_steps


def test_cancelled_requests_disturb_nobody(folder: Path, queue: LateQueue) -> None:
    worlds = Worlds(folder)
    limits = worlds.config.limits(0)
    requests = [random_request(number, VOCAB_SIZE, is_plain=number % 2 == 0) for number in range(40)]
    cancelled = frozenset(range(0, 40, 3))
    expected = serve(worlds.plain(), requests, limits, NUM_BLOCKS, BLOCK_SIZE)
    served = serve(worlds.ahead(), requests, limits, NUM_BLOCKS, BLOCK_SIZE, cancelled=cancelled)
    assert len(served.ends) > 5
    assert set(served.ends.values()) == {RequestEventKind.CANCELLED}
    for (request_id, choice), tokens in served.tokens.items():
        whole = expected.tokens[request_id, choice]
        assert tokens == whole[: len(tokens)]
        assert request_id in served.ends or len(tokens) == len(whole)


class Ahead:
    """Counts the steps of an executor, and those of which some token is not known when they are submitted."""

    def __init__(self, inner: ModelExecutor) -> None:
        self._inner = inner
        self.pipeline_depth = inner.pipeline_depth
        self.num_steps = self.num_ahead = 0

    def submit(self, batch: StepBatch) -> StepHandle:
        self.num_steps += 1
        self.num_ahead += any(row.previous_row >= 0 for row in batch.rows)
        return self._inner.submit(batch)

    def close(self) -> None:
        self._inner.close()


class Failing:
    """An executor some of whose steps cannot be launched."""

    def __init__(self, inner: ModelExecutor, fails: Callable[[], bool]) -> None:
        self._inner = inner
        self._fails = fails

    @property
    def pipeline_depth(self) -> int:
        return self._inner.pipeline_depth

    def submit(self, step: StepBatch) -> StepHandle:
        if step.rows and self._fails():
            step = replace(step, rows=[*step.rows[:-1], replace(step.rows[-1], block_table=[NUM_BLOCKS])])
        return self._inner.submit(step)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("where", ["launch", "device"])
def test_steps_that_fail_cost_their_own_requests_only(folder: Path, queue: LateQueue, where: str) -> None:
    worlds, random = Worlds(folder), Random(4)
    limits = worlds.config.limits(0)
    requests = [random_request(number, VOCAB_SIZE, is_plain=number % 4 > 0) for number in range(60)]
    expected = serve(worlds.plain(), requests, limits, NUM_BLOCKS, BLOCK_SIZE)

    def fails() -> bool:
        return random.random() < 0.1

    executor: Executor = worlds.ahead()
    if where == "launch":
        executor = Failing(worlds.ahead(), fails)
    else:
        queue.spoils = fails
    served = serve(executor, requests, limits, NUM_BLOCKS, BLOCK_SIZE)
    assert set(served.ends.values()) == {RequestEventKind.FAILED}
    assert 5 < len(served.ends) < 50
    for key, tokens in expected.tokens.items():
        if key[0] in served.ends:
            assert served.tokens.get(key, []) == tokens[: len(served.tokens.get(key, []))]
        else:
            assert served.tokens[key] == tokens


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8"), ("bfloat16", "float8_e4m3fn")],
)
def test_steps_write_the_new_tokens_kv_and_nothing_else(
    folder: Path, queue: LateQueue, dtype: str, kv_dtype: str
) -> None:
    """Decode steps of fewer and fewer rows, whose padding finds what larger ones left; the pools agree byte by byte."""
    worlds = Worlds(folder, dtype, kv_dtype)
    plain, ahead = worlds.plain(), worlds.ahead(max_captured_rows=8)
    steps = [[row(index, [3 + index] * (20 + index), 0, sample=None) for index in range(7)]]
    for step, num_rows in enumerate((7, 6, 5, 3, 2, 1)):
        steps.append([row(index, [index + step], 20 + index + step) for index in range(num_rows)])
    for step_id, rows in enumerate(steps):
        outputs = [executor.submit(batch(*rows, step_id=step_id)).result() for executor in (plain, ahead)]
        assert outputs[0].sampled == outputs[1].sampled
        assert torch.equal(worlds.pools[0].blocks, worlds.pools[1].blocks)
    assert queue.num_replays == 6


def test_a_step_is_submitted_before_the_tokens_of_the_last_are_known(folder: Path, queue: LateQueue) -> None:
    """In another order, with a row that leaves and one whose token is known."""
    worlds = Worlds(folder)
    plain, ahead = worlds.plain(), worlds.ahead()
    prefill = batch(row(0, [5] * 9, 0), row(1, [6] * 4, 0, sample=None), row(2, [7] * 3, 0, sample=DRAWN))
    decode = batch(
        row(2, [], 3, sample=DRAWN, previous_row=2), row(0, [], 9, previous_row=0), row(1, [8], 4), step_id=1
    )
    again = batch(row(1, [], 5, previous_row=2), row(0, [], 10, previous_row=1), step_id=2)
    outputs = [plain.submit(step).result() for step in (prefill, decode, again)]
    first, second = ahead.submit(prefill), ahead.submit(decode)
    assert first.result().sampled == outputs[0].sampled
    third = ahead.submit(again)
    assert second.result().sampled == outputs[1].sampled
    assert third.result() == replace(outputs[2], duration_s=third.result().duration_s)
    assert first.result().duration_s > 0
    assert (queue.num_puts, queue.num_replays, queue.num_fetches) == (3, 2, 3)


def test_penalties_wait_for_the_token_that_they_count(folder: Path, queue: LateQueue) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2, repetition_penalty=1.5)
    prompt = [44] * 16
    answers = []
    for executor in (Worlds(folder).plain(), Worlds(folder).ahead()):
        handle = executor.submit(batch(replace(row(0, prompt, 0), history=prompt, num_prompt_tokens=16, sample=GREEDY)))
        handles = [handle]
        for position in range(16, 24):
            late = row(0, [], position, sample=params, previous_row=0)
            known = tokens_of([handle.result().sampled[0] for handle in handles[:-1]])
            late.history, late.num_prompt_tokens = [*prompt, *known], 16
            handles.append(executor.submit(batch(late, step_id=position)))
        answers.append([handle.result().sampled for handle in handles])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("sample", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_logits_that_are_not_finite_fail_their_rows_alone(
    folder: Path, queue: LateQueue, sample: SamplingParams
) -> None:
    worlds = Worlds(folder)
    executor = worlds.ahead()
    prefill = batch(row(0, [5] * 9, 0, sample=sample), row(1, [6] * 4, 0))
    tokens = tokens_of(executor.submit(prefill).result().sampled)

    def decode() -> list[StepOutput]:
        """Two steps of both rows, and one with penalties, which waits for the token before."""
        first = executor.submit(batch(row(0, [tokens[0]], 9, sample=sample), row(1, [tokens[1]], 4), step_id=3))
        late = (row(0, [], 10, sample=sample, previous_row=0), row(1, [], 5, previous_row=1))
        behind = executor.submit(batch(*late, step_id=4))
        counted = row(0, [], 11, sample=SamplingParams(presence_penalty=1), previous_row=0)
        counted.history = [5]
        last = executor.submit(batch(counted, row(1, [], 6, previous_row=1), step_id=5))
        return [handle.result() for handle in (first, behind, last)]

    whole = decode()
    assert not any(output.failed for output in whole)
    worlds.pools[1].values[row(0, [], 0).block_table[0]] = math.nan
    for output, expected in zip(decode(), whole, strict=True):
        assert output.failed == {0: "logits that are not finite cannot be sampled: the highest is nan"}
        assert output.sampled == [None, expected.sampled[1]]
    assert tokens_of(executor.submit(prefill).result().sampled) == tokens


def _change(**changes: object) -> Callable[[StepRow], None]:
    def change(bad: StepRow) -> None:
        for name, value in changes.items():
            setattr(bad, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change(block_table=[NUM_BLOCKS, 1]), "outside a pool"),
        (_change(block_table=[1]), "short of its tokens"),
        (_change(tokens=[VOCAB_SIZE]), "outside a vocabulary"),
        (_change(tokens=[-1]), "negative"),
        (_change(tokens=[], previous_row=5), "no row 5"),
        (_change(tokens=[1], previous_row=0), "not both"),
        (_change(tokens=[], previous_row=1), "sampled nothing"),
    ],
)
def test_a_step_that_cannot_be_launched_is_told_by_its_handle(
    folder: Path, change: Callable[[StepRow], None], message: str
) -> None:
    executor = Worlds(folder).ahead()
    executor.submit(batch(row(1, [200, 3], 0), row(2, [44] * 4, 0, sample=None)))
    bad = row(0, [5] * 9, 0)
    change(bad)
    handle = executor.submit(batch(bad, step_id=7))
    with pytest.raises(RuntimeError, match=f"step 7 failed.*{message}"):
        handle.result()
    with pytest.raises(RuntimeError, match=f"step 0 failed: step 7 failed: .*{message}"):
        executor.submit(batch(row(1, [], 2, previous_row=0))).result()
    assert executor.submit(batch(row(0, [5] * 9, 0))).result().sampled[0] is not None
    executor.close()


def test_a_step_that_cannot_be_launched_is_over_before_its_blocks_are_given_away(
    folder: Path, queue: LateQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Worlds(folder).ahead()
    arrived: list[int] = []
    monkeypatch.setattr(queue, "arrive", arrived.append)
    executor.submit(batch(row(0, [VOCAB_SIZE], 0)))
    assert arrived == [0]


def test_kv_that_went_to_the_host_comes_back_elsewhere(folder: Path) -> None:
    outputs = []
    worlds = Worlds(folder, "bfloat16")
    for executor in (worlds.plain(), worlds.ahead()):
        executor.submit(batch(row(0, [5] * 9, 0, sample=None)))
        there = row(3, [7], 9)
        outs = [BlockCopy(row(0, [], 0).block_table[index], index) for index in (0, 1)]
        executor.submit(StepBatch(step_id=1, rows=[], swap_outs=outs))
        ins = [BlockCopy(index, there.block_table[index]) for index in (0, 1)]
        outputs.append(executor.submit(StepBatch(step_id=2, rows=[there], swap_ins=ins)).result().sampled)
    assert outputs[0] == outputs[1]
    assert torch.equal(worlds.pools[0].blocks, worlds.pools[1].blocks)


def test_a_token_of_a_prompt_whose_log_probability_is_wanted_is_no_decode_step(folder: Path, queue: LateQueue) -> None:
    worlds = Worlds(folder)
    wanted = replace(row(0, [5], 0), prompt_targets=[7], num_prompt_logprobs=1)
    outputs = [executor.submit(batch(wanted)).result() for executor in (worlds.plain(), worlds.ahead())]
    assert len(outputs[0].prompt_logprobs[0]) == 1
    assert outputs[1] == replace(outputs[0], duration_s=outputs[1].duration_s)


def test_the_batch_may_change_once_submitted(folder: Path, queue: LateQueue) -> None:
    executor = Worlds(folder).ahead()
    step = batch(row(0, [5] * 9, 0))
    handle = executor.submit(step)
    step.rows.clear()
    assert len(handle.result().sampled) == 1


def test_kernels_that_cannot_be_captured_are_launched_one_by_one(
    folder: Path, queue: LateQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_model, "can_capture", lambda kernels: False)
    executor = Worlds(folder).ahead()
    executor.submit(batch(row(0, [5] * 9, 0)))
    assert executor.submit(batch(row(0, [], 9, previous_row=0))).result().sampled[0] is not None
    assert (queue.num_captured, queue.num_replays) == (0, 0)


def test_a_pool_of_another_shape_or_dtype_is_refused(folder: Path) -> None:
    worlds = Worlds(folder)
    for pool in (nan_pool((1, 1, 1, 2, 8, 8)), nan_pool(worlds.layout.shape, torch.bfloat16)):
        with pytest.raises(AssertionError):
            _executor_over(worlds, folder, pool)


def _executor_over(worlds: Worlds, folder: Path, pool: KvPool) -> ModelExecutor:
    return ModelExecutor(
        folder=folder, config=worlds.config, layout=worlds.layout, pool=pool, precision=Precision(), max_captured_rows=6
    )
