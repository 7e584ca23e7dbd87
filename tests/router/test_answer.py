"""An answer starts when it is read, ends when it is left, and counts every token."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from pdserve.contracts.request import FinishReason, SamplingParams
from pdserve.router.answer import Answer, TextDelta, Usage
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.stop_strings import StopStrings
from tests.router.edge_server import ScriptedGenerator, saying, stuck_after
from tests.router.small_tokenizers import BOS_ID, EOS_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def answer_of(generator: ScriptedGenerator, stops: tuple[str, ...] = ()) -> Answer:
    return Answer(
        generator,
        [BOS_ID, 40, 41],
        SamplingParams(max_tokens=100),
        arrived_s=1.0,
        cache_salt=b"",
        detokenizer=Detokenizer(TOKENIZER, {BOS_ID, EOS_ID}),
        stop_strings=StopStrings(stops),
    )


def tokens_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def read(answer: Answer) -> list[TextDelta]:
    async def run() -> list[TextDelta]:
        async with aclosing(answer.deltas()) as deltas:
            return [delta async for delta in deltas]

    return asyncio.run(run())


def test_nothing_starts_before_the_answer_is_read() -> None:
    generator = ScriptedGenerator()
    answer_of(generator)
    assert generator.generations == []


def test_leaving_early_cancels() -> None:
    generator = ScriptedGenerator()
    generator.script = stuck_after([50])

    async def run() -> None:
        async with aclosing(answer_of(generator).deltas()) as deltas:
            await anext(deltas)
            assert generator.last.cancels == []

    asyncio.run(run())
    assert generator.last.cancels == [False]


def test_reading_to_the_end_cancels_nothing() -> None:
    generator = ScriptedGenerator()
    generator.script = saying([*tokens_of("the time"), EOS_ID], FinishReason.STOP)
    answer = answer_of(generator)
    deltas = read(answer)
    assert generator.last.cancels == []
    assert "".join(delta.text for delta in deltas) == "the time"
    assert [delta.end for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert answer.usage == Usage(3, 3, len(deltas))


def test_the_stopping_token_is_no_text_even_where_it_is_an_ordinary_one() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("a b"), FinishReason.STOP)
    assert "".join(delta.text for delta in read(answer_of(generator))) == "a "


def test_a_stop_string_finishes_the_generation_and_uses_up_what_it_read() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("abcdefgh"), FinishReason.LENGTH)
    answer = answer_of(generator, ("de",))
    deltas = read(answer)
    assert generator.last.cancels[0] is True
    assert "".join(delta.text for delta in deltas) == "abc"
    assert deltas[-1].end == "stop"
    assert answer.usage.num_completion_tokens == len(deltas) < len(tokens_of("abcdefgh"))


def test_a_stop_string_in_the_last_token_wins_over_its_length() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("xyz"), FinishReason.LENGTH)
    deltas = read(answer_of(generator, ("z",)))
    assert ("".join(delta.text for delta in deltas), deltas[-1].end) == ("xy", "stop")


def test_broken_bytes_at_the_end_are_searched_for_stop_strings_too() -> None:
    generator = ScriptedGenerator()
    generator.script = saying(tokens_of("a") + tokens_of("東")[:1], FinishReason.LENGTH)
    deltas = read(answer_of(generator, ("\ufffd",)))
    assert ("".join(delta.text for delta in deltas), deltas[-1].end) == ("a", "stop")
