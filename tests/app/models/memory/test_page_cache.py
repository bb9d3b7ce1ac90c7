"""Weights read ahead are in the page cache, all of them."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest

from app.models.memory.page_cache import warm

_NUM_BYTES = 24 * 1024**2 + 5000


def _share_in_cache(path: Path) -> float:
    """By mincore(2): a byte a page, its lowest bit set for those in memory."""
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.addressof(first), len(mapped), found) == 0
        del first  # or the map could not be closed
    return sum(page & 1 for page in found) / len(found)


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no such call here")
def test_all_of_the_weights_are_read_ahead_and_those_kept_for_a_card_instead_of_the_others(tmp_path: Path) -> None:
    first = tmp_path / "model.safetensors"
    first.write_bytes(os.urandom(_NUM_BYTES))
    _forget(first)
    if _share_in_cache(first) > 0.1:
        pytest.skip("this file system forgets nothing")
    assert warm(tmp_path) == _NUM_BYTES
    deadline = time.monotonic() + 20
    while _share_in_cache(first) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _share_in_cache(first) == 1
    kept = tmp_path / "packed-1" / "part.safetensors"
    kept.parent.mkdir()
    kept.write_bytes(b"x" * 100)
    assert warm(tmp_path) == 100
