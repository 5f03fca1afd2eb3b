"""What rules say of equations of a jaxpr, for transforms that work on these and have no graph.

Loops and calls are known by what is in them. Of all others the registry's facts are asked, so that primitives
of users count as ours.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from shardax import _jax
from shardax.graph.graph import Node, Value
from shardax.spmd_rules.elementwise import same_shape
from shardax.spmd_rules.registry import MOVES, RULES, Entry, adds

LOOPS = frozenset({"cond", "scan", "while"})
"""Control flow: JAX has no other, and users can't make any."""


def entry_of(eqn) -> Entry | None:
    """Its registration; None of loops, calls and what no rule is for."""
    return RULES.get(eqn.primitive.name)


def casts(eqn) -> bool:
    """Whether it only changes a dtype."""
    entry = entry_of(eqn)
    return entry is not None and entry.casts


def node_of(eqn) -> Node:
    """The equation as a node of no graph, which rules can be asked about."""
    inputs = [Value(v.aval, v.val, True) if isinstance(v, Literal) else Value(v.aval) for v in eqn.invars]
    outputs = [Value(v.aval) for v in eqn.outvars]
    return Node(eqn.primitive, eqn.params, inputs, outputs, eqn, eqn.source_info.name_stack)


def operand_of(eqn) -> Any:
    """The variable that is its one operand, beside literals; None where there are several, or none."""
    operands = [v for v in eqn.invars if not isinstance(v, Literal)]
    return operands[0] if len(operands) == 1 else None


def linear_in(eqn) -> list[frozenset[int]]:
    """Sets of operands, by their numbers, in which it is linear, the others held fixed, but for rounding: the
    sum of its results is that of which all of these operands are sums.

    >>> import jax
    >>> closed = jax.make_jaxpr(lambda x, y: (x * y) + y)(1.0, 2.0)
    >>> [linear_in(eqn) for eqn in closed.jaxpr.eqns]
    [[frozenset({0}), frozenset({1})], [frozenset({0, 1})]]
    """
    entry = entry_of(eqn)
    if entry is None:
        return []
    if entry.casts:
        floats = all(v.aval.dtype.kind in "fcV" for v in (eqn.invars[0], eqn.outvars[0]))
        return [frozenset({0})] if floats else []
    return [frozenset(p.operands) for p in entry.passes_of(node_of(eqn)) if "sum" in p.reductions]


def is_sum(eqn) -> bool:
    """Whether its result is the sum of its operands."""
    return adds(node_of(eqn))


def is_elementwise(eqn) -> bool:
    """Whether each element of its one result is made of those in the same place of its operands, which are of
    that shape, or scalars."""
    entry = entry_of(eqn)
    if entry is None or entry.fuses != "all" or entry.rule is not same_shape or len(eqn.outvars) != 1:
        return False
    shapes, shape = {v.aval.shape for v in eqn.invars}, eqn.outvars[0].aval.shape
    return shape in shapes and shapes <= {shape, ()}


def keeps_order(eqn) -> bool:
    """Whether its result has the elements of its one operand in the same order, each perhaps several times,
    in another shape."""
    entry = entry_of(eqn)
    return (
        entry is not None
        and entry.reads == "view"
        and len(eqn.invars) == 1
        and eqn.params.get("dimensions") is None  # which a reshape would transpose before
    )


def is_transposition(eqn) -> bool:
    """Whether its result has the elements of its operand, dims in another order."""
    entry = entry_of(eqn)
    order = None if entry is None or is_elementwise(eqn) else entry.order(node_of(eqn))
    return order is not None and not keeps_order(eqn)


def moves(eqn) -> bool:
    """Whether its result has the elements of its one operand and nothing else, perhaps cast."""
    entry = entry_of(eqn)
    if entry is None or operand_of(eqn) is None:
        return False
    same = is_elementwise(eqn) and MOVES(0) in entry.passes_of(node_of(eqn))
    return same or entry.casts or keeps_order(eqn) or is_transposition(eqn)


def is_lookup(eqn) -> bool:
    """Whether it reads a table by index."""
    entry = entry_of(eqn)
    return entry is not None and entry.looks_up


def any_inside(holds: Callable[..., bool], eqn) -> bool:
    """Whether something holds for it, or for an equation of its bodies."""
    bodies = (body.eqns for body in jaxprs_in_params(eqn.params)) if _jax.has_bodies(eqn) else ()
    return holds(eqn) or any(any_inside(holds, inner) for eqns in bodies for inner in eqns)


def multiplies(eqn) -> bool:
    """Whether it, or an equation of its bodies, has products."""
    return any_inside(_has_flops, eqn)


def _has_flops(eqn) -> bool:
    entry = entry_of(eqn)
    return entry is not None and entry.flops_at(eqn) is not None


def is_once(eqn) -> bool:
    """Whether what it does happens once, for all devices, as Python is called by `pure_callback`."""
    entry = entry_of(eqn)
    return entry is not None and entry.once


def is_dear(eqn) -> bool:
    """Whether to do it again takes longer than to keep what it makes: products, loops, and what does much for
    each element."""
    return any_inside(lambda e: _has_flops(e) or _loops(e) or _is_heavy(e), eqn)


def _loops(eqn) -> bool:
    return eqn.primitive.name in LOOPS - {"cond"}


def _is_heavy(eqn) -> bool:
    entry = entry_of(eqn)
    return entry is not None and entry.heavy
