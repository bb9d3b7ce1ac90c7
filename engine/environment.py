"""Environment variables that libraries read when they are loaded: set before torch is imported, by whoever starts a
process that computes (the child, the bench, the tests). A value that the user has set stays.
"""

import os


def prepare() -> None:
    """Idle OpenMP threads sleep instead of spinning.

    A spinning thread holds a core that another program or another engine thread wants; on a busy 2-core machine one
    token then took 1,095 ms instead of 86 (dense SmolLM2-135M, 2026-11-30).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
