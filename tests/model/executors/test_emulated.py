"""The emulated executor: its answers are the oracle's, however work is cut, and no wrong KV passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, SampledToken, StepBatch, StepOutput, StepRow, TokenLogprobs
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.model.cost.stage import Stage
from pdserve.model.executors.emulated import EmulatedExecutor
from pdserve.model.executors.hash_chain import ROOT_STATE, HashVocabulary, link, linked_token, mix64
from tests.expected_tokens import expected_tokens

BLOCK_SIZE = 4
VOCAB_SIZE = 97
GREEDY = SamplingParams(temperature=0)
LAYOUT = KvLayout(
    num_blocks=64, num_kv_heads=1, num_layers=1, block_size=BLOCK_SIZE, head_dim=1, dtype="uint64", model_hash="hash"
)
PROMPT = [5, 3, 3, 96, 0, 7, 7, 7, 1, 50, 51]
TABLE = [9, 2, 33, 0, 17, 63, 4, 8]


class Engine:
    """An executor over a pool of its own, one sequence at a time."""

    def __init__(self, *, eos_token_ids: tuple[int, ...] = (), eos_period: int = 0, check_context: bool = True) -> None:
        self.pool = np.zeros(LAYOUT.shape, np.uint64)
        self.executor = EmulatedExecutor(
            layout=LAYOUT,
            pool=self.pool,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos_token_ids,
            eos_period=eos_period,
            check_context=check_context,
        )

    def run(self, *rows: StepRow) -> list[SampledToken | None]:
        return self.executor.submit(StepBatch(step_id=0, rows=list(rows))).result().sampled

    def prefill(self, tokens: Sequence[int], cached_length: int = 0, table: Sequence[int] = TABLE) -> int:
        sampled = self.run(row(tokens, cached_length, table))[0]
        assert sampled is not None
        return sampled.token

    def decode(self, token: int, cached_length: int, num_tokens: int, table: Sequence[int] = TABLE) -> list[int]:
        """``token`` and the tokens that follow it."""
        answer = [token]
        for _ in range(num_tokens - 1):
            answer.append(self.prefill(answer[-1:], cached_length, table))
            cached_length += 1
        return answer


def row(
    tokens: Sequence[int],
    cached_length: int = 0,
    table: Sequence[int] = TABLE,
    sampling: SamplingParams | None = GREEDY,
    choice: int = 0,
    previous_row: int = -1,
) -> StepRow:
    return StepRow(
        sequence_id=1,
        tokens=tokens,
        previous_row=previous_row,
        cached_length=cached_length,
        block_table=table,
        sample=sampling,
        sample_position=cached_length + max(len(tokens), 1),
        choice=choice,
    )


def test_a_link_gives_its_token_back() -> None:
    for token in (0, 1, 96, 2**31):
        assert linked_token(123, link(123, token)) == token
    assert linked_token(124, link(123, 5)) != 5


def test_mixing_is_a_bijection_as_published() -> None:
    # First outputs of SplitMix64 with seed 0.
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert mix64(2 * 0x9E3779B97F4A7C15 % 2**64) == 0x6E789E6AA1B965F4


def test_answers_are_the_oracles() -> None:
    engine = Engine()
    answer = engine.decode(engine.prefill(PROMPT), len(PROMPT), 12)
    assert answer == expected_tokens(PROMPT, 12, VOCAB_SIZE)


@settings(max_examples=40)
@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 19), max_size=4),
    seed=st.integers(0, 3),
)
def test_chunks_give_what_the_whole_gives(prompt: list[int], cuts: list[int], seed: int) -> None:
    table = np.random.default_rng(seed).permutation(LAYOUT.num_blocks).tolist()
    engine = Engine()
    bounds = sorted({0, len(prompt), *(cut for cut in cuts if cut < len(prompt))})
    for start, end in pairwise(bounds):
        token = engine.prefill(prompt[start:end], start, table)
    assert engine.decode(token, len(prompt), 6, table) == expected_tokens(prompt, 6, VOCAB_SIZE)


def test_rows_of_a_batch_are_independent() -> None:
    engine = Engine()
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9]]
    tables = [[0, 1, 2], [3, 4, 5], [6, 7]]
    first = engine.run(*(row(prompt, table=table) for prompt, table in zip(prompts, tables, strict=True)))
    decodes = [
        row([sampled.token], len(prompt), table)
        for sampled, prompt, table in zip(first, prompts, tables, strict=True)
        if sampled
    ]
    second = engine.run(decodes[2], row([8] * 9, table=[10, 11, 12]), decodes[0], decodes[1])
    answers = [[a.token, b.token] for a, b in zip(first, (second[2], second[3], second[0]), strict=True) if a and b]
    assert answers == [expected_tokens(prompt, 2, VOCAB_SIZE) for prompt in prompts]


def test_the_next_step_may_be_submitted_before_the_result_is_taken() -> None:
    engine = Engine()
    other = row([4, 4], table=[40])
    handles = [engine.executor.submit(StepBatch(step_id=0, rows=[other, row(PROMPT)]))]
    for step in range(1, 6):
        rows = [row([], len(PROMPT) + step - 1, previous_row=1 if step == 1 else 0)]
        handles.append(engine.executor.submit(StepBatch(step_id=step, rows=rows)))
    outputs = [handle.result() for handle in handles]
    assert [output.step_id for output in outputs] == list(range(6))
    tokens = [sampled.token for output in outputs if (sampled := output.sampled[-1])]
    assert tokens == expected_tokens(PROMPT, 6, VOCAB_SIZE)


def test_choices_of_a_prompt_are_drawn_apart() -> None:
    sampling = SamplingParams(seed=9, num_logprobs=0)
    rows = [row(PROMPT, sampling=sampling, choice=choice) for choice in (2, 3, 4)]
    sampled = Engine().executor.submit(StepBatch(step_id=0, rows=rows)).result().sampled
    expected = [expected_tokens(PROMPT, 1, VOCAB_SIZE, sampling=sampling, choice=choice)[0] for choice in (2, 3, 4)]
    assert [one and one.token for one in sampled] == expected
    assert {one and one.logprobs for one in sampled} == {TokenLogprobs(0.0, ())}


def test_prompt_tokens_are_certain() -> None:
    asking = row(PROMPT, sampling=None)
    asking.prompt_targets = PROMPT[1:]
    output = Engine().executor.submit(StepBatch(step_id=0, rows=[row([4], table=[40]), asking])).result()
    assert output.prompt_logprobs == {1: [TokenLogprobs(0.0, ())] * (len(PROMPT) - 1)}


def test_banned_tokens_give_way_to_others() -> None:
    engine = Engine()
    unbanned = engine.prefill(PROMPT)
    banned = row(PROMPT)
    banned.banned_tokens = [unbanned, (unbanned + 1) % VOCAB_SIZE]
    [sampled] = engine.run(banned)
    assert sampled == SampledToken((unbanned + 2) % VOCAB_SIZE, None)
    banned.banned_tokens = range(VOCAB_SIZE)
    with pytest.raises(RuntimeError, match="every ordinary token is banned"):
        engine.run(banned)


def test_a_minimum_of_tokens_bans_ends_until_it_is_reached() -> None:
    eos = {"eos_token_ids": (3,), "eos_period": 2}
    vocabulary = HashVocabulary(VOCAB_SIZE, (3,), 2)
    ends_early = next(token for token in range(50) if vocabulary.next_token(mix64(link(ROOT_STATE, token))) == 3)
    free = expected_tokens([ends_early], 9, VOCAB_SIZE, **eos)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0, min_tokens=4)
    held = expected_tokens([ends_early], 9, VOCAB_SIZE, sampling=sampling, **eos)  # type: ignore[arg-type]
    assert (free, 3 in held[:4], len(held) >= 5) == ([3], False, True)
    stop = SamplingParams(temperature=0, stop_token_ids=(held[1],))
    assert held[1] not in expected_tokens([ends_early], 9, VOCAB_SIZE, sampling=stop)[:-1]


def test_a_placeholder_without_a_token_before_it_fails_its_step() -> None:
    engine = Engine()
    engine.run(row(PROMPT, sampling=None))
    for previous_row in (0, 1):
        with pytest.raises(RuntimeError, match=rf"row {previous_row} of the step before has no token"):
            engine.run(row([], len(PROMPT), previous_row=previous_row))


@pytest.mark.parametrize("axis_3", [0, 1])
@pytest.mark.parametrize("position", range(len(PROMPT)))
def test_a_changed_byte_of_any_cached_token_is_noticed(position: int, axis_3: int) -> None:
    engine = Engine()
    token = engine.prefill(PROMPT)
    block, offset = TABLE[position // BLOCK_SIZE], position % BLOCK_SIZE
    engine.pool[block, 0, 0, axis_3, offset, 0] ^= np.uint64(1 << 40)
    with pytest.raises(RuntimeError, match=rf"position {position} does not follow"):
        engine.prefill([token], len(PROMPT))


@pytest.mark.parametrize("check_context", [True, False])
@pytest.mark.parametrize("axis_3", [0, 1])
def test_a_changed_byte_of_the_last_token_is_noticed_even_by_the_short_check(axis_3: int, check_context: bool) -> None:
    engine = Engine(check_context=check_context)
    token = engine.prefill(PROMPT)
    engine.pool[TABLE[2], 0, 0, axis_3, 2, 0] ^= np.uint64(1)
    with pytest.raises(RuntimeError, match="position 10 does not follow"):
        engine.prefill([token], len(PROMPT))


def test_a_consistent_but_different_context_changes_every_later_token() -> None:
    engine = Engine()
    engine.prefill(PROMPT)
    other = Engine()
    other.prefill([*PROMPT[:-1], 52])
    engine.pool[TABLE[2]] = other.pool[TABLE[2]]
    token = expected_tokens(PROMPT, 1, VOCAB_SIZE)[0]
    answer = engine.decode(token, len(PROMPT), 20)
    expected = expected_tokens(PROMPT, 20, VOCAB_SIZE)
    assert sum(a == b for a, b in zip(answer[1:], expected[1:], strict=True)) <= 3


@pytest.mark.parametrize(
    "table", [[9, 33, 2], [9, 9, 33], [9, 2, 2], [9, 2, 34]], ids=["swapped", "repeated", "last repeated", "unwritten"]
)
def test_a_misplaced_block_is_noticed(table: list[int]) -> None:
    engine = Engine()
    token = engine.prefill(PROMPT)
    with pytest.raises(RuntimeError, match="does not follow"):
        engine.prefill([token], len(PROMPT), table)


@pytest.mark.parametrize("cached_length", [len(PROMPT) - 1, len(PROMPT) + 1])
def test_a_wrong_cached_length_is_noticed(cached_length: int) -> None:
    engine = Engine()
    token = engine.prefill(PROMPT)
    expected = expected_tokens(PROMPT, 12, VOCAB_SIZE)
    if cached_length > len(PROMPT):
        with pytest.raises(RuntimeError, match="position 11 does not follow"):
            engine.prefill([token], cached_length)
    else:
        assert engine.decode(token, cached_length, 12)[1:] != expected[1:]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(PROMPT, table=[1, 2]), "2 blocks for tokens up to 11"),
        (row(PROMPT, table=[1, 2, 64]), "a block id is outside the pool of 64"),
        (row(PROMPT, table=[1, 2, -1]), "a block id is outside the pool of 64"),
        (row([VOCAB_SIZE]), "a token id is outside the vocabulary"),
        (row([]), "blocks for tokens up to 0"),
        (
            StepRow(sequence_id=7, tokens=[1], cached_length=0, block_table=[1], sample=GREEDY, sample_position=2),
            "sequence 7: samples position 2, but its tokens end before 1",
        ),
    ],
)
def test_a_row_that_cannot_be_computed_fails_its_step(bad: StepRow, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Engine().run(bad)


def test_a_failed_step_does_not_end_the_executor() -> None:
    engine = Engine()
    with pytest.raises(RuntimeError):
        engine.run(row([VOCAB_SIZE]))
    assert engine.prefill(PROMPT) == expected_tokens(PROMPT, 1, VOCAB_SIZE)[0]


def test_end_of_sequence_comes_by_period_only() -> None:
    eos_token_ids = (3, 90)
    never = expected_tokens(PROMPT, 300, VOCAB_SIZE, eos_token_ids=eos_token_ids)
    assert len(never) == 300
    assert not {3, 90} & set(never)
    assert {0, 2, 4, 89, 91, 96} <= set(never)
    sometimes = expected_tokens(PROMPT, 300, VOCAB_SIZE, eos_token_ids=eos_token_ids, eos_period=4)
    assert sometimes.index(3) == len(sometimes) - 1
    ignored = expected_tokens(
        PROMPT,
        300,
        VOCAB_SIZE,
        sampling=SamplingParams(temperature=0, ignore_eos=True),
        eos_token_ids=eos_token_ids,
        eos_period=4,
    )
    assert len(ignored) == 300
    assert 45 <= ignored.count(3) <= 105

    engine = Engine(eos_token_ids=eos_token_ids, eos_period=4)
    assert engine.decode(engine.prefill(PROMPT), len(PROMPT), len(sometimes)) == sometimes


def test_draws_depend_on_seed_and_choice_and_greed_does_not() -> None:
    answers = [
        expected_tokens(PROMPT, 8, VOCAB_SIZE, sampling=SamplingParams(seed=seed), choice=choice)
        for seed, choice in [(1, 0), (1, 1), (2, 0)]
    ]
    assert len({tuple(answer) for answer in answers}) == 3
    sampled = Engine().run(
        row(PROMPT, sampling=SamplingParams(seed=1), choice=1),
        row(PROMPT, table=[20, 21, 22], choice=1),
    )
    assert [token.token for token in sampled if token] == [answers[1][0], expected_tokens(PROMPT, 1, VOCAB_SIZE)[0]]


def test_every_ordinary_token_is_reachable() -> None:
    vocabulary = HashVocabulary(8, (0, 7))
    assert {vocabulary.next_token(state) for state in range(200)} == {1, 2, 3, 4, 5, 6}


def test_logprobs_are_given_only_where_asked() -> None:
    with_logprobs = SamplingParams(temperature=0, num_logprobs=3)
    sampled = Engine().run(row([1], table=[0], sampling=with_logprobs), row([1], table=[1]))
    assert sampled[0] is not None
    assert sampled[0].logprobs == (0.0, ())
    assert sampled[1] is not None
    assert sampled[1].logprobs is None


def a_cost_model() -> CostModel:
    shape = ModelShape(
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
    )
    return CostModel(shape, hardware("h100"), Precision(dtype="bfloat16"))


def test_steps_last_as_the_cost_model_says_one_after_the_other() -> None:
    cost = a_cost_model()
    scale = 0.2 / cost.prefill_s(len(PROMPT))
    executor = EmulatedExecutor(
        layout=LAYOUT,
        pool=memoryview(bytearray(LAYOUT.pool_bytes)),
        vocab_size=VOCAB_SIZE,
        cost=cost,
        time_scale=scale,
    )
    assert executor.pipeline_depth == 2
    start_s = time.monotonic()
    handles = [
        executor.submit(StepBatch(step_id=0, rows=[row(PROMPT)])),
        executor.submit(StepBatch(step_id=1, rows=[row([], len(PROMPT), previous_row=0)])),
    ]
    assert time.monotonic() - start_s < 0.2
    outputs: list[StepOutput] = []
    for handle in handles:
        outputs.append(handle.result())
        assert time.monotonic() - start_s >= sum(output.duration_s for output in outputs)
    assert outputs[0].duration_s == pytest.approx(0.2)
    assert outputs[1].duration_s == pytest.approx(scale * cost.decode_s(1, len(PROMPT)))
    executor.close()


def test_micro_batches_enter_the_first_stage_in_turns() -> None:
    cost = a_cost_model()
    stage, scale = Stage(2), 0.2 / cost.prefill_s(len(PROMPT))
    executors = [
        EmulatedExecutor(
            layout=LAYOUT,
            pool=memoryview(bytearray(LAYOUT.pool_bytes)),
            vocab_size=VOCAB_SIZE,
            cost=cost,
            time_scale=scale,
            pipeline_depth=1,
            stage=stage,
        )
        for _ in range(2)
    ]
    start_s = time.monotonic()
    handles = [executor.submit(StepBatch(step_id=0, rows=[row(PROMPT)])) for executor in executors]
    for handle, end_s in zip(handles, (0.2, 0.3), strict=True):
        assert handle.result().duration_s == pytest.approx(0.2)
        assert time.monotonic() - start_s >= end_s


def test_copies_to_the_host_and_back_last_as_the_cost_model_says() -> None:
    cost = a_cost_model()
    executor = EmulatedExecutor(
        layout=LAYOUT,
        pool=np.zeros(LAYOUT.shape, np.uint64),
        vocab_size=VOCAB_SIZE,
        cost=cost,
        time_scale=1.0,
        num_swap_slots=2,
    )
    copies = [BlockCopy(0, 0), BlockCopy(1, 1)]
    output = executor.submit(StepBatch(step_id=0, rows=[], swap_outs=copies, swap_ins=copies[:1])).result()
    assert output.sampled == []
    assert output.duration_s == pytest.approx(cost.swap_s(3 * BLOCK_SIZE))


def test_a_pool_of_another_shape_is_refused() -> None:
    layout = KvLayout(
        num_blocks=1, num_kv_heads=2, num_layers=1, block_size=4, head_dim=1, dtype="uint64", model_hash=""
    )
    with pytest.raises(ValueError, match="an emulated KV pool has 1 head"):
        EmulatedExecutor(layout=layout, pool=np.zeros(layout.shape, np.uint64), vocab_size=VOCAB_SIZE)


def test_closing_lets_the_pool_go() -> None:
    memory = bytearray(LAYOUT.pool_bytes)
    executor = EmulatedExecutor(layout=LAYOUT, pool=memoryview(memory), vocab_size=VOCAB_SIZE)
    executor.submit(StepBatch(step_id=0, rows=[row(PROMPT)])).result()
    executor.close()
    memory.clear()  # raises BufferError while a view of it is held
