"""``python -m pdserve.bench.gpu_model`` runs `pdserve.bench.gpu_model.run`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdserve.bench.gpu_model import run as bench
from pdserve.bench.kernels.report import NoGpuError


def main() -> int:
    parser = argparse.ArgumentParser(description=bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=bench.PARTS, default="", help="by default all")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and steps")
    parser.add_argument("--quantised", action="store_true", help="decode with quantised weights and KV, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder of the dated file of results")
    try:
        return bench.run(bench.Settings(**vars(parser.parse_args())), print)
    except (ValueError, NoGpuError) as error:
        sys.stderr.write(f"{error}\n")
        return 1 if isinstance(error, NoGpuError) else 2


if __name__ == "__main__":
    sys.exit(main())
