"""Grafana dashboards of a cluster. Objectives are lines that the cluster itself reports.

Names of metrics are those of `pdserve.contracts.metrics`; names with colons come from `pdserve.deploy.observe.rules`.
Each row opens with a text on how to read it.
"""

from __future__ import annotations

from pdserve.deploy.observe.dashboards.capacity import CAPACITY
from pdserve.deploy.observe.dashboards.kv_transfer import KV_TRANSFER
from pdserve.deploy.observe.dashboards.request_flow import REQUEST_FLOW
from pdserve.deploy.observe.dashboards.slo_overview import SLO_OVERVIEW

DASHBOARDS = (SLO_OVERVIEW, REQUEST_FLOW, KV_TRANSFER, CAPACITY)
