"""Integers that are affine in where they stand: c + a * the position along a dim + b * the iteration of a
scan.

    jnp.arange(8)[:, None] - 1           position along dim 0, less 1
    i, of fori_loop(3, 9, ...)           3 + iteration
    where(i < 0, i + 8, i)               i, where that is never below 0
    what a scan stacks of its index      the iteration is the position along dim 0

Each value of a graph and of its bodies is looked at once, in program order. A form counts only where the
dtype holds all the numbers, because nothing wraps then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from shardax.graph.graph import Graph, Node, Value
from shardax.graph.operands import carries_of, constants_of

Makers = Mapping[Value, Node]
_FEW = 16  # elements of a literal that are looked at


@dataclass(frozen=True, eq=False)
class Iteration:
    """The number of a scan's iteration, of so many: counted by what the scan goes over, whichever end is
    first."""

    length: int


Variable = int | Iteration
"""A dim, which stands for the position along it, or an iteration."""


@dataclass(frozen=True)
class Affine:
    """The number `first`, plus `steps[v]` times each variable v; no step is 0.

    >>> print(Affine(3) - Affine(0, {1: 2}))
    3 - 2*i1
    """

    first: int
    steps: Mapping[Variable, int] = field(default_factory=dict)

    def __str__(self):
        letters = {v: "t" if isinstance(v, Iteration) else f"i{v}" for v in self.steps}
        terms = [
            (letters[v], f" {'+' if n > 0 else '-'} {abs(n)}*{letters[v]}") for v, n in self.steps.items()
        ]
        return "".join([str(self.first), *(term for _, term in sorted(terms))])

    @property
    def number(self) -> int | None:
        """What it is everywhere; None where that differs."""
        return None if self.steps else self.first

    def __add__(self, other: "Affine") -> "Affine":
        steps = {v: self.steps.get(v, 0) + other.steps.get(v, 0) for v in (*self.steps, *other.steps)}
        return Affine(self.first + other.first, {v: step for v, step in steps.items() if step})

    def __neg__(self) -> "Affine":
        return self * -1

    def __sub__(self, other: "Affine") -> "Affine":
        return self + -other

    def __mul__(self, by: int) -> "Affine":
        return Affine(self.first * by, {v: step * by for v, step in self.steps.items() if by})

    def reversed(self, sizes: Mapping[Variable, int]) -> "Affine":
        """The same numbers, where these variables, of so many values, count from the other end."""
        first = sum(step * (sizes[v] - 1) for v, step in self.steps.items() if v in sizes)
        steps = {v: -step if v in sizes else step for v, step in self.steps.items()}
        return Affine(self.first + first, steps)

    def renamed(self, new: Mapping[Variable, Variable]) -> "Affine":
        """The same numbers of other variables."""
        return Affine(self.first, {new.get(v, v): step for v, step in self.steps.items()})

    def range(self, shape: Sequence[int]) -> range:
        """From the smallest to the largest number in an array of this shape."""
        sizes = {v: v.length if isinstance(v, Iteration) else shape[v] for v in self.steps}
        if 0 in sizes.values() or 0 in shape:
            return range(0)
        ends = [step * (sizes[v] - 1) for v, step in self.steps.items()]
        low, high = sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)
        return range(self.first + low, self.first + high + 1)


class Affines:
    """The affine values of a graph and of its bodies, what is the same everywhere included.

    `outer` is of the graph around it. `makers` has the node of each value, `iterations` the iteration of each
    scan.
    """

    def __init__(self, graph: Graph, outer: "Affines | None" = None):
        self.makers: dict[Value, Node] = {}
        self.iterations: dict[Node, Iteration] = {}
        self.graphs: set[Graph] = set()
        self._forms: dict[Value, Affine] = {}
        for value in graph.inputs:
            self._note(value, outer and outer.of(value))
        self._follow_all(graph)

    def of(self, value: Value) -> Affine | None:
        return _literal(value) if value.is_literal else self._forms.get(value)

    def number(self, value: Value) -> int | None:
        """What all elements of a value are."""
        form = self.of(value)
        return form and form.number

    def element(self, value: Value) -> Value:
        """What all elements of a value are, if it was made of a scalar."""
        while (node := self.makers.get(value)) is not None and node.name in ("broadcast_in_dim", "reshard"):
            (value, *_) = node.inputs
        return value

    def _note(self, value: Value, form: Affine | None) -> None:
        if form is not None and holds(value, form.range(value.shape)):
            steps = {v: n for v, n in form.steps.items() if isinstance(v, Iteration) or value.shape[v] != 1}
            self._forms[value] = Affine(form.first, steps)

    def _follow_all(self, graph: Graph) -> None:
        self.graphs.add(graph)
        for node in graph.nodes:
            self.makers.update(dict.fromkeys(node.outputs, node))
            _FOLLOW.get(node.name, Affines._follow)(self, node)

    def _follow(self, node: Node) -> None:
        if node.name in _FORMS and len(node.outputs) == 1:
            self._note(node.outputs[0], _FORMS[node.name](node, *map(self.of, node.inputs)))
        for body, constants in zip(node.bodies, constants_of(node), strict=True):
            for outside, inside in constants:
                self._note(inside, self.of(outside))
            self._follow_all(body)

    def _follow_barrier(self, node: Node) -> None:
        for before, after in zip(node.inputs, node.outputs, strict=True):
            self._note(after, self.of(before))

    def _follow_branches(self, node: Node) -> None:
        """A result is what all branches give; what may be anything, as what one branch saves for its way back
        is in the others, agrees with all.
        """
        self._follow(node)
        for result, *branches in zip(node.outputs, *(body.outputs for body in node.bodies), strict=True):
            makers = [self.makers.get(self.element(v)) for v in branches]
            forms = [
                self.of(v)
                for v, maker in zip(branches, makers, strict=True)
                if maker is None or maker.name != "empty2"
            ]
            self._note(result, forms[0] if forms and all(form == forms[0] for form in forms) else None)

    def _follow_scan(self, node: Node) -> None:
        (body,), carries = node.bodies, carries_of(node)
        iteration = self.iterations[node] = Iteration(node.params["length"])
        makers = {v: inner for inner in body.nodes for v in inner.outputs}
        for outside, inside in zip(node.inputs[carries.stop :], body.inputs[carries.stop :], strict=True):
            self._note(inside, _row(self.of(outside), iteration))
        for r, k in enumerate(carries):
            taken, returned, start = body.inputs[k], body.outputs[r], self.of(node.inputs[k])
            step = 0 if returned is taken else step_of_counter(taken, makers.get(returned))
            if start is not None and step is not None:
                counter = start + Affine(0, {iteration: step} if step else {})
                reverse = node.params["reverse"]
                self._note(taken, counter.reversed({iteration: iteration.length}) if reverse else counter)
                self._note(node.outputs[r], start + Affine(step * iteration.length))
        self._follow(node)
        for outside, inside in zip(node.outputs[len(carries) :], body.outputs[len(carries) :], strict=True):
            self._note(outside, _stacked(self.of(inside), iteration))


def step_of_counter(taken: Value, node: Node | None) -> int | None:
    """What a node adds to a value to make it anew."""
    if node is None or node.name not in ("add", "sub") or taken not in node.inputs:
        return None
    first = node.inputs[0] is taken
    by = _literal(node.inputs[1] if first else node.inputs[0])
    if by is None or not (first or node.name == "add"):
        return None
    return by.first if node.name == "add" else -by.first


def holds(value: Value, numbers: range) -> bool:
    """Whether a value's dtype holds all of these, in ascending order, without wrapping."""
    dtype = value.aval.dtype
    if dtype == np.bool_:
        return not numbers or (0 <= numbers[0] and numbers[-1] <= 1)
    if not jnp.issubdtype(dtype, jnp.integer):
        return False
    return not numbers or (jnp.iinfo(dtype).min <= numbers[0] and numbers[-1] <= jnp.iinfo(dtype).max)


