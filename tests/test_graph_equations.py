"""Equations in place of others: with the operands and results that are given, on the line of the old one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from shardax import _jax
from shardax.graph.equations import equations_of, instead_of
from tests.numpy_programs import evaluate

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


def given_back(x, y):
    double = 2 * x
    return x, double, y, double, x, 2.0


def carried_unchanged(x, y):
    (x, y), rows = jax.lax.scan(lambda c, row: ((c[0], c[1] + c[0]), row), (x[0], x[1]), y)
    return x, y, rows


@pytest.mark.parametrize("fun", [given_back, carried_unchanged])
def test_an_equation_makes_each_result(fun):
    """Also what the function, or JAX, gives back as it is."""
    wanted = jax.make_jaxpr(fun)(X, X)
    operands, (like, *_) = wanted.jaxpr.invars, made().eqns
    results = [_jax.new_variable(x) for x in wanted.out_avals]
    jaxpr = wanted.jaxpr.replace(eqns=equations_of(fun, operands, results, like), outvars=results)
    for one, other in zip(
        evaluate(ClosedJaxpr(jaxpr, wanted.consts), (X, 3 * X)), evaluate(wanted, (X, 3 * X)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_new_results_and_literals():
    jaxpr = made()
    (eqn,) = equations_of(lambda x: x * 2, jaxpr.invars[:1], None, jaxpr.eqns[0])
    assert eqn.invars[0] is jaxpr.invars[0]
    assert _jax.is_literal(eqn.invars[1])
    assert eqn.outvars[0] not in jaxpr.eqns[0].outvars
