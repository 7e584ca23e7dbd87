"""Failures that the command line reports in one line."""

from __future__ import annotations


class ConfigError(ValueError):
    """Configuration that cannot be used as written. Its text is one line that names the key and the remedy."""

    def __init__(self, text: str, key: str = "") -> None:
        super().__init__(text)
        self.key = key
        """Names from the top of the document, with dots; empty where no single key is at fault."""


class DeployError(RuntimeError):
    """Something outside this program prevents what was asked. One line that names the cause and the remedy."""
