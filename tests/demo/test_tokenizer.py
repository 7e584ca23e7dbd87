from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pdserve.demo import tokenizer as words
from pdserve.demo.corpus import EXAMINED, conversation, examine, messages
from pdserve.demo.words import CITIES, ENGLISH, NAMES
from pdserve.router.text.tokenizer import ChatTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    words.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def test_words_of_the_phrasings_and_numbers_are_tokens_and_items_are_spelled(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "Reverse the word planet.") == ["Reverse", "Ġthe", "Ġword", "Ġ", *"planet", "."]
    assert pieces(tokenizer, "What is 17 + 25?") == ["What", "Ġis", "Ġ", "17", "Ġ+", "Ġ", "25", "?"]
    assert pieces(tokenizer, "1998") == ["1998"]
    assert pieces(tokenizer, "1999") == ["1", "9", "9", "9"]


def test_every_word_to_be_spelled_is_spelled(tokenizer: Tokenizer) -> None:
    for word in (*ENGLISH, *NAMES, *CITIES):
        assert pieces(tokenizer, f" {word}") == ["Ġ", *word]


@pytest.mark.parametrize(
    "text", ["größer, naïve 東京 🙂\n\ttwo", "a  b", "x=1.5e3", *(examine(t, 1).answer for t in EXAMINED)]
)
def test_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_a_trained_conversation_is_encoded_as_the_router_does(folder: Path, tokenizer: Tokenizer) -> None:
    turns = conversation(random.Random(3), 4)
    trained = tokenizer.encode(words.render(turns, "Answer briefly."), add_special_tokens=False).ids
    router = ChatTokenizer.from_folder(folder)
    text = router.chat_text(messages(turns, "Answer briefly.")[:-1])
    asked = asyncio.run(router.encode(text, add_special_tokens=False))
    assert trained[: len(asked)] == asked
    answer = tokenizer.encode(turns[-1].answer + words.END, add_special_tokens=False).ids
    assert trained[len(asked) :] == answer
