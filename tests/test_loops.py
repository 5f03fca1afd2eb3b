"""Loops and branches: the same results as under `jax.jit`, and sums that wait until the loop is over."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.graph.inline import from_jaxpr
from shardax.spmd_rules.maps import carries_of_map
from tests.test_program import assert_same, mesh_of


def array(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def recurrent(w, start, xs):
    """A recurrence whose weight gradient adds up over the trips."""

    def trip(carry, x):
        carry = jnp.tanh(x + carry @ w)
        return carry, carry.sum(-1)

    carry, sums = lax.scan(trip, start, xs)
    return (carry**2).sum() + (sums**2).sum()


def layers(weights, x, remat=lambda f: f):
    """Stacked layers, Megatron fashion: the first product splits columns, the second rows."""

    @remat
    def layer(x, weights):
        return x + jnp.tanh(x @ weights[0]) @ weights[1], None

    return (lax.scan(layer, x, weights)[0] ** 2).sum()


def accumulated(w, xs):
    """Gradient accumulation over microbatches."""

    def trip(total, x):
        return total + jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w), None

    return lax.scan(trip, jnp.zeros_like(w), xs)[0]


def accumulated_until(w, xs, n):
    """The same, as often as an argument says."""
    return lax.fori_loop(
        0, n, lambda i, total: total + jax.grad(lambda w: (jnp.tanh(xs[i] @ w) ** 2).sum())(w), w
    )


def branches(i, x, w):
    """Each branch contracts a split dim, and so does what is added."""
    return lax.switch(i, [lambda x: x @ w, lambda x: (2 * x) @ w], x) + x @ w


RECURRENT = (array(6, 6), array(8, 6), array(5, 8, 6))
ROWS = (P(), P("x"), P(None, "x"))
STACK = ((0.2 * array(3, 6, 9), 0.2 * array(3, 9, 6)), 0.2 * array(8, 6))
MEGATRON = ((P(None, None, "y"), P(None, "y")), P("x"))

PROGRAMS = {
    "recurrent": (jax.grad(recurrent), RECURRENT, ROWS),
    "recurrent, uneven": (jax.grad(recurrent), (array(5, 5), array(7, 5), array(3, 7, 5)), ROWS),
    "layers": (jax.value_and_grad(layers), STACK, MEGATRON),
    "layers, uneven rows": (jax.value_and_grad(layers), (STACK[0], 0.2 * array(5, 6)), MEGATRON),
    "layers, remat": (jax.grad(lambda w, x: layers(w, x, jax.checkpoint)), STACK, MEGATRON),
    "accumulated": (accumulated, (array(6, 5), array(4, 8, 6)), (P(), P(None, "x"))),
    "fori": (lambda x: lax.fori_loop(0, 5, lambda i, c: c * 0.5 + i, x), (array(7, 6),), (P("x", "y"),)),
    "while": (
        lambda x: lax.while_loop(lambda c: (c**2).sum() < 99, lambda c: c * 1.5, x),
        (array(7, 6),),
        (P("x"),),
    ),
    "cond": (
        lambda x, w: lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: 2 * x, x),
        (array(7, 6), array(6, 6)),
        (P("x"), P("y")),
    ),
    "switch": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: x[::-1]], x),
        (np.int32(2), array(7, 6)),
        (P(), P("x")),
    ),
    "nested": (
        lambda x: lax.scan(lambda c, r: (lax.fori_loop(0, 3, lambda i, c: c + r, c), c), x[0], x)[1],
        (array(5, 7),),
        (P(None, "x"),),
    ),
    "no trips": (
        lambda x, xs: lax.scan(lambda c, x: (c + x, c), x, xs),
        (array(7), array(0, 7)),
        (P("x"), P()),
    ),
    "reversed": (
        lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x, reverse=True),
        (array(5, 7),),
        (P(None, "y"),),
    ),
    "rotated, uneven": (
        jax.grad(lambda x: (jnp.roll(x.T, 3, 1) * jnp.roll(x, -2, 0).T).sum()),
        (array(7, 6),),
        (P("x"),),
    ),
    "counted backwards": (
        lambda x: lax.scan(
            lambda i, r: (i + 2, r * lax.convert_element_type(i, "float32")), jnp.int32(1), x, reverse=True
        ),
        (array(8, 6),),
        (P(("y", "x")),),
    ),
    "open number of trips": (
        accumulated_until,
        (array(6, 5), array(4, 8, 6), np.int32(3)),
        (P(), P(None, "x"), P()),
    ),
    "one trip": (
        lambda x: lax.scan(lambda c, r: (jnp.maximum(c, r), r * 2), x[0] - 1, x),
        (array(1, 6),),
        (P(None, "x"),),
    ),
    "mapped rows": (lambda x: lax.map(jnp.cumsum, x), (array(8, 6),), (P("x"),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_give_what_they_give_on_one_device(name):
    f, args, specs = PROGRAMS[name]
    assert_same(f, args, specs)


def sent(f, args, specs):
    """(kind, axes, trips) of every collective."""
    found = sx.shard_jit(f, mesh=mesh_of(4, 2), in_shardings=specs).plan(*args).collectives
    return Counter((c.kind, c.axes, c.trips) for c in found)


def test_weight_gradient_of_a_recurrence_is_reduced_once():
    assert sent(*PROGRAMS["recurrent"]) == {("all_reduce", ("x",), 1): 1}


def test_accumulated_gradient_is_reduced_once():
    assert sent(*PROGRAMS["accumulated"]) == {("all_reduce", ("x",), 1): 1}


def test_microbatches_that_are_asked_to_be_split_are():
    """Where the trips were split, each device would have whole microbatches in memory. (Smaller ones are
    gathered, and columns of w split.)
    """

    def step(w, batch, split_each):
        micro = batch.reshape(8, 768, 16)
        micro = (
            jax.lax.with_sharding_constraint(micro, NamedSharding(mesh_of(4), P(None, "x")))
            if split_each
            else micro
        )
        return accumulated(w, micro)

    w, batch = array(16, 512), array(6144, 16)
    run = sx.shard_jit(step, mesh=mesh_of(4), in_shardings=(None, P("x")), static_argnums=2)
    trips, each = (run.plan(w, batch, split_each) for split_each in (False, True))
    assert [c.kind for c in trips.collectives] == ["all_reduce"]
    assert [(c.kind, c.nbytes) for c in each.collectives[:-1]] == [("all_to_all", 3 * batch.nbytes // 16)]
    assert 2 * (each.memory().peak - 2 * w.nbytes) < trips.memory().peak - 2 * w.nbytes
    np.testing.assert_allclose(
        run(w, batch, True), jax.jit(accumulated)(w, batch.reshape(8, 768, 16)), rtol=1e-5, atol=1e-4
    )


def test_what_a_trip_needs_settled_is_settled_once_a_trip():
    """The residual stream is read by the next product: it cannot wait, and is not reduced again after the
    loop.
    """
    assert sent(layers, *PROGRAMS["layers"][1:])["all_reduce", ("y",), 3] == 1
    assert sent(*PROGRAMS["layers"])["all_reduce", ("y",), 3] == 2


def averaged(x, means):
    """Means of clusters, which the next trip reads, and a sum of all of them, which none does."""

    def trip(carry, _):
        means, total = carry
        near = jax.nn.one_hot(((x[:, None] - means) ** 2).sum(-1).argmin(1), len(means))
        return (near.T @ x / len(x), total + near.T @ jnp.sin(x)), None

    return lax.scan(trip, (means, jnp.zeros_like(means)), None, length=4)[0]


@pytest.mark.promotes_ranks
def test_what_the_next_trip_settles_anew_does_not_wait():
    args, specs = (array(16, 4), array(3, 4)), (P("x"), P())
    assert sent(averaged, args, specs) == {("all_reduce", ("x",), 4): 1, ("all_reduce", ("x",), 1): 1}
    assert_same(averaged, args, specs)


def test_a_sum_rides_a_while_whose_condition_does_not_read_it():
    assert sent(*PROGRAMS["open number of trips"]) == {("all_reduce", ("x",), 1): 1}


def test_branches_that_all_owe_a_sum_leave_it_to_who_reads_it():
    args, specs = (np.int32(1), array(8, 8), array(8, 6)), (P(), P(None, "x"), P("x"))
    assert sent(branches, args, specs) == {("all_reduce", ("x",), 1): 1}
    assert_same(branches, args, specs)


def test_loops_that_are_long_on_garbage_are_not_split_unevenly():
    """Newton's method on zeros, in padding, would never end."""
    root = lambda a: lax.while_loop(lambda x: abs(x * x - a) > 1e-3 * a, lambda x: (x + a / x) / 2, a)  # noqa: E731
    mesh = mesh_of(4, 2)
    f = lambda x: lax.map(root, sx.annotate(x, NamedSharding(mesh, P("x"))))  # noqa: E731
    np.testing.assert_allclose(
        sx.shard_jit(f, mesh=mesh)(np.arange(1, 6.0, dtype="float32")), np.sqrt(np.arange(1, 6)), 1e-2
    )


