"""Quantised modules of every format and variant, with the dense weight that each stands for.

Written from the format descriptions alone, in plain numpy, one bit or one value at a time; nothing is shared with the
readers.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Parts:
    """What a quantiser finds. codes [K, N], zeros and scales [groups, N], group_of [K]; scales are of `scale_dtype`."""

    bits: int
    group_size: int  # -1 is one group
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray
    scale_dtype: torch.dtype

    @property
    def dense(self) -> np.ndarray:
        """fp32 [N, K]"""
        return ((self.codes - self.zeros[self.group_of]) * self.scales[self.group_of]).T.astype(np.float32).copy()

    @property
    def stored_scales(self) -> torch.Tensor:
        return torch.from_numpy(self.scales).to(self.scale_dtype)


def random_parts(
    rng: np.random.Generator,
    num_outputs: int,
    num_inputs: int,
    *,
    group_size: int = 32,
    bits: int = 4,
    symmetric: bool = False,
    group_of: np.ndarray | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> Parts:
    """Scales of both signs; the last group has fewer inputs where they do not divide."""
    rows = num_inputs if group_size == -1 else group_size
    groups = -(-num_inputs // rows)
    scales = rng.uniform(0.005, 0.03, (groups, num_outputs)) * rng.choice([-1, 1], (groups, num_outputs))
    middle = np.full((groups, num_outputs), 1 << (bits - 1))
    return Parts(
        bits=bits,
        group_size=group_size,
        codes=rng.integers(0, 1 << bits, (num_inputs, num_outputs)),
        zeros=middle if symmetric else rng.integers(0, 1 << bits, (groups, num_outputs)),
        scales=torch.from_numpy(scales).to(scale_dtype).float().numpy(),
        group_of=np.arange(num_inputs) // rows if group_of is None else group_of,
        scale_dtype=scale_dtype,
    )


def gptq(parts: Parts, *, version: int = 1, with_g_idx: bool = True) -> dict[str, torch.Tensor]:
    stored_zeros = (parts.zeros - (1 if version == 1 else 0)) % (1 << parts.bits)
    tensors = {
        "qweight": _words(parts.codes.T, parts.bits).T.contiguous(),
        "qzeros": _words(stored_zeros, parts.bits),
        "scales": parts.stored_scales,
    }
    return {**tensors, "g_idx": torch.from_numpy(parts.group_of.astype(np.int32))} if with_g_idx else tensors


def awq_gemm(parts: Parts, *, with_zeros: bool = True) -> dict[str, torch.Tensor]:
    tensors = {"qweight": _words(_in_awq_order(parts.codes), 4), "scales": parts.stored_scales}
    return {**tensors, "qzeros": _words(_in_awq_order(parts.zeros), 4)} if with_zeros else tensors


def awq_gemv(parts: Parts, *, with_zeros: bool = True) -> dict[str, torch.Tensor]:
    padding = ((0, 0), (0, 8 * _gemv_width(parts) - parts.zeros.shape[0]))
    scales = torch.from_numpy(np.ascontiguousarray(np.pad(parts.scales.T, padding))).to(parts.scale_dtype)
    tensors = {"qweight": _words(parts.codes.T, 4), "scales": scales}
    return {**tensors, "qzeros": _words(np.pad(parts.zeros.T, padding), 4)} if with_zeros else tensors


def awq_gemv_fast(parts: Parts, *, zeros_name: str = "qzeros") -> dict[str, torch.Tensor]:
    padding = ((0, 8 * _gemv_width(parts) - parts.zeros.shape[0]), (0, 0))
    return {
        "qweight": torch.from_numpy(_gemv_fast_words(parts.codes.T)),
        "scales": torch.from_numpy(np.pad(parts.scales, padding)).to(parts.scale_dtype),
        zeros_name: torch.from_numpy(np.pad(_rounded_offsets(parts), padding)).half(),
    }


def dense_of_gemv_fast(parts: Parts) -> np.ndarray:
    """fp32 [N, K]: here -scale * zero was rounded to fp16 before it was stored."""
    weights = parts.codes * parts.scales[parts.group_of] + _rounded_offsets(parts)[parts.group_of]
    return weights.T.astype(np.float32).copy()


def compressed(parts: Parts, *, with_zeros: bool = True, with_g_idx: bool = False) -> dict[str, torch.Tensor]:
    num_inputs, num_outputs = parts.codes.shape
    tensors = {
        "weight_packed": _words(parts.codes.T, parts.bits),
        "weight_scale": parts.stored_scales.T.contiguous(),
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }
    if with_zeros:
        tensors["weight_zero_point"] = _words(parts.zeros, parts.bits).T.contiguous()
    if with_g_idx:
        tensors["weight_g_idx"] = torch.from_numpy(parts.group_of.astype(np.int32))
    return tensors


def unpacked_zeros(parts: Parts, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same module as early versions of compressed-tensors wrote it: signed zero points, one a byte."""
    signed = parts.zeros.T - (1 << (parts.bits - 1))
    return {**tensors, "weight_zero_point": torch.from_numpy(signed.astype(np.int8))}


