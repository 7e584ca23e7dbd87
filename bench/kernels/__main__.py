"""``python -m pdserve.bench.kernels``: ``pdserve bench kernels`` for machines with only torch and Triton."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdserve.bench.kernels import run as bench
from pdserve.bench.kernels.report import NoGpuError


def main() -> int:
    parser = argparse.ArgumentParser(description=bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels with this in their names")
    parser.add_argument("--quick", action="store_true", help="a few shapes of each kernel")
    parser.add_argument("--rounds", dest="num_rounds", type=int, default=3)
    parser.add_argument("--compile-only", action="store_true", help="compile every launch; needs no GPU")
    parser.add_argument("--capability", type=int, default=90, help="to compile for: 80, 86, 89, 90, 100 or 120")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder of the dated file of results")
    parser.add_argument("--hardware", default="", help="name of the device in the catalogue")
    try:
        return bench.run(print, **vars(parser.parse_args()))
    except (ValueError, NoGpuError) as error:
        sys.stderr.write(f"{error}\n")
        return 1 if isinstance(error, NoGpuError) else 2


if __name__ == "__main__":
    sys.exit(main())
