"""The forms of the ops that run where torch is slow on a CPU: small batches, whose work costs less than torch's calls.

Compiled by numba on first import and cached beside the source. Torch's own int4 product for the CPU is fast in bf16
only; in fp32 it is a scalar loop (measured: 1.7 GFLOP/s against 20 here, one core, 2026-11-30).
"""
