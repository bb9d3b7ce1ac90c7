"""Compiles what some work will launch before it is launched, side by side: a compiler keeps one core busy, mostly
without Python's lock.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import triton
from triton.runtime.jit import JITFunction

Work = Callable[[], object]


def open_driver() -> None:
    """Have what Triton builds for itself on a new machine: half a second of the C compiler's time."""
    with suppress(RuntimeError):  # no card: who launches a kernel is told
        triton.runtime.driver.active.get_current_target()


def compile_ahead(now: Work, later: Work, num_threads: int) -> int:
    """Call both with every launch left out. The kernels of `now` are ready on return, those of `later` are compiled in
    a few threads afterwards; who launches one of these before that compiles it too. Returns how many of `now` are new.

    What the work computes is garbage, so it must index nothing by it and wait for nothing.
    """
    first, others = _asked_for(now), _asked_for(later)  # before any thread begins, which would take the lock from us
    with ThreadPoolExecutor(num_threads, "compile") as threads:
        for ready in [threads.submit(compilation.load) for compilation in first]:
            ready.result()
    threads = ThreadPoolExecutor(max(1, num_threads // 4), "compile-later")
    for compilation in others:
        threads.submit(compilation.compile)
    threads.shutdown(wait=False)
    return len(first)


@dataclass
class _Compilation:
    """One that was asked for; `kernel` is what Triton gave for it."""

    make: Callable[[], Any]
    future: Future[Any]
    kernel: Any = None

    def compile(self) -> Any:
        """From now on a launch finds it, or what went wrong."""
        try:
            self.future.set_result(self.make())
        except Exception as error:
            self.future.set_exception(error)
        return self.kernel.result()

    def load(self) -> None:
        """Also have the card take it in, which in Triton 3.6 builds a library that starts it."""
        assert self.compile().run is not None


class _Notebook(Executor):
    """Puts down what it is given to compile."""

    def __init__(self) -> None:
        self.compilations: list[_Compilation] = []

    def submit(self, make: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        self.compilations.append(_Compilation(make, Future()))
        return self.compilations[-1].future


def _asked_for(work: Work) -> list[_Compilation]:
    """Kernels that the work would launch and that nobody has compiled yet."""
    notebook = _Notebook()

    def ask() -> None:
        # Not left by its own end, which waits for all: it holds in this copy of the context alone.
        mode = triton.AsyncCompileMode(notebook)
        mode.__enter__()
        with _launching_nothing():
            work()
        for compilation in notebook.compilations:
            compilation.kernel = mode.future_kernels[compilation.future._key]  # type: ignore[attr-defined]

    copy_context().run(ask)
    return notebook.compilations


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Triton has a way to compile without launching, and none to ask for it where a kernel is called as usual."""
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
