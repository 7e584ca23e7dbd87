"""Conversions between contracts and the wire, and the limits checked on the way in."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import (
    HANDLE_BYTES,
    MAX_GRAMMAR_BYTES,
    GenerationRequest,
    Grammar,
    GrammarKind,
    KvSource,
    SamplingParams,
)
from pdserve.contracts.step import ModelLimits
from pdserve.proto.codec import (
    MAX_ADDRESS_LENGTH,
    MAX_CACHE_SALT_BYTES,
    MAX_DURATION_S,
    WireError,
    request_from_proto,
    request_to_proto,
    source_from_proto,
    source_to_proto,
)
from pdserve.proto.v1 import worker_pb2

LIMITS = ModelLimits(max_model_len=64, vocab_size=1000, eos_token_ids=(2,))

token_ids = st.integers(0, 999)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2, width=32),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0.125, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    repetition_penalty=st.floats(0.5, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    min_tokens=st.integers(0, 20),
    num_prompt_logprobs=st.integers(-1, 20),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(20, 2**32 - 1),
    stop_token_ids=st.lists(token_ids, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    num_logprobs=st.integers(-1, 20),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(), st.text(max_size=64)),
)
requests = st.builds(
    GenerationRequest,
    request_id=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, 2**32 - 1),
    prompt_tokens=st.lists(token_ids, min_size=1, max_size=40).map(tuple),
    emitted_tokens=st.lists(token_ids, max_size=19).map(tuple),
    sampling=samplings,
    cache_salt=st.binary(max_size=64),
    deadline_s=st.floats(0.001, 86400),
    ttft_slo_s=st.floats(0, 60),
    patience_s=st.floats(0, 60),
    stall_slo_s=st.floats(0, 60),
    max_gap_s=st.floats(0, 60),
    handoff=st.booleans(),
    choice=st.integers(0, 127),
)


@settings(max_examples=50)
@given(requests)
def test_a_request_survives_the_wire(request: GenerationRequest) -> None:
    wire = worker_pb2.Request.FromString(request_to_proto(request).SerializeToString())
    assert request_from_proto(wire, LIMITS) == request


def test_objectives_without_end_are_sent_as_a_day() -> None:
    """Those of a deployment have no upper limit, and stand for none."""
    names = ("ttft_slo_s", "patience_s", "stall_slo_s", "max_gap_s")
    endless: dict[str, Any] = dict.fromkeys(names, 1e9)
    request = GenerationRequest(request_id=1, prompt_tokens=(1,), **endless)
    received = request_from_proto(request_to_proto(request), LIMITS)
    assert {getattr(received, name) for name in names} == {MAX_DURATION_S}


def test_what_an_older_router_leaves_out_has_its_neutral_value() -> None:
    sampling = worker_pb2.SamplingParams(top_p=1, max_tokens=1)
    request = request_from_proto(worker_pb2.Request(prompt_tokens=[1], sampling=sampling, deadline_s=1), LIMITS)
    assert request.sampling.repetition_penalty == 1


@pytest.mark.parametrize(
    ("grammar", "limits", "message"),
    [
        (worker_pb2.Grammar(text="a"), LIMITS, "unknown GrammarKind 0"),
        (
            worker_pb2.Grammar(kind=worker_pb2.Grammar.REGEX, text="é" * (MAX_GRAMMAR_BYTES // 2 + 1)),
            LIMITS,
            "over 65536 bytes",
        ),
        (
            worker_pb2.Grammar(kind=worker_pb2.Grammar.REGEX, text="a"),
            ModelLimits(max_model_len=64, vocab_size=1000),
            "end-of-sequence",
        ),
    ],
)
def test_a_grammar_that_no_worker_could_follow_is_refused(
    grammar: worker_pb2.Grammar, limits: ModelLimits, message: str
) -> None:
    sampling = worker_pb2.SamplingParams(top_p=1, max_tokens=8, grammar=grammar)
    with pytest.raises(WireError, match=message):
        request_from_proto(worker_pb2.Request(prompt_tokens=[1], sampling=sampling, deadline_s=1), limits)


def test_a_choice_that_cannot_be_is_refused() -> None:
    sampling = worker_pb2.SamplingParams(top_p=1, max_tokens=8)
    request = worker_pb2.Request(prompt_tokens=[1], sampling=sampling, deadline_s=1, choice=128)
    with pytest.raises(WireError, match="choice"):
        request_from_proto(request, LIMITS)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": MAX_DURATION_S * 1.01}, "deadline_s"),
        ({"ttft_slo_s": -1.0}, "ttft_slo_s"),
        ({"patience_s": -1.0}, "patience_s"),
        ({"stall_slo_s": -1.0}, "stall_slo_s"),
        ({"max_gap_s": -1.0}, "max_gap_s"),
        ({"ttft_slo_s": MAX_DURATION_S * 1.01}, "ttft_slo_s"),
        ({"cache_salt": b"a" * (MAX_CACHE_SALT_BYTES + 1)}, "cache_salt"),
        ({"prompt_tokens": []}, "prompt_tokens is empty"),
        ({"prompt_tokens": [LIMITS.vocab_size]}, "prompt_tokens"),
        ({"emitted_tokens": [1] * 8}, "already emitted"),
    ],
    ids=str,
)
def test_a_request_outside_the_limits_is_refused(fields: dict[str, Any], named: str) -> None:
    sampling = worker_pb2.SamplingParams(max_tokens=8, top_p=1.0)
    usual: dict[str, Any] = {"prompt_tokens": [1], "sampling": sampling, "deadline_s": 1.0}
    assert request_from_proto(worker_pb2.Request(**usual), LIMITS).deadline_s == 1
    with pytest.raises(WireError, match=named):
        request_from_proto(worker_pb2.Request(**usual | fields), LIMITS)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (KvSource(address="", worker_epoch=1, handle=b"h" * HANDLE_BYTES), "address"),
        (KvSource(address="a" * (MAX_ADDRESS_LENGTH + 1), worker_epoch=1, handle=b"h" * HANDLE_BYTES), "address"),
        (KvSource(address="a:1", worker_epoch=1, handle=b"h" * (HANDLE_BYTES + 1)), "handle"),
        (KvSource(address="a:1", worker_epoch=1, handle=b""), "handle"),
    ],
)
def test_a_source_outside_the_limits_is_refused(source: KvSource, named: str) -> None:
    with pytest.raises(WireError, match=named):
        source_from_proto(source_to_proto(source))


def test_a_source_survives_the_wire() -> None:
    source = KvSource(address="[::1]:99", worker_epoch=2**64 - 1, handle=bytes(range(16)))
    assert source_from_proto(source_to_proto(source)) == source


@settings(max_examples=50)
@given(st.binary(max_size=80))
def test_arbitrary_bytes_give_a_request_or_a_wire_error(data: bytes) -> None:
    message = worker_pb2.Request()
    with suppress(DecodeError, WireError):
        message.ParseFromString(data)
        assert request_from_proto(message, LIMITS).prompt_tokens


@pytest.mark.parametrize(
    "sampling",
    [
        worker_pb2.SamplingParams(top_p=1.5, max_tokens=1),
        worker_pb2.SamplingParams(top_p=1, temperature=-1, max_tokens=1),
        worker_pb2.SamplingParams(top_p=1, temperature=float("inf"), max_tokens=1),
        worker_pb2.SamplingParams(top_p=1),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, num_logprobs=21),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, num_logprobs=-2),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, stop_token_ids=[1] * 129),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, stop_token_ids=[1000]),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, min_p=1.5),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, min_p=float("nan")),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, min_tokens=2),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, repetition_penalty=-1),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, repetition_penalty=float("inf")),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, presence_penalty=2.5),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, frequency_penalty=float("nan")),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, bias_tokens=[1]),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, bias_tokens=[1], biases=[float("nan")]),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, bias_tokens=[1], biases=[101]),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, bias_tokens=[1000], biases=[1]),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, bias_tokens=[1, 1], biases=[1, 1]),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, bias_tokens=range(1025), biases=[1] * 1025),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, num_prompt_logprobs=21),
        worker_pb2.SamplingParams(top_p=1, max_tokens=1, num_prompt_logprobs=-2),
    ],
)
def test_sampling_outside_the_limits_is_refused(sampling: worker_pb2.SamplingParams) -> None:
    request = worker_pb2.Request(prompt_tokens=[1], sampling=sampling, deadline_s=1)
    with pytest.raises(WireError):
        request_from_proto(request, LIMITS)


def test_a_minimum_of_tokens_leaves_something_to_sample() -> None:
    sampling = worker_pb2.SamplingParams(top_p=1, max_tokens=4, min_tokens=2, stop_token_ids=[0, 1])
    request = worker_pb2.Request(prompt_tokens=[1], sampling=sampling, deadline_s=1)
    small = ModelLimits(max_model_len=64, vocab_size=4, eos_token_ids=(2,))
    assert request_from_proto(request, small).sampling.min_tokens == 2
    sampling.stop_token_ids.append(3)
    request.sampling.CopyFrom(sampling)
    with pytest.raises(WireError, match="min_tokens"):
        request_from_proto(request, small)
