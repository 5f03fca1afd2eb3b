"""Equations in place of others: with the operands and results that are given, on the line of the old one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardax import _jax
from shardax.graph.equations import equations_of, instead_of

pytestmark = pytest.mark.quick

X = np.ones((4, 3), "float32")


def made():
    def f(x, y):
        with jax.named_scope("layer"):
            return jnp.tanh(x * y)

    return jax.make_jaxpr(f)(X, X).jaxpr


def test_one_in_place_of_another():
    old = made().eqns[0]
    new = instead_of(old, lambda x, y: x - y)
    assert new.primitive.name == "sub"
    assert (new.invars, new.outvars) == (old.invars, old.outvars)
    assert _jax.user_line(new.source_info) == _jax.user_line(old.source_info) != ""
    assert str(new.source_info.name_stack) == "layer"


def test_scopes_stand_within_that_of_the_equation():
    def scoped(x, y):
        with jax.named_scope("all_reduce[small ones]"):
            return x - y

    new = instead_of(made().eqns[0], scoped)
    assert str(new.source_info.name_stack) == "layer/all_reduce[small ones]"


def test_it_has_to_be_one():
    with pytest.raises(ValueError):
        instead_of(made().eqns[0], lambda x, y: x - y * 2)


def test_several_follow_each_other_and_end_in_the_results():
    jaxpr = made()
    mul, tanh = jaxpr.eqns
    first, last = equations_of(lambda x: jnp.cos(jnp.sin(x)), mul.outvars, tanh.outvars, tanh)
    assert [e.primitive.name for e in (first, last)] == ["sin", "cos"]
    assert first.invars == mul.outvars
    assert first.outvars == last.invars
    assert last.outvars == tanh.outvars


def test_new_results_and_literals():
    jaxpr = made()
    (eqn,) = equations_of(lambda x: x * 2, jaxpr.invars[:1], None, jaxpr.eqns[0])
    assert eqn.invars[0] is jaxpr.invars[0]
    assert _jax.is_literal(eqn.invars[1])
    assert eqn.outvars[0] not in jaxpr.eqns[0].outvars
