"""Owed: a pending value owes the contributions that it was added up of, whatever it went through."""

from collections.abc import Mapping

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.graph.graph import Node, Value
from shardax.partition.decisions import Decision, Decisions, Origin, Reshard
from shardax.partition.owed import Contributions, Owed, united
from tests.choices import layout
from tests.graphs import graph, the

pytestmark = pytest.mark.quick

NOWHERE = layout(P(), (8, 8))
SUM_X, SUM_Y, BOTH = (layout(P(), (8, 8), axes) for axes in ("x", "y", ("x", "y")))


def single(number: int) -> Owed:
    (node,) = graph(jnp.sin, (8,)).nodes
    return Owed(Origin(node, Decision((), (), ())), number)


def numbers(owed: Owed | None) -> list[int]:
    """Those of the contributions that are owed, in the order in which they are told."""
    if owed is None:
        return []
    found, todo = {owed}, [owed]
    while todo:
        new = set(todo.pop().parts) - found
        found |= new
        todo += new
    parts = {id(part.origin): part.number for part in found if not part.parts}
    return [parts[id(origin)] for origin in owed.origins()]


def decision(node: Node, operands, results, bodies=()) -> Decision:
    return Decision(tuple(Reshard(x, x) for x in operands), tuple(operands), tuple(results), bodies=bodies)


def ran(program, layouts: Mapping[int, tuple]) -> tuple[Contributions, list[Value]]:
    """Runs the nodes of a program as emission does. `layouts`: of a node by its number those of operands and
    result, if any is pending."""
    makers: dict[Value, Origin] = {}
    known = Contributions(makers)
    for i, node in enumerate(program.nodes):
        *operands, result = layouts.get(i, [NOWHERE] * (len(node.inputs) + 1))
        how = decision(node, operands, [result])
        makers[node.outputs[0]] = Origin(node, how)
        known.note(node, how)
    return known, [node.outputs[0] for node in program.nodes]


def two_products(x, u, v):
    return x @ u + x @ v


SQUARES = ((8, 8),) * 3


def test_nothing_is_owed_of_nothing_and_one_is_itself():
    one = single(3)
    assert united([]) is None and united([one]) is one and united([one, one]) is one


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_contributions_are_told_newest_first_and_once(order):
    some = [single(number) for number in range(3)]
    both = united([some[order[0]], some[order[1]]])
    assert both is not None
    owed = united([both, some[order[2]], some[order[0]]])
    assert owed is not None and owed.number == 2 and owed.origin is some[2].origin
    assert numbers(owed) == [2, 1, 0]


def test_a_long_chain_of_sums_that_share_their_parts_is_told_in_no_time():
    """Each holds the one before it twice, by two ways: there are 2^200 of them."""
    owed = single(0)
    for number in range(1, 201):
        other = united([owed, single(number)])
        owed = united([owed, other])
    assert len(numbers(owed)) == 201 and numbers(owed)[0] == 200


def test_a_split_contraction_contributes_and_a_sum_owes_both():
    program = graph(two_products, *SQUARES)
    product = NOWHERE, NOWHERE, SUM_X
    known, (first, second, total) = ran(program, {0: product, 1: product, 2: (SUM_X,) * 3})
    assert [numbers(known.owed(v, ("x",))) for v in (first, second, total)] == [[0], [1], [1, 0]]


def test_each_axis_owes_its_own():
    """Over y only the second product; what is owed over other axes than are named is all of it."""
    program = graph(two_products, *SQUARES)
    first, second = (NOWHERE, NOWHERE, SUM_X), (NOWHERE, NOWHERE, BOTH)
    known, (*_, total) = ran(program, {0: first, 1: second, 2: (SUM_X, BOTH, BOTH)})
    assert [numbers(known.owed(total, axes)) for axes in (("x",), ("y",), ("x", "y"), ("z",))] == [
        [1, 0],
        [1],
        [1, 0],
        [1, 0],
    ]


def test_what_is_settled_owes_nothing():
    known, (first, second, total) = ran(graph(two_products, *SQUARES), {0: (NOWHERE, NOWHERE, SUM_X)})
    assert numbers(known.owed(first, ("x",))) == [0]
    assert known.owed(second, ("x",)) is known.owed(total, ("x",)) is None


def test_what_comes_in_pending_is_no_contribution_of_the_program():
    program = graph(lambda x: x * 2.0, (8, 8))
    known = Contributions({})
    assert known.came_in(program.inputs[0]) and known.owed(program.inputs[0], ("x",)) is None
    known, (product,) = ran(program, {0: (SUM_X, layout(P(), ()), SUM_X)})
    assert not known.came_in(product) and len(numbers(known.owed(product, ("x",)))) == 1


def products_ran(program, known: Contributions) -> None:
    for node in program.nodes:
        if node.name == "dot_general":
            known.note(node, decision(node, (NOWHERE, NOWHERE), (SUM_X,)))


def test_a_carry_owes_what_it_began_with_and_what_each_iteration_adds():
    def f(x, u):
        return lax.scan(lambda c, _: (c + x @ u, None), x @ u, length=3)[0]

    program, known = graph(f, (8, 8), (8, 8)), Contributions({})
    scan = the("scan", program)
    (body,) = scan.bodies
    products_ran(program, known)
    known.enter(scan)
    products_ran(body, known)
    (add,) = (node for node in body.nodes if node.name == "add")
    known.note(add, decision(add, (SUM_X, SUM_X), (SUM_X,)))
    inside = Decisions(body, (), [], (Reshard(SUM_X, SUM_X),))
    operands = [SUM_X if v is program.nodes[0].outputs[0] else NOWHERE for v in scan.inputs]
    known.note(scan, decision(scan, operands, [SUM_X], (inside,)))
    assert numbers(known.owed(scan.outputs[0], ("x",))) == [1, 0]


def test_constants_of_a_loop_owe_what_they_owe_outside():
    def f(x, u):
        made = x @ u
        return lax.scan(lambda c, _: (c + made, None), jnp.zeros((8, 8)), length=3)[0]

    program, known = graph(f, (8, 8), (8, 8)), Contributions({})
    scan = the("scan", program)
    products_ran(program, known)
    known.enter(scan)
    owing = {known.owed(v, ("x",)) for v in scan.bodies[0].inputs}
    assert owing == {None, known.owed(program.nodes[0].outputs[0], ("x",))} and len(owing) == 2
