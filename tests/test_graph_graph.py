"""Values, nodes and graphs: sizes, lines, the order of a walk, and what is dropped because nothing reads it."""

import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardax import _jax
from shardax.graph.graph import Value, without_unread
from tests.graphs import graph, primitives, the

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "shape, dtype, nbytes",
    [((3, 4), "float32", 48), ((), "bfloat16", 2), ((5,), "bool", 5), ((0, 4), "int8", 0)],
)
def test_bytes(shape, dtype, nbytes):
    value = Value(jax.core.ShapedArray(shape, jnp.dtype(dtype)))
    assert (value.shape, value.nbytes) == (shape, nbytes)


def test_bytes_of_random_keys():
    """Their dtype has an element size of its own."""
    program = graph(lambda seed: jax.random.wrap_key_data(seed, impl="threefry2x32"), (4, 2), dtype="uint32")
    assert program.outputs[0].nbytes == 4 * program.outputs[0].itemsize
    assert program.outputs[0].itemsize >= 4


def nested(x):
    return lax.scan(lambda c, y: (lax.cond(y > 0, jnp.sin, jnp.cos, c), jnp.tanh(y)), x[0], x)


def test_bodies_come_before_their_node():
    program = graph(nested, (4,))
    walked = [node.name for node in program.walk()]
    assert walked.index("tanh") < walked.index("scan")
    assert walked.index("sin") < walked.index("cond") < walked.index("scan")
    assert sorted(walked) == sorted(primitives(program).replace("[", " ").replace("]", " ").split())


def test_lines_are_the_users():
    file, _, number = the("tanh", graph(lambda x: jnp.tanh(x), (4,))).line.rpartition(":")
    assert (file, number.isdecimal()) == (__file__, True)


def test_lines_are_the_users_through_a_jit_of_a_library():
    """JAX traces a jit by itself: what a library computes there has frames of the library alone."""
    library: dict = {"jax": jax}
    code = "f = jax.jit(lambda x: g(x))\ng = lambda x: jax.numpy.tanh(x)\ncall = lambda x: f(x)"
    exec(compile(code, f"{sysconfig.get_path('purelib')}/library.py", "exec"), library)
    file, _, _ = the("tanh", graph(lambda x: library["call"](x), (4,))).line.rpartition(":")
    assert file == __file__
    alone = graph(library["f"], (4,)).nodes[0].eqn
    assert _jax.user_line(alone.source_info).endswith("library.py:2")


def test_what_nothing_reads_is_dropped():
    program = graph(lambda x: (jnp.sin(x), jnp.cos(jnp.tanh(x)), x * 2), (4,))
    program.outputs = program.outputs[2:]
    assert primitives(without_unread(program)) == "mul"
    assert primitives(program) == "sin tanh cos mul"


def test_what_a_body_does_not_give_is_dropped_there_too():
    program = graph(lambda x: lax.scan(lambda c, y: (c + y, None), x[0] * 0, x)[0], (4,))
    loop = the("scan", program)
    (body,) = loop.bodies
    body.nodes.insert(0, the("tanh", graph(jnp.tanh, (4,))))
    assert "tanh" in primitives(program)
    assert "tanh" not in primitives(without_unread(program))


def test_what_has_effects_stays():
    program = graph(lambda x: (jax.debug.callback(np.sum, jnp.sin(x)), x * 2)[1], (4,))
    program.outputs = program.inputs[:1]
    assert primitives(without_unread(program)) == "sin debug_callback"
