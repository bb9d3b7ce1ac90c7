"""Small kernels that keep or break one rule of `kernels.gpu.aot` each. Run as a program it prints their faults."""

import json

import triton
import triton.language as tl

from kernels.gpu import aot
from kernels.gpu.cases import AotCase, WeightLoop


@triton.jit
def scaled_copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def dense_product(a, b, c, k, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr):
    """[N, N] tile of one block; b is int8 where the case says so, and then converted."""
    rows, columns = tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((N, N), tl.float32)
    for _ in tl.range(0, k, num_stages=STAGES):
        left = tl.load(a + rows[:, None] * K + columns[None, :])
        right = tl.load(b + columns[:, None] * N + rows[None, :])
        total = tl.dot(left, right.to(left.dtype), total)
        a += N * K
        b += N * K
    tl.store(c + rows[:, None] * N + rows[None, :], total)


def _copy(block: int) -> AotCase:
    types = {"x": "*fp32", "y": "*fp32", "n": "i32"}
    return AotCase("copy", scaled_copy, types, {"BLOCK": block}, num_warps=4)


def _product(size: int, right: str, depth: int = 32, num_warps: int = 4, num_stages: int = 3) -> AotCase:
    types = {"a": "*fp16", "b": right, "c": "*fp32", "k": "i32"}
    constants = {"N": size, "K": depth, "STAGES": num_stages}
    loop = WeightLoop(weights_a_mma=128 / (size / 16))
    return AotCase("product", dense_product, types, constants, num_warps, num_stages, weight_loop=loop)


CASES = {
    "good copy": _copy(1024),
    "dense product": _product(16, "*fp16"),
    "converted product": _product(64, "*i8"),
    "waiting product": _product(64, "*fp16", num_stages=1),
    "spilling product": _product(128, "*fp16", depth=128, num_warps=1),
}

if __name__ == "__main__":
    print(json.dumps({name: aot.faults(case, 86, aot.compile_case(case, 86)) for name, case in CASES.items()}))
