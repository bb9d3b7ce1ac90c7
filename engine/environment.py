"""What a process that computes sets, most of it before torch is imported: the child, the benches, the tests.

Libraries read their environment variables once, when they are loaded. A value that the user has set stays.
"""

import ctypes
import gc
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 1 << 30
# A step makes some hundred short-lived objects and no cycles; at the default of 700 the collector would run every few
# steps and walk all that the scheduler keeps: at 256 sequences a step took 2.7 times as long on the host.
_GC_THRESHOLD = 50_000


def prepare() -> None:
    _let_a_cards_memory_grow_in_place()
    _let_idle_threads_sleep()
    _keep_freed_memory()


def settle_collector() -> None:
    """Once a model is loaded: what there is stays, and garbage is looked for seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _let_a_cards_memory_grow_in_place() -> None:
    """Steps with prompts differ in size, and pieces of fixed sizes that fit none of the next ones pile up: after 256
    mixed requests on Llama 3.1 8B torch held 1.7 GB more of a card than any step had used.
    """
    if os.name == "posix":  # torch has no such memory on Windows
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _let_idle_threads_sleep() -> None:
    """A spinning OpenMP thread holds a core that another program or another engine thread wants.

    On a busy 2-core machine one token then took 1,095 ms instead of 86 (dense SmolLM2-135M, 2026-11-30). To look
    for work 2,000 times first bridges the gaps between the kernels of a step: a parallel loop then begins 10 us sooner,
    150 times a token (gaps of 20 us; docs/log.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _keep_freed_memory() -> None:
    """By default glibc maps each large activation anew and gives it back: page faults in every op of a prefill.

    Kept, a prefill of 1,024 tokens took 3.3 s of CPU instead of 3.6 (SmolLM2-135M, 2026-11-30). Other C libraries
    have no mallopt, or have no such habit.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
