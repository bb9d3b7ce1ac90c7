"""Processes that compile kernels. Triton's frontend holds Python's lock: in threads one kernel waits for another.

They are forked from a process that has imported all and whose torch has not used the card yet: they are there in a
moment, and give back at once what they inherit of the card. What they compile goes into Triton's folder of compiled
kernels, where the parent finds it.
"""

import ctypes
import os
import signal
import sys
import threading
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

_DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG
_CARD_FILES = "/dev/nvidia"
_NICENESS = 5  # the parent loads weights meanwhile, and later answers


@dataclass(frozen=True, slots=True)
class Order:
    """A kernel by the module that has it and its name there; `specialization` is Triton's own word for what to make."""

    module: str
    name: str
    specialization: str


class CompileProcesses:
    """`count` of them, until `close`."""

    def __init__(self, count: int) -> None:
        self._pool = ProcessPoolExecutor(count, get_context("fork"), initializer=_begin)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: that there may be threads
            self._pool.submit(os.getpid)  # the first task forks all of them
        threading.Thread(target=triton_key, name="triton-key", daemon=True).start()  # which orders ask for, too

    def compile(self, order: Order, target: GPUTarget) -> Future[None]:
        """The future raises what Triton raises, or BrokenProcessPool for a process that was killed."""
        return self._pool.submit(_compile, order, target)

    def close(self) -> None:
        """They end when what was ordered is done."""
        self._pool.shutdown(wait=False)


def can_be_forked() -> bool:
    """Where there is a card and torch holds nothing of it yet."""
    return sys.platform == "linux" and Path("/dev/nvidiactl").exists() and not torch.cuda.is_initialized()


def _begin() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    _let_go_of_the_card()
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    triton_key()  # 0.4 s in which Triton hashes itself: while the parent has nothing to order yet


def _let_go_of_the_card() -> None:
    """Its memory is free when the last process has closed it, and the parent may have a context already."""
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the one that listed them
            if os.readlink(f"/proc/self/fd/{file}").startswith(_CARD_FILES):
                os.close(file)


class _Target:
    """As much of a driver as a compiler asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def _compile(order: Order, target: GPUTarget) -> None:
    driver: Any = triton.runtime.driver
    driver.set_active(_Target(target))
    kernel = getattr(import_module(order.module), order.name)
    getattr(kernel, "kernel", kernel).preload(order.specialization)
