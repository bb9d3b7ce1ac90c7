"""The one table of configurations of the 4-bit product: for a card's architecture, a class of shapes and a bucket of
rows, which way it is computed and with which tiles. Both the launches and `aot.py` read it.

Rows of sm_90 were measured on an H200 (docs/log.md). Those of sm_86 and sm_89 are predicted, not measured: from bytes
over bandwidth, instructions over issue slots and blocks over multiprocessors, as the compiler makes them. sm_80 takes
sm_86's. A card's own measurements go above the table: `tune.py`.
"""

from dataclasses import dataclass
from functools import cache

import torch

BUCKETS = (8, 16, 32, 64, 128, 256, 1024)  # rows; products of one bucket run alike, and a row has the same bits in all


@dataclass(frozen=True)
class Config:
    """
    bm, bn         rows and outputs of a tile
    blocks_an_sm   K is shared among blocks until there are about so many for each multiprocessor; 0 never
    scale_weights  scale the weights, in 16 bits as a dense weight is rounded, and not a step's sums in fp32
    """

    bm: int
    bn: int
    warps: int
    stages: int
    blocks_an_sm: float = 0
    scale_weights: bool = False

    def split(self, bucket: int, num_outputs: int, num_steps: int, num_sms: int) -> int:
        """Shares of K, each of at least two steps: the same for all of a bucket."""
        tiles = -(-bucket // self.bm) * -(-num_outputs // self.bn)
        return max(1, min(round(self.blocks_an_sm * num_sms / tiles), num_steps // 2))


@dataclass(frozen=True)
class Row:
    """Configurations of a bucket by class of shapes."""

    square: Config
    wide: Config
    deep: Config


_SM90 = {
    8: Row(Config(8, 64, 2, 3, 5.8), Config(8, 64, 2, 3, 6.8), Config(8, 64, 2, 4, 3.9)),
    16: Row(Config(16, 64, 4, 3, 2.9), Config(16, 128, 4, 4), Config(16, 64, 4, 3, 3.9)),
    32: Row(Config(32, 64, 4, 3, 2.9), Config(32, 128, 4, 3), Config(32, 128, 8, 3, 1.9)),
    64: Row(Config(64, 64, 4, 3, 2.9), Config(64, 128, 8, 3), Config(64, 128, 8, 3, 1.9)),
    128: Row(Config(128, 128, 8, 4, 0.7, True), Config(128, 256, 8, 4, 0, True), Config(128, 128, 8, 4, 1, True)),
    256: Row(Config(128, 128, 8, 3, 1.5, True), Config(128, 256, 8, 3, 0, True), Config(128, 128, 8, 3, 1.9, True)),
    1024: Row(Config(128, 256, 8, 3, 0, True), Config(128, 256, 8, 3, 0, True), Config(128, 256, 8, 3, 0, True)),
}
_SM86 = {
    8: Row(Config(8, 64, 2, 4, 4), Config(8, 64, 2, 4, 4), Config(8, 64, 2, 4, 4)),
    16: Row(Config(16, 64, 2, 4, 4), Config(16, 64, 2, 4, 4), Config(16, 64, 2, 4, 4)),
    32: Row(Config(32, 64, 2, 3, 3), Config(32, 128, 4, 3, 2), Config(32, 128, 4, 3, 2)),
    64: Row(Config(64, 128, 4, 3, 2), Config(64, 128, 4, 3, 2), Config(64, 128, 4, 3, 2)),
    128: Row(Config(64, 128, 4, 3, 2), Config(64, 128, 4, 3, 2), Config(64, 128, 4, 3, 2)),
    256: Row(Config(64, 128, 4, 3, 2), Config(64, 128, 4, 3, 2), Config(64, 128, 4, 3, 2)),
    1024: Row(Config(64, 128, 4, 3), Config(64, 128, 4, 3), Config(64, 128, 4, 3)),
}
TABLE = {80: _SM86, 86: _SM86, 89: _SM86, 90: _SM90}
_DENSE_ABOVE = {80: (256, 256), 86: (256, 256), 89: (256, 256), 90: (256, 1024)}  # rows: of a square shape, of others

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
    is_wide, is_deep = num_outputs >= _WIDE, num_inputs >= _DEEP * num_outputs
    if num_rows > _DENSE_ABOVE[card.arch][is_wide or is_deep]:
        return None
    row = TABLE[card.arch][bucket_of(num_rows)]
    return row.wide if is_wide else row.deep if is_deep else row.square
