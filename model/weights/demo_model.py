"""Folders of the demo model, which is served when no model is named, and of its draft model.

Part of the package, unless removed from the installation. `pdserve.demo` trains both.
"""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "pdserve-demo"
DRAFT_MODEL = Path(__file__).parents[1] / "demo" / "pdserve-demo-draft"
"""Much smaller, with the same tokenizer."""
