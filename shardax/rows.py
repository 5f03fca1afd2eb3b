"""Finds scans that read and write arrays at their index: the rows of these become what the scan itself goes over.

    fori_loop(0, n, lambda i, y: y.at[i].set(f(x[i])), y)      map f over the rows of x, which gives the rows of y
    the way back of a trip that reads x[i - 1] and x[i]        give two rows for each trip, add them up once all are there

An array that a scan carries must be read and written at one place alone (`indices.py`), or only be added to: then no trip sees
what another one wrote. Of one that it only reads, other reads stay as they are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from shardax import _jax, static_updates
from shardax.graph import Graph, Node, Value, made_of, without_unread
from shardax.indices import READS, WRITES, Index, Makers, Place, first_of_iota, whole_number, zeros

_SMALL = 8  # a scan that comes to less than this part of an array leaves it as it is
_SUMS = {"add", "add_any"}

Rows = dict[Value, Value]
"""Arrays, as they come to be in a body, and the row of each at one place: the dim is there, of size one."""


def with_scanned_rows(graph: Graph, in_loop: bool = False) -> Graph:
    """The graph and its bodies, where scans go over the rows that they read and write at their index."""
    around, nodes = _Around(in_loop), []
    for node in graph.nodes:
        for body in node.bodies:
            with_scanned_rows(body, in_loop or node.name in ("scan", "while"))
        if not around.same.keys().isdisjoint(node.inputs):
            node = replace(node, inputs=[around.same.get(v, v) for v in node.inputs])
        made = _scanned(node, around) if node.name == "scan" else [node]
        around.makers.update({v: one for one in made for v in one.outputs})
        nodes += made
    graph.nodes, graph.outputs = nodes, [around.same.get(v, v) for v in graph.outputs]
    return graph


@dataclass(eq=False, slots=True)
class _Around:
    """What is known around scans.

    `in_loop`: they are in another loop. `same`: what carries are that nothing changes. `stacks`: of arrays whose rows are all
    first + t, `first`; so a scan that is differentiated passes on what its index was.
    """

    in_loop: bool = False
    makers: Makers = field(default_factory=dict)
    same: dict[Value, Value] = field(default_factory=dict)
    stacks: dict[Value, int] = field(default_factory=dict)


def _scanned(node: Node, around: _Around) -> list[Node]:
    """A scan over rows, with what puts these side by side before it, and into their array after it."""
    loop = _loop(node, around.in_loop)
    _find_index(loop, around)
    around.stacks.update({outside: loop.index.firsts[v] for outside, v in loop.ys if v in loop.index.firsts})
    if not _find_accesses(loop):
        return [node]
    _move_transposes_out(loop)
    for carry in [c for c in loop.carries if c.given is not c.taken]:
        if not _scan_carry(loop, carry):
            _scan_sum(loop, carry)
    for outside, inside in [*loop.consts, *((c.outside, c.taken) for c in loop.carries if c.given is c.taken)]:
        _scan_const(loop, outside, inside)
    if not loop.changed:
        return [node]
    around.same.update(_without_unchanged(loop))
    return loop.nodes()


@dataclass(eq=False, slots=True)
class _Carry:
    outside: Value
    taken: Value
    given: Value
    result: Value


@dataclass(eq=False, slots=True)
class _Loop:
    """A scan while it is rewritten: what it takes and gives as (outside, inside), and what comes before and after it.

    `inner`: it runs in each trip of another loop. `read` and `written`: by the shapes of arrays, the places at which its body
    does so to some.
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

    def _is_enough(self, node: Node, place: Place) -> bool:
        """What is scanned is copied as a whole: inside of another loop as often as that has trips."""
        array, length = node.inputs[0], self.index.length
        size, rows = math.prod(array.shape), array.shape[place.dim]
        window = _window(node) if self.inner else size // rows if node.name in WRITES else size
        plain = length == rows or not jnp.issubdtype(array.aval.dtype, jax.dtypes.extended)
        return plain and size <= _SMALL * length * window

    def reads(self, value: Value) -> int:
        """How often the body reads a value or gives it."""
        given = [*(c.given for c in self.carries), *(inside for _, inside in self.ys)]
        return given.count(value) + sum(node.inputs.count(value) for node in self.body)

    def nodes(self) -> list[Node]:
        taken, given = [c.taken for c in self.carries], [c.given for c in self.carries]
        body = without_unread(Graph([], self.body, [*given, *(inside for _, inside in self.ys)]))
        read = {v for node in body.nodes for v in node.inputs}.union(body.outputs)
        consts, xs = ([pair for pair in side if pair[1] in read] for side in (self.consts, self.xs))
        body.inputs = [*(v for _, v in consts), *taken, *(v for _, v in xs)]
        inputs = [*(v for v, _ in consts), *(c.outside for c in self.carries), *(v for v, _ in xs)]
        outputs = [*(c.result for c in self.carries), *(v for v, _ in self.ys)]
        kept = {name: self.node.params[name] for name in ("length", "reverse", "unroll")}
        params = {**kept, "num_consts": len(consts), "num_carry": len(taken)}
        scan = replace(self.node, params=params, inputs=inputs, outputs=outputs, bodies=(body,))
        return [*self.before, scan, *self.after]


