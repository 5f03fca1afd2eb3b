"""Finds scans that read and write arrays at their index: the rows of these become what the scan itself goes
over.

    fori_loop(0, n, lambda i, y: y.at[i].set(f(x[i])), y)
        map f over the rows of x, which gives the rows of y
    the way back of an iteration that reads x[i - 1] and x[i]
        give two rows for each iteration, add them up once all are there
    fori_loop(0, n, lambda i, y: y.at[n - 1 - i].set(x[i]), y)
        map over the rows of x, and reverse those of y

An array that a scan carries must be read and written at one place alone (`graph/indices.py`), or only be
added to: then no iteration sees what another one wrote. Of one that it only reads, other reads stay as they
are. A scan that goes from the last row to the first is one that is reversed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from shardax import _jax
from shardax.cost import noted
from shardax.cost.chips import NOMINAL
from shardax.graph import static_updates
from shardax.graph.graph import Graph, Node, Value, without_unread
from shardax.graph.indices import READS, WRITES, Index, Place
from shardax.graph.inline import made_of
from shardax.graph.operands import scan_params
from shardax.rewrites.narrowing import SPARSE, Narrowing
from shardax.rewrites.rewrite import Context, Replacements, reading
from shardax.rewrites.row_reads import Reading, places_read
from shardax.spmd_rules.registry import adds


def scanned_rows(graph: Graph, context: Context) -> Replacements:
    """The scans over rows that they read and write at their index, with what puts these side by side before
    them, and into their array after them. What is noted to be written in place stays so.
    """
    makers, new, same = {}, {}, {}  # `same`: what carries are that nothing changes and nothing reads
    for node in graph.nodes:
        made = [node]
        if node.name == "scan" and not noted.is_in_place(node.scope):
            index = Index(context.affines, context.affines.iterations[node])
            loop = _loop(reading(node, same), index, context.in_loop)
            if _goes_over_rows(loop, makers):
                unchanged = [c for c in loop.carries if c.returned is c.taken and loop.reads(c.taken) == 1]
                loop.carries = [c for c in loop.carries if c not in unchanged]
                same |= {c.result: c.outside for c in unchanged}
                new[node] = made = loop.nodes()
        makers.update({v: one for one in made for v in one.outputs})
    return Replacements(new, same)


def _goes_over_rows(loop: "_Loop", makers: Mapping[Value, Node]) -> bool:
    """Makes a loop go over rows where it can; `makers` are of its operands."""
    for node in Graph([], loop.body).walk() if loop.index.length else ():
        for place in loop.places(node):
            places = (loop.read if node.name in READS else loop.written).setdefault(node.in_shapes[0], [])
            places += [] if place in places else [place]
    if not (loop.read or loop.written):
        return False
    _reverse(loop, makers)
    _hoist_transposes(loop)
    for carries in _alike(loop):
        _scan_carries(loop, carries)
    for carry in [c for c in loop.carries if c.returned is not c.taken]:
        _scan_sum(loop, carry)
    unchanged = [(c.outside, c.taken) for c in loop.carries if c.returned is c.taken]
    for outside, inside in [*loop.consts, *unchanged]:
        _scan_const(loop, outside, inside)
    return loop.changed


@dataclass(eq=False, slots=True)
class _Carry:
    outside: Value
    taken: Value
    returned: Value
    result: Value


@dataclass(eq=False, slots=True)
class _Loop:
    """A scan while it is rewritten: what it takes and gives as (outside, inside), and what comes before and
    after it.

    `inner`: it runs in each iteration of another loop. `read` and `written`: by the shapes of arrays, the
    places at which its body does so to some.
    """

    node: Node
    inner: bool
    index: Index
    consts: list[tuple[Value, Value]]
    carries: list[_Carry]
    xs: list[tuple[Value, Value]]
    ys: list[tuple[Value, Value]]
    body: list[Node]
    before: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)
    read: dict[tuple[int, ...], list[Place]] = field(default_factory=dict)
    written: dict[tuple[int, ...], list[Place]] = field(default_factory=dict)
    changed: bool = False

    def places(self, node: Node) -> Iterator[Place]:
        """The places at which a node reads or writes an array, if the scan comes to enough of this."""
        if node.name in READS | WRITES:
            yield from (place for place in self.index.accesses(node) if self._is_enough(node, place))

    def place(self, node: Node) -> Place | None:
        return next(self.places(node), None)

    def _is_enough(self, node: Node, place: Place) -> bool:
        """Whether to copy what is scanned, on the nominal chip, takes no longer than to send what is read or
        written.

        All of an array that is written is copied. Outside of other loops whole rows count, whatever part of
        them is read: the scan may become a map, and each device does the iterations of its own rows.
        """
        array, length = node.inputs[0], self.index.length
        rows, plain = array.shape[place.dim], not jnp.issubdtype(array.aval.dtype, jax.dtypes.extended)
        row = math.prod(array.shape) // rows
        copied = row * (rows if node.name in WRITES else length)
        used = length * (_window(node) if self.inner else row)
        return (length == rows or plain) and 2 * copied / NOMINAL.memory_rate <= used / NOMINAL.link_rate

    def reads(self, value: Value) -> int:
        """How often the body reads or returns a value."""
        results = [*(c.returned for c in self.carries), *(inside for _, inside in self.ys)]
        return results.count(value) + sum(node.inputs.count(value) for node in self.body)

    def nodes(self) -> list[Node]:
        taken, returned = [c.taken for c in self.carries], [c.returned for c in self.carries]
        body = without_unread(Graph([], self.body, [*returned, *(inside for _, inside in self.ys)]))
        read = {v for node in body.nodes for v in node.inputs}.union(body.outputs)
        consts, xs = ([pair for pair in side if pair[1] in read] for side in (self.consts, self.xs))
        body = replace(body, inputs=[*(v for _, v in consts), *taken, *(v for _, v in xs)])
        inputs = [*(v for v, _ in consts), *(c.outside for c in self.carries), *(v for v, _ in xs)]
        outputs = [*(c.result for c in self.carries), *(v for v, _ in self.ys)]
        params = {**scan_params(self.node), "num_consts": len(consts), "num_carry": len(taken)}
        scan = replace(self.node, params=params, inputs=inputs, outputs=outputs, bodies=(body,))
        return [*self.before, scan, *self.after]


def _loop(node: Node, index: Index, inner: bool) -> _Loop:
    consts, carries = _jax.scan_counts(node.params)
    (body,) = node.bodies
    pairs = list(zip(node.inputs, body.inputs, strict=True))
    ends = list(zip(body.outputs, node.outputs, strict=True))
    carried = [_Carry(*pair, *end) for pair, end in zip(pairs[consts:], ends[:carries], strict=False)]
    ys = [(outside, inside) for inside, outside in ends[carries:]]
    return _Loop(node, inner, index, pairs[:consts], carried, pairs[consts + carries :], ys, list(body.nodes))


def _window(node: Node) -> int:
    """How many elements of an array a node reads or writes."""
    written = 1 if node.name == "dynamic_update_slice" else 2
    return math.prod(node.out_shapes[0] if node.name in READS else node.in_shapes[written])


def _reverse(loop: _Loop, makers: Mapping[Value, Node]) -> None:
    """Goes over rows in their order, if most of what is read and written is so in the other one."""
    before = {outside: _before_reversal(outside, makers) for outside, _ in loop.xs}
    up = sum(outside.nbytes for outside, _ in (*loop.xs, *loop.ys) if before.get(outside) is None)
    down = sum(v.nbytes for v in before.values() if v is not None)
    keys = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v, _ in (*loop.xs, *loop.ys))
    if keys or down + _bytes_along(loop, -1) <= up + _bytes_along(loop, 1):
        return
    for i, (outside, inside) in enumerate(loop.xs):
        loop.xs[i] = (before[outside] or _reversed_stack(loop, outside, loop.before), inside)
    for i, (outside, inside) in enumerate(loop.ys):
        loop.ys[i] = (stack, _) = (Value(outside.aval), inside)
        _reversed_stack(loop, stack, loop.after)
        loop.after[-1].outputs = [outside]
    loop.index = replace(loop.index, reversed=not loop.index.reversed)
    for places in (loop.read, loop.written):
        for shape, at in places.items():
            places[shape] = [Place(p.dim, p.line.reversed(loop.index.length)) for p in at]
    loop.node = replace(loop.node, params={**loop.node.params, "reverse": not loop.node.params["reverse"]})


def _before_reversal(value: Value, makers: Mapping[Value, Node]) -> Value | None:
    """What a stack was before it was reversed, if that was the last that was done to it."""
    node = makers.get(value)
    if node is None or node.name != "rev" or tuple(node.params["dimensions"]) != (0,):
        return None
    return node.inputs[0]


def _reversed_stack(loop: _Loop, stack: Value, nodes: list[Node]) -> Value:
    made, (reverse,) = made_of(lambda x: lax.rev(x, [0]), [stack], loop.node)
    nodes += made
    return reverse


def _bytes_along(loop: _Loop, step: int) -> int:
    """The bytes of the arrays whose rows are read and written in that order."""
    arrays = [(v, loop.read) for _, v in loop.consts]
    arrays += [(c.taken, places) for c in loop.carries for places in (loop.read, loop.written)]
    return sum(
        v.nbytes for v, places in arrays for place in places.get(v.shape, ()) if place.line.step == step
    )


def _hoist_transposes(loop: _Loop) -> None:
    """Those of constants, as JAX 0.12 makes them where a loop is batched."""
    outside = {v: around for around, v in loop.consts}
    for node in [node for node in loop.body if node.name == "transpose"]:
        if node.inputs[0] in outside:
            (inside,) = node.outputs
            around = outside[inside] = Value(inside.aval)
            loop.before.append(replace(node, inputs=[outside[node.inputs[0]]], outputs=[around]))
            loop.consts.append((around, inside))
            loop.body.remove(node)


# Arrays that are carried, and read and written at one place


def _alike(loop: _Loop) -> list[list[_Carry]]:
    """The carries that change: all those of a type, then each alone."""
    changing = [c for c in loop.carries if c.returned is not c.taken]
    types = dict.fromkeys((c.taken.shape, c.taken.aval.dtype) for c in changing)
    groups = [[c for c in changing if (c.taken.shape, c.taken.aval.dtype) == one] for one in types]
    return [*(group for group in groups if len(group) > 1), *([c] for c in changing)]


def _scan_carries(loop: _Loop, carries: list[_Carry]) -> None:
    """Scans the rows of carries of a type, if all that is done with these is done at one place."""
    taken = carries[0].taken
    for place in loop.written.get(taken.shape, ()) if loop.carries and {*carries} <= {*loop.carries} else ():
        narrowing = Narrowing(loop.index, place, taken.aval)
        rows = [_row_of(loop, c.taken, place) for c in carries]
        for carry, (_, start) in zip(carries, rows, strict=True):
            narrowing.add(carry.taken, start[-1].outputs[0], carry.taken)
        nodes = narrowing.run(loop.body)
        if nodes is None or not _leaves_none(loop, narrowing, carries):
            continue
        loop.body = [*(node for _, start in rows for node in start), *nodes]
        for carry, (row, _) in zip(carries, rows, strict=True):
            _add_xs(loop, carry.outside, row, place)
            _end(loop, carry, _add_ys(loop, carry.outside, narrowing.row(carry.returned), place))
        return


def _leaves_none(loop: _Loop, narrowing: Narrowing, carries: Sequence[_Carry] = ()) -> bool:
    """Whether these carries are returned as they were taken, and no other result is an array that is gone."""
    others = [*(c.returned for c in loop.carries if c not in carries), *(v for _, v in loop.ys)]
    kept = all(narrowing.background(c.returned) == c.taken for c in carries)
    return kept and narrowing.gone.isdisjoint(others)


# An array that is carried and only added to, at whatever places


def _scan_sum(loop: _Loop, carry: _Carry) -> None:
    """Adds up once the scan is over."""
    added = _terms_of(loop, carry)
    if added is None:
        return
    terms, sums = added
    body, rows = [node for node in loop.body if node not in sums], []
    for term in terms:
        narrowed = _sparse(loop, body, carry, term)
        if narrowed is None:
            return
        body, row, place = narrowed
        rows.append((row, place))
    loop.body, full = body, carry.outside
    for row, place in rows:
        full = _add_ys(loop, full, row, place, adds=True)
    _end(loop, carry, full)


def _terms_of(loop: _Loop, carry: _Carry) -> tuple[list[Value], list[Node]] | None:
    """What is added to an array, and the nodes that add; None where it is read otherwise, or nothing is
    added.
    """
    value, others, sums = carry.taken, [], []
    while value is not carry.returned:
        reader = next((node for node in loop.body if value in node.inputs), None)
        if reader is None or not adds(reader) or loop.reads(value) != 1:
            return None
        others += [v for v in reader.inputs if v is not value]
        (value,) = reader.outputs
        sums.append(reader)
    terms = []
    while others:
        value = others.pop()
        node = loop.index.makers.get(value)
        if node is not None and adds(node) and loop.reads(value) == 1:
            others += node.inputs
            sums.append(node)
        else:
            terms.append(value)
    return (terms, sums) if terms and loop.reads(carry.returned) == 1 else None


def _sparse(
    loop: _Loop, body: list[Node], carry: _Carry, term: Value
) -> tuple[list[Node], Value, Place] | None:
    """The body with a row in the place of what is added, which is zero elsewhere; None where it is not."""
    for place in loop.written.get(carry.taken.shape, ()):
        narrowing = Narrowing(loop.index, place, carry.taken.aval)
        nodes = narrowing.run(body)
        if nodes is not None and narrowing.background(term) == SPARSE and _leaves_none(loop, narrowing):
            return nodes, narrowing.row(term), place
    return None


# An array that is only read


def _scan_const(loop: _Loop, outside: Value, inside: Value) -> None:
    """Scans the rows that are read at the index."""
    if inside.shape not in loop.read:
        return
    rows, starts = {}, []
    for place in places_read(loop.body, inside, loop.place):
        row, start = _row_of(loop, inside, place)
        rows[place] = start[-1].outputs[0]
        starts += start
        _add_xs(loop, outside, row, place)
    if rows:
        results = [*(c.returned for c in loop.carries), *(v for _, v in loop.ys)]
        loop.body = [*starts, *Reading(loop.index, loop.place, {inside: rows}).run(loop.body, results)]


# What is scanned


def _row_of(loop: _Loop, array: Value, place: Place) -> tuple[Value, list[Node]]:
    """A row as it is scanned, and the nodes that make of it the array's one row in this iteration."""
    shape = array.shape[: place.dim] + array.shape[place.dim + 1 :]
    row = Value(ShapedArray(shape, array.aval.dtype))
    return row, made_of(lambda x: lax.expand_dims(x, [place.dim]), [row], loop.node)[0]


