"""The harmony format of gpt-oss: what its special tokens mean in an answer, a prompt and a grammar.

An answer is messages, ``<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>``, the first without its start. Text
of the channel ``analysis`` is reasoning. A message ``to=functions.NAME`` is a call, and all other text is the answer's:
that of the channel ``final``, and what the model says before calls in ``commentary``. ``<|return|>`` and ``<|call|>``
end the last message. Source: OpenAI's cookbook, "OpenAI harmony response format".

Text of a special token is not its meaning. Each of the format's tokens is therefore a mark in the text of an answer,
half of a surrogate pair, which no text has (`MarkedDetokenizer`); `HarmonyParts` takes all of these out again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdserve.router.off_loop import pause
from pdserve.router.text.tool_calls import CallDelta

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pdserve.router.text.answer import AnswerEnd

_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _RETURN, _CALL = map(chr, range(0xD800, 0xD807))
_MARKS = {
    "<|start|>": _START, "<|end|>": _END, "<|message|>": _MESSAGE, "<|channel|>": _CHANNEL,
    "<|constrain|>": _CONSTRAIN, "<|return|>": _RETURN, "<|call|>": _CALL,
}  # fmt: skip
"""Special token to its mark."""
_ANY_MARK = re.compile(f"([{_START}-{_CALL}])")
_RECIPIENT = re.compile(rf"\bto=([^\s{_START}-{_CALL}]+)")
_IS_ANALYSIS = re.compile(rf"{_CHANNEL}\s*analysis\b")
_ROLE, _FUNCTIONS = "assistant", "functions."
_REASONING, _TEXT, _CALLED = "reasoning", "text", "called"
"""Kinds of messages."""
_MAX_HEADER_CHARS = 512
"""What is longer is no header, but text."""
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Reasoning effort that the model does not know to the nearest that it does."""


def is_harmony(template: str) -> bool:
    """Whether a chat template writes the format."""
    return "<|channel|>" in template and "<|message|>" in template


def turns_for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in the form of which gpt-oss's template drops nothing.

    It reads instructions from the first message alone, reasoning from ``thinking``, the first call of a message, and
    results as those of the last call; it refuses text beside thinking and a call. So all instructions go first, each
    call has a message of its own and its results behind it, and text before a call is the end of the thinking.
    """
    instructions = [str(each["content"]) for each in messages if each["role"] in ("system", "developer")]
    turns = [dict[str, Any](role="developer", content="\n\n".join(instructions))] if instructions else []
    rest = deque(dict(each) for each in messages if each["role"] not in ("system", "developer"))
    while rest:
        pause()
        message = rest.popleft()
        calls, thinking = message.pop("tool_calls", ()), [message.get("reasoning")]
        if calls:
            thinking.append(message["content"])
            message["content"] = ""
        if any(thinking):
            message["thinking"] = "\n".join(filter(None, thinking))
        results: dict[object, list[dict[str, Any]]] = {call["id"]: [] for call in calls}
        others: list[dict[str, Any]] = [] if calls else [message]
        while calls and rest and rest[0]["role"] == "tool":
            pause()
            result = rest.popleft()
            results.get(result.get("tool_call_id"), others).append(result)
        for call in calls:
            turns += [{**message, "tool_calls": [call]}, *results.pop(call["id"], ())]
            message = {"role": "assistant", "content": ""}
        turns += others
    return turns


def tools_for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools that all have the description which gpt-oss's template reads."""
    functions = [tool["function"] for tool in tools]
    described = [{**each, "description": each.get("description") or ""} for each in functions]
    return [{**tool, "function": function} for tool, function in zip(tools, described, strict=True)]


class Harmony:
    """The format in the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ValueError: the tokenizer lacks one of the format's special tokens.
        """
        added = {each.content: token for token, each in tokenizer.get_added_tokens_decoder().items()}
        if missing := _MARKS.keys() - added.keys():
            raise ValueError(
                f"the harmony format needs special tokens that its tokenizer lacks: {', '.join(sorted(missing))}; take "
                "the tokenizer of the same checkpoint, or set another model.tool_format"
            )
        self._ids = {mark: added[text] for text, mark in _MARKS.items()}
        self.marks = {token: mark for mark, token in self._ids.items()}
        """Mark of each token."""

    def begun(self, prompt: Sequence[int], text_of: Callable[[int], str]) -> str:
        """Header of the message in which a prompt ends, with marks, if the answer goes on in its text; else empty."""
        start = next((index for index in range(len(prompt), 0, -1) if prompt[index - 1] == self._ids[_START]), 0)
        tokens = prompt[start:]
        if self._ids[_MESSAGE] not in tokens:
            return ""
        end = tokens.index(self._ids[_MESSAGE]) + 1
        is_over = any(self._ids[mark] in tokens[end:] for mark in (_END, _RETURN, _CALL))
        return "" if is_over else "".join(self.marks.get(token) or text_of(token) for token in tokens[:end])

    # Parts of structural tags

    def messages(self, last: Sequence[object], *, may_announce: bool = False) -> dict[str, object]:
        """Format of an answer that reasons, and ends with one of the messages ``last``.

        Args:
            may_announce: whether text for the user may come before it.
        """
        channels = ("analysis", "commentary") if may_announce else ("analysis",)
        others = [self._format(f"{_CHANNEL}{channel}{_MESSAGE}", {"type": "any_text"}) for channel in channels]
        before = _sequence({"type": "or", "elements": others}, self._format(f"{_END}{_START}{_ROLE}"))
        return _sequence({"type": "star", "content": before}, {"type": "or", "elements": list(last)})

    def final(self, content: object) -> dict[str, object]:
        return self._format(f"{_CHANNEL}final{_MESSAGE}", content)

    def call(self, name: str, content: object) -> dict[str, object]:
        """A call, whose end is that of the answer, with its header as the model or its template writes it."""
        headers = (
            f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}",
            f" to=functions.{name}{_CHANNEL}commentary {_CONSTRAIN}json{_MESSAGE}",
            f" to=functions.{name}{_CHANNEL}commentary json{_MESSAGE}",
        )
        return _sequence({"type": "or", "elements": list(map(self._format, headers))}, content)

    def _format(self, text: str, *contents: object) -> dict[str, object]:
        parts = [
            {"type": "token", "token": self._ids[part]}
            if part in self._ids
            else {"type": "const_string", "value": part}
            for part in filter(None, _ANY_MARK.split(text))
        ]
        return _sequence(*parts, *contents)


