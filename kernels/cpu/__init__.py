"""The forms of the ops that run on a CPU in fp32, for any number of rows: a row's bits do not depend on its company.

Compiled by numba on first import and cached beside the source. Torch's own int4 product for the CPU is fast in bf16
only; in fp32 it is a scalar loop (measured: 1.7 GFLOP/s against 20 here, one core, 2026-11-30).
"""
