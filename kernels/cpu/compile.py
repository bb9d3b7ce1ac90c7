"""How the CPU kernels are compiled: one place for the flags."""

import hashlib
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding
import numba
import numpy as np

# OpenMP first: its idle workers sleep where OMP_WAIT_POLICY=PASSIVE was set before it was loaded. Spinning ones made a
# kernel of 50 us take a whole scheduler slice of 8 ms (2 cores under load, 2026-11-30).
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# LLVM halves the vectors of AVX-512 machines by default, for fear of lower clocks. Here whole ones pay: products of 32
# rows ran 1.5 to 2.5 times as fast (Sapphire Rapids, 2026-11-30).
_features = llvmlite.binding.get_host_cpu_features()
HAS_AVX512 = bool(_features.get("avx512f")) and not numba.config.CPU_NAME
if HAS_AVX512:  # NUMBA_CPU_NAME=haswell shows what an AVX2 machine runs
    numba.config.CPU_NAME = llvmlite.binding.get_host_cpu_name()
    numba.config.CPU_FEATURES = _features.flatten() + ",-prefer-256-bit"

# numba's cache knows a kernel by its own file alone; what it calls from another file may have changed. So each state of
# the sources has a folder of its own.
_HERE = Path(__file__).parent
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.py")))).hexdigest()[:12]
if not numba.config.CACHE_DIR and os.access(_HERE, os.W_OK):
    numba.config.CACHE_DIR = str(_HERE / "__pycache__" / _SOURCES)

# Sums may be taken in another order, products contracted to FMA; infinities and NaN keep their meaning.
_FAST_MATH = {"contract", "nsz", "arcp", "reassoc"}

F32_1D = numba.types.Array(numba.float32, 1, "C")
F32_2D = numba.types.Array(numba.float32, 2, "C")
F32_ROWS = numba.types.Array(numba.float32, 2, "A")  # a part of a wider array
F32_3D = numba.types.Array(numba.float32, 3, "C")
F32_3D_ROWS = numba.types.Array(numba.float32, 3, "A")
F32_4D = numba.types.Array(numba.float32, 4, "C")
U16_2D = numba.types.Array(numba.uint16, 2, "C")
U16_3D = numba.types.Array(numba.uint16, 3, "C")
I16_2D = numba.types.Array(numba.int16, 2, "C")
U8_3D = numba.types.Array(numba.uint8, 3, "C")
I32_1D = numba.types.Array(numba.int32, 1, "C")
I32_2D = numba.types.Array(numba.int32, 2, "C")
I64_2D = numba.types.Array(numba.int64, 2, "C")
I64_1D = numba.types.Array(numba.int64, 1, "C")

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(*arguments: Any, parallel: bool = False) -> Callable[[Function], Function]:
    """Compile for exactly these argument types, at import; a tuple of types makes a form for each of them.

    Inside a parallel loop numba forgets that arrays are contiguous and gathers element by element: keep the work in a
    function of its own and only call it there.
    """
    return numba.njit(
        [numba.void(*form) for form in product(*(a if isinstance(a, tuple) else (a,) for a in arguments))],
        parallel=parallel,
        fastmath=_FAST_MATH,
        boundscheck=False,
        error_model="numpy",
        nogil=True,
        cache=True,
    )


@numba.njit(cache=True)
def aligned_empty(rows, columns):
    """fp32 [rows, columns] that begins a cache line: a vector of 64 bytes never lies in two."""
    numbers = np.empty(rows * columns + 16, np.float32)
    first = -numbers.ctypes.data % 64 // 4
    return numbers[first : first + rows * columns].reshape(rows, columns)


@numba.njit(cache=True)
def aligned_zeros(rows, columns):
    """As aligned_empty, filled with 0."""
    numbers = aligned_empty(rows, columns)
    numbers[:] = 0
    return numbers


def set_threads(count: int) -> None:
    """Threads of the parallel kernels, at most the cores that numba found."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
