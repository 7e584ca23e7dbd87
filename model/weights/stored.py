"""Reads tensors of a checkpoint, and matrices in the form in which it stores them.

`read_matrix` makes one form of all that publishers store: unpacked values, scales and zero points of groups. It reads
the share of a rank alone. Called by `pdserve.model.weights.decoder_weights`, after `pdserve.model.weights.files` has
checked names, dtypes, shapes and small tensors. Dequantises only what is joined with floats, or is in another order.

Shape suffixes: F output features, E input features, G groups of inputs, B blocks of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from pdserve.kernels.weight_quantisation import GroupedWeight, dequantise, joined, twice_e2m1
from pdserve.model.config.quantisation import Scheme
from pdserve.model.weights.files import input_order, shard_paths, text_name

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its outputs: from the low bits on, they are 0 2 4 6 1 3 5 7."""


class Checkpoint:
    """A context manager that reads tensors of the checkpoint in a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Open model.safetensors, or the shards named in the index.

        Args:
            dtype: `read` rounds to it.

        Raises:
            ValueError: no safetensors, or a missing or damaged file.
        """
        self.dtype = dtype
        with ExitStack() as stack:
            files = [stack.enter_context(_open(path)) for path in shard_paths(folder)]
            self._stored = {text_name(name): (file, name) for file in files for name in file.keys()}  # noqa: SIM118
            self._open_files = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def name_in_file(self, name: str) -> str:
        return str(self._stored[name][1])

    def read(self, *names: str, rows: Sequence[range] = ()) -> torch.Tensor:
        """Concatenate tensors along their first dimension, in memory of their own.

        Args:
            rows: of each tensor; by default all.
        """
        parts = [self.stored(name, *rows[i : i + 1]) for i, name in enumerate(names)]
        whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=self.dtype)
        return torch.cat(parts, out=whole)

    def stored(self, name: str, *ranges: range) -> torch.Tensor:
        """Read a tensor in the dtype of the file, whole or ``ranges`` of its first dimensions."""
        file, stored_name = self._stored[name]
        some = tuple(slice(each.start, each.stop) for each in ranges)
        part: torch.Tensor = file.get_slice(stored_name)[some] if some else file.get_tensor(stored_name)
        return part


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}); download it again") from error


def read_matrices(
    checkpoint: Checkpoint, modules: Sequence[str], scheme: Scheme, rows: Sequence[range], inputs: range
) -> torch.Tensor | GroupedWeight:
    """Read the outputs ``rows`` of matrices of the same inputs as one: in the checkpoint's dtype, if some of them are
    not quantised, or have their inputs in another order."""
    parts: list[torch.Tensor | GroupedWeight] = []
    for module, some in zip(modules, rows, strict=True):
        if scheme.quantises(module):
            parts.append(read_matrix(checkpoint, module, scheme, some, inputs))
        else:
            parts.append(checkpoint.read(f"{module}.weight", rows=[some])[:, inputs.start : inputs.stop])
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts) and all(_have_one_order(grouped[0], part) for part in grouped):
        return joined(grouped)
    floats = [dequantise(part) if isinstance(part, GroupedWeight) else part for part in parts]
    return torch.cat([part.to(checkpoint.dtype) for part in floats])


def _have_one_order(one: GroupedWeight, other: GroupedWeight) -> bool:
    if one.permutation is None or other.permutation is None:
        return one.permutation is other.permutation
    return torch.equal(one.permutation, other.permutation)


