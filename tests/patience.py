"""How long a test waits for what must come.

Such a limit ends a test that hangs; it claims nothing of speed. So it is longer than anything takes on two cores with
ten times the work that they can do. What a test claims of speed it measures in process time, or against the limits of
the code under test."""

HANG_S = 240.0
"""Below the limit of a whole test, so that what is waited for is named."""
