"""The executor as a scheduler drives it: prefill, continuous batches, samples that are not known yet, failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
import torch

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, SampledToken, StepBatch, StepOutput, StepRow, TokenLogprobs
from pdserve.kernels.kv_pool import KvPool
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.model import ModelExecutor
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import (
    FAMILIES,
    load_reference,
    reference_choices,
    reference_logits,
    write_checkpoint,
    write_family,
)
from tests.model.quantised_checkpoints import write_quantised

GREEDY = SamplingParams(temperature=0.0, num_logprobs=0)
NUM_BLOCKS, BLOCK_SIZE = 24, 8
TABLES = [[3, 20, 7, 15, 0, 9, 12], [1, 2, 23, 5, 6, 4, 8], [10, 11, 22, 13, 14, 21, 16]]
PROMPTS = [[5, 17, 101, 33, 54, 2, 90, 7, 61], [200, 3], [44] * 16]
NUM_ANSWER_TOKENS = 36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def make_pool(folder: Path, dtype: str) -> KvPool:
    """Full of NaN."""
    layout = DecoderConfig.from_folder(folder).kv_layout(NUM_BLOCKS, BLOCK_SIZE, dtype, "hash")
    return nan_pool(layout.shape, getattr(torch, dtype))


def make_executor(
    folder: Path, dtype: str = "float32", pool: KvPool | None = None, num_swap_slots: int = 0
) -> ModelExecutor:
    """With a pool of its own, of the model's dtype, if none is given."""
    config = DecoderConfig.from_folder(folder)
    pool = pool or make_pool(folder, dtype)
    layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, str(pool.dtype).removeprefix("torch."), "hash")
    return ModelExecutor(
        folder=folder,
        config=config,
        layout=layout,
        pool=pool,
        precision=Precision(dtype=dtype),
        num_swap_slots=num_swap_slots,
    )


def row(
    index: int, tokens: list[int], cached: int, *, sample: SamplingParams | None = GREEDY, previous_row: int = -1
) -> StepRow:
    """A row of sequence ``index``, whose next token is sampled right after ``tokens`` (or the placeholder)."""
    return StepRow(
        sequence_id=index,
        tokens=tokens,
        previous_row=previous_row,
        cached_length=cached,
        block_table=TABLES[index],
        sample=sample,
        sample_position=cached + max(1, len(tokens)),
    )


def run(executor: ModelExecutor, *rows: StepRow, step_id: int = 0) -> StepOutput:
    output = executor.submit(StepBatch(step_id=step_id, rows=list(rows))).result()
    assert output.step_id == step_id
    assert len(output.sampled) == len(rows)
    return output


def token_of(sampled: SampledToken | None) -> int:
    assert sampled is not None
    return sampled.token


def answers(executor: ModelExecutor) -> list[list[SampledToken]]:
    """Greedy answers to `PROMPTS`: one joins the batch at each step, and the last is prefilled in two chunks."""
    result: list[list[SampledToken]] = [[] for _ in PROMPTS]
    for step in range(NUM_ANSWER_TOKENS + len(PROMPTS) - 1):
        rows = []
        for index, prompt in enumerate(PROMPTS):
            answer = result[index]
            if answer and len(answer) < NUM_ANSWER_TOKENS:
                rows.append(row(index, [answer[-1].token], len(prompt) + len(answer) - 1))
            elif not answer and index == 2 and step == 1:
                rows.append(row(index, prompt[:10], 0, sample=None))
            elif not answer and step == index:
                rows.append(row(index, prompt[10:], 10) if index == 2 else row(index, prompt, 0))
        for planned, sampled in zip(rows, run(executor, *rows, step_id=step).sampled, strict=True):
            assert (sampled is None) == (planned.sample is None)
            if sampled is not None:
                result[planned.sequence_id].append(sampled)
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family)
    assert_answers_as(folder, make_executor(folder))


@pytest.mark.parametrize("form", ["awq", "fp8-block"])
def test_greedy_answers_of_quantised_checkpoints_are_those_of_transformers(tmp_path: Path, form: str) -> None:
    quantised, plain = write_quantised(tmp_path, "gemma3_text", form)
    assert_answers_as(plain, make_executor(quantised))