def _loop(node: Node, inner: bool) -> _Loop:
    consts, carries = _jax.scan_counts(node.params)
    (body,) = node.bodies
    pairs = list(zip(node.inputs, body.inputs, strict=True))
    ends = list(zip(body.outputs, node.outputs, strict=True))
    carried = [_Carry(*pair, *end) for pair, end in zip(pairs[consts:], ends[:carries], strict=False)]
    ys = [(outside, inside) for inside, outside in ends[carries:]]
    index = Index(node.params["length"], {v: inner for inner in body.nodes for v in inner.outputs})
    return _Loop(node, inner, index, pairs[:consts], carried, pairs[consts + carries :], ys, list(body.nodes))


def _window(node: Node) -> int:
    """How many elements of an array a node reads or writes."""
    of = node.outputs[0] if node.name in READS else node.inputs[1 if node.name == "dynamic_update_slice" else 2]
    return math.prod(of.shape)


def _find_index(loop: _Loop, around: _Around) -> None:
    for carry in [] if loop.node.params["reverse"] else loop.carries:
        loop.index.note_counter(carry.taken, carry.given, _start_of_counter(carry.outside, around.makers))
    for outside, inside in loop.xs:
        known = outside in around.stacks
        loop.index.note(inside, around.stacks[outside] if known else first_of_iota(outside, around.makers))
    for node in loop.body if loop.index.firsts else ():
        loop.index.follow(node)


def _start_of_counter(value: Value, makers: Makers) -> int | None:
    while value in makers and makers[value].name == "convert_element_type":
        value = makers[value].inputs[0]
    return whole_number(value)


def _find_accesses(loop: _Loop) -> bool:
    """Whether there are any."""
    for node in loop.body if loop.index.firsts and loop.index.length else ():
        for place in loop.places(node):
            places = (loop.read if node.name in READS else loop.written).setdefault(node.in_shapes[0], [])
            places += [] if place in places else [place]
    return bool(loop.read or loop.written)


def _move_transposes_out(loop: _Loop) -> None:
    """Those of constants, as JAX 0.12 makes them where a loop is batched."""
    outside = {v: around for around, v in loop.consts}
    for node in [node for node in loop.body if node.name == "transpose"]:
        if node.inputs[0] in outside:
            (inside,) = node.outputs
            around = outside[inside] = Value(inside.aval)
            loop.before.append(replace(node, inputs=[outside[node.inputs[0]]], outputs=[around]))
            loop.consts.append((around, inside))
            loop.body.remove(node)


def _without_unchanged(loop: _Loop) -> Iterator[tuple[Value, Value]]:
    """Takes out the carries that nothing changes and nothing reads."""
    for carry in list(loop.carries):
        if carry.given is carry.taken and loop.reads(carry.taken) == 1:
            loop.carries.remove(carry)
            yield carry.result, carry.outside


# An array that is carried, and read and written at one place


