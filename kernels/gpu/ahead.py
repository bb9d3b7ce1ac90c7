"""Compiles what some work will launch before it is launched, side by side: a compiler keeps one core busy, mostly
without Python's lock.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import triton
from triton.runtime.jit import JITFunction

Work = Callable[[], object]


def compile_ahead(now: Work, later: Work, num_threads: int) -> int:
    """Call both with every launch left out. The kernels of `now` are ready on return, those of `later` are compiled in
    threads meanwhile; who launches one of these before that compiles it too. Returns how many of `now` are new.

    What the work computes is garbage, so it must index nothing by it and wait for nothing.
    """
    threads = ThreadPoolExecutor(num_threads, "compile")
    try:
        first = _asked_for(now, _Loading(threads))
        for kernel in _asked_for(later, threads):
            kernel.future.add_done_callback(lambda _, kernel=kernel: kernel.result(ignore_errors=True))
    finally:
        threads.shutdown(wait=False)
    for kernel in first:
        kernel.result()
    return len(first)


class _Loading(Executor):
    """Has the card take in what was compiled, which in Triton 3.6 also builds a library that starts it."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def compile_and_load() -> Any:
            kernel = compile_kernel()
            assert kernel.run is not None  # asking for it loads it
            return kernel

        return self._threads.submit(compile_and_load)


def _asked_for(work: Work, threads: Executor) -> list[triton.FutureKernel]:
    """Kernels that the work would launch and that nobody has compiled yet; the threads are at it."""

    def ask() -> list[triton.FutureKernel]:
        # Not left by its own end, which waits for all: it holds in this copy of the context alone.
        triton.AsyncCompileMode(threads).__enter__()
        with _launching_nothing() as kernels:
            work()
        return kernels

    return copy_context().run(ask)


@contextmanager
def _launching_nothing() -> Iterator[list[triton.FutureKernel]]:
    """Triton has a way to compile without launching, and none to ask for it where a kernel is called as usual."""
    run, asked_for = JITFunction.run, list[triton.FutureKernel]()

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if isinstance(kernel, triton.FutureKernel) and kernel not in asked_for:
            asked_for.append(kernel)
        return kernel

    JITFunction.run = compile_only
    try:
        yield asked_for
    finally:
        JITFunction.run = run
