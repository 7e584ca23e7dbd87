"""Steps of the same checkpoint in transformers: prompts by its plain forward, decode steps by continuous batching.

Called by `pdserve.bench.gpu_model.run`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pdserve.bench.gpu_model.steps import random_tokens
from pdserve.bench.kernels.case import import_peer

_WARM_PROMPTS = 2


class TransformersModel:
    def __init__(self, folder: Path, dtype: str, device: torch.device, *, options: Mapping[str, Any]) -> None:
        """
        Args:
            options: of transformers' ``ContinuousBatchingConfig``; its own choices if empty.

        Raises:
            AbsentError: transformers cannot be imported.
        """
        self._transformers = import_peer("transformers")
        loaded = self._transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model = loaded.to(device).eval()
        self._device = device
        self._options = options
        self._vocab_size: int = loaded.config.vocab_size

    def prefill_s(self, num_tokens: int, num_prompts: int) -> float:
        """Median seconds from a prompt to its likeliest next token on the host."""
        tokens = random_tokens(num_tokens, self._vocab_size)
        seconds = []
        for _ in range(_WARM_PROMPTS + num_prompts):
            started_s = perf_counter()
            self._next_token(tokens)
            seconds.append(perf_counter() - started_s)
        return statistics.median(seconds[_WARM_PROMPTS:])

    def decode_s(self, num_rows: int, context_tokens: int, num_steps: int) -> float:
        """Median seconds of a decode step of ``num_rows``, the last with ``context_tokens`` tokens a row.

        Raises:
            RuntimeError: a prompt got no answer, or the rows never decoded all together.
        """
        options: dict[str, Any] = {}
        if self._options:
            options["continuous_batching_config"] = self._transformers.ContinuousBatchingConfig(**self._options)
        answers = self._model.generate_batch(
            inputs=[random_tokens(context_tokens - num_steps, self._vocab_size, row) for row in range(num_rows)],
            generation_config=self._transformers.GenerationConfig(
                max_new_tokens=num_steps, min_new_tokens=num_steps, do_sample=False, eos_token_id=None, pad_token_id=0
            ),
            record_timestamps=True,
            max_new_tokens=num_steps,
            **options,
        )
        timestamps = [answer.timestamps for answer in answers.values() if not answer.error and answer.timestamps]
        if len(timestamps) < num_rows:
            raise RuntimeError(f"{num_rows - len(timestamps)} of {num_rows} prompts got no answer")
        return together_s(timestamps)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Continue ``prompt``, each token from a forward of all before it."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self._next_token(tokens))
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def _next_token(self, tokens: Sequence[int]) -> int:
        tokens_1T = torch.tensor([tokens], device=self._device)
        logits = self._model(input_ids=tokens_1T, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())


def together_s(timestamps: Sequence[Sequence[float]]) -> float:
    """Median gap between tokens of one sequence while all sequences decode.

    Args:
        timestamps: seconds of each sequence's tokens.

    Raises:
        RuntimeError: they never decode all together.
    """
    begin_s = max(times[0] for times in timestamps)
    end_s = min(times[-1] for times in timestamps)
    gaps = [
        after - before
        for times in timestamps
        for before, after in pairwise(times)
        if begin_s <= before and after <= end_s
    ]
    if not gaps:
        raise RuntimeError("its sequences never decoded all together")
    return statistics.median(gaps)