def _scan_carry(loop: _Loop, carry: _Carry) -> bool:
    """Scans its rows, if all that is done with it is done at one place."""
    for place in loop.written.get(carry.taken.shape, ()):
        row, start = _row_of(loop, carry.taken, place)
        found = _narrowed(loop, carry, place, start[-1].outputs[0])
        if found is not None:
            nodes, end = found
            loop.body = [*start, *nodes]
            _add_xs(loop, carry.outside, row, place)
            _end(loop, carry, _add_ys(loop, carry.outside, end, place))
            return True
    return False


def _narrowed(loop: _Loop, carry: _Carry, place: Place, row: Value) -> tuple[list[Node], Value] | None:
    """The body, of the row instead of the array, and the row that it gives; None where something else reads the array."""
    rows: Rows = {carry.taken: row}
    sparse: Rows = {}  # of arrays that are zero elsewhere
    new: list[Node] = []
    for node in loop.body:
        on_row = place in loop.index.accesses(node) and rows.keys().isdisjoint(node.inputs[1:])
        if on_row and node.inputs[0] in rows:
            new += _of_row(loop, rows, node, rows[node.inputs[0]], place)
        elif node.name in _SUMS and (terms := _terms(node.inputs, rows, sparse)):
            new.append(replace(node, inputs=terms, outputs=[Value(row.aval)]))
            rows[node.outputs[0]] = new[-1].outputs[0]
        elif not rows.keys().isdisjoint(node.inputs):
            return None
        else:
            new.append(node)
            if on_row and node.out_shapes[0] == carry.taken.shape and _is_sparse(loop, node):
                new += _of_row(loop, sparse, node, zeros(row), place)
    given = [c.given for c in loop.carries] + [inside for _, inside in loop.ys]
    return (new, rows[carry.given]) if carry.given in rows and sum(v in rows for v in given) == 1 else None


def _of_row(loop: _Loop, rows: Rows, node: Node, row: Value, place: Place) -> list[Node]:
    """What a node that reads or writes at a place does to the row there, which is noted."""
    if _covers(node, row):
        update = node.inputs[1 if node.name == "dynamic_update_slice" else 2]
        made, (end,) = made_of(lambda x: lax.reshape(x, row.shape), [update], node)
    else:
        made = loop.index.of_row(node, row, place)
        (end,) = made[-1].outputs
    if node.name in WRITES:
        rows[node.outputs[0]] = end
    return made


def _covers(node: Node, row: Value) -> bool:
    """Whether a node writes all of a row, whatever was there."""
    if node.name == "dynamic_update_slice":
        return node.in_shapes[1] == row.shape
    plain = node.name == "scatter" and node.params["update_jaxpr"] is None
    return plain and node.in_shapes[1] == (1,) and node.inputs[2].nbytes == row.nbytes


def _is_sparse(loop: _Loop, node: Node) -> bool:
    """Whether a node writes into zeros."""
    return node.name in WRITES and loop.index.is_zero(node.inputs[0])


def _terms(inputs: Sequence[Value], rows: Rows, sparse: Rows) -> list[Value]:
    """The rows of a sum of the array and one that is zero elsewhere: so gradients of reads add up."""
    one, two = inputs if inputs[0] in rows else inputs[::-1]
    return [rows[one], sparse[two]] if one in rows and two in sparse else []


# An array that is carried and only added to, at whatever places


def _scan_sum(loop: _Loop, carry: _Carry) -> None:
    """Adds up once the scan is over."""
    whole = carry.outside
    terms = [(node, next(loop.places(node), None)) for node in _terms_of(loop, carry)]
    for node, place in terms if all(place for _, place in terms) else ():
        assert place is not None
        row = Value(ShapedArray(_row_shape(carry.taken, place, 1), carry.taken.aval.dtype))
        rows: Rows = {}
        loop.body += _of_row(loop, rows, node, zeros(row), place)
        whole = _add_ys(loop, whole, rows[node.outputs[0]], place, adds=True)
    if whole is not carry.outside:
        _end(loop, carry, whole)


