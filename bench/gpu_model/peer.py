"""The same checkpoint in transformers: prompts by its plain forward, decode steps by its continuous batching.

Called by `pdserve.bench.gpu_model.measure`. If continuous batching is missing or fails here, a batch is generated with
a static cache instead; `PeerModel.ways` records the choice and its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pdserve.bench.gpu_model.own import random_tokens
from pdserve.bench.kernels.contest import import_peer

_WARM_PROMPTS = 2


class PeerFailedError(Exception):
    """transformers did not do it, and the message says why."""


class PeerModel:
    """A checkpoint in transformers."""

    def __init__(
        self, folder: Path, dtype: str, device: torch.device, *, options: dict[str, Any] | None = None
    ) -> None:
        """
        Args:
            options: of its continuous batching, beside its own choices; see transformers' ``ContinuousBatchingConfig``.

        Raises:
            PeerAbsentError: transformers cannot be imported.
        """
        self._transformers = import_peer("transformers")
        loaded = self._transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model = loaded.to(device).eval()
        self._device = device
        self._options = options or {}
        self._vocab_size: int = loaded.config.vocab_size
        self.ways: list[str] = []
        """In words, how decode steps were measured, and what failed before."""

    def prefill_s(self, num_tokens: int, num_prompts: int) -> float:
        """Median seconds of a prompt, to its likeliest next token on the host."""
        tokens_1T = self._tensor(random_tokens(num_tokens, self._vocab_size))
        seconds = []
        for _ in range(_WARM_PROMPTS + num_prompts):
            started_s = perf_counter()
            self._next_token(tokens_1T)
            seconds.append(perf_counter() - started_s)
        return statistics.median(seconds[_WARM_PROMPTS:])

    def decode_s(self, num_rows: int, context_tokens: int, num_steps: int) -> float:
        """Median seconds of a decode step of ``num_rows``, the last of which sees ``context_tokens`` tokens a row.

        Raises:
            PeerFailedError: no way worked.
        """
        prompts = [random_tokens(context_tokens - num_steps, self._vocab_size, row) for row in range(num_rows)]
        ways: list[tuple[str, Callable[[list[list[int]], int], float]]] = [
            ("continuous batching", self._continuous_s),
            ("generate with a static cache", self._static_s),
        ]
        reasons = []
        for name, way in ways:
            try:
                seconds = way(prompts, num_steps)
            except torch.AcceleratorError:
                raise  # The device is lost, and with it every other way.
            except Exception as error:  # Whatever is wrong with transformers here, the next way is tried.
                reasons.append(f"{name} failed: {first_line(error)}")
                continue
            self._note([*reasons, f"{name}, {self._model.config._attn_implementation}"], num_rows)
            return seconds
        self._note(reasons, num_rows)
        raise PeerFailedError("; ".join(reasons))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What follows ``prompt``, each token from a forward of all before it."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self._next_token(self._tensor(tokens)))
        return tokens[len(prompt) :]

    def _note(self, words: list[str], num_rows: int) -> None:
        self.ways.append(f"{num_rows} rows: {'; '.join(words)}")

    @torch.inference_mode()
    def _next_token(self, tokens_1T: torch.Tensor) -> int:
        logits = self._model(input_ids=tokens_1T, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    def _continuous_s(self, prompts: list[list[int]], num_steps: int) -> float:
        """The median gap between tokens while all prompts decode."""
        options = {}
        if self._options:
            options["continuous_batching_config"] = self._transformers.ContinuousBatchingConfig(**self._options)
        answers = self._model.generate_batch(
            inputs=prompts,
            generation_config=self._generation(num_steps),
            record_timestamps=True,
            max_new_tokens=num_steps,
            **options,
        )
        told = [answer.timestamps for answer in answers.values() if not answer.error and answer.timestamps]
        if len(told) < len(prompts):
            raise PeerFailedError(f"{len(prompts) - len(told)} of {len(prompts)} prompts got no answer")
        return together_s(told)

    def _static_s(self, prompts: list[list[int]], num_steps: int) -> float:
        """From the time of all tokens, less that of the first one."""
        tokens_BT = torch.tensor(prompts, device=self._device)
        seconds = []
        for num_new in (2, 1, num_steps):  # The first compiles what there is to compile.
            started_s = perf_counter()
            self._model.generate(
                tokens_BT,
                attention_mask=torch.ones_like(tokens_BT),
                generation_config=self._generation(num_new),
                cache_implementation="static",
            )
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(perf_counter() - started_s)
        return (seconds[2] - seconds[1]) / (num_steps - 1)

    def _generation(self, num_new: int) -> Any:
        return self._transformers.GenerationConfig(
            max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def _tensor(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self._device)


def first_line(error: Exception) -> str:
    """What it says."""
    return (str(error) or repr(error)).splitlines()[0]


def together_s(timestamps: Sequence[Sequence[float]]) -> float:
    """Median gap between tokens of one sequence while all decode.

    Args:
        timestamps: of each sequence's tokens, in seconds.

    Raises:
        PeerFailedError: they never do.
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
        raise PeerFailedError("its sequences never decoded all together")
    return statistics.median(gaps)
