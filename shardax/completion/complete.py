"""Sharding completion: every value gets a sharding, from the few that the user gave (GSPMD, section 3.5).

Shardings spread along factors, in both directions, to a fixed point. They are only refined: a dim keeps the
axes that it has. The worklist is ordered by level, then by place in the program, so the result depends on
nothing else.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache

from shardax.completion.at_rest import successors, updated_at_rest
from shardax.completion.blocks import Block, Pattern, Worklist
from shardax.completion.cells import ALL, DATA, SPREAD_DATA, SPREAD_STATE, Cell, Cells
from shardax.completion.edges import ELEMENTWISE, successor_edges
from shardax.completion.node_classes import NodeClass, NodeClasses
from shardax.completion.repeats import REST, groups
from shardax.completion.wishes import wishes
from shardax.graph import annotations
from shardax.graph.connected import parts
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.state import state
from shardax.ledger.collectives import array_text
from shardax.sharding import Axes, AxisSizes, Sharding, at_rest, replicated, trivial_axes

UPDATED_AT_REST = "state is updated as it rests"

Notes = Sequence[tuple[Node, annotations.Annotation]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the axes of a dim came from: the words of an annotation, with its node if it has one, or a node
    and the value whose axes it passed on.
    """

    source: str
    node: Node | None = None
    value: Value | None = None


@dataclass(eq=False)
class Completion:
    """The sharding of every value, where each came from, and the parts of the program that were completed
    alike.

    `wished`: what it would be if products had their way, of values of which it is something else.
    `notes`: the program's annotations. `resting`: for each argument how it rests between calls, None where
    no sharding is requested.
    """

    graph: Graph
    sizes: AxisSizes
    items: "Items"
    blocks: list[Block]
    homes: "_Homes"
    notes: Notes
    resting: list[Sharding | None]
    shardings: dict[Value, Sharding] = field(default_factory=dict)
    origins: dict[tuple[Value, int], Origin] = field(default_factory=dict)
    wished: dict[Value, Sharding] = field(default_factory=dict)

    def __str__(self):
        """A line for each value that is no scalar, by the primitive that makes it, bodies before what they
        are of. Annotations that change nothing are left out.

            argument             f32[8,16]      P('x', None)
            dot_general          f32[8,64]      P('x', 'y')
        """
        return "\n".join(self._lines(self.graph))

    def _lines(self, graph: Graph, indent: str = "") -> Iterator[str]:
        makers = [("argument", value) for value in graph.inputs]
        yield from (self._line(name, value, indent) for name, value in makers if value.shape)
        for node in graph.nodes:
            for body in node.bodies:
                yield f"{indent}{node.name} of"
                yield from self._lines(body, indent + "  ")
            first = node.inputs[:1] if annotations.of_node(node) else []
            changes = [v for v in node.outputs if not first or self.sharding(first[0]) != self.sharding(v)]
            yield from (self._line(node.name, value, indent) for value in changes if value.shape)

    def _line(self, name: str, value: Value, indent: str) -> str:
        return f"{indent}{name:<20} {array_text(value.aval):<14} {self.sharding(value)}"

    def sharding_key(self, block: Block) -> tuple[int, ...]:
        """A key that is equal for alike blocks in which every value has the same sharding."""
        return tuple(map(id, map(self.shardings.__getitem__, block.values)))

    def splits(self) -> set[tuple[int, Axes]]:
        """(size, axes) of every dim that is split."""
        alike = {(block.pattern, self.sharding_key(block)): block for block in self.blocks}
        values = {v for block in alike.values() for v in block.values}
        return {
            (n, axes) for v in values for n, axes in zip(v.shape, self.sharding(v).dims, strict=True) if axes
        }

    def sharding(self, value: Value) -> Sharding:
        return self.shardings.get(value) or replicated(len(value.shape))

    def of_several(self) -> "Completion":
        """The same without axes of one device in dims: they split nothing, and how a program runs does not
        depend on them. (What rests between calls is still said as the user said it.)
        """
        trivial = trivial_axes(self.sizes)
        if not trivial:
            return self
        without = cache(lambda sharding: sharding.without(trivial))  # one object for one, as blocks count on
        shardings = {v: without(sharding) for v, sharding in self.shardings.items()}
        wished = {v: without(sharding) for v, sharding in self.wished.items()}
        return replace(self, shardings=shardings, wished=wished)

    def origin(self, value: Value, dim: int) -> Origin | None:
        for block, place in self.homes.get(value, ()):
            if (place, dim) in block.state.learned:
                edge, at = block.state.learned[place, dim]
                _, wires, _ = block.pattern.edges[edge]
                node = self.items.nodes[block.items[block.pattern.item_of[edge]]]
                return Origin("", node, block.values[wires[at]])
        return self.origins.get((value, dim))

    def why(self, value: Value, dim: int) -> tuple[Origin, ...]:
        """The chain of facts that led to the axes of a dim, from the last to the annotation."""
        chain = []
        while (origin := self.origin(value, dim)) is not None and origin not in chain:
            chain.append(origin)
            if origin.value is None:
                break
            value, dim = self.learned_from(origin, value, dim)
        return tuple(chain)

    def learned_from(self, origin: Origin, value: Value, dim: int) -> tuple[Value, int]:
        """The value, and its dim, from which a dim of `value` learned its axes."""
        assert origin.value is not None
        axes, dims = set(self.sharding(value).dims[dim]), self.sharding(origin.value).dims
        return origin.value, next((d for d, have in enumerate(dims) if axes.intersection(have)), 0)


