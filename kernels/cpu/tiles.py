"""The innermost loops as LLVM vectors: sums stay in registers while weights stream by.

A compiler's own vectoriser keeps the sums of one row and passes them through memory; a tile of several rows and outputs
loads each number once for many products. The code speaks of vectors of 16 lanes, which LLVM cuts into what the CPU has.

Each function here makes an intrinsic for a tile of a given size. Its array arguments are two-dimensional views,
contiguous along a row, with any stride between rows; `out` is where the tile's first output lies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

# Bytes ahead of their use at which weights are asked for. The processor's own prefetcher stops at every page of 4 KiB:
# with these a packed product of one row took 0.6 to 0.75 of the time (Sapphire Rapids, weights of 136 MB, 2026-11-30).
_CODES_AHEAD, _TERMS_AHEAD, _DENSE_AHEAD = 8192, 4096, 16384

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _BYTES, _INTS = (ir.VectorType(item, LANES) for item in (_F32, ir.IntType(8), _I32))
_CONTRACT = ("contract",)  # product and sum may become one FMA

Tile = Callable[..., Any]
_Variables = dict[tuple[int, ...], ir.Value]
_Views = list["_View"]


class _Code:
    """Instructions for vectors, at the builder's place."""

    def __init__(self, context: Any, builder: ir.IRBuilder) -> None:
        self._context, self.builder = context, builder

    def views(self, kinds: Sequence[types.Type], values: Sequence[ir.Value]) -> list["_View"]:
        return [
            _View(self.builder, self._context.make_array(kind)(self._context, self.builder, value), kind)
            for kind, value in zip(kinds, values, strict=True)
        ]

    def loop(self, count: ir.Value) -> Any:
        """for index in range(count)"""
        return _indices(self.builder, count)

    def splat(self, number: ir.Value) -> ir.Value:
        first = self.builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))

    def add_product(self, total: ir.Value, a: ir.Value, b: ir.Value) -> None:
        """*total += a * b"""
        term = self.builder.fmul(a, b, flags=_CONTRACT)
        self.builder.store(self.builder.fadd(term, self.builder.load(total), flags=_CONTRACT), total)

    def variables(self, *shape: int, what: ir.Type = _FLOATS) -> _Variables:
        """Numbers or vectors that LLVM keeps in registers, by their indices; not set yet."""
        return {index: cgutils.alloca_once(self.builder, what) for index in product(*map(range, shape))}

    def clear(self, variables: _Variables) -> None:
        for variable in variables.values():
            self.builder.store(ir.Constant(variable.type.pointee, None), variable)

    def fold(self, vector: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes joined into one number: halves are joined until one is left."""
        builder, width = self.builder, LANES
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, width), lanes))
                for lanes in (list(range(width)), list(range(width, 2 * width)))
            )
            vector = join(low, high)
        return builder.extract_element(vector, ir.Constant(_I32, 0))


class _View:
    """A two-dimensional array argument."""

    def __init__(self, builder: ir.IRBuilder, array: Any, kind: types.Array) -> None:
        self._builder = builder
        self._data = builder.bitcast(array.data, ir.IntType(8).as_pointer())
        self._row_bytes = cgutils.unpack_tuple(builder, array.strides)[0]
        self._item, self._item_bytes = kind.dtype, kind.dtype.bitwidth // 8
        self.num_rows, self.num_columns = cgutils.unpack_tuple(builder, array.shape)

    def load(self, row: ir.Value | int, column: ir.Value | int, what: ir.Type) -> ir.Value:
        return self._builder.load(self._pointer(row, column, what), align=self._item_bytes)

    def load_widened(self, row: ir.Value | int, column: ir.Value | int, what: ir.Type) -> ir.Value:
        """fp32 numbers from fp32, from fp16 held as uint16, or from bf16 held as int16."""
        if self._item is types.float32:
            return self.load(row, column, what)
        if self._item is types.uint16:
            return self._builder.fpext(self.load(row, column, _like(what, ir.HalfType())), what)
        wide = self._builder.zext(self.load(row, column, _like(what, ir.IntType(16))), _like(what, _I32))
        sixteen = ir.Constant(wide.type, [16] * LANES if isinstance(what, ir.VectorType) else 16)
        return self._builder.bitcast(self._builder.shl(wide, sixteen), what)

    def store(self, row: ir.Value | int, column: ir.Value | int, value: ir.Value) -> None:
        self._builder.store(value, self._pointer(row, column, value.type), align=self._item_bytes)

    def prefetch(self, row: ir.Value | int, column: ir.Value | int, ahead: int) -> None:
        """Fetch the line that lies `ahead` bytes after this place into the second cache."""
        builder = self._builder
        i8 = ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [i8], ir.FunctionType(ir.VoidType(), [i8, _I32, _I32, _I32])
        )
        place = builder.gep(self._pointer(row, column, ir.IntType(8)), [_index(ahead)])
        builder.call(function, [place, *(ir.Constant(_I32, n) for n in (0, 2, 1))])

    def _pointer(self, row: ir.Value | int, column: ir.Value | int, what: ir.Type) -> ir.Value:
        builder = self._builder
        along = builder.mul(_index(column), _index(self._item_bytes))
        place = builder.gep(self._data, [builder.add(builder.mul(_index(row), self._row_bytes), along)])
        return builder.bitcast(place, what.as_pointer())


@contextmanager
def _indices(builder: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    with cgutils.for_range(builder, count) as loop:
        yield loop.index


def _like(what: ir.Type, item: ir.Type) -> ir.Type:
    """`item`, as many as `what` has."""
    return ir.VectorType(item, what.count) if isinstance(what, ir.VectorType) else item


def _index(value: ir.Value | int) -> ir.Value:
    return ir.Constant(_I64, value) if isinstance(value, int) else value


def products(rows: int, vectors: int) -> Tile:
    """(x, w, out): out[r, c] += sum over k of x[r, k] * w[k, c], for 16 * `vectors` outputs.

    The rows of x go by `rows` at a time; what is left of them is for another call. w's number of rows says how many k
    there are. Each product is added to `out` in turn: to go through w in parts changes no bit.
    """

    @intrinsic
    def tile(typing_context, x, w, out):
        def generate(context, builder, signature, arguments):
            code = _Code(context, builder)
            inputs, weights, outputs = code.views(signature.args, arguments)
            with _added_to(code, inputs, outputs, rows, vectors) as (row, sums):
                _add_products(code, inputs, row, 0, [(weights, v * LANES) for v in range(vectors)], sums)
            return context.get_dummy_value()

        return types.void(x, w, out), generate

    return tile


def products_across(rows: int, vectors: int) -> Tile:
    """(x, parts, ahead, out): as `products` with w = `vectors` parts side by side, each of 16 outputs.

    Meanwhile the same places of `ahead` are asked for.
    """

    def add(code: _Code, inputs: "_View", row: ir.Value, parts: _Views, ahead: _Views, sums: _Variables) -> None:
        _add_products(code, inputs, row, 0, [(part, 0) for part in parts], sums, ahead)

    return _products_of_parts(add, rows, vectors)


def products_along(rows: int, vectors: int) -> Tile:
    """(x, parts, ahead, out): as `products` with w = parts one below the other, some of which may have no rows.

    Meanwhile the same places of `ahead` are asked for.
    """

    def add(code: _Code, inputs: "_View", row: ir.Value, parts: _Views, ahead: _Views, sums: _Variables) -> None:
        first: ir.Value | int = 0
        for part, later in zip(parts, ahead, strict=True):
            places = [(part, v * LANES) for v in range(vectors)]
            _add_products(code, inputs, row, first, places, sums, vectors * [later])
            first = code.builder.add(_index(first), part.num_rows)

    return _products_of_parts(add, rows, vectors)


def _products_of_parts(add: Callable[..., None], rows: int, vectors: int) -> Tile:
    """`add` adds the products, given the code, the views, and the sums."""

    @intrinsic
    def tile(typing_context, x, parts, ahead, out):
        def generate(context, builder, signature, arguments):
            code = _Code(context, builder)
            inputs, outputs = code.views((x, out), (arguments[0], arguments[3]))
            now, later = (code.views(parts.types, cgutils.unpack_tuple(builder, arguments[i])) for i in (1, 2))
            with _added_to(code, inputs, outputs, rows, vectors) as (row, sums):
                add(code, inputs, row, now, later, sums)
            return context.get_dummy_value()

        return types.void(x, parts, ahead, out), generate

    return tile


@contextmanager
def _added_to(
    code: _Code, inputs: "_View", outputs: "_View", rows: int, vectors: int
) -> Iterator[tuple[ir.Value, _Variables]]:
    """For each `rows` rows the first of them, and sums that begin as `outputs` has them and are written there.

    The loop over rows is in here, since numba's views of some rows cost 4 to 5 % of a product or of attention.
    """
    sums = code.variables(rows, vectors)
    with code.loop(code.builder.udiv(inputs.num_rows, _index(rows))) as step:
        row = code.builder.mul(step, _index(rows))
        places = {(r, v): (code.builder.add(row, _index(r)), v * LANES) for r, v in sums}
        for index, total in sums.items():
            code.builder.store(outputs.load(*places[index], _FLOATS), total)
        yield row, sums
        for index, total in sums.items():
            outputs.store(*places[index], code.builder.load(total))


def _add_products(
    code: _Code,
    inputs: "_View",
    row: ir.Value,
    first: ir.Value | int,
    places: list[tuple["_View", int]],
    sums: _Variables,
    ahead: Sequence["_View"] = (),
) -> None:
    """sums[r, v] += sum over k of x[row + r, first + k] * w[k], w = 16 columns of a view from a column on, for each v.

    What lies at these places in the views of `ahead` is asked for: a few lines at each k, as a burst of them would
    stop the processor until the first have come.
    """
    with code.loop(places[0][0].num_rows) as k:
        for view, (_, column) in zip(ahead, places, strict=False):
            view.prefetch(k, column, 0)
        w_k = [weight.load(k, column, _FLOATS) for weight, column in places]
        x_column = code.builder.add(_index(first), k)
        for r in range(1 + max(r for r, _ in sums)):
            x_rk = code.splat(inputs.load(code.builder.add(row, _index(r)), x_column, _F32))
            for v, w_kv in enumerate(w_k):
                code.add_product(sums[r, v], x_rk, w_kv)


def coded_products(rows: int, vectors: int) -> Tile:
    """(x, packed, terms, out): out[r, c] = sum over k of x[r, k] * weight[k, c]

    for `rows` rows and 16 * `vectors` outputs. weight[k, c] = code[k, c] * terms[2g, c] + terms[2g + 1, c], k in group
    g, packed as in `W4Weight`. The sums are those of `products` with what `expand` writes, in the same order: a row's
    result does not depend on its company.
    """

    @intrinsic
    def tile(typing_context, x, packed, terms, out):
        def generate(context, builder, signature, arguments):
            code = _Code(context, builder)
            inputs, codes, term, outputs = code.views(signature.args, arguments)
            sums = code.variables(rows, vectors)
            code.clear(sums)
            for k, weights in _expanded(code, codes, term, vectors):
                for r in range(rows):
                    x_rk = code.splat(inputs.load(r, k, _F32))
                    for v, weight in enumerate(weights):
                        code.add_product(sums[r, v], x_rk, weight)
            for (r, v), total in sums.items():
                outputs.store(r, v * LANES, builder.load(total))
            return context.get_dummy_value()

        return types.void(x, packed, terms, out), generate

    return tile


def expand(vectors: int) -> Tile:
    """(packed, terms, dense): writes every weight[k, c] of 16 * `vectors` outputs. See `coded_products`."""

    @intrinsic
    def tile(typing_context, packed, terms, dense):
        def generate(context, builder, signature, arguments):
            code = _Code(context, builder)
            codes, term, out = code.views(signature.args, arguments)
            for k, weights in _expanded(code, codes, term, vectors):
                for v, weight in enumerate(weights):
                    out.store(k, v * LANES, weight)
            return context.get_dummy_value()

        return types.void(packed, terms, dense), generate

    return tile


def _expanded(code: _Code, codes: _View, terms: _View, vectors: int) -> Iterator[tuple[ir.Value, list[ir.Value]]]:
    """Inside a loop over all k: k and its weights. Yields twice, for the two k of one byte."""
    builder = code.builder
    nibble, four = (ir.Constant(_INTS, [number] * LANES) for number in (15, 4))
    num_groups = builder.lshr(terms.num_rows, _index(1))
    pairs = builder.udiv(codes.num_rows, num_groups)
    with code.loop(num_groups) as group:
        row = builder.shl(group, _index(1))
        places = [(builder.add(row, _index(i)), v * LANES) for i in range(2) for v in range(vectors)]
        for place in places:
            terms.prefetch(*place, _TERMS_AHEAD)
        both_terms = [terms.load_widened(*place, _FLOATS) for place in places]
        factors, offsets = both_terms[:vectors], both_terms[vectors:]
        first = builder.mul(group, pairs)
        with code.loop(pairs) as index:
            pair = builder.add(first, index)
            codes.prefetch(pair, 0, _CODES_AHEAD)
            both = [builder.zext(codes.load(pair, v * LANES, _BYTES), _INTS) for v in range(vectors)]
            for i in range(2):
                half = [builder.lshr(byte, four) if i else builder.and_(byte, nibble) for byte in both]
                scaled = [
                    builder.fmul(builder.sitofp(bits, _FLOATS), factor, flags=_CONTRACT)
                    for bits, factor in zip(half, factors, strict=True)
                ]
                weights = [builder.fadd(a, b, flags=_CONTRACT) for a, b in zip(scaled, offsets, strict=True)]
                yield builder.add(builder.shl(pair, _index(1)), _index(i)), weights


def dot_products(rows: int, outputs: int) -> Tile:
    """(x, w, out): out[r, j] = sum over k of x[r, k] * w[j, k], for `rows` rows of x and `outputs` rows of w.

    w is fp32, or fp16 seen as uint16, or bf16 seen as int16, and is widened as it is read. A sum is taken in 16 lanes,
    then over the lanes, then over what is left when 16 do not divide K: the same for every size of tile.
    """

    @intrinsic
    def tile(typing_context, x, w, out):
        def generate(context, builder, signature, arguments):
            code = _Code(context, builder)
            inputs, weights, results = code.views(signature.args, arguments)
            sums, rest = code.variables(rows, outputs), code.variables(rows, outputs, what=_F32)
            code.clear(sums)
            code.clear(rest)
            steps = builder.udiv(inputs.num_columns, _index(LANES))
            with code.loop(steps) as step:
                _add_dots(code, inputs, weights, builder.mul(step, _index(LANES)), sums, _FLOATS)
            done = builder.mul(steps, _index(LANES))
            with code.loop(builder.sub(inputs.num_columns, done)) as left:
                _add_dots(code, inputs, weights, builder.add(done, left), rest, _F32)
            for (r, j), total in sums.items():
                lanes = code.fold(builder.load(total), builder.fadd)
                results.store(r, j, builder.fadd(lanes, builder.load(rest[r, j])))
            return context.get_dummy_value()

        return types.void(x, w, out), generate

    return tile


def _add_dots(code: _Code, inputs: "_View", weights: "_View", k: ir.Value, sums: _Variables, what: ir.Type) -> None:
    """sums[r, j] += x[r, k] * w[j, k], `what` numbers from k on."""
    rows, outputs = (last + 1 for last in max(sums))
    for j in range(outputs):
        weights.prefetch(j, k, _DENSE_AHEAD)
    w_k = [weights.load_widened(j, k, what) for j in range(outputs)]
    for r in range(rows):
        x_k = inputs.load(r, k, what)
        for j in range(outputs):
            code.add_product(sums[r, j], x_k, w_k[j])


@intrinsic
def clear(typing_context, x):
    """x = 0 for a part of a wider array, its columns a multiple of 16: a compiler would go number by number."""

    def generate(context, builder, signature, arguments):
        code = _Code(context, builder)
        (view,) = code.views(signature.args, arguments)
        with code.loop(view.num_rows) as row, code.loop(builder.udiv(view.num_columns, _index(LANES))) as vector:
            view.store(row, builder.mul(vector, _index(LANES)), ir.Constant(_FLOATS, None))
        return context.get_dummy_value()

    return types.void(x), generate


@intrinsic
def largest_of(typing_context, x):
    """The largest number of a row of x [1, n], n a multiple of 16, no NaN among them.

    A compiler minds NaN and goes one by one.
    """

    def generate(context, builder, signature, arguments):
        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return _reduced(context, builder, signature.args, arguments, -float("inf"), larger)

    return types.float32(x), generate


@intrinsic
def sum_of(typing_context, x):
    """The sum of a row of x [1, n], n a multiple of 16; the order depends on n alone."""

    def generate(context, builder, signature, arguments):
        return _reduced(context, builder, signature.args, arguments, 0.0, builder.fadd)

    return types.float32(x), generate


def _reduced(context, builder, kinds, arguments, start, join):
    code = _Code(context, builder)
    (row,) = code.views(kinds, arguments)
    best = cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [start] * LANES))
    with code.loop(builder.udiv(row.num_columns, _index(LANES))) as step:
        here = row.load(0, builder.mul(step, _index(LANES)), _FLOATS)
        builder.store(join(builder.load(best), here), best)
    return code.fold(builder.load(best), join)
