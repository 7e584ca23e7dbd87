"""What an operator sees, held against the truth, on live clusters, most of emulated GPUs, under a real Prometheus.

    python -m pdserve.deploy.observe.drill truth [--pictures DIR] [--json FILE]
    python -m pdserve.deploy.observe.drill alerts [--only NAME,...] [--pictures DIR] [--json FILE]

``truth`` compares the dashboards' figures with the load generator's own, and looks for queries without data. ``alerts``
makes each alert fire by its fault. ``--pictures`` draws every dashboard from Prometheus' answers: empty and under load,
or during each fault. Needs ``prometheus`` (apt install prometheus).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pdserve.bench.script import publish, script_parser
from pdserve.deploy.observe.drill.alerts import fire_alerts
from pdserve.deploy.observe.drill.truth import compare
from pdserve.deploy.observe.rules import alerts


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("truth", "alerts"))
    parser.add_argument("--only", default="", help="names of alerts")
    parser.add_argument("--pictures", type=Path, help="folder of the pictures")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.stderr.write("this needs Prometheus: apt install prometheus\n")
        return 1
    if arguments.what == "truth":
        result, is_good = compare(arguments.pictures)
    else:
        wanted = set(arguments.only.split(",")) if arguments.only else {alert.name for alert in alerts()}
        result, is_good = fire_alerts(wanted, arguments.pictures)
    publish(result, arguments.json)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
