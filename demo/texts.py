"""Phrasings, facts and word lists of the demo model's training, from ``texts.json``.

Their order is part of the training: the same seed draws the same conversations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEXTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def phrasings(section: str) -> dict[str, tuple[str, ...]]:
    """Phrasings of questions, by name."""
    return {name: tuple(texts) for name, texts in _TEXTS[section].items()}


def word_lists(*names: str) -> list[tuple[str, ...]]:
    return [tuple(_TEXTS["vocabulary"][name].split()) for name in names]


def terms() -> dict[str, str]:
    return dict(_TEXTS["terms"])


def answers(name: str) -> dict[tuple[str, ...], str]:
    """Answers by the questions that have them."""
    return {tuple(entry["questions"]): entry["answer"] for entry in _TEXTS["answers"][name]}
