"""Four-bit codes to and from the words that GPTQ and AWQ files hold, in numpy.

Codes are uint8 arrays [N, K] with values 0 to 15 for a linear layer y[N] = W[N, K] x[K]. Packing only: which code
stands for which weight is round4's business, and who writes the files is embedded's.
"""

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]

# AutoAWQ's GEMM kernel reads eight columns from one word in this order: nibble i holds column _GEMM_ORDER[i].
_GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_gptq_weight(codes: Codes) -> NDArray[np.int32]:
    """[N, K] -> qweight int32 [K / 8, N]; row r, nibble j is k = 8 r + j."""
    num_rows, num_columns = codes.shape
    words = codes.T.reshape(num_columns // 8, 8, num_rows)
    return _join_nibbles(words, axis=1)


def pack_gptq_zeros(zeros: Codes) -> NDArray[np.int32]:
    """[N, K / G] -> qzeros int32 [K / G, N / 8] in version 1's form, where each field holds zero - 1 modulo 16."""
    stored = (zeros.T - np.uint8(1)) & np.uint8(15)
    return _join_nibbles(stored.reshape(stored.shape[0], -1, 8), axis=2)


def pack_awq_gemm(codes: Codes) -> NDArray[np.int32]:
    """[N, C] -> int32 [C, N / 8] in AWQ's GEMM order. Weights (C = K) and zeros (C = K / G) share this packing."""
    columns = codes.T.reshape(codes.shape[1], -1, 8)
    return _join_nibbles(columns[:, :, _GEMM_ORDER], axis=2)


def pack_awq_gemv_fast(codes: Codes) -> NDArray[np.int16]:
    """[N, K] -> qweight int16 [N / 4, K] in AWQ's GEMV_FAST (llm-awq) order. N is a multiple of 4, K of 64.

    Source   pack_intweight in AutoAWQ: within 32 columns the pairs of the four 8-blocks are dealt out in turn, within 8
             the even ones come first, then four rows are interleaved over stretches of 64 columns.
    """
    num_rows, num_columns = codes.shape
    dealt = codes.reshape(num_rows, -1, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    evens_first = dealt.reshape(num_rows, -1, 4, 2).swapaxes(2, 3)
    rows = evens_first.reshape(num_rows // 4, 4, num_columns // 64, 64).transpose(0, 2, 1, 3)
    fields = rows.reshape(num_rows // 4, num_columns, 4).astype(np.uint16)
    words = fields[..., 0] | fields[..., 1] << 4 | fields[..., 2] << 8 | fields[..., 3] << 12
    return words.view(np.int16)


def unpack_awq_gemv_fast(qweight: NDArray[np.int16]) -> Codes:
    """The inverse of `pack_awq_gemv_fast`: int16 [N / 4, K] -> [N, K]."""
    num_quads, num_columns = qweight.shape
    words = qweight.view(np.uint16)[..., None]
    fields = (words >> np.array([0, 4, 8, 12], np.uint16) & 15).astype(np.uint8)
    rows = fields.reshape(num_quads, num_columns // 64, 4, 64).transpose(0, 2, 1, 3)
    natural_in_8 = rows.reshape(num_quads * 4, -1, 2, 4).swapaxes(2, 3)
    gathered = natural_in_8.reshape(num_quads * 4, -1, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    return gathered.reshape(num_quads * 4, num_columns)


def gemv_fast_scale_rows(num_columns: int, group_size: int) -> int:
    """Rows of `scales` and `qzeros` in a GEMV_FAST file: K / G, padded as AutoAWQ's calculate_zeros_width does."""
    multiple = 1 if group_size >= 128 else {64: 2, 32: 4}[group_size]
    words = -(-(num_columns // group_size) // 8)
    return -(-words // multiple) * multiple * 8


def _join_nibbles(fields: Codes, axis: int) -> NDArray[np.int32]:
    """Eight nibbles along `axis`, the first one lowest, become one int32; that axis goes away."""
    words = np.zeros(np.delete(fields.shape, axis), np.uint32)
    for position in range(8):
        words |= fields.take(position, axis).astype(np.uint32) << np.uint32(4 * position)
    return words.view(np.int32)
