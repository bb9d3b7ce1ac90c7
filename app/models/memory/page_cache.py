"""Weights on their way from the disk into the system's page cache, while a load still waits or imports."""

import os
from pathlib import Path

import psutil

_PIECE_BYTES = 128 * 1024  # Linux reads no more for one call than a device's readahead: 8 MB here, 128 KB by default
_MOST_SHARE = 0.5  # of the memory that is available: more would push out what is in use


def warm(folder: Path) -> int:
    """Have a model's weights read ahead, those kept for a card where they are; returns their bytes.

    Does nothing where they are too large for the cache, or where a system cannot be asked to.
    """
    kept = sorted(folder.glob("packed-*/*.safetensors"))
    files = kept or sorted(folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    if not hasattr(os, "posix_fadvise") or num_bytes > psutil.virtual_memory().available * _MOST_SHARE:
        return 0
    for file in files:
        with file.open("rb") as opened:
            for start in range(0, file.stat().st_size, _PIECE_BYTES):
                os.posix_fadvise(opened.fileno(), start, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
    return num_bytes
