"""Warns where predictions leave the measured range of a device; never refuses. Pure functions.

Only devices measured by `pdserve profile` have a measured range; the catalogue's figures are estimates throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.model.cost.hardware import Measured
from pdserve.planner.layout import Layout, PlannedModel, Pool


def extrapolations(model: PlannedModel, layout: Layout, max_context_tokens: int) -> list[str]:
    """A line for each respect in which a worker of ``layout`` may exceed its device's measurements.

    Args:
        max_context_tokens: of the longest sequence, prompt plus answer.
    """
    found: dict[str, None] = {}
    for pool in layout.pools:
        if pool.hardware.measured is not None:
            found |= dict.fromkeys(_beyond(pool.hardware.measured, model, pool, max_context_tokens))
    return list(found)


def _beyond(measured: Measured, model: PlannedModel, pool: Pool, max_context_tokens: int) -> Iterator[str]:
    name = pool.hardware.name
    if measured.model != model.held_name:
        yield (f"{name} was measured with {measured.model} and predicts {model.held_name}; profile that model")
    limits = (
        ("new tokens a step", pool.max_batch_tokens, measured.step_tokens[1]),
        ("sequences decoding together", pool.max_batch_size, measured.batch_size[1]),
        ("tokens of a sequence", max_context_tokens - 1, measured.context_tokens[1]),
    )
    for what, most, measured_most in limits:
        if most > measured_most:
            yield f"{name} was measured up to {measured_most} {what}, but up to {most} may occur: extrapolated"
    if pool.devices_per_worker > 1:
        yield f"{name} was measured as a single device; the communication of {pool.devices_per_worker} is estimated"
