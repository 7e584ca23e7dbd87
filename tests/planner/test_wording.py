from __future__ import annotations

from math import inf, nan

import pytest

from pdserve.planner import wording


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (12.345, "12.3"),
        (8, "8.00"),
        (1234.5, "1,230"),
        (0.01234, "0.0123"),
        (0.5, "0.5"),
        (0.00001234, "0.0000123"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (999.6, "1,000"),
        (1e-9, "1e-9"),
        (-1.234e-300, "-1.23e-300"),
        (3e14, "300,000,000,000,000"),
        (1.25e20, "1.25e20"),
        (-2.5, "-2.50"),
        (inf, "never"),
        (nan, "-"),
    ],
)
def test_numbers_have_three_digits(value: float, said: str) -> None:
    assert wording.number(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0.25, "250 ms"), (0.0061, "6.1 ms"), (1.234, "1.23 s"), (20, "20 s"), (inf, "never")]
)
def test_seconds_have_a_unit(value: float, said: str) -> None:
    assert wording.seconds(value) == said


@pytest.mark.parametrize(("value", "said"), [(0.9, "90 %"), (0.9312, "93.1 %"), (1, "100 %"), (0, "0 %")])
def test_shares_are_percent(value: float, said: str) -> None:
    assert wording.share(value) == said


@pytest.mark.parametrize(("value", "said"), [(80e9, "80.0 GB"), (141_000_000_000, "141 GB"), (320, "320 B")])
def test_sizes_are_decimal(value: float, said: str) -> None:
    assert wording.size(value) == said


@pytest.mark.parametrize(("value", "said"), [(2.1, "$2.10"), (0.0123, "$0.012"), (None, "-"), (inf, "-")])
def test_money(value: float | None, said: str) -> None:
    assert wording.dollars(value) == said
