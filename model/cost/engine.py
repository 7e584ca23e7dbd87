"""Devices as serving engines drive them: host costs depend on the engine, not on the GPU.

Puts the figures of `pdserve.model.cost.hardware_catalogue.ENGINES` in place of those of pdserve.
"""

from __future__ import annotations

from dataclasses import replace

from pdserve.model.cost.hardware import Hardware
from pdserve.model.cost.hardware_catalogue import ENGINES

ENGINE_NAMES = tuple(ENGINES)


def on_engine(device: Hardware, engine: str) -> Hardware:
    """``device`` as ``engine``, one of `ENGINE_NAMES`, drives it.

    Raises:
        ValueError: unknown engine, or a device whose overheads were measured with pdserve.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; use one of {', '.join(ENGINE_NAMES)}")
    if engine == "pdserve":
        return device
    if device.measured is not None or device.pipeline_depth == 1:
        raise ValueError(f"{device.name} has overheads of pdserve only; use a GPU of the catalogue for {engine}")
    figures = ENGINES[engine]._asdict()
    source: str = figures.pop("source")
    return replace(device, **figures, sources={**device.sources, **dict.fromkeys(figures, source)})
