"""Greedy reference answers by transformers, and the rule for comparing answers with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

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


def greedy_answers(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[ReferenceAnswer]:
    """Greedy answers of transformers, one prompt at a time; end-of-sequence tokens do not stop them."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # spinning threads on busy cores are far slower
    # Only its plain attention implements the softcaps of Gemma 2.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            inputs = torch.tensor([list(prompt)])
            cache, tokens, margins = None, [], []
            for _ in range(num_tokens):
                output = model(inputs, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                top = output.logits[0, -1].topk(2)
                tokens.append(int(top.indices[0]))
                margins.append(float(top.values[0] - top.values[1]))
                inputs = top.indices[:1].view(1, 1)
            answers.append(ReferenceAnswer(tokens, margins))
    return answers


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
