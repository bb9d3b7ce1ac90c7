"""Arithmetic of launches, on plain numbers: Triton's own `cdiv` and `next_power_of_2` take several microseconds a call
outside a kernel, which a step without a graph pays some hundred times.
"""


def cdiv(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The smallest that is not below `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
