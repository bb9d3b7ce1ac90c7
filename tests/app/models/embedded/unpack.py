"""Plain readers of the 4-bit layouts, written from the formats' descriptions: where weight (n, k) lies, and what it is.

The second source beside app/models/embedded/pack4 and engine/quant: nothing is shared with them. `n` and `k` are index
arrays that broadcast against each other, so that one formula reads a whole matrix.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Integers = NDArray[np.integer[Any]]


def nibble(words: Array, position: Integers) -> Integers:
    return (words.astype(np.int64) >> (4 * position)) & 15


def gptq(arrays: dict[str, Array], module: str) -> NDArray[np.float32]:
    """W [N, K] of a version 1 file: qweight packed along K, zeros along N and stored one too small."""
    qweight, qzeros = arrays[f"{module}.qweight"], arrays[f"{module}.qzeros"]
    scales, g_idx = arrays[f"{module}.scales"], arrays[f"{module}.g_idx"]
    n, k = np.ogrid[: qweight.shape[1], : qweight.shape[0] * 8]
    group = g_idx[k]
    zero = (nibble(qzeros[group, n // 8], n % 8) + 1) & 15
    return scales[group, n].astype(np.float32) * (nibble(qweight[k // 8, n], k % 8) - zero).astype(np.float32)


AWQ_NIBBLE_OF_COLUMN = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def awq_gemm(arrays: dict[str, Array], module: str, group_size: int) -> NDArray[np.float32]:
    """W [N, K]: both qweight and qzeros packed along N, column 8 c + j in nibble [0, 4, 1, 5, 2, 6, 3, 7][j]."""
    qweight, qzeros, scales = (arrays[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
    n, k = np.ogrid[: qweight.shape[1] * 8, : qweight.shape[0]]
    position, group = AWQ_NIBBLE_OF_COLUMN[n % 8], k // group_size
    code, zero = nibble(qweight[k, n // 8], position), nibble(qzeros[group, n // 8], position)
    return scales[group, n].astype(np.float32) * (code - zero).astype(np.float32)


def gemv_fast_code(qweight: Array, n: Integers, k: Integers) -> Integers:
    """The code (n, k) of int16 [N / 4, K].

    In a stretch of 32 columns, k = 8 a + 2 b + c goes to place 8 b + 2 a + c; there, within 8, place p goes to p / 2
    when even, to 4 + p / 2 when odd. Then a stretch of 64 places of four rows, row after row, is cut into words of
    four.
    """
    a, b, c = (k % 32) // 8, (k % 8) // 2, k % 2
    dealt = 8 * b + 2 * a + c
    within = dealt % 8
    place = dealt // 8 * 8 + within // 2 + 4 * (within % 2)
    in_stretch = (k % 64) // 32 * 32 + place
    flat = (n % 4) * 64 + in_stretch  # 256 codes of four rows
    return nibble(qweight[n // 4, k // 64 * 64 + flat // 4], flat % 4)


def awq_gemv_fast(arrays: dict[str, Array], module: str, group_size: int) -> NDArray[np.float32]:
    """W [N, K] = code * scale + qzeros, where qzeros already is -scale * zero."""
    qweight, qzeros, scales = (arrays[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
    n, k = np.ogrid[: qweight.shape[0] * 4, : qweight.shape[1]]
    group = k // group_size
    codes = gemv_fast_code(qweight, n, k).astype(np.float32)
    return codes * scales[group, n].astype(np.float32) + qzeros[group, n].astype(np.float32)
