"""``python -m pdserve.decode_worker --config JSON``: a decode or a mixed worker as a plain process."""

from __future__ import annotations

import sys

from pdserve.decode_worker.worker import build_scheduler
from pdserve.engine.process import main

sys.exit(main(build_scheduler, "python -m pdserve.decode_worker"))
