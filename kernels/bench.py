"""The kernels beside what else there is: `python -m kernels.bench [--op OP] [--json]`. The last line is JSON.

On a card, the ops of `_CARD_OPS`, each with a file `gpu/bench_*.py` that says what it is measured with. On a CPU, all
beside plain torch, in turns: for each op and number of rows microseconds of ours and of torch (medians), their ratio,
and the share of the memory bandwidth that a large copy reaches in the same run. Weights rotate over copies larger than
the caches, as they do in a model. Stops with an error where the two results differ.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernels import ops, reference
from kernels.paged_kv import PagedKV, by_dimension
from kernels.w4 import W4Weight, pack_w4

ROWS = (1, 8, 32, 256, 1024)
_K, _N, _GROUP = 576, 3072, 32  # SmolLM2-135M's gate and up projection
_COPIES, _REPEATS = 40, 15
_TOLERANCE = 1e-5  # fp32 sums of 576 terms in another order

Case = Callable[[int], torch.Tensor]  # copy number -> result

_CARD_OPS = ("gemm", "attention", "norm", "rope", "silu", "head", "sample")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description="Measures the kernels of this machine."
    )
    parser.add_argument("--op", choices=_CARD_OPS, action="append", help="on a card: these alone")
    parser.add_argument("--json", action="store_true", help="the last line alone")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        _on_card(arguments.op or _CARD_OPS, arguments.json)
    elif arguments.op:
        raise SystemExit("--op is for a card, and torch sees none here. Without it the CPU's kernels are measured.")
    else:
        _on_cpu(arguments.json)


def _on_card(names: Sequence[str], json_alone: bool) -> None:
    """Each `gpu/bench_<op>.py` has rows(gb_per_s) -> dicts, header() and line(row)."""
    from kernels.gpu.timing import read_gb_per_s

    gb_per_s, found = read_gb_per_s(), []
    card = torch.cuda.get_device_name()
    show = (lambda text: None) if json_alone else (lambda text: print(text, flush=True))
    show(f"{card}, reads {gb_per_s:.0f} GB/s")
    for name in names:
        bench = importlib.import_module(f"kernels.gpu.bench_{name}")
        show(bench.header())
        for row in bench.rows(gb_per_s):
            show(bench.line(row))
            found.append(row)
    print(json.dumps({"card": card, "read_gb_per_s": gb_per_s, "rows": found}))


def _on_cpu(json_alone: bool) -> None:
    gb_per_s = _copy_gb_per_s()
    rows = [*_w4_rows(gb_per_s), *_fp16_rows(gb_per_s), *_attention_rows(gb_per_s)]
    if not json_alone:
        _print_table(gb_per_s, rows)
    print(json.dumps({"copy_gb_per_s": gb_per_s, "rows": rows}))


def _print_table(gb_per_s: float, rows: list[dict[str, Any]]) -> None:
    print(f"copy: {gb_per_s:.1f} GB/s, {torch.get_num_threads()} threads")
    print(f"{'op':<20}{'rows':>6}{'ours us':>10}{'torch us':>10}{'torch/ours':>12}{'of copy':>10}")
    for row in rows:
        times = f"{row['ours_us']:>10.0f}{row['torch_us']:>10.0f}{row['ratio']:>12.2f}{row['of_copy']:>10.0%}"
        print(f"{row['op']:<20}{row['rows']:>6}{times}")


def _copy_gb_per_s() -> float:
    source, target = torch.ones(2**25), torch.empty(2**25)
    return 2 * source.numel() * 4 / _seconds(lambda copy: target.copy_(source)) / 1e9


def _w4_rows(gb_per_s: float) -> list[dict[str, Any]]:
    """Against the dense fp32 product, which reads eight times the bytes."""
    packed = [_random_w4() for _ in range(_COPIES)]
    dense = [reference.dequantize_w4(weight, torch.float32) for weight in packed]
    out = []
    for rows in ROWS:
        x = torch.randn(rows, _K)
        ours, theirs = (lambda i, x=x: ops.w4_linear(x, packed[i])), (lambda i, x=x: F.linear(x, dense[i]))
        out.append(_compare("w4_linear", rows, ours, theirs, packed[0].num_bytes, gb_per_s))
    return out


def _random_w4() -> W4Weight:
    codes = torch.randint(0, 16, (_K, _N), dtype=torch.uint8)
    return pack_w4(codes, torch.rand(_K // _GROUP, _N), torch.randn(_K // _GROUP, _N))


def _fp16_rows(gb_per_s: float) -> list[dict[str, Any]]:
    narrow = [torch.randn(_N, _K).half() for _ in range(_COPIES)]
    wide = [weight.float() for weight in narrow]
    out = []
    for rows in ROWS:
        x = torch.randn(rows, _K)
        ours, theirs = (lambda i, x=x: ops.linear(x, narrow[i])), (lambda i, x=x: F.linear(x, wide[i]))
        out.append(_compare("linear fp16", rows, ours, theirs, 2 * _K * _N, gb_per_s))
    return out


def _attention_rows(gb_per_s: float) -> list[dict[str, Any]]:
    """One token each of `rows` sequences of 256 tokens, against the gather and torch attention of the reference."""
    heads, kv_heads, head_dim, block_size, length = 9, 3, 64, 16, 256
    blocks = length // block_size
    out = []
    for rows in (1, 8, 32):
        keys, values = (torch.randn(rows * blocks, kv_heads, block_size, head_dim) for _ in range(2))
        cache = PagedKV(by_dimension(keys), values)
        table = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks)
        lengths, bounds = torch.full((rows,), length, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32)
        arguments = (torch.randn(rows, heads, head_dim), cache, table, lengths, bounds)
        ours = lambda i, a=arguments: ops.paged_attention(  # noqa: E731
            *a, max_query_len=1, max_seq_len=length, scale=head_dim**-0.5
        )
        theirs = lambda i, a=arguments: reference.paged_attention(*a, scale=head_dim**-0.5)  # noqa: E731
        num_bytes = 2 * rows * length * kv_heads * head_dim * 4
        out.append(_compare("decode attention", rows, ours, theirs, num_bytes, gb_per_s))
    return out


def _compare(op: str, rows: int, ours: Case, theirs: Case, num_bytes: int, gb_per_s: float) -> dict[str, Any]:
    right = theirs(0)
    error = float((ours(0) - right).norm() / right.norm())
    if not error < _TOLERANCE:
        raise SystemExit(f"{op} with {rows} rows is off by {error:.1e}; no figures until that is mended.")
    pairs = [(_seconds(ours, 1), _seconds(theirs, 1)) for _ in range(_REPEATS)]
    ours_s, theirs_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "op": op,
        "rows": rows,
        "ours_us": ours_s * 1e6,
        "torch_us": theirs_s * 1e6,
        "ratio": statistics.median(b / a for a, b in pairs),
        "of_copy": num_bytes / ours_s / 1e9 / gb_per_s,
    }


def _seconds(case: Case, repeats: int = 3) -> float:
    """Mean time of one call over all copies."""
    started = time.perf_counter()
    for _ in range(repeats):
        for copy in range(_COPIES):
            case(copy)
    return (time.perf_counter() - started) / repeats / _COPIES


if __name__ == "__main__":
    main()
