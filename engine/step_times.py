"""How long steps take against what the cost model predicts: the two corrections that the router applies.

Owned by the step loop. Steps with prefill rows and pure decode steps err differently, so each has its own correction.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.contracts.step import StepBatch
from pdserve.model.cost import CostModel, OnlineCorrection
from pdserve.proto.v1 import worker_pb2


class Prediction(NamedTuple):
    has_prefill: bool
    predicted_s: float
    """Before correction."""
    is_typical: bool
    """It does nothing beside computing and sampling its rows' tokens: its duration says how long others take."""


class StepTimes:
    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._prefill = OnlineCorrection()
        self._decode = OnlineCorrection()

    def predict(self, batch: StepBatch) -> Prediction:
        """What the cost model says of a step that is about to be submitted."""
        num_rows = len(batch.rows)
        has_copies = bool(batch.swap_outs or batch.swap_ins)
        is_typical = not has_copies and not any(row.prompt_targets for row in batch.rows)
        if batch.num_new_tokens == num_rows:
            predicted_s = self._cost.decode_s(num_rows, sum(row.cached_length for row in batch.rows))
            return Prediction(False, predicted_s, is_typical)
        predicted_s = self._cost.step_s((row.num_new_tokens, row.cached_length) for row in batch.rows)
        return Prediction(True, predicted_s, is_typical)

    def corrected_s(self, prediction: Prediction) -> float:
        """How long the step is expected to take, by what was observed so far."""
        return prediction.predicted_s * self._correction(prediction).factor

    def observe(self, prediction: Prediction, duration_s: float) -> None:
        """Take the duration of the step that was predicted, if others are like it."""
        if not prediction.is_typical:
            return
        self._correction(prediction).observe(prediction.predicted_s, duration_s)

    def add_to(self, load: worker_pb2.Load) -> None:
        """Write both corrections into a load message."""
        load.prefill_correction = self._prefill.factor
        load.decode_correction = self._decode.factor

    def _correction(self, prediction: Prediction) -> OnlineCorrection:
        return self._prefill if prediction.has_prefill else self._decode
