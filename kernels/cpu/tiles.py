"""The innermost loops of products as LLVM vectors: sums stay in registers while weights stream by.

A compiler's own vectoriser keeps the sums of one row and passes them through memory; a tile of several rows and outputs
loads each number once for many products.

Each function here makes an intrinsic for a tile of a given size. Its array arguments are two-dimensional views,
contiguous along a row, with any stride between rows; `out` is where the tile's first output lies.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.vectors import BYTES, CONTRACT, F32, FLOATS, INTS, LANES, Code, Variables, View, index_of

# Bytes ahead of their use at which weights are asked for. The processor's own prefetcher stops at every page of 4 KiB:
# with these a packed product of one row took 0.6 to 0.75 of the time (Sapphire Rapids, weights of 136 MB, 2026-11-30).
_CODES_AHEAD, _TERMS_AHEAD, _DENSE_AHEAD = 8192, 4096, 16384

Tile = Callable[..., Any]


def products(rows: int, vectors: int) -> Tile:
    """(x, w, out): out[r, c] += sum over k of x[r, k] * w[k, c], for 16 * `vectors` outputs.

    The rows of x go by `rows` at a time; what is left of them is for another call. w's number of rows says how many k
    there are. Each product is added to `out` in turn: to go through w in parts changes no bit.
    """

    @intrinsic
    def tile(typing_context, x, w, out):
        def generate(context, builder, signature, arguments):
            code = Code(context, builder)
            inputs, weights, outputs = code.views(signature.args, arguments)
            with added_to(code, inputs, outputs, rows, vectors) as (row, sums):
                places = [(weights, v * LANES) for v in range(vectors)]
                add_products(code, (inputs, row, 0), places, weights.num_rows, sums)
            return context.get_dummy_value()

        return types.void(x, w, out), generate

    return tile


@contextmanager
def added_to(code: Code, inputs: View, outputs: View, rows: int, vectors: int) -> Iterator[tuple[ir.Value, Variables]]:
    """For each `rows` rows the first of them, and sums that begin as `outputs` has them and are written there.

    The loop over rows is in here, since numba's views of some rows cost 4 to 5 % of a product or of attention.
    """
    sums = code.variables(rows, vectors)
    with code.loop(code.builder.udiv(inputs.num_rows, index_of(rows))) as step:
        row = code.builder.mul(step, index_of(rows))
        places = {(r, v): (code.builder.add(row, index_of(r)), v * LANES) for r, v in sums}
        for index, total in sums.items():
            code.builder.store(outputs.load(*places[index], FLOATS), total)
        yield row, sums
        for index, total in sums.items():
            outputs.store(*places[index], code.builder.load(total))


def add_products(
    code: Code,
    x: tuple[View, ir.Value, ir.Value | int],
    places: list[tuple[View, int]],
    count: ir.Value,
    sums: Variables,
    ahead: Sequence[View] = (),
) -> None:
    """sums[r, v] += sum over k < count of x[row + r, first + k] * w[k] for each v.

    x is (view, row, first); w is 16 columns of a view from a column on.

    What lies at these places in the views of `ahead` is asked for: a few lines at each k, as a burst of them would
    stop the processor until the first have come.
    """
    inputs, row, first = x
    with code.loop(count) as k:
        for view, (_, column) in zip(ahead, places, strict=False):
            view.prefetch(k, column, 0)
        w_k = [weight.load(k, column, FLOATS) for weight, column in places]
        x_column = code.builder.add(index_of(first), k)
        for r in range(1 + max(r for r, _ in sums)):
            x_rk = code.splat(inputs.load(code.builder.add(row, index_of(r)), x_column, F32))
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
            code = Code(context, builder)
            inputs, codes, term, outputs = code.views(signature.args, arguments)
            sums = code.variables(rows, vectors)
            code.clear(sums)
            for k, weights in _expanded(code, codes, term, vectors):
                for r in range(rows):
                    x_rk = code.splat(inputs.load(r, k, F32))
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
            code = Code(context, builder)
            codes, term, out = code.views(signature.args, arguments)
            for k, weights in _expanded(code, codes, term, vectors):
                for v, weight in enumerate(weights):
                    out.store(k, v * LANES, weight)
            return context.get_dummy_value()

        return types.void(packed, terms, dense), generate

    return tile


def _expanded(code: Code, codes: View, terms: View, vectors: int) -> Iterator[tuple[ir.Value, list[ir.Value]]]:
    """Inside a loop over all k: k and its weights. Yields twice, for the two k of one byte."""
    builder = code.builder
    num_groups = builder.lshr(terms.num_rows, index_of(1))
    pairs = builder.udiv(codes.num_rows, num_groups)
    with code.loop(num_groups) as group:
        row = builder.shl(group, index_of(1))
        places = [(builder.add(row, index_of(i)), v * LANES) for i in range(2) for v in range(vectors)]
        for place in places:
            terms.prefetch(*place, _TERMS_AHEAD)
        both_terms = [terms.load_widened(*place, FLOATS) for place in places]
        factors, offsets = both_terms[:vectors], both_terms[vectors:]
        first = builder.mul(group, pairs)
        with code.loop(pairs) as index:
            pair = builder.add(first, index)
            codes.prefetch(pair, 0, _CODES_AHEAD)
            both = [builder.zext(codes.load(pair, v * LANES, BYTES), INTS) for v in range(vectors)]
            for i in range(2):
                half = [code.nibble(byte, i) for byte in both]
                scaled = [builder.fmul(a, b, flags=CONTRACT) for a, b in zip(half, factors, strict=True)]
                weights = [builder.fadd(a, b, flags=CONTRACT) for a, b in zip(scaled, offsets, strict=True)]
                yield builder.add(builder.shl(pair, index_of(1)), index_of(i)), weights


def dot_products(rows: int, outputs: int) -> Tile:
    """(x, w, out): out[r, j] = sum over k of x[r, k] * w[j, k], for `rows` rows of x and `outputs` rows of w.

    w is fp32, or fp16 seen as uint16, or bf16 seen as int16, and is widened as it is read. A sum is taken in 16 lanes,
    then over the lanes, then over what is left when 16 do not divide K: the same for every size of tile.
    """

    @intrinsic
    def tile(typing_context, x, w, out):
        def generate(context, builder, signature, arguments):
            code = Code(context, builder)
            inputs, weights, results = code.views(signature.args, arguments)
            sums, rest = code.variables(rows, outputs), code.variables(rows, outputs, what=F32)
            code.clear(sums)
            code.clear(rest)
            steps = builder.udiv(inputs.num_columns, index_of(LANES))
            with code.loop(steps) as step:
                _add_dots(code, inputs, weights, builder.mul(step, index_of(LANES)), sums, FLOATS)
            for r, folded in _rows_folded(code, sums, rows, outputs):
                results.store(r, 0, folded)
            done = builder.mul(steps, index_of(LANES))
            left = builder.sub(inputs.num_columns, done)
            with builder.if_then(builder.icmp_unsigned(">", left, index_of(0))):
                with code.loop(left) as index:
                    _add_dots(code, inputs, weights, builder.add(done, index), rest, F32)
                for place, total in rest.items():
                    results.store(*place, builder.fadd(results.load(*place, F32), builder.load(total)))
            return context.get_dummy_value()

        return types.void(x, w, out), generate

    return tile


def _rows_folded(code: Code, sums: Variables, rows: int, outputs: int) -> Iterator[tuple[int, ir.Value]]:
    """Each row with the sums over the lanes of its `outputs` vectors."""
    at_once = max(1, LANES // outputs)
    for first in range(0, rows, at_once):
        some = range(first, min(first + at_once, rows))
        folded = code.fold_each([code.builder.load(sums[r, j]) for r in some for j in range(outputs)])
        for r in some:
            yield r, code.lanes(folded, (r - first) * outputs, outputs)


def _add_dots(code: Code, inputs: View, weights: View, k: ir.Value, sums: Variables, what: ir.Type) -> None:
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
        code = Code(context, builder)
        (view,) = code.views(signature.args, arguments)
        with code.loop(view.num_rows) as row, code.loop(builder.udiv(view.num_columns, index_of(LANES))) as vector:
            view.store(row, builder.mul(vector, index_of(LANES)), ir.Constant(FLOATS, None))
        return context.get_dummy_value()

    return types.void(x), generate
