"""The failures that the command line reports in one line."""

from __future__ import annotations


class DeployError(RuntimeError):
    """Something outside this program prevents what was asked. One line that names the cause and the remedy."""
