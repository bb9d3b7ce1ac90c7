"""A kernel as it will be compiled at run time, told as data, so that `aot.py` can compile and judge it without a card.

Each kernel file exports `aot_cases() -> Iterable[AotCase]`: the rows of its config table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHS = (80, 86, 89, 90)  # compute capabilities, major and minor as one number


@dataclass(frozen=True)
class WeightLoop:
    """What the main loop of a 4-bit product must look like: limits are `aot.py`'s, these are the sizes to measure by.

    weights_a_mma    weights that one warp's m16n8k16 takes in, per instruction (256 where they are its 16 rows)
    max_instructions_a_weight  lane-instructions; 3 are 28 % of what an RTX 3090 issues while it reads one weight
    weights_a_wgmma  as weights_a_mma, per warp, of the four warps' m64nNk16
    """

    weights_a_mma: float
    max_instructions_a_weight: float = 3.0
    weights_a_wgmma: float = 256.0


@dataclass(frozen=True)
class AotCase:
    """One compilation of a Triton kernel.

    types         argument -> "*fp16", "*i32", "i32", "fp32" ...: every parameter that is no constant
    constants     parameter -> its value: tl.constexpr, and arguments that the launch would specialise to 1 or None
    multiples_of_16  integer arguments that are such at run time; pointers always are (torch's allocator gives them so)
    archs         where the row is used
    weight_loop   of a 4-bit product: judged by the rules of its main loop too
    options       what else the launch tells the compiler
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    multiples_of_16: frozenset[str] = field(default_factory=frozenset)
    archs: tuple[int, ...] = ARCHS
    weight_loop: WeightLoop | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
