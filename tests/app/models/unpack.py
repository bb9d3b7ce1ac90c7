"""Slow, plain readers of the 4-bit layouts, one loop an index, written from the format's description.

The second source beside app/models/pack4: nothing is shared with it.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def nibble(word: int, position: int) -> int:
    return (int(word) >> (4 * position)) & 15


def gptq(arrays: dict[str, Array], module: str) -> NDArray[np.float32]:
    """W [N, K] of a version 1 file: qweight packed along K, zeros along N and stored one too small."""
    qweight, qzeros = arrays[f"{module}.qweight"], arrays[f"{module}.qzeros"]
    scales, g_idx = arrays[f"{module}.scales"], arrays[f"{module}.g_idx"]
    weights = np.zeros((qweight.shape[1], qweight.shape[0] * 8), np.float32)
    for n, k in np.ndindex(*weights.shape):
        group = int(g_idx[k])
        zero = (nibble(qzeros[group, n // 8], n % 8) + 1) & 15
        weights[n, k] = np.float32(scales[group, n]) * (nibble(qweight[k // 8, n], k % 8) - zero)
    return weights


AWQ_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def awq_gemm(arrays: dict[str, Array], module: str, group_size: int) -> NDArray[np.float32]:
    """W [N, K]: both qweight and qzeros packed along N, column 8 c + j in nibble [0, 4, 1, 5, 2, 6, 3, 7][j]."""
    qweight, qzeros, scales = (arrays[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
    weights = np.zeros((qweight.shape[1] * 8, qweight.shape[0]), np.float32)
    for n, k in np.ndindex(*weights.shape):
        position, group = AWQ_NIBBLE_OF_COLUMN[n % 8], k // group_size
        code, zero = nibble(qweight[k, n // 8], position), nibble(qzeros[group, n // 8], position)
        weights[n, k] = np.float32(scales[group, n]) * (code - zero)
    return weights


def gemv_fast_code(qweight: Array, n: int, k: int) -> int:
    """Where code (n, k) lies in int16 [N / 4, K].

    In a stretch of 32 columns, k = 8 a + 2 b + c goes to place 8 b + 2 a + c; there, within 8, place p goes to p / 2
    when even, to 4 + p / 2 when odd. Then a stretch of 64 places of four rows, row after row, is cut into words of
    four.
    """
    a, b, c = (k % 32) // 8, (k % 8) // 2, k % 2
    dealt = 8 * b + 2 * a + c
    within = dealt % 8
    place = dealt // 8 * 8 + within // 2 + (4 if within % 2 else 0)
    in_stretch = (k % 64) // 32 * 32 + place
    flat = (n % 4) * 64 + in_stretch  # 256 codes of four rows
    return nibble(int(qweight[n // 4, k // 64 * 64 + flat // 4]) & 0xFFFF, flat % 4)


def awq_gemv_fast(arrays: dict[str, Array], module: str, group_size: int) -> NDArray[np.float32]:
    """W [N, K] = code * scale + qzeros, where qzeros already is -scale * zero."""
    qweight, qzeros, scales = (arrays[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
    weights = np.zeros((qweight.shape[0] * 4, qweight.shape[1]), np.float32)
    for n, k in np.ndindex(*weights.shape):
        group = k // group_size
        code = gemv_fast_code(qweight, n, k)
        weights[n, k] = code * np.float32(scales[group, n]) + np.float32(qzeros[group, n])
    return weights
