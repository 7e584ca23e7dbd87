"""Fits a device's efficiencies to measured steps, and reports the error on held-out steps.

`pdserve profile` calls `fit_hardware` with measurements of `pdserve.model.cost.profiling`. The fit varies figures of
`pdserve.model.cost.hardware.Hardware` and predicts with `pdserve.model.cost.cost_model.CostModel` itself, so the two
cannot drift apart. Some steps of each kind are held out; their errors go into the file.

Minimises the squares of log(predicted / measured) with the method of Levenberg and Marquardt (Marquardt, 1963) over
logarithms of the figures, which keeps them positive. A weak pull towards the catalogue's figures decides what the steps
leave open. Steps of a model with fewer layers separate the overhead per step from the overhead per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware import Hardware, Measured
from pdserve.model.cost.step_grid import Step, StepKind
from pdserve.planner.arrays import FloatArray
from pdserve.planner.layout import PlannedModel

HELD_OUT_EVERY = 4
"""One in this many steps of each kind is held out; never the smallest or the largest, which would be extrapolated."""

_COMPUTE_COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
_ATTENTION_COUNTS = (2, 16, 128, 1024, 8192)
_SHARES = ("memory_efficiency", "decode_attention_efficiency")
_OVERHEADS = ("step_overhead_s", "layer_overhead_s", "row_overhead_s")
_FITTED = ("compute_efficiency", "prefill_attention_efficiency", *_SHARES, *_OVERHEADS)
_FIRST_SHARES = (0.8, 0.3)
"""Caps on the catalogue's shares at the start of each fit; the best fit counts. Where reading weights takes longer than
computing, the gradient of a slightly different share of the arithmetic is zero."""
_LEAST_OVERHEAD_S = 1e-6
"""Starting overhead if the catalogue has 0, which has no logarithm."""
_PULL = 0.03
"""Weight of the pull: a figure off the catalogue by a factor of e counts as an error of 3 % of one step."""
_HEADROOM = 1.25
_NUM_DIGITS = 4
_CURVE_MARGIN = 1e-3
"""Distance of fitted curves below the steepest allowed one, so that rounding never exceeds it."""
_MAX_ITERATIONS = 60


class TimedStep(NamedTuple):
    """A measured step, its duration, and the model's number of layers."""

    step: Step
    seconds: float
    num_layers: int


