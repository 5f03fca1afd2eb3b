"""What the registry says of equations of a jaxpr; without devices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from shardax.spmd_rules import equations, registry
from shardax.spmd_rules.registry import LINEAR

pytestmark = pytest.mark.quick

X = jax.ShapeDtypeStruct((4, 6), "float32")
SETS = {"none": [], "first": [{0}], "second": [{1}], "either": [{0}, {1}], "both": [{0, 1}]}


def equation(f, *types):
    return jax.make_jaxpr(f)(*(types or (X, X))).jaxpr.eqns[-1]


@pytest.mark.parametrize(
    "f, operands",
    [
        (lambda x, y: x + y, "both"),
        (lambda x, y: x - y, "both"),
        (lambda x, y: x * y, "either"),
        (lambda x, y: x @ y.T, "either"),
        (lambda x, y: x / y, "first"),
        (lambda x, y: jnp.tanh(x), "none"),
        (lambda x, y: lax.max(x, y), "none"),
        (lambda x, y: x.astype("bfloat16"), "first"),
        (lambda x, y: lax.reduce_precision(x, 8, 7), "first"),
        (lambda x, y: x.astype("int32"), "none"),
        (lambda x, y: lax.cumsum(x), "first"),
        (lambda x, y: lax.pad(x, 0.0, [(1, 1, 0)] * 2), "first"),
        (lambda x, y: lax.pad(x, 1.0, [(1, 1, 0)] * 2), "both"),
        (lambda x, y: lax.scan(lambda c, r: (c, r), x, y)[0], "none"),
    ],
)
def test_in_what_an_equation_is_linear(f, operands):
    found = [set(some) for some in equations.linear_in(equation(f))]
    assert all(some in found for some in SETS[operands])
    assert (operands == "none") == (not found)


MOVED = {
    "elementwise": [
        lambda x, y: -x,
        lambda x, y: x * 2,
        lambda x, y: x.astype("bfloat16"),
        lambda x, y: x + y,
    ],
    "keeps_order": [
        lambda x, y: x.reshape(24),
        lambda x, y: x[None],
        lambda x, y: lax.broadcast_in_dim(x, (3, 4, 6), (1, 2)),
    ],
    "transposition": [lambda x, y: x.T],
    "": [
        lambda x, y: lax.rev(x, (0,)),
        lambda x, y: lax.reshape(x, (24,), dimensions=(1, 0)),
        lambda x, y: x[:2],
        lambda x, y: x @ y.T,
    ],
}


@pytest.mark.parametrize("kind, f", [(kind, f) for kind, some in MOVED.items() for f in some])
def test_what_becomes_of_elements(kind, f):
    eqn = equation(f)
    found = {
        "elementwise": equations.is_elementwise(eqn),
        "keeps_order": equations.keeps_order(eqn),
        "transposition": equations.is_transposition(eqn),
    }
    assert [name for name, holds in found.items() if holds] == [kind] * bool(kind)


def test_what_is_moved_and_cast_at_most():
    assert equations.moves(equation(lambda x, y: x.astype("bfloat16")))
    assert equations.moves(equation(lambda x, y: x.T)) and equations.moves(equation(lambda x, y: x[None]))
    assert not equations.moves(equation(lambda x, y: -x)) and not equations.moves(
        equation(lambda x, y: x + y)
    )


@pytest.mark.parametrize(
    "f, dear",
    [
        (lambda x, y: x @ y.T, True),
        (lambda x, y: lax.sort(x), True),
        (lambda x, y: lax.scan(lambda c, r: (c, r), x, y)[0], True),
        (lambda x, y: jax.jit(lambda z: jnp.fft.fft(z))(x), True),
        (lambda x, y: jax.jit(jnp.tanh)(x), False),
        (lambda x, y: x[y.astype("int32")[:, 0]], False),
    ],
)
def test_what_is_dear_to_do_again(f, dear):
    assert equations.is_dear(equation(f)) == dear


def test_random_bits_are_dear_and_no_products():
    eqn = equation(
        lambda seed: jax.random.bits(jax.random.key(seed), (8,)), jax.ShapeDtypeStruct((), "uint32")
    )
    assert equations.is_dear(eqn) and not equations.multiplies(eqn)


def test_primitives_of_users_count(monkeypatch):
    scaled_p, rules = Primitive("scaled_by_seven"), dict(registry.RULES)
    monkeypatch.setattr(registry, "RULES", rules)
    monkeypatch.setattr(equations, "RULES", rules)
    scaled_p.def_abstract_eval(lambda x: x)
    eqn = equation(lambda x, y: scaled_p.bind(x))
    assert not equations.linear_in(eqn) and not equations.is_dear(eqn)
    registry.register_rule(scaled_p, "... -> ...", passes=(LINEAR(0),), heavy=True)
    assert equations.linear_in(eqn) == [{0}] and equations.is_dear(eqn)
