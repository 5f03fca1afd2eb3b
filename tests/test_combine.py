"""Small reductions that are one in the local program: which they are, what waits for them, and what the plan
says of them.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.cost import chips
from shardax.cost.chips import NOMINAL
from shardax.cost.network import Network
from shardax.explain import hlo
from shardax.ledger import causes
from shardax.ledger.collectives import collectives, comm_bytes
from shardax.partition.reasons import Settled
from shardax.passes import combine
from tests.test_program import mesh_of

pytestmark = pytest.mark.promotes_ranks

V5E = replace(
    chips.V5E, latency=0.0, start=1e-6
)  # whatever is sent starts in a microsecond, however many hops it goes


@pytest.fixture(params=[NOMINAL, V5E], ids=lambda chip: chip.name)
def chip(request, monkeypatch):
    """A chip for which programs are built, whose starts cost next to nothing, or a microsecond."""
    whole = combine.combined
    monkeypatch.setattr(combine, "combined", lambda jaxpr, sizes: whole(jaxpr, Network(sizes, request.param)))
    return request.param


real = pytest.mark.parametrize("chip", [V5E], indirect=True, ids=lambda chip: chip.name)


def array(*shape, dtype="float32"):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def local(f, shapes, chip=V5E, sizes=(4, 2)):
    """What runs on each device of a shard_map of f, all of whose arguments are replicated, and how it was
    before.
    """
    mesh = mesh_of(*sizes)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P(),) * len(shapes), out_specs=P(), check_vma=False)
    before = jax.make_jaxpr(mapped)(
        *(jax.ShapeDtypeStruct(*s) if isinstance(s, tuple) else s for s in shapes)
    )
    return before, combine.combined(before, Network(dict(mesh.shape), chip))


def counted(f, shapes, chip=V5E):
    """The operands of the reductions that are left of f; it gives the same bits, and sends no byte more."""
    before, after = local(f, shapes, chip)
    args = [np.asarray(array(*v.shape) * 8).astype(v.dtype) for v in before.in_avals]
    have, want = (jax.jit(jax.extend.core.jaxpr_as_fun(program))(*args) for program in (after, before))
    jax.tree.map(np.testing.assert_array_equal, have, want)
    sizes = {"x": 4, "y": 2}
    assert comm_bytes(collectives(after, sizes)) <= comm_bytes(collectives(before, sizes))
    return [(*c.axes, *map(str, c.operands[0].shape)) for c in collectives(after, sizes)]


def f32(*shape):
    return (shape, "float32")


def of(*words):
    return tuple(map(str, words))


def test_sums_of_one_key_are_one():
    f = lambda a, b, c: (lax.psum(a, "x"), lax.psum(b, "x"), lax.psum(c.sum(), "x"))  # noqa: E731
    assert counted(f, [f32(3, 5), f32(7), f32(9)]) == [of("x", 23)]


def test_axes_dtypes_and_kinds_are_not_mixed():
    def f(a, b, n, m):
        both = lax.psum(a, ("x", "y")), lax.psum(b, ("x", "y"))
        return (
            both,
            lax.psum(a * 2, "x"),
            lax.psum(b * 2, "y"),
            lax.psum(n, "x"),
            lax.pmax(n * 3, "x"),
            lax.pmax(m, "x"),
        )

    found = counted(f, [f32(3), f32(5), ((3,), "int32"), ((2, 2), "int32")])
    assert found == [of("x", "y", 8), of("x", 3), of("y", 5), of("x", 3), of("x", 7)]


def test_groups_of_devices_are_not_mixed():
    f = lambda a, b: (lax.psum(a, "x", axis_index_groups=[[0, 1], [2, 3]]), lax.psum(b, "x"))  # noqa: E731
    assert counted(f, [f32(3), f32(5)]) == [of("x", 3), of("x", 5)]


def test_several_operands_of_one_equation():
    f = lambda a, b, c: (lax.psum((a, b), "x"), lax.psum(c, "x"))  # noqa: E731
    assert counted(f, [f32(3), f32(5), f32(2, 2)]) == [of("x", 12)]


@pytest.mark.parametrize(("chip", "small"), [(NOMINAL, 21), (V5E, 16_500)], ids=["nominal", "v5e"])
def test_large_ones_are_left(chip, small):
    """Those that are sent no faster than a collective starts."""
    f = lambda a, b: (lax.psum(a, "x"), lax.psum(b, "x"))  # noqa: E731
    assert counted(f, [f32(small), f32(small)], chip) == [of("x", 2 * small)]
    large = small * 22 // 20
    assert counted(f, [f32(large), f32(large)], chip) == [of("x", large)] * 2
    assert counted(f, [f32(small), f32(large)], chip) == [of("x", small), of("x", large)]


def test_what_depends_on_another_stays_apart():
    """The second is of the first; what comes beside the second is combined with the first."""

    def f(a, b):
        first = lax.psum(a, "x")
        return lax.psum(first * a, "x"), lax.psum(b, "x")

    assert counted(f, [f32(3), f32(5)]) == [of("x", 8), of("x", 3)]


def test_small_readers_wait():
    """The readers of `a` come before `b` is made, and are put after it; they are small, so `b` need not be
    sent alone.
    """

    def f(x, y):
        a = lax.psum(x, "x")
        small = jnp.tanh(a) / (1 + a)
        large = jnp.sin(y) @ y
        return small, large, lax.psum(large[0, :3], "x")

    assert counted(f, [f32(3), f32(600, 600)]) == [of("x", 6)]


@pytest.mark.parametrize("reads", ["its shape", "its bodies", "its effects"])
def test_large_readers_do_not_wait(reads, capfd):
    def reader(a, y):
        match reads:
            case "its shape":
                return y * a[0]
            case "its bodies":
                return lax.fori_loop(0, 3, lambda _, z: z * a, a)
        jax.debug.print("{}", a)
        return a

    def f(x, y):
        a = lax.psum(x, "x")
        z = reader(a, y)
        return a, z, lax.psum(jnp.cos(y[0, :3]), "x")

    assert [c[0] for c in counted(f, [f32(3), f32(600, 600)])] == ["x", "x"]
    capfd.readouterr()


def test_what_waits_is_little_in_all():
    """Each step of these is small; microbatches that are unrolled so stay one after the other."""

    def f(*xs):
        total = jnp.zeros(())
        for x in xs:
            y = jnp.sin(x) * lax.psum(x.max(), "x")
            for _ in range(8):
                y = jnp.cos(y) + x
            total += y.sum()
        return total

    assert counted(f, [f32(20_000)] * 4) == [of("x")] * 4


def test_two_chains_go_side_by_side():
    """Of each chain every sum waits for the one before; they are combined across."""

    def f(a, b):
        for _ in range(10):
            a = jnp.tanh(lax.psum(a, "x"))
        for _ in range(10):
            b = jnp.tanh(lax.psum(b, "x"))
        return a, b

    assert len(collectives(local(f, [f32(1), f32(2)])[1], {"x": 4, "y": 2})) == 10


def test_groups_that_would_wait_for_each_other():
    """`a` waits for `d`, and `c` for `b`: of {a, b} and {c, d} one can be combined."""

    def f(x, y):
        d = lax.psum(x, ("x", "y"))
        b = lax.psum(y, "x")
        a = lax.psum(d * 2, "x")
        c = lax.psum(b * 2, ("x", "y"))
        return a, b, c, d

    assert len(counted(f, [f32(3), f32(5)])) == 3


def test_bodies_of_loops():
    def f(x, ys):
        def body(carry, y):
            return carry + lax.psum(y, "x"), lax.psum(y.sum(), "x")

        return lax.scan(body, x, ys)

    assert counted(f, [f32(3), f32(6, 3)]) == [of("x", 4)]
    _, after = local(f, [f32(3), f32(6, 3)])
    (found,) = collectives(after, {"x": 4, "y": 2})
    assert found.trips == 6 and [p.nbytes for p in found.parts] == [18, 6] and found.total == 6 * 24


def test_nothing_to_combine_leaves_the_program():
    f = lambda a, b: (lax.psum(a, "x"), lax.psum(b, "y"))  # noqa: E731
    before, after = local(f, [f32(3), f32(3)])
    assert after is before and combine.combined(before, None) is before


def loss(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return (x**2).mean()


PARAMS = [(array(256, 256) / 16, array(256)) for _ in range(3)]
X = array(4096, 256)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def built(f=step, **how):
    return sx.shard_jit(f, mesh=mesh_of(4), in_shardings=(None, P("x")), **how)


def test_gradients_of_biases(chip):
    """On a real chip they are one sum with the loss; on the nominal one a kilobyte is too large for that."""
    plan = built().plan(PARAMS, X)
    biases = [(769,)] if chip is V5E else [(), *[(256,)] * 3]
    assert (
        sorted(c.shape for c in plan.collectives if len(c.shape) < 2) == biases
    )  # the others: of the gradients of weights
    assert plan.comm_bytes == 3 * 4 * (256 * 256 + 256) * 3 // 2 + 6
    lowered = built().lower(PARAMS, X)
    assert hlo.counts(plan.collectives) == hlo.counts(hlo.lowered(lowered.compiler_ir()))


def test_values_with_donation_and_gradients(chip):
    new, value = built(donate_argnums=0)(jax.tree.map(jnp.array, PARAMS), X)
    wanted, wanted_value = jax.jit(step)(PARAMS, X)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), new, wanted)
    grads = jax.grad(built(loss))(PARAMS, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, jax.grad(loss)(PARAMS, X)
    )


@real
def test_the_plan_tells_of_each(chip):
    plan = built().plan(PARAMS, X)
    (c,) = [c for c in plan.collectives if isinstance(c.cause, causes.Combined)]
    assert c.reason == "4 as one: sum of reduce_sum" and len(c.parts) == 4
    assert sum(part.nbytes for part in c.parts) == c.nbytes and {part.shape for part in c.parts} == {
        (),
        (256,),
    }
    assert all(isinstance(part.cause, Settled) and "test_combine.py" in part.line for part in c.parts)
    told = plan.because(c).splitlines()
    assert len(told) == 2 and max(told).startswith("sum of reduce_sum at tests/test_combine.py:"), told
    assert min(told).startswith("3 x sum of reduce_sum at tests/test_combine.py:"), told
    assert f"4 as one: sum of reduce_sum\n    {told[0]}" in str(plan)
    line = next(part.line for part in c.parts if part.shape).rpartition("/")[2]
    assert "all_reduce over x of f32[256]: sum of reduce_sum" in plan.why(line)
    assert "all_reduce[4 as one" in built().lower(PARAMS, X).as_text(debug_info=True)


@real
def test_the_program_as_source(chip):
    plan = built().plan(PARAMS, X)
    source, namespace = plan.source(), plan.source_objects()
    assert "lax.psum(" in source and "concatenate([" in source
    exec(source, namespace)
    got = jax.jit(namespace["program"](mesh_of(4)))(*jax.tree.leaves((PARAMS, X)))
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(PARAMS, X)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)
