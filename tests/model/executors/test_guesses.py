"""Answers of the executor with guesses: those of one token at a time, to the bit, whatever is guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits, SampledToken, StepRow
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.device_queue import Event
from pdserve.model.executors.drafting import Drafter
from pdserve.model.executors.model import ModelExecutor, _LaunchedStep
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import FAMILIES, write_checkpoint, write_family
from tests.model.traffic import Served, random_request, serve

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 60, 8, 211


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def an_executor(folder: Path, drafter: Drafter | None = None) -> ModelExecutor:
    """Over a pool of NaN."""
    config = DecoderConfig.from_folder(folder)
    layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, "float32", "hash")
    return ModelExecutor(
        folder=folder,
        config=config,
        layout=layout,
        pool=nan_pool(layout.shape, torch.float32),
        precision=Precision(dtype="float32"),
        drafter=drafter,
    )


class Oracle:
    """Knows the answers, and spoils what it says of them.

    Args:
        first_wrong: guess that is the first wrong one.
    """

    def __init__(self, served: Served, requests: Sequence[GenerationRequest], first_wrong: Callable[[], int]) -> None:
        answers = [served.tokens[request.request_id, request.choice] for request in requests]
        self._answers = [[token.token for token in answer] for answer in answers]
        self._first_wrong = first_wrong

    def guess(self, row: StepRow) -> Sequence[int]:
        start, first_wrong = row.sample_position - row.num_prompt_tokens, self._first_wrong()
        right = self._answers[row.sequence_id][start : start + row.max_guesses]
        return [(token + (index >= first_wrong)) % VOCAB_SIZE for index, token in enumerate(right)]


def anything() -> Callable[[], int]:
    random = Random(1)
    return lambda: random.choice((0, 1, 3, 99, 99))


def free_guesses() -> Speculation:
    return Speculation(lambda batch: lambda num_guesses: 1.0)


def served_by(executor: ModelExecutor, requests: list[GenerationRequest], speculation: Speculation | None) -> Served:
    limits = ModelLimits(max_model_len=400, vocab_size=VOCAB_SIZE, eos_token_ids=(2,))
    return serve(executor, requests, limits, NUM_BLOCKS, BLOCK_SIZE, speculation=speculation)


def some_requests() -> list[GenerationRequest]:
    return [random_request(number, VOCAB_SIZE, is_plain=number % 2 == 0) for number in range(60)]


@pytest.mark.parametrize(
    ("first_wrong", "least_right", "least_wrong"),
    [
        (lambda: 99, 100, 0),
        (lambda: 0, 0, 60),
        (lambda: 2, 60, 30),
        (anything(), 80, 40),
    ],
    ids=["oracle", "always wrong", "wrong from the third on", "anything"],
)
def test_answers_are_those_of_one_token_at_a_time(
    folder: Path, first_wrong: Callable[[], int], least_right: int, least_wrong: int
) -> None:
    requests, speculation = some_requests(), free_guesses()
    expected = served_by(an_executor(folder), requests, None)
    drafter = Oracle(expected, requests, first_wrong)
    assert served_by(an_executor(folder, drafter), requests, speculation) == expected
    assert not expected.ends
    assert speculation.num_right >= least_right
    assert speculation.num_guesses - speculation.num_right >= least_wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_checks_guesses(tmp_path: Path, family: str) -> None:
    """Longer than the sliding windows."""
    folder = write_family(tmp_path, family, head_dim=16)  # other sizes have no kernel of the same bits in any batch
    requests = [
        GenerationRequest(
            request_id=number,
            prompt_tokens=tuple([5, 17, 101, 33] * (1 + 4 * number)),
            sampling=SamplingParams(temperature=float(number % 2) * 0.5, seed=number, max_tokens=40, num_logprobs=1),
        )
        for number in range(4)
    ]
    speculation = free_guesses()
    expected = served_by(an_executor(folder), requests, None)
    drafter = Oracle(expected, requests, anything())
    assert served_by(an_executor(folder, drafter), requests, speculation) == expected
    assert speculation.num_guesses > speculation.num_right > 0


@pytest.mark.parametrize(
    ("tokens", "unfit", "sampled"),
    [
        ([7, 8, 9], [], [7, 8, 9]),
        ([7, 5, 9], [], [7, 5]),
        ([5, 8, 9], [], [5]),
        ([7, 8, 9], [2], [7, 8]),
        ([7, 8, 9], [1], [7]),
        ([5, 8, 9], [1, 2], [5]),
        ([7, 8, 9], [0], []),
    ],
)
def test_a_run_ends_before_a_wrong_guess_and_before_what_cannot_be_sampled(
    tokens: list[int], unfit: list[int], sampled: list[int]
) -> None:
    plain = StepRow(sequence_id=0, tokens=[1], cached_length=0, block_table=[0], sample=SamplingParams())
    step = _LaunchedStep(3, [plain, replace(plain, guesses=(7, 8))], Event())
    best = torch.zeros(4)
    best[[1 + index for index in unfit]] = torch.inf
    step.end(Event(), torch.stack((torch.tensor([4, *tokens], dtype=torch.int32), best.view(torch.int32)), dim=1))
    output = step.result()
    drawn = [SampledToken(token, None) for token in sampled]
    first, more = drawn[0] if drawn else None, drawn[1:]
    assert output.sampled == [SampledToken(4, None), first]
    assert output.more == ({1: more} if sampled else {})
    assert list(output.failed) == ([] if sampled else [1])
