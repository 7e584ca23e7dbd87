"""Malformed request bodies for fuzzing: valid ones, broken in one to four places, generated from a seed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

CHAT_BODY: dict[str, Any] = {
    "model": "small",
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "What is the time?"}]},
    ],
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
    "user": "me",
}
COMPLETION_BODY: dict[str, Any] = {
    "model": "small",
    "prompt": ["the time", [7, 8, 9], "Größe 🙂"],
    "max_tokens": 5,
    "echo": True,
    "logprobs": 2,
    "suffix": "",
}
SHARED: dict[str, Any] = {
    "n": 2,
    "best_of": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 1,
    "seed": 7,
    "stop": ["a", "bc"],
    "stop_token_ids": [5, 6],
    "repetition_penalty": 1.1,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {"5": -100, "6": 1.5},
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "cache_salt": "mine",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+", "json": None},
    "tools": [],
    "colour": "red",
}
TOOLS: dict[str, Any] = {
    "tools": [
        {"type": "function", "function": {
            "name": "find", "description": "<|eos|>", "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        }},
        {"type": "function", "function": {"name": "f"}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "reasoning_effort": None,
    "chat_template_kwargs": {"enable_thinking": False},
    "messages": [
        *CHAT_BODY["messages"],
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ],
}  # fmt: skip
"""Of chats with tools, which have no other structure."""
NEEDS = {"best_of": "n", "stream_options": "stream"}
"""Field to the other field without which it is refused."""
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 20, 21, 127, 128, 129, 255, 511, 512, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63,
    2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 2.0, 1e-7, 1e-300,
    5e-324, 0.015625, 1e30, 1e39, 1.8e308, float("inf"), float("-inf"), float("nan"), "", " ", "a", "5", "nope",
    "small", "\x00", "\ud800", "\udfff\ud800", "🙂" * 50, "\u202e\ufeff", "a" * 5000, "<|eos|>", "{{ 7 * 7 }}", [],
    [[]], [[[]]], [0], [None], [1, "a"], ["a", 1], [1.0], [True], [-1], [2**32], [9999], ["a"] * 17, ["a"] * 129,
    [5] * 129, [[1]] * 129, [7] * 600, ["\ud800"], [{}], {}, {"": ""}, {"type": "json_object"}, {"5": 1}, {"x": 1},
    {"type": "text", "text": 1}, {"5": "1"}, {"5": 1, "05": 1}, {"5": 1e400}, {"99999999999": 1}, {"include_usage": 1},
    {"role": "user"}, {"role": "tool", "content": "x"}, [{"role": "user", "content": "x"}],
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    [{"type": "function", "function": {"name": "f"}}],
]  # fmt: skip
NAMES = [
    *CHAT_BODY, *COMPLETION_BODY, *SHARED, "tool_choice", "functions", "audio", "truncate_prompt_tokens",
    "continue_final_message", "add_generation_prompt", "reasoning_effort", "chat_template_kwargs", "",
]  # fmt: skip


def odd_body(random: Random, *, is_chat: bool) -> bytes:
    """Body that may not be a request, in bytes that may not be JSON."""
    shared = set(random.sample(sorted(SHARED), random.randrange(len(SHARED))))
    shared -= {"stream", "stream_options"} if random.random() < 0.5 else {"prompt_logprobs"}
    shared |= {other for name, other in NEEDS.items() if name in shared}
    body: Any = {**(CHAT_BODY if is_chat else COMPLETION_BODY), **{name: SHARED[name] for name in sorted(shared)}}
    if is_chat and random.random() < 0.3:
        body = {**body, **TOOLS}
        for other in ("response_format", "structured_outputs", "ignore_eos"):
            body.pop(other, None)
    for _ in range(random.randrange(4)):
        body = mutated(random, body)
    data = json.dumps(body).encode()  # may contain half surrogate pairs and infinities
    while random.random() < 0.2:
        data = _spoilt(random, data)
    return data


def mutated(random: Random, body: Any) -> Any:
    """Copy with one member, at any depth, changed, removed, added or wrapped."""
    if not isinstance(body, dict | list) or not body:
        return random.choice(ODD)
    match random.randrange(6):
        case 0 if isinstance(body, dict):
            return {**body, random.choice(NAMES): random.choice(ODD)}
        case 1:
            return _without(random, body)
        case 2:
            return _nested(random, body)
        case _:
            keys = list(body) if isinstance(body, dict) else list(range(len(body)))
            key = random.choice(keys)
            value = body[key]
            goes_deeper = isinstance(value, dict | list) and random.random() < 0.6
            changed = mutated(random, value) if goes_deeper else random.choice(ODD)
            if isinstance(body, dict):
                return {**body, key: changed}
            return [*body[:key], changed, *body[key + 1 :]]


def _without(random: Random, body: Any) -> Any:
    if isinstance(body, list):
        return body[1:]
    gone = random.choice(list(body))
    return {name: value for name, value in body.items() if name != gone}


def _nested(random: Random, body: Any) -> Any:
    """One member, deep inside lists or objects."""
    name = random.choice(list(body)) if isinstance(body, dict) else 0
    value = body[name]
    for _ in range(random.choice([1, 2, 30, 300])):
        value = [value] if random.random() < 0.5 else {"x": value}
    return {**body, name: value} if isinstance(body, dict) else [value, *body[1:]]


def _spoilt(random: Random, data: bytes) -> bytes:
    """Corrupted bytes."""
    at = random.randrange(len(data) + 1)
    match random.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + random.randbytes(random.randrange(1, 9)) + data[at:]
        case 2:
            return data[:at] + data[at + random.randrange(1, 9) :]
        case 3:
            return random.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"[", b"{", b" " * 1000, b"/* */"]) + data
        case 4:
            return data + random.choice([b"}", b"\x00", b" \n", data, b"9" * 5000])
        case 5:
            return data.replace(b"5", random.choice([b"1e400", b"9" * 5000, b"-0", b"05", b"0x5", b"5."]), 1)
        case 6:
            return data.replace(b'"', random.choice([b"'", b'"\xc3', b'"\\u00', b'"\\ud83d']), random.randrange(1, 4))
        case _:
            return random.choice([b"[" * 40_000, b'{"a":' * 20_000, b"", b"null", random.randbytes(40), b"1" * 120_000])