def assert_answers_as(reference_folder: Path, executor: ModelExecutor) -> None:
    model = load_reference(reference_folder)
    for prompt, answer in zip(PROMPTS, answers(executor), strict=True):
        reference = reference_choices(model, prompt, [sampled.token for sampled in answer])
        unsure = [position for position, margin in enumerate(reference.margins) if margin < 1e-3]
        compared = unsure[0] if unsure else NUM_ANSWER_TOKENS
        assert compared >= 32
        assert [sampled.token for sampled in answer[:compared]] == reference.tokens[:compared]
        for sampled, logprob in zip(answer[:compared], reference.logprobs, strict=False):
            assert sampled.logprobs is not None
            assert sampled.logprobs.logprob == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_agrees_wherever_the_reference_is_sure(tmp_path: Path, family: str, dtype: str) -> None:
    folder = write_family(tmp_path, family)
    executor, model = make_executor(folder, dtype), load_reference(folder, getattr(torch, dtype)).float()
    errors: list[float] = []
    num_others = 0
    for prompt, answer in zip(PROMPTS, answers(executor), strict=True):
        reference = reference_choices(model, prompt, [sampled.token for sampled in answer])
        for sampled, token, margin, logprob in zip(answer, *reference, strict=True):
            if margin >= 0.1:
                num_others += sampled.token != token
                assert sampled.logprobs is not None
                errors.append(abs(sampled.logprobs.logprob - logprob))
    assert len(errors) >= 60
    # Of experts, a near tie may be decided by what was rounded, for this token and those that attend to it.
    has_experts = DecoderConfig.from_folder(folder).shape.num_experts > 0
    assert num_others <= 2 * has_experts
    assert (median if has_experts else fmean)(errors) <= 2e-2


