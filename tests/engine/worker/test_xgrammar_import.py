from __future__ import annotations

import subprocess
import sys

from tests.patience import HANG_S
from tests.vocabulary import DEMO_FOLDER

SCRIPT = """
import sys
import numpy as np
from pdserve.contracts.request import Grammar, GrammarKind
from pdserve.engine.worker.grammar_compiler import CompilerConfig, compile_grammar, read_vocabulary
vocabulary = read_vocabulary(CompilerConfig(sys.argv[1], 4096, (0,), 0))
import xgrammar
matcher = xgrammar.GrammarMatcher(compile_grammar(vocabulary, Grammar(GrammarKind.REGEX, "ab")))
mask = np.zeros((1, 128), np.int32)
matcher.fill_next_token_bitmask(mask)
assert matcher.accept_string("ab") and mask.any()
print("LOADED", *{"torch", "transformers"} & sys.modules.keys())
"""


def test_masks_are_filled_without_torch_and_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(DEMO_FOLDER)], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout.split() == ["LOADED"]
