"""What the graph of a program consists of: calls are inlined, loops keep their bodies, known integers are
literals.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.graph import annotations
from shardax.graph.inline import from_jaxpr, made_of
from tests.graphs import auto_mesh, graph, primitives, the

pytestmark = pytest.mark.quick

MESH = auto_mesh(x=2, y=2)
TABLE = np.arange(4, dtype="float32")
ZERO = np.float32(0)


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g * jnp.cos(x),))


def solved(a, b):
    return lax.custom_linear_solve(lambda x: a * x, b, lambda _, b: b / a, lambda _, b: b * a)


def on(*spec):
    return NamedSharding(MESH, P(*spec))


PROGRAMS = {  # a function of rows of four, and the nodes of its graph
    "jit": (lambda x: jax.jit(jnp.sin)(x), "sin"),
    "jit in jit": (lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2)(x), "sin mul"),
    "jit with shardings": (
        lambda x: jax.jit(jnp.sin, in_shardings=on("x"), out_shardings=on("y"))(x),
        "sharding_constraint sin sharding_constraint",
    ),
    "device_put": (lambda x: jax.device_put(x, on("x")), "sharding_constraint"),
    "custom_jvp": (with_jvp, "sin"),
    "custom_vjp": (with_vjp, "sin"),
    "gradient of custom_vjp": (lambda x: jax.vjp(with_vjp, x)[1](x)[0], "sin cos mul"),
    "remat": (jax.checkpoint(jnp.sin), "sin"),
    "gradient of remat": (
        lambda x: jax.vjp(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), x)[1](x)[0],
        "sin sin optimization_barrier sin cos cos mul mul",
    ),
    "linear solve": (lambda x: solved(x, x), "div"),
    "shard_map": (
        lambda x: jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(x),
        "annotate shard_map[sin] annotate",
    ),
    "scan": (lambda x: lax.scan(lambda c, y: (c + y, c), x, x[None]), "broadcast_in_dim scan[add]"),
    "while": (lambda x: lax.while_loop(lambda x: x.sum() < 3, jnp.sin, x), "while[reduce_sum lt][sin]"),
    "branch that is known": (
        lambda x: lax.platform_dependent(x, mosaic=jnp.sin, default=jnp.cos),
        "cos",
    ),
    "branch of a platform": (
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        "platform_index cond[sin][cos]",
    ),
    "search": (lambda x: jnp.searchsorted(TABLE, x), "search"),
    "nothing to concatenate": (lambda x: lax.concatenate([x[:0], x], 0), "slice"),
    "crop of padding": (lambda x: lax.pad(x, ZERO, [(0, 3, 0)])[:4] * 2, "pad mul"),
    "crop elsewhere": (lambda x: lax.pad(x, ZERO, [(0, 3, 0)])[1:4] * 2, "pad slice mul"),
    "crop of less": (lambda x: lax.pad(x, ZERO, [(0, 3, 0)])[:3] * 2, "pad slice mul"),
    "crop of padding before": (lambda x: lax.pad(x, ZERO, [(3, 0, 0)])[:4] * 2, "pad slice mul"),
    "update at a known place": (
        lambda x: lax.dynamic_update_slice(x, x[:2], (1,)),
        "slice pad iota ge lt and and select_n",
    ),
    "sum at a known place": (lambda x: x.at[1:3].add(x[:2]), "slice pad add"),
    "update at a place that is not known": (
        lambda x: lax.dynamic_update_slice(x, x[:2], (x[0].astype("int32"),)),
        "slice slice squeeze convert_element_type lt add select_n dynamic_update_slice",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nodes(name):
    f, nodes = PROGRAMS[name]
    assert primitives(graph(f, (4,))) == nodes


def test_a_program_that_is_called_twice_has_values_of_its_own_each_time():
    double = jax.jit(lambda x: x * 2)
    one, two = graph(lambda x: double(x) + double(x), (4,)).nodes[:2]
    assert one.eqn is two.eqn
    assert one.outputs[0] is not two.outputs[0]


def test_constants_are_literals():
    (node,) = graph(lambda x: x + TABLE, (4,)).nodes
    assert node.inputs[1].is_literal
    np.testing.assert_array_equal(node.inputs[1].literal, TABLE)


def test_few_integers_made_of_literals_are_literals():
    index = lambda x: x[jnp.concatenate([jnp.full(1, 1), jnp.full(2, 3)]).astype("int32")]  # noqa: E731
    program = graph(lambda x: lax.concatenate([lax.full((1,), 1), lax.full((2,), 3)], 0), (4,))
    assert not program.nodes
    np.testing.assert_array_equal(program.outputs[0].literal, [1, 3, 3])
    assert "concatenate" not in primitives(graph(index, (4,)))
    assert primitives(graph(lambda x: lax.full((17,), 1), (4,))) == "broadcast_in_dim"


def test_a_predicate_with_dims_becomes_one_of_all():
    each = jax.vmap(lambda x: lax.while_loop(lambda x: x < 3, lambda x: x * 2, x))
    loop = the("while", graph(each, (4,)))
    condition, body = loop.bodies
    assert condition.outputs[0].shape == ()
    assert primitives(condition).endswith("reduce_or")
    assert primitives(body).endswith("select_n")


def test_collectives_over_a_vmapped_axis_are_reductions():
    f = jax.vmap(lambda x: x / lax.psum(x, "rows") + lax.pmax(x, "rows"), axis_name="rows")
    found = primitives(graph(f, (4, 3)))
    assert "reduce_sum" in found and "reduce_max" in found and "psum" not in found and "pmax" not in found


def test_operands_and_results_of_an_island_lie_as_its_specs_say():
    island = jax.shard_map(lambda x: x, mesh=MESH, in_specs=P("x"), out_specs=P(None, "y"), check_vma=False)
    notes = [note for _, note in annotations.among(graph(island, (4, 4)).nodes)]
    assert [(note.dims, note.source) for note in notes] == [
        ((("x",), ()), "shard_map in_specs[0]"),
        (((), ("y",)), "shard_map out_specs[0]"),
    ]


def test_equal_annotations_are_made_once():
    f = lambda x: sx.annotate(x, P("x")) + sx.annotate(x, P("x")) + sx.annotate(x, P("y"))  # noqa: E731
    with jax.sharding.use_abstract_mesh(MESH):
        assert primitives(graph(f, (4,))).count("annotate") == 2


def test_scopes_of_calls_are_those_of_what_is_in_them():
    def f(x):
        with jax.named_scope("outer"):
            return jax.jit(jnp.sin)(x)

    assert "outer" in str(the("sin", graph(f, (4,))).scope)
    assert [call.primitive.name for call in the("sin", graph(f, (4,))).callers] == ["jit"]


def test_nodes_in_the_place_of_another_have_its_line_and_scope():
    with jax.named_scope("around"):
        program = graph(lambda x: jnp.tanh(x), (4,))
    (node,) = program.nodes
    nodes, outputs = made_of(lambda x: jnp.sin(x) / jnp.cos(x), node.inputs, node)
    assert [made.name for made in nodes] == ["sin", "cos", "div"]
    assert {made.line for made in nodes} == {node.line}
    assert {str(made.scope) for made in nodes} == {str(node.scope)}
    assert outputs == nodes[-1].outputs
    assert nodes[0].inputs == program.inputs


def test_an_open_jaxpr_will_do():
    assert primitives(from_jaxpr(jax.make_jaxpr(jnp.sin)(TABLE).jaxpr)) == "sin"
