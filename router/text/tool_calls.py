"""Finds tool calls in the text of an answer, as it arrives.

A model writes a call as JSON: between ``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen), or as its whole answer
(Llama 3); `pdserve.router.text.xml_calls` reads tags. Arguments pass through as they were written. A call whose last
braces are missing ends at its closing tag. Text that is no call stays text, also what only began like one;
white space around calls is dropped, but for a line break between texts. The result does not depend on how the text was
split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.model.config.tokenizer_config import CALL_TAGS
from pdserve.router.text.answer_text import num_held_chars

if TYPE_CHECKING:
    from pdserve.router.text.harmony import Harmony

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
"""Start of a call whose arguments can be written while they arrive."""
_HALF = re.compile("[\ud800-\udfff]")
"""Of a surrogate pair."""
_SEARCHED_CHARS = 2**16
"""Searched at a time: a search lets no other thread run."""
_MAX_HEAD_CHARS = 512
"""A longer start is searched no further; the call is written once it is complete."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    opening: str
    """Before each call; empty: a call begins where the answer does, with a brace."""
    closing: str
    """After each call; the last may go without."""
    separator: str
    """Between calls that a grammar writes."""
    arguments_key: str
    is_xml: bool = False
    """A call is tags, not JSON."""
    harmony: Harmony | None = None
    """The format of messages, of which a call is one; then all else is empty."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What calls begin with. Before a tag some models leave out `opening`."""
        return (self.opening, "<function=") if self.is_xml else (self.opening or "{",)


HERMES = ToolFormat(*CALL_TAGS, "\n", "arguments")
LLAMA_3 = ToolFormat("", ";", "; ", "parameters")
QWEN_3_CODER = ToolFormat(*CALL_TAGS, "\n", "", is_xml=True)
HARMONY = ToolFormat("", "", "", "")
"""Of a tokenizer that is not known yet."""
TOOL_FORMATS = {"hermes": HERMES, "llama3": LLAMA_3, "qwen3_coder": QWEN_3_CODER, "harmony": HARMONY}
_HERMES_CALL = re.compile(r"""["']arguments\\?["']\s*:|<tool_call>[^<]*\btojson\b[^<]*</tool_call>""")
"""JSON of a call in a template, written out or rendered."""


def tool_format(template: str) -> ToolFormat | None:
    """Format that a chat template teaches; ``None`` if it is not known."""
    if "<function=" in template and "<parameter=" in template:
        return QWEN_3_CODER
    if HERMES.opening in template:
        return HERMES if _HERMES_CALL.search(template) else None
    return LLAMA_3 if '"parameters": ' in template else None


class CallDelta(NamedTuple):
    """Part of a tool call."""

    number: int
    """Of the call in the answer, from 0."""
    id: str
    """With the first part of a call; then empty, as is ``name``."""
    name: str
    arguments: str
    """The next part of the JSON text."""


class State(Enum):
    START = "start"
    """Nothing but white space so far."""
    TEXT = "text"
    CLOSING = "closing"
    """After a call, before its closing tag."""
    BETWEEN = "between"
    """After a call and its tag, in white space."""
    HEAD = "head"
    """In a call whose arguments have not begun."""
    ARGUMENTS = "arguments"
    TAIL = "tail"
    """After the arguments, before the end of the call."""


class _JsonScanner:
    """Finds the end of a JSON value that is an object."""

    def __init__(self, closing: str, depth: int = 0) -> None:
        self.depth = depth
        """Braces and brackets that are open."""
        self._closing = closing
        self._in_string = self._is_escaped = False

    def end(self, text: str, start: int) -> int:
        """Scan on from ``start``; return the index after the closing brace, or of the closing tag outside a string
        before it, or -1. ``text`` must not end inside the tag."""
        for index in range(start, len(text)):
            char = text[index]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char == self._closing[0] and text.startswith(self._closing, index):
                return index
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return index + 1
        return -1


