"""Products over several dims of rows, for TPUs: as products of matrices where that is no copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardax.passes import tpu


def arrays(*shapes, dtype="float32"):
    return [jnp.asarray(np.random.RandomState(i).randn(*s), dtype) for i, s in enumerate(shapes)]


def products(jaxpr):
    """The ranks of what each product reads, and how many barriers there are."""
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive is lax.dot_general_p]
    barriers = sum(eqn.primitive is lax.optimization_barrier_p for eqn in jaxpr.eqns)
    return [tuple(v.aval.ndim for v in eqn.invars) for eqn in dots], barriers


def logits(x, w):
    """[b, s, m] and [v, m]: a loss of the logits, and its gradients."""

    def loss(x, w):
        return (jnp.einsum("bsm,vm->bsv", x, w).astype("float32") ** 2).mean()

    return jax.value_and_grad(loss, (0, 1))(x, w)


@pytest.mark.parametrize("dtype, inner", [("float32", 8), ("bfloat16", 16), ("float32", 24)])
def test_a_product_and_its_gradients(dtype, inner):
    args = arrays((32, inner, 40), (48, 40), dtype=dtype)
    closed = jax.make_jaxpr(logits)(*args)
    suited = tpu.suited(closed)
    ranks, barriers = products(suited.jaxpr)
    assert ranks == [(2, 2)] * 3
    assert barriers == 2  # of x and of the gradient of the logits, which two products read each
    got, want = (jax.jit(jaxpr_as_fun(each))(*args) for each in (suited, closed))
    for a, b in zip(got, want, strict=True):
        tol = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=tol, atol=tol)


@pytest.mark.parametrize(
    "spec, left, right, ranks",
    [
        ("absm,mn->absn", (4, 16, 8, 5), (5, 3), (2, 2)),  # three dims of rows
        ("mabs,mn->nabs", (5, 4, 16, 8), (5, 3), None),  # rows along the minor-most dim
        ("mn,bsm->bsn", (5, 3), (32, 8, 5), (2, 2)),
        ("bsm,tum->bstu", (32, 8, 5), (16, 8, 5), (2, 2)),  # of both
        ("bsmn,mnv->bsv", (32, 8, 4, 5), (4, 5, 3), None),  # of rows and of what is summed over
        ("bsm,bsn->mn", (32, 8, 5), (32, 8, 3), (2, 2)),
        ("bsm,sbn->mn", (32, 8, 5), (8, 32, 3), None),  # in another order
        ("bsm,mn->bsn", (8, 32, 5), (5, 3), None),  # the inner one is the longer one
        ("bsm,mn->bsn", (32, 6, 5), (5, 3), None),  # no whole tiles
        ("bmsk,mn->bskn", (32, 5, 8, 3), (5, 3), None),  # not beside each other
        ("gbsm,gmn->gbsn", (2, 32, 8, 5), (2, 5, 3), None),  # by group
        ("bm,mn->bn", (32, 5), (5, 3), None),
        ("bsm,mn->bsn", (32, 0, 5), (5, 3), (2, 2)),  # nothing
    ],
)
def test_which_products(spec, left, right, ranks):
    args = arrays(left, right)
    closed = jax.make_jaxpr(lambda x, y: jnp.einsum(spec, x, y))(*args)
    suited = tpu.suited(closed)
    if ranks is None:
        assert str(suited) == str(closed)
    else:
        assert products(suited.jaxpr)[0] == [ranks]
    (got,), (want,) = (jax.jit(jaxpr_as_fun(each))(*args) for each in (suited, closed))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_in_a_loop():
    """A body has matrices of its own."""

    def layers(x, w):
        return lax.scan(lambda h, w: (jnp.einsum("bsm,mn->bsn", h, w), None), x, w)[0]

    args = arrays((32, 8, 6), (3, 6, 6))
    closed = jax.make_jaxpr(layers)(*args)
    suited = tpu.suited(closed)
    (loop,) = [eqn for eqn in suited.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert products(loop.params["jaxpr"].jaxpr) == ([(2, 2)], 1)
    (got,), (want,) = (jax.jit(jaxpr_as_fun(each))(*args) for each in (suited, closed))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
