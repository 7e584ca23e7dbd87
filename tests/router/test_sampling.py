"""Limits and defaults of a request."""

from __future__ import annotations

import pytest

from pdserve.router.errors import ApiError
from pdserve.router.sampling import sampling_params
from pdserve.router.schema import ChatBody, CompletionBody


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


@pytest.mark.parametrize("num_prompt_tokens", [100, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(ApiError, match=rf"100 tokens.*{num_prompt_tokens}.*shorten"):
        sampling_params(completion(), num_prompt_tokens, 100)


def test_the_newer_name_of_max_tokens_wins() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = ChatBody.model_validate({"messages": messages, "max_tokens": 5, "max_completion_tokens": 7})
    assert sampling_params(body, 10, 100).max_tokens == 7


def test_seeds_are_64_bits_and_minted_where_absent() -> None:
    assert sampling_params(completion(seed=-1), 1, 10).seed == 2**64 - 1
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