def _add_xs(loop: _Loop, array: Value, row: Value, place: Place) -> None:
    """Scans the rows of an array at a place."""

    def stacked(x):
        within = place.line.within(loop.index.length)
        all_of_it = len(within) == x.shape[place.dim]
        rows = x if all_of_it else lax.slice_in_dim(x, within.start, within.stop, axis=place.dim)
        rows = rows if place.line.step > 0 else lax.rev(rows, [place.dim])
        return lax.transpose(rows, [place.dim, *(d for d in range(x.ndim) if d != place.dim)])

    made, (stack,) = made_of(stacked, [array], loop.node)
    loop.before += made
    loop.xs.append((stack, row))
    loop.changed = True


def _add_ys(loop: _Loop, array: Value, row: Value, place: Place, adds: bool = False) -> Value:
    """Has each iteration give its row too; what the array is, outside, with these in it, or added to it."""
    made, (squeezed,) = made_of(lambda x: lax.squeeze(x, [place.dim]), [row], loop.node)
    loop.body += made
    stack = Value(ShapedArray((loop.index.length, *squeezed.shape), squeezed.aval.dtype))
    length, line = loop.index.length, place.line

    def put_back(array, stack):
        order: Sequence[int] = [*range(1, place.dim + 1), 0, *range(place.dim + 1, array.ndim)]
        rows = lax.transpose(stack, order)
        rows = rows if line.step > 0 else lax.rev(rows, [place.dim])
        starts = [line.within(length).start if d == place.dim else 0 for d in range(array.ndim)]
        if length == array.shape[place.dim]:
            return array + rows if adds else rows
        return static_updates.put(array, rows, starts, adds)

    made, (full,) = made_of(put_back, [array, stack], loop.node)
    loop.after += made
    loop.ys.append((stack, squeezed))
    loop.changed = True
    return full


def _end(loop: _Loop, carry: _Carry, full: Value) -> None:
    """Takes out a carry; `full` is its result."""
    loop.carries.remove(carry)
    for node in loop.after:
        node.outputs = [carry.result if v is full else v for v in node.outputs]
    loop.ys = [(carry.result if outside is full else outside, inside) for outside, inside in loop.ys]
