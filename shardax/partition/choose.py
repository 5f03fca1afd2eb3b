"""choose: how every node of a program runs, for the least seconds in all. Pure data out: the decisions.

The program is laid out as sites and solved (`search.py`). What loops carry may also take the layouts in which
their bodies give it back: to know these, all up to the last loop is laid out before. What the innermost of
nested loops carries so, the one around it gets back only in the next round. Whether the iterations of a map
are split is tried for one map after the other: the devices are at different iterations then, so that all ways
inside are others.
"""

import math
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import replace

from shardax.completion.complete import Completion
from shardax.graph.graph import Graph, Node, Value
from shardax.partition.alternatives import Alternatives, stored
from shardax.partition.decisions import Decisions
from shardax.partition.replay import Replay
from shardax.partition.search import Search
from shardax.partition.sites import Layouts
from shardax.partition.solve import Solution
from shardax.sharding import AxisSizes, Layout
from shardax.spmd_rules.registry import Split

Splits = dict[Node, Split | None]
Returned = dict[Hashable, Layouts]


def choose(
    graph: Graph,
    completion: Completion,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    allowed: Callable[..., bool] | None = None,
    byte_price: float = 0.0,
    idle_axes: bool | str = True,
) -> Decisions:
    """Chooses how every node of a graph runs, given the layouts that its inputs come in and its outputs must
    leave in.

    `allowed`: under strict mode, whether what has one of these names may be sent: primitives, lines, kinds of
    collectives. Nothing else is resharded that nobody requested, wherever there is another way. `byte_price`:
    picoseconds for each byte of what is made, on one device: the multiplier by which less memory is bought
    for more time. `idle_axes`: as of `Options`.
    """
    alternatives = Alternatives(graph, completion, idle_axes)

    def lay_out(splits: Splits, returned: Returned, whole: bool = True) -> Search:
        search = Search(graph, completion, alternatives, splits, returned, allowed, byte_price)
        search.program(*((graph, inputs, outputs) if whole else (_to_last_loop(graph), inputs, ())))
        return search

    rounds = _nesting(graph)
    search, solution = _searched(lay_out, {}, rounds)
    for node, options in search.maps.items():
        now = search.splits.get(node, options[0] if options else None)
        for other in (None, *options):
            if other != now:
                tried, result = _searched(lay_out, {**search.splits, node: other}, rounds)
                if result.price < solution.price:
                    search, solution, now = tried, result, other
    return replayed(search, solution, graph, inputs, outputs)


def replayed(
    search: Search, solution: Solution, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Decisions:
    """The decisions of a solved search, and what they cost. That may be a little less than the search knew,
    which looks at few copies of a value together. Under strict mode the price has what is refused, too."""
    replay = Replay(search)
    decisions = replay.graph(graph, inputs, outputs)
    price = solution.price if search.avoided else search.own_price() + replay.price
    return replace(decisions, price=price, gap=max(0.0, price - solution.bound))


def memory(decisions: Decisions, sizes: AxisSizes) -> int:
    """The bytes on each device of all that is made and stored, copies in other layouts among it, were nothing
    freed.
    """
    return _made_and_resharded(decisions, sizes, stored(decisions.graph))


def _made_and_resharded(decisions: Decisions, sizes: AxisSizes, kept: Set[Value]) -> int:
    stored_values, inside = (
        [(v, m.target) for v, m in zip(decisions.graph.outputs, decisions.outputs, strict=True) if m.needed],
        0,
    )
    for node, decision in decisions.pairs():
        stored_values += [
            (v, m.target) for v, m in zip(node.inputs, decision.reshards, strict=True) if m.needed
        ]
        stored_values += [
            (v, layout) for v, layout in zip(node.outputs, decision.results, strict=True) if v in kept
        ]
        inside += sum(_made_and_resharded(body, sizes, kept) for body in decision.bodies)
    return inside + sum(math.prod(layout.local_shape(sizes)) * v.itemsize for v, layout in stored_values)


def _searched(lay_out: Callable[..., Search], splits: Splits, rounds: int) -> tuple[Search, Solution]:
    returned: Returned = {}
    for _ in range(rounds):
        left = lay_out(splits, returned, whole=False).left
        if left == returned:
            break
        returned = left
    search = lay_out(splits, returned)
    return search, search.solve()


def _to_last_loop(graph: Graph) -> Graph:
    """As much of a program as says in which layouts its loops give back what they carry."""
    count = max((i for i, node in enumerate(graph.nodes, 1) if node.bodies), default=0)
    return Graph(graph.inputs, graph.nodes[:count])


def _nesting(graph: Graph) -> int:
    """How deep bodies are nested."""
    return max((1 + _nesting(body) for node in graph.nodes for body in node.bodies), default=0)
