"""Finds `while` loops that count to a known number: they are scans, whose trip count is known before they
run."""

from collections.abc import Callable
from dataclasses import replace

from jax import lax

from shardax.graph.affine import Affines, holds, step_of_counter
from shardax.graph.graph import Graph, Node, Value
from shardax.graph.operands import carries_of
from shardax.rewrites.rewrite import Context, Replacements

_GOING: dict[str, Callable[[range], range]] = {
    "ge": lambda count: range(count.start, count.stop - 1, count.step),
    "gt": lambda count: count,
    "le": lambda count: range(count.start, count.stop + 1, count.step),
    "lt": lambda count: count,
}
"""For what a counter is compared with `stop`, the numbers at which the loop goes on."""
_MIRRORED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}


def counted_whiles(graph: Graph, context: Context) -> Replacements:
    """The scans that such loops are."""
    loops = (node for node in graph.nodes if node.name == "while")
    return Replacements({node: [scan] for node in loops if (scan := _as_scan(node, context.affines))})


def _as_scan(node: Node, affines: Affines) -> Node | None:
    trip_count = _trip_count(node, affines)
    if trip_count is None:
        return None
    first = node.params["cond_nconsts"]
    params = {
        "length": trip_count,
        "reverse": False,
        "unroll": 1,
        "num_consts": node.params["body_nconsts"],
        "num_carry": len(carries_of(node)),
    }
    return replace(
        node, primitive=lax.scan_p, params=params, inputs=node.inputs[first:], bodies=node.bodies[1:]
    )


def _trip_count(node: Node, affines: Affines) -> int | None:
    """How often a loop runs; None where that is not known."""
    name, counter, stop = _test(node, affines)
    cond, body = node.bodies
    r = cond.inputs.index(counter) - node.params["cond_nconsts"] if counter in cond.inputs else -1
    if counter is None or stop is None or r < 0:
        return None
    start = affines.number(node.inputs[carries_of(node)[r]])
    taken, returned = body.inputs[node.params["body_nconsts"] + r], body.outputs[r]
    step = step_of_counter(taken, affines.makers.get(returned))
    if start is None or not step or (step > 0) != (name in ("lt", "le")):
        return None
    going = _GOING[name](range(start, stop, step))
    last = start + len(going) * step
    return len(going) if holds(counter, range(last, last + 1)) else None


def _test(node: Node, affines: Affines) -> tuple[str, Value | None, int | None]:
    """How a condition compares a value with a number, if it does nothing else: the comparison, the value, the
    number.
    """
    cond, carried = node.bodies[0], node.bodies[0].inputs[node.params["cond_nconsts"] :]
    test = cond.nodes[0] if len(cond.nodes) == 1 else None
    if test is None or test.name not in _GOING or test.outputs != cond.outputs:
        return "", None, None
    name, (one, two) = test.name, test.inputs
    if two in carried:
        name, one, two = _MIRRORED[name], two, one
    return name, one, affines.number(two)
