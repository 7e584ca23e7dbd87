"""From a request body, its tokenised prompt and the model's limits to `SamplingParams`."""

from __future__ import annotations

import secrets

from pdserve.contracts.request import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.schema import GenerationBody

_DEFAULTS = SamplingParams()
_SEED_MASK = 2**64 - 1


def sampling_params(body: GenerationBody, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Everything that decides the answer beside the prompt, with defaults filled in and a seed minted.

    Raises:
        ApiError: prompt and answer do not fit into the model's context.
    """
    return SamplingParams(
        temperature=_DEFAULTS.temperature if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),  # vLLM's -1 keeps all, too
        top_p=_DEFAULTS.top_p if body.top_p is None else body.top_p,
        seed=secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK,
        max_tokens=_max_tokens(body, num_prompt_tokens, max_model_len),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=body.num_logprobs,
    )


def _max_tokens(body: GenerationBody, num_prompt_tokens: int, max_model_len: int) -> int:
    """The limit asked for, or the route's default as far as the context allows."""
    wanted = body.token_limit
    left = max_model_len - num_prompt_tokens
    context = f"This model's maximum context length is {max_model_len} tokens."
    if left < 1:
        message = f"{context} The prompt has {num_prompt_tokens} and leaves no room for an answer; shorten it."
        raise ApiError(400, message, code="context_length_exceeded")
    if wanted is not None and wanted > left:
        message = (
            f"{context} However, you requested {num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, "
            f"{wanted} for the answer); lower max_tokens to {left} or shorten the prompt."
        )
        raise ApiError(400, message, code="context_length_exceeded")
    if wanted is None:
        return left if body.default_token_limit is None else min(left, body.default_token_limit)
    return wanted
