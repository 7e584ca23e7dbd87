"""Guesses of a draft model: right if it is the target itself, whatever became of its blocks, and harmless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits, StepRow
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.draft_model import DraftModel
from tests.model.checkpoints import write_checkpoint
from tests.model.executors.test_guesses import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    an_executor,
    free_guesses,
    some_requests,
)
from tests.model.traffic import Served, serve

NUM_BLOCKS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("smaller"), num_hidden_layers=1, vocab_size=VOCAB_SIZE - 10)


def a_draft(folder: Path, *, vocab_size: int = VOCAB_SIZE, max_batch_tokens: int = 24) -> DraftModel:
    config = DecoderConfig.from_folder(folder)
    return DraftModel(
        folder=folder,
        config=config,
        layout=config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, "float32", "draft"),
        precision=Precision(dtype="float32"),
        vocab_size=vocab_size,
        max_batch_tokens=max_batch_tokens,
    )


def served(
    folder: Path, draft: DraftModel | None, requests: list[GenerationRequest], num_blocks: int = NUM_BLOCKS
) -> tuple[Served, int, int]:
    """What came of the requests, and how many guesses were made and right."""
    limits = ModelLimits(max_model_len=400, vocab_size=VOCAB_SIZE, eos_token_ids=(2,))
    speculation = free_guesses()
    came = serve(
        an_executor(folder, draft), requests, limits, num_blocks, BLOCK_SIZE,
        speculation=None if draft is None else speculation,
    )  # fmt: skip
    return came, speculation.num_guesses, speculation.num_right


def long_requests() -> list[GenerationRequest]:
    """With prompts that share blocks, several choices of each, and answers that need most of a small pool."""
    random = Random(5)
    prompt = tuple(random.randrange(VOCAB_SIZE) for _ in range(37))
    return [
        GenerationRequest(
            request_id=number,
            prompt_tokens=prompt[: 20 + 8 * (number % 3)] + ((number // 6,) if number % 2 else ()),
            choice=number % 3,
            sampling=SamplingParams(
                temperature=float(number % 3), seed=number, max_tokens=60 + number, ignore_eos=True, num_logprobs=1
            ),
        )
        for number in range(12)
    ]


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 22])
def test_a_draft_that_is_the_target_guesses_right_after_forks_and_preemptions(folder: Path, num_blocks: int) -> None:
    """Its KV is that of the tokens, then."""
    expected, *_ = served(folder, None, long_requests(), num_blocks)
    answers, num_guesses, num_right = served(folder, a_draft(folder), long_requests(), num_blocks)
    assert answers == expected
    assert num_right == num_guesses > 300


@pytest.mark.parametrize("table", [[10, 11, 13, 12], [13, 12, 11, 10], [12, 10, 11, 13]])
def test_blocks_that_come_back_in_another_order_are_computed_again(folder: Path, table: list[int]) -> None:
    tokens = [Random(7).randrange(VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE + 6)]

    def written(draft: DraftModel, num_tokens: int, table: list[int]) -> torch.Tensor:
        """Keys and values of the known tokens."""
        row = StepRow(
            sequence_id=1, tokens=tokens[num_tokens - 1 : num_tokens], cached_length=num_tokens - 1, block_table=table,
            sample=SamplingParams(max_tokens=99, ignore_eos=True), history=tokens[:num_tokens], max_guesses=8,
        )  # fmt: skip
        draft.read([row])
        draft.guess([row])
        return draft._pool.values[table].movedim(0, 3).flatten(3, 4)[..., :num_tokens, :]

    draft = a_draft(folder)
    written(draft, len(tokens) - 1, [10, 11, 12, 13])
    torch.testing.assert_close(written(draft, len(tokens), table), written(a_draft(folder), len(tokens), table))


def test_a_smaller_draft_changes_no_token(folder: Path, smaller: Path) -> None:
    requests = some_requests()
    expected, *_ = served(folder, None, requests)
    answers, num_guesses, num_right = served(folder, a_draft(smaller), requests)
    assert answers == expected
    assert num_guesses > num_right


def test_what_a_sequence_lacks_is_computed_in_steps_with_room_for_it(folder: Path) -> None:
    prompt = tuple(Random(6).randrange(VOCAB_SIZE) for _ in range(200))
    request = GenerationRequest(request_id=0, prompt_tokens=prompt, sampling=SamplingParams(max_tokens=40))
    draft = a_draft(folder, max_batch_tokens=20)
    _, num_guesses, num_right = served(folder, draft, [request])
    assert num_right == num_guesses > 10
    [written] = draft._written.values()
    assert len(prompt) < written.num_known <= 240


def test_no_guess_follows_the_end_of_an_answer(folder: Path) -> None:
    request = long_requests()[0]
    [answer] = served(folder, None, [request])[0].tokens.values()
    stop = answer[20].token
    sampling = replace(request.sampling, stop_token_ids=(stop,))
    _, num_guesses, num_right = served(folder, a_draft(folder), [replace(request, sampling=sampling)])
    assert num_guesses == num_right < 21


def test_rows_with_tokens_that_the_draft_lacks_have_no_guesses(folder: Path, smaller: Path) -> None:
    request = GenerationRequest(
        request_id=0, prompt_tokens=(VOCAB_SIZE - 1,) * 9, sampling=SamplingParams(max_tokens=9)
    )
    expected, *_ = served(folder, None, [request])
    answers, num_guesses, _ = served(folder, a_draft(smaller), [request])
    assert (answers, num_guesses) == (expected, 0)
