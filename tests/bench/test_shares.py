from __future__ import annotations

from dataclasses import replace

from pdserve.bench.shares import UNIFORM, drawn, served


def test_a_flood_of_one_tenant_takes_nothing_from_another() -> None:
    slo = replace(UNIFORM.slo, when_hopeless="refuse")
    small = drawn(20.0, 1, tenant="small", seconds=2.0)
    for tenant, low, high in (("large", 0.97, 1.0), ("small", 0.0, 0.8)):
        result, _ = served([small, drawn(1000.0, 2, tenant=tenant, seconds=2.0)], slo)
        assert low <= result["attainment"] <= high
