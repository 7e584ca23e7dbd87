"""Answers of the executor with guesses: those of one token at a time, to the bit, whatever is guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from pdserve.contracts.step import BlockCopy, Executor, ModelLimits, SampledToken, StepBatch, StepHandle, StepRow
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.device_queue import Event
from pdserve.model.executors.drafting import Drafter
from pdserve.model.executors.emulated import EmulatedExecutor
from pdserve.model.executors.model import ModelExecutor, _LaunchedStep
from pdserve.model.sampling.grammars import GrammarMatchers
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import FAMILIES, write_checkpoint, write_family
from tests.model.traffic import Served, random_request, serve
from tests.vocabulary import DEMO_FOLDER, LIMITS, PERSON, compiled, encoded

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 60, 8, 211


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def an_executor(
    folder: Path, drafter: Drafter | None = None, matchers: GrammarMatchers | None = None, num_swap_slots: int = 0
) -> ModelExecutor:
    """Over a pool of NaN."""
    config = DecoderConfig.from_folder(folder)
    layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, "float32", "hash")
    return ModelExecutor(
        folder=folder,
        config=config,
        layout=layout,
        pool=nan_pool(layout.shape, torch.float32),
        precision=Precision(dtype="float32"),
        matchers=matchers,
        drafter=drafter,
        num_swap_slots=num_swap_slots,
    )


class Oracle:
    """Knows the answers, and spoils what it says of them.

    Args:
        first_wrong: guess that is the first wrong one.
    """

    def __init__(
        self,
        served: Served,
        requests: Sequence[GenerationRequest],
        first_wrong: Callable[[], int],
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._vocab_size = vocab_size
        answers = [served.tokens[request.request_id, request.choice] for request in requests]
        self._answers = [[token.token for token in answer] for answer in answers]
        self._first_wrong = first_wrong

    def read(self, rows: Sequence[StepRow]) -> None:
        pass

    def guess(self, rows: Sequence[StepRow]) -> Sequence[Sequence[int]]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: StepRow) -> Sequence[int]:
        start, first_wrong = row.sample_position - row.num_prompt_tokens, self._first_wrong()
        right = self._answers[row.sequence_id][start : start + row.max_guesses]
        return [(token + (index >= first_wrong)) % self._vocab_size for index, token in enumerate(right)]


def anything() -> Callable[[], int]:
    random = Random(1)
    return lambda: random.choice((0, 1, 3, 99, 99))


def free_guesses() -> Speculation:
    return Speculation(lambda batch: lambda num_guesses, depth: 1.0)


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


# With grammars


class Counting:
    """Counts the steps of an executor."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.pipeline_depth = inner.pipeline_depth
        self.num_steps = 0

    def submit(self, batch: StepBatch) -> StepHandle:
        self.num_steps += 1
        return self._inner.submit(batch)

    def close(self) -> None:
        self._inner.close()


class Broken(GrammarMatchers):
    def prescribed(self, row: StepRow) -> list[int]:
        raise KeyError(row.sequence_id)


@pytest.mark.parametrize("kind", ["model", "emulated"])
def test_a_fault_of_a_grammar_fails_its_step_once_the_copies_are_made(folder: Path, kind: str) -> None:
    matchers = Broken(compiled, vocab_size=VOCAB_SIZE, eos_token_ids=[0])
    executor: ModelExecutor | EmulatedExecutor
    blocks: npt.NDArray[Any]
    if kind == "model":
        executor = an_executor(folder, matchers=matchers, num_swap_slots=1)
        blocks = executor._model._pool.blocks.numpy()
    else:
        layout = KvLayout(
            num_blocks=8, num_kv_heads=1, num_layers=1, block_size=8, head_dim=1, dtype="uint64", model_hash="hash"
        )
        blocks = np.zeros(layout.shape, np.uint64)
        executor = EmulatedExecutor(
            layout=layout, pool=blocks, vocab_size=VOCAB_SIZE, num_swap_slots=1, matchers=matchers
        )
    row = StepRow(
        sequence_id=6, tokens=[1], cached_length=0, block_table=[0], sample=SamplingParams(), sample_position=1
    )
    blocks[5] = 1
    copies = StepBatch(step_id=1, rows=[replace(row, max_forced=3)], may_guess=True, swap_outs=[BlockCopy(5, 0)])
    with pytest.raises(RuntimeError, match=r"no guess could be made: KeyError\(6\)"):
        executor.submit(copies).result()
    blocks[5] = 0
    after = executor.submit(StepBatch(step_id=2, rows=[row], swap_ins=[BlockCopy(0, 5)])).result()
    assert after.sampled[0] is not None
    assert (blocks[5] == 1).all()


