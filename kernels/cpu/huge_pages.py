"""Memory in pages of 2 MB, where the system has them: for what is read from beginning to end at every step.

With pages of 4 KiB a processor looks up 512 times as many addresses, and its prefetcher stops at the end of each. Two
cores read blocks of 4 KiB in any order at 16 to 18 GB/s from small pages, at 22 to 27 GB/s from huge ones (256 MB,
Sapphire Rapids, 2026-11-30).
"""

import math
import mmap
from contextlib import suppress

import numpy as np
import torch

_PAGE = 2 << 20  # bytes


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Not set yet. A page is taken from the system when its first byte is written, so that much more may be asked for
    than is used; systems without huge pages, or with none left, give small ones, to the same effect but for speed.
    """
    count = math.prod(shape)
    if not hasattr(mmap, "MADV_HUGEPAGE") or count == 0:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _PAGE
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=first).view(shape)