@pytest.mark.parametrize(
    "body, kinds",
    [
        (lambda c, x: (c + x, None), ["reduced"]),
        (lambda c, x: (c - jnp.sin(x) + x, None), ["reduced"]),
        (lambda c, x: (c + x, c), None),
        (lambda c, x: (c + c + x, None), None),
        (lambda c, x: (jnp.maximum(c + x, x), None), None),
        (lambda c, x: (lax.cond(x > 0, lambda c: c + x, lambda c: c, c), None), ["reduced"]),
        (lambda c, x: (lax.fori_loop(0, 3, lambda i, c: c + x * c, c), None), None),
        (lambda c, x: (lax.fori_loop(0, 3, lambda i, c: c + x, c), None), ["reduced"]),
        (lambda c, x: (x, c * 2), None),
        (lambda c, x: (x, x), ["last"]),
        (lambda c, x: (c, c * x), []),
        (lambda c, x: (c, jax.debug.print("{}", x)), None),
        (lambda c, x: (c + 1, x * jax.pure_callback(np.sin, x, x)), None),
    ],
)
def test_which_scans_are_maps(body, kinds):
    """A carry that passes unchanged JAX makes a constant, where its version does."""
    graph = from_jaxpr(jax.make_jaxpr(lambda c, xs: lax.scan(body, c, xs))(1.0, np.ones(4, "float32")))
    found = carries_of_map(next(node for node in graph.nodes if node.name == "scan"))
    assert (found if found is None else [c.kind for c in found if c.kind != "same"]) == kinds


