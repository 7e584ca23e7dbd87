"""A device some times slower than the one in the catalogue: what emulation with a time scale runs on.

Workers and the router then predict what steps really take, so that the policy, which holds predictions against
objectives in real seconds, decides as it would at full speed with objectives as many times shorter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pdserve.model.hardware import Hardware


def slowed(device: Hardware, time_scale: float) -> Hardware:
    """``device`` with every step and every transfer ``time_scale`` times as long."""
    assert time_scale > 0
    changes: dict[str, Any] = {"peak_flops": {dtype: flops / time_scale for dtype, flops in device.peak_flops.items()}}
    for field in dataclasses.fields(device):
        # Fields carry their unit in their name; what is neither a duration nor a rate is not changed by time.
        if field.name.endswith("_s"):
            changes[field.name] = getattr(device, field.name) * time_scale
        elif field.name.endswith("_bandwidth"):
            changes[field.name] = getattr(device, field.name) / time_scale
    return dataclasses.replace(device, **changes)
