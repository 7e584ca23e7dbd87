"""Packing and unpacking of token frames."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import TokenLogprobs
from pdserve.proto.codec import (
    WireError,
    event_from_proto,
    load_from_proto,
    load_to_proto,
    logprobs_from_proto,
    pack_frames,
    prompt_logprobs_from_proto,
    unpack_tokens,
)
from pdserve.proto.v1 import worker_pb2

NONE = worker_pb2.FINISH_REASON_NONE

uint32 = st.integers(0, 2**32 - 1)
float32 = st.floats(width=32, allow_nan=False)
keys = st.builds(RequestKey, st.integers(1, 3), st.integers(0, 2**64 - 1), uint32)
logprobs = st.none() | st.builds(TokenLogprobs, float32, st.lists(st.tuples(uint32, float32), max_size=3).map(tuple))
token_events = st.builds(TokenEvent, keys, uint32, uint32, uint32, logprobs, st.sampled_from(FinishReason))


@settings(max_examples=50)
@given(st.lists(token_events, max_size=30))
def test_every_token_comes_back_in_its_session_in_order(events: list[TokenEvent]) -> None:
    frames = pack_frames(events)
    assert set(frames) == {event.key.session for event in events}
    for session, frame in frames.items():
        wire = worker_pb2.StepFrame.FromString(frame.SerializeToString())
        expected = [
            replace(event, key=event.key._replace(session=0), choice=0)
            for event in events
            if event.key.session == session
        ]
        assert unpack_tokens(wire.tokens) == expected


def test_request_events_come_back() -> None:
    key = RequestKey(0, 11, 1)
    events = [
        RequestEvent(key=key, kind=RequestEventKind.STARTED, num_cached_tokens=32, waited_s=0.5),
        RequestEvent(key=key, kind=RequestEventKind.LAST_CHUNK, handle=bytes(range(16))),
        RequestEvent(key=key, kind=RequestEventKind.FAILED, message="out of luck"),
        *(RequestEvent(key, RequestEventKind.REJECTED, "no", refusal=code) for code in RefusalCode),
    ]
    assert [event_from_proto(message) for message in pack_frames(events)[0].events] == events


def test_an_unknown_refusal_is_none_and_an_unknown_kind_an_error() -> None:
    message = worker_pb2.RequestEvent(kind=worker_pb2.RequestEvent.REJECTED)
    message.refusal = 99  # type: ignore[assignment]
    assert event_from_proto(message).refusal is RefusalCode.NONE
    for bad in (
        worker_pb2.RequestEvent(),
        worker_pb2.RequestEvent(kind=worker_pb2.RequestEvent.LAST_CHUNK, handle=b"short"),
    ):
        with pytest.raises(WireError):
            event_from_proto(bad)


def test_a_load_comes_back() -> None:
    numbers = range(1, len(SchedulerLoad._fields) + 1)
    load = SchedulerLoad(*numbers)._replace(tier_failure="No space left on device", draining=True)
    assert load_from_proto(load_to_proto(load)) == load
    older = load_from_proto(worker_pb2.Load())
    assert (older.prefill_correction, older.decode_correction) == (1.0, 1.0), "it has had no step yet"


def test_prompt_logprobs_go_to_their_session_in_order() -> None:
    entries = [TokenLogprobs(-0.5, ((7, -0.25), (9, -0.5))), TokenLogprobs(-1.5, ())]
    events: list[ClientEvent] = [
        PromptLogprobsEvent(RequestKey(4, 11, 1), 1, entries),
        PromptLogprobsEvent(RequestKey(5, 12, 0), 1, []),
        PromptLogprobsEvent(RequestKey(4, 11, 1), 3, entries[1:]),
    ]
    first, second = pack_frames(events)[4].prompt_logprobs
    assert (first.request_id, first.attempt, first.first_position, second.first_position) == (11, 1, 1, 3)
    assert [logprobs_from_proto(entry) for entry in (*first.entries, *second.entries)] == [*entries, entries[1]]
    assert prompt_logprobs_from_proto(first) == PromptLogprobsEvent(RequestKey(0, 11, 1), 1, entries)


def test_event_kinds_have_the_values_of_the_wire() -> None:
    assert {kind.name: kind.value for kind in RequestEventKind} == {
        name: value for name, value in worker_pb2.RequestEvent.Kind.items() if value
    }
    assert {f"FINISH_REASON_{reason.name}": reason.value for reason in FinishReason} == dict(
        worker_pb2.FinishReason.items()
    )
    assert {f"REFUSAL_CODE_{code.name}": code.value for code in RefusalCode} == dict(worker_pb2.RefusalCode.items())


def a_column(**columns: list[int] | list[worker_pb2.Logprobs]) -> worker_pb2.Tokens:
    """One good entry, with some columns replaced."""
    tokens = worker_pb2.Tokens(request_id=[1], attempt=[0], index=[0], token=[5], finish=[NONE])
    for name, values in columns.items():
        tokens.ClearField(name)  # type: ignore[arg-type]
        getattr(tokens, name).extend(values)
    return tokens


@pytest.mark.parametrize(
    "tokens",
    [
        a_column(request_id=[1, 2]),
        a_column(finish=[]),
        a_column(finish=[9]),
        a_column(logprobs_entry=[0]),
        a_column(logprobs_entry=[0], logprobs=[worker_pb2.Logprobs(top_tokens=[1])]),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(tokens: worker_pb2.Tokens) -> None:
    with pytest.raises(WireError):
        list(unpack_tokens(tokens))


def test_frames_and_the_service_need_no_torch() -> None:
    script = "import sys, pdserve.proto.codec, pdserve.engine.worker.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
