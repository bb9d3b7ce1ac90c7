"""One row of a bench: a kernel beside torch's operations that give the same, checked before it is timed."""

from collections.abc import Callable
from typing import Any

import torch

from kernels.gpu.timing import Case, graph_us, ring_size


def compared(
    op: str,
    shape: str,
    rows: int,
    ours: Callable[[int], torch.Tensor],
    theirs: Callable[[int], torch.Tensor],
    *,
    tolerance: float,
    num_bytes: int,
    gb_per_s: float,
    ring: int | None = None,
) -> dict[str, Any]:
    """ours and theirs take a number in the ring; num_bytes is what one call reads and writes at least.

    Raises SystemExit before the speed of a wrong result: one off by more than tolerance, relative Frobenius.
    """
    exact = theirs(0).double()
    error = float((ours(0).double() - exact).norm() / exact.norm())
    if not error <= tolerance:
        raise SystemExit(f"{op} {shape} with {rows} rows is off by {error:.1e}; no figures until that is mended.")
    ring = ring or ring_size(num_bytes)
    return timed(op, shape, rows, ours, theirs, num_bytes, gb_per_s, ring) | {"error": error}


def timed(
    op: str, shape: str, rows: int, ours: Case, theirs: Case, num_bytes: int, gb_per_s: float, ring: int
) -> dict[str, Any]:
    ours_us, torch_us = graph_us(ours, ring), graph_us(theirs, ring)
    share = num_bytes / ours_us / 1e3 / gb_per_s
    times = {"ours_us": ours_us, "torch_us": torch_us, "torch_over_ours": torch_us / ours_us, "of_read": share}
    return {"op": op, "shape": shape, "rows": rows, **times}


def header() -> str:
    return f"{'':<34}{'rows':>6}" + "".join(f"{name:>12}" for name in ("ours us", "torch us", "torch/ours", "of read"))


def line(row: dict[str, Any]) -> str:
    times = f"{row['ours_us']:>12.1f}{row['torch_us']:>12.1f}{row['torch_over_ours']:>12.1f}{row['of_read']:>12.0%}"
    return f"{row['op'] + ' ' + row['shape']:<34}{row['rows']:>6}{times}"
