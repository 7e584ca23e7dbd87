"""Limits and defaults of a request."""

from __future__ import annotations

import numpy
import pytest

from pdserve.contracts.request import SamplingParams
from pdserve.router.http.errors import ApiError
from pdserve.router.http.sampling import MAX_ANSWER_ENTRIES, sampling_params
from pdserve.router.http.schema import ChatBody, CompletionBody


def completion(**fields: object) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x", **fields})


def test_a_chat_may_take_what_is_left_and_a_completion_sixteen_tokens() -> None:
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    assert sampling_params(chat, 10, 100).max_tokens == 90
    assert sampling_params(completion(), 10, 100).max_tokens == 16


def test_the_answer_may_take_what_is_left() -> None:
    assert sampling_params(completion(), 90, 100).max_tokens == 10
    assert sampling_params(completion(max_tokens=10), 90, 100).max_tokens == 10
    assert sampling_params(completion(), 99, 100).max_tokens == 1


def test_an_answer_that_does_not_fit_is_told_what_would() -> None:
    with pytest.raises(ApiError, match=r"100 tokens.*101 tokens \(90 in the prompt.*lower max_tokens to 10"):
        sampling_params(completion(max_tokens=11), 90, 100)


@pytest.mark.parametrize(("field", "other"), [("max_tokens", {}), ("max_completion_tokens", {"max_tokens": 5})])
def test_a_limit_that_is_too_high_is_named_as_sent(field: str, other: dict[str, int]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    too_long = ChatBody.model_validate({"messages": messages, field: 91, **other})
    with pytest.raises(ApiError, match=f"lower {field} to 90"):
        sampling_params(too_long, 10, 100)
    too_large = ChatBody.model_validate({"messages": messages, field: MAX_ANSWER_ENTRIES + 1, **other})
    with pytest.raises(ApiError, match="are too much") as caught:
        sampling_params(too_large, 1, 10 * MAX_ANSWER_ENTRIES)
    assert caught.value.param == field


@pytest.mark.parametrize("num_prompt_tokens", [100, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(ApiError, match=rf"100 tokens.*{num_prompt_tokens}.*shorten"):
        sampling_params(completion(), num_prompt_tokens, 100)


def test_the_newer_name_of_max_tokens_wins() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = ChatBody.model_validate({"messages": messages, "max_tokens": 5, "max_completion_tokens": 7})
    assert sampling_params(body, 10, 100).max_tokens == 7


def test_seeds_are_64_bits_and_minted_where_absent() -> None:
    assert sampling_params(completion(seed=-2), 1, 10).seed == 2**64 - 2
    assert sampling_params(completion(seed=-1), 1, 10).seed != sampling_params(completion(seed=-1), 1, 10).seed
    assert sampling_params(completion(seed=2**64 - 1), 1, 10).seed == 2**64 - 1
    minted = {sampling_params(completion(), 1, 10).seed for _ in range(8)}
    assert len(minted) == 8
    assert max(minted) > 2**32


@pytest.mark.parametrize(("top_k", "kept"), [(None, 0), (-1, 0), (0, 0), (3, 3)])
def test_all_tokens_are_kept_without_top_k(top_k: int | None, kept: int) -> None:
    assert sampling_params(completion(top_k=top_k), 1, 10).top_k == kept


@pytest.mark.parametrize(
    ("fields", "num_logprobs"), [({}, -1), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)]
)
def test_logprobs_of_a_chat(fields: dict[str, object], num_logprobs: int) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})
    assert sampling_params(body, 1, 10).num_logprobs == num_logprobs


def test_every_parameter_reaches_the_sampler() -> None:
    fields: dict[str, object] = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -2, "frequency_penalty": 2, "seed": 3, "max_tokens": 9, "min_tokens": 4,
        "stop_token_ids": [5, 6], "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 3,
    }  # fmt: skip
    expected = SamplingParams(
        logit_bias=((8, -100.0), (7, 1.5)), stop_token_ids=(5, 6), num_logprobs=2, num_prompt_logprobs=3,
        **{name: fields[name] for name in fields.keys() - {"stop_token_ids", "logprobs", "prompt_logprobs"}},  # type: ignore[arg-type]
    )  # fmt: skip
    assert sampling_params(completion(logit_bias={"8": -100, "07": 1.5}, **fields), 1, 100) == expected


def test_an_echo_has_log_probabilities_where_the_answer_has() -> None:
    assert sampling_params(completion(echo=True, logprobs=2), 1, 10).num_prompt_logprobs == 2
    assert sampling_params(completion(echo=True, logprobs=2, prompt_logprobs=4), 1, 10).num_prompt_logprobs == 4
    assert sampling_params(completion(echo=True), 1, 10).num_prompt_logprobs == -1
    assert sampling_params(completion(logprobs=2), 1, 10).num_prompt_logprobs == -1


def test_a_prompt_alone_takes_one_draw() -> None:
    assert sampling_params(completion(echo=True, max_tokens=0), 1, 10).max_tokens == 1
    with pytest.raises(ApiError, match="min_tokens is 1, and the answer has 0"):
        sampling_params(completion(echo=True, max_tokens=0, min_tokens=1), 1, 10)


def test_numbers_that_32_bits_cannot_hold_become_what_they_mean() -> None:
    tiny = sampling_params(completion(temperature=1e-300, top_p=1e-300), 1, 10)
    assert tiny.temperature == 0
    assert numpy.float32(tiny.top_p) > 0


def test_min_tokens_may_not_be_over_max_tokens() -> None:
    assert sampling_params(completion(min_tokens=16), 1, 100).min_tokens == 16
    with pytest.raises(ApiError, match="min_tokens is 17, and the answer has 16"):
        sampling_params(completion(min_tokens=17), 1, 100)


def test_what_one_request_may_ask_for_is_bounded() -> None:
    length = 10 * MAX_ANSWER_ENTRIES
    assert sampling_params(completion(max_tokens=MAX_ANSWER_ENTRIES), 1, length).max_tokens == MAX_ANSWER_ENTRIES
    for fields in ({"n": 2}, {"prompt": ["x", "y"]}, {"logprobs": 0}):
        half = MAX_ANSWER_ENTRIES // 2
        assert sampling_params(completion(max_tokens=half, **fields), 1, length).max_tokens == half
        with pytest.raises(ApiError, match=f"ask for {half} at most"):
            sampling_params(completion(max_tokens=half + 1, **fields), 1, length)
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "n": 128})
    assert sampling_params(chat, 1, length).max_tokens == MAX_ANSWER_ENTRIES // 128


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"echo": True}, 1),
        ({"echo": True, "n": 16}, 16),
        ({"echo": True, "n": 2, "prompt": ["x", "y"], "logprobs": 2}, 16),
        ({"prompt_logprobs": 2, "n": 4}, 16),
    ],
)
def test_a_prompt_that_is_shown_is_part_of_the_answer(fields: dict[str, object], factor: int) -> None:
    most, length = MAX_ANSWER_ENTRIES // factor, 10 * MAX_ANSWER_ENTRIES
    sampling_params(completion(max_tokens=1, **fields), most, length)
    with pytest.raises(ApiError, match=f"shorten it to {most}"):
        sampling_params(completion(max_tokens=1, **fields), most + 1, length)
    sampling_params(completion(max_tokens=1), most + 1, length)
