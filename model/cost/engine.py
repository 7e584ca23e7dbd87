"""Host costs of serving engines on a GPU, which depend on the engine and not on the device.

`on_engine` puts an engine's figures in place of a device's own, which are those of pdserve. Predicts nothing itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pdserve.model.cost.hardware import Hardware


class Engine(NamedTuple):
    """Overheads of one engine; see the fields of `Hardware` of the same names."""

    step_overhead_s: float
    layer_overhead_s: float
    row_overhead_s: float
    source: str


_ENGINES = {
    "vllm": Engine(
        step_overhead_s=300e-6,
        layer_overhead_s=40e-6,
        row_overhead_s=25e-6,
        source=(
            "fitted on 2026-11-23 to mean TTFT and ITL of five open-loop runs of vLLM 0.15.1 on H100 (7B to 70B, TP1 "
            "and TP4) published by inference-sim"
        ),
    ),
}
ENGINE_NAMES = ("pdserve", *_ENGINES)


def on_engine(device: Hardware, engine: str) -> Hardware:
    """``device`` as ``engine``, one of `ENGINE_NAMES`, drives it.

    Raises:
        ValueError: unknown engine, or a device whose overheads were measured with pdserve.
    """
    if engine not in ENGINE_NAMES:
        raise ValueError(f"unknown engine {engine!r}; use one of {', '.join(ENGINE_NAMES)}")
    if engine == "pdserve":
        return device
    if device.measured is not None or device.pipeline_depth == 1:
        raise ValueError(f"{device.name} has overheads of pdserve only; use a GPU of the catalogue for {engine}")
    profile = _ENGINES[engine]
    figures = {name: getattr(profile, name) for name in Engine._fields if name != "source"}
    sources: dict[str, str] = dict.fromkeys(figures, profile.source)
    return replace(device, **figures, sources={**device.sources, **sources})
