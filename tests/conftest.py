"""What all tests share."""

import signal

# A shell lets what it starts in the background ignore SIGINT, and every process started from there inherits that: a
# cluster or a chat could then not be interrupted by the tests that do so.
signal.signal(signal.SIGINT, signal.default_int_handler)
