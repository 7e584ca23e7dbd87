"""Greedy reference answers by transformers, and the rule for comparing answers with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tests.model.checkpoints import load_reference, reference_choices

MARGIN = 1e-3
"""Top-2 logit margin in fp32 below which rounding may choose either token."""


class ReferenceAnswer(NamedTuple):
    """Greedy answer with the margin of each token."""

    tokens: list[int]
    margins: list[float]
    """Top-2 logit margin at each token."""

    @property
    def num_certain(self) -> int:
        """Tokens before the first position whose margin is below `MARGIN`."""
        return next((i for i, margin in enumerate(self.margins) if margin < MARGIN), len(self.tokens))


def greedy_choices(
    folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[ReferenceAnswer]:
    """What transformers would choose in the place of each token of each answer, after those before it. An answer of
    which every token is that is the greedy one."""
    torch.set_num_threads(1)  # spinning threads on busy cores are far slower
    model = load_reference(folder)
    pairs = zip(prompts, answers, strict=True)
    choices = [reference_choices(model, list(prompt), list(answer)) for prompt, answer in pairs]
    return [ReferenceAnswer(each.tokens, each.margins) for each in choices]


def assert_same_tokens(answers: Sequence[Sequence[int]], references: Sequence[ReferenceAnswer]) -> None:
    """Check that every answer equals its reference up to the first uncertain position; under 1 % of the answers may be
    uncertain there and differ."""
    num_uncertain = 0
    for index, (answer, reference) in enumerate(zip(answers, references, strict=True)):
        certain = reference.num_certain
        assert list(answer[:certain]) == reference.tokens[:certain], f"answer {index} differs"
        assert len(answer) == len(reference.tokens), f"answer {index} has another length"
        num_uncertain += list(answer) != reference.tokens
    assert num_uncertain <= max(1, len(answers) // 100), f"{num_uncertain} answers differ after an uncertain token"
