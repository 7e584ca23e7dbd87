from __future__ import annotations

from functools import partial

from pdserve.bench.kernels.timing import alternate, parse_clocks
from tests.bench.kernels.fake_timer import FakeTimer


def test_contenders_take_turns_and_medians_count() -> None:
    order: list[str] = []
    runs = {name: partial(order.append, name) for name in ("a", "b")}
    seconds = alternate(runs, FakeTimer(iter([3.0, 30.0, 1.0, 10.0, 2.0, 90.0])), 3)
    assert seconds == {"a": 2.0, "b": 30.0}
    assert order == ["a", "b"] * 3


def test_clocks_are_told_by_name() -> None:
    clocks = parse_clocks("1980 MHz, 1980 MHz, 2619 MHz, 512.11 W, 700.00 W, 54\n")
    assert clocks["clocks.sm"] == "1980 MHz"
    assert clocks["power.limit"] == "700.00 W"
    assert clocks["temperature.gpu"] == "54"
