"""How the CPU kernels are compiled: one place for the flags."""

from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.binding
import numba

# OpenMP first: its idle workers sleep where OMP_WAIT_POLICY=PASSIVE was set before it was loaded. Spinning ones made a
# kernel of 50 us take a whole scheduler slice of 8 ms (2 cores under load, 2026-11-30).
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# LLVM halves the vectors of AVX-512 machines by default, for fear of lower clocks. Here whole ones pay: products of 32
# rows ran 1.5 to 2.5 times as fast (Sapphire Rapids, 2026-11-30).
_features = llvmlite.binding.get_host_cpu_features()
if _features.get("avx512f") and not numba.config.CPU_NAME:  # NUMBA_CPU_NAME=haswell shows what an AVX2 machine runs
    numba.config.CPU_NAME = llvmlite.binding.get_host_cpu_name()
    numba.config.CPU_FEATURES = _features.flatten() + ",-prefer-256-bit"

# Sums may be taken in another order, products contracted to FMA; infinities and NaN keep their meaning.
_FAST_MATH = {"contract", "nsz", "arcp", "reassoc"}

F32_1D = numba.types.Array(numba.float32, 1, "C")
F32_2D = numba.types.Array(numba.float32, 2, "C")
F32_3D = numba.types.Array(numba.float32, 3, "C")
F32_4D = numba.types.Array(numba.float32, 4, "C")
U16_2D = numba.types.Array(numba.uint16, 2, "C")
U8_3D = numba.types.Array(numba.uint8, 3, "C")
I32_1D = numba.types.Array(numba.int32, 1, "C")
I32_2D = numba.types.Array(numba.int32, 2, "C")
I64_1D = numba.types.Array(numba.int64, 1, "C")

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(*arguments: Any, parallel: bool = False) -> Callable[[Function], Function]:
    """Compile for exactly these argument types, at import.

    Inside a parallel loop numba forgets that arrays are contiguous and gathers element by element: keep the work in a
    function of its own and only call it there.
    """
    return numba.njit(
        numba.void(*arguments),
        parallel=parallel,
        fastmath=_FAST_MATH,
        boundscheck=False,
        error_model="numpy",
        nogil=True,
        cache=True,
    )


def set_threads(count: int) -> None:
    """Threads of the parallel kernels, at most the cores that numba found."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
