"""The timing of a pipeline: when a step enters its first stage.

Pure. The planner's simulator asks it with a virtual clock, the emulated executors of a worker with the real one.
"""

from __future__ import annotations

from threading import Lock


class Stage:
    """The first stage of a pipeline, which its micro-batches enter in turns. Any thread may call it.

    A step leaves the stage after an equal share of its time. The stages after it are then free, unless a longer step
    is in them, which is not modelled.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._free_at_s = 0.0
        self._lock = Lock()

    def enter(self, from_s: float, step_s: float) -> float:
        """Start of a step of ``step_s`` in all stages that is ready at ``from_s``."""
        if self._num_stages == 1:
            return from_s
        with self._lock:
            begins_s = max(from_s, self._free_at_s)
            self._free_at_s = begins_s + step_s / self._num_stages
        return begins_s
