"""Compiles what some work will launch before it is launched, side by side: in processes where there are such, else in
threads, of which a compiler keeps one core busy, mostly without Python's lock.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from kernels.gpu.processes import CompileProcesses, Order

Work = Callable[[], object]


def open_driver() -> None:
    """Have what Triton builds for itself on a new machine: half a second of the C compiler's time."""
    with suppress(RuntimeError):  # no card: who launches a kernel is told
        triton.runtime.driver.active.get_current_target()


def compile_ahead(
    now: Work, later: Work, num_threads: int, processes: CompileProcesses | None = None
) -> Callable[[], int]:
    """Call both with every launch left out, and have the kernels compiled that they would launch.

    The result waits until those of `now` are ready and returns how many of them are new. Those of `later` follow; who
    launches one of these before it is there compiles it too. What the work computes is garbage, so it must index
    nothing by it and wait for nothing.
    """
    first = _asked_for(now, processes)
    others = _asked_for(later)  # before any thread begins, which would take the lock from us
    threads = ThreadPoolExecutor(num_threads, "compile")
    loads = [threads.submit(compilation.load) for compilation in first]
    threads.shutdown(wait=False)
    later_threads = ThreadPoolExecutor(max(1, num_threads // 4), "compile-later")
    threading.Thread(
        target=_follow, args=(first, others, later_threads, processes), name="compile-later", daemon=True
    ).start()

    def ready() -> int:
        for load in loads:
            load.result()
        return len(loads)

    return ready


@dataclass
class _Compilation:
    """One that was asked for. `elsewhere`: a process compiles it already; `kernel` is what Triton gave for it."""

    make: Callable[[], Any]
    order: Order
    future: Future[Any]
    elsewhere: Future[None] | None = None
    kernel: Any = None

    def send(self, processes: CompileProcesses) -> None:
        self.elsewhere = processes.compile(self.order, triton.runtime.driver.active.get_current_target())

    def compile(self) -> Any:
        """From now on a launch finds it, or what went wrong."""
        if self.elsewhere is not None:
            self.elsewhere.exception()  # waits; if it failed, it is made here or fails here
        try:
            self.future.set_result(self.make())
        except Exception as error:
            self.future.set_exception(error)
        return self.kernel.result()

    def load(self) -> None:
        """Also have the card take it in, which in Triton 3.6 builds a library that starts it."""
        assert self.compile().run is not None


class _Notebook(Executor):
    """Puts down what it is given to compile, and orders it from the processes at once."""

    def __init__(self, processes: CompileProcesses | None) -> None:
        self.compilations: list[_Compilation] = []
        self._processes, self._order, self._thread = processes, Order("", "", ""), threading.get_ident()

    def announce(self, *, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        """Triton's hook, called before `submit`. False: go on."""
        if threading.get_ident() == self._thread:
            self._order = Order(fn.module, fn.name, compile["specialization_data"])
        return False

    def submit(self, make: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        compilation = _Compilation(make, self._order, Future())
        if self._processes is not None:
            compilation.send(self._processes)
        self.compilations.append(compilation)
        return compilation.future


def _follow(
    first: Sequence[_Compilation],
    others: Sequence[_Compilation],
    threads: ThreadPoolExecutor,
    processes: CompileProcesses | None,
) -> None:
    """The others once the first are compiled: on the same cores at once they would hold those up by half a second."""
    if processes is not None:
        wait([compilation.elsewhere for compilation in first if compilation.elsewhere is not None])
        with suppress(RuntimeError):  # closed: the load has failed
            for compilation in others:
                compilation.send(processes)
        processes.close()
    for compilation in others:
        threads.submit(compilation.compile)
    threads.shutdown(wait=False)


def _asked_for(work: Work, processes: CompileProcesses | None = None) -> list[_Compilation]:
    """Kernels that the work would launch and that nobody has compiled yet."""
    notebook = _Notebook(processes)

    def ask() -> None:
        # Not left by its own end, which waits for all: it holds in this copy of the context alone.
        mode = triton.AsyncCompileMode(notebook)
        mode.__enter__()
        with _launching_nothing(), _telling(notebook):
            work()
        for compilation in notebook.compilations:
            compilation.kernel = mode.future_kernels[compilation.future._key]  # type: ignore[attr-defined]

    copy_context().run(ask)
    return notebook.compilations


@contextmanager
def _telling(notebook: _Notebook) -> Iterator[None]:
    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook
    runtime.jit_cache_hook = notebook.announce
    try:
        yield
    finally:
        runtime.jit_cache_hook = before


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