@pytest.mark.parametrize(("dtype", "sure_margin", "mean_error"), [("int8", 0.1, 0.03), ("float8_e4m3fn", 1.0, 0.1)])
def test_quantised_kv_is_close(folder: Path, dtype: str, sure_margin: float, mean_error: float) -> None:
    executor, model = make_executor(folder, pool=make_pool(folder, dtype)), load_reference(folder)
    errors: list[float] = []
    for prompt, answer in zip(PROMPTS, answers(executor), strict=True):
        reference = reference_choices(model, prompt, [sampled.token for sampled in answer])
        for sampled, token, margin, logprob in zip(answer, *reference, strict=True):
            assert sampled.logprobs is not None
            if sampled.token == token:
                errors.append(abs(sampled.logprobs.logprob - logprob))
            else:
                assert margin < sure_margin
    assert len(errors) >= 90
    assert sum(errors) / len(errors) <= mean_error


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_blocks_copied_to_another_pool_go_on_as_they_would_have_here(folder: Path, dtype: str) -> None:
    """Mixed and disaggregated serving end with the same tokens and the same bytes."""
    here, there = make_pool(folder, dtype), make_pool(folder, dtype)
    stays, goes = make_executor(folder, pool=here), make_executor(folder, pool=there)
    prompt, blocks = PROMPTS[2], TABLES[2]
    first = token_of(run(stays, row(2, prompt, 0)).sampled[0])
    num_prompt_blocks = -(-len(prompt) // BLOCK_SIZE)
    there.blocks[blocks[:num_prompt_blocks]] = here.blocks[blocks[:num_prompt_blocks]]
    tokens = [[first], [first]]
    for answer, executor in zip(tokens, (stays, goes), strict=True):
        for cached in range(len(prompt), len(prompt) + 20):
            answer.append(token_of(run(executor, row(2, [answer[-1]], cached)).sampled[0]))
    assert tokens[0] == tokens[1]
    used = blocks[: -(-(len(prompt) + 20) // BLOCK_SIZE)]
    assert torch.equal(here.blocks[used], there.blocks[used])


def test_a_token_that_the_scheduler_does_not_know_yet(folder: Path) -> None:
    executor, other = make_executor(folder), make_executor(folder)
    first = run(executor, row(0, PROMPTS[0], 0), row(2, PROMPTS[2][:10], 0, sample=None), row(1, PROMPTS[1], 0))
    run(other, row(0, PROMPTS[0], 0), row(1, PROMPTS[1], 0))
    tokens = [token_of(first.sampled[0]), token_of(first.sampled[2])]
    assert tokens[0] != tokens[1]
    for cached in range(4):
        late = run(
            executor,
            row(1, [], 2 + cached, previous_row=0 if cached else 2),
            row(0, [], 9 + cached, previous_row=1 if cached else 0),
        )
        known = run(other, row(1, [tokens[1]], 2 + cached), row(0, [tokens[0]], 9 + cached))
        tokens = [token_of(known.sampled[1]), token_of(known.sampled[0])]
        assert [token_of(sampled) for sampled in late.sampled] == tokens[::-1]


def test_kv_that_went_to_the_host_comes_back_elsewhere(folder: Path) -> None:
    executor, other = make_executor(folder, "bfloat16", num_swap_slots=4), make_executor(folder, "bfloat16")
    run(executor, row(0, PROMPTS[0], 0, sample=None))
    run(other, row(0, PROMPTS[0], 0, sample=None))
    outs = [BlockCopy(TABLES[0][0], 2), BlockCopy(TABLES[0][1], 0)]
    output = executor.submit(StepBatch(step_id=1, rows=[], swap_outs=outs)).result()
    assert output.sampled == []
    run(executor, row(2, PROMPTS[2], 0, sample=None), replace(row(1, PROMPTS[2], 0), block_table=TABLES[0]))
    ins = [BlockCopy(2, TABLES[1][0]), BlockCopy(0, TABLES[1][1])]
    moved = replace(row(0, [7], len(PROMPTS[0])), block_table=TABLES[1])
    resumed = executor.submit(StepBatch(step_id=2, rows=[moved], swap_ins=ins)).result()
    assert resumed.sampled == run(other, row(0, [7], len(PROMPTS[0]))).sampled


def test_draws_depend_on_position_and_choice(folder: Path) -> None:
    executor = make_executor(folder)
    drawn = SamplingParams(temperature=3.0, seed=11)
    rows = [row(0, PROMPTS[0], 0, sample=drawn) for _ in range(3)]
    rows[1].choice = 1
    rows[2].sample_position += 1
    tokens = [token_of(sampled) for sampled in run(executor, *rows).sampled]
    assert len(set(tokens)) == 3
    assert tokens == [token_of(run(executor, only).sampled[0]) for only in rows]


def test_penalties_count_the_token_that_the_scheduler_does_not_know_yet(folder: Path) -> None:
    """The same answer, whether each token is known to the scheduler or comes one step late."""
    params = SamplingParams(temperature=0, frequency_penalty=2, repetition_penalty=1.5)
    prompt = PROMPTS[2]

    def answer(is_late: bool, params: SamplingParams) -> list[int]:
        executor, known = make_executor(folder), list(prompt)
        first = row(2, prompt, 0, sample=params)
        first.history, first.num_prompt_tokens = known, len(prompt)
        sampled = [token_of(run(executor, first).sampled[0])]
        for position in range(len(prompt), len(prompt) + 11):
            planned = row(2, [] if is_late else sampled[-1:], position, sample=params, previous_row=-1 + is_late)
            planned.history = [*prompt, *(sampled[:-1] if is_late else sampled)]
            planned.num_prompt_tokens = len(prompt)
            sampled.append(token_of(run(executor, planned).sampled[0]))
        return sampled

    assert answer(True, params) == answer(False, params)
    assert answer(True, params) != answer(True, GREEDY)


def test_a_resumed_answer_goes_on_as_it_would_have(folder: Path) -> None:
    """Seed, position and penalties on another executor, which computes the tokens so far as one prompt."""
    params = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=4, presence_penalty=1, frequency_penalty=0.5)
    prompt = PROMPTS[0]

    def go_on(answer: list[int], num_tokens: int) -> list[int]:
        executor, answer, cached = make_executor(folder), list(answer), 0
        while len(answer) < num_tokens:
            tokens = [*prompt, *answer]
            planned = row(0, tokens[cached:], cached, sample=params)
            planned.history, planned.num_prompt_tokens = tokens, len(prompt)
            answer.append(token_of(run(executor, planned).sampled[0]))
            cached = len(tokens)
        return answer

    whole = go_on([], 24)
    assert go_on(whole[:9], 24) == whole
    assert len(set(whole)) > 5


def test_banned_tokens_are_not_sampled(folder: Path) -> None:
    executor = make_executor(folder)
    best = token_of(run(executor, row(0, PROMPTS[0], 0)).sampled[0])
    banned = row(0, PROMPTS[0], 0)
    banned.banned_tokens = [best]
    assert token_of(run(executor, banned).sampled[0]) != best


def test_prompt_logprobs_are_those_of_transformers_however_the_prompt_is_cut(folder: Path) -> None:
    executor, table = make_executor(folder), list(range(NUM_BLOCKS - 2))[::-1]
    prompt = [(7 * position + 3) % 211 for position in range(150)]
    expected_TV = reference_logits(folder, prompt).log_softmax(dim=-1)
    entries: list[TokenLogprobs] = []
    for start, end in (0, 140), (140, 143), (143, 150):
        chunk = row(0, prompt[start:end], start, sample=GREEDY if end == 150 else None)
        chunk.block_table, chunk.prompt_targets, chunk.num_prompt_logprobs = table, prompt[start + 1 : end + 1], 3
        other = row(1, PROMPTS[1], 0)
        other.block_table = [22]
        output = run(executor, other, chunk)
        assert (list(output.prompt_logprobs), output.sampled[1] is not None) == ([1], end == 150)
        entries += output.prompt_logprobs[1]
    assert len(entries) == 149
    for position, entry in enumerate(entries):
        expected_V = expected_TV[position]
        assert entry.logprob == pytest.approx(expected_V[prompt[position + 1]].item(), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(expected_V.topk(3).values.tolist(), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            [expected_V[token].item() for token, _ in entry.top], abs=1e-4
        )


def test_a_batch_in_which_nothing_samples(folder: Path) -> None:
    assert run(make_executor(folder), row(0, PROMPTS[0], 0, sample=None)).sampled == [None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": [NUM_BLOCKS, 1]}, "outside a pool"),
        ({"block_table": [1]}, "short of its tokens"),
        ({"tokens": [211]}, "outside a vocabulary"),
        ({"tokens": [-1]}, "negative"),
        ({"tokens": [], "previous_row": 5}, "no row 5"),
        ({"tokens": [1], "previous_row": 0}, "not both"),
        ({"tokens": [], "previous_row": 1}, "sampled nothing"),
    ],
)
def test_a_failed_step_is_told_by_its_handle_and_the_next_one_runs(
    folder: Path, change: dict[str, object], message: str
) -> None:
    executor = make_executor(folder)
    run(executor, row(1, PROMPTS[1], 0), row(2, PROMPTS[2], 0, sample=None))
    bad = row(0, PROMPTS[0], 0)
    for name, value in change.items():
        setattr(bad, name, value)
    handle = executor.submit(StepBatch(step_id=7, rows=[bad]))
    with pytest.raises(RuntimeError, match=f"step 7 failed.*{message}"):
        handle.result()
    with pytest.raises(RuntimeError, match=f"step 0 failed: step 7 failed: .*{message}"):
        run(executor, row(1, [], 2, previous_row=0))
    assert run(executor, row(0, PROMPTS[0], 0)).sampled[0] is not None
    executor.close()


def test_the_batch_may_change_once_submitted(folder: Path) -> None:
    executor = make_executor(folder)
    batch = StepBatch(step_id=0, rows=[row(0, PROMPTS[0], 0)])
    handle = executor.submit(batch)
    batch.rows.clear()
    assert len(handle.result().sampled) == 1


def test_a_pool_of_another_shape_or_dtype_is_refused(folder: Path) -> None:
    config = DecoderConfig.from_folder(folder)
    layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, "float32", "hash")
    for pool in (nan_pool((1, 1, 1, 2, 8, 8)), nan_pool(layout.shape, torch.bfloat16)):
        with pytest.raises(AssertionError):
            ModelExecutor(folder=folder, config=config, layout=layout, pool=pool, precision=Precision())
