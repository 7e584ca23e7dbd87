"""``python -m pdserve.prefill_worker --config JSON``: a prefill worker as a plain process."""

from __future__ import annotations

import sys

from pdserve.engine.process import main
from pdserve.prefill_worker.worker import build_scheduler

sys.exit(main(build_scheduler, "python -m pdserve.prefill_worker"))
