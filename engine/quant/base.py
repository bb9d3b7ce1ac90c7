"""The contract of a checkpoint format: claims -> read -> the canonical form. `linear.py` makes Linears of it.

A format decides per module from the tensors that are there, not from the config's lists of names: newer uploads leave
some layers in 16 bits, and the lists of different writers match names by different rules.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.errors import BadCheckpoint
from engine.weights.reader import CheckpointReader


@dataclass(frozen=True, slots=True)
class DenseTensors:
    """The module `prefix` as stored: weight [N, K]; bias [N] or None."""

    prefix: str
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """N, K"""
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The canonical form of the module `prefix`: W[k, n] = codes * scales[group of k] + offsets[group of k].

    bits        2, 3, 4 or 8: codes are below 2 ** bits
    group_size  rows of codes that share a scale; the last group may have fewer
    codes       uint8 [K, N], rows ordered so that groups are contiguous
    scales      [ceil(K / group_size), N] as stored (fp16, bf16 or fp32), sign kept
    offsets     fp32, same shape: -zero * scale
    order       int64 [K] or None: row i of codes belongs to input order[i] (act-order checkpoints)
    bias        [N] or None
    """

    prefix: str
    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """N, K"""
        return self.codes.shape[1], self.codes.shape[0]

    def dequantize(self, columns: slice = slice(None)) -> torch.Tensor:
        """fp32 [K, columns], rows in the order of the inputs: what the checkpoint says, the slow and plain way."""
        group_of = torch.arange(self.codes.shape[0], device=self.codes.device) // self.group_size
        scales, offsets = self.scales[:, columns].float()[group_of], self.offsets[:, columns][group_of]
        dense = self.codes[:, columns].float() * scales + offsets
        if self.order is None:
            return dense
        in_input_order = torch.empty_like(dense)
        in_input_order[self.order] = dense
        return in_input_order


class Format(Protocol):
    """One checkpoint format, configured from `quantization_config`."""

    name: str

    def claims(self, reader: CheckpointReader, prefix: str) -> bool:
        """Whether the module `prefix` is stored in this format."""
        ...

    def read(self, reader: CheckpointReader, prefix: str) -> QuantizedTensors:
        """Raises BadCheckpoint where tensors are missing or contradict each other."""
        ...


def read_bias(reader: CheckpointReader, prefix: str) -> torch.Tensor | None:
    return reader.get(f"{prefix}.bias") if reader.has(f"{prefix}.bias") else None


def rows_a_group(prefix: str, num_inputs: int, num_groups: int, stated: int) -> int:
    """The group size that gives `num_inputs` rows `num_groups` scales: the stated one (-1: all rows) if it does.

    Raises BadCheckpoint if neither it nor an even split fits.
    """
    if num_groups == 1:
        return num_inputs
    if stated > 0 and -(-num_inputs // stated) == num_groups:
        return stated
    if num_groups and num_inputs % num_groups == 0:
        return num_inputs // num_groups
    raise BadCheckpoint(f"`{prefix}`: {num_inputs} inputs do not divide into {num_groups} groups of {stated}.")


def check_same_shape(prefix: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    """Raises BadCheckpoint unless scales and zeros are alike and have a column for each of codes'."""
    if scales.dim() != 2 or scales.shape[1] != codes.shape[1] or zeros.shape != scales.shape:
        raise BadCheckpoint(
            f"`{prefix}`: the codes are of {tuple(codes.shape)} weights, scales are {tuple(scales.shape)}, "
            f"zeros {tuple(zeros.shape)}; they do not belong together."
        )


def order_of_rows(prefix: str, g_idx: torch.Tensor, num_groups: int, group_size: int) -> torch.Tensor | None:
    """int64 [K]: the inputs sorted by their group, so that each group is contiguous; None where they already are.

    g_idx [K] is each input's group. Raises BadCheckpoint if a group does not exist or has not its share of inputs.
    """
    g_idx = g_idx.long()
    in_order = torch.arange(g_idx.shape[0], device=g_idx.device) // group_size
    if torch.equal(g_idx, in_order):
        return None
    lowest, highest = int(g_idx.min()), int(g_idx.max())
    if lowest < 0 or highest >= num_groups:
        raise BadCheckpoint(f"`{prefix}`: g_idx names groups {lowest} to {highest}; there are {num_groups}.")
    if not torch.equal(g_idx.bincount(minlength=num_groups), in_order.bincount(minlength=num_groups)):
        raise BadCheckpoint(f"`{prefix}`: g_idx does not give {group_size} inputs to each of {num_groups} groups.")
    return torch.argsort(g_idx, stable=True)
