"""Another rank of a `tests.staged_worker`, with a pool of its own."""

from __future__ import annotations

import sys

from pdserve.engine.worker.follower import main
from tests.staged_worker import staged_device

if __name__ == "__main__":
    with staged_device():
        sys.exit(main())