def read_matrix(checkpoint: Checkpoint, module: str, scheme: Scheme, rows: range, inputs: range) -> GroupedWeight:
    """Read a rank's share of a quantised matrix, in memory of its own.

    Args:
        module: such as ``model.layers.0.mlp.up_proj``.
        rows: outputs to read.
        inputs: inputs to read, in whole groups; all, where they are in act-order.

    Raises:
        ValueError: zero points or groups are not what config.json says, or a scale is not finite.
    """
    part = _Part(checkpoint, module, scheme, rows, inputs)
    permutation = part.permutation()
    values_FE, scales_FG, zeros_FG = {"gptq": part.gptq, "awq": part.awq}.get(scheme.layout, part.compressed)()
    if not scales_FG.isfinite().all():
        name_in_file = checkpoint.name_in_file(f"{module}.{part.scales_end}")
        raise ValueError(f"{name_in_file} has a value that is not finite; download the checkpoint again")
    if permutation is not None:
        values_FE = values_FE.index_select(1, permutation)
    return GroupedWeight(
        values_FE.contiguous(),
        scales_FG.float().contiguous(),
        scheme.kind,
        scheme.group_inputs or len(inputs),
        None if zeros_FG is None else zeros_FG.float().contiguous(),
        permutation,
    )


def read_stacked(
    checkpoint: Checkpoint, name: str, scheme: Scheme, expert: int, rows: range, inputs: range
) -> GroupedWeight:
    """Read a rank's share of an expert's matrix in mxfp4, of which all experts' are stacked (OCP Microscaling Formats
    1.0, 2023): bytes ``_blocks [X, F, G, 16]`` hold two codes each, the first in the low bits; ``_scales [X, F, G]``
    are exponents with a bias of 127. Scales up to 2^-126 become 0.

    Args:
        name: such as ``model.layers.0.mlp.experts.down_proj``.
        rows: outputs to read.
        inputs: inputs to read, in whole groups.

    Raises:
        ValueError: a scale is not a number.
    """
    size = scheme.group_inputs
    part = range(expert, expert + 1), rows, range(inputs.start // size, inputs.stop // size)
    bytes_FGB, exponents_FG = (checkpoint.stored(f"{name}_{kind}", *part)[0] for kind in ("blocks", "scales"))
    if (exponents_FG == 255).any():
        raise ValueError(f"{name}_scales has a scale that is not a number; download the checkpoint again")
    codes_FE = torch.stack((bytes_FGB & 15, bytes_FGB >> 4), dim=-1).flatten(1)
    scales_FG = ((exponents_FG.int() - 1).clamp_(min=0) << 23).view(torch.float32)  # of twice the values
    return GroupedWeight(twice_e2m1(codes_FE), scales_FG, scheme.kind, size)


class _Grouped(NamedTuple):
    values: torch.Tensor
    """``[F, E]``."""
    scales: torch.Tensor
    """``[F, G]``."""
    zeros: torch.Tensor | None
    """``[F, G]``."""


class _Part:
    """Some outputs and inputs of a stored matrix."""

    def __init__(self, checkpoint: Checkpoint, module: str, scheme: Scheme, rows: range, inputs: range) -> None:
        self._checkpoint = checkpoint
        self._module = module
        self._scheme = scheme
        self._rows, self._inputs = rows, inputs
        size = scheme.group_inputs
        self._groups = range(inputs.start // size, -(-inputs.stop // size)) if size else range(1)

    @property
    def scales_end(self) -> str:
        """End of the name of the tensor that has the scales."""
        ends = ("scales", "weight_scale_inv", "weight_scale")
        return next(end for end in ends if f"{self._module}.{end}" in self._checkpoint)

    def permutation(self) -> torch.Tensor | None:
        """Inputs in the order of their groups: int64 ``[E]``; None where config.json says that it is their own."""
        name = f"{self._module}.{'g_idx' if self._scheme.layout == 'gptq' else 'weight_g_idx'}"
        if name not in self._checkpoint:
            return None
        name_in_file = self._checkpoint.name_in_file(name)
        order_E = input_order(name_in_file, self._checkpoint.stored(name).numpy(), self._scheme)
        if order_E is None:
            return None
        if len(self._inputs) < len(order_E):
            raise ValueError(
                f"{name_in_file} has inputs in act-order, which ranks cannot share: set tensor_parallel to 1"
            )
        return torch.from_numpy(order_E)

    def compressed(self) -> _Grouped:
        if self._scheme.layout == "packed":
            values_FE = self._unpacked("weight_packed", (self._rows, self._inputs), 1)
        else:
            values_FE = self._stored("weight", self._rows, self._inputs)
        scales_FG = self._of_outputs(self.scales_end)
        zeros_FG = None
        if self._scheme.has_zeros and self._scheme.layout == "packed":
            zeros_FG = self._unpacked("weight_zero_point", (self._rows, self._groups), 0)
        elif self._scheme.has_zeros:
            zeros_FG = self._of_outputs("weight_zero_point")
        return _Grouped(values_FE, scales_FG, zeros_FG)

    def gptq(self) -> _Grouped:
        values_EF = self._unpacked("qweight", (self._inputs, self._rows), 0)
        scales_GF = self._stored("scales", self._groups, self._rows)
        return _Grouped(values_EF.T, scales_GF.T, self._gptq_zeros())

    def _gptq_zeros(self) -> torch.Tensor | None:
        """Zero points ``[F, G]`` of GPTQ, of which version 1 stores whole words less 1 in each; None where config.json
        says that all are in the middle."""
        if not self._scheme.has_zeros:
            return None
        one_each = 0x11111111 if self._scheme.bits == 4 else 0x01010101
        added = one_each if self._scheme.zeros_less_one else 0
        return self._unpacked("qzeros", (self._groups, self._rows), 1, added).T

    def awq(self) -> _Grouped:
        scales_GF = self._stored("scales", self._groups, self._rows)
        return _Grouped(self._awq("qweight", self._inputs), scales_GF.T, self._awq("qzeros", self._groups))

    def _awq(self, name: str, columns: range) -> torch.Tensor:
        """Values of the outputs, ``[F, columns]``, of a tensor whose words hold eight outputs each."""
        words = _words(self._rows, 8)
        stored_WC = self._stored(name, columns, words).T.contiguous()
        values = torch.stack([(stored_WC >> 4 * place & 15).to(torch.int8) for place in _AWQ_ORDER], dim=1) - 8
        start = self._rows.start - 8 * words.start
        return values.flatten(0, 1)[start : start + len(self._rows)]

    def _stored(self, name: str, *ranges: range) -> torch.Tensor:
        return self._checkpoint.stored(f"{self._module}.{name}", *ranges)

    def _of_outputs(self, name: str) -> torch.Tensor:
        """Scales or zero points ``[F, G]`` of a tensor that has them for blocks of outputs, or one for all."""
        if not self._scheme.group_inputs:
            of_all = self._stored(name).reshape(-1, 1)
            return of_all.expand(len(self._rows), 1) if len(of_all) == 1 else of_all[self._rows.start : self._rows.stop]
        size = self._scheme.block_outputs
        blocks = _words(self._rows, size)
        of_blocks_BG = self._stored(name, blocks, self._groups)
        start = self._rows.start - blocks.start * size
        return of_blocks_BG.repeat_interleave(size, dim=0)[start : start + len(self._rows)]

    def _unpacked(self, name: str, ranges: tuple[range, range], dim: int, added: int = 0) -> torch.Tensor:
        """Values of a tensor whose words hold several along dimension ``dim``, less the middle of their range.

        Args:
            ranges: in values.
            added: to each word.
        """
        per_word = 32 // self._scheme.bits
        words = _words(ranges[dim], per_word)
        stored = self._stored(name, *(words if i == dim else some for i, some in enumerate(ranges))) + added
        values = _values(stored if dim == 1 else stored.T, self._scheme.bits)
        start = ranges[dim].start - words.start * per_word
        values = values[:, start : start + len(ranges[dim])]
        return values if dim == 1 else values.T


def _words(values: range, per_word: int) -> range:
    """Words, or blocks, that hold ``values``."""
    return range(values.start // per_word, -(-values.stop // per_word))


def _values(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values in int32 words, low bits first, less the middle of their range: int8, along the last axis."""
    bytes_ = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    if bits == 8:
        return (bytes_ ^ 128).view(torch.int8)
    pairs = bytes_.to(torch.int16)  # in place from here on: a matrix is large
    pairs |= pairs << 4
    pairs &= 0x0F0F  # the low nibble in the low byte
    return pairs.view(torch.int8).sub_(8)
