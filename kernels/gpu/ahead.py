"""Compiles all that some work will launch, side by side, before it is launched: a compiler keeps one core busy, mostly
without Python's lock.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def compile_ahead(work: Callable[[], object], num_threads: int) -> int:
    """Call `work` with every launch of a kernel left out, and have those kernels ready; returns how many are new.

    What `work` computes is garbage, so it must index nothing by it and wait for nothing.
    """
    with ThreadPoolExecutor(num_threads, "compile") as threads:
        with triton.AsyncCompileMode(threads), _launching_nothing() as kernels:
            work()
        # Compiled; now the library that starts each is built, and the card takes it in.
        return sum(threads.map(_make_ready, kernels))


def _make_ready(kernel: Any) -> bool:
    """Of one that was asked for several times only the first becomes a compilation."""
    if not isinstance(kernel, triton.FutureKernel):
        return False
    assert kernel.result().run is not None
    return True


@contextmanager
def _launching_nothing() -> Iterator[list[Any]]:
    """Triton has a way to compile without launching, and none to ask for it where a kernel is called as usual."""
    run, asked_for = JITFunction.run, dict[int, Any]()

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        asked_for[id(kernel)] = kernel
        return kernel

    kernels: list[Any] = []
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        kernels.extend(asked_for.values())
