"""How threads share out the tasks of a kernel: each takes the next one when it is through with its last.

A thread that sleeps begins later, and one whose core is wanted by another program falls behind: with shares of equal
size one of two waited a fifth of the time (docs/log.md). What a task computes does not depend on who takes it, so no
bit does.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def take(typing_context, counter):
    """The number in counter [1] int64, which grows by one: no two threads get the same."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate
