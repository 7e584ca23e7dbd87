"""Reader of ShareGPT's JSON: an array of conversations, or one in each line, reduced to their lengths.

Called by `pdserve.planner.workload.trace_reading`.
"""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from pdserve.planner.workload.trace import Trace, TraceBuilder, TraceRow

CHARACTERS_PER_TOKEN = 4
"""Rough ratio for English text: help.openai.com, "What are tokens and how to count them?"."""

CONVERSATIONS = ("conversations", "conversation", "messages")
"""Names of the messages of a conversation."""
_USER_NAMES = frozenset({
    "developer", "function", "function_response", "human", "observation", "system", "tool", "user",
})  # fmt: skip
"""Of whatever is no answer."""
_MODEL_NAMES = frozenset({"assistant", "bard", "bing", "chatgpt", "function_call", "gpt", "model"})


def read_sharegpt(path: Path, *, lenient: bool = False) -> Trace:
    """``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}, ...]``, without times. They
    may be OpenAI's messages, too: ``{"messages": [{"role": "user", "content": ...}, ...]}``.

    The first answer of each conversation is a request; tokens are characters / 4, as the trace's notes mention. A
    system message counts towards the next user message. Leading model messages are dropped, and consecutive messages
    of one side are merged. Conversations without an answer are left out and counted.

    Args:
        lenient: skip and count conversations that are malformed. A file that is not JSON is always an error.

    Raises:
        ValueError: a conversation is malformed, or there is none.
    """
    builder = TraceBuilder(path, lenient=lenient)
    text = path.read_text("utf-8-sig", errors="replace").strip()
    try:
        conversations = [*map(json.loads, filter(str.strip, text.split("\n")))] if text[:1] == "{" else json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is not JSON, or truncated: {problem}") from None
    if not isinstance(conversations, list):
        raise ValueError(f"{path} is not a JSON array of conversations")
    for number, conversation in enumerate(conversations, 1):
        try:
            builder.add(_first_exchange(conversation))
        except ValueError as problem:
            builder.refuse(f"conversation {number}", problem)
    return builder.build(has_times=False, notes=(f"lengths are characters / {CHARACTERS_PER_TOKEN}",))


def _first_exchange(conversation: object) -> TraceRow:
    found = map(conversation.get, CONVERSATIONS) if isinstance(conversation, dict) else ()
    messages = next((each for each in found if isinstance(each, list)), None)
    if messages is None:
        raise ValueError('a conversation has no list "conversations"')
    said = [(is_model, list(group)) for is_model, group in groupby(map(_message, messages), key=itemgetter(0))]
    first = 1 if said and said[0][0] else 0
    texts = ["\n".join(text for _, text in group) for _, group in said[first : first + 2]]
    prompt, answer, *_ = (-(-len(text) // CHARACTERS_PER_TOKEN) for text in (*texts, "", ""))
    return TraceRow(0.0, prompt, answer)


def _message(message: object) -> tuple[bool, str]:
    """Whether the model wrote the message, and its text."""
    text = message.get("value", message.get("content")) or "" if isinstance(message, dict) else None
    if isinstance(text, list):  # parts, as of OpenAI's chats
        text = "".join(str(part.get("text") or "") for part in text if isinstance(part, dict))
    if not isinstance(message, dict) or not isinstance(text, str):
        raise ValueError('a message has no text "value" or "content"')
    name = message.get("from", message.get("role"))
    if name in _MODEL_NAMES:
        return True, text
    if name in _USER_NAMES:
        return False, text
    raise ValueError(f"a message is from {str(name)[:40]!r}, which is neither the user nor the model")
