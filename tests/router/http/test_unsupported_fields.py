"""Each field of the APIs is decided: supported, refused by name, or without effect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_type_hints

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from pdserve.router.http import unsupported_fields
from pdserve.router.http.anthropic import MessagesBody
from pdserve.router.http.errors import ApiError
from pdserve.router.http.responses import ResponsesBody
from pdserve.router.http.schema import ChatBody, CompletionBody
from pdserve.router.http.unsupported_fields import CHAT, COMPLETION, MESSAGES, RESPONSES, Neutral, check_extra_fields

VLLM = [
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "best_of", "cache_salt",
    "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "echo", "ec_transfer_params",
    "ignore_eos", "include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "length_penalty",
    "logprob_token_ids", "media_io_kwargs", "min_p", "min_tokens", "mm_processor_kwargs", "priority",
    "prompt_logprobs", "reasoning_effort", "repetition_detection", "repetition_penalty", "request_id",
    "return_mm_kwargs", "return_prompt_text", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "routed_experts_prompt_start", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stop_token_ids", "stream", "stream_interval", "structured_outputs",
    "thinking_token_budget", "top_k", "truncate_prompt_tokens", "truncation_side", "use_beam_search", "vllm_xargs",
    "watermarking",
]  # fmt: skip
VLLM_RESPONSES = [
    "cache_salt", "enable_response_messages", "ignore_eos", "include_stop_str_in_output", "logit_bias",
    "mm_processor_kwargs", "previous_input_messages", "previous_response", "priority", "repetition_penalty",
    "request_id", "seed", "skip_special_tokens", "stop", "stream", "structured_outputs", "top_k", "vllm_xargs",
]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "more", "declared", "neutral"),
    [
        (chat_create_params.CompletionCreateParamsBase, VLLM, ChatBody.model_fields, CHAT),
        (completion_create_params.CompletionCreateParamsBase, ["stream"], CompletionBody.model_fields, COMPLETION),
        (
            response_create_params.ResponseCreateParamsBase,
            VLLM_RESPONSES,
            {**ChatBody.model_fields, **ResponsesBody.model_fields},
            RESPONSES,
        ),
        (
            message_create_params.MessageCreateParamsBase,
            ["container", "mcp_servers", "output_format", "stream", "temperature", "top_k", "top_p"],
            {**ChatBody.model_fields, **MessagesBody.model_fields},
            MESSAGES,
        ),
    ],
)
def test_every_field_is_decided(
    params: type, more: list[str], declared: Mapping[str, object], neutral: Neutral
) -> None:
    names = {*get_type_hints(params), *more}
    assert len(names) > 15
    assert names - declared.keys() - neutral.keys() - unsupported_fields._LABELS == set()
    assert not neutral.keys() & unsupported_fields._LABELS


def refusal_of(name: str, fields: Neutral) -> str:
    with pytest.raises(ApiError) as caught:
        check_extra_fields({name: {"some": "value"}}, fields)
    assert caught.value.param == name
    return caught.value.detail


@pytest.mark.parametrize(("name", "instead"), unsupported_fields._INSTEAD.items())
def test_a_field_with_another_name_here_is_answered_with_it(name: str, instead: str) -> None:
    fields = next(fields for fields in (CHAT, RESPONSES, MESSAGES) if name in fields)
    assert refusal_of(name, fields) == f"{name} is not supported; send {instead}, and leave it out"


@pytest.mark.parametrize("fields", [CHAT, COMPLETION, RESPONSES, MESSAGES])
def test_no_remedy_names_a_field_that_is_refused(fields: Neutral) -> None:
    for name in fields:
        named = re.search(r"send (\w+)", refusal_of(name, fields))
        assert named is None or named[1] not in fields