class Items:
    """What edges connect, in program order: the nodes, then one for each result that succeeds a
    donated argument.
    """

    def __init__(self, graph: Graph, notes: Notes, reuse: bool):
        self.node_classes = node_classes = NodeClasses()
        self.nodes: list[Node] = list(graph.nodes)
        self.count = len(self.nodes)
        pairs = [node_classes.of(node) for node in graph.nodes]
        for edge in successor_edges(graph, notes):
            values = edge.values
            key = ("succeeds", values[0].shape)
            node_class = node_classes.classes.get(key) or node_classes.add(key, None, [edge], values)
            self.nodes.append(edge.node)
            pairs.append((node_class, values))
        self.classes: list[NodeClass] = [node_class for node_class, _ in pairs]
        self.values: list[list[Value]] = [values for _, values in pairs]
        self.numbers = [node_class.number for node_class in self.classes]
        rest = [REST] * len(pairs)
        self.groups = groups(self.numbers, self.tensors(), self.values, set(graph.inputs)) if reuse else rest

    def tensors(self) -> list[Sequence[Value]]:
        return [
            node_class.tensors(values) for node_class, values in zip(self.classes, self.values, strict=True)
        ]


def complete(
    graph: Graph, arguments: Sequence[Sharding | None], sizes: AxisSizes, reuse: bool = True
) -> Completion:
    """Completes the shardings of a graph.

    Args:
      graph: the program, annotations in it.
      arguments: for each input the sharding that it is committed to, or None.
      sizes: the mesh's axis sizes.
      reuse: whether blocks that are alike, as unrolled layers are, are completed once. The result is the
        same.
    """
    notes = list(annotations.among(graph.walk()))
    cells, items = Cells(sizes), Items(graph, notes, reuse)
    blocks = _blocks(items, cells)
    homes = _Homes(blocks)
    done = Completion(graph, sizes, items, blocks, homes, notes, _resting(graph, arguments, notes, sizes))
    requests = list(_requests(graph, done))
    done.origins |= {
        (g.value, d): Origin(g.source, g.node) for g in requests for d, a in enumerate(g.dims) if a
    }
    state_values = _state(graph, notes)
    _spread(Worklist(blocks, homes), requests, state_values, cells)
    done.shardings.update((g.value, Sharding(g.cell_dims)) for g in requests)
    done.shardings.update(_shardings(blocks, cells))
    done.wished.update(_wished(done, requests, state_values, cells))
    _update_at_rest(done, graph, cells, homes.home, {g.value for g in requests if any(g.closed)})
    return done


def _shardings(blocks: Sequence[Block], cells: Cells) -> Iterator[tuple[Value, Sharding]]:
    """Every value's, once all has spread."""
    for block in blocks:
        if block.state.shardings is None:  # blocks in one state share the list
            known = zip(block.live().cells, block.values, strict=True)
            block.state.shardings = [cells.sharding(cell or cells.blank(len(v.shape))) for cell, v in known]
            block.state.learned = block.live().learned
        yield from zip(block.values, block.state.shardings, strict=True)