class FittedStep(NamedTuple):
    """A measured step and its prediction."""

    step: Step
    seconds: float
    num_layers: int
    predicted_s: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Relative to the measurement; above 0 if the prediction is too long."""
        return self.predicted_s / self.seconds - 1


class ErrorSummary(NamedTuple):
    """Sizes of the relative errors of several steps."""

    num_steps: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """A device fitted to measurements."""

    hardware: Hardware
    steps: list[FittedStep]

    def errors(self, kind: StepKind, *, held_out: bool = True) -> ErrorSummary:
        """Errors of one kind of step, either held out or fitted."""
        return _summary([step for step in self.steps if step.step.kind is kind and step.is_held_out is held_out])


def fit_hardware(base: Hardware, model: PlannedModel, steps: Sequence[TimedStep], *, date: str, source: str) -> CostFit:
    """Fit the efficiencies and overheads of ``base`` to ``steps`` of ``model`` on one device.

    Args:
        base: peaks, and the defaults for anything that the steps leave open.
        steps: a dozen or more.
        date: of the measurement, such as 2026-11-21.
        source: what was run on which machine; becomes part of the source of each fitted figure.
    """
    assert len(steps) >= 2 * HELD_OUT_EVERY
    held_out = _held_out(steps, model.shape.num_layers)
    seen = [timed for index, timed in enumerate(steps) if index not in held_out]
    figures = _Figures(_with_headroom(base, model, seen), max(timed.step.num_new for timed in seen))
    measured_s = np.array([timed.seconds for timed in seen])

    def errors(logs: FloatArray) -> FloatArray:
        found: FloatArray = np.log(_predict(figures.hardware(logs), model, seen) / measured_s)
        return found

    fitted = _rounded(figures.hardware(best_fit(errors, [figures.start(share) for share in _FIRST_SHARES])))
    predicted_s = _predict(fitted, model, steps)
    results = [
        FittedStep(*timed, float(predicted), index in held_out)
        for index, (timed, predicted) in enumerate(zip(steps, predicted_s, strict=True))
    ]
    return CostFit(hardware=_with_provenance(fitted, model, results, date, source), steps=results)


def _held_out(steps: Sequence[TimedStep], num_layers: int) -> set[int]:
    """Indices of the whole model's steps that the fit must not see, spread evenly over each kind."""
    found: set[int] = set()
    for kind in StepKind:
        of_kind = [
            (timed.step.num_new, timed.step.num_cached, index)
            for index, timed in enumerate(steps)
            if timed.step.kind is kind and timed.num_layers == num_layers
        ]
        found.update(index for *_, index in sorted(of_kind)[HELD_OUT_EVERY // 2 : -1 : HELD_OUT_EVERY])
    return found


def _cost(hardware: Hardware, model: PlannedModel, num_layers: int) -> CostModel:
    shape = replace(model.shape, num_layers=num_layers)
    return CostModel(shape, hardware, model.precision)


def _predict(hardware: Hardware, model: PlannedModel, steps: Sequence[TimedStep]) -> FloatArray:
    costs = {count: _cost(hardware, model, count) for count in {timed.num_layers for timed in steps}}
    return np.array([costs[timed.num_layers].step_s(timed.step.rows) for timed in steps])


def _with_headroom(base: Hardware, model: PlannedModel, steps: Sequence[TimedStep]) -> Hardware:
    """``base`` with peaks above the measured rates: shares of a peak end at 1, and a CPU may beat the catalogue's."""
    num_layers = model.shape.num_layers
    cost = _cost(base, model, num_layers)
    whole = [timed for timed in steps if timed.num_layers == num_layers]
    token_flops = 2 * model.shape.token_parameters
    reached_flops = max(token_flops * timed.step.num_new / timed.seconds for timed in whole)
    reached_bandwidth = max(
        max(cost.read_bytes(timed.step.num_new), cost.kv_bytes_per_token * timed.step.num_cached) / timed.seconds
        for timed in whole
    )
    ratio = max(1.0, _HEADROOM * reached_flops / base.peak(model.precision.dtype))
    return replace(
        base,
        peak_flops={dtype: flops * ratio for dtype, flops in base.peak_flops.items()},
        memory_bandwidth=max(base.memory_bandwidth, _HEADROOM * reached_bandwidth),
    )


class _Figures:
    """The varied figures as one array of logarithms."""

    def __init__(self, base: Hardware, max_tokens: int) -> None:
        self._base = base
        self._counts = [
            [count for count in counts if count < 2 * max_tokens] for counts in (_COMPUTE_COUNTS, _ATTENTION_COUNTS)
        ]
        curves = (base.compute_efficiency, base.prefill_attention_efficiency)
        shares = [curve.at(count) for curve, counts in zip(curves, self._counts, strict=True) for count in counts]
        shares += [getattr(base, name) for name in _SHARES]
        overheads = [max(getattr(base, name), _LEAST_OVERHEAD_S) for name in _OVERHEADS]
        self._shares, self._overheads = shares, overheads

    def start(self, most: float) -> FloatArray:
        """The catalogue's figures, with shares capped at ``most``."""
        return np.log([*(min(share, most) for share in self._shares), *self._overheads])

    def hardware(self, logs: FloatArray) -> Hardware:
        """The device with these figures, each clipped to its range."""
        values = iter([exp(value) for value in logs])
        compute, attention = (_curve(counts, list(islice(values, len(counts)))) for counts in self._counts)
        others: dict[str, Any] = {name: min(next(values), 1.0) for name in _SHARES}
        others |= zip(_OVERHEADS, values, strict=True)
        return replace(
            self._base,
            compute_efficiency=compute,
            prefill_attention_efficiency=attention,
            **others,
        )


def _rounded(device: Hardware) -> Hardware:
    """The device with its figures rounded to readable digits."""
    names = ("peak_flops", "memory_bandwidth", *_FITTED)
    return replace(device, **{name: _digits(getattr(device, name)) for name in names})


def _digits(figure: Any) -> Any:
    if isinstance(figure, Curve):
        return Curve(tuple((count, _digits(share)) for count, share in figure.points))
    if isinstance(figure, Mapping):
        return {dtype: _digits(flops) for dtype, flops in figure.items()}
    return float(f"{figure:.{_NUM_DIGITS}g}")


def _curve(counts: Sequence[int], shares: Sequence[float]) -> Curve:
    """A curve through ``shares``, lowered where more work would take less time (see `Curve`) or exceed a peak."""
    points: list[tuple[int, float]] = []
    for count, share in zip(counts, shares, strict=True):
        most = 1.0
        if points:
            before, before_share = points[-1]
            most = min(most, before_share * (1 + log(count / before)) * (1 - _CURVE_MARGIN))
        points.append((count, min(share, most)))
    return Curve(tuple(points))


def best_fit(errors: Callable[[FloatArray], FloatArray], starts: Iterable[FloatArray]) -> FloatArray:
    """Logarithms of figures with the least squares of ``errors``, among the minima near each of ``starts``.

    Each start pulls weakly: it decides what the errors leave open.
    """

    def near(start: FloatArray) -> FloatArray:
        return _minimise(lambda logs: np.concatenate([errors(logs), _PULL * (logs - start)]), start)

    return min(map(near, starts), key=lambda logs: float(np.square(errors(logs)).sum()))


def _minimise(residuals: Callable[[FloatArray], FloatArray], start: FloatArray) -> FloatArray:
    """Local minimum of the sum of squares of ``residuals``, near ``start``."""
    values, found = start, residuals(start)
    slopes, damping = _slopes(residuals, values, found), 1e-2
    for _ in range(_MAX_ITERATIONS):
        curvature, gradient = slopes.T @ slopes, slopes.T @ found
        damped = curvature + damping * np.diag(np.diag(curvature) + 1e-9)
        tried = values - np.linalg.solve(damped, gradient)
        tried_found = residuals(tried)
        gain = 1 - (tried_found @ tried_found) / (found @ found)
        if gain <= 0:
            damping *= 4
            if damping > 1e6:
                break
            continue
        values, found, damping = tried, tried_found, damping / 3
        if gain < 1e-6:
            break
        slopes = _slopes(residuals, values, found)
    return values


def _slopes(residuals: Callable[[FloatArray], FloatArray], values: FloatArray, found: FloatArray) -> FloatArray:
    """``[residuals, values]``: derivative of each residual by each value."""
    by = 1e-4
    columns = [(residuals(values + by * unit) - found) / by for unit in np.eye(len(values))]
    return np.stack(columns, axis=1)


def _with_provenance(
    fitted: Hardware, model: PlannedModel, steps: Sequence[FittedStep], date: str, source: str
) -> Hardware:
    """``fitted`` with the sources and the measured range of its figures."""
    held_out = {kind: [step for step in steps if step.step.kind is kind and step.is_held_out] for kind in StepKind}
    rows = [row for fitted_step in steps for row in fitted_step.step.rows]
    num_decoding = [sum(row.num_new == 1 for row in fitted_step.step.rows) for fitted_step in steps]
    num_new = [fitted_step.step.num_new for fitted_step in steps]
    measured = Measured(
        date=date,
        model=model.held_name,
        step_tokens=(min(num_new), max(num_new)),
        batch_size=(min(filter(None, num_decoding), default=0), max(num_decoding)),
        context_tokens=(min(row.num_cached for row in rows), max(row.num_cached for row in rows)),
        errors={kind.value: round(_summary(found).median, 4) for kind, found in held_out.items() if found},
    )
    said = f"fitted {date} to {sum(not step.is_held_out for step in steps)} steps: {source}"
    return replace(fitted, measured=measured, sources={**fitted.sources, **dict.fromkeys(_FITTED, said)})


def _summary(steps: Sequence[FittedStep]) -> ErrorSummary:
    if not steps:
        return ErrorSummary(0, 0.0, 0.0)
    errors = np.abs([step.error for step in steps])
    return ErrorSummary(len(steps), float(np.median(errors)), float(np.percentile(errors, 90)))
