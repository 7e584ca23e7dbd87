from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

MODULE = """
from contextlib import contextmanager
from itertools import count

import pytest

from tests.shared import shared

numbers = count()
closed = []


@contextmanager
def numbered():
    number = next(numbers)
    yield number
    closed.append(number)
    if number == 0:
        raise OSError("broken by the test that failed")


@pytest.fixture
def number(request):
    return shared(request, numbered)


@pytest.fixture
def other(request):
    return shared(request, numbered, of="other")


def test_first(number, other):
    assert (number, other) == (0, 1)


def test_fails(number):
    assert number == 9


def test_gets_another(number):
    assert (number, closed) == (2, [0])


def test_shares_it(number, other):
    assert (number, other, closed) == (2, 3, [0, 1])
"""


def test_after_a_test_that_failed_the_next_one_gets_another_world(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MODULE)
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=3, failed=1)
