"""Kernels that a test file needs, compiled side by side before its first test: one after another they take minutes."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.kernels.gpu.where import ON_CARD

_PROCESSES = 12  # each with a context of its own on the card


def compile_side_by_side(launches: Sequence[Callable[[], object]]) -> None:
    """Make every launch once, in other processes, so that this one finds the kernels compiled on disk. Faults are for
    the tests to find. Nothing to do where kernels are interpreted.
    """
    if not ON_CARD:
        return
    processes = min(_PROCESSES, os.cpu_count() or 1)
    shares = [launches[i::processes] for i in range(processes)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_launch_all, shares))


def _launch_all(launches: Sequence[Callable[[], object]]) -> None:
    for launch in launches:
        try:
            launch()
        except Exception as error:
            print(f"{launch}: {error}")
