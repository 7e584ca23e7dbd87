"""Kernels that leave nuclei on the device, called as those that do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.kernels.operations import FindNuclei, FindNucleiOnDevice, Kept, Nucleus, NucleusTensors


def as_find_nuclei(find_nuclei_on_device: FindNucleiOnDevice) -> FindNuclei:
    """The same, of values that the host knows."""

    def find_nuclei(logits_BV: torch.Tensor, nuclei: Sequence[Nucleus]) -> list[Kept]:
        row, top_p, *others = zip(*nuclei, strict=True)
        best, temperature, lowest = (torch.tensor(values) for values in others)
        rows, shares = torch.tensor(row, dtype=torch.int32), torch.tensor(top_p, dtype=torch.float64)
        found = find_nuclei_on_device(logits_BV, NucleusTensors(rows, shares, best, temperature, lowest))
        assert (found.lowest.dtype, found.last_equal.dtype) == (torch.float32, torch.int32)
        return [Kept(*kept) for kept in zip(found.lowest.tolist(), found.last_equal.tolist(), strict=True)]

    return find_nuclei
