"""Chat template of a model: renders a conversation to the text of a prompt.

A template comes with a checkpoint and is untrusted; the values it renders come from clients and are trusted even less.
It runs in a jinja2 sandbox set up as in transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.router.off_loop import pause
from pdserve.router.text.harmony import is_harmony, tools_for_template, turns_for_template


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PromptEnd(Enum):
    """Where the prompt of a conversation ends."""

    ANSWER = "answer"
    """At the start of the assistant's answer."""
    MESSAGES = "messages"
    """After the last message."""
    LAST_MESSAGE = "last message"
    """Inside the last message, which the answer continues."""


_ASKS_FOR_NONE = re.compile(r"content[\"'\])\s]{0,4}(\s+is(\s+not)?\s|[!=]=)\s*none", re.IGNORECASE)

MARK = "\N{BROKEN BAR}"
"""Begins all that is marked in a prompt. Of Latin-1, so that marks widen few texts; templates neither strip nor escape
it, and Python's own form of a text has it as it is."""

OWN = f"{MARK}0"
"""Stands for a client's own `MARK`."""

_NOT_ASCII = re.compile(f"{OWN}|[^\0-\x7f{MARK}]+")

_PROBE = "Hello"
_ROLES = ("system", "developer", "user", "assistant", "tool")

_TURN_PIECES = 64
"""Pieces of a text between two looks at the clock, which takes longer than to add one."""

_END_MARK = f"{MARK}2"
"""Stands at the end of the message that is continued; no text has it."""


class ChatTemplate:
    """Compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], of_tools: str = "") -> None:
        """
        Args:
            special_tokens: text of the names available to the template, such as ``bos_token``.
            of_tools: template of conversations with tools; empty if it is the same.

        Raises:
            ValueError: not a jinja2 template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.concat = _joined  # type: ignore[method-assign]
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}; repair it or remove it") from error
        self.source = source
        self.special_tokens = special_tokens
        self.for_tools: ChatTemplate = ChatTemplate(of_tools, special_tokens) if of_tools else self
        self.is_harmony = is_harmony(source)
        self.variables: frozenset[str] = frozenset(variables | (self.for_tools.variables if of_tools else set()))
        """Names that the template reads."""
        self._roles_of_parts: frozenset[str] = frozenset()
        self._roles_of_parts = frozenset(filter(self._reads_parts, _ROLES))

    def _reads_parts(self, role: str) -> bool:
        """Whether a text of the role must be in a list of parts to be written. As for users, where the template refuses
        a conversation of such a message alone."""
        writes_text, writes_parts = self._writes(role, _PROBE), self._writes(role, _parts(_PROBE))
        if not writes_text and not writes_parts and role != "user":
            return self._reads_parts("user")
        return writes_parts and not writes_text

    def _writes(self, role: str, content: object) -> bool:
        try:
            return _PROBE in self.render([{"role": role, "content": content}])
        except ValueError:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """Render a conversation. A template that does not name the role ``developer`` gets ``system`` in its place, as
        OpenAI defines it; it might drop the message. One that does not ask whether a content is none gets "" for it.
        One that writes a text only where it is in a list of parts gets such lists.
        That of gpt-oss gets the form that `pdserve.router.text.harmony` describes.

        Args:
            tools: as OpenAI's API takes them.
            options: further variables.

        Raises:
            ValueError: the template refuses the messages, or drops the one to continue.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.render(messages, tools=tools, options=options, end=end)
        if not _ASKS_FOR_NONE.search(self.source):
            messages = [{**each, "content": ""} if each.get("content") is None else each for each in messages]
        if self.is_harmony:
            messages, tools = turns_for_template(messages), tools_for_template(tools)
        if "developer" not in self.source:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        if end is PromptEnd.LAST_MESSAGE:  # the mark also keeps templates from stripping white space before it
            *others, last = messages
            messages = [*others, {**last, "content": f"{last['content'] or ''}{_END_MARK}"}]
        if self._roles_of_parts:
            messages = [
                {**each, "content": _parts(text)}
                if each["role"] in self._roles_of_parts and isinstance(text := each.get("content"), str)
                else each
                for each in messages
            ]
        variables = {
            **self.special_tokens,
            "documents": None,
            **(options or {}),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": end is PromptEnd.ANSWER,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template is code and its input comes from clients: anything can be raised
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        if end is not PromptEnd.LAST_MESSAGE:
            return text
        text, mark, _ = text.rpartition(_END_MARK)
        if not mark:
            raise ValueError("the model's chat template drops the last message, so it cannot be continued")
        return text


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _joined(pieces: Iterable[str]) -> str:
    """The text of all pieces. Other threads run between them, while a join would copy all at once."""
    text = ""
    for number, piece in enumerate(pieces):
        if number % _TURN_PIECES == 0:
            pause()
        text += piece
    return text


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's filter: a prompt is not HTML. Marks stay what they are, though
    `json` would escape them."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda run: json.dumps(run[0].replace(OWN, MARK))[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