class ToolCallParser:
    """Separates one answer's calls from its text."""

    def __init__(self, style: ToolFormat, new_id: Callable[[], str], offered: Sequence[Mapping[str, Any]] = ()) -> None:
        """
        Args:
            new_id: returns the id of the next call.
            offered: tools that may be called, as a chat has them.
        """
        self.num_calls = 0
        """Calls that are complete."""
        self._functions = {tool["function"]["name"]: tool["function"] for tool in offered}
        self._style = style
        self._new_id = new_id
        self._state = State.START
        self._index = 0
        self._held = ""
        """Text that is not decided yet."""
        self._before = ""
        """White space and opening tag of the call that has begun, in case that it is none."""
        self._num_scanned = 0
        self._scanner = _JsonScanner(style.closing)
        self._opening = re.compile(f"(?={style.opening})" + r"|\n[ \t]*(?=<function=)" * style.is_xml)
        """Up to a call in a text. One without its tag begins a line."""
        self._has_text = False
        """Some was returned."""
        self._text: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Take the next text; return text and calls that are certain."""
        self._held += text
        while self._advance():
            pass
        return self._take()

    def flush(self) -> tuple[str, list[CallDelta]]:
        """End the answer: what is held is text, but for arguments, and white space after a call."""
        if self._state is State.HEAD:
            self._text.append(self._before + self._held)
        elif self._state is State.ARGUMENTS and not self._style.is_xml:
            self._write(self._held)
        elif self._state is State.BETWEEN:
            self._text.append(self._apart(self._held.lstrip()))
        elif self._state in (State.START, State.TEXT):
            self._text.append(self._held)
        self.num_calls += self._state is State.TAIL
        self._held = ""
        return self._take()

    def _write_call(self, name: str, arguments: str = "") -> None:
        self._calls.append(CallDelta(self._index, self._new_id(), name, arguments))
        self._index += 1

    def _write(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallDelta(self._index - 1, "", "", arguments))

    def _take(self) -> tuple[str, list[CallDelta]]:
        text, calls = "".join(self._text), self._calls
        self._has_text = self._has_text or bool(text)
        self._text, self._calls = [], []
        return text, calls

    def _advance(self) -> bool:
        """Decide some of the held text; return False once more is needed."""
        match self._state:
            case State.START | State.BETWEEN:
                return self._begin()
            case State.CLOSING:
                return self._read_closing()
            case State.TEXT:
                return self._pass_text()
            case State.HEAD:
                return self._read_head()
            case State.ARGUMENTS:
                return self._pass_arguments()
            case State.TAIL:
                return self._read_tail()

    def _begin(self) -> bool:
        """Decide what follows white space at the start, or after a call."""
        rest = self._held.lstrip()
        openings = self._style.openings
        if any(opening.startswith(rest) and rest != opening for opening in openings):
            return False
        if self._state is State.BETWEEN:
            self._held = self._apart(rest)
        if rest.startswith(openings):
            self._open(len(self._held) - len(rest))
        else:
            self._state = State.TEXT
        return True

    def _apart(self, text: str) -> str:
        """Text that follows a call, a line break apart from text before it."""
        return f"\n{text}" if text and (self._has_text or any(self._text)) else text

    def _read_closing(self) -> bool:
        rest, closing = self._held.lstrip(), self._style.closing
        if closing.startswith(rest) and rest != closing:
            return False
        self._held, self._state = rest.removeprefix(closing), State.BETWEEN
        return True

    def _pass_text(self) -> bool:
        """Pass text up to a call, or to what may become one with the white space before it."""
        openings = self._style.openings if self._style.opening else ()
        if openings and (opening := self._opening.search(self._held)):
            found = opening.end()
            text = self._held[:found].rstrip()
            self._text.append(text)
            self._held = self._held[len(text) :]
            self._open(found - len(text))
            return True
        num_kept = len(self._held)
        if openings:
            num_held = max(num_held_chars(self._held, opening) for opening in openings)
            num_kept = len(self._held[: num_kept - num_held].rstrip())
        self._text.append(self._held[:num_kept])
        self._held = self._held[num_kept:]
        return False

    def _open(self, num_space: int) -> None:
        """Begin a call whose opening tag, if any, follows ``num_space`` characters of white space."""
        num_before = num_space + len(self._style.opening) * self._held.startswith(self._style.opening, num_space)
        self._before, self._held = self._held[:num_before], self._held[num_before:]
        self._state, self._num_scanned, self._scanner = State.HEAD, 0, _JsonScanner(self._style.closing)

    def _read_head(self) -> bool:
        start = _HEAD.match(self._held, 0, _MAX_HEAD_CHARS)
        if start is not None and (name := _text_of(start["name"])):
            self._write_call(name)
            self._held = self._held[start.end() :]
            self._scanner, self._state = _JsonScanner(self._style.closing), State.ARGUMENTS
            return True
        rest = self._held.lstrip()
        if rest and rest[0] != "{":
            return self._give_up()
        certain = self._certain()
        end = self._scanner.end(certain, self._num_scanned)
        self._num_scanned = len(certain)
        if end < 0:
            return False
        names = None if self._style.opening else self._functions.keys()
        call = _call_of(self._held[:end] + "}" * self._scanner.depth, names)
        if call is None:
            return self._give_up()
        self._write_call(*call)
        self._close(self._held[end:])
        return True

    def _give_up(self) -> bool:
        """What began like a call is text."""
        num_begun = not self._before.strip()  # without a tag, a call would begin there again
        self._text.append(self._before + self._held[:num_begun])
        self._held = self._held[num_begun:]
        self._state = State.TEXT
        return True

    def _pass_arguments(self) -> bool:
        arguments, is_whole = self._scan()
        if is_whole:
            arguments += "}" * self._scanner.depth
            self._scanner, self._state = _JsonScanner(self._style.closing, depth=1), State.TAIL
        self._write(arguments)
        return is_whole

    def _read_tail(self) -> bool:
        _, is_whole = self._scan()
        if is_whole:
            self._close(self._held)
        return is_whole

    def _scan(self) -> tuple[str, bool]:
        """Take what is certain of the object that is read; return it, and whether it is whole."""
        certain = self._certain()
        end = self._scanner.end(certain, 0)
        taken = certain if end < 0 else certain[:end]
        self._held = self._held[len(taken) :]
        return taken, end >= 0

    def _certain(self) -> str:
        """What is held, less what may begin the closing tag."""
        return self._held[: len(self._held) - num_held_chars(self._held, self._style.closing)]

    def _close(self, rest: str) -> None:
        self.num_calls += 1
        self._held, self._state = rest, State.CLOSING


def _text_of(literal: str) -> str:
    try:
        text = json.loads(literal)
    except (ValueError, RecursionError):
        return ""
    return whole_text(text) if isinstance(text, str) else ""


def whole_text(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which JSON may escape and UTF-8 cannot have."""
    starts = () if text.isascii() else range(0, len(text), _SEARCHED_CHARS)
    if not any(_HALF.search(text, start, start + _SEARCHED_CHARS) for start in starts):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _call_of(literal: str, names: Collection[str] | None) -> tuple[str, str] | None:
    """Name and arguments of a complete call, of members in any order; ``None`` if it is none, but an answer that has a
    name. Only those of ``names``, or all if it is None, may lack arguments, or have null for them."""
    try:
        call = json.loads(literal)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        return None
    given = {member for member, value in call.items() if value is not None}
    if given <= {"name", "id", "type"} and (names is None or name in names):
        arguments = {}
    if not isinstance(arguments, dict | str):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return whole_text(name), whole_text(text)
