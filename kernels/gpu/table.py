"""The one table of configurations of the 4-bit product: for a card's architecture, a class of shapes and a bucket of
rows, which way it is computed and with which tiles. Both the launches and `aot.py` read it.

Rows of sm_90 were measured on an H200 (docs/log.md). Those of sm_86 and sm_89 are predicted, not measured: from bytes
over bandwidth, instructions over issue slots and blocks over multiprocessors, as the compiler makes them. sm_80 takes
sm_86's. A card's own measurements go above the table: `tune.py`.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

BUCKETS = (
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
)  # rows; products of one bucket run alike, and a row has the same bits in all


@dataclass(frozen=True)
class Config:
    """
    bm, bn         rows and outputs of a tile
    blocks_an_sm   K is shared among blocks until there are about so many for each multiprocessor; 0 never
    scale_weights  scale the weights, in 16 bits as a dense weight is rounded, and not a step's sums in fp32
    depth          of a plane, what a turn of the loop takes at most: less where many rows fill the shared memory
    """

    bm: int
    bn: int
    warps: int
    stages: int
    blocks_an_sm: float = 0
    scale_weights: bool = False
    depth: int = 64

    def warps_for(self, depth: int) -> int:
        """Thin planes give fewer warps enough to do. Tiles of more rows keep theirs: wgmma asks for 4."""
        return max(2, self.warps * min(depth, self.depth) // 64) if self.bm == 8 else self.warps

    def split(self, bucket: int, num_outputs: int, num_steps: int, num_sms: int) -> int:
        """Shares of K, each of at least two steps: the same for all of a bucket. Near what `blocks_an_sm` asks for, and
        such that the last share has little less than the others.
        """
        tiles = -(-bucket // self.bm) * -(-num_outputs // self.bn)
        return _shares(max(1.0, self.blocks_an_sm * num_sms / tiles), num_steps)


@cache  # a search for each launch would take the host longer than the launch
def _shares(wanted: float, num_steps: int) -> int:
    def cost(shares: int) -> float:
        steps_computed = -(-num_steps // shares) * shares
        return abs(math.log2(shares / wanted)) + 2 * (steps_computed / num_steps - 1)

    return min(range(1, max(2, num_steps // 2 + 1)), key=cost)


@dataclass(frozen=True)
class Row:
    """Configurations of a bucket by class of shapes."""

    square: Config
    wide: Config
    deep: Config


_SM90 = {
    8: Row(Config(8, 32, 2, 3, 4.9), Config(8, 128, 2, 4), Config(8, 64, 2, 3, 3.9)),
    16: Row(Config(16, 64, 4, 3, 3), Config(16, 64, 4, 3), Config(16, 64, 4, 3, 3.9)),
    32: Row(Config(32, 64, 4, 3, 2.5), Config(32, 128, 4, 3), Config(32, 64, 4, 3, 2.5)),
    64: Row(Config(32, 64, 4, 3, 2.5), Config(64, 64, 4, 3), Config(64, 64, 4, 3, 1.9)),
    128: Row(Config(64, 64, 4, 3, 1.9), Config(128, 256, 8, 4, 0, True, 32), Config(64, 64, 4, 3, 1.9)),
    256: Row(Config(64, 64, 4, 3, 1), Config(128, 256, 8, 4, 0, True, 32), Config(64, 64, 4, 3, 1.9)),
    512: Row(Config(64, 64, 4, 3, 1), Config(128, 256, 8, 4, 0, True, 32), Config(128, 128, 8, 3, 1, True)),
    1024: Row(*[Config(128, 256, 8, 4, 0, True, 32)] * 3),
}
_SM86 = {
    8: Row(*[Config(8, 64, 4, 3, 4)] * 3),
    16: Row(*[Config(16, 64, 4, 3, 3)] * 3),
    32: Row(*[Config(32, 64, 4, 2, 2)] * 3),
    64: Row(*[Config(64, 64, 4, 3, 2, True, 32)] * 3),
    128: Row(*[Config(64, 64, 4, 3, 2, True, 32)] * 3),
    256: Row(*[Config(64, 64, 4, 3, 2, True, 32)] * 3),
    512: Row(*[Config(64, 64, 4, 3, 0, True, 32)] * 3),
    1024: Row(*[Config(64, 64, 4, 3, 0, True, 32)] * 3),
}
TABLE = {80: _SM86, 86: _SM86, 89: _SM86, 90: _SM90}
# Rows above which the weight is made dense: of a square, a wide, a deep shape.
_DENSE_ABOVE = {80: (256, 256, 256), 86: (256, 256, 256), 89: (256, 256, 256), 90: (256, 1024, 512)}

_WIDE, _DEEP = 16384, 2  # outputs of a wide shape; inputs for each output of a deep one


@dataclass(frozen=True)
class Card:
    arch: int
    num_sms: int


@cache
def card_of(device: torch.device) -> Card:
    """Cards that the table does not name take sm_86's rows, which ask for the least shared memory. A CPU, where Triton
    interprets, counts as a small card of sm_86.
    """
    if device.type != "cuda":
        return Card(86, 4)
    properties = torch.cuda.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    return Card(arch if arch in TABLE else 86, properties.multi_processor_count)


def bucket_of(num_rows: int) -> int:
    """The largest takes all that are more."""
    return next((bucket for bucket in BUCKETS if num_rows <= bucket), BUCKETS[-1])


def choose(card: Card, num_outputs: int, num_inputs: int, num_rows: int) -> Config | None:
    """None: make the weight dense and take cuBLAS."""
    row = TABLE[card.arch][bucket_of(num_rows)]
    of_square, of_wide, of_deep = _DENSE_ABOVE[card.arch]
    if num_outputs >= _WIDE:
        return row.wide if num_rows <= of_wide else None
    if num_inputs >= _DEEP * num_outputs:
        return row.deep if num_rows <= of_deep else None
    return row.square if num_rows <= of_square else None
