"""What is under way while a process imports torch, which takes seconds of one core: the card's context, and bytecode of
the Python files that were installed without it.
"""

import ctypes
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PACKAGES = ("torch", "triton", "numpy")
_MANY_CORES = 8  # so many compile torch's 45 MB of source before its import needs most of them


@contextmanager
def head_start(device: str, bytecode_dir: Path | None) -> Iterator[None]:
    """Around the import of torch, before which nothing else may have used the card.

    device        auto | cpu | cuda
    bytecode_dir  where bytecode goes that the installation lacks and does not come by; None: it is not made
    """
    if device != "cpu":
        threading.Thread(target=_open_context, name="context", daemon=True).start()
    prefix, was_collecting = sys.pycache_prefix, gc.isenabled()
    compiler = _compile_into(bytecode_dir) if bytecode_dir is not None and _lacks_bytecode() else None
    gc.disable()  # an import makes hundreds of thousands of objects that stay
    try:
        yield
    finally:
        sys.pycache_prefix = prefix
        if was_collecting:
            gc.enable()
        if compiler is not None:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(compiler.pid, signal.SIGTERM)  # what it has not reached is not needed soon
            compiler.wait()


def _open_context() -> None:
    """Half a second that the driver needs on its own. torch takes up the same context, a process's one of a card."""
    with suppress(OSError, AttributeError):  # no driver: torch tells who asks for a card
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        card, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(card), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)


def _lacks_bytecode() -> bool:
    """Whether torch was installed without any, as uv and many images do, and there is help to make it."""
    if sys.pycache_prefix is not None or not hasattr(os, "sched_getaffinity"):
        return False
    largest = importlib.util.find_spec(_PACKAGES[0])
    is_bare = largest is not None and largest.cached is not None and not Path(largest.cached).exists()
    return is_bare and len(os.sched_getaffinity(0)) >= _MANY_CORES


def _compile_into(folder: Path) -> subprocess.Popen[bytes] | None:
    """Import from there from now on. None if all is there from an earlier start."""
    sys.pycache_prefix = str(folder)
    specs = [spec for name in _PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    if all(Path(importlib.util.cache_from_source(str(spec.origin))).exists() for spec in specs):
        return None
    count = len(os.sched_getaffinity(0))
    command = [sys.executable, "-X", f"pycache_prefix={folder}", "-m", "compileall", "-q", "-j", str(count)]
    folders = [str(Path(str(spec.origin)).parent) for spec in specs]
    silent = subprocess.DEVNULL
    return subprocess.Popen([*command, *folders], stdin=silent, stdout=silent, stderr=silent, start_new_session=True)
