from __future__ import annotations

import math
import warnings

import pytest
import torch

from pdserve.bench.kernels.contest import Contender, Limits, PeerAbsentError
from pdserve.bench.kernels.measure import Result, difference, measure
from tests.bench.kernels.fake_timer import FakeTimer
from tests.bench.kernels.scripted_case import ScriptedCase, fails, gives

LIMITS = Limits(flops=1e15, bandwidth=4e12, link_bandwidth=1e9)


def absent() -> Contender:
    raise PeerAbsentError("not here")


def warns() -> Contender:
    warnings.warn("because of this", stacklevel=1)
    raise RuntimeError("no\nkernel")


def measured(case: ScriptedCase, *seconds: float, skipped: tuple[str, ...] = ()) -> Result:
    timer = FakeTimer(iter(seconds) if seconds else None)
    rounds = len(seconds) // 2 or 1
    return measure(case, torch.device("cpu"), timer, limits=LIMITS, num_rounds=rounds, skipped=skipped)


def test_a_result_tells_rates_shares_and_ratios() -> None:
    case = ScriptedCase(peers={"peer": lambda: gives(1.0, -2.0)})
    result = measured(case, 1e-6, 4e-6, 2e-6, 3e-6, 9e-6, 8e-6)  # In turns: ours takes 1, 2, 9.
    assert result.seconds == {"pdserve": 2e-6, "peer": 4e-6}
    assert result.ratios == {"peer": 2.0}
    assert result.limit_s == pytest.approx(0.5e-6)
    assert result.limit_share == pytest.approx(0.25)
    told = result.as_dict()
    assert (told["tflops"], told["gbytes_per_s"]) == (pytest.approx(2.0), pytest.approx(900.0))
    assert told["us"] == {"pdserve": pytest.approx(2.0), "peer": pytest.approx(4.0)}
    assert told["times_faster_than"] == {"peer": 2.0}


def test_absent_peers_are_named_with_their_reasons() -> None:
    peers = {
        "absent": absent,
        "broken": lambda: fails(RuntimeError("out of order")),
        "warned": warns,
        "other shape": lambda: gives(1.0),
        "unwanted": lambda: gives(1.0, -2.0),
        "good": lambda: gives(1.0, -2.0),
    }
    result = measured(ScriptedCase(peers=peers), skipped=("unwanted",))
    assert list(result.ratios) == ["good"]
    assert result.absent == {
        "absent": "not here",
        "broken": "out of order",
        "warned": "no kernel because of this",
        "other shape": "(2,) is compared with (1,)",
        "unwanted": "left out as asked",
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [((1.0, -2.0), 0.0), ((1.01, -2.0), 0.005), ((1.1, -2.0), 0.05), ((1.0, math.nan), math.nan)],
)
def test_peers_that_compute_something_else_are_told_apart(values: tuple[float, ...], expected: float) -> None:
    result = measured(ScriptedCase(peers={"peer": lambda: gives(*values)}))
    assert result.differences["peer"] == pytest.approx(expected, nan_ok=True, rel=1e-3)
    assert result.disagreeing == ([] if expected <= 0.01 else ["peer"])


def test_own_failures_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="ours"):
        measured(ScriptedCase(own=lambda: fails(RuntimeError("ours"))))


def test_bytes_are_compared_as_they_are() -> None:
    ones = torch.ones(3, dtype=torch.uint8)
    assert difference(ones, ones.clone()) == 0
    assert difference(ones, torch.tensor([1, 1, 2], dtype=torch.uint8)) == 0.5
