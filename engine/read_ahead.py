"""Has the system read what a start on a card takes from the disk, torch and Triton: `python -I read_ahead.py PACKAGES`.

An import asks for one page or small file, waits for it, and asks for the next; a disk that has many requests at once
gives several times as much. Where all is in memory already this costs 0.1 s of one core. Imports nothing of ours.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_PIECE_BYTES = 128 * 1024  # Linux reads no more for one call than the device's readahead
_AT_ONCE = 16
_LIBRARIES = (  # those of which a start reads more than 5 MB
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libtorch_cuda.so",
    "torch/lib/libtorch_python.so",
    "nvidia/*/lib/libcusparseLt.so*",
    "nvidia/*/lib/libnvrtc.so*",
    "nvidia/*/lib/libnvJitLink.so*",
    "triton/_C/libtriton.so",
    "nvidia/*/lib/libcublasLt.so*",
)
_CODE = ("torch", "numpy", "triton")


def main(packages: Path) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for folder in _folders(packages):
            threads.submit(_read_code, folder)
        for pattern in _LIBRARIES:
            for path in packages.glob(pattern):
                threads.submit(_read, path)


def _folders(packages: Path) -> Iterator[Path]:
    for name in _CODE:
        for folder, inside, _ in os.walk(packages / name):
            inside[:] = [each for each in inside if each not in ("include", "testing", "lib", "share", "bin")]
            yield Path(folder)


def _read_code(folder: Path) -> None:
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.endswith((".py", ".pyc")):
                _read(Path(entry.path))


def _read(path: Path) -> None:
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY)
        try:
            for at in range(0, os.fstat(file).st_size, _PIECE_BYTES):
                os.posix_fadvise(file, at, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
