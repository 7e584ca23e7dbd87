"""The compiler of grammars on a busy machine: no process goes before it, and it has longer to get its CPU time. That is
less, so that what takes too much of it does not take the tests'."""

from __future__ import annotations

import sys

from pdserve.engine.worker import grammar_compiler

if __name__ == "__main__":
    grammar_compiler.MAX_CPU_S = 3
    grammar_compiler.MAX_WALL_S = 120.0
    grammar_compiler.NICENESS = 0
    sys.exit(grammar_compiler.main())
