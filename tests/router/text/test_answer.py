"""A generation starts when it is read, ends when it is closed, and counts every token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason, SamplingParams
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.text.answer import Answer, Choice, Generation, Outbox, TextDelta, usage
from pdserve.router.text.answer_text import Detokenizer, StopStrings
from tests.router.edge_server import (
    Script,
    ScriptedGeneration,
    ScriptedGenerator,
    at_once,
    saying,
    stuck_after,
    token_event,
)
from tests.router.small_tokenizers import BOS_ID, EOS_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def answer_of(
    stops: tuple[str, ...] = (),
    *,
    num_choices: int = 1,
    first_index: int = 0,
    shows_stop: bool = False,
    is_whole: bool = False,
    min_tokens: int = 0,
) -> Answer:
    return Answer(
        RequestSpec(
            prompt_tokens=(BOS_ID, 40, 41),
            sampling=SamplingParams(max_tokens=100),
            arrived_s=1.0,
            num_choices=num_choices,
        ),
        [
            Choice(
                index,
                Detokenizer(TOKENIZER, {BOS_ID, EOS_ID}),
                StopStrings(stops, are_shown=shows_stop),
                shows_stop_token=shows_stop,
                shows_tokens=not is_whole,
                is_whole=is_whole,
                min_tokens=min_tokens,
            )
            for index in range(first_index, first_index + num_choices)
        ],
    )


def tokens_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def read(generator: ScriptedGenerator, *answers: Answer) -> list[list[TextDelta]]:
    """Deltas, as they were taken together."""

    async def run() -> list[list[TextDelta]]:
        batches = []
        with generation_of(generator, *answers) as generation:
            while batch := await generation.next():
                batches.append(batch)
        return batches

    return asyncio.run(run())


def generation_of(generator: ScriptedGenerator, *answers: Answer) -> Generation:
    return Generation(generator.dispatcher, answers, Outbox())


def read_each(generator: ScriptedGenerator, *answers: Answer) -> list[TextDelta]:
    return [delta for together in read(generator, *answers) for delta in together]


def test_nothing_starts_before_the_answer_is_read() -> None:
    generator = ScriptedGenerator()

    async def run() -> None:
        generation_of(generator, answer_of())
        assert generator.generations == []

    asyncio.run(run())


def test_leaving_early_cancels() -> None:
    generator = ScriptedGenerator()
    generator.script = stuck_after([50])

    async def run() -> None:
        with generation_of(generator, answer_of()) as generation:
            await generation.next()
            assert generator.last.cancels == []

    asyncio.run(run())
    assert generator.last.cancels == [False]


def test_reading_to_the_end_cancels_nothing() -> None:
    generator = ScriptedGenerator()
    generator.script = saying([*tokens_of("the time"), EOS_ID], FinishReason.STOP)
    answer = answer_of()
    deltas = read_each(generator, answer)
    assert generator.last.cancels == []
    assert "".join(delta.text for delta in deltas) == "the time"
    assert [delta.end for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert counts(answer) == (3, 3, len(deltas))


def test_the_stopping_token_is_no_text_even_where_it_is_an_ordinary_one() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("a b"), FinishReason.STOP)
    assert "".join(delta.text for delta in read_each(generator, answer_of())) == "a "


def test_a_stop_string_finishes_the_generation_and_uses_up_what_it_read() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("abcdefgh"), FinishReason.LENGTH)
    answer = answer_of(("de",))
    deltas = read_each(generator, answer)
    assert generator.last.cancels[0] is True
    assert "".join(delta.text for delta in deltas) == "abc"
    assert deltas[-1].end == "stop"
    assert answer.num_completion_tokens == len(deltas) < len(tokens_of("abcdefgh"))


def test_a_stop_string_in_the_last_token_wins_over_its_length() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("xyz"), FinishReason.LENGTH)
    deltas = read_each(generator, answer_of(("z",)))
    assert ("".join(delta.text for delta in deltas), deltas[-1].end) == ("xy", "stop")


def test_broken_bytes_at_the_end_are_searched_for_stop_strings_too() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("a") + tokens_of("東")[:1], FinishReason.LENGTH)
    deltas = read_each(generator, answer_of(("\ufffd",)))
    assert ("".join(delta.text for delta in deltas), deltas[-1].end) == ("a", "stop")


def counts(answer: Answer) -> tuple[object, ...]:
    """Prompt, cached and generated tokens, as in the response."""
    written = usage([answer])
    assert written["prompt_tokens_details"] == {"cached_tokens": answer.num_cached_tokens}
    return written["prompt_tokens"], answer.num_cached_tokens, written["completion_tokens"]


def text_of(deltas: list[TextDelta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def test_a_shown_stop_string_ends_the_text() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("abcdefgh"), FinishReason.LENGTH)
    assert text_of(read_each(generator, answer_of(("de",), shows_stop=True))) == "abcde"


def test_a_shown_stop_token_is_text_unless_it_is_hidden() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("a b"), FinishReason.STOP)
    assert text_of(read_each(generator, answer_of(shows_stop=True))) == "a b"
    generator.script = saying([*tokens_of("a b"), EOS_ID], FinishReason.STOP)
    assert text_of(read_each(generator, answer_of(shows_stop=True))) == "a b"


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("x.x.x.x"), FinishReason.LENGTH)
    deltas = read_each(generator, answer_of((".",), min_tokens=3))
    assert (text_of(deltas), deltas[-1].end) == ("x.x", "stop")


def speaking_of(*choices: str) -> Script:
    """Script with a different text for each choice, up to the end of the longest."""
    tokens = [tokens_of(text) for text in choices]

    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        for index in range(max(map(len, tokens))):
            for choice, said in enumerate(tokens):
                if index < len(said):
                    end = FinishReason.LENGTH if index == len(said) - 1 else FinishReason.NONE
                    yield token_event(choice, index, said[index], None, end)

    return script


def test_choices_have_texts_stop_strings_and_ends_of_their_own() -> None:
    generator = ScriptedGenerator()
    generator.script = speaking_of("ab|cd", "東京", "x")
    answer = answer_of(("|",), num_choices=3, first_index=5)
    deltas = read_each(generator, answer)
    assert generator.last.num_choices == 3
    assert [text_of(deltas, choice) for choice in (5, 6, 7)] == ["ab", "東京", "x"]
    ends = {delta.choice: delta.end for delta in deltas if delta.end is not None}
    assert ends == {5: "stop", 6: "length", 7: "length"}
    assert generator.last.finished == [0]
    num_tokens = len(tokens_of("ab|")) + len(tokens_of("東京")) + 1
    assert counts(answer) == (3, 0, num_tokens)
    assert len(deltas) == num_tokens


def test_tokens_of_a_choice_that_a_stop_string_ended_are_not_read() -> None:
    generator = ScriptedGenerator()
    generator.script = speaking_of("|abc", "abc|")
    answer = answer_of(("|",), num_choices=2)
    deltas = read_each(generator, answer)
    assert [text_of(deltas, choice) for choice in (0, 1)] == ["", "abc"]
    assert generator.last.finished == [0]
    assert answer.num_completion_tokens == 1 + len(tokens_of("abc|"))


def test_a_generation_that_forgets_a_choice_is_a_fault() -> None:
    generator = ScriptedGenerator()
    generator.script = speaking_of("abc")
    with pytest.raises(GenerationError, match="without a last token"):
        read_each(generator, answer_of(num_choices=2))


def test_each_token_says_where_its_text_begins() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("é東x"), FinishReason.LENGTH)
    deltas = read_each(generator, answer_of())
    offsets = [token.offset_chars for delta in deltas for token in delta.tokens]
    assert offsets[0] == 0
    assert offsets[-1] == 2
    assert offsets == sorted(offsets)


def test_tokens_that_come_together_are_read_together_up_to_the_end_of_their_choice() -> None:
    generator = ScriptedGenerator()
    generator.script = at_once(tokens_of("a.b"))
    answer = answer_of((".",), num_choices=2)
    (together,) = read(generator, answer)
    assert [text_of(together, choice) for choice in (0, 1)] == ["a", "a"]
    assert generator.last.finished == []  # their last tokens came, too
    assert answer.num_completion_tokens == len(together) == 2 * len(tokens_of("a."))
