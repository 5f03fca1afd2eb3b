"""PartitionSpecs that are unreduced, so that a sum is pending, or reduced, so that the gradient's is: as types of
Explicit meshes, as shardings of arguments and results, and as annotations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import shardax as sx

EXPLICIT = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
THREE = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
AUTO = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
LINE, AUTO_LINE = (
    jax.make_mesh((4,), ("x",), axis_types=(kind,)) for kind in (AxisType.Explicit, AxisType.Auto)
)  # y would split columns: less to sum, and an all_gather
OWING, REDUCED = P(unreduced={"x"}), P(reduced={"x"})


@pytest.fixture(autouse=True)
def explicit():
    with jax.set_mesh(EXPLICIT):
        yield


def ramp(*shape, dtype="float32"):
    return np.cos(np.arange(np.prod(shape))).reshape(shape).astype(dtype)


def put(x, *spec, **owing):
    return jax.device_put(jnp.asarray(x), P(*spec, **owing))


def settled(x):
    """The numbers of an array, whatever it owes."""
    spec = x.sharding.spec
    x = reshard(x, P(*spec.partitions)) if spec.unreduced else x
    return np.asarray(x.astype("float32") if x.dtype == jnp.bfloat16 else x)


def by_both(fun, *args, tolerance=1e-5, **of_jit):
    """The results of `shard_jit`, of the types and the numbers that `jax.jit` gives; and the kinds of the
    collectives.
    """
    expected, run = jax.jit(fun, **of_jit)(*args), sx.shard_jit(fun, **of_jit)
    results = run(*args)
    assert jax.tree.map(jax.typeof, results) == jax.tree.map(jax.typeof, expected)
    for result, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(settled(result), settled(other), tolerance, tolerance)
    return results, [c.kind for c in run.plan(*args).collectives]


def product(x, w, spec=OWING):
    return jnp.einsum("ab,bc->ac", x, w, out_sharding=spec)


@pytest.fixture
def owing():
    """An array of odd sizes that owes a sum over x, and its numbers."""
    x, w = ramp(7, 8), ramp(8, 5)
    return jax.jit(product)(put(x, None, "x"), put(w, "x")), x @ w


# Types of Explicit meshes

PRODUCTS = {
    "one axis": (EXPLICIT, P(None, "x"), P("x"), P(None, None, unreduced={"x"})),
    "another dim": (EXPLICIT, P("y", "x"), P("x"), P("y", None, unreduced={"x"})),
    "two axes": (EXPLICIT, P(None, ("x", "y")), P(("x", "y")), P(None, None, unreduced={"x", "y"})),
    "two of three": (THREE, P("y", ("x", "z")), P(("x", "z")), P("y", None, unreduced={"x", "z"})),
    "one of three": (THREE, P("x", "y"), P("y", "z"), P("x", "z", unreduced={"y"})),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_leaves_with_the_sum_that_its_out_sharding_owes(name, dtype):
    mesh, of_x, of_w, spec = PRODUCTS[name]
    with jax.set_mesh(mesh):
        x, w = (10 * ramp(4, 8)).astype(dtype), (10 * ramp(8, 6)).astype(dtype)
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
        args = put(x, *of_x), put(w, *of_w)
        result, sent = by_both(lambda x, w: product(x, w, spec), *args, tolerance=tolerance)
        assert result.sharding.spec == spec and sent == []
        expected = (x.astype("float64") @ w.astype("float64")).astype(settled(result).dtype)
        np.testing.assert_allclose(settled(result), expected, tolerance, 100 * tolerance)
        theirs = jax.jit(lambda x, w: product(x, w, spec))(*args)
        for ours, other in zip(result.addressable_shards, theirs.addressable_shards, strict=True):
            np.testing.assert_allclose(
                np.asarray(ours.data, "float32"), np.asarray(other.data, "float32"), tolerance, 1
            )


@pytest.mark.parametrize(
    "spec, kinds",
    [(P(), ["all_reduce"]), (P("x"), ["reduce_scatter"]), (P("y"), ["all_reduce"]), (OWING, [])],
)
def test_reshard_does_the_sum_that_an_argument_owes(spec, kinds):
    x, w = ramp(8, 8), ramp(8, 5)
    argument = jax.jit(product)(put(x, None, "x"), put(w, "x"))
    result, sent = by_both(lambda z: reshard(z, spec), argument)
    assert sent == kinds
    np.testing.assert_allclose(settled(result), x @ w, 1e-5, 1e-5)


def test_a_part_of_the_axes_is_settled_and_the_rest_still_owed():
    x, w = put(ramp(4, 8), None, ("x", "y")), put(ramp(8, 5), ("x", "y"))

    def two_steps(x, w):
        both = product(x, w, P(unreduced={"x", "y"}))
        return reshard(both, P("x", unreduced={"y"})), reshard(reshard(both, P(unreduced={"y"})), P())

    (part, full), _ = by_both(two_steps, x, w)
    assert part.sharding.spec == P("x", None, unreduced={"y"})
    np.testing.assert_allclose(full, ramp(4, 8) @ ramp(8, 5), 1e-5, 1e-5)


LINEAR = {
    "add": (lambda z: z + z, lambda n: n + n),
    "transpose": (lambda z: z.T, lambda n: n.T),
    "sum": (lambda z: z.sum(0), lambda n: n.sum(0)),
    "concatenate": (lambda z: jnp.concatenate([z, z]), lambda n: np.concatenate([n, n])),
    "a reduced factor": (
        lambda z: z * reshard(jnp.full((7, 5), 3.0), REDUCED),
        lambda n: 3 * n,
    ),
    "slice": (lambda z: z[1:3], lambda n: n[1:3]),
    "zeros": (lambda z: z + reshard(jnp.zeros((7, 5)), OWING), lambda n: n),
    "checkpoint": (jax.checkpoint(lambda z: z + z), lambda n: n + n),
    "jit": (jax.jit(lambda z: z + z), lambda n: n + n),
    "shard_jit": (sx.shard_jit(lambda z: z + z), lambda n: n + n),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_carries_the_sum_on(name, owing):
    fun, plain = LINEAR[name]
    argument, numbers = owing
    result, sent = by_both(fun, argument)
    assert result.sharding.spec.unreduced == {"x"} and sent == []
    np.testing.assert_allclose(settled(result), plain(numbers), 1e-5, 1e-5)


REFUSED = {
    "a number": lambda z: z + 1,
    "a product": lambda z: 2 * z,
    "a sine": jnp.sin,
    "negation": jnp.negative,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_gives_no_type_is_computed_on_the_sum(name, owing):
    """`jax.jit` refuses what is not linear, or what it has no rule for."""
    argument, numbers = owing
    run = sx.shard_jit(REFUSED[name])
    np.testing.assert_allclose(settled(run(argument)), REFUSED[name](numbers), 1e-5, 1e-5)


def test_a_value_that_owes_nothing_is_made_to_owe():
    """As in `jax.jit`, the first devices keep it, the others have zeros."""
    x = put(ramp(7, 5))
    result, sent = by_both(lambda x: reshard(2 * x, P(unreduced={"x"})), x)
    shards = [np.asarray(shard.data) for shard in result.addressable_shards]
    assert sent == []
    for shard, factor in zip(shards, [2, 2, 0, 0, 0, 0, 0, 0], strict=True):
        np.testing.assert_allclose(shard, factor * ramp(7, 5), 1e-6)


def test_a_loop_adds_up_what_is_owed():
    x, w = put(ramp(3, 7, 8), None, None, "x"), put(ramp(8, 5), "x")

    def total(xs, w):
        first = reshard(jnp.zeros((7, 5)), OWING)
        return jax.lax.scan(lambda total, x: (total + product(x, w), None), first, xs)[0]

    result, sent = by_both(total, x, w)
    assert sent == []
    np.testing.assert_allclose(settled(result), ramp(3, 7, 8).sum(0) @ ramp(8, 5), 1e-5, 1e-4)


# Gradients


def loss(weights, x):
    first, second = weights
    return (jnp.tanh(x @ first) @ second).sum()


@pytest.fixture
def weights():
    return put(ramp(8, 7), reduced={"x"}), put(ramp(7, 5), reduced={"x"})


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_reduced_weights_are_unreduced(inside, weights):
    x = put(ramp(12, 8), "x")
    expected = jax.grad(loss)((ramp(8, 7), ramp(7, 5)), ramp(12, 8))
    if inside:
        grads, sent = by_both(jax.grad(loss), weights, x)
        assert sent == []
    else:
        grads = jax.grad(sx.shard_jit(loss))(weights, x)
        theirs = jax.grad(jax.jit(loss))(weights, x)
        assert jax.tree.map(jax.typeof, grads) == jax.tree.map(jax.typeof, theirs)
    for grad, other in zip(grads, expected, strict=True):
        assert grad.sharding.spec.unreduced == {"x"}
        np.testing.assert_allclose(settled(grad), other, 1e-5, 1e-5)


def test_one_sum_for_all_microbatches():
    """The gradients of microbatches are added up before their sum over the devices is done."""

    def step(w, xs):
        grad = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
        zeros = reshard(jnp.zeros((8, 7)), OWING)
        total = jax.lax.scan(lambda total, x: (total + grad(w, x), None), zeros, xs)[0]
        return reshard(total, P("x"))

    with jax.set_mesh(LINE):
        result, sent = by_both(step, put(ramp(8, 7), reduced={"x"}), put(ramp(3, 12, 8), None, "x"))
    assert sent == ["reduce_scatter"]
    expected = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())(ramp(8, 7), ramp(36, 8))
    np.testing.assert_allclose(result, expected, 1e-5, 1e-4)


def test_weights_that_rest_split_and_are_gathered_as_reduced():
    """Fully sharded data parallelism: an all_gather, and its transpose, a reduce_scatter."""
    w, x = put(ramp(8, 7), "x"), put(ramp(12, 8), "x")
    grad = jax.grad(lambda w, x: jnp.tanh(x @ reshard(w, REDUCED)).sum())
    result, sent = by_both(grad, w, x)
    assert sent == ["all_gather", "reduce_scatter"] and result.sharding.spec == P("x", None)
    expected = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())(ramp(8, 7), ramp(12, 8))
    np.testing.assert_allclose(result, expected, 1e-5, 1e-5)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_through_a_sum_that_is_owed(inside):
    args = put(ramp(7, 8), None, "x"), put(ramp(8, 5), "x")
    fun = lambda x, w: (reshard(product(x, w), P()) ** 2).sum()  # noqa: E731
    if inside:
        grads, _ = by_both(jax.grad(fun, (0, 1)), *args)
    else:
        grads = jax.grad(sx.shard_jit(fun), (0, 1))(*args)
    expected = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(ramp(7, 8), ramp(8, 5))
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, 1e-5, 1e-5)


# Shardings of arguments and results


@pytest.mark.parametrize("spec", [OWING, REDUCED, P("y", unreduced={"x"}), P(reduced={"x", "y"})])
def test_out_shardings(spec):
    result, sent = by_both(lambda x: x + x, put(ramp(6, 5)), out_shardings=spec)
    assert sent == []
    assert (result.sharding.spec.unreduced, result.sharding.spec.reduced) == (spec.unreduced, spec.reduced)
    np.testing.assert_array_equal(settled(result), 2 * ramp(6, 5))


def test_in_shardings(owing):
    by_both(lambda z: z + z, owing[0], in_shardings=OWING)
    both = sx.shard_jit(lambda z: (reshard(z, P()), z), in_shardings=OWING)
    for x in (ramp(6, 5), put(ramp(6, 5))):  # which `jax.jit` refuses
        full, part = both(x)
        assert part.sharding.spec.unreduced == {"x"}
        np.testing.assert_array_equal(full, ramp(6, 5))
        np.testing.assert_array_equal(settled(part), ramp(6, 5))


def test_a_result_is_the_argument_of_the_next_call_and_may_be_donated(owing):
    argument, numbers = owing
    again = sx.shard_jit(lambda z: z + z, donate_argnums=0)
    result = again(again(sx.shard_jit(lambda z: z + z)(argument)))
    np.testing.assert_allclose(settled(result), 8 * numbers, 1e-5, 1e-5)
    compiled = again.lower(argument).compile()
    np.testing.assert_allclose(settled(compiled(argument)), 2 * numbers, 1e-5, 1e-5)
    assert argument.is_deleted()


def test_under_an_outer_jit(owing):
    argument, numbers = owing
    result = jax.jit(lambda z: sx.shard_jit(lambda z: z + z)(z + z))(argument)
    assert result.sharding.spec.unreduced == {"x"}
    np.testing.assert_allclose(settled(result), 4 * numbers, 1e-5, 1e-5)


def test_without_jit(owing):
    argument, numbers = owing
    with jax.disable_jit():
        np.testing.assert_allclose(
            sx.shard_jit(lambda z: reshard(z + z, P()))(argument), 2 * numbers, 1e-5, 1e-5
        )


def test_the_plan_says_what_rests_owing(owing):
    plan = sx.shard_jit(lambda z: (z + z, reshard(z, P()))).plan(owing[0])
    text = str(plan)
    assert "Arguments at rest: 140 B on each device\n  P(unreduced={'x'})\n    z  " in text
    assert "sum of argument\n    which it owes over x as it comes in" in text
    assert plan.in_shardings[0].spec.unreduced == plan.out_shardings[0].spec.unreduced == {"x"}
    program: dict = {}
    exec(plan.source(), program)
    run = jax.jit(program["program"](EXPLICIT))
    twice, full = run(owing[0])
    np.testing.assert_allclose(settled(twice), 2 * owing[1], 1e-5, 1e-5)
    np.testing.assert_allclose(full, owing[1], 1e-5, 1e-5)


def test_annotate_places_an_array_that_owes():
    for x in (ramp(6, 5), jnp.asarray(ramp(6, 5))):
        y = sx.annotate(x, P("y", unreduced={"x"}))
        assert y.sharding.spec.unreduced == {"x"} and y.sharding.spec.partitions[0] == "y"
        np.testing.assert_array_equal(settled(y), ramp(6, 5))


# Islands

ISLANDS = {
    "psum": (lambda z: jax.lax.psum(z, "x"), OWING, P()),
    "psum_scatter": (lambda z: jax.lax.psum_scatter(z, "x", tiled=True), OWING, P("x")),
    "linear": (lambda z: z + z, OWING, OWING),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_islands_take_and_give_what_owes(name):
    body, in_spec, out_spec = ISLANDS[name]
    argument = jax.jit(product)(put(ramp(8, 8), None, "x"), put(ramp(8, 5), "x"))
    by_both(lambda z: jax.shard_map(body, in_specs=in_spec, out_specs=out_spec)(z), argument)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_through_islands_of_reduced_weights(inside):
    w, x = put(ramp(8, 7), reduced={"x"}), put(ramp(12, 8), "x")

    def fun(w, x):
        island = jax.shard_map(jnp.matmul, in_specs=(P("x"), REDUCED), out_specs=P("x"))
        return jnp.tanh(island(x, w)).sum()

    grad = by_both(jax.grad(fun), w, x)[0] if inside else jax.grad(sx.shard_jit(fun))(w, x)
    expected = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())(ramp(8, 7), ramp(12, 8))
    np.testing.assert_allclose(settled(grad), expected, 1e-5, 1e-5)


# Annotations on Auto meshes. Sizes do not divide


def annotated(fun):
    """The function, and what it is without its annotations."""
    return (lambda *args: fun(sx.annotate, *args)), (lambda *args: fun(lambda x, spec: x, *args))


def owing_product(annotate, x, w):
    return annotate(annotate(x, P(None, "x")) @ annotate(w, P("x")), OWING)


ANNOTATED = {
    "settled by a sine": (lambda a, x, w: jnp.sin(owing_product(a, x, w)), ["all_reduce"]),
    "scattered": (lambda a, x, w: a(2 * owing_product(a, x, w), P("x")), None),
    "two products": (
        lambda a, x, w: a(owing_product(a, x, w) + owing_product(a, jnp.cos(x), w), P()),
        ["all_reduce"],
    ),
    "of a cosine": (lambda a, x, w: 3 * a(jnp.cos(x), OWING), ["all_reduce"]),
    "a result": (lambda a, x, w: owing_product(a, x, w), ["all_reduce"]),
    "an open dim": (
        lambda a, x, w: jnp.sin(a(a(x, P("x")) @ w, P(P.UNCONSTRAINED, unreduced={"x"}))),
        None,
    ),
    "two axes": (
        lambda a, x, w: jnp.sin(a(a(x, P(None, ("x", "y"))) @ w, P(unreduced={"x", "y"}))),
        ["all_reduce"],
    ),
    "a loop": (
        lambda a, x, w: jax.lax.scan(
            lambda c, row: (a(c + owing_product(a, row[None], w), OWING), None), jnp.zeros((1, 5), x.dtype), x
        )[0],
        ["all_reduce"],
    ),
    "a map": (lambda a, x, w: jax.lax.map(lambda row: a(row @ w, OWING), a(x, P("x"))), None),
    "a branch": (
        lambda a, x, w: jax.lax.cond(x[0, 0] > 0, lambda: owing_product(a, x, w), lambda: jnp.sin(x) @ w),
        None,
    ),
    "vmap": (lambda a, x, w: jax.vmap(lambda row: a(row @ a(w, P("x")), OWING))(x), None),
    "a gradient": (
        lambda a, x, w: jax.grad(lambda w: jnp.tanh(a(x, P("x")) @ a(w, REDUCED)).sum())(w),
        None,
    ),
    "a gradient through a sum": (
        lambda a, x, w: jax.grad(lambda w: (owing_product(a, x, w) ** 2).sum())(w),
        None,
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ANNOTATED)
def test_annotations_on_auto_axes(name, dtype):
    fun, kinds = ANNOTATED[name]
    run, plain = annotated(fun)
    x, w = ramp(7, 13, dtype=dtype), ramp(13, 5, dtype=dtype)
    with jax.set_mesh(AUTO):
        run = sx.shard_jit(run, mesh=AUTO)
        for _ in range(2):
            result = np.asarray(run(x, w), "float32")
        sent = [c.kind for c in run.plan(x, w).collectives]
    tolerance = 6e-2 if dtype == "bfloat16" else 1e-5
    expected = jax.jit(plain)(x.astype("float32"), w.astype("float32"))
    np.testing.assert_allclose(result, expected, tolerance, 2 * tolerance)
    assert kinds is None or sent == kinds


def test_reduced_weights_on_auto_axes_sum_their_gradients_once():
    """An annotation's transpose is reduced where it is unreduced, and the other way round."""

    def step(w, xs):
        grad = jax.grad(lambda w, x: jnp.tanh(sx.annotate(x, P("x")) @ sx.annotate(w, REDUCED)).sum())
        total = jax.lax.scan(lambda total, x: (total + grad(w, x), None), jnp.zeros((16, 5)), xs)[0]
        return sx.annotate(total, P("x"))

    run = sx.shard_jit(step, mesh=AUTO_LINE)
    w, xs = ramp(16, 5), ramp(3, 12, 16)
    with jax.set_mesh(AUTO_LINE):
        result = run(w, xs)
        assert [c.kind for c in run.plan(w, xs).collectives] == ["reduce_scatter"]
    expected = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())(w, xs.reshape(36, 16))
    np.testing.assert_allclose(result, expected, 1e-5, 1e-4)


