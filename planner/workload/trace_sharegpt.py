"""Reader of ShareGPT's JSON: one array of conversations, reduced to their lengths.

Called by `pdserve.planner.workload.trace_reading`. Reads one array element at a time, so files may be of any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from pdserve.planner.workload.trace import Trace, TraceBuilder, TraceRow

CHARACTERS_PER_TOKEN = 4
"""Rough ratio for English text: help.openai.com, "What are tokens and how to count them?"."""

MAX_CONVERSATION_CHARACTERS = 1 << 26
_CHUNK_CHARACTERS = 1 << 20

_USER_NAMES = frozenset({"human", "user"})
_MODEL_NAMES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


def read_sharegpt(path: Path, *, lenient: bool = False) -> Trace:
    """``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}, ...]``, without times.

    The first answer of each conversation is a request; tokens are characters / 4, as the trace's notes mention. A
    system message counts towards the next user message. Leading model messages are dropped, and consecutive messages
    of one side are merged. Conversations without an answer are left out and counted.

    Args:
        lenient: skip and count conversations that are malformed. A file that is not JSON is always an error.

    Raises:
        ValueError: a conversation is malformed, or there is none.
    """
    builder = TraceBuilder(path, lenient=lenient)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line, conversation in _elements(path, file):
            try:
                builder.add(_first_exchange(conversation))
            except ValueError as problem:
                builder.refuse(line, problem)
    return builder.build(has_times=False, notes=(f"lengths are characters / {CHARACTERS_PER_TOKEN}",))


def _first_exchange(conversation: object) -> TraceRow:
    messages = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(messages, list):
        raise ValueError('a conversation has no list "conversations"')
    said = [(is_model, list(group)) for is_model, group in groupby(map(_message, messages), key=itemgetter(0))]
    first = 1 if said and said[0][0] else 0
    texts = ["\n".join(text for _, text in group) for _, group in said[first : first + 2]]
    prompt, answer, *_ = (-(-len(text) // CHARACTERS_PER_TOKEN) for text in (*texts, "", ""))
    return TraceRow(0.0, prompt, answer)


def _message(message: object) -> tuple[bool, str]:
    """Whether the model wrote the message, and its text."""
    if not isinstance(message, dict) or not isinstance(message.get("value"), str):
        raise ValueError('a message has no text "value"')
    name = message.get("from")
    if name in _MODEL_NAMES:
        return True, message["value"]
    if name in _USER_NAMES or name == "system":
        return False, message["value"]
    raise ValueError(f"a message is from {str(name)[:40]!r}, which is neither the user nor the model")


def _elements(path: Path, file: IO[str]) -> Iterator[tuple[int, Any]]:
    """Elements of the array in ``file``, each with its first line.

    Raises:
        ValueError: the file is not a JSON array.
    """
    decoder = json.JSONDecoder()
    text, line, separator = file.read(_CHUNK_CHARACTERS), 1, "["
    while True:
        text, line = _skip_blank(text, line)
        if not text:
            text = file.read(_CHUNK_CHARACTERS)
            if text:
                continue
            raise ValueError(f"{path}:{line}: the file ends before its array does: it may be truncated")
        if separator:
            if text[0] == "]" and separator == ",":
                return
            if text[0] != separator:
                raise ValueError(f"{path}:{line}: {text[:20]!r} where {separator!r} was expected: not a JSON array")
            text, separator = text[1:], ""
            continue
        if text[0] == "]":
            return
        try:
            element, end = decoder.raw_decode(text)
        except (json.JSONDecodeError, RecursionError) as problem:
            more = file.read(max(_CHUNK_CHARACTERS, len(text)))
            if not more or len(text) > MAX_CONVERSATION_CHARACTERS:
                raise ValueError(f"{path}:{line}: the conversation that begins here is not JSON ({problem})") from None
            text += more
            continue
        yield line, element
        line += text.count("\n", 0, end)
        text, separator = text[end:], ","


def _skip_blank(text: str, line: int) -> tuple[str, int]:
    rest = text.lstrip()
    return rest, line + text.count("\n", 0, len(text) - len(rest))