def a_guided_executor(kind: str, drafter: Drafter | None) -> Counting:
    """Of the demo model, or of hashes."""
    matchers = GrammarMatchers(compiled, vocab_size=LIMITS.vocab_size, eos_token_ids=LIMITS.eos_token_ids)
    if kind == "hashes":
        layout = KvLayout(
            num_blocks=NUM_BLOCKS, num_kv_heads=1, num_layers=1, block_size=BLOCK_SIZE, head_dim=1, dtype="uint64",
            model_hash="hash",
        )  # fmt: skip
        pool = np.zeros(layout.shape, np.uint64)
        return Counting(
            EmulatedExecutor(
                layout=layout,
                pool=pool,
                vocab_size=LIMITS.vocab_size,
                eos_token_ids=LIMITS.eos_token_ids,
                matchers=matchers,
                pipeline_depth=1,
                drafter=drafter,
            )
        )
    return Counting(an_executor(DEMO_FOLDER, drafter, matchers))


def guided_requests() -> list[GenerationRequest]:
    """Of several grammars, greedy and drawn, with an end that must wait; one has no grammar."""
    grammars = (
        PERSON,
        Grammar(GrammarKind.REGEX, "(the (red|green) (circle|square), ){2,5}end"),
        Grammar(GrammarKind.EBNF, 'root ::= "yes" | "no" | "yellow"'),
    )
    return [
        GenerationRequest(
            request_id=number,
            prompt_tokens=tuple(encoded("What is 3 + 4?")),
            sampling=SamplingParams(
                grammar=grammars[number % 3] if number != 7 else None,
                temperature=float(number % 2),
                seed=number,
                max_tokens=40,
                min_tokens=number % 3 * 5,
                num_logprobs=1,
            ),
        )
        for number in range(18)
    ]


@pytest.mark.parametrize("kind", ["demo", "hashes"])
@pytest.mark.parametrize("what", ["prescribed", "oracle", "wrong", "anything"])
def test_answers_that_follow_grammars_are_those_of_one_token_at_a_time(kind: str, what: str) -> None:
    """Also where another worker goes on after some of their tokens."""
    requests = guided_requests()
    plain = a_guided_executor(kind, None)
    expected = serve(plain, requests, LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    assert not expected.ends
    first_wrong = {"oracle": lambda: 99, "wrong": lambda: 0, "anything": anything()}.get(what)
    drafter = None if first_wrong is None else Oracle(expected, requests, first_wrong, LIMITS.vocab_size)
    guessing, speculation = a_guided_executor(kind, drafter), free_guesses()
    assert serve(guessing, requests, LIMITS, NUM_BLOCKS, BLOCK_SIZE, speculation=speculation) == expected
    assert speculation.num_right > 50
    rests = []
    for request in requests:
        answer = [token.token for token in expected.tokens[request.request_id, 0]]
        rests.append(replace(request, attempt=1, emitted_tokens=tuple(answer[: len(answer) // 2])))
    resumed = serve(a_guided_executor(kind, drafter), rests, LIMITS, NUM_BLOCKS, BLOCK_SIZE, speculation=free_guesses())
    for request in rests:
        whole = expected.tokens[request.request_id, 0]
        assert resumed.tokens[request.request_id, 0] == whole[len(request.emitted_tokens) :]


def test_prescribed_tokens_save_steps_of_an_answer_in_json() -> None:
    request = guided_requests()[0]
    plain, guessing = a_guided_executor("demo", None), a_guided_executor("demo", None)
    served = serve(plain, [request], LIMITS, NUM_BLOCKS, BLOCK_SIZE)
    assert serve(guessing, [request], LIMITS, NUM_BLOCKS, BLOCK_SIZE, speculation=free_guesses()) == served
    assert plain.num_steps == len(served.tokens[0, 0])
    assert guessing.num_steps < 0.5 * plain.num_steps
