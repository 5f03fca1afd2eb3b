"""twins: which nodes of an unrolled program run as another one does."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.completion.complete import complete
from shardax.graph.graph import Graph, Node
from shardax.partition.twins import twins
from shardax.sharding import from_spec
from tests.graphs import graph

pytestmark = pytest.mark.quick

SIZES = {"x": 4, "y": 2}
UP, DOWN = (16, 32), (32, 16)


def found(program: Graph, specs) -> dict[Node, Node]:
    given = [from_spec(s, len(v.shape)) for s, v in zip(specs, program.inputs, strict=True)]
    return twins(complete(program, given, SIZES))


def stack(x, *weights):
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return x


def layers(count: int) -> list[tuple[int, int]]:
    return [UP, DOWN] * count


def specs(count: int) -> list[P]:
    return [P(None, "y"), P("y")] * count


def test_inner_layers_run_as_the_first_of_them():
    program = graph(stack, (8, 16), *layers(6))
    of = found(program, [P("x"), *specs(6)])
    place = {node: i for i, node in enumerate(program.nodes)}
    period = len(program.nodes) // 6
    assert {place[a]: place[b] for a, b in of.items()} == {
        i: period + i % period for i in range(2 * period, 5 * period)
    }


def test_layers_beside_something_else_stand_apart():
    """The one after the embedding, and the one before the loss."""

    def around(x, *weights):
        return jnp.exp(stack(jnp.sin(x), *weights))

    of = found(graph(around, (8, 16), *layers(6)), [P("x"), *specs(6)])
    assert Counter(Counter(id(twin) for twin in of.values()).values()) == {3: 4}


def test_what_is_said_of_nodes_counts():
    """As under strict mode, whether a line may send."""
    program = graph(stack, (8, 16), *layers(9))
    known = complete(
        program,
        [from_spec(s, len(v.shape)) for s, v in zip([P("x"), *specs(9)], program.inputs, strict=True)],
        SIZES,
    )
    one = program.nodes[len(program.nodes) // 2]
    assert one in twins(known) and one not in twins(known, lambda node: node is one)


def test_what_products_wish_for_counts():
    """A layer has other ways on offer where one of its values is wished for in another layout."""
    program = graph(stack, (8, 16), *layers(9))
    given = [from_spec(s, len(v.shape)) for s, v in zip([P("x"), *specs(9)], program.inputs, strict=True)]
    known = complete(program, given, SIZES)
    one = program.nodes[len(program.nodes) // 2]
    wishing = replace(known, wished={one.outputs[0]: from_spec(P("y"), 2)})
    assert one in twins(known) and one not in twins(wishing)


def test_to_read_one_value_twice_is_another_thing():
    """As in one layer the square of an argument, in the others a product of two."""

    def products(x, *weights):
        for i, (a, b) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            x = x + jnp.tanh(x @ (a * (a if i == 4 else b)))
        return x

    program = graph(products, (8, 16), *[(16, 16)] * 18)
    of = found(program, [P("x"), *[P()] * 18])
    square = next(node for node in program.nodes if node.name == "mul" and len(set(node.inputs)) == 1)
    assert square not in of and len(of) > 8 and square not in of.values()


def test_two_are_not_worth_it():
    assert not found(graph(stack, (8, 16), *layers(4)), [P("x"), *specs(4)])
    assert found(graph(stack, (8, 16), *layers(5)), [P("x"), *specs(5)])


def test_layers_with_other_shardings_are_others():
    def of_one_kind(count, other):
        kinds = [P(None, "y"), P("y")] * count + [other, P("y")] + [P(None, "y"), P("y")] * count
        return found(graph(stack, (8, 16), *layers(2 * count + 1)), [P("x"), *kinds])

    alike, apart = of_one_kind(4, P(None, "y")), of_one_kind(4, P("y"))
    assert len({id(twin) for twin in alike.values()}) == 4
    assert len(apart) < len(alike)


def updates(order):
    """The gradients of a stack, and an update of its weights, one after the other in this order."""

    def step(x, *weights):
        grads = jax.grad(lambda weights: (stack(x, *weights) ** 2).sum())(weights)
        new = {i: weights[i] - 0.1 * jnp.tanh(grads[i]) * jnp.sqrt(abs(grads[i]) + 1.0) for i in order}
        return [new[i] for i in range(len(weights))]

    return step


def test_the_order_of_what_belongs_to_a_layer_does_not_matter():
    """An optimizer that goes over a dict of layers comes to the 10th before the 2nd; here two go over a layer's
    weights the other way round."""
    count = 9
    sorted_, mixed = list(range(2 * count)), list(range(2 * count))
    mixed[6:8], mixed[10:12] = mixed[7:5:-1], mixed[11:9:-1]
    of = [
        found(graph(updates(order), (8, 16), *layers(count)), [P("x"), *specs(count)])
        for order in (sorted_, mixed)
    ]
    assert len(of[0]) == len(of[1]) > 100
    for node, twin in of[1].items():
        assert node.name == twin.name and node.in_shapes == twin.in_shapes


def test_twins_read_what_twins_make():
    """So alike parts are connected alike: of whom a node reads, and as which operand, its twin reads, too."""
    program = graph(updates(range(18)), (8, 16), *layers(9))
    of = found(program, [P("x"), *specs(9)])
    family, inside = {*of, *of.values()}, 0
    maker = {v: (node, k) for node in program.nodes for k, v in enumerate(node.outputs)}
    for node, twin in of.items():
        for mine, others in zip(node.inputs, twin.inputs, strict=True):
            if mine not in maker or not mine.shape:
                continue
            (a, result), (b, of_twin) = maker[mine], maker[others]
            assert (result, a.name, a.in_shapes) == (of_twin, b.name, b.in_shapes)
            if {a, b} <= family:
                assert of.get(a, a) is of.get(b, b)
                inside += 1
    assert inside > 100


def test_loops_are_twins_where_their_bodies_are_alike():
    def looped(x, *weights):
        for i, w in enumerate(weights):
            again = jnp.cos if i == 7 else jnp.sin
            y, _ = lax.scan(lambda c, _, w=w, f=again: (f(c) @ w, None), x, length=3)
            x = x + jnp.tanh(y @ w)
        return x

    program = graph(looped, (8, 16), *[(16, 16)] * 9)
    of = found(program, [P("x"), *[P()] * 9])
    scans = [node for node in program.nodes if node.name == "scan"]
    assert scans[7] not in of
    assert {of.get(scan, scan) for scan in scans[1:6]} == {scans[1]}


def test_programs_that_repeat_nothing_have_none():
    def f(x, w):
        return jnp.tanh(x @ w).sum() + jnp.sin(x).sum()

    assert found(graph(f, (8, 16), (16, 16)), [P("x"), P()]) == {}


def test_a_sum_over_all_layers_has_twins_too():
    """Of the norm of all weights, what adds the squares of each layer's, and which of them it adds."""

    def clipped(x, *weights):
        x = stack(x, *weights)
        pairs = zip(weights[::2], weights[1::2], strict=True)
        in_turn = [w for i, pair in enumerate(pairs) for w in (reversed(pair) if i % 2 else pair)]
        norm = jnp.sqrt(sum(jnp.sum(w**2) for w in in_turn))
        return x, [w / norm for w in weights]

    program = graph(clipped, (8, 16), *layers(8))
    of = found(program, [P("x"), *specs(8)])
    makers = {v: node for node in program.nodes for v in node.outputs}
    adding = [n for n in program.nodes if n.name == "add" and not n.outputs[0].shape]
    twins_ = [(a, of[a]) for a in adding if a in of]
    assert len(adding) >= 15 and len(twins_) >= 2 * 4
    for one, other in twins_:
        squares = [next(makers[v] for v in n.inputs if makers[v].name == "reduce_sum") for n in (one, other)]
        assert of[squares[0]] is squares[1]
