"""``python -m pdserve.decode_worker --config JSON``: a decode or a mixed worker as a plain process."""

from __future__ import annotations

import sys

from pdserve.engine.process import main
from pdserve.decode_worker.worker import build_scheduler

sys.exit(main(build_scheduler, "python -m pdserve.decode_worker"))
