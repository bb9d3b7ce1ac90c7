"""A 4-bit weight as the GPU kernels hold it, and its packing from a checkpoint's numbers, on the device itself.

K is cut into steps of 4 planes, Q deep each; an int16 holds one code of every plane. The four nibbles of a tile of
int16 are thus four operands of the matrix unit that meet four contiguous slabs of the activations, and no value has to
move after it is unpacked. Scale and zero of a group share one 32-bit word, the least that an asynchronous copy moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from kernels.gpu.table import Config

LAYOUT_VERSION = 1  # of what is kept on disk: one more whenever the numbers of a PlanarWeight mean something else
PLANES = 4
TILE_N = 256  # outputs are padded to it: the largest tile of any kernel
SYMMETRIC_ZERO = 8
_DEPTHS = (64, 32, 16)  # of a plane, the best first: fewer, longer steps
_MAX_ZERO = 127  # what 7 bits of bf16's mantissa hold beside the code
# Of a code, what a zero may be off: some formats store it times the scale, rounded to 16 bits (0.0073 of a code in
# fp16, 0.053 in bf16, all scales tried). Within half a step of a weight of 16 codes the arithmetic's rounding hides it.
_LARGEST_CODE, _COMPUTED_ZERO_ERROR = 16, 1e-5  # the latter: of a zero times its scale in fp32, divided by it again
_MIN_TILE_N, _MAX_ROW_TILES = 32, 8


@dataclass(frozen=True)
class PlanarWeight:
    """y[n] = sum over k of x[k] * (code[k, n] - zero[k // group, n]) * scale[k // group, n].

    codes    int16 [steps, N padded, Q]: bits 4j to 4j + 3 of (s, n, q) are the code of k = (4s + j) * Q + q
    words    int32 [groups, N padded]: a scale's fp32 bits; with `has_zeros` the lowest 8 are the zero instead
    counters int32 [tiles], 0 between launches: blocks of a tile that have arrived
    has_zeros  False: every zero is 8
    group_size  a multiple of Q, or at least num_inputs: one group
    num_inputs, num_outputs  K and N before padding
    measured bucket of rows -> the configuration that was the fastest on this card, where `tune.py` has looked
    """

    codes: torch.Tensor
    words: torch.Tensor
    counters: torch.Tensor
    has_zeros: bool
    group_size: int
    num_inputs: int
    num_outputs: int
    measured: dict[int, Config] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        codes: torch.Tensor,
        words: torch.Tensor,
        *,
        has_zeros: bool,
        group_size: int,
        num_inputs: int,
        num_outputs: int,
    ) -> "PlanarWeight":
        """With counters of its own."""
        tiles = codes.shape[1] // _MIN_TILE_N * _MAX_ROW_TILES
        counters = torch.zeros(tiles, dtype=torch.int32, device=codes.device)
        return cls(codes, words, counters, has_zeros, group_size, num_inputs, num_outputs)

    @property
    def depth(self) -> int:
        """Q"""
        return self.codes.shape[2]

    @property
    def num_steps(self) -> int:
        return self.codes.shape[0]

    @property
    def num_padded(self) -> int:
        return self.codes.shape[1]

    @property
    def planes_a_group(self) -> int:
        """0: all planes are in one group."""
        return 0 if self.words.shape[0] == 1 else self.group_size // self.depth

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.words, self.counters))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense [N, K] weight, the slow and plain way: (code - zero) * scale in fp32, then rounded to dtype."""
        shifts = torch.arange(PLANES, device=self.codes.device, dtype=torch.int32) * 4
        nibbles = (self.codes.to(torch.int32).unsqueeze(1) >> shifts.view(1, -1, 1, 1)) & 15  # [steps, 4, N, Q]
        codes = nibbles.permute(2, 0, 1, 3).flatten(1)[: self.num_outputs, : self.num_inputs]
        group_of = torch.arange(self.num_inputs, device=codes.device) // self.group_size
        words = self.words[:, : self.num_outputs].T[:, group_of]
        zeros = words & 255 if self.has_zeros else SYMMETRIC_ZERO
        scales = (words & -256 if self.has_zeros else words).contiguous().view(torch.float32)
        return ((codes - zeros) * scales).to(dtype)


@dataclass(frozen=True)
class PairedWeight:
    """A gate and an up projection in one weight, whose outputs are 8 gates and their 8 ups by turns: a block has both
    when it is done with a tile.
    """

    planar: PlanarWeight


def pair_halves(weight: PlanarWeight, order: torch.Tensor | None = None) -> PairedWeight | None:
    """Of a weight whose first half of outputs are gates and the second ups; pair i is number order[i] of each half.
    None if a half is no multiple of 8.
    """
    if weight.num_outputs % 16:
        return None
    every = torch.arange(weight.num_padded, device=weight.codes.device)
    taken = torch.cat((paired(every[: weight.num_outputs], order), every[weight.num_outputs :]))
    return PairedWeight(replace(weight, codes=weight.codes[:, taken], words=weight.words[:, taken]))


def paired(halves: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
    """[2 * n] -> [2 * n]: each half in `order`, and of the two 8 by turns."""
    both = halves.view(2, -1) if order is None else halves.view(2, -1)[:, order]
    return both.view(2, -1, 8).transpose(0, 1).reshape(-1)


def can_hold(group_size: int, scales: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `pack_planar` takes it. Not, for now: groups that are no multiple of 16, zeros that are no codes as
    far as arithmetic in `dtype` can tell.
    """
    zeros = _zeros(scales, offsets)
    allowed = max(_LARGEST_CODE * torch.finfo(dtype).eps / 2, _COMPUTED_ZERO_ERROR)
    is_code = (zeros - zeros.round()).abs().max() <= allowed and zeros.min() >= 0 and zeros.max() <= _MAX_ZERO
    return _depth(group_size, scales.shape[0]) is not None and bool(is_code)


def pack_planar(
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    group_size: int,
    dtype: torch.dtype = torch.float16,
) -> PlanarWeight:
    """codes uint8 [K, N] of 0..15; scales and fp32 offsets = -zero * scale, [ceil(K / group_size), N], on the device
    where the weight will be used, by arithmetic in `dtype`. A lone group may be shorter than group_size.

    Raises ValueError when the shapes do not belong together or the numbers do not fit; see `can_hold`.
    """
    (k, n), num_groups = codes.shape, scales.shape[0]
    depth = _depth(group_size, num_groups)
    if scales.shape != offsets.shape or scales.shape[1] != n or num_groups != max(1, -(-k // group_size)):
        shapes = f"scales {tuple(scales.shape)}, offsets {tuple(offsets.shape)}, groups of {group_size}"
        raise ValueError(f"codes {tuple(codes.shape)} with {shapes}")
    if depth is None or not can_hold(group_size, scales, offsets, dtype):
        raise ValueError(f"groups of {group_size} or zeros that are no whole codes have no planar form")
    zeros = _zeros(scales, offsets).round().to(torch.int32)
    has_zeros = bool((zeros != SYMMETRIC_ZERO).any())
    padding = -n % TILE_N
    bits = scales.float().contiguous().view(torch.int32)
    words = ((bits + 128) & -256) | zeros if has_zeros else bits
    padded_k = k + -k % (PLANES * depth)
    padded_groups = 1 if num_groups == 1 else -(-padded_k // group_size)
    return PlanarWeight.of(
        _planes(F.pad(codes, (0, padding, 0, padded_k - k)), depth),
        F.pad(words, (0, padding, 0, padded_groups - num_groups)),
        has_zeros=has_zeros,
        group_size=max(group_size, k) if num_groups == 1 else group_size,
        num_inputs=k,
        num_outputs=n,
    )


@dataclass(frozen=True)
class StackedWeights:
    """The weights of all experts of one projection, alike in shape and form.

    codes   int16 [experts, steps, N padded, Q], words int32 [experts, groups, N padded]: as `PlanarWeight` has them
    one     the first of them, for its sizes
    """

    codes: torch.Tensor
    words: torch.Tensor
    one: PlanarWeight


def stack_planar(weights: Sequence[PlanarWeight]) -> tuple[StackedWeights, list[PlanarWeight]] | None:
    """All in one tensor, and each again as a view of it; None if they are not alike."""
    first = weights[0]
    sizes = {(w.codes.shape, w.words.shape, w.group_size, w.num_inputs, w.num_outputs) for w in weights}
    if len(sizes) > 1:
        return None
    has_zeros = any(weight.has_zeros for weight in weights)
    codes = torch.stack([weight.codes for weight in weights])
    words = torch.stack([_words(weight, has_zeros) for weight in weights])
    views = [replace(weight, codes=codes[i], words=words[i], has_zeros=has_zeros) for i, weight in enumerate(weights)]
    return StackedWeights(codes, words, replace(first, codes=codes[0], words=words[0], has_zeros=has_zeros)), views


def _words(weight: PlanarWeight, has_zeros: bool) -> torch.Tensor:
    """A symmetric weight among others with zeros writes its own out."""
    if weight.has_zeros == has_zeros:
        return weight.words
    return ((weight.words + 128) & -256) | SYMMETRIC_ZERO


def _depth(group_size: int, num_groups: int) -> int | None:
    """Of a plane, so that each lies in one group."""
    return next((depth for depth in _DEPTHS if num_groups == 1 or group_size % depth == 0), None)


def _zeros(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """fp32; a group without a scale and an offset has the symmetric one."""
    scales = scales.float()
    return torch.where((scales == 0) & (offsets == 0), float(SYMMETRIC_ZERO), -offsets / scales)


def _planes(codes: torch.Tensor, depth: int) -> torch.Tensor:
    """uint8 [steps * 4 * depth, N] -> int16 [steps, N, depth]"""
    steps = codes.T.unflatten(1, (-1, PLANES, depth)).permute(1, 2, 0, 3)  # [steps, 4, N, depth]
    low = steps[:, 0] | (steps[:, 1] << 4)
    high = steps[:, 2] | (steps[:, 3] << 4)
    return torch.stack((low, high), dim=-1).view(torch.int16).squeeze(-1).contiguous()
