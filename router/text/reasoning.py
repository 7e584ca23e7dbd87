"""Separates a model's reasoning from its answer: the text between ``<think>`` and ``</think>`` at the start.

White space around the reasoning is dropped. The result does not depend on how the text was split.
"""

from __future__ import annotations

from enum import Enum

from pdserve.model.config.tokenizer_config import REASONING_TAGS
from pdserve.router.text.answer_text import num_held_chars

OPENING, CLOSING = REASONING_TAGS


class _State(Enum):
    START = "start"
    REASONING = "reasoning"
    AFTER = "after"
    """White space follows the reasoning."""
    ANSWER = "answer"


class ReasoningParser:
    """Separates one answer."""

    def __init__(self, *, is_open: bool) -> None:
        """``is_open``: whether the prompt ends with the opening tag."""
        self._state = _State.REASONING if is_open else _State.START
        self._held = ""
        """Text that is not decided yet."""
        self._has_begun = False
        """Some of the reasoning was returned."""

    def push(self, text: str) -> tuple[str, str]:
        """Take the next text; return reasoning and answer that are certain."""
        if self._state is _State.ANSWER:
            return "", text
        self._held += text
        reasoning = ""
        if self._state is _State.START:
            rest = self._held.lstrip()
            if rest != OPENING and OPENING.startswith(rest):
                return "", ""
            if not rest.startswith(OPENING):
                return "", self._end()
            self._held, self._state = rest.removeprefix(OPENING), _State.REASONING
        if self._state is _State.REASONING:
            reasoning = self._read_reasoning()
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                return reasoning, self._end()
        return reasoning, ""

    def flush(self) -> tuple[str, str]:
        """End the answer; return what is held."""
        in_reasoning = self._state is _State.REASONING
        held = self._end()
        return (held.rstrip(), "") if in_reasoning else ("", held)

    def _end(self) -> str:
        held, self._held, self._state = self._held, "", _State.ANSWER
        return held

    def _read_reasoning(self) -> str:
        """Return the reasoning up to its end, or to what may become its end with the white space before it."""
        if not self._has_begun:
            self._held = self._held.lstrip()
        found = self._held.find(CLOSING)
        if found >= 0:
            reasoning, self._held = self._held[:found].rstrip(), self._held[found + len(CLOSING) :]
            self._state = _State.AFTER
            return reasoning
        num_kept = len(self._held) - num_held_chars(self._held, CLOSING)
        num_kept = len(self._held[:num_kept].rstrip())
        reasoning, self._held = self._held[:num_kept], self._held[num_kept:]
        self._has_begun = self._has_begun or bool(reasoning)
        return reasoning
