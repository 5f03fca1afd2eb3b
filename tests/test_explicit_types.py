"""Types of Explicit meshes as annotations: within `auto_axes` and `explicit_axes`, and where a mesh has both
kinds of axes.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.partition.choose import choose

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(EXPLICIT, EXPLICIT))


def ramp(*shape, dtype="float32"):
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(dtype)


def put(x, *spec, mesh=MESH):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def attend(cache_BTD, new_BD, query_BD, place):
    """One step of decoding: the keys, which are the values too, with a new one, and what a query reads of
    them.
    """
    cache_BTD = jax.lax.dynamic_update_slice(cache_BTD, new_BD[:, None], (0, place, 0))
    scores_BT = jnp.einsum("btd,bd->bt", cache_BTD, query_BD)
    weights_BT = jax.nn.softmax(jnp.where(jnp.arange(cache_BTD.shape[1]) <= place, scores_BT, -1e9))
    return jnp.einsum("bt,btd->bd", weights_BT, cache_BTD), cache_BTD


def decode(attention):
    """Layers of attention under `auto_axes` in a loop over stacked caches."""

    def step(caches_LBTD, x_BD, w_LDD, place):
        def layer(x_BD, carried):
            cache_BTD, w_DD = carried
            query_BD = jnp.einsum("bd,de->be", x_BD, w_DD, out_sharding=P("x", "y"))
            out_BD, cache_BTD = attention(cache_BTD, x_BD, query_BD, place)
            return x_BD + out_BD, cache_BTD

        x_BD, caches_LBTD = jax.lax.scan(layer, x_BD, (caches_LBTD, w_LDD))
        return x_BD, caches_LBTD

    return step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_with_attention_under_auto_axes_gathers_no_cache(dtype):
    attention = auto_axes(attend, out_sharding=(P("x", "y"), P("x", None, "y")))
    step = decode(attention)
    args = (
        put(ramp(3, 8, 64, 16, dtype=dtype), None, "x", None, "y"),
        put(ramp(8, 16, dtype=dtype), "x", "y"),
        put(ramp(3, 16, 16, dtype=dtype), None, "y", None),
        jnp.int32(5),
    )
    with jax.set_mesh(MESH):
        f = sx.shard_jit(step)
        plan = f.plan(*args)
        want, got = jax.jit(step)(*args), f(*args)
    one_cache = args[0].nbytes // (args[0].shape[0] * MESH.size)
    assert sum(c.total for c in plan.collectives) < one_cache
    for a, b in zip(got, want, strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_allclose(
            np.asarray(a, "float32"),
            np.asarray(b, "float32"),
            rtol=2e-2 if dtype == "bfloat16" else 1e-5,
            atol=1e-5,
        )


def test_entering_auto_axes_annotates_nothing():
    def f(x):
        return auto_axes(lambda x: jnp.sin(x) * 2.0, out_sharding=P(None, "y"))(x)

    seen = []
    with jax.set_mesh(MESH):
        f = sx.shard_jit(f, transforms=[lambda jaxpr, context: seen.append(jaxpr) or jaxpr])
        f.lower(put(ramp(8, 6), "x", "y"))
    sources = [note.source.split(" at ")[0] for _, note in sx.annotations_of(seen[0])]
    assert sources.count("reshard") == 1


def test_within_explicit_axes_types_are_annotations_again():
    def inner(x):
        return jax.sharding.reshard(jnp.sin(x), P("y", "x"))

    def f(x):
        return auto_axes(
            lambda x: explicit_axes(inner, in_sharding=P("x", "y"))(x * 2.0) + 1.0, out_sharding=P("y", "x")
        )(x)

    x = ramp(8, 12)
    with jax.set_mesh(MESH):
        got, want = sx.shard_jit(f)(put(x, "x", "y")), jax.jit(f)(put(x, "x", "y"))
    assert got.sharding == want.sharding
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_mesh_of_both_kinds_of_axes():
    """What the type names is annotated; other dims are open, for Auto axes may split them."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO))

    def f(x, w):
        return jax.sharding.reshard(jnp.tanh(x @ w), P("x", None)) * 2.0

    x, w = put(ramp(8, 6), "x", None, mesh=mesh), put(ramp(6, 4), None, None, mesh=mesh)
    with jax.set_mesh(mesh):
        got, want = sx.shard_jit(f)(x, w), jax.jit(f)(x, w)
    assert jax.typeof(got) == jax.typeof(want)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: jnp.tanh(x) * 2.0,
        lambda x, w: (x @ w, x.T),
        lambda x, w: sx.annotate(jnp.sin(x), P("x", "y")),
        lambda x, w: jax.sharding.reshard(x, P(None, "x")),
    ],
)
def test_results_on_a_mesh_of_both_kinds_of_axes(program):
    """What their types name they have; completion decides over which Auto axes other dims are split."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO))
    x, w = put(ramp(8, 8), "x", None, mesh=mesh), put(ramp(8, 8), None, "y", mesh=mesh)
    with jax.set_mesh(mesh):
        got, want = sx.shard_jit(program)(x, w), jax.jit(program)(x, w)
        shapes = jax.eval_shape(sx.shard_jit(program), x, w)
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, shapes)), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and c.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


PROGRAMS = {
    "elementwise": lambda x, w: jnp.tanh(x) * 2.0,
    "product": lambda x, w: jnp.einsum("ij,jk->ik", x, w, out_sharding=P("x", None)),
    "rows": lambda x, w: x.sum(1),
    "columns": lambda x, w: x.sum(0),
    "transposed": lambda x, w: x.T,
    "cast": lambda x, w: x.astype("bfloat16"),
    "summed up": lambda x, w: jnp.cumsum(jax.sharding.reshard(x, P("x", None)), 1),
    "resharded": lambda x, w: jax.sharding.reshard(x, P(None, "x")),
    "another order": lambda x, w: jax.sharding.reshard(x, P("y", "x")) + 1.0,
    "spread": lambda x, w: jax.lax.broadcast_in_dim(x, (3, 8, 8), (1, 2), out_sharding=P(None, "x", "y")),
    "split": lambda x, w: jax.lax.reshape(x, (4, 2, 8), out_sharding=P("x", None, "y")),
    "tree": lambda x, w: {"a": x * 2.0, "b": (w * 2.0, x[:, None] * w)},
    "auto inside": lambda x, w: auto_axes(lambda x: x.T + 1.0, out_sharding=P("y", None))(x),
    "replicated": lambda x, w: jax.sharding.reshard(x, P()) * 2.0,
    "constants": lambda x, w: (jnp.zeros((8, 8)), x + jnp.arange(8.0), jnp.arange(16.0) * 2.0),
    "a scalar": lambda x, w: (x * x).sum(),
    "owing nothing": lambda x, w: jnp.einsum("ij,kj->ik", x, w, out_sharding=P()),
    "nested": lambda x, w: sx.shard_jit(lambda x: x.T * 2.0)(x) + 1.0,
    "nested, resharding": lambda x, w: sx.shard_jit(lambda x: jax.sharding.reshard(x, P("y", None)))(x),
}
OUTER = {
    "called": lambda f: f,
    "jit": lambda f: jax.jit(lambda *args: f(*args)),
    "shard_jit": lambda f: sx.shard_jit(lambda *args: f(*args)),
    "grad": lambda f: jax.jit(
        jax.grad(lambda *args: sum(y.astype("float32").sum() for y in jax.tree.leaves(f(*args))))
    ),
}


@pytest.mark.promotes_ranks
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_types_that_jit_gives(name, outer):
    program, wrap = PROGRAMS[name], OUTER[outer]
    x, w = put(ramp(8, 8), "x", "y"), put(ramp(8, 8), None, "y")
    with jax.set_mesh(MESH):
        want, got = wrap(jax.jit(program))(x, w), wrap(sx.shard_jit(program))(x, w)
        shapes = jax.eval_shape(wrap(sx.shard_jit(program)), x, w)
    for a, b, shape in zip(*map(jax.tree.leaves, (got, want, shapes)), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        assert shape.shape == b.shape and shape.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=1e-5, atol=1e-6)


def test_where_jax_refuses_completion_decides():
    """A sort along a split dim, a product whose result two operands would split alike, and a sharding that
    does not divide.
    """
    x, w = put(ramp(8, 8), "x", "y"), put(ramp(8, 8), "y", "x")
    for program in (lambda x, w: jnp.sort(x, 0), lambda x, w: x @ w, lambda x, w: (x[:5] * 2.0) @ w[:, :3]):
        with jax.set_mesh(MESH):
            with pytest.raises(Exception, match="shard"):
                jax.jit(program)(x, w)
            got = sx.shard_jit(program)(x, w)
            text = sx.shard_jit(program).plan(x, w).text(400)
            text = " ".join(text.split())  # titles wrap
            assert text.count("No Explicit types, so completion decides. JAX: ") == 1
            assert re.search(r"JAX: [^()]*.*? \(at \S*test_explicit_types.py:\d+\)", text), text
        np.testing.assert_allclose(got, jax.jit(program)(np.asarray(x), np.asarray(w)), rtol=1e-5, atol=1e-6)


WITHOUT_A_TYPE = {  # programs of a table and of indices, both of which are split over the same axis
    "rows": lambda x, i: x[i],
    "rows of its gradient": lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x),
    "put into rows": lambda x, i: x.at[i].multiply(x),
    "a batch of lookups": lambda x, i: jax.vmap(lambda row, k: row[k])(x, i),
    "a batch by another's columns": lambda x, i: jax.vmap(lambda column, k: column[k], (1, 0))(x, i),
    "repeated": lambda x, i: jnp.repeat(x, 2, 0),
    "selected": lambda x, i: jnp.select([x > 0.5, x > 0.0], [x, x.T], 0.0),
    "where it is": lambda x, i: jnp.nonzero(x > 0.5, size=8),
    "a triangular solve": lambda x, i: jax.scipy.linalg.solve_triangular(
        x + 9.0 * jnp.eye(8), x.T, lower=True
    ),
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", WITHOUT_A_TYPE)
def test_where_results_have_no_type_completion_decides(name, spec):
    """JAX says so by errors of several kinds, and for one it has no words."""
    program, x, i = WITHOUT_A_TYPE[name], ramp(8, 8), np.arange(8, dtype="int32")[::-1] % 5
    got = sx.shard_jit(program, mesh=MESH, in_shardings=(spec, P("x")))(x, i)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(program)(x, i)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_table_that_zero_splits_along_its_features():
    """For the axis does not divide its rows."""

    def step(table, i):
        value, grad = jax.value_and_grad(lambda table: (table[i] ** 2).mean())(table)
        return table - 0.1 * grad, value

    mesh, table, i = jax.make_mesh((8,), ("data",)), ramp(13, 16), np.arange(8, dtype="int32")
    train = sx.shard_jit(
        step, mesh=mesh, in_shardings=(None, P("data")), transforms=[sx.zero.Zero("data", stage=3)]
    )
    assert "completion decides" in " ".join(train.plan(table, i).text(400).split())
    for got, want in zip(train(table, i), jax.jit(step)(table, i), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_spec_of_the_users_own_that_names_an_axis_twice_is_refused():
    with pytest.raises(Exception, match="duplicate entries for `?'?x"):
        sx.shard_jit(lambda x: jax.sharding.reshard(x, P("x", "x")), mesh=MESH)(ramp(8, 8))


def grouped(x, w):
    """A convolution of each channel with a kernel of its own."""
    kernel, numbers = jnp.repeat(w[:, None, None], 4, 2), ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        x, kernel, [2], [(0, 1)], None, [2], numbers, feature_group_count=4
    ).sum()


def in_a_loop(x, w):
    return jax.lax.scan(lambda total, _: (total + grouped(x, w), None), 0.0, None, length=2)[0]


FORMS = {  # of the gradients of each of a batch
    "compiled": lambda f, mesh: sx.shard_jit(jax.vmap(jax.grad(f, (0, 1))), mesh=mesh),
    "a batch of compiled": lambda f, mesh: jax.vmap(sx.shard_jit(jax.grad(f, (0, 1)), mesh=mesh)),
    "compiled again": lambda f, mesh: jax.jit(jax.vmap(jax.grad(sx.shard_jit(f, mesh=mesh), (0, 1)))),
}


@pytest.mark.once
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("f", [grouped, in_a_loop])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_where_a_rule_of_jax_gives_up_without_a_word(kind, f, form):
    """That which batches grouped convolutions does where a transposed one is given a type, though it be of
    Auto axes and say nothing. Without a mesh in context none has one.
    """
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    args = ramp(4, 2, 8, 4), ramp(4, 3)
    wanted = jax.jit(jax.vmap(jax.grad(f, (0, 1))))(*args)
    compiled = FORMS[form](f, mesh)
    for got, want in zip(compiled(*args), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    if form == "compiled" and kind == EXPLICIT:
        placed = (put(x, mesh=mesh) for x in args)
        text = " ".join(compiled.plan(*placed).text(400).split())
        assert "completion decides. JAX: NotImplementedError" in text


def test_the_plan_of_what_closes_over_arrays():
    """Which are moved off the mesh before."""
    table = jnp.arange(12.0).reshape(3, 4) + 0.5
    step = sx.shard_jit(lambda x: x @ table.T, mesh=MESH, in_shardings=P("x"))
    x = ramp(8, 4)
    assert "x" in str(step.plan(x))
    np.testing.assert_allclose(step(x), x @ np.asarray(table).T, rtol=1e-6)


def test_a_program_is_chosen_once_for_its_types_and_for_its_arguments(monkeypatch):
    """Types tell when the results are typed, committed arguments when the program is lowered."""
    chosen = []
    monkeypatch.setattr("shardax.program.choose", lambda *a, **kw: chosen.append(1) or choose(*a, **kw))
    with jax.set_mesh(MESH):
        f = sx.shard_jit(lambda x, w: (x.T + w, w * 2.0))
        f(put(ramp(8, 8), "x", "y"), put(ramp(8, 8)))
        f(put(ramp(8, 8), "x", "y"), put(ramp(8, 8)))
        assert len(chosen) == 1
        f(put(ramp(8, 8), "y"), put(ramp(8, 8)))
    assert len(chosen) == 2


def test_an_argument_on_a_mesh_of_other_names_than_the_context():
    """JAX refuses it; here it comes in as it lies, and the result is typed on the mesh in context."""
    context = jax.make_mesh((2, 4), ("a", "b"), axis_types=(EXPLICIT, EXPLICIT))
    x = ramp(8, 8)
    with jax.set_mesh(context):
        got = sx.shard_jit(lambda x: jnp.tanh(x) * 2.0)(put(x, "x"))
    assert got.sharding.mesh == context
    np.testing.assert_allclose(got, np.tanh(x) * 2.0, rtol=1e-6)


def test_a_linear_solve():
    """Whose equation has several programs, each by its name, which its derivative looks for."""

    def f(x, b):
        matvec = lambda v: x.T @ (x @ v) + 2.0 * v  # noqa: E731
        cg = lambda mv, b: jax.scipy.sparse.linalg.cg(mv, b)[0]  # noqa: E731
        return jax.lax.custom_linear_solve(matvec, b, cg, symmetric=True).sum(), jnp.sin(x)

    x, b = ramp(8, 4), ramp(4)
    with jax.set_mesh(MESH):
        got = jax.value_and_grad(sx.shard_jit(f), (0, 1), has_aux=True)(put(x), put(b))
    want = jax.value_and_grad(f, (0, 1), has_aux=True)(x, b)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


LAYERS, WIDTH, HIDDEN = 6, 64, 256
ADAM = optax.adam(1e-2)


def accumulate(params, opt, x_KBD, hidden=None, residual=None):
    """A step that adds up the gradients of microbatches, each through layers in a loop; `hidden` and
    `residual` are the out_sharding of the layers' products.
    """

    def loss(params, x_BD):
        def layer(h_BD, w):
            up_BF = jnp.einsum("bd,df->bf", h_BD, w["up"], out_sharding=hidden)
            return h_BD + jnp.einsum("bf,fd->bd", jnp.tanh(up_BF), w["down"], out_sharding=residual), None

        return jnp.mean((jax.lax.scan(layer, x_BD, params)[0] - 1) ** 2)

    def add(total, x_BD):
        value, grads = jax.value_and_grad(loss)(params, x_BD)
        return jax.tree.map(jnp.add, total, (value, grads)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
    (value, grads), _ = jax.lax.scan(add, zeros, x_KBD)
    updates, opt = ADAM.update(grads, opt, params)
    return value, optax.apply_updates(params, updates), opt


def accumulation(mesh, rows, up, down, hidden=None, residual=None, dtype="float32"):
    """The step with its out_shardings, and its arguments on a mesh."""
    params = {
        "up": put((0.1 * ramp(LAYERS, WIDTH, HIDDEN)).astype(dtype), *up, mesh=mesh),
        "down": put((0.1 * ramp(LAYERS, HIDDEN, WIDTH)).astype(dtype), *down, mesh=mesh),
    }
    x_KBD = put(ramp(4, rows, WIDTH, dtype=dtype), None, "x", mesh=mesh)
    return partial(accumulate, hidden=hidden, residual=residual), (params, ADAM.init(params), x_KBD)


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_in_a_loop_are_summed_as_often_as_on_auto_axes(stage, dtype):
    """The types of the backward pass say that gradients are whole in each layer of each microbatch: those
    are what JAX gave them, not what anybody requested.
    """
    sent = {}
    for kind in (AUTO, EXPLICIT):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            step, args = accumulation(mesh, 1024, (), (), dtype=dtype)
            f = sx.shard_jit(step, transforms=[sx.zero.Zero("x", stage)] if stage else [])
            sent[kind] = f.plan(*args).comm_bytes
    assert sent[EXPLICIT] <= sent[AUTO]


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("rows", [64, 4096])
def test_tensor_parallelism_by_out_sharding_sums_gradients_outside_the_loop(rows):
    """A product's out_sharding names what the forward pass computes; its cotangents' sums wait."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        step, args = accumulation(
            mesh, rows, (None, None, "y"), (None, "y"), hidden=P("x", "y"), residual=P("x")
        )
        f = sx.shard_jit(step)
        weights = sum(w.nbytes // 2 for w in args[0].values())  # on each device
        over_x = [c for c in f.plan(*args).collectives if "x" in c.axes]
        assert sum(c.total for c in over_x) < 1.6 * weights  # an all_reduce over 4: 1.5 of them
        want, got = jax.jit(step)(*args), f(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