def _wished(
    done: Completion, requests: Sequence["_Request"], state: set[Value], cells: Cells
) -> dict[Value, Sharding]:
    """What completion gives if the user annotates what products wish, of the values of which it gives
    something else without."""
    taken = {g.value for g in requests}
    wished = [
        _Request(value, dims, "", None)
        for value, dims in wishes(done.graph, done.items.node_classes, done.sharding).items()
        if value not in taken
    ]
    if not wished:
        return {}
    blocks = [Block(b.pattern, b.items, b.values, b.place, cells) for b in done.blocks]
    _spread(Worklist(blocks, _Homes(blocks)), [*wished, *requests], state, cells)
    found = dict(_shardings(blocks, cells))
    return {v: sharding for v, sharding in found.items() if sharding != done.shardings[v]}


def _spread(worklist: Worklist, requests: Sequence["_Request"], state: set[Value], cells: Cells) -> None:
    """Spreads the annotations in phases, see `cells`."""
    ours = [(g, cells.number(Cell(g.cell_dims, g.closed, g.argument in state))) for g in requests]
    for g, cell in ours:
        worklist.tell(g.value, cell, g.argument not in state)
    worklist.run(SPREAD_DATA, ELEMENTWISE + 1)
    for g, cell in ours:
        if g.argument in state:
            worklist.tell(g.value, cell)
    worklist.run(SPREAD_STATE, ELEMENTWISE + 1)
    worklist.run(DATA)
    worklist.release()
    worklist.run(ALL)


class _Homes(Mapping):
    """The blocks that know a value, each with its place in it."""

    def __init__(self, blocks: Sequence[Block]):
        self.home: dict[Value, Block] = {}
        self.shared: dict[Value, list[tuple[Block, int]]] = {}
        for block in blocks:
            self.home.update(dict.fromkeys(block.values, block))
            for place in block.pattern.shared_places:
                self.shared.setdefault(block.values[place], []).append((block, place))

    def __getitem__(self, value: Value) -> Sequence[tuple[Block, int]]:
        if value in self.shared:
            return self.shared[value]
        block = self.home[value]
        return [(block, block.place[value])]

    def __iter__(self):
        return iter(self.home)

    def __len__(self):
        return len(self.home)


def _blocks(items: Items, cells: Cells) -> list[Block]:
    """The blocks of a program: those that have equals, and one of all the rest."""
    numbers, members = items.numbers, dict[int, list[int]]()
    for i, block in enumerate(items.groups):
        members.setdefault(block, []).append(i)
    parts = [_Part(members[block], items, numbers) for block in sorted(members) if block != REST]
    counts = Counter(part.wiring for part in parts)
    alone = [part.items for part in parts if counts[part.wiring] == 1]
    parts = [part for part in parts if counts[part.wiring] > 1]
    parts.append(_Part(sorted(itertools.chain(*alone, members.get(REST, ()))), items, numbers))
    known = Counter(itertools.chain.from_iterable([part.place for part in parts]))
    shared = {value for value, times in known.items() if times > 1 and value.shape}
    patterns: dict[tuple, Pattern] = {}
    return [part.block(patterns, shared, cells) for part in parts]


class _Part:
    """The items of a block, and the places of its values. `wiring` is equal for parts whose items have the
    same classes and whose values are at the same places.
    """

    def __init__(self, mine: list[int], items: Items, numbers: Sequence[int]):
        self.items, self.place = mine, {}
        place = self.place
        rows = tuple([tuple([place.setdefault(v, len(place)) for v in items.values[i]]) for i in mine])
        self.wiring = _Wiring(tuple([numbers[i] for i in mine]), rows)
        self.classes = items.classes

    def block(self, patterns: dict[tuple, Pattern], shared: set[Value], cells: Cells) -> Block:
        values = list(self.place)
        key = (self.wiring, tuple(map(shared.__contains__, values)))
        if key not in patterns:
            blanks = [0 if v.is_literal else cells.blank(len(v.shape)) for v in values]
            patterns[key] = Pattern([self.classes[i] for i in self.items], self.wiring.rows, blanks, key[1])
        return Block(patterns[key], self.items, values, self.place, cells)