def _recurrence(x, h, **how):
    def trip(h, x):
        h = jnp.tanh(0.9 * h + x)
        return h, (h, h.sum(), h > 0)

    return lax.scan(trip, h, x, **how)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [64, 8, 61])
def test_a_recurrence_keeps_the_block_of_its_stack(n, reverse):
    """Every device does all trips; of what they stack it keeps what is to lie there, and nothing is sent for
    that. 61 trips do not divide: their stack rests split by columns.
    """
    x, h = np.random.default_rng(0).normal(size=(n, 256)).astype("float32"), np.ones(256, "float32")
    f = lambda x, h: _recurrence(x, h, reverse=reverse)  # noqa: E731
    step = sx.shard_jit(f, mesh=mesh_of(4), in_shardings=(P(), P()), out_shardings=(P(), P("x")))
    plan = step.plan(x, h)
    assert not plan.collectives
    for have, want in zip(jax.tree.leaves(step(x, h)), jax.tree.leaves(f(x, h)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
    stacks = [v.aval.shape for eqn in _scans(plan) for v in eqn.outvars if len(v.aval.shape) == 2]
    assert stacks == [(n // 4, 256) if n % 4 == 0 else (n, 64)] * 2


def _scans(plan):
    (whole,) = (eqn for eqn in plan.local_jaxpr.eqns if eqn.primitive.name == "shard_map")
    return [eqn for eqn in whole.params["jaxpr"].eqns if eqn.primitive.name == "scan"]


def test_the_gradient_of_a_recurrence_keeps_its_block():
    """What the way back reads is whole; the gradient of the stack is not."""
    x, h = np.random.default_rng(0).normal(size=(64, 256)).astype("float32"), np.ones(256, "float32")
    f = jax.grad(lambda x, h: (_recurrence(x, h)[1][0] ** 2).sum())
    step = sx.shard_jit(f, mesh=mesh_of(4), in_shardings=(P("x"), P()), out_shardings=P("x"))
    plan = step.plan(x, h)
    assert [(c.kind, c.trips) for c in plan.collectives] == [("all_gather", 1)]
    assert [v.aval.shape for v in _scans(plan)[-1].outvars if v.aval.shape[:1] == (16,)] == [(16, 256)]
    np.testing.assert_allclose(step(x, h), f(x, h), rtol=1e-4, atol=1e-5)
