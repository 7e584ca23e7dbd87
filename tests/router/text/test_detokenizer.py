"""Pieces of text join to the whole text, and no piece splits a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdserve.router.text.answer_text import MAX_HELD_TOKENS, ByteDetokenizer, Detokenizer
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.router.small_tokenizers import BOS_ID, EOS_ID, byte_level_tokenizer, metaspace_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
METASPACE = metaspace_tokenizer()
SPECIAL = frozenset({BOS_ID, EOS_ID})
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte_level", "metaspace"])


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], hidden: frozenset[int] = SPECIAL) -> list[str]:
    detokenizer = Detokenizer(tokenizer, hidden)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@BOTH
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_of_a_text_join_to_its_decoding(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(tokens=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=MAX_HELD_TOKENS))
def test_pieces_of_any_tokens_join_to_their_decoding(tokens: list[int]) -> None:
    """Includes broken bytes, special tokens and ids without a token."""
    assert "".join(pieces(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)
    assert "".join(pieces(BYTE_LEVEL, tokens, frozenset())) == BYTE_LEVEL.decode(tokens, skip_special_tokens=False)


@given(
    tokens=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=60),
    num_context=st.integers(0, 5),
    is_hidden=st.booleans(),
)
def test_bytes_of_any_tokens_join_to_their_decoding(tokens: list[int], num_context: int, is_hidden: bool) -> None:
    tokenizer = ChatTokenizer(BYTE_LEVEL, None, BYTE_LEVEL.get_vocab_size())
    shown = BYTE_LEVEL.decode(tokens, skip_special_tokens=is_hidden)

    def text(context: list[int], answer: list[int]) -> str:
        detokenizer = tokenizer.detokenizer(skip_special_tokens=is_hidden, prompt_tokens=context)
        assert isinstance(detokenizer, ByteDetokenizer)
        return "".join([*map(detokenizer.push, answer), detokenizer.flush()])

    assert text([], tokens) == shown
    # What a context leaves open belongs to the answer
    assert shown.endswith(text(tokens[:num_context], tokens[num_context:]))


@given(tokens=st.lists(st.integers(0, METASPACE.get_vocab_size() + 5), max_size=60))
def test_any_tokens_of_a_byte_fallback_tokenizer_can_be_decoded(tokens: list[int]) -> None:
    """Its decoder judges a run of bytes as a whole, so pieces and whole agree on complete characters only."""
    assert len(pieces(METASPACE, tokens)) == len(tokens) + 1


@BOTH
@pytest.mark.parametrize("text", ["🙂🚀🙂", "東京", "naïve café"])
def test_no_piece_breaks_a_character(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    given_text = pieces(tokenizer, tokens)
    assert all("\ufffd" not in piece for piece in given_text)
    assert "".join(given_text) == text


def metaspace_id(piece: str) -> int:
    token: int | None = METASPACE.token_to_id(piece)
    assert token is not None
    return token


@BOTH
@given(text=st.text(alphabet="ab 東🙂", max_size=60), piece_tokens=st.integers(2, 70))
def test_larger_pieces_join_to_the_same_text(tokenizer: Tokenizer, text: str, piece_tokens: int) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, SPECIAL, piece_tokens=piece_tokens)
    parts = [detokenizer.push(token) for token in tokens]
    assert not any(parts[: piece_tokens - 1])
    assert sum(map(bool, parts)) <= len(tokens) // piece_tokens
    assert "".join([*parts, detokenizer.flush()]) == tokenizer.decode(tokens)


def test_an_emoji_of_four_byte_tokens_comes_with_the_last() -> None:
    tokens = [metaspace_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert pieces(METASPACE, tokens) == ["", "", "", "🙂", ""]


def test_an_unfinished_character_is_given_at_the_end() -> None:
    first_byte = BYTE_LEVEL.encode("東", add_special_tokens=False).ids[:1]
    assert pieces(BYTE_LEVEL, first_byte) == ["", "\ufffd"]


def test_a_replacement_character_in_the_text_is_text() -> None:
    tokens = BYTE_LEVEL.encode("a\ufffdb", add_special_tokens=False).ids
    assert "".join(pieces(BYTE_LEVEL, tokens)) == "a\ufffdb"


def test_hidden_tokens_have_no_text() -> None:
    tokens = [BOS_ID, *BYTE_LEVEL.encode("hi", add_special_tokens=False).ids, EOS_ID]
    assert "".join(pieces(BYTE_LEVEL, tokens)) == "hi"
    assert "".join(pieces(BYTE_LEVEL, tokens, frozenset())) == "<|bos|>hi<|eos|>"


def test_the_text_of_the_context_is_not_given_and_its_space_is_kept() -> None:
    tokens = METASPACE.encode("in the", add_special_tokens=False).ids
    middle = tokens.index(metaspace_id("▁the"))
    continued = Detokenizer(METASPACE, SPECIAL, [BOS_ID, *tokens[:middle]])
    assert continued.push(tokens[middle]) == " the"
    assert Detokenizer(METASPACE, SPECIAL).push(tokens[middle]) == "the"


def test_an_endless_run_of_broken_bytes_is_given_and_costs_no_more_and_more() -> None:
    broken = BYTE_LEVEL.encode("東", add_special_tokens=False).ids[0]
    detokenizer = Detokenizer(BYTE_LEVEL, SPECIAL)
    given_text = [detokenizer.push(broken) for _ in range(10 * MAX_HELD_TOKENS)]
    assert sum(bool(piece) for piece in given_text) == 10
