"""What is under way while a process imports torch, which takes seconds of one core: the card's context, and the reading
of files that a start takes whole from a disk that has not been asked for them since the machine's own start.
"""

import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine import read_ahead


@contextmanager
def head_start(device: str) -> Iterator[None]:
    """Around the import of torch, before which nothing else may have used the card. `device`: auto | cpu | cuda."""
    if device != "cpu" and _has_card():
        threading.Thread(target=_open_context, name="context", daemon=True).start()
        _read_ahead()
    was_collecting = gc.isenabled()
    gc.disable()  # an import makes hundreds of thousands of objects that stay
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def _has_card() -> bool:
    """As far as it can be told in a moment: what NVIDIA's driver, or Windows below it, puts there on Linux."""
    return sys.platform != "linux" or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def _open_context() -> None:
    """Half a second that the driver needs on its own. torch takes up the same context, a process's one of a card."""
    with suppress(OSError, AttributeError):  # no driver: torch tells who asks for a card
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        card, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(card), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)


def _read_ahead() -> None:
    """By a process of its own: a thread would wait for Python's lock, which the import holds, before each piece."""
    torch = importlib.util.find_spec("torch")
    if sys.platform == "linux" and torch is not None and torch.origin is not None:
        packages = str(Path(torch.origin).parents[1])
        reader = subprocess.Popen([sys.executable, "-I", "-S", read_ahead.__file__, packages], stdin=subprocess.DEVNULL)
        threading.Thread(target=reader.wait, name="read-ahead", daemon=True).start()  # so that it leaves no zombie