class _Wiring:
    """Node classes by number, and the places of each one's values; hashed once."""

    def __init__(self, classes: tuple[int, ...], rows: tuple[tuple[int, ...], ...]):
        self.classes, self.rows, self.hash = classes, rows, hash((classes, rows))

    def __hash__(self):
        return self.hash

    def __eq__(self, other):
        return isinstance(other, _Wiring) and (self.classes, self.rows) == (other.classes, other.rows)


def _update_at_rest(
    done: Completion, graph: Graph, cells: Cells, home: dict[Value, Block], fixed: set[Value]
) -> None:
    inside = {node.inputs[0]: node.outputs[0] for node, _ in reversed(done.notes)}
    rest = dict(zip(graph.inputs, done.resting, strict=True))
    resting = cache(lambda sharding, shape: at_rest(sharding, shape, done.sizes))
    updates = []
    for argument, result in successors(graph, done.notes):
        completed = done.sharding(inside.get(argument, argument))
        sharding = rest[argument] or resting(completed, argument.shape)
        updates += [(result, sharding)] if sharding != completed else []
    for value, sharding in updated_at_rest(updates, done.blocks, home, fixed).items():
        done.shardings[value] = cells.sharding(cells.number(Cell(sharding.dims)))
        done.origins |= {(value, d): Origin(UPDATED_AT_REST) for d, axes in enumerate(sharding.dims) if axes}


def _state(graph: Graph, notes: Notes) -> set[Value]:
    """The arguments that come back, and as what: the results of their types that annotations place. And what
    annotations say is stored of them.

    Data and the annotations inside go first, state second: where both request an axis, as in fully sharded
    data parallelism, the data flows split and the state is only stored split. (Shardy leaves such priorities
    to the user.)
    """
    succeeded = {argument for argument, _ in successors(graph, notes)}
    arguments = {v for inputs, outputs in parts(graph) for v in _coming_back(inputs, outputs, succeeded)}
    alike, outputs = {(v.shape, v.aval.dtype) for v in arguments}, set(graph.outputs)
    placed = [n for n, note in notes if note.is_of_result and n.outputs[0] in outputs]
    new = (n.inputs[0] for n in placed if (n.in_shapes[0], n.inputs[0].aval.dtype) in alike)
    return arguments.union(new, (n.inputs[0] for n, note in notes if note.role == "state"))


def _coming_back(inputs: Sequence[Value], outputs: Sequence[Value], succeeded: Set[Value]) -> Iterator[Value]:
    types, results = ([(v.shape, v.aval.dtype) for v in values] for values in (inputs, outputs))
    known = [i for i, v in enumerate(inputs) if v in succeeded]
    return (inputs[i] for i in state(types, set(results), known))


def _resting(
    graph: Graph, arguments: Sequence[Sharding | None], notes: Notes, sizes: AxisSizes
) -> list[Sharding | None]:
    """How each argument rests between calls: as it is committed, else nearest to its annotation; None where
    nothing requests one.
    """
    inputs, rest = set(graph.inputs), dict(zip(graph.inputs, arguments, strict=True))
    for node, note in notes:
        value = node.inputs[0]
        if value in inputs and rest[value] is None and None not in note.dims:
            rest[value] = at_rest(Sharding(tuple(d or () for d in note.dims)), value.shape, sizes)
    return [rest[value] for value in graph.inputs]


@dataclass(frozen=True, slots=True)
class _Request:
    """The sharding that an annotation requests of a value. `argument` is the input that it annotates, if it
    annotates one.
    """

    value: Value
    dims: Sequence[Axes | None]
    source: str
    argument: Value | None
    node: Node | None = None

    @property
    def cell_dims(self) -> tuple[Axes, ...]:
        return tuple([axes or () for axes in self.dims])

    @property
    def closed(self) -> tuple[bool, ...]:
        return tuple([axes is not None for axes in self.dims])


def _requests(graph: Graph, done: Completion) -> Iterable[_Request]:
    """What every annotation requests. An annotated argument itself rests in the nearest sharding that divides
    it.
    """
    for i, (value, sharding) in enumerate(zip(graph.inputs, done.resting, strict=True)):
        if sharding is not None:
            yield _Request(value, sharding.dims, f"argument {i} rests in it", value)
    for node, note in done.notes:
        yield _Request(node.outputs[0], note.dims, note.source, node.inputs[0], node)
