"""The ranks of a worker, as one of them sees them: its place, collectives within its stage, and messages.

The ranks of a stage call the same collectives in the same order. A rank receives the activations of a micro-batch from
its like in the stage before, and the leader, rank 0, the logits from the last stage. One rank alone pays for none.

Shape suffixes: B rows, C columns of a rank, V columns of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch.nn.functional import pad

from pdserve.kernels.torch.ranks import Channel as DeviceChannel
from pdserve.kernels.torch.ranks import Group
from pdserve.model.config.sharding import Place


class Collectives(Protocol):
    """Exchanges tensors between the ranks of a stage; every rank gets the same bits. `pdserve.kernels.cpu.ranks` does
    through memory that the ranks share, and `pdserve.kernels.torch.ranks` between devices."""

    def sum_(self, x: torch.Tensor) -> None:
        """Replace ``x``, contiguous, by its sum over the ranks."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``part``, contiguous: ``[num_ranks, *part.shape]``."""
        ...

    def limit_waits(self, seconds: float) -> None:
        """Let later calls fail if they wait for the others for longer, where that is possible."""
        ...


class Channel(Protocol):
    """Passes tensors from one rank to another, in order. Implemented where `Collectives` is."""

    def send(self, x: torch.Tensor) -> None:
        """Send ``x``, contiguous; waits until the tensor before has been received, or this one."""
        ...

    def receive(self, x: torch.Tensor) -> None:
        """Wait for a tensor of the size of ``x``, contiguous, and copy it there."""
        ...

    def limit_waits(self, seconds: float) -> None:
        """As in `Collectives`."""
        ...


class Ranks:
    """The ranks of one model. The default is one rank alone."""

    def __init__(
        self,
        place: Place = Place(),  # noqa: B008  # immutable
        collectives: Collectives | None = None,
        channels: Callable[[int], Sequence[Channel]] | None = None,
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
        has_own_pool: bool = False,
    ) -> None:
        """
        Args:
            place: of this process.
            collectives: of its stage; ``None`` if it is alone there.
            channels: returns the channels of messages to a rank, one for each micro-batch; ``None`` without a pipeline.
                Called for the ranks to which this one sends or which it is, in the order of their numbers.
            device: of what is received.
            has_own_pool: the rank's layers and heads are in a pool of its own, on its device, and it copies blocks
                there itself; otherwise all ranks compute in one pool, and the leader copies blocks.
        """
        self.place = place
        self.has_own_pool = has_own_pool
        self._collectives = collectives
        self._device = device
        self._channels: dict[int, Sequence[Channel]] = {}
        """By receiver."""
        self._next_rank = 0 if place.is_last_stage else place.rank + place.tensor_parallel
        if channels is not None:
            receivers = [place.rank] if place.stage > 0 or place.rank == 0 else []
            if not place.is_last_stage or place.tensor_rank == 0:
                receivers.append(self._next_rank)
            # Both ends may wait for each other to open a channel: in the same order everywhere, none waits in a circle.
            self._channels = {rank: channels(rank) for rank in sorted(receivers)}

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x``, contiguous, by its sum over the ranks of the stage, and return it."""
        if self._collectives is not None:
            self._collectives.sum_(x)
        return x

    def gather_columns(self, part_BC: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Join the columns of the stage's ranks: ``[B, num_columns]``, on each of them.

        Args:
            part_BC: this rank's columns; all ranks but the last have as many.
        """
        if self._collectives is None:
            return part_BC
        width = -(-num_columns // self.place.tensor_parallel)
        parts_RBC = self._collectives.gather(pad(part_BC, (0, width - part_BC.shape[1])).contiguous())
        return parts_RBC.transpose(0, 1).flatten(1)[:, :num_columns].contiguous()

    def copy_leaders_(self, x: torch.Tensor) -> None:
        """Replace ``x``, contiguous, by the leader's."""
        if self._collectives is not None:
            x.copy_(self._collectives.gather(x)[0])

    def limit_waits(self, seconds: float) -> None:
        """Limit the waits for other ranks, once all are up."""
        if self._collectives is not None:
            self._collectives.limit_waits(seconds)
        for channel in chain.from_iterable(self._channels.values()):
            channel.limit_waits(seconds)

    def send(self, x: torch.Tensor, micro_batch: int) -> None:
        """Send ``x``, contiguous, to the next stage, or from the last one to the leader. The ranks of a stage have
        equal tensors: each sends to its like in the next stage, and one to the leader."""
        if self._next_rank in self._channels:
            self._channels[self._next_rank][micro_batch].send(x)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, micro_batch: int) -> torch.Tensor:
        """Wait for the next tensor of ``micro_batch``, from the stage before or, on the leader, from the last one."""
        x = torch.empty(shape, dtype=dtype, device=self._device)
        self._channels[self.place.rank][micro_batch].receive(x)
        return x


ONE_RANK = Ranks()


def ranks_of_devices(place: Place, fd: int, device: torch.device) -> Ranks:
    """Ranks with a device and a pool each, as the one at ``place`` sees them; on CPUs, waits for the others.

    Args:
        fd: from `pdserve.kernels.torch.ranks.create_meeting_file`; may be closed afterwards.
        device: of this rank.
    """
    collectives = None
    if place.tensor_parallel > 1:
        collectives = Group(fd, f"stage {place.stage}", place.tensor_rank, place.tensor_parallel, device)

    def channels(rank: int) -> list[DeviceChannel]:
        channel = DeviceChannel(fd, rank, is_receiver=rank == place.rank, device=device)
        return [channel] * place.pipeline_parallel

    is_pipeline = place.pipeline_parallel > 1
    return Ranks(place, collectives, channels if is_pipeline else None, device=device, has_own_pool=True)
