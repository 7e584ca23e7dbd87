"""Where the demo model is: a small checkpoint of pdserve's own, served when no model is named, and its draft.

Both come with the package; `pdserve.bench.demo` trains them. Either may have been removed from an installation.
"""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "pdserve-demo"
DRAFT_MODEL = Path(__file__).parents[1] / "demo" / "pdserve-demo-draft"
"""Much smaller, of the same tokenizer."""
