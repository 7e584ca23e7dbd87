"""Answers of the emulated executor, computed without a KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.contracts.request import SamplingParams
from pdserve.model.executors.hash_chain import ROOT_STATE, HashVocabulary, link, mix64, sampling_salt


def expected_tokens(
    prompt_tokens: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    *,
    sampling: SamplingParams | None = None,
    choice: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    eos_period: int = 0,
) -> list[int]:
    """Answer to a prompt: ``num_tokens`` tokens, or fewer if one ends it.

    Args:
        sampling: reads seed, temperature, ``min_tokens``, ``stop_token_ids`` and ``ignore_eos``; ``None`` is greedy.
    """
    sampling = sampling or SamplingParams(temperature=0)
    vocabulary = HashVocabulary(vocab_size, eos_token_ids, eos_period)
    salt = sampling_salt(sampling, choice)
    state = ROOT_STATE
    for token in prompt_tokens:
        state = mix64(link(state, token))
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    early_ends = (*eos_token_ids, *sampling.stop_token_ids)
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append(vocabulary.next_token(state, salt, early_ends if len(answer) < sampling.min_tokens else ()))
        if answer[-1] in ends:
            break
        state = mix64(link(state, answer[-1]))
    return answer
