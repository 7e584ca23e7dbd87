"""Handles of steps of which all is known when `Executor.submit` returns. Returned by the executors."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.contracts.step import StepOutput


@dataclass(frozen=True, slots=True)
class DoneStep:
    """It was computed."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class FailedStep:
    """It raised."""

    step_id: int
    error: Exception

    def result(self) -> StepOutput:
        raise RuntimeError(f"step {self.step_id} failed: {self.error!r}") from self.error
