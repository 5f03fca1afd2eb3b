"""Rewrites bodies so that they have rows of an array where they had the array.

    y.at[i].set(f(y[i]))                                  row -> f(row)
    cond(p, lambda: y.at[i].add(1), lambda: y)            row -> cond(p, lambda: row + 1, lambda: row)
    fori_loop(0, m, lambda j, y: y.at[i, j].set(x), y)    the inner loop carries the row

All that is done with such an array is done at one place, and elsewhere it is what some array was when the
iteration began, or zero, as gradients of reads are.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax import lax
from jax.core import ShapedArray

from shardax.graph.graph import Graph, Node, Value
from shardax.graph.indices import READS, WRITES, Index, Place, zeros
from shardax.graph.inline import made_of
from shardax.graph.operands import carries_of, operands_of
from shardax.spmd_rules.registry import adds

SPARSE = "sparse"  # zero elsewhere


@dataclass(eq=False, slots=True)
class Narrowing:
    """The rows that arrays of one type have at a place; the dim is there, of size one.

    `backgrounds` says what the arrays are elsewhere: a name of what they were when the iteration began, or
    `SPARSE`.
    `gone` are those that nothing makes any more.
    """

    index: Index
    place: Place
    aval: ShapedArray
    rows: dict[Value, Value] = field(default_factory=dict)
    backgrounds: dict[Value, Hashable] = field(default_factory=dict)
    gone: set[Value] = field(default_factory=set)

    def run(self, nodes: Sequence[Node]) -> list[Node] | None:
        """The nodes, of rows instead of arrays; None where something else reads an array that is gone."""
        new: list[Node] = []
        for node in nodes:
            made = self._through(node)
            if made is None and not self.gone.isdisjoint(node.inputs):
                return None
            new += [node] if made is None else made
        return new

    def add(self, value: Value, row: Value, background: Hashable, gone: bool = True) -> None:
        self.rows[value], self.backgrounds[value] = row, background
        self.gone.update([value] if gone else [])

    def background(self, value: Value) -> Hashable | None:
        zero = value not in self.backgrounds and self._is_array(value) and self.index.is_zero(value)
        return SPARSE if zero else self.backgrounds.get(value)

    def row(self, value: Value) -> Value:
        return self.rows[value] if value in self.rows else zeros(self.new_row())

    def new_row(self) -> Value:
        shape = (*self.aval.shape[: self.place.dim], 1, *self.aval.shape[self.place.dim + 1 :])
        return Value(ShapedArray(shape, self.aval.dtype))

    def _is_array(self, value: Value) -> bool:
        return value.shape == self.aval.shape and value.aval.dtype == self.aval.dtype

    def _through(self, node: Node) -> list[Node] | None:
        """What a node does to rows; None where it does nothing to them, or something else."""
        if node.bodies:
            return self._through_bodies(node)
        if node.name in READS | WRITES:
            return self._access(node)
        backgrounds = [self.background(v) for v in node.inputs]
        if adds(node) and None not in backgrounds and SPARSE in backgrounds:
            return self._of_rows(node, next((b for b in backgrounds if b != SPARSE), SPARSE))
        alike = len({*backgrounds[1:]}) == 1
        if node.name == "select_n" and not node.in_shapes[0] and backgrounds[1] and alike:
            return self._of_rows(node, backgrounds[1])
        if node.name in ("copy", "optimization_barrier") and any(v in self.rows for v in node.inputs):
            return self._renamed(node)
        return None

    def _of_rows(self, node: Node, background: Hashable) -> list[Node]:
        inputs = [self.row(v) if self.background(v) else v for v in node.inputs]
        made = replace(node, inputs=inputs, outputs=[self.new_row()])
        return self._noted(node, [made], made.outputs[0], background)

    def _noted(self, node: Node, made: list[Node], row: Value, background: Hashable) -> list[Node]:
        """A node of rows, and where no operand is gone the node itself too: what is not read is dropped
        later.
        """
        gone = not self.gone.isdisjoint(node.inputs)
        self.add(node.outputs[0], row, background, gone)
        return made if gone else [node, *made]

    def _renamed(self, node: Node) -> list[Node]:
        inputs, outputs = [self.rows.get(v, v) for v in node.inputs], list(node.outputs)
        for i, value in enumerate(node.inputs):
            if value in self.rows:
                outputs[i] = self.new_row()
                self.add(node.outputs[i], outputs[i], self.backgrounds[value])
        return [replace(node, inputs=inputs, outputs=outputs)]

    def _access(self, node: Node) -> list[Node] | None:
        background, others = self.background(node.inputs[0]), any(v in self.rows for v in node.inputs[1:])
        if background is None or others or self.place not in self.index.accesses(node):
            return None
        row = self.row(node.inputs[0])
        if _covers(node, row):
            update = node.inputs[1 if node.name == "dynamic_update_slice" else 2]
            made, (end,) = made_of(lambda x: lax.reshape(x, row.shape), [update], node)
        else:
            made = self.index.of_row(node, row, self.place)
            (end,) = made[-1].outputs
        return self._noted(node, made, end, background) if node.name in WRITES else made

    # Nodes with bodies

    def _through_bodies(self, node: Node) -> list[Node] | None:
        """What is zero when a loop begins may become something else: then it is left as it is."""
        must = [k for k, v in enumerate(node.inputs) if v in self.gone]
        arrays = [k for k, v in enumerate(node.inputs) if self._is_array(v)]
        may = arrays if node.name == "cond" else carries_of(node)
        carried = [k for k in may if k not in must and self.background(node.inputs[k])]
        ways = [[*must, *carried], must] if carried else [must]
        if not must and not carried and not (node.name == "cond" and any(map(self._is_array, node.outputs))):
            return None
        candidates = (self._with_rows(node, way) for way in ways)
        return next((made for made in candidates if made), None)

    def _with_rows(self, node: Node, mapped: Sequence[int]) -> list[Node] | None:
        """The node, where operands `mapped` are rows."""
        inside, children = [], []
        for body, operands in zip(node.bodies, operands_of(node), strict=True):
            child = Narrowing(self.index, self.place, self.aval)
            for inner, k in zip(body.inputs, operands, strict=False):
                if k in mapped:
                    child.add(inner, self.new_row(), self.background(node.inputs[k]) or "")
            children.append(child)
            inside.append(child.run(body.nodes))
        backgrounds = None if None in inside else self._backgrounds_of_results(node, mapped, children)
        if backgrounds is None or not (backgrounds or mapped):
            return None
        return self._rebuilt(node, mapped, inside, children, backgrounds)

    def _backgrounds_of_results(
        self, node: Node, mapped: Sequence[int], children: Sequence["Narrowing"]
    ) -> dict[int, Hashable] | None:
        """The backgrounds of those results that are rows; None where an array that is gone would be left."""
        backgrounds, carries = {}, carries_of(node)
        givers = list(zip(children, node.bodies, strict=True))[-1 if carries or node.name == "scan" else 0 :]
        for r in range(len(node.outputs)):
            options = {child.background(body.outputs[r]) for child, body in givers}
            carried = r < len(carries) and carries[r] in mapped
            row = node.name == "cond" and len(options) == 1
            row = options == {self.background(node.inputs[carries[r]])} if carried else row
            if row and None not in options:
                backgrounds[r] = options.pop()
            elif carried or any(body.outputs[r] in child.gone for child, body in givers):
                return None
        return backgrounds

    def _rebuilt(
        self, node: Node, mapped, inside, children: Sequence["Narrowing"], backgrounds: Mapping[int, Hashable]
    ) -> list[Node]:
        inputs = [self.row(v) if k in mapped else v for k, v in enumerate(node.inputs)]
        outputs = list(node.outputs)
        for r, background in backgrounds.items():
            outputs[r] = self.new_row()
            self.add(node.outputs[r], outputs[r], background)
        bodies = []
        cond = node.bodies[0] if node.name == "while" else None
        for body, nodes, child in zip(node.bodies, inside, children, strict=True):
            of_rows = backgrounds if len(body.outputs) == len(node.outputs) and body is not cond else ()
            results = [child.row(v) if r in of_rows else v for r, v in enumerate(body.outputs)]
            bodies.append(Graph([child.rows.get(v, v) for v in body.inputs], nodes, results))
        return [replace(node, inputs=inputs, outputs=outputs, bodies=tuple(bodies))]


def _covers(node: Node, row: Value) -> bool:
    """Whether a node writes all of a row, whatever was there."""
    if node.name == "dynamic_update_slice":
        return node.in_shapes[1] == row.shape
    plain = node.name == "scatter" and node.params["update_jaxpr"] is None
    return plain and node.in_shapes[1] == (1,) and node.inputs[2].nbytes == row.nbytes