def test_an_annotation_on_another_mesh_of_the_same_devices():
    other = Mesh(AUTO.devices.reshape(8), ("z",), axis_types=(AxisType.Explicit,))
    spec = NamedSharding(other, P(unreduced={"z"}))

    def fun(x, w):
        y = sx.annotate(sx.annotate(x, P(None, ("x", "y"))) @ w, spec)
        return jnp.sin(y)

    run = sx.shard_jit(fun, mesh=AUTO)
    with jax.set_mesh(AUTO):
        np.testing.assert_allclose(
            run(ramp(7, 13), ramp(13, 5)), np.sin(ramp(7, 13) @ ramp(13, 5)), 1e-5, 1e-5
        )
        (sent,) = run.plan(ramp(7, 13), ramp(13, 5)).collectives
    assert sent.kind == "all_reduce" and sent.devices == 8


def test_an_argument_that_owes_on_other_meshes_than_the_program():
    """On the Auto twin, and on one whose axes are other parts of the same devices, it is settled; on one that
    does not fit it is refused."""
    x = ramp(8, 8)
    fits = Mesh(AUTO.devices.reshape(2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    reversed_ = Mesh(
        AUTO.devices.ravel()[::-1].reshape(2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2
    )
    run = sx.shard_jit(lambda z: jnp.sin(2 * z), mesh=AUTO)
    for mesh, spec in (EXPLICIT, P("y", unreduced={"x"})), (fits, P("a", unreduced={"b"})):
        with jax.set_mesh(mesh):
            z = jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
        with jax.set_mesh(AUTO):
            np.testing.assert_allclose(run(z), np.sin(2 * x), 1e-6, 1e-6)
            (sent,) = run.plan(z).collectives
        assert (sent.kind, sent.devices) == ("all_reduce", 4)
    with jax.set_mesh(reversed_):
        z = jax.device_put(jnp.asarray(x), NamedSharding(reversed_, P(unreduced={"b"})))
    with jax.set_mesh(AUTO), pytest.raises(ValueError, match="argument #0 .* is unreduced over b .* fit"):
        run(z)


# Errors

BAD = {
    "a missing axis": (
        lambda x: sx.annotate(x, P(unreduced={"q"})),
        r"P\(unreduced={'q'}\), but the mesh .* no axis 'q'",
    ),
    "booleans": (lambda x: sx.annotate(x > 0, OWING), "dtype bool is given .*, and only numbers are summed"),
    "vmap over it": (
        lambda x: jax.vmap(lambda row: sx.annotate(row, OWING), spmd_axis_name="x")(x),
        "is unreduced or reduced over axis 'x', and vmap's spmd_axis_name",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_annotations_that_do_not_fit(name):
    fun, words = BAD[name]
    with jax.set_mesh(AUTO), pytest.raises(ValueError, match=words) as raised:
        sx.shard_jit(fun, mesh=AUTO)(ramp(6, 5))
    if name != "vmap over it":
        assert "test_unreduced.py:" in str(raised.value)


@pytest.mark.parametrize("spec", [OWING, REDUCED])
def test_an_array_owes_nothing_over_auto_axes(spec):
    words = (
        r"axis 'x' of the mesh \(x=4, y=2\) is Auto, and a jax.Array is unreduced or reduced over Explicit"
    )
    with jax.set_mesh(AUTO):
        with pytest.raises(ValueError, match=f"result .*{words}"):
            sx.shard_jit(lambda x: x, mesh=AUTO, out_shardings=spec)(ramp(6, 5))
        with pytest.raises(ValueError, match=f"value .*{words}"):
            sx.annotate(jnp.ones((6, 5)), spec)


@pytest.mark.skipif(not hasattr(jax.sharding, "UnreducedKind"), reason="this JAX owes sums only")
def test_maxima_are_owed_inside_and_refused_at_rest():
    kind = jax.sharding.UnreducedKind.max  # type: ignore[attr-defined]
    spec = P(None, unreduced={"x"}, unreduced_kind=kind)
    x = put(ramp(7, 8), None, "x")
    largest = lambda x: jax.lax.reduce_max(x, (1,), out_sharding=spec)  # noqa: E731
    result, sent = by_both(lambda x: reshard(largest(x), P()), x)
    np.testing.assert_array_equal(result, ramp(7, 8).max(1))
    assert sent == ["all_reduce"]
    with pytest.raises(ValueError, match="result is unreduced over x, unreduced_kind=max, and"):
        sx.shard_jit(largest)(x)
    with pytest.raises(ValueError, match="argument m is unreduced over x, unreduced_kind=max, and"):
        sx.shard_jit(lambda m: reshard(m, P()))(jax.jit(largest)(x))