def _sequence(*elements: object) -> dict[str, object]:
    return {"type": "sequence", "elements": list(elements)}


class HarmonyParts:
    """Reasoning, text and tool calls of one choice. Nothing is held but headers, and text that may be one."""

    def __init__(
        self,
        begun: str,
        new_id: Callable[[], str],
        offered: Sequence[Mapping[str, Any]] | None,
        *,
        may_call_several: bool,
    ) -> None:
        """
        Args:
            begun: of the prompt (`Harmony.begun`).
            new_id: returns the id of the next call.
            offered: tools that may be called, as a chat has them; None if none may.
        """
        self._new_id = new_id
        self._names = None if offered is None else {tool["function"]["name"] for tool in offered}
        self._may_call_several = may_call_several
        self._header: str | None = ""
        """Of the message that begins, with marks; None in its text."""
        self._kind = _TEXT
        """Of the message."""
        self._is_empty = True
        """There is nothing of the message yet."""
        self._is_later = dict.fromkeys((_REASONING, _TEXT), False)
        """Whether there was text of a kind."""
        self._written = dict.fromkeys((_REASONING, _TEXT), "")
        """To be returned, by kind."""
        self._calls: list[CallDelta] = []
        """To be returned."""
        self._num_begun = self._num_whole = 0
        """Calls."""
        self.push(begun, None)

    @property
    def in_header(self) -> bool:
        """Whether what comes next is no text."""
        return self._header is not None

    def push(
        self, text: str, end: AnswerEnd | None, *, is_cut: bool = False
    ) -> tuple[str, str, list[CallDelta], AnswerEnd | None]:
        """As `AnswerParts.push`."""
        for part in filter(None, _ANY_MARK.split(text)):
            take = self._mark if _ANY_MARK.match(part) else self._read
            take(part)
            if self._num_whole and not self._may_call_several:
                end = "tool_calls"
                break
        if end is not None:
            self._close(is_whole=end != "length" and not is_cut)
        if end == "stop" and self._num_whole:
            end = "tool_calls"
        written, calls = self._written, self._calls
        self._written, self._calls = dict.fromkeys(written, ""), []
        return written[_REASONING], written[_TEXT], calls, end

    def _mark(self, mark: str) -> None:
        if self._header is not None and mark in (_CHANNEL, _CONSTRAIN):
            self._header += mark
        elif self._header is not None and mark == _MESSAGE:
            self._open(self._header)
        elif mark not in (_CONSTRAIN, _MESSAGE):  # a channel, too, may begin a message
            self._close(is_whole=True)
            self._header = mark if mark in (_START, _CHANNEL) else ""

    def _open(self, header: str) -> None:
        """Begin the text of a message."""
        recipient = _RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        name = to.removeprefix(_FUNCTIONS)
        self._header, self._is_empty = None, True
        if self._names is not None and name and (to != name or name in self._names):
            self._kind = _CALLED
            self._calls.append(CallDelta(self._num_begun, self._new_id(), name, ""))
            self._num_begun += 1
        else:
            self._kind = _REASONING if _IS_ANALYSIS.search(header) else _TEXT

    def _read(self, text: str) -> None:
        if self._header is not None:
            self._header += text
            if not _is_text(self._header):
                return
            text = _ANY_MARK.sub("", self._header)
            self._open("")
        if self._kind == _CALLED:
            self._calls.append(CallDelta(self._num_begun - 1, "", "", text))
        else:
            self._written[self._kind] += "\n" + text if self._is_empty and self._is_later[self._kind] else text
            self._is_later[self._kind] = True
        self._is_empty = False

    def _close(self, *, is_whole: bool) -> None:
        """End the message, if any."""
        if self._header is None and self._kind == _CALLED and is_whole:
            if self._is_empty:
                self._read("{}")
            self._num_whole += 1
        elif self._header and _is_text(self._header, is_over=True):
            text = self._header
            self._open("")
            self._read(text)
        self._header = ""


def _is_text(header: str, *, is_over: bool = False) -> bool:
    """Whether what stands where a header should be is text, at the latest once no more of it follows."""
    if len(header) > _MAX_HEADER_CHARS:
        return True
    if _ANY_MARK.search(header):
        return False
    rest = header.strip().removeprefix(_ROLE).lstrip()
    if is_over:
        return not header.isspace() and not rest.startswith("to=")
    return not _ROLE.startswith(rest) and not "to=".startswith(rest[:3])