def _terms_of(loop: _Loop, carry: _Carry) -> list[Node]:
    """The nodes that make what is added, each a write into zeros; none where the array is read otherwise."""
    value, others = carry.taken, []
    while value is not carry.given:
        reader = next((node for node in loop.body if value in node.inputs), None)
        if reader is None or reader.name not in _SUMS or loop.reads(value) != 1:
            return []
        others += [v for v in reader.inputs if v is not value]
        (value,) = reader.outputs
    found: list[Node] = []
    while others:
        node = loop.index.makers.get(others.pop())
        if node is not None and node.name in _SUMS and loop.reads(node.outputs[0]) == 1:
            others += node.inputs
        elif node is not None and _is_sparse(loop, node):
            found.append(node)
        else:
            return []
    return found if loop.reads(carry.given) == 1 else []


# An array that is only read


def _scan_const(loop: _Loop, outside: Value, inside: Value) -> None:
    """Scans the rows that are read at the index."""
    rows: dict[Place, Value] = {}
    body, starts = [], []
    for node in loop.body if inside.shape in loop.read else ():
        reads = node.name in READS and node.inputs[0] is inside and inside not in node.inputs[1:]
        place = next(loop.places(node), None) if reads else None
        if place is not None and place not in rows:
            row, start = _row_of(loop, inside, place)
            rows[place] = start[-1].outputs[0]
            starts += start
            _add_xs(loop, outside, row, place)
        body += [node] if place is None else loop.index.of_row(node, rows[place], place)
    loop.body = [*starts, *body] if rows else loop.body


# What is scanned


def _row_of(loop: _Loop, array: Value, place: Place) -> tuple[Value, list[Node]]:
    """A row as it is scanned, and the nodes that make of it the array's one row in this trip."""
    row = Value(ShapedArray(_row_shape(array, place), array.aval.dtype))
    return row, made_of(lambda x: lax.expand_dims(x, [place.dim]), [row], loop.node)[0]


def _row_shape(array: Value, place: Place, kept: int = 0) -> tuple[int, ...]:
    """The shape of a row, with its dim of size one if that is kept."""
    return array.shape[: place.dim] + (1,) * kept + array.shape[place.dim + 1 :]


def _add_xs(loop: _Loop, array: Value, row: Value, place: Place) -> None:
    """Scans the rows of an array at a place."""

    def stacked(x):
        rows = lax.slice_in_dim(x, place.first, place.first + loop.index.length, axis=place.dim)
        return lax.transpose(rows, [place.dim, *(d for d in range(x.ndim) if d != place.dim)])

    made, (stack,) = made_of(stacked, [array], loop.node)
    loop.before += made
    loop.xs.append((stack, row))
    loop.changed = True


def _add_ys(loop: _Loop, array: Value, row: Value, place: Place, adds: bool = False) -> Value:
    """Has each trip give its row too; what the array is, outside, with these in it, or added to it."""
    made, (given,) = made_of(lambda x: lax.squeeze(x, [place.dim]), [row], loop.node)
    loop.body += made
    stack = Value(ShapedArray((loop.index.length, *given.shape), given.aval.dtype))
    made, (whole,) = made_of(_put_back(loop.index.length, place, adds), [array, stack], loop.node)
    loop.after += made
    loop.ys.append((stack, given))
    loop.changed = True
    return whole


def _put_back(length: int, place: Place, adds: bool) -> Callable[..., jax.Array]:
    """What puts the rows that the trips made into their array, or adds them to it."""

    def put(array, stack):
        order: Sequence[int] = [*range(1, place.dim + 1), 0, *range(place.dim + 1, array.ndim)]
        rows, starts = lax.transpose(stack, order), [place.first if d == place.dim else 0 for d in range(array.ndim)]
        if length == array.shape[place.dim]:
            return array + rows if adds else rows
        return static_updates.put(array, rows, starts, adds)

    return put


def _end(loop: _Loop, carry: _Carry, whole: Value) -> None:
    """Takes out a carry; `whole` is its result."""
    loop.carries.remove(carry)
    for node in loop.after:
        node.outputs = [carry.result if v is whole else v for v in node.outputs]
    loop.ys = [(carry.result if outside is whole else outside, inside) for outside, inside in loop.ys]
