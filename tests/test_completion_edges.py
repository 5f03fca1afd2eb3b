"""Which values completion ties to which, as text: dims that share a letter are split alike."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.completion.edges import LEVELS, edges_of, successor_edges
from shardax.graph import annotations
from shardax.graph.graph import Graph
from tests.graphs import auto_mesh, graph, names

pytestmark = pytest.mark.quick

MARKS = {"keep": "", "sum": "+", "unsplit": "!"}
WORDS = dict(zip(LEVELS, ("first", "second", "third", "last"), strict=True))


def ties(program: Graph) -> Iterator[str]:
    """The edges of the last node, in the letters i, j, ..., with the levels backward and forward."""
    called = names(program)
    for edge in edges_of(program.nodes[-1]):
        letters: dict[str, str] = {}

        def letter(factor, edge=edge, letters=letters):
            return letters.setdefault(factor, "ijklmn"[len(letters)]) + MARKS[edge.factors.type_of(factor)]

        def text(values, tensors, letter=letter):
            dims = [" ".join("".join(map(letter, dim)) or "1" for dim in tensor) for tensor in tensors]
            return ", ".join(f"{called[v]}[{d}]" for v, d in zip(values, dims, strict=True))

        factors = edge.factors
        sides = text(edge.operands, factors.operands), text(edge.results, factors.results)
        yield f"{sides[0]} -> {sides[1]} | {WORDS[edge.backward]}, {WORDS[edge.forward]}"


ONE = {
    "elementwise": (jnp.add, [(4, 8), (4, 8)], "a[i j], b[i j] -> add[i j] | first, first"),
    "scalars have no dims": (lambda a: a * 2, [(4,)], "a[i] -> mul[i] | first, first"),
    "moved": (jnp.transpose, [(4, 8)], "a[i j] -> transpose[j i] | first, first"),
    "taken apart": (lambda a: a.reshape(2, 4, 8), [(8, 8)], "a[ij k] -> reshape[i j k] | first, first"),
    "cut": (lambda a: a[1:3], [(4, 8)], "a[i j] -> slice[k j] | first, first"),
    "joined": (
        lambda a, b: jnp.concatenate([a, b]),
        [(4, 8), (2, 8)],
        "a[i j], b[k j] -> concatenate[l j] | first, first",
    ),
    "stacked": (
        lambda a, b: jnp.stack([a, b]),
        [(4, 8), (4, 8)],
        "a[i j], b[i j] -> stack[k! i j] | first, first",
    ),
    "contracted": (
        jnp.matmul,
        [(4, 8), (8, 3)],
        "a[i j+], b[j+ k] -> dot_general[i k] | second, second",
    ),
    "reduced": (lambda a: a.sum(0), [(4, 8)], "a[i+ j] -> reduce_sum[j] | second, second"),
    "repeated": (
        lambda a: jnp.broadcast_to(a, (5, 8)),
        [(8,)],
        "a[i] -> broadcast_in_dim[j i] | third, last",
    ),
    "sorted": (lax.sort, [(4, 8)], "a[i j!] -> sort[i j!] | first, first"),
}


@pytest.mark.parametrize("name", ONE)
def test_of_one_edge(name):
    f, shapes, expected = ONE[name]
    assert list(ties(graph(f, *shapes))) == [expected]


def test_operands_that_share_no_factor_have_edges_of_their_own():
    assert list(ties(graph(lambda a, b: lax.optimization_barrier((a, b)), (4,), (8,)))) == [
        "a[i] -> optimization_barrier[i] | first, first",
        "b[i] -> optimization_barrier1[i] | first, first",
    ]


def test_what_a_scan_carries_is_one_value_and_the_trips_of_stacks_are_whole():
    f = lambda a, b, c: lax.scan(lambda x, y: (x + y @ b, x), a, c)  # noqa: E731
    assert list(ties(graph(f, (4, 4), (4, 4), (3, 4, 4))))[:4] == [
        "b[i j] -> scan.a[i j] | first, first",
        "a[i j] -> scan.b[i j], scan.add[i j], scan[i j] | first, first",
        "c[i! j k] -> scan.c[j k] | first, first",
        "scan1[i! j k] -> scan.b[j k] | first, first",
    ]


def test_the_trips_of_a_map_are_split_alike():
    assert "a[i j!] -> scan[i k!] | first, first" in ties(graph(lambda a: lax.map(jnp.sin, a), (3, 4)))
    running = lambda a: lax.scan(lambda c, x: (jnp.sin(c * x), c), a[0], a)[1]  # noqa: E731
    assert not any("-> scan[i k!]" in edge for edge in ties(graph(running, (3, 4))))


def test_what_a_while_carries_is_one_value_in_its_condition_too():
    f = lambda a, b: lax.while_loop(lambda x: x.sum() < 3, lambda x: x + b, a)  # noqa: E731
    assert list(ties(graph(f, (4,), (4,))))[:2] == [
        "b[i] -> while1.a[i] | first, first",
        "a[i] -> while.a[i], while1.b[i], while1.add[i], while[i] | first, first",
    ]


def test_operands_and_results_of_branches_are_those_of_the_cond():
    f = lambda i, a: lax.cond(i, jnp.sin, lambda x: x * 2, a)  # noqa: E731
    assert list(ties(graph(f, jax.ShapeDtypeStruct((), "bool"), (4,))))[:2] == [
        "b[i] -> cond.a[i], cond1.a[i] | first, first",
        "cond[i] -> cond.mul[i], cond1.sin[i] | first, first",
    ]


def test_an_island_ties_nothing_to_its_body():
    island = jax.shard_map(jnp.sin, mesh=auto_mesh(x=2), in_specs=P("x"), out_specs=P("x"))
    (node,) = (node for node in graph(island, (4,)).nodes if node.bodies)
    around = {*node.inputs, *node.outputs}
    assert not any(around & {*edge.values} for edge in edges_of(node))


def test_a_result_lies_as_the_donated_argument_that_it_succeeds():
    program = graph(lambda a, b: (a + b, a - b), (4,), (4,))
    added, subtracted = program.nodes
    notes = [
        (added, annotations.Annotation((None,), "it follows an argument", "implied", like=1)),
        (subtracted, annotations.Annotation((None,), "an annotation", "inside")),
    ]
    (edge,) = successor_edges(program, notes)
    assert edge.values == [program.inputs[1], added.outputs[0]]
