"""Request fields of OpenAI's, Anthropic's and vLLM's APIs that this server does not support.

Such a field is refused unless its value changes nothing. Unknown fields are accepted and logged. No field is ignored
silently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from pdserve.router.http.errors import MAX_NAME_CHARS, refusal

logger = logging.getLogger(__name__)

Neutral = Mapping[str, tuple[object, ...]]
"""Maps a field name to the values, besides null, that change nothing."""

_BOTH: Neutral = {
    "allowed_token_ids": ([],), "bad_words": ([],), "ebnf": (), "ec_transfer_params": (), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_regex": (), "json_schema": (), "kv_transfer_params": (),
    "logits_processors": ([],), "logprob_token_ids": (), "lora_path": (), "moderation": (), "priority": (0,),
    "regex": (), "repetition_detection": (), "return_prompt_text": (False,), "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (-1,), "use_beam_search": (False,), "vllm_xargs": ({},), "watermarking": (False,),
}  # fmt: skip

CHAT: Neutral = {
    **_BOTH,
    "add_special_tokens": (False,), "audio": (), "chat_template": (), "documents": ([],), "echo": (False,),
    "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],), "web_search_options": (),
}  # fmt: skip

COMPLETION: Neutral = {
    **CHAT,
    "add_generation_prompt": (), "add_special_tokens": (True,), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "max_completion_tokens": (), "prompt_embeds": (), "reasoning_effort": (),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (),
}  # fmt: skip

RESPONSES: Neutral = {
    **_BOTH,
    "background": (False,), "conversation": (), "enable_response_messages": (False,), "max_completion_tokens": (),
    "max_tokens": (), "messages": (), "n": (1,), "previous_input_messages": (), "previous_response": (),
    "previous_response_id": (), "prompt": (), "response_format": (), "top_logprobs": (0,),
}  # fmt: skip

MESSAGES: Neutral = {
    **_BOTH, "container": (), "logprobs": (False,), "mcp_servers": ([],), "n": (1,), "output_format": (),
}  # fmt: skip

_INSTEAD: Mapping[str, str] = {
    "ebnf": "structured_outputs.grammar", "function_call": "tool_choice", "functions": "tools",
    "guided_choice": "structured_outputs.choice", "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json", "guided_regex": "structured_outputs.regex",
    "json_schema": "structured_outputs.json", "max_tokens": "max_output_tokens", "messages": "input",
    "output_format": "output_config.format", "priority": "service_tier", "regex": "structured_outputs.regex",
    "response_format": "text.format", "return_tokens_as_token_ids": "return_token_ids",
}  # fmt: skip
"""Fields to send in place of others, where the route takes them."""
_NOT_STORED = {"conversation", "previous_response_id"}

_LABELS = frozenset({
    "access_programs", "annotations", "cache_control", "client_metadata", "context_management", "diagnostics",
    "early_stopping", "image", "include_reasoning", "inference_geo", "length_penalty", "max_tool_calls",
    "media_io_kwargs", "metadata", "mm_processor_kwargs", "parallel_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning_details", "refusal", "request_id", "return_mm_kwargs",
    "return_token_offsets", "routed_experts_prompt_start", "safety_identifier", "session_id",
    "spaces_between_special_tokens", "speed", "store", "stream_interval", "stream_options", "thinking_token_budget",
    "truncation", "truncation_side", "user", "user_profile_id", "verbosity", "workspace_id",
})  # fmt: skip
"""Fields that describe a request or its sender, concern what a request cannot have here, or wish for what nobody can
promise. They change no answer."""

MAX_LOGGED_FIELDS = 1024
"""Maximum unknown fields logged over the life of the process: a client must not be able to fill a disk."""

_logged: set[str] = set()


def check_extra_fields(extra: Mapping[str, object] | None, neutral: Neutral) -> None:
    """Check the fields that a request model does not declare.

    Raises:
        ApiError: a known field is not supported.
    """
    for name, value in (extra or {}).items():
        if name in neutral:
            if value not in (None, "", *neutral[name]):
                raise refusal(name, f"is not supported; {_remedy(name, neutral)}")
        elif name not in _LABELS:
            warn_once(f"unknown field {name[:MAX_NAME_CHARS]!r}", "ignored")


def _remedy(name: str, neutral: Neutral) -> str:
    instead = _INSTEAD.get(name)
    if instead is not None and instead.partition(".")[0] not in neutral:
        return f"send {instead}, and leave it out"
    if name in _NOT_STORED:
        return "nothing is stored: send the whole conversation as input, and leave it out"
    values = " or ".join(map(json.dumps, neutral[name]))
    return f"set it to {values}, or leave it out" if values else "leave it out"


def warn_once(name: str, fate: str) -> None:
    """Log once per name what becomes of a part of a request."""
    if name in _logged or len(_logged) >= MAX_LOGGED_FIELDS:
        return
    _logged.add(name)
    logger.warning("a request has the %s; it is %s", name, fate)
    if len(_logged) == MAX_LOGGED_FIELDS:
        logger.warning("requests have had %d unknown fields; no more of them are named here", MAX_LOGGED_FIELDS)
