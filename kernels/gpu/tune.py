"""Measures a few configurations for each shape of 4-bit weight on the card at hand, and keeps the fastest.

At most `_BUDGET_S` seconds: what is not reached stays with `table.py` and is tried at the next load. Results lie in one
file a card, driver and Triton, in a folder that the caller names.
"""

import ctypes
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch
import triton

from kernels.device import usable_cores
from kernels.gpu import table, w4_gemm
from kernels.gpu.ahead import compile_ahead
from kernels.gpu.planar import PlanarWeight
from kernels.gpu.table import Config
from kernels.gpu.timing import graph_us, ring_size

_BUDGET_S = 20.0
_BUCKETS = (8, 16, 32, 64)  # the ones that decoding uses, the most used first
_ROUNDS = 2  # a time may be off by a fifth: of 40 times of 4096x4096 with 8 rows on an H200 four were
_MIN_GAIN = 0.03  # what is not faster by more is noise (others spread by 1 to 2.5 %), and the table's choice stays

Results = dict[str, dict[str, list[float]]]  # shape -> bucket -> the configuration's fields


def tune(
    weights: Iterable[PlanarWeight], dtype: torch.dtype, folder: Path, on_progress: Callable[[float], None]
) -> None:
    """Fill `measured` of all weights, from the card's file or by measuring. `on_progress` is told the share done.

    dtype: of the activations, fp16 or bf16. Weights of one shape form the ring that keeps the L2 out of the figures.
    """
    by_shape: dict[str, list[PlanarWeight]] = defaultdict(list)
    for weight in weights:
        by_shape[_shape(weight, dtype)].append(weight)
    path = folder / _file_name()
    results = _read(path)
    tasks = [(shape, b) for b in _BUCKETS for shape in by_shape if str(b) not in results.get(shape, {})]
    end = time.monotonic() + _BUDGET_S
    trials = [_Trial(by_shape[shape], bucket, dtype) for shape, bucket in tasks]
    _compile(trials)
    for done, ((shape, bucket), trial) in enumerate(zip(tasks, trials, strict=True)):
        on_progress(done / len(tasks))
        if (fastest := trial.fastest(end)) is None:
            break
        results.setdefault(shape, {})[str(bucket)] = list(astuple(fastest))
    if tasks:
        _write(path, results)
    for shape, group in by_shape.items():
        configs = {int(bucket): _config(fields) for bucket, fields in results.get(shape, {}).items()}
        for weight in group:
            weight.measured.update(configs)


def candidates(card: table.Card, num_outputs: int, num_inputs: int, bucket: int, num_steps: int) -> list[Config]:
    """At most five: the table's choice first, it with half and twice as many blocks, the other classes' choices."""
    chosen = table.choose(card, num_outputs, num_inputs, bucket)
    if chosen is None:
        return []
    row = table.TABLE[card.arch][bucket]
    blocks = chosen.blocks_an_sm or 2.0
    others = (replace(chosen, blocks_an_sm=blocks / 2), replace(chosen, blocks_an_sm=blocks * 2))
    found: dict[tuple[object, ...], Config] = {}
    for config in (chosen, *others, row.square, row.wide, row.deep):
        split = config.split(bucket, num_outputs, num_steps, card.num_sms)
        found.setdefault((replace(config, blocks_an_sm=0), split), config)
    return list(found.values())[:5]


class _Trial:
    """The candidates for products of one shape and bucket, over a ring of its weights."""

    def __init__(self, weights: Sequence[PlanarWeight], bucket: int, dtype: torch.dtype) -> None:
        first = weights[0]
        device = first.codes.device
        self._weights = weights
        self._configs = candidates(table.card_of(device), first.num_outputs, first.num_inputs, bucket, first.num_steps)
        self._x = torch.zeros(bucket, first.num_inputs, dtype=dtype, device=device)
        self._out = torch.empty(bucket, first.num_outputs, dtype=dtype, device=device)

    def launch(self) -> None:
        """Each candidate once."""
        for config in self._configs:
            w4_gemm.launch(config, self._x, self._weights[0], None, None, self._out)

    def fastest(self, end: float) -> Config | None:
        """None: time is up."""
        times = [float("inf")] * len(self._configs)
        for place, config in [*enumerate(self._configs)] * _ROUNDS:
            if time.monotonic() > end:
                return None
            times[place] = min(times[place], _time(config, self._x, self._weights, self._out))
        best = min(range(len(times)), key=times.__getitem__)
        return self._configs[best if times[best] < times[0] * (1 - _MIN_GAIN) else 0]


def _compile(trials: Sequence[_Trial]) -> None:
    """The first ones now, the others while these are measured."""
    num_first = len(trials) // len(_BUCKETS)

    def launch(some: Sequence[_Trial]) -> None:
        for trial in some:
            trial.launch()

    compile_ahead(lambda: launch(trials[:num_first]), lambda: launch(trials[num_first:]), usable_cores())()


def _time(config: Config, x: torch.Tensor, weights: Sequence[PlanarWeight], out: torch.Tensor) -> float:
    ring = ring_size(weights[0].num_bytes)
    return graph_us(lambda i: w4_gemm.launch(config, x, weights[i % len(weights)], None, None, out), ring)


def _shape(weight: PlanarWeight, dtype: torch.dtype) -> str:
    form = f"planes of {weight.depth}, {weight.planes_a_group} a group, {'zeros' if weight.has_zeros else 'symmetric'}"
    return f"{weight.num_inputs}x{weight.num_outputs} {str(dtype).removeprefix('torch.')}, {form}"


def _file_name() -> str:
    name = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name())
    return f"w4_{name}_{_driver_version()}_{triton.__version__}.json"


def _driver_version() -> int:
    """The newest CUDA that the card's driver knows, as 1000 * major + 10 * minor."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    version = ctypes.c_int()
    if code := driver.cuDriverGetVersion(ctypes.byref(version)):
        raise RuntimeError(f"The card's driver does not tell its version (error {code}).")
    return version.value


def _read(path: Path) -> Results:
    """Nothing from a file that is not there or is no whole file of ours: measuring again is cheap."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for fields in (fields for buckets in found.values() for fields in buckets.values()):
            _config(fields)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return found


def _config(fields: Sequence[float]) -> Config:
    bm, bn, warps, stages, blocks, scales, depth = fields
    return Config(int(bm), int(bn), int(warps), int(stages), float(blocks), bool(scales), int(depth))


def _write(path: Path, results: Results) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1), encoding="utf-8")
    part.replace(path)
