"""What the innermost loops are written in: vectors of 16 lanes, which LLVM cuts into what the CPU has.

`Code` makes instructions, `View` reads and writes a two-dimensional array.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compile import HAS_AVX512

LANES = 16

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, BYTES, INTS = (ir.VectorType(item, LANES) for item in (F32, ir.IntType(8), I32))
_PLACE = ir.IntType(8).as_pointer()
CONTRACT = ("contract",)  # product and sum may become one FMA

Variables = dict[tuple[int, ...], ir.Value]


class Code:
    """Instructions for vectors, at the builder's place."""

    def __init__(self, context: Any, builder: ir.IRBuilder) -> None:
        self._context, self.builder = context, builder

    def views(self, kinds: Sequence[types.Type], values: Sequence[ir.Value]) -> list["View"]:
        return [self._view(kind, value) for kind, value in zip(kinds, values, strict=True)]

    def _view(self, kind: types.Array, value: ir.Value) -> "View":
        array = self._context.make_array(kind)(self._context, self.builder, value)
        row_bytes, shape = (cgutils.unpack_tuple(self.builder, numbers) for numbers in (array.strides, array.shape))
        return View(self.builder, self.builder.bitcast(array.data, _PLACE), row_bytes[0], kind.dtype, shape)

    def view_at(self, address: ir.Value, row_bytes: ir.Value) -> "View":
        """fp32 numbers from an address on."""
        return View(self.builder, self.builder.inttoptr(address, _PLACE), row_bytes, types.float32)

    def loop(self, count: ir.Value) -> Any:
        """for index in range(count)"""
        return _indices(self.builder, count)

    def splat(self, number: ir.Value) -> ir.Value:
        empty = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, number, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))

    def add_product(self, total: ir.Value, a: ir.Value, b: ir.Value) -> None:
        """*total += a * b"""
        term = self.builder.fmul(a, b, flags=CONTRACT)
        self.builder.store(self.builder.fadd(term, self.builder.load(total), flags=CONTRACT), total)

    def nibble(self, byte: ir.Value, which: int) -> ir.Value:
        """The lower (0) or the upper (1) four bits of each lane's byte as a number."""
        builder, four, fifteen = self.builder, *(ir.Constant(INTS, [number] * LANES) for number in (4, 15))
        bits = builder.lshr(byte, four) if which else byte
        if not HAS_AVX512:
            return builder.sitofp(builder.and_(bits, fifteen), FLOATS)
        # One instruction that looks at the last four bits alone, instead of two.
        look_up = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOATS, [FLOATS, INTS]), "llvm.x86.avx512.permvar.sf.512"
        )
        return builder.call(look_up, [ir.Constant(FLOATS, list(map(float, range(LANES)))), bits])

    def variables(self, *shape: int, what: ir.Type = FLOATS) -> Variables:
        """Numbers or vectors that LLVM keeps in registers, by their indices; not set yet."""
        return {index: cgutils.alloca_once(self.builder, what) for index in product(*map(range, shape))}

    def clear(self, variables: Variables) -> None:
        for variable in variables.values():
            self.builder.store(ir.Constant(variable.type.pointee, None), variable)

    def fold(self, vector: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes joined into one number: halves are joined until one is left."""
        builder, width = self.builder, LANES
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, width), lanes))
                for lanes in (list(range(width)), list(range(width, 2 * width)))
            )
            vector = join(low, high)
        return builder.extract_element(vector, ir.Constant(I32, 0))

    def fold_each(self, vectors: list[ir.Value]) -> ir.Value:
        """The sum over the lanes of each vector, side by side, for a power of two of vectors, at most 16.

        As in `fold` halves are added until one lane is left, but of two vectors at once: of 16 that takes 45
        instructions instead of 128.
        """
        width = LANES  # lanes that stand for one vector
        while width > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], None)]
            vectors, width = [self._halves_added(*pair, width) for pair in pairs], width // 2
        return vectors[0]

    def _halves_added(self, a: ir.Value, b: ir.Value | None, width: int) -> ir.Value:
        """For each `width` lanes of a, and then of b, their first half plus their second one."""
        count = a.type.count * (1 if b is None else 2)
        first = [lane for lane in range(count) if lane % width < width // 2]
        low, high = (
            self.builder.shuffle_vector(a, a if b is None else b, ir.Constant(ir.VectorType(I32, count // 2), lanes))
            for lanes in (first, [lane + width // 2 for lane in first])
        )
        return self.builder.fadd(low, high)

    def lanes(self, vector: ir.Value, first: int, count: int) -> ir.Value:
        which = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
        return self.builder.shuffle_vector(vector, vector, which)


class View:
    """A two-dimensional array, contiguous along a row; its shape where it is an argument."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        data: ir.Value,
        row_bytes: ir.Value,
        item: types.Type,
        shape: Sequence[ir.Value | None] = (None, None),
    ) -> None:
        self._builder, self._data, self._row_bytes = builder, data, row_bytes
        self._item, self._item_bytes = item, item.bitwidth // 8
        self.num_rows, self.num_columns = shape

    def load(self, row: ir.Value | int, column: ir.Value | int, what: ir.Type) -> ir.Value:
        return self._builder.load(self._pointer(row, column, what), align=self._item_bytes)

    def load_widened(self, row: ir.Value | int, column: ir.Value | int, what: ir.Type) -> ir.Value:
        """fp32 numbers from fp32, from fp16 held as uint16, or from bf16 held as int16."""
        if self._item is types.float32:
            return self.load(row, column, what)
        if self._item is types.uint16:
            return self._builder.fpext(self.load(row, column, _like(what, ir.HalfType())), what)
        wide = self._builder.zext(self.load(row, column, _like(what, ir.IntType(16))), _like(what, I32))
        sixteen = ir.Constant(wide.type, [16] * LANES if isinstance(what, ir.VectorType) else 16)
        return self._builder.bitcast(self._builder.shl(wide, sixteen), what)

    def store(self, row: ir.Value | int, column: ir.Value | int, value: ir.Value) -> None:
        self._builder.store(value, self._pointer(row, column, value.type), align=self._item_bytes)

    def prefetch(self, row: ir.Value | int, column: ir.Value | int, ahead: int) -> None:
        """Fetch the line that lies `ahead` bytes after this place into the second cache."""
        builder = self._builder
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [_PLACE], ir.FunctionType(ir.VoidType(), [_PLACE, I32, I32, I32])
        )
        place = builder.gep(self._pointer(row, column, ir.IntType(8)), [index_of(ahead)])
        builder.call(function, [place, *(ir.Constant(I32, n) for n in (0, 2, 1))])

    def _pointer(self, row: ir.Value | int, column: ir.Value | int, what: ir.Type) -> ir.Value:
        builder = self._builder
        along = builder.mul(index_of(column), index_of(self._item_bytes))
        place = builder.gep(self._data, [builder.add(builder.mul(index_of(row), self._row_bytes), along)])
        return builder.bitcast(place, what.as_pointer())


@contextmanager
def _indices(builder: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    with cgutils.for_range(builder, count) as loop:
        yield loop.index


def _like(what: ir.Type, item: ir.Type) -> ir.Type:
    """`item`, as many as `what` has."""
    return ir.VectorType(item, what.count) if isinstance(what, ir.VectorType) else item


def index_of(value: ir.Value | int) -> ir.Value:
    return ir.Constant(I64, value) if isinstance(value, int) else value
