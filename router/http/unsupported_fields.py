"""Request fields of OpenAI's and vLLM's APIs that this server does not support.

Such a field is refused unless its value changes nothing. Unknown fields are accepted and logged. No field is ignored
silently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from pdserve.router.http.errors import MAX_NAME_CHARS, ApiError

logger = logging.getLogger(__name__)

Neutral = Mapping[str, tuple[object, ...]]
"""Maps a field name to the values, besides null, that change nothing."""

_BOTH: Neutral = {
    "allowed_token_ids": ([],), "bad_words": ([],), "early_stopping": (False,), "ebnf": (), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_regex": (), "json_schema": (), "kv_transfer_params": (),
    "length_penalty": (1,), "logits_processors": ([],), "lora_path": (), "priority": (0,), "regex": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}  # fmt: skip

CHAT: Neutral = {
    **_BOTH,
    "add_special_tokens": (False,), "audio": (), "chat_template": (), "documents": ([],), "echo": (False,),
    "function_call": ("none",), "functions": ([],), "mm_processor_kwargs": ({},), "modalities": (["text"],),
    "prediction": (), "store": (False,), "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip

COMPLETION: Neutral = {
    **CHAT,
    "add_generation_prompt": (), "add_special_tokens": (True,), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "max_completion_tokens": (), "prompt_embeds": (), "reasoning_effort": (),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (),
}  # fmt: skip

RESPONSES: Neutral = {
    "background": (False,), "context_management": ([],), "conversation": (), "include": ([],), "max_tool_calls": (),
    "previous_response_id": (), "prompt": (), "stream_options": (), "top_logprobs": (0,), "truncation": ("disabled",),
}  # fmt: skip

RESPONSES_REASONING: Neutral = {"generate_summary": ("auto",), "summary": ("auto",)}

CHAT_MESSAGE: Neutral = {"audio": (), "function_call": ()}

_LABELS = frozenset({
    "annotations", "metadata", "parallel_tool_calls", "prompt_cache_key", "refusal", "safety_identifier",
    "user",
})  # fmt: skip
"""Fields that describe a request or its sender and change no answer."""

MAX_LOGGED_FIELDS = 1024
"""Maximum unknown fields logged over the life of the process: a client must not be able to fill a disk."""

_logged: set[str] = set()


def check_extra_fields(extra: Mapping[str, object] | None, neutral: Neutral, where: str = "") -> None:
    """Check the fields that a request model does not declare.

    Args:
        where: path prefix of the fields, such as ``messages.0.``.

    Raises:
        ApiError: a known field is not supported.
    """
    for name, value in (extra or {}).items():
        if name in neutral:
            if value is not None and value not in neutral[name]:
                values = " or ".join(map(json.dumps, neutral[name]))
                remedy = f"set it to {values}, or leave it out" if values else "leave it out"
                raise ApiError(400, f"{where}{name} is not supported; {remedy}", param=where + name)
        elif name not in _LABELS:
            _warn_of(name[:MAX_NAME_CHARS])


def _warn_of(name: str) -> None:
    """Log once per name."""
    if name in _logged or len(_logged) >= MAX_LOGGED_FIELDS:
        return
    _logged.add(name)
    logger.warning("a request has the unknown field %r; it is ignored", name)
    if len(_logged) == MAX_LOGGED_FIELDS:
        logger.warning("requests have had %d unknown fields; no more of them are named here", MAX_LOGGED_FIELDS)
