"""Has the system read what a start on a card takes whole from the disk: `python -I read_ahead.py PACKAGES`.

Beside `import torch`, which mostly computes and leaves the disk idle. Only what is needed whole: of torch's own
libraries it is half, and reading all of them kept the import waiting for a second. Where all is in memory already this
costs 0.2 s of one core. Imports nothing of ours.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LIBRARIES = (
    "triton/_C/libtriton.so",
    "nvidia/*/lib/libnvrtc.so*",
    "nvidia/*/lib/libnvJitLink.so*",
    "triton/backends/nvidia/bin/ptxas*",
)
_CODE = ("torch", "numpy", "triton")
_BUFFER_BYTES = 1 << 20


def main(packages: Path) -> None:
    """One after the other, so that what the import asks for never waits behind many."""
    buffer = bytearray(_BUFFER_BYTES)
    for path in (*_code(packages), *(path for pattern in _LIBRARIES for path in packages.glob(pattern))):
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _code(packages: Path) -> Iterator[Path]:
    """As it was compiled at the installation."""
    for name in _CODE:
        for folder, _, files in os.walk(packages / name):
            if Path(folder).name == "__pycache__" and "testing" not in Path(folder).parts:
                yield from (Path(folder, file) for file in files)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
