"""Finds `while` loops that count to a known number: they are scans, whose trips are known before they run."""

from collections.abc import Callable
from dataclasses import replace

from jax import lax

from shardax.graph.graph import Graph, Node, Value
from shardax.graph.indices import Makers, holds, number_behind, step_of_counter, whole_number
from shardax.graph.operands import carries_of, constants_of
from shardax.rewrites.rewrite import Context, Replacements, makers_of

_GOING: dict[str, Callable[[range], range]] = {
    "ge": lambda count: range(count.start, count.stop - 1, count.step),
    "gt": lambda count: count,
    "le": lambda count: range(count.start, count.stop + 1, count.step),
    "lt": lambda count: count,
}
"""For what a counter is compared with `stop`, the numbers at which the loop goes on."""
_TURNED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}


def counted_whiles(graph: Graph, context: Context) -> Replacements:
    """The scans that such loops are."""
    makers, loops = makers_of(graph), (node for node in graph.nodes if node.name == "while")
    return Replacements({node: [scan] for node in loops if (scan := _as_scan(node, makers))})


def _as_scan(node: Node, makers: Makers) -> Node | None:
    trips = _trips(node, makers)
    if trips is None:
        return None
    first = node.params["cond_nconsts"]
    params = {
        "length": trips,
        "reverse": False,
        "unroll": 1,
        "num_consts": node.params["body_nconsts"],
        "num_carry": len(carries_of(node)),
    }
    return replace(
        node, primitive=lax.scan_p, params=params, inputs=node.inputs[first:], bodies=node.bodies[1:]
    )


def _trips(node: Node, makers: Makers) -> int | None:
    """How often a loop runs; None where that is not known."""
    name, counter, stop = _test(node)
    cond, body = node.bodies
    r = cond.inputs.index(counter) - node.params["cond_nconsts"] if counter in cond.inputs else -1
    if counter is None or stop is None or r < 0:
        return None
    start = number_behind(node.inputs[carries_of(node)[r]], makers)
    made = {v: one for one in body.nodes for v in one.outputs}
    step = step_of_counter(body.inputs[node.params["body_nconsts"] + r], made.get(body.outputs[r]))
    if start is None or not step or (step > 0) != (name in ("lt", "le")):
        return None
    going = _GOING[name](range(start, stop, step))
    last = start + len(going) * step
    return len(going) if holds(counter, range(last, last + 1)) else None


def _test(node: Node) -> tuple[str, Value | None, int | None]:
    """How a condition compares a value with a number, if it does nothing else: the comparison, the value, the
    number.
    """
    cond, constants = node.bodies[0], {inner: outer for outer, inner in constants_of(node)[0]}
    test = cond.nodes[0] if len(cond.nodes) == 1 else None
    if test is None or test.name not in _GOING or test.outputs != cond.outputs:
        return "", None, None
    name, (one, two) = test.name, test.inputs
    if two in cond.inputs and two not in constants:
        name, one, two = _TURNED[name], two, one
    return name, one, whole_number(constants.get(two, two))
