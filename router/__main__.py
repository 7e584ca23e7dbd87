"""``python -m pdserve.router --config JSON``: the router as a plain process."""

from __future__ import annotations

import sys

from pdserve.router.main import main

sys.exit(main())
