"""Conversion of a request body, its tokenised prompt and the model's limits to `SamplingParams`.

Owns the limits that depend on the model or on the router's memory; `pdserve.router.http.schema` owns the ranges of
single fields. Called by `pdserve.router.http.edge`; never touches text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from pdserve.contracts.request import Grammar, SamplingParams
from pdserve.router.http.errors import ApiError
from pdserve.router.http.schema import GenerationBody

MAX_ANSWER_ENTRIES = 2**21
"""Maximum tokens of all answers to one request, including the alternatives listed with log probabilities. Prompts shown
in answers have a limit of the same size. The router holds answers that are not streamed in memory until complete."""

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy, as in vLLM: dividing logits by them would overflow."""

LEAST_TOP_P = 1e-6
"""Keeps only the most likely token, and is above 0 in 32 bits, too."""

FRESH_SEED = -1
"""Seed that stands for another one in each request, as in many clients and servers."""

_DEFAULTS = SamplingParams()
_SEED_MASK = 2**64 - 1


def sampling_params(
    body: GenerationBody,
    num_prompt_tokens: int,
    max_model_len: int,
    *,
    most_tokens: int = 0,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Sampling parameters of an answer, with defaults filled in and a seed minted.

    Args:
        most_tokens: limit of an answer whose request sets none; 0 for the model's and the router's alone.

    Raises:
        ApiError: prompt and answer exceed the model's context, or the answers exceed memory.
    """
    max_tokens = _max_tokens(body, num_prompt_tokens, max_model_len, most_tokens)
    _check_shown_prompt(body, num_prompt_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"min_tokens is {min_tokens}, and the answer has {max_tokens} tokens at most; lower min_tokens"
        raise ApiError(400, message, param="min_tokens")
    temperature = _or(body.temperature, _DEFAULTS.temperature)
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(body.top_k or 0, 0),  # vLLM's -1 keeps all, too
        top_p=max(_or(body.top_p, _DEFAULTS.top_p), LEAST_TOP_P),
        min_p=_or(body.min_p, _DEFAULTS.min_p),
        repetition_penalty=_or(body.repetition_penalty, _DEFAULTS.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, _DEFAULTS.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, _DEFAULTS.frequency_penalty),
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        seed=secrets.randbits(64) if body.seed is None or body.seed == FRESH_SEED else body.seed & _SEED_MASK,
        max_tokens=max(max_tokens, 1),  # prompt log probabilities alone still need one sampled token
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
        grammar=grammar,
    )


def check_prompt_length(body: GenerationBody, num_tokens: int, max_model_len: int, *, is_least: bool = False) -> None:
    """Check that a prompt of ``num_tokens`` tokens (a lower bound if ``is_least``) leaves room for an answer.

    Raises:
        ApiError: it does not.
    """
    if num_tokens >= max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. The prompt has "
            f"{'at least ' if is_least else ''}{num_tokens} and leaves no room for an answer; shorten it."
        )
        raise ApiError(400, message, param=body.prompt_field, code="context_length_exceeded")


def _check_shown_prompt(body: GenerationBody, num_prompt_tokens: int) -> None:
    """Check that answers that list the prompt's tokens fit into memory."""
    if not body.shows_prompt:
        return
    most = MAX_ANSWER_ENTRIES // (body.num_answers * (2 + body.num_prompt_logprobs))
    if num_prompt_tokens > most:
        message = f"a prompt of {num_prompt_tokens} tokens is too much to show in {body.num_answers} answers"
        raise ApiError(400, f"{message}; shorten it to {most}, or ask for less", param=body.prompt_field)


def check_token_ids(field: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Check that ``tokens`` of a request's ``field`` are in the vocabulary.

    Raises:
        ApiError: a token id is too large.
    """
    highest = max(tokens, default=0)
    if highest >= vocab_size:
        raise ApiError(400, f"{field} has token id {highest}; the model's are below {vocab_size}", param=field)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(body: GenerationBody, num_prompt_tokens: int, max_model_len: int, most_tokens: int) -> int:
    """Requested limit, or the route's default as far as context, memory and ``most_tokens`` allow."""
    wanted = body.token_limit
    check_prompt_length(body, num_prompt_tokens, max_model_len)
    left = max_model_len - num_prompt_tokens
    if wanted is not None and body.may_fill_context:
        wanted = min(wanted, left)
    if wanted is not None and wanted > left:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, {wanted} for the answer); lower "
            f"{body.limit_field} to {left} or shorten the prompt."
        )
        raise ApiError(400, message, param=body.prompt_field, code="context_length_exceeded")
    most = MAX_ANSWER_ENTRIES // (body.num_answers * (2 + body.num_logprobs))
    if wanted is None:
        default = left if body.default_token_limit is None else body.default_token_limit
        return min(left, most, default, most_tokens or left)
    if wanted > most:
        message = f"{body.num_answers} answers of {wanted} tokens are too much for one request; ask for {most} at most"
        raise ApiError(400, message, param=body.limit_field)
    return wanted
