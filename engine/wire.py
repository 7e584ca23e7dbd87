"""Conversions between the wire's messages and the contracts, in both directions.

What arrives is checked against local limits before anything is allocated for it: every length, token id and number. A
message that fails a check raises `WireError`, which its receiver turns into a REJECTED event of that one request.
Used by the worker's service and by the router. Never keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.step import ModelLimits, TokenLogprobs
from pdserve.proto.v1 import worker_pb2

HANDLE_BYTES = 16
"""Length of a parked prompt's handle."""

MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_CACHE_SALT_BYTES = 64
MAX_ADDRESS_LENGTH = 255
MAX_DURATION_S = 86400.0


class WireError(ValueError):
    """A message that arrived is outside the local limits; the text says which field."""


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise WireError(what)


def _token_ids(ids: Sequence[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """The ids as a tuple, each checked to be below ``vocab_size``."""
    tokens = tuple(ids)
    if tokens and max(tokens) >= vocab_size:
        raise WireError(f"{field}: token id {max(tokens)} is outside the vocabulary of {vocab_size}")
    return tokens


def sampling_to_proto(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    return worker_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        num_logprobs=sampling.num_logprobs,
    )


def sampling_from_proto(message: worker_pb2.SamplingParams, limits: ModelLimits) -> SamplingParams:
    """Raises `WireError` for a value that no sampler can honour."""
    _check(isfinite(message.temperature) and message.temperature >= 0, "temperature must be finite and at least 0")
    _check(0 < message.top_p <= 1, "top_p must be in (0, 1]")
    _check(message.max_tokens >= 1, "max_tokens must be at least 1")
    _check(-1 <= message.num_logprobs <= MAX_TOP_LOGPROBS, f"num_logprobs must be in -1..{MAX_TOP_LOGPROBS}")
    _check(len(message.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"more than {MAX_STOP_TOKEN_IDS} stop_token_ids")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=_token_ids(message.stop_token_ids, limits.vocab_size, "stop_token_ids"),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs,
    )


def request_to_proto(request: GenerationRequest) -> worker_pb2.Request:
    return worker_pb2.Request(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_tokens=request.prompt_tokens,
        emitted_tokens=request.emitted_tokens,
        sampling=sampling_to_proto(request.sampling),
        cache_salt=request.cache_salt,
        deadline_s=request.deadline_s,
        ttft_slo_s=request.ttft_slo_s,
        handoff=request.handoff,
        choice=request.choice,
        num_choices=request.num_choices,
    )


def request_from_proto(message: worker_pb2.Request, limits: ModelLimits) -> GenerationRequest:
    """Raises `WireError` for a request that this worker could never run."""
    num_prompt, num_emitted = len(message.prompt_tokens), len(message.emitted_tokens)
    _check(num_prompt >= 1, "prompt_tokens is empty")
    _check(
        num_prompt + num_emitted < limits.max_model_len,
        f"{num_prompt} prompt and {num_emitted} emitted tokens leave no room to generate: "
        f"the model's length is {limits.max_model_len}",
    )
    _check(0 < message.deadline_s <= MAX_DURATION_S, f"deadline_s must be in (0, {MAX_DURATION_S:.0f}]")
    _check(0 <= message.ttft_slo_s <= MAX_DURATION_S, f"ttft_slo_s must be in [0, {MAX_DURATION_S:.0f}]")
    _check(len(message.cache_salt) <= MAX_CACHE_SALT_BYTES, f"cache_salt is over {MAX_CACHE_SALT_BYTES} bytes")
    sampling = sampling_from_proto(message.sampling, limits)
    _check(num_emitted < sampling.max_tokens, "every one of max_tokens is already emitted")
    return GenerationRequest(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt_tokens=_token_ids(message.prompt_tokens, limits.vocab_size, "prompt_tokens"),
        emitted_tokens=_token_ids(message.emitted_tokens, limits.vocab_size, "emitted_tokens"),
        sampling=sampling,
        cache_salt=message.cache_salt,
        deadline_s=message.deadline_s,
        ttft_slo_s=message.ttft_slo_s,
        handoff=message.handoff,
    )


def source_to_proto(source: KvSource) -> worker_pb2.KvSource:
    return worker_pb2.KvSource(address=source.address, worker_epoch=source.worker_epoch, handle=source.handle)


def source_from_proto(message: worker_pb2.KvSource) -> KvSource:
    """Raises `WireError` for an address or a handle of the wrong length."""
    _check(1 <= len(message.address) <= MAX_ADDRESS_LENGTH, f"source.address must have 1..{MAX_ADDRESS_LENGTH} letters")
    _check(len(message.handle) == HANDLE_BYTES, f"source.handle must be {HANDLE_BYTES} bytes")
    return KvSource(address=message.address, worker_epoch=message.worker_epoch, handle=message.handle)


def logprobs_to_proto(logprobs: TokenLogprobs) -> worker_pb2.Logprobs:
    return worker_pb2.Logprobs(
        logprob=logprobs.logprob,
        top_tokens=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: worker_pb2.Logprobs) -> TokenLogprobs:
    """Raises `WireError` when the columns differ in length."""
    _check(len(message.top_tokens) == len(message.top_logprobs), "top_tokens and top_logprobs differ in length")
    return TokenLogprobs(message.logprob, tuple(zip(message.top_tokens, message.top_logprobs, strict=True)))


def finish_to_proto(reason: FinishReason) -> worker_pb2.FinishReason.ValueType:
    return worker_pb2.FinishReason.ValueType(reason)


def finish_from_proto(value: int) -> FinishReason:
    """Raises `WireError` for a reason that this version does not know."""
    try:
        return FinishReason(value)
    except ValueError:
        raise WireError(f"unknown finish reason {value}") from None
