"""Models whose answers are known: what the handoff benchmarks ask, and what they compare with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple, Protocol

from pdserve.bench.checked_streams import expected_answer
from pdserve.contracts.request import SamplingParams
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.hash_chain import HashVocabulary
from pdserve.model.weights.demo_model import DEMO_MODEL
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

MAX_PROMPT, MAX_ANSWER = 240, 40
VOCAB_SIZE = 512
NUM_FAMILIES = 8
"""Prompts of a family share a prefix."""
NUM_LEARNED = 48


class Question(NamedTuple):
    prompt: tuple[int, ...]
    sampling: SamplingParams


class Model(Protocol):
    path: Path
    emulate: str
    """GPU to emulate instead of computing."""

    def ask(self, rng: random.Random) -> Question:
        """A question whose answer is known."""
        ...

    def answer(self, question: Question) -> list[int]: ...


class EmulatedModel:
    """A hash of all tokens so far. Workers check every context that they continue: a lost, old or misplaced byte of KV
    ends in a failed step or a wrong token."""

    path = DEMO_MODEL
    emulate = "h100-sxm"

    def __init__(self) -> None:
        limits = DecoderConfig.from_folder(self.path).limits(0)
        self._vocabulary = HashVocabulary(limits.vocab_size, limits.eos_token_ids)

    def ask(self, rng: random.Random) -> Question:
        length, family = rng.randint(1, MAX_PROMPT), rng.randrange(NUM_FAMILIES)
        prompt = tuple((family * 7 + index) % VOCAB_SIZE for index in range(length))
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(2, MAX_ANSWER), ignore_eos=True)
        return Question((*prompt, rng.randrange(VOCAB_SIZE)), sampling)

    def answer(self, question: Question) -> list[int]:
        return expected_answer(question.prompt, question.sampling.max_tokens, self._vocabulary)


class ComputedModel:
    """Random weights, and some questions whose answers are learned beforehand from one rank. Tokens are drawn at
    temperature 1, so that wrong KV changes them."""

    emulate = ""

    def __init__(self, folder: Path) -> None:
        self.path = write_random_checkpoint(
            folder, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, vocab_size=VOCAB_SIZE
        )
        rng = random.Random(0)
        families = [[rng.randrange(VOCAB_SIZE) for _ in range(MAX_PROMPT)] for _ in range(NUM_FAMILIES)]
        self.questions = [
            Question(
                (*rng.choice(families)[: rng.randrange(MAX_PROMPT)], rng.randrange(VOCAB_SIZE)),
                SamplingParams(seed=seed, max_tokens=MAX_ANSWER, ignore_eos=True),
            )
            for seed in range(NUM_LEARNED)
        ]
        self.answers: list[list[int]] = []
        """Answer to each question."""

    def ask(self, rng: random.Random) -> Question:
        prompt, sampling = rng.choice(self.questions)
        return Question(
            prompt, SamplingParams(seed=sampling.seed, max_tokens=rng.randint(2, MAX_ANSWER), ignore_eos=True)
        )

    def answer(self, question: Question) -> list[int]:
        return self.answers[question.sampling.seed][: question.sampling.max_tokens]