def permuted_groups(rng: np.random.Generator, num_inputs: int, group_size: int) -> np.ndarray:
    """Act-order: inputs sorted by importance are dealt into groups, so that an input's group looks random."""
    return rng.permutation(np.arange(num_inputs) // group_size)


def with_zeros(parts: Parts, zero: int) -> Parts:
    return replace(parts, zeros=np.full_like(parts.zeros, zero))


def _words(fields: np.ndarray, bits: int) -> torch.Tensor:
    """[rows, count] of 0 .. 2^bits - 1 -> int32 [rows, ceil(count * bits / 32)]: a stream of bits, lowest first."""
    rows, count = fields.shape
    stream = np.zeros((rows, -(-count * bits // 32) * 32), np.uint8)
    for bit in range(bits):
        stream[:, bit : count * bits : bits] = (fields >> bit) & 1
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4").copy())


def _in_awq_order(fields: np.ndarray) -> np.ndarray:
    """Nibble i of a word is to hold column 8c + order[i]."""
    return np.stack([fields[:, 8 * (i // 8) + _AWQ_ORDER[i % 8]] for i in range(fields.shape[1])], axis=1)


def _gemv_width(parts: Parts) -> int:
    """Words of zeros a row."""
    num_groups, num_inputs = parts.zeros.shape[0], parts.codes.shape[0]
    group_size = num_inputs if parts.group_size == -1 else parts.group_size
    multiple = {32: 4, 64: 2}.get(group_size, 1)
    words = -(-num_groups // 8)
    return -(-words // multiple) * multiple


def _rounded_offsets(parts: Parts) -> np.ndarray:
    return (-parts.scales * parts.zeros).astype(np.float16).astype(np.float32)


def _gemv_fast_words(rows: np.ndarray) -> np.ndarray:
    """codes [N, K] -> int16 [N / 4, K], one value at a time."""
    n, k = rows.shape
    shuffled = np.empty_like(rows)
    for first in range(0, k, 32):
        # 32 values k = 8a + 2b + c are laid out with b outermost, then a, then c; then of each 8 the evens come first.
        order = [8 * a + 2 * b + c for b in range(4) for a in range(4) for c in range(2)]
        order = [order[8 * e + i] for e in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
        shuffled[:, first : first + 32] = rows[:, first : first + 32][:, order]
    words = np.zeros((n // 4, k), np.int64)
    for r in range(n // 4):
        for stretch in range(k // 64):
            values = [shuffled[4 * r + row, 64 * stretch + i] for row in range(4) for i in range(64)]
            for w in range(64):
                words[r, 64 * stretch + w] = sum(int(values[4 * w + j]) << (4 * j) for j in range(4))
    return words.astype(np.uint16).view(np.int16)
