"""Converts between the messages of `worker.proto` and the contracts, for workers and the router. Keeps no state.

Checks every received length, token id and number against local limits before allocating for it. A message that fails a
check raises `WireError`; a worker then emits a REJECTED event for that one request. Tokens travel as columns of equal
length, log probabilities only for the entries that request them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from enum import IntEnum
from math import isfinite
from typing import TypeVar, cast

from pdserve.contracts.events import (
    ClientEvent,
    PromptLogprobsEvent,
    RefusalCode,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    SchedulerLoad,
    TokenEvent,
)
from pdserve.contracts.request import (
    HANDLE_BYTES,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_OWNER_CHARS,
    MAX_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    REPETITION_PENALTIES,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    KvSource,
    PrefixSource,
    SamplingParams,
)
from pdserve.contracts.step import ModelLimits, TokenLogprobs
from pdserve.proto.v1 import worker_pb2

MAX_CACHE_SALT_BYTES = 64
MAX_ADDRESS_LENGTH = 255
MAX_DURATION_S = 86400.0
_REFUSALS = {code.value: code for code in RefusalCode}
_EVENT_FIELDS = [name for name in RequestEvent._fields if name != "key"]
_LOAD_FIELDS = SchedulerLoad._fields
_SAMPLING_FIELDS = [field.name for field in fields(SamplingParams) if field.name not in ("logit_bias", "grammar")]
_OTHER_REQUEST_FIELDS = ("sampling", "block_hashes", "prefix_source")
_REQUEST_FIELDS = [field.name for field in fields(GenerationRequest) if field.name not in _OTHER_REQUEST_FIELDS]
"""Fields with the same name in the message. `block_hashes` is never on the wire."""
_OBJECTIVES = ("ttft_slo_s", "patience_s", "stall_slo_s", "max_gap_s")
_PREFIX_SOURCE_FIELDS = [field.name for field in fields(PrefixSource)]


_Kind = TypeVar("_Kind", bound=IntEnum)


class WireError(ValueError):
    """A received message exceeds the local limits; the text names the field."""


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise WireError(what)


def enum_from_proto(kind: type[_Kind], value: int) -> _Kind:
    """Raises `WireError` for a value that this version does not know."""
    try:
        return kind(value)
    except ValueError:
        raise WireError(f"unknown {kind.__name__} {value}") from None


def _token_ids(ids: Sequence[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """The ids as a tuple, each checked to be below ``vocab_size``."""
    tokens = tuple(ids)
    if tokens and max(tokens) >= vocab_size:
        raise WireError(f"{field}: token id {max(tokens)} is outside the vocabulary of {vocab_size}")
    return tokens


def sampling_to_proto(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    return worker_pb2.SamplingParams(
        bias_tokens=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        grammar=None if sampling.grammar is None else grammar_to_proto(sampling.grammar),
        **{name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
    )


def sampling_from_proto(message: worker_pb2.SamplingParams, limits: ModelLimits) -> SamplingParams:
    """Raises `WireError` for a value that no sampler can honour."""
    _check(isfinite(message.temperature) and message.temperature >= 0, "temperature must be finite and at least 0")
    _check(0 < message.top_p <= 1, "top_p must be in (0, 1]")
    _check(0 <= message.min_p <= 1, "min_p must be in [0, 1]")
    _check(message.max_tokens >= 1, "max_tokens must be at least 1")
    _check(message.min_tokens <= message.max_tokens, "min_tokens must be at most max_tokens")
    _check_penalties(message)
    for name, count in ("num_logprobs", message.num_logprobs), ("num_prompt_logprobs", message.num_prompt_logprobs):
        _check(-1 <= count <= MAX_TOP_LOGPROBS, f"{name} must be in -1..{MAX_TOP_LOGPROBS}")
    _check(len(message.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"more than {MAX_STOP_TOKEN_IDS} stop_token_ids")
    stop_token_ids = _token_ids(message.stop_token_ids, limits.vocab_size, "stop_token_ids")
    if message.min_tokens:
        num_ends = len({*stop_token_ids, *limits.eos_token_ids})
        _check(num_ends < limits.vocab_size, "min_tokens: every token of the vocabulary is a stop token")
    given = {name: getattr(message, name) for name in _SAMPLING_FIELDS}
    given["repetition_penalty"] = message.repetition_penalty or 1.0
    given["stop_token_ids"] = stop_token_ids
    grammar = grammar_from_proto(message.grammar, limits) if message.HasField("grammar") else None
    return SamplingParams(logit_bias=_logit_bias(message, limits.vocab_size), grammar=grammar, **given)


def grammar_to_proto(grammar: Grammar) -> worker_pb2.Grammar:
    kind = worker_pb2.Grammar.Kind.ValueType(grammar.kind)
    return worker_pb2.Grammar(kind=kind, text=grammar.text, owner=grammar.owner)


def grammar_from_proto(message: worker_pb2.Grammar, limits: ModelLimits) -> Grammar:
    """Raises `WireError` for a grammar that this worker could never follow."""
    _check(len(message.text.encode()) <= MAX_GRAMMAR_BYTES, f"the grammar is over {MAX_GRAMMAR_BYTES} bytes")
    _check(bool(limits.eos_token_ids), "the model has no end-of-sequence token, which a grammar needs")
    _check(len(message.owner) <= MAX_OWNER_CHARS, f"the grammar's owner has over {MAX_OWNER_CHARS} letters")
    return Grammar(enum_from_proto(GrammarKind, message.kind), message.text, message.owner)


def _check_penalties(message: worker_pb2.SamplingParams) -> None:
    least, largest = REPETITION_PENALTIES
    is_usable = not message.repetition_penalty or least <= message.repetition_penalty <= largest
    _check(is_usable, f"repetition_penalty must be in [{least:g}, {largest:g}]")
    for name in ("presence_penalty", "frequency_penalty"):
        is_usable = -MAX_PENALTY <= getattr(message, name) <= MAX_PENALTY
        _check(is_usable, f"{name} must be in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]")


def _logit_bias(message: worker_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    _check(len(message.bias_tokens) == len(message.biases), "bias_tokens and biases differ in length")
    _check(len(message.biases) <= MAX_BIASES, f"more than {MAX_BIASES} entries of logit_bias")
    _check(all(-MAX_BIAS <= bias <= MAX_BIAS for bias in message.biases), f"logit_bias is outside +-{MAX_BIAS:g}")
    tokens = _token_ids(message.bias_tokens, vocab_size, "logit_bias")
    _check(len(set(tokens)) == len(tokens), "logit_bias names a token twice")
    return tuple(zip(tokens, message.biases, strict=True))


def request_to_proto(request: GenerationRequest) -> worker_pb2.Request:
    prefix = request.prefix_source
    values = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    for name in _OBJECTIVES:  # longer ones, which stand for none, order nothing that lives so long
        values[name] = min(values[name], MAX_DURATION_S)
    return worker_pb2.Request(
        sampling=sampling_to_proto(request.sampling),
        prefix_source=None if prefix is None else worker_pb2.PrefixSource(**asdict(prefix)),
        **values,
    )


def request_from_proto(message: worker_pb2.Request, limits: ModelLimits) -> GenerationRequest:
    """Raises `WireError` for a request that this worker could never run."""
    _check(len(message.prompt_tokens) >= 1, "prompt_tokens is empty")
    _check(0 < message.deadline_s <= MAX_DURATION_S, f"deadline_s must be in (0, {MAX_DURATION_S:.0f}]")
    for name in _OBJECTIVES:
        _check(0 <= getattr(message, name) <= MAX_DURATION_S, f"{name} must be in [0, {MAX_DURATION_S:.0f}]")
    _check(len(message.cache_salt) <= MAX_CACHE_SALT_BYTES, f"cache_salt is over {MAX_CACHE_SALT_BYTES} bytes")
    sampling = sampling_from_proto(message.sampling, limits)
    _check(len(message.emitted_tokens) < sampling.max_tokens, "every one of max_tokens is already emitted")
    _check(message.choice < MAX_CHOICES, f"choice must be below {MAX_CHOICES}")
    given = {name: getattr(message, name) for name in _REQUEST_FIELDS}
    for name in ("prompt_tokens", "emitted_tokens"):
        given[name] = _token_ids(given[name], limits.vocab_size, name)
    prefix_source = _prefix_source(message.prefix_source) if message.HasField("prefix_source") else None
    return GenerationRequest(sampling=sampling, prefix_source=prefix_source, **given)


def _check_address(address: str, name: str) -> None:
    _check(1 <= len(address) <= MAX_ADDRESS_LENGTH, f"{name}.address must have 1..{MAX_ADDRESS_LENGTH} letters")


def _prefix_source(message: worker_pb2.PrefixSource) -> PrefixSource:
    _check_address(message.address, "prefix_source")
    _check(0 < message.max_s <= MAX_DURATION_S, f"prefix_source.max_s must be in (0, {MAX_DURATION_S:.0f}]")
    return PrefixSource(**{name: getattr(message, name) for name in _PREFIX_SOURCE_FIELDS})


def source_to_proto(source: KvSource) -> worker_pb2.KvSource:
    return worker_pb2.KvSource(address=source.address, worker_epoch=source.worker_epoch, handle=source.handle)


def source_from_proto(message: worker_pb2.KvSource) -> KvSource:
    """Raises `WireError` for an address or a handle of the wrong length."""
    _check_address(message.address, "source")
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


def pack_frames(events: Iterable[ClientEvent]) -> dict[int, worker_pb2.StepFrame]:
    """One frame for each session that the events are for, by session id; order within a session is kept."""
    tokens: defaultdict[int, list[TokenEvent]] = defaultdict(list)
    frames: defaultdict[int, worker_pb2.StepFrame] = defaultdict(worker_pb2.StepFrame)
    for event in events:
        if isinstance(event, TokenEvent):
            tokens[event.key.session].append(event)
        elif isinstance(event, PromptLogprobsEvent):
            frames[event.key.session].prompt_logprobs.append(_prompt_logprobs_to_proto(event))
        else:
            frames[event.key.session].events.append(event_to_proto(event))
    for session, column in tokens.items():
        frames[session].tokens.CopyFrom(pack_tokens(column))
    return dict(frames)


def pack_tokens(events: list[TokenEvent]) -> worker_pb2.Tokens:
    with_logprobs = [(entry, event.logprobs) for entry, event in enumerate(events) if event.logprobs is not None]
    return worker_pb2.Tokens(
        request_id=[event.key.request_id for event in events],
        attempt=[event.key.attempt for event in events],
        index=[event.index for event in events],
        token=[event.token for event in events],
        finish=cast(list[worker_pb2.FinishReason.ValueType], [event.finish for event in events]),
        logprobs=[logprobs_to_proto(logprobs) for _, logprobs in with_logprobs],
        logprobs_entry=[entry for entry, _ in with_logprobs],
    )


def unpack_tokens(tokens: worker_pb2.Tokens) -> list[TokenEvent]:
    """Entries of a frame's token columns, in order, each with choice 0: the receiver knows the choice.

    Raises:
        WireError: the columns differ in length, or a value is unknown.
    """
    ids, attempts = list(tokens.request_id), list(tokens.attempt)  # which takes less time than to walk the columns
    columns = ids, attempts, list(tokens.index), list(tokens.token), list(tokens.finish)
    if len({len(column) for column in columns}) != 1:
        raise WireError("the token columns of a frame differ in length")
    if len(tokens.logprobs) != len(tokens.logprobs_entry):
        raise WireError("logprobs and logprobs_entry of a frame differ in length")
    logprobs = {
        entry: logprobs_from_proto(message)
        for entry, message in zip(tokens.logprobs_entry, tokens.logprobs, strict=True)
    }
    reasons = {finish: enum_from_proto(FinishReason, finish) for finish in set(tokens.finish)}
    return [
        TokenEvent(RequestKey(0, request_id, attempt), 0, index, token, logprobs.get(entry), reasons[finish])
        for entry, (request_id, attempt, index, token, finish) in enumerate(zip(*columns, strict=True))
    ]


def _prompt_logprobs_to_proto(event: PromptLogprobsEvent) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        request_id=event.key.request_id,
        attempt=event.key.attempt,
        first_position=event.first_position,
        entries=[logprobs_to_proto(entry) for entry in event.entries],
    )


def prompt_logprobs_from_proto(message: worker_pb2.PromptLogprobs) -> PromptLogprobsEvent:
    """Raises `WireError` when columns differ in length."""
    key = RequestKey(0, message.request_id, message.attempt)
    return PromptLogprobsEvent(key, message.first_position, [logprobs_from_proto(entry) for entry in message.entries])


def event_to_proto(event: RequestEvent) -> worker_pb2.RequestEvent:
    values = {name: getattr(event, name) for name in _EVENT_FIELDS}
    return worker_pb2.RequestEvent(request_id=event.key.request_id, attempt=event.key.attempt, **values)


def event_from_proto(message: worker_pb2.RequestEvent) -> RequestEvent:
    """An unknown refusal counts as none.

    Raises:
        WireError: a kind that this version does not know, or a handle of the wrong length.
    """
    kind = enum_from_proto(RequestEventKind, message.kind)
    has_handle = kind is RequestEventKind.LAST_CHUNK and message.handle
    _check(not has_handle or len(message.handle) == HANDLE_BYTES, f"handle must be {HANDLE_BYTES} bytes")
    given = {name: getattr(message, name) for name in _EVENT_FIELDS}
    given |= {"kind": kind, "refusal": _REFUSALS.get(message.refusal, RefusalCode.NONE)}
    return RequestEvent(RequestKey(0, message.request_id, message.attempt), **given)


def load_to_proto(load: SchedulerLoad) -> worker_pb2.Load:
    return worker_pb2.Load(**load._asdict())


def load_from_proto(message: worker_pb2.Load) -> SchedulerLoad:
    load = SchedulerLoad(*[getattr(message, name) for name in _LOAD_FIELDS])
    # 0: of an older worker, before its first step.
    return load._replace(
        prefill_correction=load.prefill_correction or 1.0, decode_correction=load.decode_correction or 1.0
    )
