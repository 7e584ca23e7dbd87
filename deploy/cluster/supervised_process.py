"""A process that the supervisor keeps running: its state, its failures, and the delay before each restart.

The supervisor calls `SupervisedProcess.check` about twenty times a second. Subclasses start and watch a worker, the
router or Ray.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from enum import Enum

STABLE_S = 30.0
"""Uptime after which the count of failures starts anew."""
_MAX_DELAY_S = 15.0


class ProcessState(Enum):
    """``STOPPED -> STARTING -> UP``, and back to ``STOPPED`` on a failure."""

    STOPPED = "stopped"
    STARTING = "starting"
    UP = "up"


def restart_delay_s(num_failures: int, jitter: float) -> float:
    """Delay after the ``num_failures``-th failure in a row: none at first, then doubling.

    Args:
        jitter: in [0, 1); spreads the delay over +-25 %, so that processes that failed together restart apart.
    """
    if num_failures <= 1:
        return 0.0
    return min(_MAX_DELAY_S, 0.5 * 2.0 ** (num_failures - 2)) * (0.75 + 0.5 * jitter)


class SupervisedProcess(ABC):
    """The first `check` starts the process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = ProcessState.STOPPED
        self.failure = ""
        """Reason of the last failure, in one line."""
        self.num_failures = 0
        """Failures in a row."""
        self.failed_s = 0.0
        """Time of the last failure."""
        self._retry_at_s = 0.0
        self._up_since_s = 0.0

    @property
    @abstractmethod
    def address(self) -> str:
        """Valid while the process is up."""

    @abstractmethod
    def end(self) -> None:
        """End what is left of the process, in any state."""

    @abstractmethod
    def _start(self) -> None:
        """Start the process without waiting for it."""

    @abstractmethod
    def _check_starting(self, now_s: float) -> bool:
        """Return True once the process is up; raise its failure. Does not wait."""

    @abstractmethod
    def _check_up(self, now_s: float) -> None:
        """Raise the failure of a process that was up."""

    def _reason(self, error: Exception) -> str:
        """Reason of a failure, in one line."""
        return str(error)

    def check(self, now_s: float) -> None:
        """Do what is due."""
        try:
            if self.state is ProcessState.STOPPED:
                if now_s >= self._retry_at_s:
                    self.state = ProcessState.STARTING
                    self._start()
            elif self.state is ProcessState.UP:
                self._check_up(now_s)
            elif self._check_starting(now_s):
                self.state = ProcessState.UP
                self._up_since_s = now_s
        except Exception as error:  # any error of the process, or its death
            self._fail(now_s, error)

    def _fail(self, now_s: float, error: Exception) -> None:
        if self.state is ProcessState.UP and now_s - self._up_since_s > STABLE_S:
            self.num_failures = 0
        self.num_failures += 1
        self.failure, self.failed_s = self._reason(error), now_s
        self._retry_at_s = now_s + restart_delay_s(self.num_failures, random.random())
        self.end()
        self.state = ProcessState.STOPPED
