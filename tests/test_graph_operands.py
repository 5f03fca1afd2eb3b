"""Which inputs of bodies the operands of loops and branches are, and such nodes with other constants."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardax.graph.graph import Value
from shardax.graph.operands import carries_of, constants_of, operands_of, scan_params, with_constants
from tests.graphs import graph, names, primitives, the

pytestmark = pytest.mark.quick


def scanned(a, b, c):
    """a is a constant, b is carried, c is a stack."""
    return lax.scan(lambda x, y: (x + a * y, x), b, c)


def until(a, b, c):
    """a is read by the condition, b by the body, c is carried."""
    return lax.while_loop(lambda x: (x < a).all(), lambda x: x + b, c)


def branches(i, a, b):
    return lax.cond(i, lambda a, b: a * b, lambda a, b: a + b, a, b)


def found(name):
    f, first, last = {
        "scan": (scanned, (4,), (3, 4)),
        "while": (until, (4,), (4,)),
        "cond": (branches, jax.ShapeDtypeStruct((), "bool"), (4,)),
    }[name]
    program = graph(f, first, (4,), last)
    return program, the(name, program)


@pytest.mark.parametrize(
    "name, operands, carries",
    [
        ("scan", [[0, 1, 2]], [1]),
        ("while", [[0, 2], [1, 2]], [2]),
        ("cond", [[1, 2], [1, 2]], []),
    ],
)
def test_operands(name, operands, carries):
    node = found(name)[1]
    assert list(map(list, operands_of(node))) == operands
    assert list(carries_of(node)) == carries
    shapes = [[v.shape for v in body.inputs] for body in node.bodies]
    mine = [[node.inputs[k].shape[(name == "scan" and k == 2) :] for k in places] for places in operands]
    assert mine == shapes


@pytest.mark.parametrize(
    "name, expected",
    [
        ("scan", ["a=scan.a"]),
        ("while", ["a=while.a", "b=while1.a"]),
        ("cond", ["b=cond.a c=cond.b", "b=cond1.a c=cond1.b"]),
    ],
)
def test_constants(name, expected):
    program, node = found(name)
    called = names(program)
    texts = [" ".join(f"{called[a]}={called[b]}" for a, b in pairs) for pairs in constants_of(node)]
    assert texts == expected


def test_other_nodes_have_none():
    node = the("sin", graph(jnp.sin, (4,)))
    assert (operands_of(node), list(carries_of(node)), constants_of(node)) == ([], [], [])


@pytest.mark.parametrize("name", ["scan", "while", "cond"])
def test_the_same_constants_give_the_same_node(name):
    node = found(name)[1]
    new = with_constants(node, constants_of(node), [body.nodes for body in node.bodies])
    assert new.inputs == node.inputs
    assert [body.inputs for body in new.bodies] == [body.inputs for body in node.bodies]
    assert list(map(primitives, new.bodies)) == list(map(primitives, node.bodies))
    assert new.params.get("num_consts", 1) == 1


@pytest.mark.parametrize("name", ["scan", "while"])
def test_a_constant_that_no_body_reads_is_dropped(name):
    node = found(name)[1]
    outer, inner = Value(node.inputs[0].aval), Value(node.inputs[0].aval)
    new = [[*pairs, (outer, inner)] for pairs in constants_of(node)]
    assert with_constants(node, new, [body.nodes for body in node.bodies]).inputs == node.inputs
    kept = [[n for n in body.nodes if n.name not in ("mul", "lt")] for body in node.bodies]
    less = with_constants(node, constants_of(node), kept)
    assert less.inputs == node.inputs[1:]
    counts = {k: v for k, v in less.params.items() if k in ("num_consts", "cond_nconsts", "body_nconsts")}
    assert counts == ({"num_consts": 0} if name == "scan" else {"cond_nconsts": 0, "body_nconsts": 1})


def test_all_branches_keep_what_one_reads():
    node = found("cond")[1]
    nothing, one = [[], []], list(node.bodies[1].nodes)
    whole = with_constants(node, constants_of(node), [[], one])
    assert [len(whole.inputs), *(len(body.inputs) for body in whole.bodies)] == [3, 2, 2]
    for body in node.bodies:
        body.outputs = [body.inputs[1]]
    (index, _, b), less = node.inputs, with_constants(node, constants_of(node), nothing)
    assert less.inputs == [index, b]


def test_parameters_that_count_no_operands():
    assert scan_params(found("scan")[1]) == {"length": 3, "reverse": False, "unroll": 1}
