from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from pdserve.bench.kernels.case import AbsentError, Case, Implementation, Limits
from pdserve.bench.kernels.measure import Result, difference, measure, parse_clocks
from tests.bench.kernels.scripted_case import fails, fake_timer, gives, scripted_case

LIMITS = Limits(flops=1e15, bandwidth=4e12)


def absent() -> Implementation:
    raise AbsentError("not here")


def warns() -> Implementation:
    warnings.warn("because of this", stacklevel=1)
    raise RuntimeError("no\nkernel")


def measured(case: Case, *seconds: float) -> Result:
    timer = fake_timer(iter(seconds) if seconds else None)
    rounds = len(seconds) // 2 or 1
    return measure(case, torch.device("cpu"), timer, limits=LIMITS, num_rounds=rounds)


def test_a_result_tells_rates_shares_and_ratios() -> None:
    case = scripted_case(peer=lambda: gives(1.0, -2.0))
    result = measured(case, 1e-6, 4e-6, 2e-6, 3e-6, 9e-6, 8e-6)  # In turn: ours takes 1, 2, 9.
    assert result.seconds == {"pdserve": 2e-6, "peer": 4e-6}
    assert result.ratios == {"peer": 2.0}
    assert result.limit_s == pytest.approx(0.5e-6)
    assert result.limit_share == pytest.approx(0.25)
    document = result.as_dict()
    assert (document["tflops"], document["gbytes_per_s"]) == (pytest.approx(2.0), pytest.approx(900.0))
    assert document["us"] == {"pdserve": pytest.approx(2.0), "peer": pytest.approx(4.0)}
    assert document["times_faster_than"] == {"peer": 2.0}


def test_absent_peers_are_named_with_their_reasons() -> None:
    peers: dict[str, Any] = {
        "absent": absent,
        "broken": lambda: fails(RuntimeError("out of order")),
        "warned": warns,
        "other shape": lambda: gives(1.0),
        "good": lambda: gives(1.0, -2.0),
    }
    result = measured(scripted_case(**peers))
    assert list(result.ratios) == ["good"]
    assert result.absent == {
        "absent": "not here",
        "broken": "out of order",
        "warned": "no kernel because of this",
        "other shape": "(2,) is compared with (1,)",
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [((1.0, -2.0), 0.0), ((1.01, -2.0), 0.005), ((1.1, -2.0), 0.05), ((1.0, math.nan), math.nan)],
)
def test_peers_that_compute_something_else_are_document_apart(values: tuple[float, ...], expected: float) -> None:
    result = measured(scripted_case(peer=lambda: gives(*values)))
    assert result.differences["peer"] == pytest.approx(expected, nan_ok=True, rel=1e-3)
    assert result.disagreeing == ([] if expected <= 0.01 else ["peer"])


def test_own_failures_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="ours"):
        measured(scripted_case(own=lambda: fails(RuntimeError("ours"))))


def test_bytes_are_compared_as_they_are() -> None:
    ones = torch.ones(3, dtype=torch.uint8)
    assert difference(ones, ones.clone()) == 0
    assert difference(ones, torch.tensor([1, 1, 2], dtype=torch.uint8)) == 0.5


def test_implementations_take_turns() -> None:
    order: list[str] = []

    def note(name: str) -> Implementation:
        def run() -> torch.Tensor:
            order.append(name)
            return torch.ones(1)

        return Implementation(run)

    case = scripted_case(own=lambda: note("own"), peer=lambda: note("peer"))
    measured(case, 3.0, 30.0, 1.0, 10.0, 2.0, 90.0)
    assert order == ["own", "peer"] * 4  # Once to compare, then three rounds.


def test_clocks_by_name() -> None:
    clocks = parse_clocks("1980 MHz, 1980 MHz, 2619 MHz, 512.11 W, 700.00 W, 54\n")
    assert clocks["clocks.sm"] == "1980 MHz"
    assert clocks["power.limit"] == "700.00 W"
    assert clocks["temperature.gpu"] == "54"
