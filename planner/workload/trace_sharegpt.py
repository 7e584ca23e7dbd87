"""Reader of ShareGPT's JSON: one array of conversations, reduced to their lengths.

Called by `pdserve.planner.workload.trace_reading`. Reads one array element at a time, so files may be of any size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from pdserve.planner.workload.trace import Trace, TraceBuilder, TraceRow

CHARACTERS_PER_TOKEN = 4
"""Rough ratio for English text: help.openai.com, "What are tokens and how to count them?"."""

MAX_CONVERSATION_CHARACTERS = 1 << 26
_CHUNK_CHARACTERS = 1 << 20

_USER_NAMES = frozenset({"human", "user"})
_MODEL_NAMES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})

Exchange = tuple[int, int]
"""Tokens of a message and its answer."""


def read_sharegpt(
    path: Path,
    *,
    num_tokens: Callable[[str], int] | None = None,
    multi_turn: bool = False,
    lenient: bool = False,
) -> Trace:
    """``[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}, ...]``, without times.

    A system message counts towards the next user message. Leading model messages are dropped, and consecutive messages
    of one side are merged. Conversations without an answer are left out and counted.

    Args:
        num_tokens: counts the tokens of a text; by default characters / 4, which the trace's notes mention.
        multi_turn: make every answer a request whose prompt is the whole conversation before it; otherwise only the
            first one.
        lenient: skip and count conversations that are malformed. A file that is not JSON is always an error.

    Raises:
        ValueError: a conversation is malformed, or there is none.
    """
    builder = TraceBuilder(path, lenient=lenient)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line, conversation in _elements(path, file):
            try:
                exchanges = _exchanges(conversation, num_tokens or _estimated_tokens)
            except ValueError as problem:
                builder.refuse(line, problem)
                continue
            if not exchanges:
                builder.skip_empty()
            _add(builder, exchanges if multi_turn else exchanges[:1])
    notes = () if num_tokens else (f"lengths are characters / {CHARACTERS_PER_TOKEN}",)
    return builder.build(has_times=False, notes=notes)


def _add(builder: TraceBuilder, exchanges: list[Exchange]) -> None:
    num_before = 0
    for turn, (message, answer) in enumerate(exchanges):
        builder.add(TraceRow(0.0, num_before + message, answer, turn=turn))
        num_before += message + answer


def _exchanges(conversation: object, num_tokens: Callable[[str], int]) -> list[Exchange]:
    if not isinstance(conversation, dict) or not isinstance(conversation.get("conversations"), list):
        raise ValueError('a conversation has no list "conversations"')
    said: list[tuple[bool, str]] = []
    for message in conversation["conversations"]:
        is_model, text = _message(message)
        if said and said[-1][0] == is_model:
            said[-1] = (is_model, f"{said[-1][1]}\n{text}")
        elif said or not is_model:
            said.append((is_model, text))
    exchanges = [
        (num_tokens(message), num_tokens(answer))
        for (_, message), (_, answer) in zip(said[::2], said[1::2], strict=False)
    ]
    # An empty message or answer ends the part that can be replayed.
    num_usable = next((row for row, pair in enumerate(exchanges) if not all(pair)), len(exchanges))
    return exchanges[:num_usable]


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


def _estimated_tokens(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


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