def _literal(value: Value) -> Affine | None:
    """A number, or one in all of a small array that is at hand."""
    if not value.is_literal or not holds(value, range(0)):
        return None
    if value.shape and not (isinstance(value.literal, np.ndarray) and 0 < value.literal.size <= _FEW):
        return None
    numbers = np.unique(value.literal)
    return Affine(int(numbers[0])) if len(numbers) == 1 else None


# Scans


def _row(stack: Affine | None, iteration: Iteration) -> Affine | None:
    """What is scanned: the position along dim 0 is the iteration."""
    if stack is None:
        return None
    return stack.renamed({v: v - 1 if v else iteration for v in stack.steps if isinstance(v, int)})


def _stacked(row: Affine | None, iteration: Iteration) -> Affine | None:
    if row is None:
        return None
    return row.renamed({iteration: 0, **{v: v + 1 for v in row.steps if isinstance(v, int)}})


# What a node makes of affine operands


def _same(node: Node, x: Affine | None, *_) -> Affine | None:
    return x


def _clamp(node: Node, low: Affine | None, x: Affine | None, high: Affine | None) -> Affine | None:
    """What is within the bounds everywhere."""
    if low is None or x is None or high is None or low.number is None or high.number is None:
        return None
    numbers = x.range(node.out_shapes[0])
    return x if not numbers or (low.number <= numbers[0] and numbers[-1] <= high.number) else None


