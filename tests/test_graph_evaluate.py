"""Programs, evaluated: calls inlined, each equation on its line and in its scopes."""

import jax
import numpy as np
import pytest

from shardax import _jax
from shardax.graph.evaluate import bound, evaluate

pytestmark = pytest.mark.quick

X = np.ones((4, 3), "float32")


def test_calls_are_inlined_on_their_lines():
    @jax.jit
    def inner(x):
        return jax.lax.sin(x)

    def f(x):
        with jax.named_scope("layer"):
            return inner(jax.lax.mul(x, x))

    closed = jax.make_jaxpr(f)(X)
    flat = jax.make_jaxpr(lambda x: evaluate(closed, [x]))(X)
    assert [eqn.primitive.name for eqn in flat.eqns] == ["mul", "sin"]
    lines = [_jax.user_line(eqn.source_info).rpartition("/")[2].partition(":")[0] for eqn in flat.eqns]
    assert lines == ["test_graph_evaluate.py"] * 2
    assert all("layer" in str(eqn.source_info.name_stack) for eqn in flat.eqns)


def test_what_jax_traces_apart_is_on_the_line_of_its_call():
    """JAX keeps no frames of the user's in what its own functions are made of."""
    closed = jax.make_jaxpr(lambda x: jax.numpy.where(x > 0, x, 0.0))(X)
    flat = jax.make_jaxpr(lambda x: evaluate(closed, [x]))(X)
    assert [eqn.primitive.name for eqn in flat.eqns] == ["gt", "broadcast_in_dim", "select_n"]
    lines = {_jax.user_line(eqn.source_info).rpartition("/")[2].partition(":")[0] for eqn in flat.eqns}
    assert lines == {"test_graph_evaluate.py"}


def test_parameters_may_change():
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.broadcast_in_dim(x, (2, 4, 3), (1, 2)))(X).eqns
    made = jax.make_jaxpr(lambda x: bound(eqn, [x], shape=(5, 4, 3)))(X)
    assert made.out_avals[0].shape == (5, 4, 3)
