"""Masks follow the grammar whatever happens to a sequence, and sampled tokens follow the masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import Grammar, GrammarKind, SamplingParams
from pdserve.contracts.step import StepRow
from pdserve.kernels.selection import CPU_SAMPLING
from pdserve.model.sampling.grammars import GrammarMatchers
from pdserve.model.sampling.sampling import Sampler, likeliest, plan_draws
from tests.vocabulary import LIMITS, PERSON, compiled, demo_tokenizer, demo_vocabulary, encoded

[EOS] = LIMITS.eos_token_ids
PROMPT = [5, 6, 7]
DATES = Grammar(GrammarKind.REGEX, r"[0-9]{4}-[0-9]{2}(, [a-z]{1,9}){1,3}")
WORDS = Grammar(GrammarKind.EBNF, 'root ::= "yes" | "no" | "yellow"')


def matchers(max_matchers: int = 100) -> GrammarMatchers:
    return GrammarMatchers(
        compiled, vocab_size=LIMITS.vocab_size, eos_token_ids=LIMITS.eos_token_ids, max_matchers=max_matchers
    )


def a_row(
    answer: Sequence[int],
    grammar: Grammar = DATES,
    *,
    sequence_id: int = 1,
    banned: Sequence[int] = (),
    newest: int | None = None,
    **params: float,
) -> StepRow:
    """A row after ``answer``; with ``newest``, its last token is one that the scheduler does not know."""
    return StepRow(
        sequence_id=sequence_id,
        tokens=[] if newest is not None else [1],
        previous_row=-1 if newest is None else newest,
        cached_length=0,
        block_table=[0],
        sample=SamplingParams(grammar=grammar, **params),  # type: ignore[arg-type]
        sample_position=len(PROMPT) + len(answer),
        history=[*PROMPT, *answer],
        num_prompt_tokens=len(PROMPT),
        banned_tokens=banned,
    )


def allowed(matchers: GrammarMatchers, row: StepRow) -> list[int]:
    [tokens] = allowed_along(matchers, row)
    return tokens


def allowed_along(matchers: GrammarMatchers, row: StepRow) -> list[list[int]]:
    masks = np.zeros((1 + len(row.guesses), matchers.num_words), np.int32)
    matchers.fill(masks, row, lambda token: token)  # the row of the previous step is the token itself
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(mask).tolist() for mask in bits]


def text_of(tokens: Sequence[int]) -> str:
    text: str = demo_tokenizer().decode(list(tokens))
    return text


@settings(max_examples=40, deadline=None)
@given(
    picks=st.lists(st.integers(0, 2**16), min_size=40, max_size=40),
    lost=st.sets(st.integers(0, 40)),
    late=st.sets(st.integers(0, 40)),
)
def test_a_walk_over_the_masks_is_a_text_of_the_grammar(picks: list[int], lost: set[int], late: set[int]) -> None:
    """Whether the matcher was kept, lost or one token behind."""
    kept = matchers()
    answer: list[int] = []
    for index, pick in enumerate(picks):
        if index in lost:
            kept = matchers()
        if index in late and answer:
            choices = allowed(kept, a_row(answer[:-1], newest=answer[-1]))
        else:
            choices = allowed(kept, a_row(answer))
        assert choices == allowed(matchers(), a_row(answer)), "a kept matcher differs from one that is built anew"
        token = choices[pick % len(choices)]
        if token == EOS:
            assert re.fullmatch(DATES.text, text_of(answer))
            return
        answer.append(token)
    raise AssertionError(f"{text_of(answer)!r} does not end")


def test_another_sequence_of_the_same_number_starts_again() -> None:
    kept = matchers()
    first = allowed(kept, a_row([]))
    [year, *_] = [token for token in first if text_of([token]) == "2"]
    assert allowed(kept, a_row([year])) == allowed(matchers(), a_row([year]))
    assert allowed(kept, a_row([])) == first
    assert allowed(kept, a_row([], WORDS)) == allowed(matchers(), a_row([], WORDS)) != first


def test_matchers_are_dropped_beyond_the_bound_and_built_again() -> None:
    kept = matchers(max_matchers=2)
    answer = demo_tokenizer().encode("2026-11", add_special_tokens=False).ids
    expected = allowed(matchers(), a_row(answer))
    for sequence_id in (1, 2, 3, 1, 2, 3):
        assert allowed(kept, a_row(answer, sequence_id=sequence_id)) == expected
    assert len(kept._by_sequence) == 2


@pytest.mark.parametrize("answer", ["x", "2026-11, a, b, c, d"])
def test_an_answer_that_breaks_its_grammar_may_only_end(answer: str) -> None:
    tokens = demo_tokenizer().encode(answer, add_special_tokens=False).ids
    kept = matchers()
    assert allowed(kept, a_row(tokens)) == [EOS]
    assert allowed(kept, a_row([*tokens, tokens[0]])) == [EOS]


def test_after_its_end_a_speculative_row_has_a_token_too() -> None:
    assert allowed(matchers(), a_row(demo_tokenizer().encode("no", add_special_tokens=False).ids, WORDS)) == [EOS]
    assert allowed(matchers(), a_row([*demo_tokenizer().encode("no").ids, EOS, EOS], WORDS)) == [EOS]


def test_a_ban_of_the_end_holds_until_only_the_end_is_left() -> None:
    words = demo_tokenizer().encode("2026-11, a", add_special_tokens=False).ids
    assert EOS in allowed(matchers(), a_row(words))
    assert EOS not in allowed(matchers(), a_row(words, banned=[EOS]))
    complete = demo_tokenizer().encode("yellow", add_special_tokens=False).ids
    assert allowed(matchers(), a_row(complete, WORDS, banned=[EOS])) == [EOS]


# Guesses


@pytest.mark.parametrize(
    "guesses",
    [
        encoded("11, a, ab"),
        [*encoded("11, a"), EOS],
        [*encoded("11, a"), EOS, EOS, *encoded(", b")],
        encoded("x1, a"),
        [*encoded("11"), EOS, *encoded(", a")],
        [EOS, EOS],
    ],
    ids=text_of,
)
@pytest.mark.parametrize("start", ["2026-", "2026-11, a, b, c", "x"])
def test_masks_after_guesses_are_those_of_an_answer_with_them(start: str, guesses: list[int]) -> None:
    """And the matcher goes back."""
    kept, answer = matchers(), encoded(start)
    row = replace(a_row(answer, banned=[EOS]), guesses=guesses)
    expected = [
        allowed(matchers(), a_row([*answer, *guesses[:number]], banned=[EOS])) for number in range(1 + len(guesses))
    ]
    for _ in range(2):
        assert allowed_along(kept, row) == expected
    follower = expected[0][-1]
    assert allowed(kept, a_row([*answer, follower])) == allowed(matchers(), a_row([*answer, follower]))


def test_what_a_grammar_prescribes_is_guessed_in_the_longest_tokens() -> None:
    kept = matchers()
    for start, prescribed in [
        ("", '{"name": "'),
        ('{"name', '": "'),
        ('{"name": "', ""),
        ('{"name": "Ada', ""),
        ('{"name": "Ada"', ', "colour": "'),
        ('{"name": "Ada", "colour": "red', '", "age": '),
        ('{"name": "Ada", "colour": "red", "age": 3', ""),
        ('{"name": "Ada", "colour": "red", "age": 36}', ""),
        ("x", ""),
    ]:
        row = replace(a_row(encoded(start), PERSON), max_forced=99)
        assert text_of(kept.prescribed(row)) == prescribed
        assert kept.prescribed(replace(row, max_forced=2)) == kept.prescribed(row)[:2]
        assert allowed(kept, row) == allowed(matchers(), row)
    assert [text_of([token]) for token in kept.prescribed(replace(a_row([], PERSON), max_forced=4))] == [
        '{"',
        "name",
        '":',
        ' "',
    ]


def test_no_part_of_a_character_is_prescribed() -> None:
    kept = matchers()
    alike = Grammar(GrammarKind.EBNF, 'root ::= "caf" ("\u00e9" | "\u00e8") "!"')
    assert text_of(kept.prescribed(replace(a_row([], alike), max_forced=9))) == "caf"
    begun = Grammar(GrammarKind.EBNF, 'root ::= "\u2603!"')
    [first] = [token for token, text in enumerate(demo_vocabulary().decoded_vocab) if text == b"\xe2"]
    row = replace(a_row([first], begun, sequence_id=2), max_forced=9)
    assert kept.prescribed(row) == []
    assert allowed(kept, row) == allowed(matchers(), row) != [EOS]


# In a sampler


def sampled(logits_BV: torch.Tensor, rows: Sequence[StepRow]) -> list[int]:
    draws = plan_draws(rows, LIMITS.vocab_size)
    best_B, token_B = likeliest(logits_BV)
    words = torch.from_numpy(draws.words)
    sampler = Sampler(CPU_SAMPLING, matchers())
    best_B, _ = sampler.sample(logits_BV, best_B, token_B, rows, draws, words, lambda row: row)
    assert best_B.isfinite().all()
    return token_B.tolist()


def test_only_rows_with_a_grammar_are_masked() -> None:
    logits_BV = torch.randn(6, LIMITS.vocab_size, generator=torch.Generator().manual_seed(3))
    rows = [a_row([], WORDS, sequence_id=n, temperature=t, seed=n) for n, t in enumerate([0.0, 1.0, 1.0, 0.0])]
    for n, temperature in ((4, 0.0), (5, 1.0)):
        row = a_row([], sequence_id=n)
        row.sample = SamplingParams(temperature=temperature, seed=n)
        rows.append(row)
    tokens = sampled(logits_BV.clone(), rows)
    starts = allowed(matchers(), a_row([], WORDS))
    assert set(tokens[:4]) <= set(starts)
    assert tokens[4:] == sampled(logits_BV[4:].clone(), rows[4:])
    assert tokens[0] == max(starts, key=logits_BV[0].tolist().__getitem__)


def test_log_probabilities_are_the_models_own() -> None:
    logits_1V = torch.randn(1, LIMITS.vocab_size, generator=torch.Generator().manual_seed(4))
    row = a_row([], WORDS, temperature=0.0, num_logprobs=1)
    best_B, token_B = likeliest(logits_1V)
    draws = plan_draws([row], LIMITS.vocab_size)
    expected = logits_1V[0].log_softmax(0)
    _, logprobs = Sampler(CPU_SAMPLING, matchers()).sample(
        logits_1V.clone(), best_B, token_B, [row], draws, torch.from_numpy(draws.words), lambda row: row
    )
    assert logprobs[0].logprob == pytest.approx(float(expected[token_B[0]]), abs=1e-5)
    assert logprobs[0].top[0][0] == int(expected.argmax())
