"""What all tests share."""

import contextlib
import signal

# A shell lets what it starts in the background ignore SIGINT, and every process started from there inherits that: a
# cluster or a chat could then not be interrupted by the tests that do so.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ModuleNotFoundError):  # A machine that runs the tests of the GPU alone may not have it.
    from hypothesis import settings

    # How long one example takes says nothing of what is tested, but of the machine.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