def _iota(node: Node, *_) -> Affine:
    return Affine(0, {node.params["dimension"]: 1})


def _lt(node: Node, x: Affine | None, y: Affine | None) -> Affine | None:
    """A truth that is the same everywhere."""
    if x is None or y is None or not (numbers := (x - y).range(node.out_shapes[0])):
        return None
    return Affine(int(numbers[-1] < 0)) if numbers[-1] < 0 or numbers[0] >= 0 else None


def _mul(node: Node, x: Affine | None, y: Affine | None) -> Affine | None:
    if x is None or y is None or (x.steps and y.steps):
        return None
    return x * y.first if x.steps else y * x.first


def _reshape(node: Node, x: Affine | None, *_) -> Affine | None:
    """Dims of size one may come and go."""
    if x is None or not any(isinstance(v, int) for v in x.steps):
        return x
    if node.name == "reshape" and node.params["dimensions"] is not None:
        return None
    old, new = ({d: n for d, n in enumerate(s) if n != 1} for s in (node.in_shapes[0], *node.out_shapes))
    return x.renamed(dict(zip(old, new, strict=True))) if [*old.values()] == [*new.values()] else None


_FOLLOW: dict[str, Callable[[Affines, Node], None]] = {
    "cond": Affines._follow_branches,
    "optimization_barrier": Affines._follow_barrier,
    "scan": Affines._follow_scan,
}
_FORMS: dict[str, Callable[..., Affine | None]] = {
    "add": lambda node, x, y: x and y and x + y,
    "broadcast_in_dim": lambda node, x, *_: (
        x and x.renamed(dict(enumerate(node.params["broadcast_dimensions"])))
    ),
    "clamp": _clamp,
    "convert_element_type": _same,
    "copy": _same,
    "iota": _iota,
    "lt": _lt,
    "mul": _mul,
    "neg": lambda node, x: x and -x,
    "reshape": _reshape,
    "rev": lambda node, x: x and x.reversed({d: node.in_shapes[0][d] for d in node.params["dimensions"]}),
    "select_n": lambda node, which, *cases: (
        cases[which.number] if which and which.number is not None else None
    ),
    "squeeze": _reshape,
    "sub": lambda node, x, y: x and y and x - y,
}
