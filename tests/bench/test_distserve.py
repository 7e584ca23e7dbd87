"""DistServe's rules: its fitted step times and its placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.bench.distserve import (
    CASES,
    FittedCost,
    highest_rate,
    layouts,
    read_fits,
    run,
    shares,
    table_2,
)
from pdserve.bench.models import OPT_13B
from pdserve.model.cost.cost_model import CostModel

HEADER = "# source\nengine,model,tp,phase,a_ms,b_ms_per_token,c\n"
ROWS = [
    f"{engine},facebook/opt-13b,{tp},{phase},{a},{b},{c}\n"
    for engine, factor in (("distserve", 1), ("vllm", 9))
    for tp in (1, 2, 4)
    for phase, a, b, c in (
        ("prefill", 10 * factor, 0.02, 1e-5),
        ("decoding_smallbs", 8 * factor, 0.001, 0.05),
        ("decoding_largebs", 9 * factor, 0.001, 0.04),
    )
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fits.csv"
    path.write_text(HEADER + "".join(ROWS))
    return path


def test_steps_take_what_the_fits_say(file: Path) -> None:
    fits = read_fits(file, "facebook/opt-13b")
    layout = next(iter(layouts(CASES[0], fits)))
    assert layout.prefill is not None
    assert layout.decode is not None
    cost = FittedCost(OPT_13B, layout.prefill, fits)
    # 10 ms + 0.02 ms a token + 1e-5 ms a token squared, and what DistServe's engine adds to each call.
    assert cost.prefill_s(100) == pytest.approx((10 + 2 + 0.1) / 1e3 + 1e-3 + 2e-3 + 1e-5)
    assert cost.step_s([(100, 0), (50, 0)]) == pytest.approx((10 + 3 + 1e-5 * 12500) / 1e3 + 3e-3 + 1.5e-5)
    assert cost.step_s([(1, 500), (1, 300)]) == pytest.approx((8 + 0.8 + 0.1) / 1e3)
    assert cost.decode_s(100, 0) == pytest.approx((9 + 4) / 1e3)
    assert cost.transfer_s(1000, same_host=False) == 0
    pool = CostModel(OPT_13B.shape, layout.prefill.hardware, OPT_13B.precision, layout.prefill.tensor_parallel)
    assert cost.max_kv_blocks(16, max_batch_tokens=2**20) == pool.max_kv_blocks(16) > 0, "memory, not the largest step"


def test_layouts_use_the_devices_of_the_case_at_most(file: Path) -> None:
    fits = read_fits(file, "facebook/opt-13b")
    small, large = (list(layouts(case, fits)) for case in CASES)
    assert len({str(layout) for layout in small}) == len(small) == 9
    assert max(layout.num_devices for layout in small) == 4
    assert str(CASES[0].placement) in {str(layout) for layout in small}
    assert str(CASES[1].placement) in {str(layout) for layout in large}
    assert all(pool.devices_per_worker > 1 for layout in large for pool in layout.pools), "66B fits on no single device"


def test_slower_steps_sustain_less(file: Path) -> None:
    fits = read_fits(file, "facebook/opt-13b")
    layout = next(iter(layouts(CASES[0], fits)))
    slower = {key: replace(fit, b=3 * fit.b) for key, fit in fits.items()}
    fast, slow = (highest_rate(CASES[0], layout, each, 40, is_finite=True, least=0.0) for each in (fits, slower))
    assert 0 < slow < fast
    assert highest_rate(CASES[0], layout, slower, 40, is_finite=True, least=fast) == 0


def test_each_objective_is_judged_on_its_own(file: Path) -> None:
    case, fits = CASES[0], read_fits(file, "facebook/opt-13b")
    done = run(case, next(iter(layouts(case, fits))), fits, 2.0, 40, case.slo, 0)
    some, most = (replace(case.slo, ttft_seconds=float(each)) for each in np.quantile(done.times.ttft_s, (0.499, 1.0)))
    assert shares(done, some)[0] == 0.5, "of all requests, the first ones too"
    assert shares(done, most)[0] == 1.0
    assert shares(done, some)[1] == shares(done, most)[1]


def test_a_higher_rate_attains_less(file: Path) -> None:
    shares = [row["attainment"] for row in table_2(CASES[1], read_fits(file, "facebook/opt-13b"), 30)]
    assert 100 >= shares[0] >= shares[-1] > 0
