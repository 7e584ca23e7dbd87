"""Answers of an emulated cluster are known in advance, and told from wrong or short ones."""

from __future__ import annotations

from pdserve.loadgen.client import StreamedAnswer
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.hosts.checked_streams import ChainChecker, summary

PROMPT, NUM_TOKENS = [5, 7, 11], 20


def test_every_token_is_checked() -> None:
    checker = ChainChecker(DEMO_MODEL)
    tokens = checker.answer(PROMPT, NUM_TOKENS)

    def check(token_ids: list[int], error: str = "") -> tuple[str, bool]:
        times_s = [1.0 + number for number in range(len(token_ids))]
        answer = StreamedAnswer(sent_s=0.5, token_ids=token_ids, token_s=times_s, status=200, error=error)
        checked = checker.check(PROMPT, NUM_TOKENS, answer, 100.0)
        return checked.error, checked.is_wrong

    assert check(tokens) == ("", False)
    assert check(tokens[:-1]) == ("19 of 20 tokens, and no error", False)
    assert check(tokens[:5], "lost") == ("lost", False)
    assert check([*tokens[:5], *tokens[6:], 0]) == ("", True)
    assert check([*tokens[:5], 0], "lost") == ("lost", True)


def test_a_summary_names_failures_and_the_longest_gap() -> None:
    checker = ChainChecker(DEMO_MODEL)
    tokens = checker.answer(PROMPT, NUM_TOKENS)
    whole = StreamedAnswer(token_ids=tokens, token_s=[1.0, 4.5, 5.0])
    failed = StreamedAnswer(error='{"error": {"message": "no worker is up", "code": 503}}')
    found = summary([checker.check(PROMPT, NUM_TOKENS, each, 6.0) for each in (whole, failed)])
    assert found == {
        "streams": 2,
        "whole": 1,
        "wrong": 0,
        "failed": {"no worker is up": 1},
        "longest_gap_s": 3.5,
        "longest_s": 6.0,
    }
